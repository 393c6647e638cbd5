//! Frames in and out of a socket: the one place where a chunk's ownership passes between us
//! and the kernel.
//!
//! ```text
//!            lend                     take
//!  frame ───────────▶ fill ─ kernel ─ rx ─────────▶ segment
//!  segment ─────────▶ tx ─── kernel ─ completion ─▶ frame
//! ```
//!
//! A chunk that is lent stands in a set; only a chunk that stands there becomes a frame again.
//! So whatever the kernel says, no chunk has two frames: a wrong address is reported as
//! [`Taken::Bad`] and costs at worst the chunk. Receiving and sending have a set each, so that
//! a chunk that the kernel may still write is never taken for one that was sent.
//!
//! Deliberately absent: policy (how many frames to lend, what makes a packet).

#![expect(
    unsafe_code,
    reason = "turns chunks that the kernel gives back into frames"
)]

use std::sync::Arc;

use super::packet::Segment;
use super::ring::{Consumer, Producer};
use super::sys::Descriptor;
use super::umem::{CHUNK_BYTES, Frame, Umem};

/// The rings of a socket.
#[derive(Debug)]
pub struct Rings {
    /// Packets received.
    pub rx: Consumer<Descriptor>,
    /// Packets to send.
    pub tx: Producer<Descriptor>,
    /// Chunks to receive into.
    pub fill: Producer<u64>,
    /// Chunks sent.
    pub completion: Consumer<u64>,
}

/// The chunks of a packet memory that a socket's kernel side has, for one direction.
#[derive(Debug)]
struct LentSet {
    words: Box<[u64]>,
    count: u32,
}

impl LentSet {
    fn new(chunks: u32) -> Self {
        Self {
            words: vec![0; (chunks as usize).div_ceil(64)].into(),
            count: 0,
        }
    }

    fn insert(&mut self, chunk: u32) {
        let bit = 1 << (chunk % 64);
        let word = &mut self.words[chunk as usize / 64];
        assert!(*word & bit == 0, "chunk {chunk} was lent twice");
        *word |= bit;
        self.count += 1;
    }

    /// True when the chunk was there.
    fn remove(&mut self, chunk: u64) -> bool {
        let bit = 1 << (chunk % 64);
        let word = usize::try_from(chunk / 64)
            .ok()
            .and_then(|index| self.words.get_mut(index));
        match word {
            Some(word) if *word & bit != 0 => {
                *word &= !bit;
                self.count -= 1;
                true
            }
            _ => false,
        }
    }

    fn iter(&self) -> impl Iterator<Item = u32> {
        (0..self.words.len() as u32 * 64)
            .filter(|&chunk| self.words[chunk as usize / 64] & (1 << (chunk % 64)) != 0)
    }
}

/// What the kernel gave back.
#[derive(Debug)]
pub enum Taken<T> {
    /// As it should be.
    Good(T),
    /// An address that was not lent: nothing to own.
    Bad,
    /// A length that leaves the chunk: the frame, without data.
    Empty(Frame),
}

/// A descriptor received.
#[derive(Debug)]
pub struct Received {
    /// Its data.
    pub taken: Taken<Segment>,
    /// The descriptor's options.
    pub options: u32,
}

/// The rings, and which chunks lie in them.
#[derive(Debug)]
pub struct Queues {
    rings: Rings,
    umem: Arc<Umem>,
    receiving: LentSet,
    sending: LentSet,
}

impl Queues {
    /// The queues of new rings, in which no chunk lies yet.
    pub(super) fn new(rings: Rings, umem: Arc<Umem>) -> Self {
        let chunks = umem.chunks();
        Self {
            rings,
            umem,
            receiving: LentSet::new(chunks),
            sending: LentSet::new(chunks),
        }
    }

    /// Chunks lent for receiving: in the fill ring, with the kernel, or in the receive ring.
    pub fn receiving(&self) -> u32 {
        self.receiving.count
    }

