//! The way of a packet that no flow-table entry covers, down to the one [`Action`] that its
//! flow keeps.
//!
//! ```text
//!  origin ─▶ connection? ──yes──────────────────────────▶ policy ─▶ route
//!                  └──no──▶ service ─▶ policy ─▶ source ─▶ connection kept ─▶ route
//! ```
//!
//! The order stands here and nowhere else. Policy judges the real backend, since a virtual
//! address has no identity, and a connection always by its first packet's direction: what comes
//! back is let through as long as what goes forth would be. A decision names all that it depends
//! on, so a changed policy is felt at the next packet of an established connection too.

mod connect;
mod explain;
mod party;
mod route;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::classify::Source;
use crate::conntrack::{ConnRef, Connections, Direction, Limits, PortPool, Timeouts, Tuple};
use crate::events::FlowEvents;
use crate::flow::Action;
use crate::ids::WorkerId;
use crate::parse::{Fragment, Headers};
use crate::policy::{Judgement, PeerOf, Side};
use crate::related::Quote;
use crate::service::Affinity;
use crate::snapshot::{EpochSlot, EpochStamp, Snapshot};
use crate::time::Instant;
use crate::translate::Translation;
use crate::verdict::DropReason;
use crate::wire::ipv6::ip_of_mapped;

pub(crate) use self::connect::is_opening;
pub use self::explain::{Exit, Explanation, Probe, explain};
use self::party::{Party, Place};
use self::route::Speaker;

/// What the workers of a node share beside the tables: what they themselves find out.
#[derive(Debug)]
pub struct Shared {
    /// Connections.
    pub connections: Connections,
    /// The ports that translated sources are given.
    pub ports: Arc<PortPool>,
    /// Which backend a client keeps to.
    pub affinity: Affinity,
    /// The node's own sockets' ports, which are nobody else's.
    pub taken: TakenPorts,
    /// Questions for control.
    pub questions: Questions,
    /// What people are told, a ring a worker.
    pub events: Box<[FlowEvents]>,
}

/// The most workers that tell of events.
const MOST_WORKERS: usize = 64;

impl Shared {
    /// What so many workers share whose connections are bounded so, and whose translated sources have
    /// these ports; `wake` tells control of a question.
    #[must_use]
    pub fn new(
        limits: Limits,
        ports: PortPool,
        workers: usize,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let ports = Arc::new(ports);
        Self {
            connections: Connections::new(limits, Timeouts::default()).with_ports(ports.clone()),
            ports,
            affinity: Affinity::default(),
            taken: TakenPorts::default(),
            questions: Questions::new(wake),
            events: (0..workers.min(MOST_WORKERS))
                .map(|_| FlowEvents::default())
                .collect(),
        }
    }
}

/// Ports that the node's own sockets have, of any protocol: control keeps it.
#[derive(Debug)]
pub struct TakenPorts(Box<[AtomicU64]>);

impl Default for TakenPorts {
    fn default() -> Self {
        Self((0..1024).map(|_| AtomicU64::new(0)).collect())
    }
}

impl TakenPorts {
    /// Whether a socket has the port.
    #[must_use]
    pub fn has(&self, port: u16) -> bool {
        let word = self.0[usize::from(port >> 6)].load(Ordering::Relaxed);
        word & 1 << (port & 63) != 0
    }

    /// Sets all ports that sockets have.
    pub fn set(&self, ports: impl IntoIterator<Item = u16>) {
        let mut words = vec![0_u64; self.0.len()];
        for port in ports {
            words[usize::from(port >> 6)] |= 1 << (port & 63);
        }
        for (word, now) in self.0.iter().zip(words) {
            word.store(now, Ordering::Relaxed);
        }
    }
}

/// What a worker cannot decide with the tables that it has: control answers by the next tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Question {
    /// The MAC address of a host that an uplink reaches directly.
    Neighbour {
        /// Position of the uplink in the configuration.
        uplink: u8,
        /// The host.
        address: IpAddr,
    },
}

/// A bounded queue of questions. When it is full a question is not asked: the next packet that
/// raises it asks again.
pub struct Questions {
    queue: crossbeam::queue::ArrayQueue<Question>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Questions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Questions")
            .field("waiting", &self.queue.len())
            .finish_non_exhaustive()
    }
}

