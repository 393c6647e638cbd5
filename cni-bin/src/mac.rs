//! Ethernet addresses as the plugin reads, writes and compares them.

use std::fmt;
use std::str::FromStr;

/// A 48-bit Ethernet address; text form `aa:bb:cc:dd:ee:ff`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr([u8; 6]);

/// Text that is no Ethernet address of six hexadecimal pairs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a MAC address of the form aa:bb:cc:dd:ee:ff")]
pub struct InvalidMac(String);

impl MacAddr {
    /// ff:ff:ff:ff:ff:ff, every station.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// The address with these octets, in wire order.
    pub const fn new(octets: [u8; 6]) -> Self {
        Self(octets)
    }

    /// The octets in wire order.
    pub const fn octets(self) -> [u8; 6] {
        self.0
    }

    /// Whether an interface may carry it: neither multicast nor all zeros.
    pub fn is_station(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl TryFrom<&[u8]> for MacAddr {
    type Error = InvalidMac;

    fn try_from(bytes: &[u8]) -> Result<Self, InvalidMac> {
        <[u8; 6]>::try_from(bytes)
            .map(Self)
            .map_err(|_| InvalidMac(format!("{bytes:02x?}")))
    }
}

impl FromStr for MacAddr {
    type Err = InvalidMac;

    fn from_str(text: &str) -> Result<Self, InvalidMac> {
        let invalid = || InvalidMac(text.to_owned());
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().ok_or_else(invalid)?;
            // from_str_radix alone would take "+1" for a pair.
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(invalid());
            }
            *octet = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
        }
        if parts.next().is_some() {
            return Err(invalid());
        }
        Ok(Self(octets))
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refuses_what_is_almost_an_address() {
        for text in [
            "",
            "aa:bb:cc:dd:ee",
            "aa:bb:cc:dd:ee:ff:00",
            "aa:bb:cc:dd:ee:f",
            "+a:bb:cc:dd:ee:ff",
            "aa-bb-cc-dd-ee-ff",
            "aa:bb:cc:dd:ee:ff ",
        ] {
            assert!(text.parse::<MacAddr>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn multicast_and_zero_are_no_stations() {
        assert!(!MacAddr::BROADCAST.is_station());
        assert!(!MacAddr::new([0; 6]).is_station());
        assert!(MacAddr::new([2, 0, 0, 0, 0, 1]).is_station());
    }

    proptest! {
        #[test]
        fn text_form_reads_back(octets: [u8; 6]) {
            let mac = MacAddr::new(octets);
            prop_assert_eq!(mac.to_string().parse::<MacAddr>().unwrap(), mac);
        }
    }
}
