//! All workers of a node: started, given links, and stopped together.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant as Clock};

use crossbeam::channel::{RecvTimeoutError, bounded};
use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;

use super::{Command, HANDOVER_PACKETS, HandoverRing, Mailbox, Worker, thread};
use crate::ids::{LinkId, WorkerId};
use crate::io::Link;
use crate::io::poll::Poller;
use crate::io::pool::{FramePool, FrameStore};
use crate::slow::Shared;
use crate::snapshot::Publisher;
use crate::stats::{LinkStats, WorkerStats};

/// Commands that wait for a worker at most: each is one pod coming or going.
const COMMANDS: usize = 1024;

/// What a worker does when there is nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Keeps looking for a while, then sleeps.
    #[default]
    Adaptive,
    /// Never sleeps: the least latency, and a CPU of its own.
    Busy,
    /// Sleeps at once: the least CPU.
    Interrupt,
}

/// How to run workers.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// A worker for each entry, pinned to that CPU; a CPU may stand twice.
    pub cpus: Vec<usize>,
    /// What an idle worker does.
    pub poll: PollMode,
    /// Flows that a worker's table holds.
    pub flows: usize,
    /// What the workers share beside the tables.
    pub shared: Arc<Shared>,
}

/// Why workers could not be started, or a link not be handed over.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// No CPU was given.
    #[error("no worker was asked for: name at least one CPU")]
    NoCpu,
    /// epoll or eventfd failed, or no thread could be started.
    #[error("worker {worker} could not be started: {call}: {source}")]
    Start {
        /// The worker's number.
        worker: usize,
        /// What failed.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// The CPU is offline or outside the process's affinity mask.
    #[error(
        "worker {worker} cannot run on CPU {cpu}: it is offline or not in this process's \
         affinity mask; choose others in workers.cpus"
    )]
    Pin {
        /// The worker's number.
        worker: usize,
        /// The CPU.
        cpu: usize,
    },
    /// There is no worker of that number.
    #[error("there is no worker {}", .0.0)]
    NoWorker(WorkerId),
    /// The worker did not keep up with its commands, or has ended.
    #[error("worker {} does not answer", .0.0)]
    Unresponsive(WorkerId),
}

struct Member {
    mailbox: Mailbox,
    stats: Arc<CachePadded<WorkerStats>>,
    thread: Option<JoinHandle<()>>,
    cpu: usize,
}

/// The workers.
pub struct Group {
    members: Vec<Member>,
    rings: Vec<HandoverRing>,
    store: Arc<FrameStore>,
}

impl Group {
    /// Starts a worker for each CPU; each reads the tables of `publisher`.
    pub fn start(
        options: &WorkerOptions,
        store: &Arc<FrameStore>,
        publisher: &mut Publisher,
    ) -> Result<Self, GroupError> {
        if options.cpus.is_empty() {
            return Err(GroupError::NoCpu);
        }
        let (workers, mailboxes, rings) = make(options, store, publisher)?;
        let mut group = Self {
            members: Vec::new(),
            rings,
            store: store.clone(),
        };
        let origin = Clock::now();
        let members = workers.into_iter().zip(mailboxes).zip(&options.cpus);
        for (number, ((mut worker, mailbox), &cpu)) in members.enumerate() {
            let stats = worker.stats().clone();
            let mode = options.poll;
            let (pinned, is_pinned) = bounded(1);
            let thread = std::thread::Builder::new()
                .name(format!("skein-worker-{number}"))
                .spawn(move || {
                    let core = core_affinity::CoreId { id: cpu };
                    let done = core_affinity::set_for_current(core);
                    // The receiver waits for exactly this.
                    let _ = pinned.send(done);
                    if done {
                        thread::run(&mut worker, mode, origin);
                    }
                })
                .map_err(|source| GroupError::Start {
                    worker: number,
                    call: "thread",
                    source,
                })?;
            group.members.push(Member {
                mailbox,
                stats,
                thread: Some(thread),
                cpu,
            });
            if !is_pinned.recv().unwrap_or(false) {
                return Err(GroupError::Pin {
                    worker: number,
                    cpu,
                });
            }
        }
        Ok(group)
    }

    /// How many workers there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// A worker's counters and CPU, by its number.
    pub fn stats(&self) -> impl Iterator<Item = (&WorkerStats, usize)> {
        self.members
            .iter()
            .map(|member| (&**member.stats, member.cpu))
    }

    /// Handles on all workers' counters, for readers that outlive a borrow.
    #[must_use]
    pub fn shared_stats(&self) -> Vec<Arc<CachePadded<WorkerStats>>> {
        self.members
            .iter()
            .map(|member| member.stats.clone())
            .collect()
    }

