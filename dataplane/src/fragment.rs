//! Cuts an IPv4 packet that its sender lets be cut into fragments that its path takes (RFC 791
//! section 3.2).
//!
//! ```text
//!  Ethernet │ header, all options      │ payload          0 ..  8n
//!  Ethernet │ header, copied options   │ payload         8n .. 16n
//!  Ethernet │ header, copied options   │ payload        16n .. end
//! ```
//!
//! Stands between [`crate::rewrite`], which has changed the whole packet already, and
//! [`crate::encap`], which gives each fragment its own tunnel header. A packet that is itself a
//! fragment is cut like any other: offsets count on from its own, and only what was the last of
//! all stays that. Its transport checksum is complete by then.
//!
//! Bytes are copied to frames of their own, since a frame has one owner. All or nothing: a
//! datagram of which one fragment is missing is of no use. Deliberately absent: reassembly, and
//! cutting IPv6, which routers do not.

use crate::io::packet::{Packet, Segment};
use crate::io::pool::FramePool;
use crate::io::umem::{HEADROOM_BYTES, Umem};
use crate::parse::Headers;
use crate::verdict::DropReason;
use crate::wire::ipv4::{self, Ipv4};
use crate::wire::{checksum, ethernet};

/// The most fragments of one packet: 64 KiB over the least MTU that an IPv4 host takes (576
/// bytes, RFC 791 section 3.1) make 119.
pub const MAX_FRAGMENTS: usize = 128;

/// The longest header, in bytes.
const MAX_HEADER: usize = 60;

/// The bit of an option's type that says that every fragment has it.
const COPIED: u8 = 0x80;
const END_OF_OPTIONS: u8 = 0;
const NO_OPERATION: u8 = 1;

/// An IPv4 header with its options.
struct Header {
    bytes: [u8; MAX_HEADER],
    len: usize,
}

/// Adds the fragments of `packet`, none larger than `mtu` bytes of IP, to `out` in their order.
/// On error `out` is as it was.
pub fn cut(
    packet: &Packet,
    umem: &Umem,
    headers: &Headers,
    mtu: u32,
    pool: &mut FramePool,
    out: &mut Vec<Packet>,
) -> Result<(), DropReason> {
    let l3 = usize::from(headers.l3_offset);
    let head = packet.head(umem);
    let ip = Ipv4::new(&head[l3..])?;
    let frame: &[u8; ethernet::HEADER_LEN] =
        head.first_chunk().ok_or(DropReason::TruncatedEthernet)?;
    let mut header = Header::of_first(&head[l3..l3 + ip.header_len()]);
    let later = Header::of_later(&header);
    let mut bytes = Bytes {
        slices: packet.slices_from(umem, usize::from(headers.l4_offset)),
        now: &[],
    };
    let mut left = headers.l4_len();
    let mut offset = usize::from(ip.fragment_offset());
    let room = |header: &Header| (mtu as usize).saturating_sub(header.len);
    // Headers of later fragments are no longer, so these are no more than counted here.
    let least = room(&header) & !7;
    if least == 0 || left.div_ceil(least) > MAX_FRAGMENTS {
        return Err(DropReason::TooManyFragments);
    }
    let before = out.len();
    while left > 0 {
        let room = room(&header);
        // Only the last need not end on a multiple of eight.
        let len = if left <= room { left } else { room & !7 };
        left -= len;
        header.place(offset, left > 0 || ip.more_fragments(), len);
        let prefix = [&frame[..], header.as_slice()];
        let Some(mut fragment) = build(prefix, &mut bytes, len, umem, pool, packet) else {
            out.drain(before..).for_each(|done| pool.give_packet(done));
            return Err(DropReason::NoFrameForFragment);
        };
        fragment.partial_checksum = None;
        out.push(fragment);
        offset += len;
        header = Header { ..later };
    }
    Ok(())
}

impl Header {
    fn of_first(bytes: &[u8]) -> Self {
        let mut header = Self {
            bytes: [0; MAX_HEADER],
            len: bytes.len(),
        };
        header.bytes[..bytes.len()].copy_from_slice(bytes);
        header
    }

    /// The header of all fragments but the first: only options that are to be copied. What
    /// stands behind an option that contradicts itself is no option.
    fn of_later(first: &Self) -> Self {
        let mut header = Self {
            bytes: [0; MAX_HEADER],
            len: ipv4::HEADER_LEN,
        };
        header.bytes[..ipv4::HEADER_LEN].copy_from_slice(&first.bytes[..ipv4::HEADER_LEN]);
        let mut options = &first.bytes[ipv4::HEADER_LEN..first.len];
        while let &[kind, ref rest @ ..] = options {
            if kind == END_OF_OPTIONS {
                break;
            }
            if kind == NO_OPERATION {
                options = rest;
                continue;
            }
            let len = rest.first().map_or(0, |&len| usize::from(len));
            let Some((option, rest)) = options.split_at_checked(len).filter(|_| len >= 2) else {
                break;
            };
            if kind & COPIED != 0 {
                header.bytes[header.len..header.len + len].copy_from_slice(option);
                header.len += len;
            }
            options = rest;
        }
        // The rest of the last word is zero: the end of options.
        header.len = header.len.next_multiple_of(4);
        header.bytes[ipv4::VERSION_IHL_OFFSET] = 0x40 | (header.len / 4) as u8;
        header
    }

