//! TCP (RFC 9293).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |          Source Port          |       Destination Port        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                        Sequence Number                        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                    Acknowledgment Number                      |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  Data |       |C|E|U|A|P|R|S|F|                               |
//! | Offset| Rsrvd |W|C|R|C|S|S|Y|I|            Window             |
//! |       |       |R|E|G|K|H|T|N|N|                               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |           Checksum            |         Urgent Pointer        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                           Options                             |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Options are given as bytes and not interpreted here.

use super::{ParseError, put_u16, u16_at, u32_at};

/// Bytes in a header without options.
pub const HEADER_LEN: usize = 20;
/// Offset of the source port.
pub const SRC_PORT_OFFSET: usize = 0;
/// Offset of the destination port.
pub const DST_PORT_OFFSET: usize = 2;
/// Offset of the sequence number.
pub const SEQUENCE_OFFSET: usize = 4;
/// Offset of the acknowledgement number.
pub const ACK_OFFSET: usize = 8;
/// Offset of the data offset.
pub const DATA_OFFSET_OFFSET: usize = 12;
/// Offset of the flags.
pub const FLAGS_OFFSET: usize = 13;
/// Offset of the window.
pub const WINDOW_OFFSET: usize = 14;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 16;

/// The eight flag bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// No more data from the sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Reset the connection.
    pub const RST: Self = Self(0x04);
    /// Push.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgement number counts.
    pub const ACK: Self = Self(0x10);
    /// The urgent pointer counts.
    pub const URG: Self = Self(0x20);
    /// ECN echo.
    pub const ECE: Self = Self(0x40);
    /// Congestion window reduced.
    pub const CWR: Self = Self(0x80);

    /// Whether all flags of `other` are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any flag of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The flags of both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Read view of a TCP header.
#[derive(Debug, Clone, Copy)]
pub struct Tcp<'a> {
    fixed: &'a [u8; HEADER_LEN],
    options: &'a [u8],
}

impl<'a> Tcp<'a> {
    /// The header at the start of `bytes`, options included.
    ///
    /// # Errors
    /// [`ParseError::TruncatedL4`] below 20 bytes; [`ParseError::BadTcpOffset`] for a data
    /// offset below five words or beyond `bytes`.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let (fixed, rest) = bytes
            .split_first_chunk::<HEADER_LEN>()
            .ok_or(ParseError::TruncatedL4)?;
        let options_len = (usize::from(fixed[DATA_OFFSET_OFFSET] >> 4) * 4)
            .checked_sub(HEADER_LEN)
            .ok_or(ParseError::BadTcpOffset)?;
        let options = rest.get(..options_len).ok_or(ParseError::BadTcpOffset)?;
        Ok(Self { fixed, options })
    }

    /// Bytes of header, options included: 20 to 60.
    #[must_use]
    pub const fn header_len(self) -> usize {
        HEADER_LEN + self.options.len()
    }

    /// Source port.
    #[must_use]
    pub const fn src_port(self) -> u16 {
        u16_at(self.fixed, SRC_PORT_OFFSET)
    }

    /// Destination port.
    #[must_use]
    pub const fn dst_port(self) -> u16 {
        u16_at(self.fixed, DST_PORT_OFFSET)
    }

    /// Sequence number.
    #[must_use]
    pub const fn sequence(self) -> u32 {
        u32_at(self.fixed, SEQUENCE_OFFSET)
    }

    /// Acknowledgement number.
    #[must_use]
    pub const fn acknowledgement(self) -> u32 {
        u32_at(self.fixed, ACK_OFFSET)
    }

    /// Flags.
    #[must_use]
    pub const fn flags(self) -> TcpFlags {
        TcpFlags(self.fixed[FLAGS_OFFSET])
    }

    /// Window, not scaled.
    #[must_use]
    pub const fn window(self) -> u16 {
        u16_at(self.fixed, WINDOW_OFFSET)
    }

    /// Checksum as it stands, maybe partial.
    #[must_use]
    pub const fn checksum(self) -> u16 {
        u16_at(self.fixed, CHECKSUM_OFFSET)
    }

    /// Option bytes, padding included.
    #[must_use]
    pub const fn options(self) -> &'a [u8] {
        self.options
    }
}

/// Write view of the fixed part of a TCP header. Setters leave the checksum alone.
#[derive(Debug)]
pub struct TcpMut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> TcpMut<'a> {
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

    /// Sets the checksum.
    pub const fn set_checksum(&mut self, checksum: u16) {
        put_u16(self.0, CHECKSUM_OFFSET, checksum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_with_an_option() {
        let bytes = [
            0x30, 0x39, 0x00, 0x50, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x02, 0x60, 0x12,
            0x72, 0x10, 0xab, 0xcd, 0x00, 0x00, 0x02, 0x04, 0x05, 0xb4, 0xff,
        ];
        let view = Tcp::new(&bytes).unwrap();
        assert_eq!((view.src_port(), view.dst_port()), (12345, 80));
        assert_eq!((view.sequence(), view.acknowledgement()), (1, 2));
        assert_eq!(view.flags(), TcpFlags::SYN.union(TcpFlags::ACK));
        assert!(view.flags().contains(TcpFlags::SYN));
        assert!(!view.flags().intersects(TcpFlags::RST.union(TcpFlags::FIN)));
        assert_eq!((view.window(), view.checksum()), (0x7210, 0xabcd));
        assert_eq!((view.header_len(), view.options()), (24, &bytes[20..24]));
        let (theirs, _) = etherparse::TcpHeader::from_slice(&bytes).unwrap();
        assert_eq!(theirs.checksum, view.checksum());
        assert_eq!(theirs.header_len(), view.header_len());

        let mut copy = bytes;
        let mut writer = TcpMut::new(&mut copy).unwrap();
        writer.set_ports(1, 2);
        writer.set_checksum(3);
        assert_eq!(copy[..4], [0, 1, 0, 2]);
        assert_eq!(copy[16..18], [0, 3]);
        assert_eq!(copy[18..], bytes[18..]);
    }

    #[test]
    fn bad_offsets_and_lengths() {
        let mut bytes = [0_u8; 24];
        assert_eq!(Tcp::new(&bytes).unwrap_err(), ParseError::BadTcpOffset);
        bytes[DATA_OFFSET_OFFSET] = 0x70;
        assert_eq!(Tcp::new(&bytes).unwrap_err(), ParseError::BadTcpOffset);
        assert_eq!(Tcp::new(&bytes[..19]).unwrap_err(), ParseError::TruncatedL4);
        assert!(TcpMut::new(&mut bytes[..19]).is_err());
    }
}
