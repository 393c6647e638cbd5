//! A worker: it owns links, runs each packet to completion, and shares nothing on the way.
//!
//! ```text
//!            one turn
//!  commands ─▶ tables ─▶ for each ready link: receive ─▶ pipeline ─▶ egress ring
//!                        frames from other workers ─────────────────▶ egress ring
//!                                                       one system call a link ─▶ device
//! ```
//!
//! A link belongs to one worker: it alone receives from it and sends to it, so frames of a flow
//! never overtake each other. What goes out by another worker's link is handed over by a
//! bounded ring. A turn takes the time as an argument and never waits, so that tests run workers
//! without threads ([`Manual`]); a [`Group`] runs each on a thread and adds the waiting.

mod egress;
mod group;
mod manual;
mod thread;

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;

pub use group::{Group, GroupError, PollMode, WorkerOptions};
pub use manual::Manual;

use self::egress::Egress;
use crate::ids::{LinkId, WorkerId};
use crate::io::packet::Packet;
use crate::io::poll::{Poller, Waker};
use crate::io::pool::{FramePool, FrameStore};
use crate::io::umem::Umem;
use crate::io::{BATCH, Link};
use crate::pipeline::{Context, Pipeline};
use crate::slow::Shared;
use crate::snapshot::Reader;
use crate::stats::{LinkStats, WorkerStats};
use crate::time::Instant;

/// A packet on its way to the worker that owns its egress link.
type Handover = (LinkId, Packet);

/// Packets on their way from one worker to another.
type HandoverRing = Arc<ArrayQueue<Handover>>;

/// How many packets such a ring holds: two full batches of the receiver's transmit ring are
/// queued elsewhere by then, so a ring that overflows means a worker that cannot keep up.
const HANDOVER_PACKETS: usize = 1024;

/// Connections that a worker looks at in each tick, for those that have expired.
const SWEEP: usize = 4096;

/// What control asks of a worker, between two batches.
pub(crate) enum Command {
    AddLink {
        id: LinkId,
        link: Box<dyn Link>,
        stats: Arc<LinkStats>,
    },
    /// The sender is dropped once the link is closed and its frames are back.
    RemoveLink {
        id: LinkId,
        done: crossbeam::channel::Sender<()>,
    },
    Stop,
}

/// What another thread holds of a worker: how to ask it something and to wake it.
#[derive(Clone)]
pub(crate) struct Mailbox {
    pub commands: Arc<ArrayQueue<Command>>,
    pub waker: Waker,
}

/// A worker.
pub(crate) struct Worker {
    reader: Reader,
    umem: Arc<Umem>,
    pool: FramePool,
    pipeline: Pipeline,
    egress: Egress,
    inbound: Vec<HandoverRing>,
    commands: Arc<ArrayQueue<Command>>,
    poller: Poller,
    stats: Arc<CachePadded<WorkerStats>>,
    shared: Arc<Shared>,
    batch: Vec<Packet>,
    stopping: bool,
}

impl Worker {
    pub fn new(
        id: WorkerId,
        reader: Reader,
        store: &Arc<FrameStore>,
        poller: Poller,
        commands: Arc<ArrayQueue<Command>>,
        flows: usize,
        shared: Arc<Shared>,
    ) -> Self {
        let stats = Arc::new(WorkerStats::new());
        Self {
            reader,
            umem: store.umem().clone(),
            pool: FramePool::new(store.clone()),
            pipeline: Pipeline::new(id, flows, shared.clone()),
            egress: Egress::new(stats.clone()),
            inbound: Vec::new(),
            commands,
            poller,
            stats,
            shared,
            batch: Vec::with_capacity(BATCH),
            stopping: false,
        }
    }

    /// Connects this worker to the others: its own rings in, and theirs out by worker number.
    pub fn connect(&mut self, inbound: Vec<HandoverRing>, outbound: Vec<(HandoverRing, Waker)>) {
        self.inbound = inbound;
        self.egress.connect(outbound);
    }

