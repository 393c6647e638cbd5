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
    /// Sum of native-order words, folded only at the end. Four bytes add less than 2^32, so
    /// 16 GiB may be added before it overflows.
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
    #[inline]
    pub fn with(self, bytes: &[u8]) -> Self {
        let words = sum_words(bytes);
        let words = if self.odd {
            u64::from(fold64(words).swap_bytes())
        } else {
            words
        };
        Self {
            words: self.words + words,
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
    #[inline]
    pub fn fold(self) -> u16 {
        u16::from_be(fold64(self.words))
    }

    /// The checksum: the inverted sum.
    #[must_use]
    pub fn checksum(self) -> u16 {
        !self.fold()
    }
}

/// Sums native-order words; the caller folds.
#[inline]
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
    // 33 bits; then 18, then 0x10001 at most, then 16.
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The plain reading of RFC 1071: 16-bit big-endian words, an odd byte padded by zero.
    fn model(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| u32::from(low));
            if sum > 0xffff {
                sum -= 0xffff;
            }
        }
        sum as u16
    }

    #[test]
    fn golden_values() {
        // RFC 1071 section 3: 0001 + f203 + f4f5 + f6f7 = ddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(Sum::new().with(&bytes).fold(), 0xddf2);
        assert_eq!(Sum::new().fold(), 0);
        assert_eq!(Sum::new().with(&[0x12]).fold(), 0x1200);
        // RFC 1624 section 4: the example that earlier equations got wrong.
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
        assert_eq!(udp_nonzero(0), 0xffff);
        assert_eq!(udp_nonzero(0x1234), 0x1234);
    }

    #[test]
    fn folding_loses_no_carry() {
        for sum in [
            u64::MAX,
            u64::MAX - 1,
            0xffff_ffff,
            0x1_0000_0000,
            0xffff_0001,
            0x1_fffe_ffff,
        ] {
            // A number and its ones-complement fold differ by a multiple of 2^16 - 1.
            let folded = u64::from(fold64(sum));
            assert_eq!(sum % 0xffff, folded % 0xffff, "{sum:x}");
            assert_ne!(folded, 0, "{sum:x}");
        }
        assert_eq!(fold64(0), 0);
    }

    #[test]
    fn long_runs_of_ones_do_not_overflow() {
        let ones = vec![0xff; 70_001];
        assert_eq!(Sum::new().with(&ones).fold(), model(&ones));
    }

    proptest! {
        #[test]
        fn sums_agree_with_the_model_at_any_split(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            mut cuts in prop::collection::vec(0_usize..300, 0..6),
        ) {
            cuts.iter_mut().for_each(|cut| *cut = (*cut).min(bytes.len()));
            cuts.sort_unstable();
            let mut sum = Sum::new();
            let mut start = 0;
            for cut in cuts.into_iter().chain([bytes.len()]) {
                sum = sum.with(&bytes[start..cut]);
                start = cut;
            }
            prop_assert_eq!(sum.fold(), model(&bytes));
        }

        #[test]
        fn pseudo_headers_agree_with_their_bytes(
            src: [u8; 16], dst: [u8; 16], next: u8, len: u32,
        ) {
            let mut v6 = [&src[..], &dst[..], &len.to_be_bytes()].concat();
            v6.extend([0, 0, 0, next]);
            prop_assert_eq!(pseudo_v6(src, dst, next, len).fold(), model(&v6));

            let (src, dst): ([u8; 4], [u8; 4]) =
                (*src.first_chunk().unwrap(), *dst.first_chunk().unwrap());
            let mut v4 = [&src[..], &dst[..], &[0, next]].concat();
            v4.extend((len as u16).to_be_bytes());
            prop_assert_eq!(pseudo_v4(src, dst, next, len as u16).fold(), model(&v4));
        }

        /// Also against the corner where a sum is minus zero.
        #[test]
        fn an_update_equals_computing_afresh(
            mut bytes in prop::collection::vec(prop_oneof![Just(0), Just(0xff), any::<u8>()], 4..64),
            at in 0_usize..31,
            new: [u8; 2],
        ) {
            bytes.truncate(bytes.len() & !1);
            let at = (at * 2).min(bytes.len() - 2);
            // An IP header and a pseudo-header are never all zero; a sum of nothing is the
            // one case where zero has two forms.
            bytes[if at == 0 { 2 } else { 0 }] |= 1;
            let before = Sum::new().with(&bytes).checksum();
            let partial = Sum::new().with(&bytes).fold();
            let old = [bytes[at], bytes[at + 1]];
            bytes[at..at + 2].copy_from_slice(&new);
            let after = Sum::new().with(&bytes).checksum();
            let (was, is) = (u16::from_be_bytes(old), u16::from_be_bytes(new));
            prop_assert_eq!(update(before, was, is), after);
            prop_assert_eq!(update_bytes(before, &old, &new), after);
            prop_assert_eq!(update_partial(partial, was, is), !after);
            prop_assert_eq!(update_partial_bytes(partial, &old, &new), !after);
        }

        #[test]
        fn a_partial_checksum_is_completed_once_and_for_all(
            src: [u8; 4],
            dst: [u8; 4],
            ports: [u8; 4],
            mut body in prop::collection::vec(any::<u8>(), 8..200),
            cut in 0_usize..200,
        ) {
            body[..4].copy_from_slice(&ports);
            let pseudo = pseudo_v4(src, dst, 6, body.len() as u16);
            // The field sits at offset 6, as in UDP.
            body[6..8].copy_from_slice(&pseudo.fold().to_be_bytes());
            prop_assert!(is_partial(pseudo, pseudo.fold()));
            let cut = cut.min(body.len());
            let full = complete([&body[..cut], &body[cut..]]);
            prop_assert_eq!(transport(pseudo, [&body[..]], pseudo.fold()), full);
            body[6..8].copy_from_slice(&full.to_be_bytes());
            prop_assert!(verify(pseudo, [&body[..cut], &body[cut..]]));
            prop_assert_eq!(transport(pseudo, [&body[..]], full), full);
            if is_partial(pseudo, full) {
                prop_assert_eq!(complete([&body[..]]), full);
            }
            let spoilt = body[0] ^ 0x40;
            body[0] = spoilt;
            prop_assert!(!verify(pseudo, [&body[..]]));
        }
    }
}
