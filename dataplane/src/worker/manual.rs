//! Workers without threads: the caller turns them and says what time it is. For simulations,
//! benchmarks and fuzzing; what runs is the workers' own code.

use std::sync::Arc;

use crossbeam::channel::bounded;

use super::group::{self, GroupError, WorkerOptions};
use super::{Command, HandoverRing, Mailbox, Worker};
use crate::ids::{LinkId, WorkerId};
use crate::io::Link;
use crate::io::pool::{FramePool, FrameStore};
use crate::snapshot::Publisher;
use crate::stats::{LinkStats, WorkerStats};
use crate::time::Instant;

/// A node's workers, turned by hand.
pub struct Manual {
    workers: Vec<Worker>,
    mailboxes: Vec<Mailbox>,
    rings: Vec<HandoverRing>,
    store: Arc<FrameStore>,
}

impl Manual {
    /// As many workers as `options` names CPUs; they run on the caller's.
    pub fn new(
        options: &WorkerOptions,
        store: &Arc<FrameStore>,
        publisher: &mut Publisher,
    ) -> Result<Self, GroupError> {
        let (workers, mailboxes, rings) = group::make(options, store, publisher)?;
        Ok(Self {
            workers,
            mailboxes,
            rings,
            store: store.clone(),
        })
    }

    /// Gives a worker a link, from its next turn on. Panics if it has a thousand links waiting.
    pub fn add_link(
        &mut self,
        worker: WorkerId,
        id: LinkId,
        link: Box<dyn Link>,
    ) -> Arc<LinkStats> {
        let stats = Arc::new(LinkStats::default());
        let command = Command::AddLink {
            id,
            link,
            stats: stats.clone(),
        };
        let pushed = self.mailboxes[usize::from(worker.0)].commands.push(command);
        assert!(pushed.is_ok(), "the worker's command queue is full");
        stats
    }

    /// Takes a link away from a worker, at its next turn.
    pub fn remove_link(&mut self, worker: WorkerId, id: LinkId) {
        let (done, _) = bounded(1);
        let command = Command::RemoveLink { id, done };
        let pushed = self.mailboxes[usize::from(worker.0)].commands.push(command);
        assert!(pushed.is_ok(), "the worker's command queue is full");
    }

    /// Turns each worker once, over all its links. Returns how many packets moved.
    pub fn turn(&mut self, now: Instant) -> usize {
        let mut links = Vec::new();
        self.workers
            .iter_mut()
            .map(|worker| {
                links.clear();
                links.extend(worker.links());
                worker.turn(&links, now)
            })
            .sum()
    }

    /// A worker's counters.
    #[must_use]
    pub fn stats(&self, worker: WorkerId) -> &WorkerStats {
        self.workers[usize::from(worker.0)].stats()
    }

    /// Closes everything; returns how many frames are back, and how many there are.
    #[must_use]
    pub fn stop(mut self) -> (usize, usize) {
        for mailbox in &self.mailboxes {
            assert!(
                mailbox.commands.push(Command::Stop).is_ok(),
                "the command queue is full"
            );
        }
        self.turn(Instant::default());
        self.workers.clear();
        let mut pool = FramePool::new(self.store.clone());
        for ring in self.rings.drain(..) {
            while let Some((_, packet)) = ring.pop() {
                pool.give_packet(packet);
            }
        }
        drop(pool);
        (self.store.available(), self.store.umem().chunks() as usize)
    }
}
