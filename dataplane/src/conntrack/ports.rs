//! Ports for masquerade: which of the node's ports stands for which pod's.
//!
//! While ports last a mapping is endpoint-independent (RFC 4787 section 4.1): an internal
//! address and port keep one external port to themselves, whatever they talk to. When every
//! port has an owner, ports are shared among connections to different destinations; then the
//! connection table tells them apart, and a lease whose tuples it finds taken is asked for
//! again with the next attempt. ICMP echo identifiers are ports here.
//!
//! ```text
//! ports of one family and protocol     slot: owner's fingerprint 40 │ busy 1 │ connections 23
//!  [s0 s1 s2 …]                        home: owned ports 16 │ farthest 16
//!       ▲ home of an owner = fingerprint mod ports; it looks from there on
//! ```
//!
//! An owner's port lies at most `farthest` behind its home, so looking for it ends early; the
//! bound is forgotten when a home has no ports left. All is atomics: a lease costs a handful of
//! reads until the pool is nearly empty, and then at most [`MAX_STEPS`].

use std::fmt;
use std::hash::BuildHasher;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use foldhash::fast::RandomState;

use super::Tuple;
use crate::wire::protocol;

/// How many slots one search may look at. In a larger pool a port may be shared while the last
/// free ones lie farther than this.
pub const MAX_STEPS: usize = 4096;
/// How many attempts a connection has to find a port that no other connection uses to the same
/// destination.
pub const MAX_ATTEMPTS: u32 = 64;

/// IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Is told when a port comes into use and when it is free again, one port's changes strictly
/// one after the other. What decides which packets the datapath takes from the uplink follows.
pub trait PortClaims {
    /// From now on packets to that port of the node are ours.
    fn claim(&self, family: Family, protocol: u8, port: u16);
    /// From now on they are not.
    fn unclaim(&self, family: Family, protocol: u8, port: u16);
}

/// For those who need not know.
struct Nobody;

impl PortClaims for Nobody {
    fn claim(&self, _: Family, _: u8, _: u16) {}
    fn unclaim(&self, _: Family, _: u8, _: u16) {}
}

/// The protocols that have ports to lease, in the order of their pools.
const PROTOCOLS: [(Family, u8); 8] = [
    (Family::V4, protocol::TCP),
    (Family::V4, protocol::UDP),
    (Family::V4, protocol::SCTP),
    (Family::V4, protocol::ICMP),
    (Family::V6, protocol::TCP),
    (Family::V6, protocol::UDP),
    (Family::V6, protocol::SCTP),
    (Family::V6, protocol::ICMPV6),
];

/// A port in use by a connection. Copies are the same lease; it ends once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortLease {
    /// The external port, or identifier.
    pub port: u16,
    kind: u8,
}

impl PortLease {
    /// The pool that it is from, below 16.
    pub(super) fn kind(self) -> u8 {
        self.kind
    }

    pub(super) fn from_kind(port: u16, kind: u8) -> Self {
        Self { port, kind }
    }
}

/// The ports of all families and protocols.
pub struct PortPool {
    first: u16,
    kinds: [Kind; PROTOCOLS.len()],
    hasher: RandomState,
    claims: Box<dyn PortClaims + Send + Sync>,
    exhausted: AtomicU64,
    shared: AtomicU64,
}

/// The ports of one family and protocol.
struct Kind {
    slots: Box<[AtomicU64]>,
    homes: Box<[AtomicU32]>,
    in_use: AtomicUsize,
}

const FINGERPRINT_SHIFT: u32 = 24;
const BUSY: u64 = 1 << 23;
const CONNECTIONS: u64 = BUSY - 1;
/// How long a search waits for a slot that another thread is changing, in turns of a loop. A
/// change is a store or a system call away from its end.
const PATIENCE: u32 = 1000;

fn fingerprint_of(slot: u64) -> u64 {
    slot >> FINGERPRINT_SHIFT
}

impl PortPool {
    /// A pool of that range, for each family and protocol.
    #[must_use]
    pub fn new(range: RangeInclusive<u16>) -> Self {
        Self::with_claims(range, Box::new(Nobody))
    }

