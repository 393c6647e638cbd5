//! The table: from tuples to connections, and their coming and going.
//!
//! ```text
//! index: original tuple ─▶ place (block 31, direction 1) ─┐
//!        reply tuple ────▶ place ─────────────────────────┴─▶ slab: block ─▶ life, tuples, …
//! ```
//!
//! A connection enters block first, then one tuple after the other, in an order that makes
//! workers that meet it at once meet at the same tuple: one of them is first there, the other
//! leaves nothing behind and finds the connection. It leaves the other way round: its block is condemned, by one
//! thread alone, its tuples leave the index, then the block is free. So while a tuple's part of
//! the index is locked, the block that the tuple leads to can be relied on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::block::{Life, Record, Slab};
use super::index::{Index, Place};
use super::ports::{PortLease, PortPool};
use super::share::Shares;
use super::state::{self, State, Tags, Tracked, Worth};
use super::stats::{ConnectionStats, Counts, Departure};
use super::timeouts::Timeouts;
use super::{Direction, Limits, Segment, Tuple};
use crate::ids::EndpointId;
use crate::time::Instant;

/// Room is short when no more than one place in so many is free.
const SHORT: usize = 16;
/// How many blocks one eviction looks at, to find the one worth least.
const SAMPLE: usize = 16;
/// How many evictions may be tried for one new connection when room is short: enough that
/// stretches of established connections do not stop it, and a bound on the work.
const SAMPLES: usize = 8;
/// How often a tuple whose connection is on its way out is tried again before it counts as
/// taken: the other thread is a few stores from its end.
const ENTRY_TRIES: u32 = 256;

/// A connection: stays valid, or says that it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    index: u32,
    generation: u32,
}

const _: () = assert!(size_of::<ConnRef>() == 8, "flow-table entries keep one");

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The connection.
    pub conn: ConnRef,
    /// Which of its tuples was asked for.
    pub direction: Direction,
    /// The tuple of the packet that began it, as that was sent.
    pub original: Tuple,
    /// The tuple of answers, as they arrive: the reverse of the original after translation.
    pub reply: Tuple,
}

/// A connection to put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewConnection {
    /// The tuple of its first packet, as that was sent.
    pub original: Tuple,
    /// The tuple that answers will have when they arrive.
    pub reply: Tuple,
    /// Whose fair share it counts against.
    pub owner: EndpointId,
    /// The port of its masquerade. From the call on it is the table's to release: when the
    /// connection leaves, or at once if it is refused.
    pub masquerade: Option<PortLease>,
    /// TCP met in its middle.
    pub picked_up: bool,
    /// The Service that it was translated for, as an opaque number; zero for none.
    pub service: u32,
}

/// Why a connection was not put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// One of its tuples is another connection's.
    #[error("a connection with one of these tuples exists: look it up, or try another port")]
    Taken,
    /// No room, and all that was looked at for eviction is on its way in or out.
    #[error("the connection table is full: raise conntrack.max")]
    Full,
    /// The owner holds twice as many as places are free.
    #[error(
        "the owner's share of the connection table is used: close connections, or raise conntrack.max"
    )]
    ShareUsed,
}

/// Why a connection was not put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The journal names a state that does not exist.
    #[error("{0} is no state of a connection: the journal is damaged or of another version")]
    NoSuchState(u8),
    /// It was refused like a new one.
    #[error(transparent)]
    Refused(#[from] CreateError),
}

/// A connection as views show it and a journal keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The tuple of its first packet.
    pub original: Tuple,
    /// The tuple of its answers.
    pub reply: Tuple,
    /// Whose share it counts against.
    pub owner: EndpointId,
    /// The Service, zero for none.
    pub service: u32,
    /// [`State::number`].
    pub state: u8,
    /// What views call the state.
    pub state_name: &'static str,
    /// TCP met in its middle.
    pub picked_up: bool,
    /// The port that stands for the sender's, where it is masqueraded.
    pub masquerade: Option<PortLease>,
    /// SCTP's verification tags.
    pub tags: Tags,
    /// Since the last packet that prolonged it.
    pub idle: Duration,
    /// Until it expires.
    pub remaining: Duration,
    /// Since it was put in; counted modulo 49 days.
    pub age: Duration,
}

