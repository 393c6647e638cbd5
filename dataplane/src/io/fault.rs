//! A link with faults: what it receives is lost, doubled, cut, damaged or late, by chance that
//! a seed determines.
//!
//! Faults are put on the way in; wrap both ends of a wire for both ways. Deliberately absent:
//! time (a late packet comes with the next receive) and randomness from outside.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use super::packet::Packet;
use super::pool::FramePool;
use super::umem::Umem;
use super::{BATCH, Flush, Link, LinkCaps, LinkStatistics};

/// How many of a thousand packets suffer each fault; one packet may suffer several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Does not arrive.
    pub lose_permille: u16,
    /// Arrives twice, the second a copy.
    pub duplicate_permille: u16,
    /// Arrives without its end.
    pub truncate_permille: u16,
    /// Arrives with one bit flipped.
    pub corrupt_permille: u16,
    /// Arrives after the packets behind it.
    pub delay_permille: u16,
}

/// How many packets suffered each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Lost.
    pub lost: u64,
    /// Doubled.
    pub duplicated: u64,
    /// Cut.
    pub truncated: u64,
    /// Damaged.
    pub corrupted: u64,
    /// Late.
    pub delayed: u64,
}

/// `SplitMix64` (Steele, Lea, Flood 2014): small, and good enough to place faults.
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn strikes(&mut self, permille: u16) -> bool {
        self.below(1000) < usize::from(permille)
    }
}

/// A link with faults on what it receives.
#[derive(Debug)]
pub struct FaultLink<L> {
    link: L,
    faults: Faults,
    chance: Chance,
    counts: FaultCounts,
    late: VecDeque<Packet>,
}

impl<L: Link> FaultLink<L> {
    /// Puts faults on that link; the same seed puts the same.
    #[must_use]
    pub fn new(link: L, faults: Faults, seed: u64) -> Self {
        Self {
            link,
            faults,
            chance: Chance(seed),
            counts: FaultCounts::default(),
            late: VecDeque::new(),
        }
    }

    /// What the packets suffered so far.
    #[must_use]
    pub fn counts(&self) -> FaultCounts {
        self.counts
    }

    fn damage(&mut self, packet: &mut Packet, pool: &mut FramePool) {
        if self.chance.strikes(self.faults.truncate_permille) && packet.len() > 1 {
            let len = 1 + self.chance.below(packet.len() - 1);
            packet.truncate(len, pool);
            self.counts.truncated += 1;
        }
        if self.chance.strikes(self.faults.corrupt_permille) {
            let bit = self.chance.below(packet.len() * 8);
            if flip(packet, bit, pool.umem()) {
                self.counts.corrupted += 1;
            }
        }
    }

    /// Where the packet goes: to the batch, to the late ones, or nowhere.
    fn pass(&mut self, mut packet: Packet, pool: &mut FramePool, batch: &mut Vec<Packet>) {
        if self.chance.strikes(self.faults.lose_permille) {
            self.counts.lost += 1;
            pool.give_packet(packet);
            return;
        }
        self.damage(&mut packet, pool);
        if self.chance.strikes(self.faults.duplicate_permille) {
            let bytes = packet.to_vec(pool.umem());
            if let Some(copy) = Packet::from_bytes(pool, packet.ingress, &bytes) {
                self.counts.duplicated += 1;
                self.late.push_back(copy);
            }
        }
        if self.chance.strikes(self.faults.delay_permille) {
            self.counts.delayed += 1;
            self.late.push_back(packet);
        } else {
            batch.push(packet);
        }
    }
}

/// Flips a bit of the packet; false when it has no such.
fn flip(packet: &mut Packet, bit: usize, umem: &Umem) -> bool {
    let mut byte = bit / 8;
    for segment in packet.segments_mut() {
        if byte < segment.len() {
            let place = segment.offset() + byte;
            umem.bytes_mut(segment.frame_mut())[place] ^= 1 << (bit % 8);
            return true;
        }
        byte -= segment.len();
    }
    false
}

