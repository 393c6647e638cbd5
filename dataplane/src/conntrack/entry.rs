//! Connections as plain data: what views show, a flush selects and a journal keeps.
//!
//! Reads the slab from end to end beside the workers and holds nobody up: each block is copied,
//! and the copy dropped if the block changed hands meanwhile.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Tuple;
use super::block::Record;
use super::ports::PortLease;
use super::state::{State, Tags};
use super::table::{ConnRef, Connections, CreateError, millis};
use super::timeouts::LONGEST;
use crate::ids::EndpointId;
use crate::time::Instant;

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

impl Connections {
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

    /// Puts back a connection that a journal kept, with its state and what was left of its
    /// time. A masqueraded one comes with a lease of the same port
    /// ([`PortPool::lease_again`](super::PortPool::lease_again)).
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
        let remaining = entry.remaining.min(LONGEST);
        self.told(now);
        let deadline_ms = now_ms.wrapping_add(millis(remaining));
        Ok(self.enter(&record, state, deadline_ms, now_ms)?)
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

    fn latest_ms(&self) -> u32 {
        Instant::from_nanos(self.latest_ns.load(Ordering::Relaxed)).millis_wrapping()
    }
}