/// The most questions that wait for control.
const QUESTIONS: usize = 1024;

impl Questions {
    /// A queue; `wake` tells its reader of a question, and must neither block nor allocate.
    fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            queue: crossbeam::queue::ArrayQueue::new(QUESTIONS),
            wake: Box::new(wake),
        }
    }

    fn ask(&self, question: Question) {
        // Full: asked again by the next packet.
        if self.queue.push(question).is_ok() {
            (self.wake)();
        }
    }

    /// Takes the oldest question: for control.
    #[must_use]
    pub fn take(&self) -> Option<Question> {
        self.queue.pop()
    }
}

/// A packet to decide about, and what to decide with.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Who sent it.
    pub source: &'a Source<'a>,
    /// Its (inner) headers; ports filled in where it is a fragment.
    pub headers: &'a Headers,
    /// The tables.
    pub tables: &'a Snapshot,
    /// What the workers share.
    pub shared: &'a Shared,
    /// Who asks.
    pub worker: WorkerId,
    /// The flow's hash: it picks the uplink queue, the outer source port and the backend.
    pub hash: u64,
    /// The time of the batch.
    pub now: Instant,
}

/// A connection that a packet belongs to, new or known.
struct Way {
    conn: ConnRef,
    direction: Direction,
    /// What the packet becomes.
    to: Tuple,
    /// Whether the connection's source is translated, so that its packets pass this node.
    through_here: bool,
}

/// Decides about a packet that is no ICMP error.
pub fn decide(ask: &Ask<'_>) -> Result<Action, DropReason> {
    let mut depends = Depends::new(ask.tables);
    let sender = party::sender(ask, &mut depends)?;
    let tuple = Tuple::of(ask.headers);
    let (way, mut action) = match connect::known(ask, &tuple, &mut depends) {
        Some(known) => go_on(ask, &sender, &tuple, known, &mut depends)?,
        None => connect::open(ask, &sender, &tuple, &mut depends)?,
    };
    action.translation = Translation::between(&tuple, &way.to);
    action.conn = Some((way.conn, way.direction));
    Ok(action)
}

/// The way of a connection that is known, if it is still allowed.
fn go_on<'a>(
    ask: &Ask<'a>,
    sender: &Party<'a>,
    tuple: &Tuple,
    way: Way,
    depends: &mut Depends<'_>,
) -> Result<(Way, Action), DropReason> {
    let receiver = party::at(ask.tables, ip_of_mapped(way.to.dst), depends);
    match way.direction {
        Direction::Original => {
            judge(
                ask.tables,
                sender,
                &receiver,
                way.to.dst_port,
                tuple.protocol,
            )?;
        }
        Direction::Reply => {
            judge(
                ask.tables,
                &receiver,
                sender,
                tuple.src_port,
                tuple.protocol,
            )?;
        }
    }
    if ask
        .tables
        .is_overlay_port(receiver.address, way.to.dst_port, tuple.protocol)
    {
        return Err(DropReason::OverlayPort);
    }
    let identity = if way.to.src == tuple.src {
        sender.identity
    } else {
        party::at(ask.tables, ip_of_mapped(way.to.src), depends).identity
    };
    let speaker = Speaker {
        identity,
        through_here: way.through_here,
        is_answer: way.direction == Direction::Reply,
    };
    let action = route::to(ask, sender, speaker, &receiver, depends)?;
    Ok((way, action))
}

/// What an ICMP error becomes on its way.
#[derive(Clone, Debug)]
pub struct Related {
    /// How it leaves; not for keeping.
    pub action: Action,
    /// What its quote becomes.
    pub quoted: Tuple,
    /// Its own source and destination, IPv4-mapped where IPv4.
    pub ends: ([u8; 16], [u8; 16]),
}