    /// Makes it the header of a fragment at that offset with that many bytes of payload.
    fn place(&mut self, offset: usize, more: bool, payload_len: usize) {
        let flags = u16::from_be_bytes([
            self.bytes[ipv4::FRAGMENT_OFFSET],
            self.bytes[ipv4::FRAGMENT_OFFSET + 1],
        ]);
        let field = flags & ipv4::RESERVED_FLAG
            | if more { ipv4::MORE_FRAGMENTS } else { 0 }
            | (offset / 8) as u16;
        // Both fit: the whole packet's total length has 16 bits.
        let total_len = (self.len + payload_len) as u16;
        let mut put = |at: usize, value: u16| {
            self.bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
        };
        put(ipv4::FRAGMENT_OFFSET, field);
        put(ipv4::TOTAL_LEN_OFFSET, total_len);
        put(ipv4::CHECKSUM_OFFSET, 0);
        let sum = checksum::Sum::new().with(self.as_slice()).checksum();
        self.bytes[ipv4::CHECKSUM_OFFSET..ipv4::CHECKSUM_OFFSET + 2]
            .copy_from_slice(&sum.to_be_bytes());
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A packet of `prefix` and the next `len` bytes, over as many frames as it takes; `None` when
/// the pool runs out.
fn build<'a>(
    prefix: [&[u8]; 2],
    bytes: &mut Bytes<'a, impl Iterator<Item = &'a [u8]>>,
    len: usize,
    umem: &Umem,
    pool: &mut FramePool,
    of: &Packet,
) -> Option<Packet> {
    let mut frame = pool.take()?;
    let mut room = &mut umem.bytes_mut(&mut frame)[HEADROOM_BYTES..];
    let mut used = 0;
    for part in prefix {
        room[used..used + part.len()].copy_from_slice(part);
        used += part.len();
    }
    let now = len.min(room.len() - used);
    bytes.copy_to(&mut room[used..used + now]);
    let mut left = len - now;
    let mut packet = Packet::new(of.ingress, segment(frame, used + now));
    while left > 0 {
        let Some(mut frame) = pool.take() else {
            pool.give_packet(packet);
            return None;
        };
        room = &mut umem.bytes_mut(&mut frame)[HEADROOM_BYTES..];
        let now = left.min(room.len());
        bytes.copy_to(&mut room[..now]);
        left -= now;
        packet
            .append(segment(frame, now))
            .expect("a fragment is shorter than 64 KiB, which a packet holds");
    }
    Some(packet)
}

fn segment(frame: crate::io::umem::Frame, len: usize) -> Segment {
    Segment::new(frame, HEADROOM_BYTES, len).expect("cut to what a chunk holds")
}

/// A packet's bytes, read one after the other.
struct Bytes<'a, I> {
    slices: I,
    now: &'a [u8],
}

impl<'a, I: Iterator<Item = &'a [u8]>> Bytes<'a, I> {
    /// Fills `out`; with zeros beyond the end, which a parsed packet does not have.
    fn copy_to(&mut self, mut out: &mut [u8]) {
        while !out.is_empty() {
            if self.now.is_empty() {
                let Some(next) = self.slices.next() else {
                    return out.fill(0);
                };
                self.now = next;
            }
            let len = self.now.len().min(out.len());
            let (filled, rest) = out.split_at_mut(len);
            let (taken, later) = self.now.split_at(len);
            filled.copy_from_slice(taken);
            (out, self.now) = (rest, later);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_options(options: &[u8]) -> Header {
        let mut bytes = [0; MAX_HEADER];
        bytes[0] = 0x40 | (5 + options.len() / 4) as u8;
        bytes[20..20 + options.len()].copy_from_slice(options);
        Header {
            bytes,
            len: 20 + options.len(),
        }
    }

    #[test]
    fn later_fragments_have_the_options_that_say_so() {
        let cases: [(&[u8], &[u8]); 6] = [
            (&[], &[]),
            // Record route is in the first fragment alone.
            (&[7, 7, 4, 0, 0, 0, 0, 0], &[]),
            // Loose source route and security are in all; no-operation is nothing to copy.
            (
                &[1, 0x83, 3, 4, 7, 3, 4, 0x82, 4, 9, 9, 0],
                &[0x83, 3, 4, 0x82, 4, 9, 9, 0],
            ),
            // Behind the end there is nothing.
            (&[0, 0x83, 3, 4], &[]),
            // Lengths that cannot be end the list.
            (&[0x83, 1, 0x82, 2], &[]),
            (&[0x82, 2, 0x83, 9], &[0x82, 2, 0, 0]),
        ];
        for (options, copied) in cases {
            let later = Header::of_later(&with_options(options));
            assert_eq!(later.as_slice()[20..], *copied, "{options:?}");
            assert_eq!(later.bytes[0], 0x45 + (copied.len() / 4) as u8);
        }
    }

    #[test]
    fn a_header_full_of_options_is_copied_whole() {
        let mut options = [0x82; 40];
        options[1] = 40;
        let later = Header::of_later(&with_options(&options));
        assert_eq!(later.as_slice()[20..], options);
        assert_eq!(later.bytes[0], 0x4f);
    }
}
