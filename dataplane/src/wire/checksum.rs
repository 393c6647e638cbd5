//! The Internet checksum (RFC 1071), its incremental update (RFC 1624), and what a sender's
//! kernel leaves of it to be completed.
//!
//! A local sender's kernel hands TCP and UDP over with "checksum partial": the field holds
//! the folded, *not* inverted sum of the pseudo-header, and whoever puts the frame on a wire
//! sums the segment over it. [`is_partial`] recognises such a field and [`complete`]
//! finishes it. A fully computed checksum looks partial once in 65535 packets; completing it
//! then gives the same value again, since `!(pseudo + data)` is what it was to begin with.
//!
//! Sums are taken in native byte order, eight bytes at a time, and swapped once at the end:
//! the ones-complement sum does not care about byte order (RFC 1071 section 2(B)).
//!
//! Absent: SCTP's CRC32c, which is no sum and lives in [`sctp`](super::sctp).

/// A running ones-complement sum over bytes given in pieces of any length.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum {
    /// Sum of native-order 16-bit words, folded after each piece: at most 17 bits.
    words: u64,
    /// Whether an odd number of bytes has been added, so that the next piece starts in the
    /// low half of a word.
    odd: bool,
}

impl Sum {
    /// The sum of nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            words: 0,
            odd: false,
        }
    }

    /// This sum with `bytes` added after all that came before.
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Self {
        let piece = fold64(sum_words(bytes));
        let piece = if self.odd { piece.swap_bytes() } else { piece };
        Self {
            words: u64::from(fold64(self.words + u64::from(piece))),
            odd: self.odd ^ (bytes.len() % 2 == 1),
        }
    }

    /// This sum with one big-endian word added, at an even position.
    #[must_use]
    pub fn with_u16(self, value: u16) -> Self {
        Self {
            words: self.words + u64::from(value.to_be()),
            odd: self.odd,
        }
    }

    /// The 16-bit sum, not inverted: what a partial checksum field holds.
    #[must_use]
    pub fn fold(self) -> u16 {
        u16::from_be(fold64(self.words))
    }

    /// The checksum: the inverted sum.
    #[must_use]
    pub fn checksum(self) -> u16 {
        !self.fold()
    }
}

/// Sums native-order words; the caller folds. Each eight bytes add less than 2^33, so 2^31
/// such steps (16 GiB) fit.
fn sum_words(bytes: &[u8]) -> u64 {
    let (eights, tail) = bytes.as_chunks::<8>();
    let mut sum = 0_u64;
    for &eight in eights {
        let value = u64::from_ne_bytes(eight);
        sum += (value & 0xffff_ffff) + (value >> 32);
    }
    if !tail.is_empty() {
        let mut last = [0; 8];
        last[..tail.len()].copy_from_slice(tail);
        let value = u64::from_ne_bytes(last);
        sum += (value & 0xffff_ffff) + (value >> 32);
    }
    sum
}

/// Folds carries back in until 16 bits are left.
#[inline]
const fn fold64(mut sum: u64) -> u16 {
    sum = (sum >> 32) + (sum & 0xffff_ffff);
    sum = (sum >> 32) + (sum & 0xffff_ffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    // The second fold of a 33-bit value can leave one carry.
    sum = (sum >> 16) + (sum & 0xffff);
    sum as u16
}

/// Sum of the IPv4 pseudo-header (RFC 9293 section 3.1); `len` is that of the L4 header and
/// payload in bytes.
#[must_use]
pub fn pseudo_v4(src: [u8; 4], dst: [u8; 4], protocol: u8, len: u16) -> Sum {
    Sum::new()
        .with(&src)
        .with(&dst)
        .with_u16(u16::from(protocol))
        .with_u16(len)
}

/// Sum of the IPv6 pseudo-header (RFC 8200 section 8.1); `len` is that of the upper-layer
/// header and payload in bytes, `dst` the final destination.
#[must_use]
pub fn pseudo_v6(src: [u8; 16], dst: [u8; 16], next_header: u8, len: u32) -> Sum {
    Sum::new()
        .with(&src)
        .with(&dst)
        .with_u16((len >> 16) as u16)
        .with_u16(len as u16)
        .with_u16(u16::from(next_header))
}

/// `checksum` after one 16-bit word changed from `old` to `new` (RFC 1624 equation 3).
#[must_use]
pub const fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !fold64(!checksum as u64 + !old as u64 + new as u64)
}

/// `checksum` after the bytes `old`, at an even offset, became `new`: addresses, say.
#[must_use]
pub fn update_bytes(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    update(
        checksum,
        Sum::new().with(old).fold(),
        Sum::new().with(new).fold(),
    )
}

/// A *partial* checksum field after a word of the pseudo-header changed. The field is not
/// inverted, so [`update`] would spoil it.
#[must_use]
pub const fn update_partial(field: u16, old: u16, new: u16) -> u16 {
    fold64(field as u64 + !old as u64 + new as u64)
}

/// A *partial* checksum field after bytes of the pseudo-header changed.
#[must_use]
pub fn update_partial_bytes(field: u16, old: &[u8], new: &[u8]) -> u16 {
    update_partial(
        field,
        Sum::new().with(old).fold(),
        Sum::new().with(new).fold(),
    )
}

/// A computed UDP checksum as it is sent: zero means "none", so a computed zero goes out as
/// all ones (RFC 768).
#[must_use]
pub const fn udp_nonzero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Whether a checksum field is one that the sender's kernel left to be completed.
#[must_use]
pub fn is_partial(pseudo: Sum, field: u16) -> bool {
    pseudo.fold() == field
}

/// Completes a partial checksum: `segments` are the L4 header, its partial checksum field
/// still in place, and all of its payload. For UDP pass the result through [`udp_nonzero`].
#[must_use]
pub fn complete<'a>(segments: impl IntoIterator<Item = &'a [u8]>) -> u16 {
    segments.into_iter().fold(Sum::new(), Sum::with).checksum()
}

/// Computes a TCP, UDP or ICMPv6 checksum afresh: `segments` are the L4 header and payload
/// with anything in the checksum field, `field` what is in it now. For UDP pass the result
/// through [`udp_nonzero`].
#[must_use]
pub fn transport<'a>(pseudo: Sum, segments: impl IntoIterator<Item = &'a [u8]>, field: u16) -> u16 {
    // Taking the field out of the sum is adding its complement.
    let sum = segments
        .into_iter()
        .fold(pseudo.with_u16(!field), Sum::with);
    sum.checksum()
}

/// Whether the checksum inside `segments` is right: the sum over pseudo-header and all is
/// minus zero. UDP over IPv4 without a checksum is for the caller to let pass.
#[must_use]
pub fn verify<'a>(pseudo: Sum, segments: impl IntoIterator<Item = &'a [u8]>) -> bool {
    segments.into_iter().fold(pseudo, Sum::with).fold() == 0xffff
}
