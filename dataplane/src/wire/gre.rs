//! GRE (RFC 2784, key and sequence number: RFC 2890).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |C|0|K|S| Reserved        | Ver |         Protocol Type         |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! | if C: Checksum                |          Reserved             |
//! | if K: Key                                                     |
//! | if S: Sequence Number                                         |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Read only, of version 0 and without the routing of RFC 1701: tunnels inside pods.

use super::{Payload, array_at, u16_at};

/// Bytes in the fixed part.
pub const HEADER_LEN: usize = 4;
/// Offset of the checksum, where there is one. It covers header and payload, without a
/// pseudo-header.
pub const CHECKSUM_OFFSET: usize = 4;

const FLAG_CHECKSUM: u16 = 0x8000;
const FLAG_ROUTING: u16 = 0x4000;
const FLAG_KEY: u16 = 0x2000;
const FLAG_SEQUENCE: u16 = 0x1000;
const VERSION_MASK: u16 = 0x0007;

/// Read view of a GRE header.
#[derive(Debug, Clone, Copy)]
pub struct Gre<'a> {
    fixed: &'a [u8; HEADER_LEN],
    bytes: &'a [u8],
}

impl<'a> Gre<'a> {
    /// The header at the start of `bytes`; `None` if cut short or of another kind than this
    /// module's.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let view = Self {
            fixed: bytes.first_chunk()?,
            bytes,
        };
        let known = view.flags() & (FLAG_ROUTING | VERSION_MASK) == 0;
        (known && bytes.len() >= view.header_len()).then_some(view)
    }

    const fn flags(self) -> u16 {
        u16_at(self.fixed, 0)
    }

    /// Bytes of header.
    #[must_use]
    pub const fn header_len(self) -> usize {
        let optional = self.flags() & (FLAG_CHECKSUM | FLAG_KEY | FLAG_SEQUENCE);
        HEADER_LEN + 4 * optional.count_ones() as usize
    }

    /// What follows; `None` for what is neither IP nor Ethernet.
    #[must_use]
    pub const fn payload(self) -> Option<Payload> {
        Payload::of_ether_type(u16_at(self.fixed, 2))
    }

    /// The checksum, if there is one.
    #[must_use]
    pub fn checksum(self) -> Option<u16> {
        let first: &[u8; CHECKSUM_OFFSET + 2] = self.bytes.first_chunk()?;
        (self.flags() & FLAG_CHECKSUM != 0)
            .then(|| u16::from_be_bytes(array_at(first, CHECKSUM_OFFSET)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_headers() {
        let plain = Gre::new(&[0, 0, 8, 0]).unwrap();
        assert_eq!((plain.header_len(), plain.checksum()), (4, None));
        assert_eq!(plain.payload(), Some(Payload::Ip));
        let all = [
            0xb0, 0, 0x65, 0x58, 0xbe, 0xef, 0, 0, 0, 0, 0, 7, 0, 0, 0, 1,
        ];
        let view = Gre::new(&all).unwrap();
        assert_eq!((view.header_len(), view.checksum()), (16, Some(0xbeef)));
        assert_eq!(view.payload(), Some(Payload::Ethernet));
        assert!(Gre::new(&all[..15]).is_none());
    }

    #[test]
    fn other_kinds_are_refused() {
        assert!(Gre::new(&[0, 0, 8]).is_none());
        assert!(Gre::new(&[0x40, 0, 8, 0]).is_none());
        // PPTP is version 1.
        assert!(Gre::new(&[0x30, 1, 0x88, 0x0b, 0, 0, 0, 0, 0, 0, 0, 0]).is_none());
        assert_eq!(Gre::new(&[0, 0, 0x88, 0xbe]).unwrap().payload(), None);
    }
}