impl<L: Link> Link for FaultLink<L> {
    fn caps(&self) -> LinkCaps {
        self.link.caps()
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.link.poll_fd()
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        let before = batch.len();
        while batch.len() < BATCH {
            let Some(packet) = self.late.pop_front() else {
                break;
            };
            batch.push(packet);
        }
        let count = self.link.receive(pool, batch);
        let received = batch.split_off(batch.len() - count);
        for packet in received {
            self.pass(packet, pool, batch);
        }
        batch.len().saturating_sub(before)
    }

    fn send(&mut self, pool: &mut FramePool, packet: Packet) -> Result<(), Packet> {
        self.link.send(pool, packet)
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        self.link.flush(pool)
    }

    fn statistics(&self) -> LinkStatistics {
        self.link.statistics()
    }

    fn close(self: Box<Self>, pool: &mut FramePool) {
        for packet in self.late {
            pool.give_packet(packet);
        }
        Box::new(self.link).close(pool);
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{MemoryLink, MemoryWire};
    use super::super::pool::FrameStore;
    use super::*;

    const ALL: LinkCaps = LinkCaps {
        multi_buffer: true,
        partial_checksum: true,
    };

    /// Runs numbered frames through a faulty link; returns what arrived.
    fn run(faults: Faults, seed: u64, frames: &[Vec<u8>]) -> (Vec<Vec<u8>>, FaultCounts) {
        let store = FrameStore::new(512).unwrap();
        let mut pool = FramePool::new(store.clone());
        let (link, wire): (_, MemoryWire) = MemoryLink::new(ALL);
        let any: Box<dyn Link> = Box::new(link);
        let mut link = FaultLink::new(any, faults, seed);
        let (mut batch, mut arrived) = (Vec::new(), Vec::new());
        for frame in frames {
            wire.push(frame.clone());
        }
        for _ in 0..frames.len() {
            let count = link.receive(&mut pool, &mut batch);
            assert!(count <= BATCH && count == batch.len());
            for packet in batch.drain(..) {
                arrived.push(packet.to_vec(pool.umem()));
                pool.give_packet(packet);
            }
        }
        let counts = link.counts();
        Box::new(link).close(&mut pool);
        drop(pool);
        assert_eq!(store.available(), 512);
        (arrived, counts)
    }

    fn frames(count: u16) -> Vec<Vec<u8>> {
        (0..count)
            .map(|number| [number.to_be_bytes().as_slice(), &[0; 5000]].concat())
            .collect()
    }

    #[test]
    fn without_faults_everything_arrives_in_order() {
        let frames = frames(200);
        let (arrived, counts) = run(Faults::default(), 1, &frames);
        assert_eq!(arrived, frames);
        assert_eq!(counts, FaultCounts::default());
    }

    #[test]
    fn each_fault_does_what_its_name_says() {
        let frames = frames(300);
        let one = |change: fn(&mut Faults)| {
            let mut faults = Faults::default();
            change(&mut faults);
            run(faults, 7, &frames)
        };
        let (arrived, counts) = one(|f| f.lose_permille = 300);
        assert!(counts.lost > 30);
        assert_eq!(arrived.len() as u64, 300 - counts.lost);

        let (arrived, counts) = one(|f| f.duplicate_permille = 300);
        assert!(counts.duplicated > 30);
        assert_eq!(arrived.len() as u64, 300 + counts.duplicated);

        let (arrived, counts) = one(|f| f.truncate_permille = 300);
        let short = arrived.iter().filter(|frame| frame.len() < 5002).count();
        assert!(short > 30 && short as u64 == counts.truncated);

        let (arrived, counts) = one(|f| f.corrupt_permille = 300);
        let damaged = arrived.iter().zip(&frames).filter(|(a, b)| a != b).count();
        assert!(damaged > 30 && damaged as u64 == counts.corrupted);

        let (mut arrived, counts) = one(|f| f.delay_permille = 300);
        assert!(counts.delayed > 30);
        assert_ne!(arrived, frames);
        arrived.sort();
        assert_eq!(arrived, frames);
    }

    #[test]
    fn a_seed_determines_the_faults() {
        let faults = Faults {
            lose_permille: 100,
            duplicate_permille: 100,
            truncate_permille: 100,
            corrupt_permille: 100,
            delay_permille: 100,
        };
        let frames = frames(100);
        assert_eq!(run(faults, 5, &frames), run(faults, 5, &frames));
        assert_ne!(run(faults, 5, &frames), run(faults, 6, &frames));
    }
}
