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
use super::state::{self, State, Tracked};
use super::stats::{ConnectionStats, Counts, Departure};
use super::timeouts::Timeouts;
use super::{Direction, Limits, Segment, Tuple};
use crate::ids::EndpointId;
use crate::time::Instant;

/// How often a tuple whose connection is on its way out is tried again before it counts as
/// taken: the other thread is a few stores from its end.
const ENTRY_TRIES: u32 = 256;

/// A connection: stays valid, or says that it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    pub(super) index: u32,
    pub(super) generation: u32,
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
    pub(super) index: Index,
    pub(super) slab: Slab,
    pub(super) len: AtomicUsize,
    pub(super) shares: Shares,
    pub(super) counts: Counts,
    pub(super) timeouts: Timeouts,
    pub(super) ports: Option<Arc<PortPool>>,
    /// Where the next sweep begins, and the next eviction.
    pub(super) sweep_hand: AtomicUsize,
    pub(super) eviction_hand: AtomicUsize,
    /// The latest time that the table was told of.
    pub(super) latest_ns: AtomicU64,
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

    /// The Service that the connection was translated for; zero for none, or when the connection
    /// is gone.
    #[must_use]
    pub fn service(&self, conn: ConnRef) -> u32 {
        let block = self.slab.block(conn.index);
        let service = block.service();
        if block.is_still(conn.generation) {
            service
        } else {
            0
        }
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
            if moved && next.state != tracked.state {
                self.counts.state_changes.fetch_add(1, Ordering::Relaxed);
            }
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

    pub(super) fn told(&self, now: Instant) {
        if self.latest_ns.load(Ordering::Relaxed) < now.nanos() {
            self.latest_ns.fetch_max(now.nanos(), Ordering::Relaxed);
        }
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

    pub(super) fn enter(
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

    fn vacate(&self, index: u32) {
        self.len.fetch_sub(1, Ordering::Relaxed);
        self.slab.push(index);
    }

    /// The rest of a removal, by the thread that condemned the block.
    pub(super) fn retire(&self, index: u32, departure: Departure) {
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

    pub(super) fn release(&self, record: &Record) {
        if let Some(lease) = record.lease {
            let ports = self.ports.as_ref();
            ports
                .expect("masqueraded connections need with_ports")
                .release(lease);
        }
    }
}

/// Whole milliseconds, in the 32 bits of a deadline.
pub(super) fn millis(duration: Duration) -> u32 {
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