    /// A pool whose changes `claims` follows.
    #[must_use]
    pub fn with_claims(
        range: RangeInclusive<u16>,
        claims: Box<dyn PortClaims + Send + Sync>,
    ) -> Self {
        let ports = range.len();
        Self {
            first: *range.start(),
            kinds: std::array::from_fn(|_| Kind {
                slots: (0..ports).map(|_| AtomicU64::new(0)).collect(),
                homes: (0..ports).map(|_| AtomicU32::new(0)).collect(),
                in_use: AtomicUsize::new(0),
            }),
            hasher: RandomState::default(),
            claims,
            exhausted: AtomicU64::new(0),
            shared: AtomicU64::new(0),
        }
    }

    /// A port for a connection from `internal`'s source. Attempt 0 gives the port that the
    /// source owns, else one that is free, else one that is shared; each attempt after that,
    /// for when the connection's tuples were taken, another one. `excluded` are ports that must
    /// not be leased, since something else on the node uses them.
    ///
    /// `None` when there is none, which is counted, or for a protocol without ports.
    #[must_use]
    pub fn lease(
        &self,
        internal: &Tuple,
        external_family_v4: bool,
        excluded: impl Fn(u16) -> bool,
        attempt: u32,
    ) -> Option<PortLease> {
        let number = kind_of(internal.protocol, external_family_v4)?;
        let search = self.search(number, internal);
        let found = (attempt < MAX_ATTEMPTS && search.ports() > 0)
            .then(|| search.find(excluded, attempt))
            .flatten();
        if found.is_none() {
            self.exhausted.fetch_add(1, Ordering::Relaxed);
        }
        found.map(|index| self.lease_of(number, index))
    }

    /// The lease of exactly that port, for a connection that was read back from a journal.
    /// `None` when it is not of this pool, or owned by another internal address.
    #[must_use]
    pub fn lease_again(
        &self,
        internal: &Tuple,
        external_family_v4: bool,
        port: u16,
    ) -> Option<PortLease> {
        let number = kind_of(internal.protocol, external_family_v4)?;
        let search = self.search(number, internal);
        let index = usize::from(port.checked_sub(self.first)?);
        if index >= search.ports() {
            return None;
        }
        (search.join(index, |_| true) || search.own(index)).then(|| self.lease_of(number, index))
    }

    /// Ends a lease: one connection less uses the port.
    pub fn release(&self, lease: PortLease) {
        let kind = &self.kinds[usize::from(lease.kind)];
        let index = usize::from(lease.port - self.first);
        let slot = &kind.slots[index];
        loop {
            let value = slot.load(Ordering::Acquire);
            // A slot is busy only before its first lease and after its last, never beside one.
            assert!(
                value & BUSY == 0 && value & CONNECTIONS > 0,
                "port {} is released more often than leased",
                lease.port
            );
            let last = value & CONNECTIONS == 1;
            let next = if last { (value - 1) | BUSY } else { value - 1 };
            if slot
                .compare_exchange_weak(value, next, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            if last {
                let (family, protocol) = PROTOCOLS[usize::from(lease.kind)];
                self.claims.unclaim(family, protocol, lease.port);
                kind.leave_home(fingerprint_of(value));
                kind.in_use.fetch_sub(1, Ordering::Relaxed);
                slot.store(0, Ordering::Release);
            }
            return;
        }
    }

    /// How many ports of a family and protocol have an owner; zero for a protocol without
    /// ports.
    #[must_use]
    pub fn in_use(&self, family_v4: bool, protocol: u8) -> usize {
        kind_of(protocol, family_v4).map_or(0, |number| {
            self.kinds[number].in_use.load(Ordering::Relaxed)
        })
    }

    /// How many ports each family and protocol has.
    #[must_use]
    pub fn ports(&self) -> usize {
        self.kinds[0].slots.len()
    }

    /// Leases that found no port.
    #[must_use]
    pub fn exhausted(&self) -> u64 {
        self.exhausted.load(Ordering::Relaxed)
    }

    /// Leases of a port that another internal address owns.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.shared.load(Ordering::Relaxed)
    }

    fn search(&self, number: usize, internal: &Tuple) -> Search<'_> {
        Search {
            pool: self,
            number,
            kind: &self.kinds[number],
            fingerprint: self.fingerprint(internal),
        }
    }

    fn lease_of(&self, number: usize, index: usize) -> PortLease {
        PortLease {
            port: self.first + index as u16,
            kind: number as u8,
        }
    }

    /// Two sources with one fingerprint would share a port as if they were one; a connection of
    /// theirs to the same destination is then told apart like those of any shared port.
    fn fingerprint(&self, internal: &Tuple) -> u64 {
        self.hasher.hash_one((internal.src, internal.src_port)) >> FINGERPRINT_SHIFT
    }
}

