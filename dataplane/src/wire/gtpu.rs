//! GTP-U, version 1 (3GPP TS 29.281 section 5).
//!
//! ```text
//! +--------+--------+-----------------+
//! |001|1|0|E|S|N| type |    length    |
//! +--------+--------+-----------------+
//! |   tunnel endpoint identifier      |
//! +-----------------+--------+--------+
//! |   if E, S or N: |        |        |
//! | sequence number | N-PDU  | next E |
//! +-----------------+--------+--------+
//! | if E: extension headers: length in words, content, next type
//! ```
//!
//! Read only: tunnels inside pods.

/// UDP port (IANA).
pub const PORT: u16 = 2152;
/// Bytes in the mandatory part.
pub const HEADER_LEN: usize = 8;
/// The most extension headers that are stepped over.
pub const MAX_EXTENSIONS: usize = 8;

/// Version 1 and protocol type GTP, not GTP'.
const VERSION_1: u8 = 0x30;
const VERSION_MASK: u8 = 0xf0;
const FLAG_EXTENSION: u8 = 0x04;
const OPTIONAL_MASK: u8 = 0x07;
/// Message type of a packet in a tunnel.
const G_PDU: u8 = 0xff;

/// Where the IP packet starts in the message at the start of `bytes`; `None` for other messages
/// and what is cut short.
#[must_use]
pub fn payload(bytes: &[u8]) -> Option<usize> {
    let &[flags, kind, ..] = bytes.first_chunk::<HEADER_LEN>()?;
    if flags & VERSION_MASK != VERSION_1 || kind != G_PDU {
        return None;
    }
    if flags & OPTIONAL_MASK == 0 {
        return Some(HEADER_LEN);
    }
    let mut at = HEADER_LEN + 4;
    let mut next = *bytes.get(at - 1)?;
    if flags & FLAG_EXTENSION == 0 {
        return Some(at);
    }
    for _ in 0..MAX_EXTENSIONS {
        if next == 0 {
            return Some(at);
        }
        let len = 4 * usize::from(*bytes.get(at)?);
        if len == 0 {
            return None;
        }
        at += len;
        next = *bytes.get(at - 1)?;
    }
    (next == 0).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_headers() {
        let plain = [0x30, 0xff, 0, 20, 0, 0, 0, 1];
        assert_eq!(payload(&plain), Some(8));
        assert_eq!(payload(&plain[..7]), None);
        assert_eq!(payload(&[0x30, 1, 0, 20, 0, 0, 0, 1]), None);
        assert_eq!(payload(&[0x50, 0xff, 0, 20, 0, 0, 0, 1]), None);
        let sequence = [0x32, 0xff, 0, 24, 0, 0, 0, 1, 0, 9, 0, 0];
        assert_eq!(payload(&sequence), Some(12));
        assert_eq!(payload(&sequence[..11]), None);
    }

    #[test]
    fn extension_headers_are_stepped_over() {
        // The PDU session container that 5G sends: type 0x85, one word.
        let one = [0x34, 0xff, 0, 28, 0, 0, 0, 1, 0, 0, 0, 0x85, 1, 0, 9, 0];
        assert_eq!(payload(&one), Some(16));
        assert_eq!(payload(&one[..15]), None);
        let mut endless = one[..12].to_vec();
        endless.extend([1, 0, 0, 0x85].repeat(20));
        assert_eq!(payload(&endless), None);
        let nothing = [0x34, 0xff, 0, 28, 0, 0, 0, 1, 0, 0, 0, 0x85, 0, 0, 9, 0];
        assert_eq!(payload(&nothing), None);
    }
}
