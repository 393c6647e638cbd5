//! How much of the table one owner may hold.
//!
//! The rule: **an owner may hold twice as many connections as places are free.** Alone it can
//! fill two thirds of the table, two together two fifths each, and n take 2 / (2n + 1) each, so
//! whatever some pods do, places are left for a pod that comes later. The rule cannot bite
//! before two thirds of the table are taken, needs no list of who is active, and lets go as
//! soon as connections end. (Switches share their buffer memory among ports by such moving
//! thresholds.)

use std::sync::atomic::{AtomicU32, Ordering};

use crate::ids::EndpointId;

/// Counters; owners whose numbers agree modulo this count as one. A node has a few hundred
/// endpoints at most, numbered one after the other.
const OWNERS: usize = 4096;

/// How many connections each owner holds.
#[derive(Debug)]
pub(super) struct Shares {
    held: Box<[AtomicU32]>,
}

impl Shares {
    pub(super) fn new() -> Self {
        Self {
            held: (0..OWNERS).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Counts one more for the owner, unless its share is used; `free` is how many places
    /// nobody holds.
    pub(super) fn take(&self, owner: EndpointId, free: usize) -> bool {
        let held = self.of(owner).fetch_add(1, Ordering::Relaxed);
        let allowed = held as usize <= 2 * free;
        if !allowed {
            self.give_back(owner);
        }
        allowed
    }

    /// Counts one less for the owner.
    pub(super) fn give_back(&self, owner: EndpointId) {
        let before = self.of(owner).fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "{owner:?} gives back what it does not hold");
    }

    /// How many the owner holds.
    pub(super) fn held(&self, owner: EndpointId) -> u32 {
        self.of(owner).load(Ordering::Relaxed)
    }

    fn of(&self, owner: EndpointId) -> &AtomicU32 {
        &self.held[owner.0 as usize % OWNERS]
    }
}
