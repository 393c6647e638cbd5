//! Ethernet addresses as control hands them around.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An Ethernet address, in transmission order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

/// A text that is no address of a station.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no MAC address of a single station, like 02:00:00:00:00:01")]
pub struct MacError(String);

/// FNV-1a, 64 bits: small, and the same on every node and in every version. Not for secrets.
#[must_use]
pub fn fnv1a64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

impl Mac {
    /// A locally administered station address out of a hash.
    #[must_use]
    pub fn from_hash(hash: u64) -> Self {
        let [_, _, first, b, c, d, e, f] = hash.to_be_bytes();
        Self([(first & 0xfc) | 0x02, b, c, d, e, f])
    }
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let fault = || MacError(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts
                .next()
                .filter(|part| part.len() == 2 && !part.starts_with('+'))
                .ok_or_else(fault)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| fault())?;
        }
        // No group address, not all zero: is_valid_ether_addr() of the kernel.
        if parts.next().is_some() || bytes[0] & 1 != 0 || bytes == [0; 6] {
            return Err(fault());
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// The MAC that inner frames to a node carry: derived from its underlay address, so that no
/// node has to learn another's. `02:53` and the four bytes of an IPv4 address; `02:54` and the
/// 32-bit FNV-1a hash of an IPv6 address.
#[must_use]
pub fn router_mac(underlay: IpAddr) -> Mac {
    let (second, [a, b, c, d]) = match underlay {
        IpAddr::V4(v4) => (0x53, v4.octets()),
        IpAddr::V6(v6) => {
            let hash = v6.octets().iter().fold(0x811c_9dc5_u32, |hash, &byte| {
                (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
            });
            (0x54, hash.to_be_bytes())
        }
    };
    Mac([0x02, second, a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        let mac: Mac = "02:00:5e:10:00:ff".parse().unwrap();
        assert_eq!(mac.to_string(), "02:00:5e:10:00:ff");
        for bad in [
            "",
            "02:00:5e:10:00",
            "02:00:5e:10:00:ff:1",
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "02-00-5e-10-00-ff",
            "+2:00:00:00:00:01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }

    #[test]
    fn hashed_addresses_are_local_and_of_one_station() {
        for hash in [0, u64::MAX, 0x1234_5678_9abc_def0] {
            assert_eq!(Mac::from_hash(hash).0[0] & 0x03, 0x02);
        }
    }

    #[test]
    fn router_addresses_follow_the_underlay() {
        let v4 = router_mac("10.0.0.1".parse().unwrap());
        assert_eq!(v4.to_string(), "02:53:0a:00:00:01");
        // FNV-1a of sixteen zero bytes, and of one more bit.
        let zero = router_mac("::".parse().unwrap());
        let one = router_mac("::1".parse().unwrap());
        assert_eq!(zero.0[..2], [0x02, 0x54]);
        assert_ne!(zero, one);
    }

    #[test]
    fn the_hash_is_the_published_one() {
        // From the FNV reference vectors.
        assert_eq!(fnv1a64([]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a64(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a64(*b"foobar"), 0x8594_4171_f739_67e8);
    }
}
