//! A set-associative table: eight ways a set, the least recently used gives way.
//!
//! ```text
//! hash ──low bits──▶ set:  tags  [t0 t1 t2 t3 t4 t5 t6 t7]   half a cache line
//!      ──high bits─▶ tag   entries[e0 … e7]                  touched only on a tag match
//! ```
//!
//! Its size is fixed when it is made; it never grows, rehashes or leaves tombstones, so a
//! lookup reads one line of tags and, on a hit, one entry.

use foldhash::fast::RandomState;

use super::{Action, FlowKey};
use crate::snapshot::Epochs;

const WAYS: usize = 8;

#[derive(Debug)]
struct Entry {
    key: FlowKey,
    action: Action,
    last_used_ms: u32,
}

/// What a lookup found.
#[derive(Debug)]
pub enum Lookup<'a> {
    /// A decision that still stands.
    Hit(&'a Action),
    /// A decision that something it depends on has overtaken.
    Stale,
    /// Nothing.
    Miss,
}

/// A worker's flow table.
///
/// Invariant: `tags[set][way]` is zero exactly where `entries[set * WAYS + way]` is `None`.
#[derive(Debug)]
pub struct FlowTable {
    tags: Box<[[u32; WAYS]]>,
    entries: Box<[Option<Entry>]>,
    hasher: RandomState,
    len: usize,
}

impl FlowTable {
    /// A table with room for at least `flows` flows (rounded up to a power of two, at least 8).
    #[must_use]
    pub fn new(flows: usize) -> Self {
        let sets = (flows.max(WAYS) / WAYS).next_power_of_two();
        Self {
            tags: vec![[0; WAYS]; sets].into_boxed_slice(),
            entries: (0..sets * WAYS).map(|_| None).collect(),
            hasher: RandomState::default(),
            len: 0,
        }
    }

    /// How many flows it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// How many flows it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The hash by which this table knows a key: computed once for lookup and insertion.
    #[inline]
    #[must_use]
    pub fn hash(&self, key: &FlowKey) -> u64 {
        key.hash(&self.hasher)
    }

    /// Looks a flow up and, on a hit, marks it as used now.
    #[inline]
    pub fn lookup(&mut self, hash: u64, key: &FlowKey, epochs: &Epochs, now_ms: u32) -> Lookup<'_> {
        let Some(index) = self.find(hash, key) else {
            return Lookup::Miss;
        };
        let Some(entry) = &mut self.entries[index] else {
            return Lookup::Miss;
        };
        if !entry
            .action
            .depends
            .iter()
            .all(|&stamp| epochs.holds(stamp))
        {
            return Lookup::Stale;
        }
        entry.last_used_ms = now_ms;
        Lookup::Hit(&entry.action)
    }

    /// Keeps a decision; returns it, and whether another flow had to give way.
    pub fn insert(
        &mut self,
        hash: u64,
        key: FlowKey,
        action: Action,
        now_ms: u32,
    ) -> (&Action, bool) {
        let (index, evicted) = match self.find(hash, &key) {
            Some(index) => (index, false),
            None => self.make_room(hash, now_ms),
        };
        if self.entries[index].is_none() {
            self.len += 1;
        }
        self.tags[index / WAYS][index % WAYS] = tag(hash);
        let entry = self.entries[index].insert(Entry {
            key,
            action,
            last_used_ms: now_ms,
        });
        (&entry.action, evicted)
    }

    fn find(&self, hash: u64, key: &FlowKey) -> Option<usize> {
        let (set, tag) = (self.set(hash), tag(hash));
        let tags = &self.tags[set];
        (0..WAYS)
            .filter(|&way| tags[way] == tag)
            .map(|way| set * WAYS + way)
            .find(|&index| {
                self.entries[index]
                    .as_ref()
                    .is_some_and(|entry| entry.key == *key)
            })
    }

    /// A free place in the hash's set, else the one unused for longest.
    fn make_room(&self, hash: u64, now_ms: u32) -> (usize, bool) {
        let first = self.set(hash) * WAYS;
        let idle = |index: usize| match &self.entries[index] {
            None => u32::MAX,
            // Entries used in this very millisecond must not pass for free places.
            Some(entry) => now_ms.wrapping_sub(entry.last_used_ms).min(u32::MAX - 1),
        };
        let index = (first..first + WAYS)
            .max_by_key(|&index| idle(index))
            .unwrap_or(first);
        (index, self.entries[index].is_some())
    }

    fn set(&self, hash: u64) -> usize {
        hash as usize & (self.tags.len() - 1)
    }
}