/// What stands in the way of a tuple.
enum Occupant {
    /// A connection that lives.
    Lives,
    /// One whose time is over, not yet taken out.
    Expired(u32, Life),
    /// One that another thread is taking out.
    Leaves,
}

/// The connection table, shared by all workers.
#[derive(Debug)]
pub struct Connections {
    index: Index,
    slab: Slab,
    len: AtomicUsize,
    shares: Shares,
    counts: Counts,
    timeouts: Timeouts,
    ports: Option<Arc<PortPool>>,
    /// Where the next sweep begins, and the next eviction.
    sweep_hand: AtomicUsize,
    eviction_hand: AtomicUsize,
    /// The latest time that the table was told of.
    latest_ns: AtomicU64,
}

impl Connections {
    /// A table with all its memory, within these limits. Putting connections in allocates
    /// nothing more.
    #[must_use]
    pub fn new(limits: Limits, timeouts: Timeouts) -> Self {
        let (buckets, parts) = limits.index_shape();
        Self {
            index: Index::new(buckets, parts),
            // Limits::MOST has 26 bits.
            slab: Slab::new(limits.connections() as u32),
            len: AtomicUsize::new(0),
            shares: Shares::new(),
            counts: Counts::default(),
            timeouts,
            ports: None,
            sweep_hand: AtomicUsize::new(0),
            eviction_hand: AtomicUsize::new(0),
            latest_ns: AtomicU64::new(0),
        }
    }

    /// The same, releasing the leases of masqueraded connections to that pool.
    #[must_use]
    pub fn with_ports(self, ports: Arc<PortPool>) -> Self {
        Self {
            ports: Some(ports),
            ..self
        }
    }