    /// Hands a link to the worker that shall own it. The tables that name the link may be
    /// published before or after.
    pub fn add_link(
        &self,
        worker: WorkerId,
        id: LinkId,
        link: Box<dyn Link>,
        stats: Arc<LinkStats>,
    ) -> Result<(), GroupError> {
        let member = self.member(worker)?;
        if let Err(Command::AddLink { link, .. }) =
            member
                .mailbox
                .commands
                .push(Command::AddLink { id, link, stats })
        {
            link.close(&mut FramePool::new(self.store.clone()));
            return Err(GroupError::Unresponsive(worker));
        }
        member.mailbox.waker.wake();
        Ok(())
    }

    /// Has a worker close a link, and waits until its frames are back. Done also for a link
    /// that it does not have.
    pub fn remove_link(
        &self,
        worker: WorkerId,
        id: LinkId,
        limit: Duration,
    ) -> Result<(), GroupError> {
        let member = self.member(worker)?;
        let (done, is_done) = bounded(1);
        if member
            .mailbox
            .commands
            .push(Command::RemoveLink { id, done })
            .is_err()
        {
            return Err(GroupError::Unresponsive(worker));
        }
        member.mailbox.waker.wake();
        match is_done.recv_timeout(limit) {
            Err(RecvTimeoutError::Timeout) => Err(GroupError::Unresponsive(worker)),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    /// Wakes all workers, so that they see newly published tables soon.
    pub fn wake(&self) {
        for member in &self.members {
            member.mailbox.waker.wake();
        }
    }

    /// Stops all workers and closes their links. Returns how many frames are back in the store,
    /// and how many there are: the same, or one was lost.
    #[must_use]
    pub fn stop(mut self) -> (usize, usize) {
        self.join();
        (self.store.available(), self.store.umem().chunks() as usize)
    }

    fn join(&mut self) {
        for member in &self.members {
            let mut command = Command::Stop;
            // A full queue empties as long as the worker lives.
            while let Err(back) = member.mailbox.commands.push(command) {
                if member.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                    break;
                }
                command = back;
                std::thread::yield_now();
            }
            member.mailbox.waker.wake();
        }
        for member in &mut self.members {
            if let Some(thread) = member.thread.take()
                && let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
        // What was on its way between two workers when they stopped.
        let mut pool = FramePool::new(self.store.clone());
        for ring in self.rings.drain(..) {
            while let Some((_, packet)) = ring.pop() {
                pool.give_packet(packet);
            }
        }
    }

    fn member(&self, worker: WorkerId) -> Result<&Member, GroupError> {
        self.members
            .get(usize::from(worker.0))
            .ok_or(GroupError::NoWorker(worker))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.join();
    }
}

type Parts = (Vec<Worker>, Vec<Mailbox>, Vec<HandoverRing>);

/// Makes workers, connected to each other but not started.
pub(super) fn make(
    options: &WorkerOptions,
    store: &Arc<FrameStore>,
    publisher: &mut Publisher,
) -> Result<Parts, GroupError> {
    let count = options.cpus.len();
    let mut workers = Vec::new();
    let mut mailboxes: Vec<Mailbox> = Vec::new();
    for number in 0..count {
        let failed = |source| GroupError::Start {
            worker: number,
            call: "epoll",
            source,
        };
        let poller = Poller::new().map_err(failed)?;
        let commands = Arc::new(ArrayQueue::new(COMMANDS));
        mailboxes.push(Mailbox {
            commands: commands.clone(),
            waker: poller.waker(),
        });
        let id = WorkerId(number as u16);
        let reader = publisher.reader();
        workers.push(Worker::new(
            id,
            reader,
            store,
            poller,
            commands,
            options.flows,
            options.shared.clone(),
        ));
    }
    // rings[from][to]: one producer, one consumer each.
    let rings: Vec<Vec<HandoverRing>> = (0..count)
        .map(|_| {
            (0..count)
                .map(|_| Arc::new(ArrayQueue::new(HANDOVER_PACKETS)))
                .collect()
        })
        .collect();
    for (number, worker) in workers.iter_mut().enumerate() {
        let inbound = rings.iter().map(|from| from[number].clone()).collect();
        let outbound = rings[number].iter().cloned();
        let wakers = mailboxes.iter().map(|mailbox| mailbox.waker.clone());
        worker.connect(inbound, outbound.zip(wakers).collect());
    }
    Ok((workers, mailboxes, rings.into_iter().flatten().collect()))
}