/// Never zero: zero marks a free place.
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;
    use crate::ids::LinkId;
    use crate::snapshot::{EpochSlot, Snapshot};
    use crate::wire::ethernet::EthernetHeader;

    fn key(number: u16) -> FlowKey {
        fixtures::flow_key(number)
    }

    fn action(egress: u32, epochs: &Epochs) -> Action {
        Action {
            egress: LinkId(egress),
            mtu: 1500,
            decrement_ttl: true,
            nested: false,
            delivery: super::super::Delivery::Local(EthernetHeader {
                dst: fixtures::pod_mac(1, 1),
                src: fixtures::gateway_mac(1, 1),
            }),
            translation: None,
            conn: None,
            depends: [epochs.stamp(EpochSlot::NODE); crate::slow::MOST_STAMPS],
        }
    }

    fn put(table: &mut FlowTable, number: u16, egress: u32, epochs: &Epochs, now: u32) -> bool {
        let key = key(number);
        let hash = table.hash(&key);
        table.insert(hash, key, action(egress, epochs), now).1
    }

    fn egress(table: &mut FlowTable, number: u16, epochs: &Epochs, now: u32) -> Option<u32> {
        let key = key(number);
        let hash = table.hash(&key);
        match table.lookup(hash, &key, epochs, now) {
            Lookup::Hit(action) => Some(action.egress.0),
            Lookup::Stale | Lookup::Miss => None,
        }
    }

    proptest! {
        /// What the table says it holds is what was put in last; what it lost, it said so.
        #[test]
        fn never_a_wrong_answer(ops in prop::collection::vec((0u16..40, any::<bool>()), 0..200)) {
            let tables = Snapshot::empty(fixtures::node(1));
            let mut table = FlowTable::new(16);
            let mut model = HashMap::new();
            let mut evictions = 0;
            for (now, (number, insert)) in (0u32..).zip(ops) {
                if insert {
                    evictions += usize::from(put(&mut table, number, now, tables.epochs(), now));
                    model.insert(number, now);
                } else if let Some(egress) = egress(&mut table, number, tables.epochs(), now) {
                    prop_assert_eq!(Some(&egress), model.get(&number));
                }
            }
            prop_assert!(table.len() <= table.capacity());
            let held = model.keys()
                .filter(|&&number| egress(&mut table, number, tables.epochs(), 0).is_some())
                .count();
            prop_assert_eq!(held, table.len());
            prop_assert!(model.len() <= held + evictions);
        }
    }

    #[test]
    fn the_least_recently_used_gives_way() {
        let tables = Snapshot::empty(fixtures::node(1));
        let epochs = tables.epochs();
        let mut table = FlowTable::new(8);
        for number in 0..8 {
            assert!(!put(
                &mut table,
                number,
                number.into(),
                epochs,
                number.into()
            ));
        }
        assert_eq!(egress(&mut table, 0, epochs, 100), Some(0));
        assert!(put(&mut table, 99, 99, epochs, 101));
        assert_eq!(egress(&mut table, 1, epochs, 102), None);
        assert_eq!(egress(&mut table, 0, epochs, 102), Some(0));
        assert_eq!(egress(&mut table, 99, epochs, 102), Some(99));
    }

    #[test]
    fn the_age_survives_the_wrap_of_the_clock() {
        let tables = Snapshot::empty(fixtures::node(1));
        let epochs = tables.epochs();
        let mut table = FlowTable::new(8);
        for number in 0..8 {
            put(
                &mut table,
                number,
                0,
                epochs,
                (u32::MAX - 3).wrapping_add(number.into()),
            );
        }
        put(&mut table, 99, 99, epochs, 10);
        assert_eq!(egress(&mut table, 0, epochs, 11), None);
    }
}
