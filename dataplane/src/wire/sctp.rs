//! SCTP's common header and its CRC32c (RFC 9260).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |      Source Port Number       |    Destination Port Number    |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                       Verification Tag                        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                           Checksum                            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Of the chunks only the first is read, by its type, flags and, where it opens an association,
//! the tag that it announces: what connection tracking needs. The CRC covers no pseudo-header, so changed addresses leave it
//! right; changed ports do not, and it has no incremental update worth having.

use super::{ParseError, array_at, put_u16, u16_at, u32_at};

/// Bytes in the common header.
pub const HEADER_LEN: usize = 12;
/// Offset of the source port.
pub const SRC_PORT_OFFSET: usize = 0;
/// Offset of the destination port.
pub const DST_PORT_OFFSET: usize = 2;
/// Offset of the verification tag.
pub const TAG_OFFSET: usize = 4;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 8;

/// Read view of an SCTP common header.
#[derive(Debug, Clone, Copy)]
pub struct Sctp<'a>(&'a [u8; HEADER_LEN]);

impl<'a> Sctp<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedL4`].
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        Ok(Self(bytes.first_chunk().ok_or(ParseError::TruncatedL4)?))
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

    /// Verification tag.
    #[must_use]
    pub const fn tag(self) -> u32 {
        u32_at(self.0, TAG_OFFSET)
    }

    /// Checksum as it stands, to compare with [`checksum`].
    #[must_use]
    pub fn checksum(self) -> u32 {
        u32::from_le_bytes(array_at(self.0, CHECKSUM_OFFSET))
    }
}

/// Types of chunks (RFC 9260 section 3.2).
pub mod chunk {
    /// Opens an association; the verification tag of its packet is zero.
    pub const INIT: u8 = 1;
    /// Answers INIT.
    pub const INIT_ACK: u8 = 2;
    /// Asks whether the other end is there.
    pub const HEARTBEAT: u8 = 4;
    /// Answers HEARTBEAT.
    pub const HEARTBEAT_ACK: u8 = 5;
    /// Ends an association at once.
    pub const ABORT: u8 = 6;
    /// Begins an orderly end.
    pub const SHUTDOWN: u8 = 7;
    /// Answers SHUTDOWN.
    pub const SHUTDOWN_ACK: u8 = 8;
    /// Returns the cookie of INIT_ACK.
    pub const COOKIE_ECHO: u8 = 10;
    /// Answers COOKIE_ECHO: the association stands.
    pub const COOKIE_ACK: u8 = 11;
    /// Ends an orderly end.
    pub const SHUTDOWN_COMPLETE: u8 = 14;
    /// The T bit of ABORT and SHUTDOWN_COMPLETE: the verification tag is reflected, since the
    /// sender has no state of its own.
    pub const FLAG_REFLECTED: u8 = 1;
}

/// What the head of an SCTP packet says of its association.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The packet's verification tag.
    pub tag: u32,
    /// Type of the first chunk.
    pub kind: u8,
    /// Flags of the first chunk.
    pub flags: u8,
    /// The initiate tag of an INIT or INIT ACK, which the other end will put into its packets;
    /// else zero.
    pub initiate_tag: u32,
}

impl Chunk {
    /// The first of these `chunks`, in a packet with that verification tag; `None` when its
    /// header, or its initiate tag, is not among the bytes.
    #[must_use]
    pub fn first(tag: u32, chunks: &[u8]) -> Option<Self> {
        let head: &[u8; 4] = chunks.first_chunk()?;
        let [kind, flags, ..] = *head;
        let initiate_tag = if matches!(kind, chunk::INIT | chunk::INIT_ACK) {
            u32_at(chunks.first_chunk::<8>()?, 4)
        } else {
            0
        };
        Some(Self {
            tag,
            kind,
            flags,
            initiate_tag,
        })
    }
}

