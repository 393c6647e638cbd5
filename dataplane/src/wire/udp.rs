//! UDP (RFC 768).
//!
//! ```text
//!  0      7 8     15 16    23 24    31
//! +--------+--------+--------+--------+
//! |   Source Port   | Destination Port|
//! +--------+--------+--------+--------+
//! |      Length     |     Checksum    |
//! +--------+--------+--------+--------+
//! ```
//!
//! No jumbograms (length zero): they are refused.

use super::{ParseError, put_u16, u16_at};

/// Bytes in a header.
pub const HEADER_LEN: usize = 8;
/// Offset of the source port.
pub const SRC_PORT_OFFSET: usize = 0;
/// Offset of the destination port.
pub const DST_PORT_OFFSET: usize = 2;
/// Offset of the length.
pub const LENGTH_OFFSET: usize = 4;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 6;

/// Read view of a UDP header.
#[derive(Debug, Clone, Copy)]
pub struct Udp<'a>(&'a [u8; HEADER_LEN]);

impl<'a> Udp<'a> {
    /// The header at the start of `bytes`. That the payload is all there is not checked.
    ///
    /// # Errors
    /// [`ParseError::TruncatedL4`]; [`ParseError::BadUdpLength`] for a length below eight.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let view = Self(bytes.first_chunk().ok_or(ParseError::TruncatedL4)?);
        if usize::from(view.length()) < HEADER_LEN {
            return Err(ParseError::BadUdpLength);
        }
        Ok(view)
    }

    /// Source port.
    #[must_use]
    pub const fn src_port(self) -> u16 {
        u16_at(self.0, SRC_PORT_OFFSET)
    }

    /// Destination port.
    #[must_use]
    pub const fn dst_port(self) -> u16 {
        u16_at(self.0, DST_PORT_OFFSET)
    }

    /// Bytes of header and payload.
    #[must_use]
    pub const fn length(self) -> u16 {
        u16_at(self.0, LENGTH_OFFSET)
    }

    /// Checksum as it stands, maybe partial; zero means none.
    #[must_use]
    pub const fn checksum(self) -> u16 {
        u16_at(self.0, CHECKSUM_OFFSET)
    }
}

/// Write view of a UDP header. Setters of ports and length leave the checksum alone.
#[derive(Debug)]
pub struct UdpMut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> UdpMut<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedL4`].
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, ParseError> {
        Ok(Self(
            bytes.first_chunk_mut().ok_or(ParseError::TruncatedL4)?,
        ))
    }

    /// Sets both ports.
    pub const fn set_ports(&mut self, src: u16, dst: u16) {
        put_u16(self.0, SRC_PORT_OFFSET, src);
        put_u16(self.0, DST_PORT_OFFSET, dst);
    }

    /// Sets the length of header and payload.
    pub const fn set_length(&mut self, length: u16) {
        put_u16(self.0, LENGTH_OFFSET, length);
    }

    /// Sets the checksum field to exactly `checksum`; a computed one passes through
    /// [`udp_nonzero`](super::checksum::udp_nonzero) first.
    pub const fn set_checksum(&mut self, checksum: u16) {
        put_u16(self.0, CHECKSUM_OFFSET, checksum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: [u8; 9] = [0xd9, 0x03, 0x21, 0x18, 0x00, 0x09, 0xbe, 0xef, 0x41];

    #[test]
    fn golden_bytes_read_and_written() {
        let view = Udp::new(&GOLDEN).unwrap();
        assert_eq!((view.src_port(), view.dst_port()), (55555, 8472));
        assert_eq!((view.length(), view.checksum()), (9, 0xbeef));
        let (theirs, _) = etherparse::UdpHeader::from_slice(&GOLDEN).unwrap();
        assert_eq!((theirs.length, theirs.checksum), (9, 0xbeef));

        let mut out = [0; HEADER_LEN];
        let mut writer = UdpMut::new(&mut out).unwrap();
        writer.set_ports(55555, 8472);
        writer.set_length(9);
        writer.set_checksum(0xbeef);
        assert_eq!(out, GOLDEN[..8]);
    }

    #[test]
    fn short_and_impossible() {
        assert_eq!(Udp::new(&GOLDEN[..7]).unwrap_err(), ParseError::TruncatedL4);
        let mut bytes = GOLDEN;
        bytes[LENGTH_OFFSET + 1] = 7;
        assert_eq!(Udp::new(&bytes).unwrap_err(), ParseError::BadUdpLength);
        assert!(UdpMut::new(&mut bytes[..7]).is_err());
    }
}
