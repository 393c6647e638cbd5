//! Making room: what has expired is swept out, and before the table is full the connections
//! worth least give way.
//!
//! Both walk the slab with a hand of their own that only goes forward, a bounded number of
//! places each time, so no insertion ever looks through the table, and an outsider has no say
//! in what is looked at.

use std::sync::atomic::Ordering;

use super::block::Life;
use super::state::Worth;
use super::stats::Departure;
use super::table::Connections;
use crate::time::Instant;

/// Room is short when no more than one place in so many is free.
const SHORT: usize = 16;
/// How many blocks one eviction looks at, to find the one worth least.
const SAMPLE: usize = 16;
/// How many evictions may be tried for one new connection when room is short: enough that
/// stretches of established connections do not stop it, and a bound on the work.
const SAMPLES: usize = 8;

impl Connections {
    /// Takes out what has expired among the next `budget` places; returns how many that were.
    /// All places must come by within days: deadlines have 32 bits of milliseconds, and what
    /// expired more than 24 days ago would pass for alive.
    pub fn sweep(&self, now: Instant, budget: usize) -> usize {
        self.told(now);
        let now_ms = now.millis_wrapping();
        let budget = budget.min(self.capacity());
        let start = self.sweep_hand.fetch_add(budget, Ordering::Relaxed);
        (start..start.wrapping_add(budget))
            .filter(|&at| self.expire(self.index(at), now_ms))
            .count()
    }

    /// A free block, counted. When room is short, connections worth less than established ones
    /// give way, faster than new ones come; when there is none, whatever is worth least.
    pub(super) fn place(&self, now_ms: u32) -> Option<u32> {
        if self.free() <= self.capacity() / SHORT {
            let samples = SAMPLES.min(self.capacity().div_ceil(SAMPLE));
            (0..samples)
                .filter(|_| self.evict(now_ms, Worth::Little))
                .nth(1);
        }
        let index = self.slab.pop().or_else(|| {
            self.evict(now_ms, Worth::Much);
            self.slab.pop()
        })?;
        self.len.fetch_add(1, Ordering::Relaxed);
        Some(index)
    }

    /// Looks at a few places behind the hand and takes out the connection worth least, if it is
    /// worth no more than `most`; of equals, one of the owner that holds most, then the one
    /// nearest its end. False when there was none.
    fn evict(&self, now_ms: u32, most: Worth) -> bool {
        let sample = SAMPLE.min(self.capacity());
        let start = self.eviction_hand.fetch_add(sample, Ordering::Relaxed);
        let victim = (start..start.wrapping_add(sample))
            .filter_map(|at| self.candidate(self.index(at), now_ms))
            .filter(|candidate| candidate.worth <= most)
            .min_by_key(|candidate| {
                let left_ms = candidate.life.deadline_ms().wrapping_sub(now_ms);
                (candidate.worth, u32::MAX - candidate.held, left_ms)
            });
        let Some(Candidate { index, life, .. }) = victim else {
            return false;
        };
        let evicted = self.slab.block(index).condemn(life).is_ok();
        if evicted {
            self.retire(index, Departure::Evicted);
        }
        evicted
    }

    /// What stands at a place, as something to evict. What has expired already is taken out on
    /// the way.
    fn candidate(&self, index: u32, now_ms: u32) -> Option<Candidate> {
        if self.expire(index, now_ms) {
            return None;
        }
        let block = self.slab.block(index);
        let life = block.life();
        let state = life.state().filter(|_| !life.is_entering())?;
        Some(Candidate {
            index,
            life,
            worth: state.worth(),
            held: self.shares.held(block.owner()),
        })
    }

    fn expire(&self, index: u32, now_ms: u32) -> bool {
        let block = self.slab.block(index);
        let life = block.life();
        let expired = life.state().is_some() && !life.is_entering() && life.is_expired(now_ms);
        if expired && block.condemn(life).is_ok() {
            self.retire(index, Departure::Expired);
            return true;
        }
        false
    }

    /// The place that a hand points at.
    pub(super) fn index(&self, at: usize) -> u32 {
        // There are less than 2³¹ blocks.
        (at % self.capacity()) as u32
    }

    /// How many places nobody holds.
    pub(super) fn free(&self) -> usize {
        self.capacity().saturating_sub(self.len())
    }
}

/// A connection that could be evicted.
struct Candidate {
    index: u32,
    life: Life,
    worth: Worth,
    held: u32,
}
