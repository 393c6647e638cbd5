//! A link in memory: the test holds the other end, pushes frames in and pops what was sent.
//!
//! It behaves as an AF_XDP socket does where the pipeline can notice: frames come from the pool
//! and spread over chunks, the transmit queue is bounded, what cannot be received is lost and
//! counted, and what was sent keeps its frames until a flush. Deliberately absent: threads,
//! time and descriptors to wait on.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::packet::{Packet, PartialChecksum};
use super::pool::FramePool;
use super::umem::{CHUNK_BYTES, HEADROOM_BYTES};
use super::{BATCH, Flush, Link, LinkCaps, LinkStatistics};
use crate::ids::LinkId;

/// Descriptors that the transmit queue holds, as the ring of a socket.
const TX_DESCRIPTORS: usize = 2048;

/// A packet that the link sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Its bytes, over all segments.
    pub bytes: Vec<u8>,
    /// Lengths of the segments.
    pub segments: Vec<usize>,
    /// The partial checksum that was announced with it.
    pub partial_checksum: Option<PartialChecksum>,
}

/// What the device at the other end does with queued packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Up,
    Stalled,
    Gone,
}

#[derive(Debug, Default)]
struct Shared {
    state: State,
    incoming: VecDeque<Vec<u8>>,
    sent: VecDeque<Sent>,
    statistics: LinkStatistics,
}

/// The datapath's end.
#[derive(Debug)]
pub struct MemoryLink {
    id: LinkId,
    caps: LinkCaps,
    queued: VecDeque<Packet>,
    queued_descriptors: usize,
    shared: Arc<Mutex<Shared>>,
}

/// The test's end.
#[derive(Clone, Debug)]
pub struct MemoryWire {
    shared: Arc<Mutex<Shared>>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryLink {
    /// A link with those capabilities, numbered 0, and the other end of its wire.
    #[must_use]
    pub fn new(caps: LinkCaps) -> (Self, MemoryWire) {
        let shared = Arc::new(Mutex::default());
        let link = Self {
            id: LinkId(0),
            caps,
            queued: VecDeque::new(),
            queued_descriptors: 0,
            shared: Arc::clone(&shared),
        };
        (link, MemoryWire { shared })
    }

    /// The same link with that number, which its packets carry as their ingress.
    #[must_use]
    pub fn with_id(mut self, id: LinkId) -> Self {
        self.id = id;
        self
    }

    fn takes(&self, packet: &Packet) -> bool {
        (self.caps.multi_buffer || packet.segments().len() == 1)
            && (self.caps.partial_checksum || packet.partial_checksum.is_none())
    }

    fn deliver(&mut self, pool: &mut FramePool, keep: bool) {
        let mut shared = lock(&self.shared);
        for packet in self.queued.drain(..) {
            if keep {
                shared.sent.push_back(Sent {
                    bytes: packet.to_vec(pool.umem()),
                    segments: packet.segments().iter().map(|s| s.len()).collect(),
                    partial_checksum: packet.partial_checksum,
                });
            }
            pool.give_packet(packet);
        }
        self.queued_descriptors = 0;
    }
}

impl Link for MemoryLink {
    fn caps(&self) -> LinkCaps {
        self.caps
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        let mut shared = lock(&self.shared);
        let before = batch.len();
        while batch.len() < BATCH {
            let Some(bytes) = shared.incoming.pop_front() else {
                break;
            };
            if !self.caps.multi_buffer && bytes.len() > CHUNK_BYTES - HEADROOM_BYTES {
                shared.statistics.rx_dropped += 1;
                continue;
            }
            match Packet::from_bytes(pool, self.id, &bytes) {
                Some(packet) => batch.push(packet),
                None => shared.statistics.rx_fill_empty += 1,
            }
        }
        batch.len().saturating_sub(before)
    }

    fn send(&mut self, pool: &mut FramePool, packet: Packet) -> Result<(), Packet> {
        if !self.takes(&packet) {
            lock(&self.shared).statistics.tx_invalid += packet.segments().len() as u64;
            pool.give_packet(packet);
            return Ok(());
        }
        let descriptors = self.queued_descriptors + packet.segments().len();
        if descriptors > TX_DESCRIPTORS {
            return Err(packet);
        }
        self.queued_descriptors = descriptors;
        self.queued.push_back(packet);
        Ok(())
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        let state = lock(&self.shared).state;
        match state {
            State::Up => {
                self.deliver(pool, true);
                Flush::Done
            }
            State::Stalled if self.queued.is_empty() => Flush::Done,
            State::Stalled => Flush::Pending,
            State::Gone => {
                self.deliver(pool, false);
                Flush::Dead
            }
        }
    }

    fn statistics(&self) -> LinkStatistics {
        lock(&self.shared).statistics
    }

    fn close(mut self: Box<Self>, pool: &mut FramePool) {
        self.deliver(pool, false);
    }
}

impl MemoryWire {
    /// Has a frame come in; `receive` finds it.
    pub fn push(&self, bytes: Vec<u8>) {
        lock(&self.shared).incoming.push_back(bytes);
    }

    /// The oldest packet sent, once it was flushed.
    #[must_use]
    pub fn pop(&self) -> Option<Sent> {
        lock(&self.shared).sent.pop_front()
    }

    /// All packets sent so far, oldest first.
    #[must_use]
    pub fn drain(&self) -> Vec<Sent> {
        lock(&self.shared).sent.drain(..).collect()
    }

    /// Frames pushed that were not received yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.shared).incoming.len()
    }