    /// Chunks lent for sending: in the transmit ring, with the kernel, or completed unseen.
    pub fn sending(&self) -> u32 {
        self.sending.count
    }

    /// The packet memory.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }

    /// Lends a frame to receive into; handed back when the fill ring is full. The kernel sees
    /// it after [`publish_fill`](Self::publish_fill).
    pub fn lend(&mut self, frame: Frame) -> Result<(), Frame> {
        if self.rings.fill.free(1) == 0 {
            return Err(frame);
        }
        let chunk = give_up(&self.umem, frame);
        self.receiving.insert(chunk);
        let pushed = self.rings.fill.push(address(chunk, 0));
        debug_assert!(pushed, "room was checked");
        Ok(())
    }

    /// Shows the kernel the frames lent.
    pub fn publish_fill(&mut self) {
        self.rings.fill.publish();
    }

    /// The next descriptor received. Its place goes back by [`release_rx`](Self::release_rx).
    pub fn receive(&mut self) -> Option<Received> {
        let descriptor = self.rings.rx.pop()?;
        Some(Received {
            taken: self.take_received(&descriptor),
            options: descriptor.options,
        })
    }

    fn take_received(&mut self, descriptor: &Descriptor) -> Taken<Segment> {
        let chunk = descriptor.addr / CHUNK_BYTES as u64;
        if !self.receiving.remove(chunk) {
            return Taken::Bad;
        }
        // SAFETY: the chunk was in the set, so its frame was given up in `lend` and not claimed
        // since; the kernel handed it over with the receive ring and no longer writes it.
        let frame = unsafe { self.umem.claim(chunk as u32) };
        let offset = (descriptor.addr % CHUNK_BYTES as u64) as usize;
        let len = descriptor.len as usize;
        match Segment::new(frame, offset, len) {
            Ok(segment) => Taken::Good(segment),
            Err(frame) => Taken::Empty(frame),
        }
    }

    /// Gives the places of the descriptors received back to the kernel.
    pub fn release_rx(&mut self) {
        self.rings.rx.release();
    }

    /// Room in the transmit ring, in descriptors, exact up to `wanted`.
    pub fn tx_room(&mut self, wanted: u32) -> u32 {
        self.rings.tx.free(wanted)
    }

    /// Queues a segment; handed back when there is no room. The kernel sees it after
    /// [`publish_tx`](Self::publish_tx).
    pub fn transmit(&mut self, segment: Segment, options: u32) -> Result<(), Segment> {
        if self.rings.tx.free(1) == 0 {
            return Err(segment);
        }
        let (offset, len) = (segment.offset(), segment.len());
        let chunk = give_up(&self.umem, segment.into_frame());
        self.sending.insert(chunk);
        let pushed = self.rings.tx.push(Descriptor {
            addr: address(chunk, offset),
            len: len as u32,
            options,
        });
        debug_assert!(pushed, "room was checked");
        Ok(())
    }

    /// Shows the kernel the segments queued.
    pub fn publish_tx(&mut self) {
        self.rings.tx.publish();
    }

    /// Descriptors that the kernel has not taken yet, those not published included.
    pub fn tx_pending(&mut self) -> u32 {
        self.rings.tx.pending()
    }

    /// The next frame that was sent. Its place goes back by
    /// [`release_completion`](Self::release_completion).
    pub fn complete(&mut self) -> Option<Taken<Frame>> {
        let chunk = self.rings.completion.pop()? / CHUNK_BYTES as u64;
        if !self.sending.remove(chunk) {
            return Some(Taken::Bad);
        }
        // SAFETY: the chunk was in the set, so its frame was given up in `transmit` and not
        // claimed since; the kernel handed it over with the completion ring and is done with it.
        Some(Taken::Good(unsafe { self.umem.claim(chunk as u32) }))
    }

    /// Gives the places of the completions back to the kernel.
    pub fn release_completion(&mut self) {
        self.rings.completion.release();
    }

    /// Unmaps the rings and tells which chunks lay in them.
    pub(super) fn unmap(self) -> Lent {
        Lent {
            umem: self.umem,
            receiving: self.receiving,
            sending: self.sending,
        }
    }
}