    pub fn stats(&self) -> &Arc<CachePadded<WorkerStats>> {
        &self.stats
    }

    pub fn poller(&self) -> &Poller {
        &self.poller
    }

    /// Whether it was asked to stop; a last turn has been made by then.
    pub fn stopping(&self) -> bool {
        self.stopping
    }

    /// Whether anything waits that no link would wake this worker for.
    pub fn idle(&self) -> bool {
        self.commands.is_empty()
            && self.inbound.iter().all(|ring| ring.is_empty())
            && !self.egress.pending()
            && !self.reader.outdated()
    }

    /// One round over the links that are ready: everything that waits is received, processed
    /// and sent, one batch a link. Never waits. Returns how many packets it moved.
    pub fn turn(&mut self, ready: &[LinkId], now: Instant) -> usize {
        self.obey();
        self.reader.refresh();
        let mut moved = 0;
        for &link in ready {
            moved += self.receive(link, now);
        }
        moved += self.take_over();
        self.egress.flush(&mut self.pool);
        if moved > 0 {
            self.stats.busy_rounds.add(1);
        }
        moved
    }

    /// Every link, for callers that do not poll.
    pub fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        self.egress.links()
    }

    /// Work that is due now and then: gauges, the kernel's counters, completions of idle links,
    /// fragments that waited in vain.
    pub fn tick(&mut self, now: Instant) {
        self.egress.tick(&mut self.pool);
        self.pipeline.tick(&self.stats, now, &mut self.pool);
        self.shared.connections.sweep(now, SWEEP);
        self.stats.free_frames.set(self.pool.held() as u64);
        self.stats.flows.set(self.pipeline.flows().len() as u64);
    }

    fn receive(&mut self, link: LinkId, now: Instant) -> usize {
        let Self {
            pipeline,
            egress,
            pool,
            batch,
            reader,
            ..
        } = self;
        let received = egress.receive(link, pool, batch);
        if received == 0 {
            return 0;
        }
        let tables = reader.tables();
        let context = Context {
            tables,
            umem: &self.umem,
            stats: &self.stats,
            now,
        };
        pipeline.process(batch, link, context, pool, |pool, link, packet| {
            egress.send(link, packet, pool, tables);
        });
        received
    }

    /// Sends what other workers handed over for links of this one.
    fn take_over(&mut self) -> usize {
        let mut moved = 0;
        for ring in &self.inbound {
            for (link, packet) in std::iter::from_fn(|| ring.pop()).take(BATCH) {
                moved += 1;
                self.egress.send_own(link, packet, &mut self.pool);
            }
        }
        moved
    }

    /// Does what control asked for since the last turn.
    fn obey(&mut self) {
        while let Some(command) = self.commands.pop() {
            match command {
                Command::AddLink { id, link, stats } => self.add_link(id, link, stats),
                Command::RemoveLink { id, done } => {
                    self.remove_link(id);
                    drop(done);
                }
                Command::Stop => {
                    let links: Vec<_> = self.links().collect();
                    for id in links {
                        self.remove_link(id);
                    }
                    let _ = self.pipeline.clear(&mut self.pool);
                    self.stopping = true;
                }
            }
        }
    }

    fn add_link(&mut self, id: LinkId, link: Box<dyn Link>, stats: Arc<LinkStats>) {
        if let Some(fd) = link.poll_fd()
            && let Err(error) = self.poller.add(id, fd)
        {
            // Without the report the link would starve: better to see it closed at once.
            stats.refused.set(1);
            stats
                .errno
                .set(error.raw_os_error().unwrap_or(0).unsigned_abs().into());
            link.close(&mut self.pool);
            return;
        }
        self.egress
            .add(id, link, stats, &mut self.pool, &mut self.batch);
    }

    fn remove_link(&mut self, id: LinkId) {
        if let Some(link) = self.egress.remove(id) {
            if let Some(fd) = link.poll_fd() {
                // The descriptor is closed next, which takes it out of the epoll in any case.
                let _ = self.poller.remove(fd);
            }
            link.close(&mut self.pool);
        }
    }
}
