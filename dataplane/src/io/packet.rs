//! A packet: the frames that hold it, in order, and what the egress link shall do with it.
//!
//! All headers of a packet lie in its first segment ([`Packet::head`]); only payload spreads
//! over the others.

use arrayvec::ArrayVec;

use super::umem::{CHUNK_BYTES, Frame, HEADROOM_BYTES, Umem};
use crate::ids::LinkId;

/// The most segments of a packet: what AF_XDP sends (`MAX_SKB_FRAGS` + 1).
pub const MAX_SEGMENTS: usize = 18;

/// A run of bytes in one frame.
#[derive(Debug)]
pub struct Segment {
    frame: Frame,
    offset: u16,
    len: u16,
}

impl Segment {
    /// The bytes `offset..offset + len` of the frame's chunk; `None` if they leave the chunk,
    /// with the frame to hand back.
    pub fn new(frame: Frame, offset: usize, len: usize) -> Result<Self, Frame> {
        if offset + len > CHUNK_BYTES {
            return Err(frame);
        }
        // Both fit: a chunk has 4096 bytes.
        Ok(Self {
            frame,
            offset: offset as u16,
            len: len as u16,
        })
    }

    /// Offset of the data in its chunk, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        usize::from(self.offset)
    }

    /// Length of the data, in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "an empty segment is as good as any"
    )]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// The frame that holds the data.
    pub fn frame(&self) -> &Frame {
        &self.frame
    }

    /// The frame that holds the data, to write around it (transmit metadata).
    pub fn frame_mut(&mut self) -> &mut Frame {
        &mut self.frame
    }

    /// Gives the frame up.
    pub fn into_frame(self) -> Frame {
        self.frame
    }

    fn bytes<'a>(&'a self, umem: &'a Umem) -> &'a [u8] {
        &umem.bytes(&self.frame)[self.offset()..self.offset() + self.len()]
    }

    fn bytes_mut<'a>(&'a mut self, umem: &'a Umem) -> &'a mut [u8] {
        let range = self.offset()..self.offset() + self.len();
        &mut umem.bytes_mut(&mut self.frame)[range]
    }
}

/// A checksum that the egress device or the receiving kernel is asked to complete: the
/// ones-complement sum from `start` to the packet's end goes to `start + offset`, where the
/// folded pseudo-header sum stands now (as `csum_start` and `csum_offset` of the kernel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialChecksum {
    /// First byte summed, from the start of the packet.
    pub start: u16,
    /// Place of the checksum field, from `start`.
    pub offset: u16,
}

/// A packet on its way.
#[derive(Debug)]
#[must_use = "a packet that is dropped loses its frames; give it back to the pool"]
pub struct Packet {
    segments: ArrayVec<Segment, MAX_SEGMENTS>,
    /// The link that it came in by.
    pub ingress: LinkId,
    /// Set where the egress link shall announce a partial checksum.
    pub partial_checksum: Option<PartialChecksum>,
}

impl Packet {
    /// A packet of one segment.
    pub fn new(ingress: LinkId, head: Segment) -> Self {
        let mut segments = ArrayVec::new();
        segments.push(head);
        Self {
            segments,
            ingress,
            partial_checksum: None,
        }
    }

    /// A packet with those bytes, over as many frames as it takes; `None` when the pool runs
    /// out or they need more than [`MAX_SEGMENTS`].
    pub fn from_bytes(
        pool: &mut super::pool::FramePool,
        ingress: LinkId,
        bytes: &[u8],
    ) -> Option<Self> {
        let mut packet = Self {
            segments: ArrayVec::new(),
            ingress,
            partial_checksum: None,
        };
        let mut rest = bytes;
        loop {
            let (now, later) = rest.split_at(rest.len().min(CHUNK_BYTES - HEADROOM_BYTES));
            let segment = if packet.segments.is_full() {
                None
            } else {
                pool.take()
            }
            .and_then(|frame| Segment::new(frame, HEADROOM_BYTES, now.len()).ok());
            let Some(mut segment) = segment else {
                pool.give_packet(packet);
                return None;
            };
            segment.bytes_mut(pool.umem()).copy_from_slice(now);
            packet.segments.push(segment);
            rest = later;
            if rest.is_empty() {
                return Some(packet);
            }
        }
    }

    /// Adds a segment at the end; handed back when the packet has [`MAX_SEGMENTS`] already.
    pub fn append(&mut self, segment: Segment) -> Result<(), Segment> {
        self.segments
            .try_push(segment)
            .map_err(arrayvec::CapacityError::element)
    }

    /// The segments in order; at least one, unless the packet was taken apart.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The segments, to write around their data.
    pub fn segments_mut(&mut self) -> &mut [Segment] {
        &mut self.segments
    }

    /// Takes the packet apart.
    pub fn into_segments(self) -> ArrayVec<Segment, MAX_SEGMENTS> {
        self.segments
    }