/// The chunks that a socket had when its rings were unmapped.
#[derive(Debug)]
pub(super) struct Lent {
    umem: Arc<Umem>,
    receiving: LentSet,
    sending: LentSet,
}

impl Lent {
    /// Takes them all back.
    ///
    /// # Safety
    /// The socket is closed: the kernel neither reads nor writes any of them.
    pub(super) unsafe fn reclaim(self) -> impl Iterator<Item = Frame> {
        let chunks: Vec<u32> = self.receiving.iter().chain(self.sending.iter()).collect();
        let umem = self.umem;
        chunks.into_iter().map(move |chunk| {
            // SAFETY: each chunk in a set was given up and not claimed since, and stands in one
            // set only, once; the caller vouches for the kernel.
            unsafe { umem.claim(chunk) }
        })
    }
}

/// Gives a frame up; it must be of this region, or a later claim would make a second owner.
fn give_up(umem: &Umem, frame: Frame) -> u32 {
    // Panics on a frame of another region.
    let _ = umem.bytes(&frame);
    frame.into_chunk()
}

fn address(chunk: u32, offset: usize) -> u64 {
    u64::from(chunk) * CHUNK_BYTES as u64 + offset as u64
}

#[cfg(test)]
mod tests {
    use super::super::pool::{FramePool, FrameStore};
    use super::super::ring::RingMemory;
    use super::super::sys::RingOffsets;
    use super::*;

    const SIZE: u32 = 8;
    const OFFSETS: RingOffsets = RingOffsets {
        producer: 0,
        consumer: 64,
        entries: 128,
        flags: 8,
    };

    /// Queues over rings in memory, and the kernel's halves of the same rings.
    struct Bench {
        queues: Queues,
        fill: Consumer<u64>,
        rx: Producer<Descriptor>,
        tx: Consumer<Descriptor>,
        completion: Producer<u64>,
        pool: FramePool,
        _memory: [Box<[u64]>; 4],
    }

    fn memory() -> Box<[u64]> {
        vec![0; 16 + 2 * SIZE as usize].into()
    }

    impl Bench {
        fn new() -> Self {
            let store = FrameStore::new(16).unwrap();
            let umem = Arc::clone(store.umem());
            let mut memory = [memory(), memory(), memory(), memory()];
            let [fill, rx, tx, completion] = &mut memory;
            let kernel_fill = Consumer::new(RingMemory::on_heap(fill), &OFFSETS, SIZE);
            let kernel_rx = Producer::new(RingMemory::on_heap(rx), &OFFSETS, SIZE);
            let kernel_tx = Consumer::new(RingMemory::on_heap(tx), &OFFSETS, SIZE);
            let kernel_completion = Producer::new(RingMemory::on_heap(completion), &OFFSETS, SIZE);
            let rings = Rings {
                fill: Producer::new(RingMemory::on_heap(fill), &OFFSETS, SIZE),
                rx: Consumer::new(RingMemory::on_heap(rx), &OFFSETS, SIZE),
                tx: Producer::new(RingMemory::on_heap(tx), &OFFSETS, SIZE),
                completion: Consumer::new(RingMemory::on_heap(completion), &OFFSETS, SIZE),
            };
            Self {
                queues: Queues::new(rings, umem),
                fill: kernel_fill,
                rx: kernel_rx,
                tx: kernel_tx,
                completion: kernel_completion,
                pool: FramePool::new(store),
                _memory: memory,
            }
        }

        fn lend(&mut self) {
            let frame = self.pool.take().unwrap();
            self.queues.lend(frame).unwrap();
            self.queues.publish_fill();
        }

        fn kernel_receives(&mut self, addr: u64, len: u32) {
            let entry = Descriptor {
                addr,
                len,
                options: 0,
            };
            assert!(self.rx.push(entry));
            self.rx.publish();
        }

        fn kernel_completes(&mut self, addr: u64) {
            assert!(self.completion.push(addr));
            self.completion.publish();
        }

