//! Which backend a client had last, for Services that keep a client with its backend.
//!
//! Shared by all workers, since a client's connections may meet different ones, and touched once
//! for each new connection to such a Service, never by a known flow. Memory is bounded and taken
//! once: sets of [`WAYS`] entries, each with a lock that is held for one look. A full set lets go
//! of the entry that has not been seen for longest, so the limit costs the oldest client its
//! backend and nobody a connection.

use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::snapshot::{Candidate, ServiceId};
use crate::time::Instant;

/// Entries of a set.
const WAYS: usize = 8;

/// Entries by default: 4 MiB.
const ENTRIES: usize = 65_536;

/// One client's backend.
#[derive(Clone, Copy, Debug)]
struct Kept {
    who: (ServiceId, IpAddr),
    backend: (IpAddr, u16),
    seen: Instant,
}

const _: () = assert!(size_of::<Option<Kept>>() <= 64, "an entry is a cache line");

type Set = [Option<Kept>; WAYS];

/// The backends of clients.
#[derive(Debug)]
pub struct Affinity {
    sets: Box<[Mutex<Set>]>,
    hasher: foldhash::quality::RandomState,
}

impl Default for Affinity {
    fn default() -> Self {
        Self::with_entries(ENTRIES)
    }
}

impl Affinity {
    /// For that many clients of Services at the most; rounded up to whole sets.
    #[must_use]
    pub fn with_entries(entries: usize) -> Self {
        let sets = entries.div_ceil(WAYS).max(1);
        Self {
            sets: (0..sets).map(|_| Mutex::new([None; WAYS])).collect(),
            // Seeded: nobody can aim at one set.
            hasher: foldhash::quality::RandomState::default(),
        }
    }

    /// The backend that the client had, if it was seen within `timeout` and `kept` still finds
    /// the backend; else a fresh one, which it has from now on. Seen now in either case.
    pub(super) fn settle<'a>(
        &self,
        who: (ServiceId, IpAddr),
        timeout: Duration,
        now: Instant,
        kept: impl FnOnce((IpAddr, u16)) -> Option<&'a Candidate>,
        fresh: impl FnOnce() -> Option<&'a Candidate>,
    ) -> Option<&'a Candidate> {
        let index = self.hasher.hash_one(who) % self.sets.len() as u64;
        // An entry is written whole: a panic elsewhere leaves none half-written.
        let mut set = self.sets[index as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let known = set
            .iter()
            .position(|entry| entry.is_some_and(|entry| entry.who == who));
        let backend = known
            .and_then(|at| set[at])
            .filter(|entry| now.since(entry.seen) <= timeout)
            .and_then(|entry| kept(entry.backend))
            .or_else(fresh)?;
        let at = known.unwrap_or_else(|| least_recent(&set));
        set[at] = Some(Kept {
            who,
            backend: (backend.address, backend.port),
            seen: now,
        });
        Some(backend)
    }
}

/// A free entry, or that which has not been seen for longest.
fn least_recent(set: &Set) -> usize {
    let age = |entry: &Option<Kept>| entry.map(|entry| entry.seen);
    (0..WAYS).min_by_key(|&at| age(&set[at])).unwrap_or(0)
}
