//! The index: from tuples to places in the slab.
//!
//! A tuple of 37 bytes would be most of the table's memory, twice a connection; and the tuple
//! stands in the block anyway, which every look-up reads. So the map's key is the tuple's hash
//! in full, 64 bits, and who looks something up compares the tuple in the block. Two tuples of
//! one hash cannot both be in the index: the second counts as taken. With a million connections
//! that happens to one new connection in 10¹³, and an outsider cannot provoke it, the hash
//! being seeded.

use std::hash::{BuildHasher, Hash, Hasher};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use foldhash::fast::RandomState;

use super::{Direction, Tuple};

/// A tuple's hash; bytes, since a number would be aligned, at three bytes a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fingerprint([u8; 8]);

impl Hash for Fingerprint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from_ne_bytes(self.0));
    }
}

/// Where a tuple leads: a block, and which of its connection's tuples it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place([u8; 4]);

/// Bytes of a bucket of the map, with its control byte.
pub(super) const BUCKET_BYTES: usize = size_of::<(Fingerprint, Place)>() + 1;

impl Place {
    pub(super) fn new(index: u32, direction: Direction) -> Self {
        debug_assert!(index <= u32::MAX >> 1, "no such block");
        Self((index << 1 | u32::from(direction == Direction::Reply)).to_ne_bytes())
    }

    pub(super) fn index(self) -> u32 {
        u32::from_ne_bytes(self.0) >> 1
    }

    pub(super) fn direction(self) -> Direction {
        if u32::from_ne_bytes(self.0) & 1 == 0 {
            Direction::Original
        } else {
            Direction::Reply
        }
    }
}

/// Takes a fingerprint for the hash that it is.
#[derive(Clone, Copy, Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Fingerprints are written as numbers; anything else is hashed somehow.
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

impl BuildHasher for AsIs {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        Self(0)
    }
}

/// The map, in parts of which each has a lock of its own.
#[derive(Debug)]
pub(super) struct Index {
    map: DashMap<Fingerprint, Place, AsIs>,
    seed: RandomState,
}

impl Index {
    /// An index of that many buckets in that many parts, both powers of two.
    pub(super) fn new(buckets: usize, parts: usize) -> Self {
        // Asked for as many entries as fill the buckets to the brim, the map makes them.
        let entries = buckets / 8 * 7;
        Self {
            map: DashMap::with_capacity_and_hasher_and_shard_amount(entries, AsIs(0), parts),
            seed: RandomState::default(),
        }
    }

    /// What `judge` says of the place of that fingerprint, whose block, as long as it judges,
    /// does not become free: who removes a connection takes its tuples from here first.
    pub(super) fn look<T>(
        &self,
        tuple: &Tuple,
        judge: impl FnOnce(Place) -> Option<T>,
    ) -> Option<T> {
        let place = self.map.get(&self.fingerprint(tuple))?;
        judge(*place)
    }

    /// Puts a tuple in, or returns what `judge` says of the place that stands there, under the
    /// same condition as [`look`](Self::look).
    pub(super) fn claim<T>(
        &self,
        tuple: &Tuple,
        place: Place,
        judge: impl FnOnce(Place) -> T,
    ) -> Result<(), T> {
        match self.map.entry(self.fingerprint(tuple)) {
            Entry::Vacant(vacant) => {
                vacant.insert(place);
                Ok(())
            }
            Entry::Occupied(occupied) => Err(judge(*occupied.get())),
        }
    }

    /// Takes out a tuple that the caller has put in.
    pub(super) fn remove(&self, tuple: &Tuple) {
        let removed = self.map.remove(&self.fingerprint(tuple));
        debug_assert!(removed.is_some(), "{tuple:?} is not in the index");
    }

    fn fingerprint(&self, tuple: &Tuple) -> Fingerprint {
        Fingerprint(self.seed.hash_one(tuple).to_ne_bytes())
    }

    /// How many tuples it has room for.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.map.capacity()
    }

    /// How many tuples it holds.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }
}