impl fmt::Debug for PortPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortPool")
            .field("first", &self.first)
            .field("ports", &self.ports())
            .finish_non_exhaustive()
    }
}

/// The number of the pool of a protocol; `None` for one without ports.
fn kind_of(protocol: u8, family_v4: bool) -> Option<usize> {
    let family = if family_v4 { Family::V4 } else { Family::V6 };
    PROTOCOLS
        .iter()
        .position(|&kind| kind == (family, protocol))
}

impl Kind {
    fn home(&self, fingerprint: u64) -> usize {
        (fingerprint % self.slots.len() as u64) as usize
    }

    fn enter_home(&self, fingerprint: u64, distance: usize) {
        self.change_home(fingerprint, |count, farthest| {
            (count + 1, farthest.max(distance as u32))
        });
    }

    fn leave_home(&self, fingerprint: u64) {
        self.change_home(fingerprint, |count, farthest| {
            (count - 1, if count == 1 { 0 } else { farthest })
        });
    }

    fn change_home(&self, fingerprint: u64, change: impl Fn(u32, u32) -> (u32, u32)) {
        let word = &self.homes[self.home(fingerprint)];
        let mut value = word.load(Ordering::Relaxed);
        loop {
            let (count, farthest) = change(value >> 16, value & 0xffff);
            let next = count << 16 | farthest;
            match word.compare_exchange_weak(value, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => value = other,
            }
        }
    }
}

/// One search for a port.
struct Search<'a> {
    pool: &'a PortPool,
    number: usize,
    kind: &'a Kind,
    fingerprint: u64,
}