    /// Takes the packet apart into its frames.
    pub fn into_frames(self) -> impl Iterator<Item = Frame> {
        self.segments.into_iter().map(Segment::into_frame)
    }

    /// Length over all segments, in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a packet has always a head")]
    pub fn len(&self) -> usize {
        self.segments.iter().map(Segment::len).sum()
    }

    /// The first segment's bytes.
    #[must_use]
    pub fn head<'a>(&'a self, umem: &'a Umem) -> &'a [u8] {
        self.segments[0].bytes(umem)
    }

    /// The first segment's bytes, to write.
    #[must_use]
    pub fn head_mut<'a>(&'a mut self, umem: &'a Umem) -> &'a mut [u8] {
        self.segments[0].bytes_mut(umem)
    }

    /// Each segment's bytes, in order.
    pub fn slices<'a>(&'a self, umem: &'a Umem) -> impl Iterator<Item = &'a [u8]> + Clone {
        self.segments.iter().map(|segment| segment.bytes(umem))
    }

    /// Each segment's bytes from that offset of the packet on, in order.
    pub fn slices_from<'a>(
        &'a self,
        umem: &'a Umem,
        offset: usize,
    ) -> impl Iterator<Item = &'a [u8]> + Clone {
        let mut skip = offset;
        self.slices(umem).map(move |slice| {
            let (skipped, rest) = slice.split_at(skip.min(slice.len()));
            skip -= skipped.len();
            rest
        })
    }

    /// All bytes, copied: for tests and captures.
    #[must_use]
    pub fn to_vec(&self, umem: &Umem) -> Vec<u8> {
        self.slices(umem).flatten().copied().collect()
    }

    /// Makes room for `bytes` in front of the packet; false when the headroom is too small.
    #[must_use]
    pub fn push_front(&mut self, bytes: usize) -> bool {
        let head = &mut self.segments[0];
        if bytes > head.offset() {
            return false;
        }
        head.offset -= bytes as u16;
        head.len += bytes as u16;
        true
    }

    /// Cuts `bytes` off the front; false when the head is shorter than that.
    #[must_use]
    pub fn pull_front(&mut self, bytes: usize) -> bool {
        let head = &mut self.segments[0];
        if bytes > head.len() {
            return false;
        }
        head.offset += bytes as u16;
        head.len -= bytes as u16;
        true
    }

    /// Sets the head's length, growing into the rest of its chunk or shrinking; false when the
    /// chunk is too small.
    #[must_use]
    pub fn resize_head(&mut self, len: usize) -> bool {
        let head = &mut self.segments[0];
        if head.offset() + len > CHUNK_BYTES {
            return false;
        }
        head.len = len as u16;
        true
    }

    /// Cuts the packet to `len` bytes and hands back the frames that are not needed any more.
    pub fn truncate(&mut self, len: usize, pool: &mut super::pool::FramePool) {
        let mut left = len;
        for segment in &mut self.segments {
            segment.len = segment.len().min(left) as u16;
            left -= segment.len();
        }
        while self.segments.len() > 1 && self.segments.last().is_some_and(|last| last.len == 0) {
            if let Some(last) = self.segments.pop() {
                pool.give(last.into_frame());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::{FramePool, FrameStore};
    use super::*;

    fn pool(chunks: u32) -> FramePool {
        FramePool::new(FrameStore::new(chunks).unwrap())
    }

    #[test]
    fn bytes_spread_over_frames_and_come_back() {
        let mut pool = pool(32);
        let bytes: Vec<u8> = (0..9000u32).map(|i| i as u8).collect();
        let mut packet = Packet::from_bytes(&mut pool, LinkId(0), &bytes).unwrap();
        assert_eq!(packet.segments().len(), 3);
        assert_eq!(packet.to_vec(pool.umem()), bytes);
        packet.truncate(3000, &mut pool);
        assert_eq!(packet.segments().len(), 1);
        assert_eq!(packet.to_vec(pool.umem()), bytes[..3000]);
        pool.give_packet(packet);
    }

    #[test]
    fn a_packet_that_does_not_fit_takes_no_frame() {
        let mut pool = pool(2);
        assert!(Packet::from_bytes(&mut pool, LinkId(0), &[0; 9000]).is_none());
        assert!(pool.take().map(|frame| pool.give(frame)).is_some());
        assert_eq!(pool.held(), 2);
    }

    #[test]
    fn the_front_moves_within_the_headroom() {
        let mut pool = pool(1);
        let mut packet = Packet::from_bytes(&mut pool, LinkId(0), &[7; 60]).unwrap();
        assert!(packet.pull_front(14));
        assert!(packet.push_front(64));
        assert_eq!(packet.len(), 110);
        assert!(!packet.push_front(HEADROOM_BYTES));
        assert!(!packet.pull_front(111));
        pool.give_packet(packet);
    }
}
