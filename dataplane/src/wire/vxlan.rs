//! VXLAN (RFC 7348).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |R|R|R|R|I|R|R|R|            Reserved                           |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                VXLAN Network Identifier (VNI) |   Reserved    |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Reserved bits are sent as zero and ignored on receipt (section 5). The group policy and
//! GPE extensions, which give them a meaning, are not spoken.

use super::{ParseError, u32_at};

/// Bytes in a header.
pub const HEADER_LEN: usize = 8;
/// Offset of the flags.
pub const FLAGS_OFFSET: usize = 0;
/// Offset of the VNI, three bytes.
pub const VNI_OFFSET: usize = 4;
/// The I flag: the VNI is valid.
pub const FLAG_VNI: u8 = 0x08;
/// The largest VNI: 24 bits.
pub const VNI_MAX: u32 = 0x00ff_ffff;

/// Read view of a VXLAN header.
#[derive(Debug, Clone, Copy)]
pub struct VxlanHeader<'a>(&'a [u8; HEADER_LEN]);

impl<'a> VxlanHeader<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedVxlan`]; [`ParseError::BadVxlanFlags`] without the I flag.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let header = bytes
            .first_chunk::<HEADER_LEN>()
            .ok_or(ParseError::TruncatedVxlan)?;
        if header[FLAGS_OFFSET] & FLAG_VNI == 0 {
            return Err(ParseError::BadVxlanFlags);
        }
        Ok(Self(header))
    }

    /// The 24-bit network identifier.
    #[must_use]
    pub const fn vni(self) -> u32 {
        u32_at(self.0, VNI_OFFSET) >> 8
    }
}

/// Writes a header. `vni` has 24 bits; higher ones are cut off, so check beforehand.
pub fn write_header(out: &mut [u8; HEADER_LEN], vni: u32) {
    debug_assert!(vni <= VNI_MAX, "a VNI has 24 bits");
    let [a, b, c, _] = (vni << 8).to_be_bytes();
    *out = [FLAG_VNI, 0, 0, 0, a, b, c, 0];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_read_and_written() {
        let bytes = [0x08, 0, 0, 0, 0x12, 0x34, 0x56, 0];
        assert_eq!(VxlanHeader::new(&bytes).unwrap().vni(), 0x12_3456);
        let mut out = [0xff; HEADER_LEN];
        write_header(&mut out, 0x12_3456);
        assert_eq!(out, bytes);
        write_header(&mut out, VNI_MAX);
        assert_eq!(VxlanHeader::new(&out).unwrap().vni(), VNI_MAX);
    }

    #[test]
    fn reserved_bits_are_ignored_and_the_flag_is_not() {
        assert_eq!(VxlanHeader::new(&[0xff; 8]).unwrap().vni(), VNI_MAX);
        let mut bytes = [0xff; 8];
        bytes[FLAGS_OFFSET] = !FLAG_VNI;
        assert_eq!(
            VxlanHeader::new(&bytes).unwrap_err(),
            ParseError::BadVxlanFlags
        );
        assert_eq!(
            VxlanHeader::new(&bytes[..7]).unwrap_err(),
            ParseError::TruncatedVxlan
        );
    }
}