/// Write view of an SCTP common header. Setting ports leaves the checksum alone.
#[derive(Debug)]
pub struct SctpMut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> SctpMut<'a> {
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

    /// Sets the checksum, as [`checksum`] gives it.
    pub fn set_checksum(&mut self, checksum: u32) {
        self.0[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// The Castagnoli polynomial, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// A CRC32c over bytes given in pieces.
#[derive(Debug, Clone, Copy)]
pub struct Crc32c(u32);

impl Default for Crc32c {
    fn default() -> Self {
        Self(!0)
    }
}

impl Crc32c {
    /// This CRC with `bytes` added.
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(self.0, |crc, &byte| {
            crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)]
        }))
    }

    /// The CRC.
    #[must_use]
    pub const fn finish(self) -> u32 {
        !self.0
    }
}

/// The checksum of an SCTP packet: `segments` are the common header, with anything in the
/// checksum field, and all chunks, split anywhere. The field counts as zero (RFC 9260
/// section 6.8).
#[must_use]
pub fn checksum<'a>(segments: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    const FIELD_END: usize = CHECKSUM_OFFSET + 4;
    let mut crc = Crc32c::default();
    let mut position = 0_usize;
    for segment in segments {
        let before = CHECKSUM_OFFSET.saturating_sub(position).min(segment.len());
        let through = FIELD_END.saturating_sub(position).min(segment.len());
        crc = crc
            .with(&segment[..before])
            .with(&[0; 4][..through - before])
            .with(&segment[through..]);
        position = position.saturating_add(segment.len());
    }
    crc.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_header() {
        let bytes = [0x0b, 0x59, 0x0b, 0x5a, 1, 2, 3, 4, 0x78, 0x56, 0x34, 0x12];
        let view = Sctp::new(&bytes).unwrap();
        assert_eq!((view.src_port(), view.dst_port()), (2905, 2906));
        assert_eq!((view.tag(), view.checksum()), (0x0102_0304, 0x1234_5678));
        let mut out = [0; HEADER_LEN];
        out[4..8].copy_from_slice(&bytes[4..8]);
        let mut writer = SctpMut::new(&mut out).unwrap();
        writer.set_ports(2905, 2906);
        writer.set_checksum(0x1234_5678);
        assert_eq!(out, bytes);
        assert_eq!(
            Sctp::new(&bytes[..11]).unwrap_err(),
            ParseError::TruncatedL4
        );
    }

    #[test]
    fn the_first_chunk_is_read_as_far_as_it_goes() {
        let init = [1, 0, 0, 20, 0xde, 0xad, 0xbe, 0xef];
        let chunk = Chunk {
            tag: 7,
            kind: chunk::INIT,
            flags: 0,
            initiate_tag: 0xdead_beef,
        };
        assert_eq!(Chunk::first(7, &init), Some(chunk));
        assert_eq!(Chunk::first(7, &init[..7]), None);
        assert_eq!(Chunk::first(7, &[6, 1, 0]), None);
        let abort = Chunk {
            kind: chunk::ABORT,
            flags: chunk::FLAG_REFLECTED,
            initiate_tag: 0,
            ..chunk
        };
        assert_eq!(Chunk::first(7, &[6, 1, 0, 4]), Some(abort));
    }

    /// Known answers of RFC 3720 appendix B.4, and the usual check string.
    #[test]
    fn crc32c_known_answers() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        for (bytes, expected) in [
            (&b"123456789"[..], 0xe306_9283),
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32][..], 0x62a8_ab43),
            (&ascending[..], 0x46dd_794e),
            (&descending[..], 0x113f_db5c),
        ] {
            assert_eq!(
                Crc32c::default().with(bytes).finish(),
                expected,
                "{bytes:02x?}"
            );
        }
    }

    proptest! {
        #[test]
        fn splits_and_the_field_do_not_matter(
            mut packet in prop::collection::vec(any::<u8>(), 12..200),
            first in 0_usize..200,
            second in 0_usize..200,
        ) {
            let whole = checksum([&packet[..]]);
            let first = first.min(packet.len());
            let second = second.clamp(first, packet.len());
            let pieces = [&packet[..first], &packet[first..second], &packet[second..]];
            prop_assert_eq!(checksum(pieces), whole);
            packet[8..12].fill(0);
            prop_assert_eq!(Crc32c::default().with(&packet).finish(), whole);
        }
    }
}