    /// How many connections there are, expired ones that were not swept yet included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many there may be.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slab.len()
    }

    /// How many connections count against an owner's share.
    #[must_use]
    pub fn held_by(&self, owner: EndpointId) -> usize {
        self.shares.held(owner) as usize
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        self.counts.snapshot()
    }

    /// The connection that a packet with that tuple belongs to, if there is one that has not
    /// expired.
    #[must_use]
    pub fn find(&self, tuple: &Tuple, now: Instant) -> Option<Found> {
        let now_ms = now.millis_wrapping();
        let here = self.index.look(tuple, |place| {
            self.found(place.index(), place.direction(), tuple, now_ms)
        });
        // Of an untranslated connection that another worker is just putting in, only the
        // reverse may be there yet.
        here.or_else(|| {
            self.index.look(&tuple.reversed(), |place| {
                self.found(place.index(), place.direction().opposite(), tuple, now_ms)
            })
        })
    }

    /// Whether the connection is there and has not expired. Reads one cache line.
    #[inline]
    #[must_use]
    pub fn alive(&self, conn: ConnRef, now: Instant) -> bool {
        self.life_of(conn, now.millis_wrapping()).is_some()
    }

    /// The state of a connection that is there and has not expired.
    #[must_use]
    pub fn state(&self, conn: ConnRef, now: Instant) -> Option<State> {
        self.life_of(conn, now.millis_wrapping())
            .map(|(_, state)| state)
    }

    /// Lets a packet of the connection move its state and prolong its life; false when the
    /// connection is gone. Takes no lock. Every SYN, FIN and RST and every SCTP control chunk
    /// must come by here, other packets as often as time-outs are fine.
    pub fn observe(
        &self,
        conn: ConnRef,
        direction: Direction,
        segment: Segment,
        now: Instant,
    ) -> bool {
        let now_ms = now.millis_wrapping();
        // Each turn after the first means that another worker moved the same connection.
        while let Some((life, state)) = self.life_of(conn, now_ms) {
            let block = self.slab.block(conn.index);
            let protocol = block.protocol();
            let tracked = block.tracked(state);
            let age = Duration::from_millis(now_ms.wrapping_sub(block.created_ms()).into());
            let is_old = age >= self.timeouts.udp_stream_after;
            let Some(next) = state::advance(protocol, tracked, direction, segment, is_old) else {
                return block.is_still(conn.generation);
            };
            let to = life.with(next.state, self.deadline(protocol, next.state, now_ms));
            // Unchanged words stay unwritten: the line may be in several workers' caches.
            let moved = to == life || block.swap_life(life, to).is_ok();
            if moved && (next.tags == tracked.tags || block.swap_tags(tracked.tags, next.tags)) {
                return true;
            }
        }
        false
    }

    /// Puts a connection in, which its first packet began.
    ///
    /// # Errors
    /// See [`CreateError`]. After `Taken`, the connection that was faster is found, unless it
    /// was the masqueraded port that was taken.
    pub fn create(
        &self,
        new: NewConnection,
        segment: Segment,
        now: Instant,
    ) -> Result<ConnRef, CreateError> {
        let Tracked { state, tags } = state::open(new.original.protocol, segment);
        let now_ms = now.millis_wrapping();
        let record = Record {
            original: new.original,
            reply: new.reply,
            owner: new.owner,
            lease: new.masquerade,
            picked_up: new.picked_up,
            service: new.service,
            created_ms: now_ms,
            tags,
        };
        let deadline_ms = self.deadline(new.original.protocol, state, now_ms);
        self.told(now);
        self.enter(&record, state, deadline_ms, now_ms)
    }

    /// Puts back a connection that a journal kept, with its state and what was left of its
    /// time. A masqueraded one comes with a lease of the same port
    /// ([`PortPool::lease_again`]).
    ///
    /// # Errors
    /// See [`RestoreError`]; a lease is released then as by [`create`](Self::create).
    pub fn restore(&self, entry: &Entry, now: Instant) -> Result<ConnRef, RestoreError> {
        let now_ms = now.millis_wrapping();
        let record = Record {
            original: entry.original,
            reply: entry.reply,
            owner: entry.owner,
            lease: entry.masquerade,
            picked_up: entry.picked_up,
            service: entry.service,
            created_ms: now_ms.wrapping_sub(millis(entry.age)),
            tags: entry.tags,
        };
        let Some(state) = State::from_number(entry.state) else {
            self.release(&record);
            return Err(RestoreError::NoSuchState(entry.state));
        };
        let remaining = entry.remaining.min(super::timeouts::LONGEST);
        self.told(now);
        let deadline_ms = now_ms.wrapping_add(millis(remaining));
        Ok(self.enter(&record, state, deadline_ms, now_ms)?)
    }

    /// Takes a connection out; false when it was gone already.
    pub fn remove(&self, conn: ConnRef) -> bool {
        let block = self.slab.block(conn.index);
        loop {
            let life = block.life();
            let gone = life.generation() != conn.generation || life.state().is_none();
            if gone || life.is_entering() {
                return false;
            }
            if block.condemn(life).is_ok() {
                self.retire(conn.index, Departure::Removed);
                return true;
            }
        }
    }

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

    /// Shows every connection that has not expired by the latest time that the table was told
    /// of, by creating or sweeping. One that comes or goes meanwhile may be shown or not.
    pub fn for_each(&self, mut f: impl FnMut(&Entry)) {
        let now_ms = self.latest_ms();
        for at in 0..self.capacity() {
            if let Some(entry) = self.entry_at(self.index(at), now_ms) {
                f(&entry);
            }
        }
    }

    /// Takes out every connection that `f` says so of; returns how many that were.
    pub fn remove_where(&self, mut f: impl FnMut(&Entry) -> bool) -> usize {
        let now_ms = self.latest_ms();
        (0..self.capacity())
            .filter(|&at| {
                let index = self.index(at);
                let generation = self.slab.block(index).life().generation();
                let conn = ConnRef { index, generation };
                self.entry_at(index, now_ms)
                    .is_some_and(|entry| f(&entry) && self.remove(conn))
            })
            .count()
    }

    fn index(&self, at: usize) -> u32 {
        // There are less than 2³¹ blocks.
        (at % self.capacity()) as u32
    }

    fn free(&self) -> usize {
        self.capacity().saturating_sub(self.len())
    }

    fn told(&self, now: Instant) {
        if self.latest_ns.load(Ordering::Relaxed) < now.nanos() {
            self.latest_ns.fetch_max(now.nanos(), Ordering::Relaxed);
        }
    }

    fn latest_ms(&self) -> u32 {
        Instant::from_nanos(self.latest_ns.load(Ordering::Relaxed)).millis_wrapping()
    }

    fn deadline(&self, protocol: u8, state: State, now_ms: u32) -> u32 {
        now_ms.wrapping_add(millis(self.timeouts.of(protocol, state)))
    }

    /// The connection of a block that the caller has found in the index and keeps from being
    /// freed, if that is its tuple in that direction.
    fn found(&self, index: u32, direction: Direction, tuple: &Tuple, now_ms: u32) -> Option<Found> {
        let block = self.slab.block(index);
        let life = block.life();
        if life.state().is_none() || life.is_expired(now_ms) {
            return None;
        }
        let (original, reply) = block.tuples();
        let own = match direction {
            Direction::Original => &original,
            Direction::Reply => &reply,
        };
        let generation = life.generation();
        (own == tuple).then_some(Found {
            conn: ConnRef { index, generation },
            direction,
            original,
            reply,
        })
    }

    #[inline]
    fn life_of(&self, conn: ConnRef, now_ms: u32) -> Option<(Life, State)> {
        let life = self.slab.block(conn.index).life();
        let state = life.state()?;
        let lives = life.generation() == conn.generation && !life.is_expired(now_ms);
        lives.then_some((life, state))
    }

    fn enter(
        &self,
        record: &Record,
        state: State,
        deadline_ms: u32,
        now_ms: u32,
    ) -> Result<ConnRef, CreateError> {
        let outcome = self.try_enter(record, state, deadline_ms, now_ms);
        let refused = match outcome {
            Ok(_) => return outcome,
            Err(CreateError::Taken) => &self.counts.refused_taken,
            Err(CreateError::ShareUsed) => &self.counts.refused_share,
            Err(CreateError::Full) => &self.counts.refused_full,
        };
        refused.fetch_add(1, Ordering::Relaxed);
        self.release(record);
        outcome
    }

    fn try_enter(
        &self,
        record: &Record,
        state: State,
        deadline_ms: u32,
        now_ms: u32,
    ) -> Result<ConnRef, CreateError> {
        if !self.shares.take(record.owner, self.free()) {
            return Err(CreateError::ShareUsed);
        }
        let Some(index) = self.place(now_ms) else {
            self.shares.give_back(record.owner);
            return Err(CreateError::Full);
        };
        let block = self.slab.block(index);
        let generation = block.fill(record, state, deadline_ms);
        if !self.enter_tuples(record, index, now_ms) {
            block.free();
            self.shares.give_back(record.owner);
            self.vacate(index);
            return Err(CreateError::Taken);
        }
        block.entered();
        self.counts.came(record.original.protocol);
        Ok(ConnRef { index, generation })
    }

    /// Both tuples, or neither. The lesser first of two that are each other's reverse, so that
    /// workers that meet both directions at once meet here too; else the original first, which
    /// is what another worker with the same packets would look for. They are one where a host
    /// talks to itself from a port to the same port.
    fn enter_tuples(&self, record: &Record, index: u32, now_ms: u32) -> bool {
        let mut tuples = [
            (&record.original, Place::new(index, Direction::Original)),
            (&record.reply, Place::new(index, Direction::Reply)),
        ];
        if record.reply < record.original && record.reply == record.original.reversed() {
            tuples.swap(0, 1);
        }
        let [(first, first_place), (second, second_place)] = tuples;
        if !self.enter_tuple(first, first_place, now_ms) {
            return false;
        }
        let both = first == second || self.enter_tuple(second, second_place, now_ms);
        if !both {
            self.index.remove(first);
        }
        both
    }

    fn enter_tuple(&self, tuple: &Tuple, place: Place, now_ms: u32) -> bool {
        for _ in 0..ENTRY_TRIES {
            let judge = |place: Place| self.occupant(place.index(), now_ms);
            match self.index.claim(tuple, place, judge) {
                Ok(()) => return true,
                Err(Occupant::Lives) => return false,
                Err(Occupant::Expired(index, life)) => {
                    if self.slab.block(index).condemn(life).is_ok() {
                        self.retire(index, Departure::Expired);
                    }
                }
                Err(Occupant::Leaves) => std::hint::spin_loop(),
            }
        }
        false
    }

    fn occupant(&self, index: u32, now_ms: u32) -> Occupant {
        let life = self.slab.block(index).life();
        match life.state() {
            None => Occupant::Leaves,
            Some(_) if life.is_expired(now_ms) && !life.is_entering() => {
                Occupant::Expired(index, life)
            }
            Some(_) => Occupant::Lives,
        }
    }

    /// A free block, counted. When room is short, connections worth less than established ones
    /// give way, faster than new ones come; when there is none, whatever is worth least.
    fn place(&self, now_ms: u32) -> Option<u32> {
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

    fn vacate(&self, index: u32) {
        self.len.fetch_sub(1, Ordering::Relaxed);
        self.slab.push(index);
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

    /// The rest of a removal, by the thread that condemned the block.
    fn retire(&self, index: u32, departure: Departure) {
        let block = self.slab.block(index);
        let record = block.record();
        self.index.remove(&record.original);
        if record.reply != record.original {
            self.index.remove(&record.reply);
        }
        self.release(&record);
        self.shares.give_back(record.owner);
        self.counts.left(record.original.protocol, departure);
        block.free();
        self.vacate(index);
    }

    fn release(&self, record: &Record) {
        if let Some(lease) = record.lease {
            let ports = self.ports.as_ref();
            ports
                .expect("masqueraded connections need with_ports")
                .release(lease);
        }
    }

    fn entry_at(&self, index: u32, now_ms: u32) -> Option<Entry> {
        let block = self.slab.block(index);
        let life = block.life();
        let state = life.state().filter(|_| !life.is_entering())?;
        if life.is_expired(now_ms) {
            return None;
        }
        let record = block.record();
        if !block.is_still(life.generation()) {
            return None;
        }
        let protocol = record.original.protocol;
        let remaining = Duration::from_millis(life.deadline_ms().wrapping_sub(now_ms).into());
        Some(Entry {
            original: record.original,
            reply: record.reply,
            owner: record.owner,
            service: record.service,
            state: state.number(),
            state_name: state.name(protocol),
            picked_up: record.picked_up,
            masquerade: record.lease,
            tags: record.tags,
            idle: self.timeouts.of(protocol, state).saturating_sub(remaining),
            remaining,
            age: Duration::from_millis(now_ms.wrapping_sub(record.created_ms).into()),
        })
    }
}

/// A connection that could be evicted.
struct Candidate {
    index: u32,
    life: Life,
    worth: Worth,
    held: u32,
}

/// Whole milliseconds, in the 32 bits of a deadline.
fn millis(duration: Duration) -> u32 {
    duration.as_millis() as u32
}

#[cfg(test)]
impl Connections {
    /// How many tuples the index has room for.
    pub(super) fn index_capacity(&self) -> usize {
        self.index.capacity()
    }

    /// How many tuples the index holds.
    pub(super) fn index_len(&self) -> usize {
        self.index.len()
    }
}
