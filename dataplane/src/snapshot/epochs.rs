//! Epochs: how a cached decision knows that something it depends on has changed.
//!
//! Each endpoint and each peer has a slot with a counter that goes up with every change that
//! matters to flows through it. A flow is stamped with the few slots that its decision depends
//! on and their values; it is decided anew at its next packet when one of them differs. An
//! unrelated change leaves it alone, and nothing is ever flushed.
//!
//! The counters are part of the tables, not shared with control: a worker sees an epoch move at
//! the same moment as the tables that moved it, never before.

use std::sync::Arc;

const CHUNK: usize = 256;

/// One counter of the array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpochSlot(u32);

impl EpochSlot {
    /// What is common to the node: its addresses, uplinks, overlay.
    pub const NODE: Self = Self(0);
    /// Pods in a peer's range that this node has not heard of. It moves when it hears of one.
    pub const STRANGERS: Self = Self(1);
    /// All that is outside the cluster: it moves with the routes there, and when something that
    /// was outside comes to belong to the cluster.
    pub const OUTSIDE: Self = Self(2);
    /// The first that an entry of the tables may have.
    const FIRST_FREE: u32 = 3;
}

/// A slot and the value that it had when a decision was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpochStamp {
    slot: EpochSlot,
    value: u32,
}

/// The counters of one publication; cloning shares the chunks that do not change.
#[derive(Clone, Debug)]
pub struct Epochs {
    chunks: Vec<Arc<[u32; CHUNK]>>,
    free: imbl::Vector<EpochSlot>,
    next: u32,
}

impl Default for Epochs {
    fn default() -> Self {
        Self {
            chunks: vec![Arc::new([0; CHUNK])],
            free: imbl::Vector::new(),
            next: EpochSlot::FIRST_FREE,
        }
    }
}

impl Epochs {
    /// The stamp of a decision that depends on `slot`, taken with these tables.
    #[must_use]
    pub fn stamp(&self, slot: EpochSlot) -> EpochStamp {
        EpochStamp {
            slot,
            value: self.value(slot),
        }
    }

    /// Whether a decision stamped so still stands.
    #[inline]
    #[must_use]
    pub fn holds(&self, stamp: EpochStamp) -> bool {
        self.value(stamp.slot) == stamp.value
    }

    #[inline]
    fn value(&self, slot: EpochSlot) -> u32 {
        let index = slot.0 as usize;
        self.chunks[index / CHUNK][index % CHUNK]
    }

    /// Moves a slot on.
    pub(super) fn bump(&mut self, slot: EpochSlot) {
        let index = slot.0 as usize;
        let chunk = Arc::make_mut(&mut self.chunks[index / CHUNK]);
        chunk[index % CHUNK] = chunk[index % CHUNK].wrapping_add(1);
    }

    /// A slot that nothing else uses.
    pub(super) fn allocate(&mut self) -> EpochSlot {
        if let Some(slot) = self.free.pop_front() {
            return slot;
        }
        let slot = EpochSlot(self.next);
        self.next += 1;
        if slot.0 as usize >= self.chunks.len() * CHUNK {
            self.chunks.push(Arc::new([0; CHUNK]));
        }
        slot
    }

    /// Gives a slot up. It moves on, so that no flow stamped with it holds, whoever has it next.
    pub(super) fn release(&mut self, slot: EpochSlot) {
        self.bump(slot);
        self.free.push_back(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bump_ends_its_own_stamps_and_no_others() {
        let mut epochs = Epochs::default();
        let slots: Vec<_> = (0..600).map(|_| epochs.allocate()).collect();
        let stamps: Vec<_> = slots.iter().map(|&slot| epochs.stamp(slot)).collect();
        let before = epochs.clone();
        epochs.bump(slots[300]);
        for (index, &stamp) in stamps.iter().enumerate() {
            assert!(before.holds(stamp));
            assert_eq!(epochs.holds(stamp), index != 300);
        }
    }

    #[test]
    fn a_slot_used_again_holds_no_old_stamp() {
        let mut epochs = Epochs::default();
        let slot = epochs.allocate();
        let stamp = epochs.stamp(slot);
        epochs.release(slot);
        assert_eq!(epochs.allocate(), slot);
        assert!(!epochs.holds(stamp));
    }
}