impl Search<'_> {
    fn ports(&self) -> usize {
        self.kind.slots.len()
    }

    /// The index that lies that far behind the home.
    fn at(&self, distance: usize) -> usize {
        (self.kind.home(self.fingerprint) + distance) % self.ports()
    }

    fn find(&self, excluded: impl Fn(u16) -> bool, attempt: u32) -> Option<usize> {
        let excluded = |index: usize| excluded(self.pool.first + index as u16);
        if attempt == 0
            && let Some(index) = self.owned(&excluded)
        {
            return Some(index);
        }
        // Each attempt looks from another place, spread over the ports by a fixed irrational
        // step, so that no two attempts meet the same run.
        let start = (attempt as usize).wrapping_mul(0x9e37) % self.ports();
        if self.kind.in_use.load(Ordering::Relaxed) < self.ports()
            && let Some(index) = self.free(&excluded, start)
        {
            return Some(index);
        }
        let index = self.shared(&excluded, start)?;
        self.pool.shared.fetch_add(1, Ordering::Relaxed);
        Some(index)
    }

    /// The port that the source owns already.
    fn owned(&self, excluded: &impl Fn(usize) -> bool) -> Option<usize> {
        let home = self.kind.homes[self.kind.home(self.fingerprint)].load(Ordering::Acquire);
        if home >> 16 == 0 {
            return None;
        }
        let farthest = (home & 0xffff) as usize;
        (0..=farthest.min(MAX_STEPS))
            .map(|distance| self.at(distance))
            .find(|&index| {
                let value = self.kind.slots[index].load(Ordering::Relaxed);
                fingerprint_of(value) == self.fingerprint
                    && value != 0
                    && !excluded(index)
                    && self.join(index, |owner| owner == self.fingerprint)
            })
    }

    /// A free port, the source's from now on.
    fn free(&self, excluded: &impl Fn(usize) -> bool, start: usize) -> Option<usize> {
        (start..start + self.ports().min(MAX_STEPS))
            .map(|distance| self.at(distance))
            .find(|&index| {
                let value = self.kind.slots[index].load(Ordering::Relaxed);
                if value == 0 {
                    return !excluded(index) && self.own(index);
                }
                // Another thread may have made it ours a moment ago.
                start == 0
                    && fingerprint_of(value) == self.fingerprint
                    && self.join(index, |owner| owner == self.fingerprint)
            })
    }

    /// A port that others use, to other destinations.
    fn shared(&self, excluded: &impl Fn(usize) -> bool, start: usize) -> Option<usize> {
        (start..start + self.ports().min(MAX_STEPS))
            .map(|distance| self.at(distance))
            .find(|&index| !excluded(index) && self.join(index, |_| true))
    }

    /// Makes a free port the source's; false when it is not free.
    fn own(&self, index: usize) -> bool {
        let slot = &self.kind.slots[index];
        let mark = self.fingerprint << FINGERPRINT_SHIFT;
        // Before the slot says so, or a search could miss it.
        let home = self.kind.home(self.fingerprint);
        let distance = (index + self.ports() - home) % self.ports();
        self.kind.enter_home(self.fingerprint, distance);
        if slot
            .compare_exchange(0, mark | BUSY, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            self.kind.leave_home(self.fingerprint);
            return false;
        }
        self.kind.in_use.fetch_add(1, Ordering::Relaxed);
        let (family, protocol) = PROTOCOLS[self.number];
        let port = self.pool.first + index as u16;
        self.pool.claims.claim(family, protocol, port);
        slot.store(mark | 1, Ordering::Release);
        true
    }

    /// One connection more on a port in use, if its owner suits.
    fn join(&self, index: usize, suits: impl Fn(u64) -> bool) -> bool {
        let slot = &self.kind.slots[index];
        let mut patience = PATIENCE;
        loop {
            let value = slot.load(Ordering::Acquire);
            if value == 0 || !suits(fingerprint_of(value)) {
                return false;
            }
            if value & BUSY != 0 {
                if patience == 0 {
                    return false;
                }
                patience -= 1;
                std::hint::spin_loop();
                continue;
            }
            if value & CONNECTIONS == CONNECTIONS {
                return false;
            }
            if slot
                .compare_exchange_weak(value, value + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;

    use super::*;

    const FIRST: u16 = 61000;

    fn internal(number: u16) -> Tuple {
        let mut src = [0; 16];
        src[..2].copy_from_slice(&number.to_be_bytes());
        Tuple {
            src,
            dst: [1; 16],
            src_port: 1000,
            dst_port: 53,
            protocol: protocol::UDP,
        }
    }

    fn lease(pool: &PortPool, number: u16) -> Option<PortLease> {
        pool.lease(&internal(number), true, |_| false, 0)
    }

    /// Holds the pool to one claim, one unclaim, in turns.
    #[derive(Default)]
    struct Turns(HashMap<u16, AtomicBool>);

    impl PortClaims for Arc<Turns> {
        fn claim(&self, _: Family, _: u8, port: u16) {
            assert!(!self.0[&port].swap(true, Ordering::SeqCst), "claimed twice");
        }
        fn unclaim(&self, _: Family, _: u8, port: u16) {
            assert!(self.0[&port].swap(false, Ordering::SeqCst), "not claimed");
        }
    }

    fn watched(ports: u16) -> (PortPool, Arc<Turns>) {
        let range = FIRST..=FIRST + (ports - 1);
        let turns = Turns(range.clone().map(|port| (port, false.into())).collect());
        let turns = Arc::new(turns);
        let pool = PortPool::with_claims(range, Box::new(Arc::clone(&turns)));
        (pool, turns)
    }

    fn claimed(turns: &Turns) -> usize {
        let values = turns.0.values();
        values.filter(|on| on.load(Ordering::SeqCst)).count()
    }

    #[test]
    fn a_source_keeps_its_port_and_has_it_alone() {
        let (pool, turns) = watched(100);
        let leases: Vec<_> = (0..100)
            .map(|number| lease(&pool, number).unwrap())
            .collect();
        let ports: HashSet<_> = leases.iter().map(|lease| lease.port).collect();
        assert_eq!(ports.len(), 100);
        for number in 0..100 {
            assert_eq!(lease(&pool, number), Some(leases[usize::from(number)]));
        }
        assert_eq!(pool.in_use(true, protocol::UDP), 100);
        assert_eq!((claimed(&turns), pool.shared()), (100, 0));
        for lease in &leases {
            pool.release(*lease);
        }
        assert_eq!(claimed(&turns), 100);
        for lease in &leases {
            pool.release(*lease);
        }
        assert_eq!((claimed(&turns), pool.in_use(true, protocol::UDP)), (0, 0));
    }

    #[test]
    fn when_all_have_owners_they_are_shared_differently_by_each_attempt() {
        let (pool, turns) = watched(50);
        for number in 0..50 {
            lease(&pool, number).unwrap();
        }
        let attempts = (0..MAX_ATTEMPTS)
            .map(|attempt| pool.lease(&internal(99), true, |_| false, attempt).unwrap());
        let ports: HashSet<_> = attempts.map(|lease| lease.port).collect();
        assert!(ports.len() > 25, "{}", ports.len());
        assert_eq!(pool.shared(), MAX_ATTEMPTS.into());
        assert_eq!(
            pool.lease(&internal(99), true, |_| false, MAX_ATTEMPTS),
            None
        );
        assert_eq!((pool.exhausted(), claimed(&turns)), (1, 50));
    }

    #[test]
    fn excluded_ports_are_never_leased() {
        let (pool, _) = watched(20);
        let excluded = |port: u16| port.is_multiple_of(2);
        for number in 0..30 {
            for attempt in 0..3 {
                let lease = pool.lease(&internal(number), true, excluded, attempt);
                assert!(!excluded(lease.unwrap().port));
            }
        }
        assert_eq!(pool.in_use(true, protocol::UDP), 10);
        assert_eq!(pool.lease(&internal(77), true, |_| true, 0), None);
    }

    #[test]
    fn families_and_protocols_have_ports_of_their_own() {
        let pool = PortPool::new(FIRST..=FIRST);
        for (family, protocol) in PROTOCOLS {
            let v4 = family == Family::V4;
            let internal = Tuple {
                protocol,
                ..internal(1)
            };
            assert!(pool.lease(&internal, v4, |_| false, 0).is_some());
            assert_eq!(pool.in_use(v4, protocol), 1);
        }
        assert_eq!(pool.shared(), 0);
        let other = Tuple {
            protocol: 99,
            ..internal(1)
        };
        assert_eq!(pool.lease(&other, true, |_| false, 0), None);
        assert_eq!(pool.exhausted(), 0);
    }

    proptest! {
        /// Against maps: exclusive and stable while ports last, all back at the end.
        #[test]
        fn as_a_naive_pool(ops in prop::collection::vec((0u16..12, any::<bool>()), 1..200)) {
            let (pool, turns) = watched(8);
            let mut held: Vec<(u16, PortLease)> = Vec::new();
            for (number, take) in ops {
                if !take {
                    if let Some(at) = held.iter().position(|&(owner, _)| owner == number) {
                        pool.release(held.swap_remove(at).1);
                    }
                    continue;
                }
                let used: HashSet<_> = held.iter().map(|(_, lease)| lease.port).collect();
                let shared = pool.shared();
                let lease = lease(&pool, number).unwrap();
                if pool.shared() == shared && !used.contains(&lease.port) {
                    prop_assert!(used.len() < 8);
                } else if pool.shared() > shared {
                    prop_assert_eq!(used.len(), 8);
                }
                held.push((number, lease));
            }
            let used: HashSet<_> = held.iter().map(|(_, lease)| lease.port).collect();
            prop_assert_eq!(pool.in_use(true, protocol::UDP), used.len());
            prop_assert_eq!(claimed(&turns), used.len());
            for (_, lease) in held {
                pool.release(lease);
            }
            prop_assert_eq!(pool.in_use(true, protocol::UDP), 0);
            prop_assert_eq!(claimed(&turns), 0);
            prop_assert!(pool.kinds[1].homes.iter().all(|home| home.load(Ordering::Relaxed) == 0));
        }
    }

    #[test]
    fn threads_leave_nothing_behind() {
        let (pool, turns) = watched(16);
        std::thread::scope(|scope| {
            for thread in 0..4u16 {
                let pool = &pool;
                scope.spawn(move || {
                    let mut held = std::collections::VecDeque::new();
                    for round in 0..50_000u16 {
                        let number = round.wrapping_mul(31).wrapping_add(thread) % 40;
                        held.extend(lease(pool, number));
                        if held.len() > usize::from(round % 13) {
                            held.drain(..).for_each(|lease| pool.release(lease));
                        }
                    }
                    held.into_iter().for_each(|lease| pool.release(lease));
                });
            }
        });
        assert_eq!(pool.in_use(true, protocol::UDP), 0);
        assert_eq!(claimed(&turns), 0);
        let kind = &pool.kinds[1];
        assert!(
            kind.slots
                .iter()
                .all(|slot| slot.load(Ordering::Relaxed) == 0)
        );
        assert!(
            kind.homes
                .iter()
                .all(|home| home.load(Ordering::Relaxed) == 0)
        );
    }
}
