//! Geneve (RFC 8926).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |Ver|  Opt Len  |O|C|    Rsvd.  |          Protocol Type        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |        Virtual Network Identifier (VNI)       |    Reserved   |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  Opt Len words of options ...
//! +-+-+-+-+-+-+-+-
//! ```
//!
//! Read only, options stepped over: tunnels inside pods.

use super::{Payload, u16_at};

/// UDP port (IANA).
pub const PORT: u16 = 6081;
/// Bytes in the fixed part.
pub const HEADER_LEN: usize = 8;

const VERSION_MASK: u8 = 0xc0;
const OPTIONS_MASK: u8 = 0x3f;

/// The header at the start of `bytes`: its length with options, and what follows. `None` if it
/// is cut short, of another version, or followed by neither IP nor Ethernet.
#[must_use]
pub fn payload(bytes: &[u8]) -> Option<(usize, Payload)> {
    let fixed: &[u8; HEADER_LEN] = bytes.first_chunk()?;
    let len = HEADER_LEN + 4 * usize::from(fixed[0] & OPTIONS_MASK);
    let known = fixed[0] & VERSION_MASK == 0 && bytes.len() >= len;
    let payload = Payload::of_ether_type(u16_at(fixed, 2))?;
    known.then_some((len, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_headers() {
        let mut bytes = [0; 16];
        bytes[2..4].copy_from_slice(&[0x65, 0x58]);
        assert_eq!(payload(&bytes), Some((8, Payload::Ethernet)));
        bytes[0] = 2;
        bytes[2..4].copy_from_slice(&[0x86, 0xdd]);
        assert_eq!(payload(&bytes), Some((16, Payload::Ip)));
        assert_eq!(payload(&bytes[..15]), None);
        bytes[2] = 0;
        assert_eq!(payload(&bytes), None);
        assert_eq!(payload(&[0x40, 0, 8, 0, 0, 0, 0, 0]), None);
        assert_eq!(payload(&[0, 0, 8, 0, 0, 0, 0]), None);
    }
}