        /// As a closed socket would; every frame must be back then.
        fn finish(self) {
            let Self {
                queues, mut pool, ..
            } = self;
            // SAFETY: there is no kernel behind these rings.
            for frame in unsafe { queues.unmap().reclaim() } {
                pool.give(frame);
            }
            assert_eq!(pool.held(), 16);
        }
    }

    #[test]
    fn a_chunk_goes_round_and_comes_back_as_its_frame() {
        let mut bench = Bench::new();
        bench.lend();
        let addr = bench.fill.pop().unwrap();
        bench.kernel_receives(addr + 256, 60);
        let received = bench.queues.receive().unwrap();
        let Taken::Good(segment) = received.taken else {
            panic!("{received:?}");
        };
        assert_eq!((segment.offset(), segment.len()), (256, 60));
        assert_eq!(bench.queues.receiving(), 0);
        bench.queues.transmit(segment, 2).unwrap();
        bench.queues.publish_tx();
        let sent = bench.tx.pop().unwrap();
        assert_eq!((sent.addr, sent.len, sent.options), (addr + 256, 60, 2));
        assert_eq!(bench.queues.sending(), 1);
        bench.kernel_completes(sent.addr);
        match bench.queues.complete() {
            Some(Taken::Good(frame)) => bench.pool.give(frame),
            other => panic!("{other:?}"),
        }
        assert_eq!(bench.queues.sending(), 0);
        bench.finish();
    }

    #[test]
    fn a_chunk_that_was_not_lent_that_way_is_never_taken() {
        let mut bench = Bench::new();
        bench.lend();
        let addr = bench.fill.pop().unwrap();
        // Lent for receiving, so no completion may name it; nor may anything name the others.
        for wrong in [addr, addr + 4096, 16 * 4096, u64::MAX] {
            bench.kernel_completes(wrong);
            assert!(matches!(bench.queues.complete(), Some(Taken::Bad)));
        }
        for wrong in [addr.wrapping_add(4096), 16 * 4096, u64::MAX] {
            bench.kernel_receives(wrong, 60);
            let received = bench.queues.receive().unwrap();
            assert!(matches!(received.taken, Taken::Bad));
        }
        bench.finish();
    }

    #[test]
    fn a_chunk_received_twice_has_one_frame() {
        let mut bench = Bench::new();
        bench.lend();
        let addr = bench.fill.pop().unwrap();
        bench.kernel_receives(addr, 60);
        bench.kernel_receives(addr, 60);
        let first = bench.queues.receive().unwrap().taken;
        assert!(matches!(bench.queues.receive().unwrap().taken, Taken::Bad));
        match first {
            Taken::Good(segment) => bench.pool.give(segment.into_frame()),
            other => panic!("{other:?}"),
        }
        bench.finish();
    }

    #[test]
    fn a_length_that_leaves_the_chunk_yields_the_frame_without_data() {
        let mut bench = Bench::new();
        for (offset, len) in [(256, 3841), (0, u32::MAX), (4095, 2)] {
            bench.lend();
            let addr = bench.fill.pop().unwrap();
            bench.kernel_receives(addr + offset, len);
            match bench.queues.receive().unwrap().taken {
                Taken::Empty(frame) => bench.pool.give(frame),
                other => panic!("{other:?}"),
            }
        }
        bench.finish();
    }

    #[test]
    fn full_rings_hand_frames_back_and_closing_reclaims_the_rest() {
        let mut bench = Bench::new();
        for _ in 0..SIZE {
            bench.lend();
        }
        let frame = bench.pool.take().unwrap();
        let frame = bench.queues.lend(frame).unwrap_err();
        bench.pool.give(frame);
        for _ in 0..SIZE {
            let frame = bench.pool.take().unwrap();
            let segment = Segment::new(frame, 256, 60).unwrap();
            bench.queues.transmit(segment, 0).unwrap();
        }
        assert_eq!(bench.pool.held(), 0);
        bench.finish();
    }
}