/// Decides about an ICMP error that quotes this packet: it goes where the packet came from, if
/// that is a connection that is known and still allowed.
pub fn relate(ask: &Ask<'_>, quote: &Quote) -> Result<Related, DropReason> {
    // A redirect or a source quench is no answer to anybody (RFC 6633, RFC 6918).
    let kind = ask.headers.icmp.map(|(kind, _)| kind);
    let is_obsolete = ask.headers.is_v4() && matches!(kind, Some(4 | 5));
    // An error is for whoever sent the packet that it quotes; and a pod is no router, so it
    // speaks about packets to itself alone.
    let is_for_sender = ask.headers.dst_bytes == quote.tuple.src;
    let may_be_router = matches!(ask.source, Source::Host(_) | Source::Outside);
    let is_credible = may_be_router || ask.headers.src_bytes == quote.tuple.dst;
    if ask.headers.fragment != Fragment::None || is_obsolete || !is_for_sender || !is_credible {
        return Err(DropReason::IcmpErrorUnrelated);
    }
    let mut depends = Depends::new(ask.tables);
    let sender = party::sender(ask, &mut depends)?;
    // What answers the quoted packet goes the error's way.
    let answer = quote.tuple.reversed();
    let found = (ask.shared.connections)
        .find(&answer, ask.now)
        .ok_or(DropReason::IcmpErrorUnrelated)?;
    let to = match found.direction {
        Direction::Original => found.reply.reversed(),
        Direction::Reply => found.original.reversed(),
    };
    // An error about our own packet, sent to us: whoever sends it must have been on its path.
    let receiver = party::at(ask.tables, ip_of_mapped(to.dst), &mut depends);
    let other = party::at(ask.tables, ip_of_mapped(answer.src), &mut depends);
    match found.direction {
        Direction::Original => judge(ask.tables, &other, &receiver, to.dst_port, to.protocol)?,
        Direction::Reply => judge(ask.tables, &receiver, &other, answer.src_port, to.protocol)?,
    }
    // The far end speaks by its translated address; a router in between by its own.
    let src = if ask.headers.src_bytes == answer.src {
        to.src
    } else {
        ask.headers.src_bytes
    };
    let speaker = Speaker {
        identity: sender.identity,
        through_here: found.reply.dst != found.original.src,
        is_answer: found.direction == Direction::Reply,
    };
    Ok(Related {
        action: route::to(ask, &sender, speaker, &receiver, &mut depends)?,
        quoted: to.reversed(),
        ends: (src, to.dst),
    })
}

/// Whether policy lets the one open connections to the other.
fn judge(
    tables: &Snapshot,
    initiator: &Party<'_>,
    responder: &Party<'_>,
    port: u16,
    protocol: u8,
) -> Result<(), DropReason> {
    let is_same = match (initiator.place, responder.place) {
        (Place::Pod(one), Place::Pod(other)) => one.id == other.id,
        _ => false,
    };
    if is_same {
        return Ok(());
    }
    let denied = |place: Place<'_>, side, other: &Party<'_>| {
        let Place::Pod(pod) = place else {
            return false;
        };
        let peer = PeerOf {
            identity: other.identity,
            address: other.address,
        };
        tables.policy(pod.id).judge(side, peer, protocol, port) == Judgement::Denied
    };
    if denied(initiator.place, Side::Egress, responder) {
        return Err(DropReason::PolicyDeniedEgress);
    }
    if denied(responder.place, Side::Ingress, initiator) {
        return Err(DropReason::PolicyDeniedIngress);
    }
    Ok(())
}

/// The most that a decision depends on: the node, both parties with a peer's pod among them, a
/// Service, a neighbour.
pub(crate) const MOST_STAMPS: usize = 8;

/// What the decision depends on.
struct Depends<'a> {
    tables: &'a Snapshot,
    stamps: [EpochStamp; MOST_STAMPS],
    used: usize,
}

impl<'a> Depends<'a> {
    fn new(tables: &'a Snapshot) -> Self {
        Self {
            tables,
            stamps: [tables.epochs().stamp(EpochSlot::NODE); MOST_STAMPS],
            used: 1,
        }
    }

    fn on(&mut self, slot: EpochSlot) {
        let stamp = self.tables.epochs().stamp(slot);
        if !self.stamps[..self.used].contains(&stamp) {
            self.stamps[self.used] = stamp;
            self.used += 1;
        }
    }
}
