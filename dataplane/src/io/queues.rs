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
