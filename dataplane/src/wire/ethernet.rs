//! Ethernet II frames (RFC 894, IEEE 802.3).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                      Destination address                      |
//! +                               +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                               |                               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+        Source address         +
//! |                                                               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |           EtherType           |  payload ...
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! No VLAN tags: pods and the overlay carry none, and a tagged frame is refused by its
//! EtherType. No 802.3 length field, no frame check sequence: the kernel strips it.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{ParseError, array_at, put_u16, u16_at};

/// Bytes in an Ethernet header.
pub const HEADER_LEN: usize = 14;
/// Offset of the destination address.
pub const DST_OFFSET: usize = 0;
/// Offset of the source address.
pub const SRC_OFFSET: usize = 6;
/// Offset of the EtherType.
pub const ETHER_TYPE_OFFSET: usize = 12;

/// EtherType of IPv4.
pub const ETHER_TYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHER_TYPE_ARP: u16 = 0x0806;
/// EtherType of IPv6.
pub const ETHER_TYPE_IPV6: u16 = 0x86dd;
/// EtherType of an Ethernet frame inside a tunnel (transparent Ethernet bridging).
pub const ETHER_TYPE_BRIDGED: u16 = 0x6558;

/// A 48-bit Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// The address of every station.
    pub const BROADCAST: Self = Self([0xff; 6]);
    /// All zeroes: no station's address.
    pub const ZERO: Self = Self([0; 6]);

    /// Whether the frame is for a group of stations; broadcast is one.
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether this can be one station's own address: not a group, not zero.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        !self.is_multicast() && self != Self::ZERO
    }

    /// The group address that IPv6 multicast `group` is sent to (RFC 2464 section 7).
    #[must_use]
    pub const fn ipv6_multicast(group: [u8; 16]) -> Self {
        Self([0x33, 0x33, group[12], group[13], group[14], group[15]])
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

/// The text is no MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "a MAC address is six two-digit hexadecimal bytes joined by colons, such as 02:00:00:00:00:01"
)]
pub struct MacAddrError;

impl FromStr for MacAddr {
    type Err = MacAddrError;

    fn from_str(text: &str) -> Result<Self, MacAddrError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(MacAddrError)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(MacAddrError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| MacAddrError)?;
        }
        if parts.next().is_some() {
            return Err(MacAddrError);
        }
        Ok(Self(bytes))
    }
}

/// The two addresses of a frame, copied out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct EthernetHeader {
    /// Whom the frame is for.
    pub dst: MacAddr,
    /// Who sent it.
    pub src: MacAddr,
}

impl EthernetHeader {
    /// The addresses of an answer to this frame, sent by `own`.
    #[must_use]
    pub const fn answer_from(self, own: MacAddr) -> Self {
        Self {
            dst: self.src,
            src: own,
        }
    }
}

/// Read view of an Ethernet header.
#[derive(Debug, Clone, Copy)]
pub struct Ethernet<'a>(&'a [u8; HEADER_LEN]);

impl<'a> Ethernet<'a> {
    /// The header and what follows it.
    ///
    /// # Errors
    /// [`ParseError::TruncatedEthernet`] below 14 bytes.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<(Self, &'a [u8]), ParseError> {
        let (header, rest) = bytes
            .split_first_chunk()
            .ok_or(ParseError::TruncatedEthernet)?;
        Ok((Self(header), rest))
    }

    /// Whom the frame is for.
    #[must_use]
    pub fn dst(self) -> MacAddr {
        MacAddr(array_at(self.0, DST_OFFSET))
    }

    /// Who sent it.
    #[must_use]
    pub fn src(self) -> MacAddr {
        MacAddr(array_at(self.0, SRC_OFFSET))
    }

    /// What the payload is.
    #[must_use]
    pub const fn ether_type(self) -> u16 {
        u16_at(self.0, ETHER_TYPE_OFFSET)
    }

    /// Both addresses.
    #[must_use]
    pub fn addresses(self) -> EthernetHeader {
        EthernetHeader {
            dst: self.dst(),
            src: self.src(),
        }
    }
}

/// Write view of an Ethernet header.
#[derive(Debug)]
pub struct EthernetMut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> EthernetMut<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedEthernet`] below 14 bytes.
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, ParseError> {
        Ok(Self(
            bytes
                .first_chunk_mut()
                .ok_or(ParseError::TruncatedEthernet)?,
        ))
    }

    /// Sets whom the frame is for.
    pub fn set_dst(&mut self, mac: MacAddr) {
        self.0[DST_OFFSET..SRC_OFFSET].copy_from_slice(&mac.0);
    }

    /// Sets who sent it.
    pub fn set_src(&mut self, mac: MacAddr) {
        self.0[SRC_OFFSET..ETHER_TYPE_OFFSET].copy_from_slice(&mac.0);
    }

    /// Sets both addresses.
    pub fn set_addresses(&mut self, addresses: EthernetHeader) {
        self.set_dst(addresses.dst);
        self.set_src(addresses.src);
    }

    /// Sets what the payload is.
    pub const fn set_ether_type(&mut self, ether_type: u16) {
        put_u16(self.0, ETHER_TYPE_OFFSET, ether_type);
    }
}

/// Writes a whole header.
pub fn write_header(out: &mut [u8; HEADER_LEN], addresses: EthernetHeader, ether_type: u16) {
    let mut view = EthernetMut(out);
    view.set_addresses(addresses);
    view.set_ether_type(ether_type);
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: [u8; 15] = [
        0x02, 0x00, 0x5e, 0x10, 0x20, 0x30, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x86, 0xdd, 0x60,
    ];

    #[test]
    fn golden_bytes_read_and_written() {
        let (view, rest) = Ethernet::new(&GOLDEN).unwrap();
        assert_eq!(view.dst().to_string(), "02:00:5e:10:20:30");
        assert_eq!(view.src().to_string(), "0a:0b:0c:0d:0e:0f");
        assert_eq!(view.ether_type(), ETHER_TYPE_IPV6);
        assert_eq!(rest, [0x60]);

        let mut out = [0; HEADER_LEN];
        write_header(&mut out, view.addresses(), ETHER_TYPE_IPV6);
        assert_eq!(out, GOLDEN[..14]);
        assert_eq!(
            Ethernet::new(&GOLDEN[..13]).unwrap_err(),
            ParseError::TruncatedEthernet
        );
    }

    #[test]
    fn mac_text_round_trips_and_refuses_the_rest() {
        let mac = MacAddr([0xde, 0xad, 0xbe, 0xef, 0x00, 0x01]);
        assert_eq!(mac.to_string().parse(), Ok(mac));
        assert_eq!("DE:AD:BE:EF:00:01".parse(), Ok(mac));
        for bad in [
            "",
            "02",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:0",
            "02:00:00:00:00:0g",
            "+2:00:00:00:00:00",
            "02-00-00-00-00-00",
            "02:00:00:00:00:000",
        ] {
            assert_eq!(bad.parse::<MacAddr>(), Err(MacAddrError), "{bad:?}");
        }
    }

    #[test]
    fn group_addresses_are_told_apart() {
        assert!(MacAddr::BROADCAST.is_multicast());
        assert!(!MacAddr::ZERO.is_unicast());
        assert!(MacAddr([2, 0, 0, 0, 0, 1]).is_unicast());
        let mut group = [0; 16];
        group[0] = 0xff;
        group[15] = 0x07;
        assert_eq!(
            MacAddr::ipv6_multicast(group).to_string(),
            "33:33:00:00:00:07"
        );
    }
}