    /// Carries what this wire's link sent to the other wire's link; returns how many packets.
    /// The bytes travel as they are: a partial checksum must have been completed before.
    pub fn carry_to(&self, other: &MemoryWire) -> usize {
        let sent = self.drain();
        let count = sent.len();
        let mut shared = lock(&other.shared);
        shared
            .incoming
            .extend(sent.into_iter().map(|packet| packet.bytes));
        count
    }

    /// Has the device take nothing more (`flush` says pending), or take packets again.
    pub fn stall(&self, stalled: bool) {
        lock(&self.shared).state = if stalled { State::Stalled } else { State::Up };
    }

    /// Deletes the device: `flush` says dead.
    pub fn cut(&self) {
        lock(&self.shared).state = State::Gone;
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::FrameStore;
    use super::*;

    const ALL: LinkCaps = LinkCaps {
        multi_buffer: true,
        partial_checksum: true,
    };

    fn pool(chunks: u32) -> FramePool {
        FramePool::new(FrameStore::new(chunks).unwrap())
    }

    #[test]
    fn what_is_pushed_is_received_and_what_is_sent_is_popped() {
        let mut pool = pool(8);
        let (link, wire) = MemoryLink::new(ALL);
        let mut link = link.with_id(LinkId(7));
        let mut batch = Vec::new();
        wire.push(vec![1; 9000]);
        assert_eq!(link.receive(&mut pool, &mut batch), 1);
        let packet = batch.remove(0);
        assert_eq!(packet.ingress, LinkId(7));
        link.send(&mut pool, packet).unwrap();
        assert_eq!(wire.pop(), None);
        assert_eq!(link.flush(&mut pool), Flush::Done);
        let sent = wire.pop().unwrap();
        assert_eq!(sent.bytes, vec![1; 9000]);
        assert_eq!(sent.segments, [3840, 3840, 1320]);
        assert_eq!(pool.held(), 8);
    }

    #[test]
    fn a_batch_is_never_overfilled() {
        let mut pool = pool(128);
        let (mut link, wire) = MemoryLink::new(ALL);
        let mut batch = Vec::new();
        (0..BATCH + 3).for_each(|_| wire.push(vec![0; 60]));
        assert_eq!(link.receive(&mut pool, &mut batch), BATCH);
        assert_eq!(link.receive(&mut pool, &mut batch), 0);
        assert_eq!(wire.waiting(), 3);
        batch.into_iter().for_each(|p| pool.give_packet(p));
    }

    #[test]
    fn what_the_link_cannot_do_is_counted_and_its_frames_come_back() {
        let mut pool = pool(8);
        let (mut link, wire) = MemoryLink::new(LinkCaps::default());
        let mut batch = Vec::new();
        wire.push(vec![0; 9000]);
        assert_eq!(link.receive(&mut pool, &mut batch), 0);
        let large = Packet::from_bytes(&mut pool, LinkId(0), &[0; 5000]).unwrap();
        link.send(&mut pool, large).unwrap();
        let statistics = link.statistics();
        assert_eq!((statistics.rx_dropped, statistics.tx_invalid), (1, 2));
        assert_eq!(pool.held(), 8);
    }

    #[test]
    fn an_empty_pool_loses_the_packet_as_an_empty_fill_ring_does() {
        let mut pool = pool(1);
        let (mut link, wire) = MemoryLink::new(ALL);
        let mut batch = Vec::new();
        wire.push(vec![0; 60]);
        wire.push(vec![0; 60]);
        assert_eq!(link.receive(&mut pool, &mut batch), 1);
        assert_eq!(link.statistics().rx_fill_empty, 1);
        batch.into_iter().for_each(|p| pool.give_packet(p));
    }

    #[test]
    fn a_stalled_device_holds_frames_until_the_queue_is_full_and_close_returns_them() {
        let mut pool = pool(TX_DESCRIPTORS as u32 + 1);
        let (mut link, wire) = MemoryLink::new(ALL);
        wire.stall(true);
        for _ in 0..TX_DESCRIPTORS {
            let packet = Packet::from_bytes(&mut pool, LinkId(0), &[0; 60]).unwrap();
            link.send(&mut pool, packet).unwrap();
        }
        let packet = Packet::from_bytes(&mut pool, LinkId(0), &[0; 60]).unwrap();
        let packet = link.send(&mut pool, packet).unwrap_err();
        pool.give_packet(packet);
        assert_eq!(link.flush(&mut pool), Flush::Pending);
        wire.cut();
        assert_eq!(link.flush(&mut pool), Flush::Dead);
        Box::new(link).close(&mut pool);
        assert_eq!(wire.pop(), None);
        let mut all = Vec::new();
        all.extend(std::iter::from_fn(|| pool.take()));
        assert_eq!(all.len(), TX_DESCRIPTORS + 1);
        all.into_iter().for_each(|frame| pool.give(frame));
    }

    #[test]
    fn wires_carry_packets_between_links() {
        let mut pool = pool(4);
        let (mut a, a_wire) = MemoryLink::new(ALL);
        let (mut b, b_wire) = MemoryLink::new(ALL);
        let packet = Packet::from_bytes(&mut pool, LinkId(0), &[9; 60]).unwrap();
        a.send(&mut pool, packet).unwrap();
        assert_eq!(a.flush(&mut pool), Flush::Done);
        assert_eq!(a_wire.carry_to(&b_wire), 1);
        let mut batch = Vec::new();
        assert_eq!(b.receive(&mut pool, &mut batch), 1);
        batch.into_iter().for_each(|p| pool.give_packet(p));
    }
}
