//! The control loop: one task owns all state; everything reaches it as a message.
//!
//! ```text
//! manifests ─▶ Event ──┐                          ┌─▶ tables ─▶ workers
//! kernel ────▶ Notice ─┼─▶ state ─▶ compile ──────┤
//! socket ────▶ Command ┘      ▲                   └─▶ replies, once workers have the tables
//!                             └── a tick: what is due
//! ```
//!
//! A round takes one message, then does what is due: asks the kernel anew, publishes (a burst
//! of changes together), answers ADDs whose tables every worker has. Nothing in a round waits
//! for a worker, except closing a link, which has a limit.

mod ask;
mod cni;
mod host;
mod kernel;
mod report;
mod services;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skein_cni::agent::{Attachment, PodRef, Reply, Request};
use skein_dataplane::events::FlowEvents;
use skein_dataplane::ids::{Generation, PeerId};
use skein_dataplane::io::program::Overlay;
use skein_dataplane::slow::Question;
use skein_dataplane::snapshot::{Masquerade, Prefix, Snapshot};
use tokio::sync::{mpsc, oneshot};

use crate::cni_server::{Backend, ConnectionId};
use crate::compile::policy::Policies;
use crate::compile::service::Services;
use crate::compile::{Compiled, Inputs, UplinkLink, compile, compile_endpoints};
use crate::config::Config;
use crate::endpoint::Endpoints;
use crate::flows::History;
use crate::host::{HostKernel, Wanted};
use crate::neighbour::Underlay;
use crate::netlink::{Netlink, Notice};
use crate::observe::Shared;
use crate::pods::PodIdentities;
use crate::reserved;
use crate::state::{Change, ClusterState, Endpoint, Node, ObjectKey, PodKey};
use crate::watch::{DocumentFault, Event};
use crate::workers::{Datapath, HostLink};

/// Changes are published together once it has been quiet for this long…
const PUBLISH_QUIET: Duration = Duration::from_millis(5);

/// …or the first is this old.
const PUBLISH_WITHIN: Duration = Duration::from_millis(100);

/// How often acknowledgements are looked at while somebody waits for them.
const LOOK: Duration = Duration::from_millis(1);

/// The kernel is asked about routes at most once in this time, and at most a tenth of the time.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// How often what failed is tried again, and neighbours that are not resolved are asked about.
const RETRY: Duration = Duration::from_secs(1);

/// How often the ports of the node's own sockets are looked at.
const LOOK_AT_SOCKETS: Duration = Duration::from_secs(5);

/// How often identities are said to be in use.
const REFRESH: Duration = Duration::from_mins(1);

/// Without a word from the source for this long, tables are published without it.
const SYNC_WITHIN: Duration = Duration::from_secs(10);

/// How long an ADD waits for an agent that is not ready: it may only just have started.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// How long an ADD waits for its pod's object before its interface is made without.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// How long the second half of an ADD may take.
const ATTACH_WITHIN: Duration = Duration::from_secs(10);

/// What reaches the loop from the socket.
#[derive(Debug)]
pub enum Command {
    /// A request, and where its answer goes.
    Call(ConnectionId, Request, oneshot::Sender<Reply>),
    /// The connection of an ADD ended between its halves.
    Abandon(ConnectionId, Attachment, oneshot::Sender<()>),
}

/// The loop as the socket's connections see it.
#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<Command>);

impl Handle {
    /// A handle, and the loop's end of it.
    #[must_use]
    pub fn new() -> (Self, mpsc::Receiver<Command>) {
        let (sender, receiver) = mpsc::channel(256);
        (Self(sender), receiver)
    }
}

impl Backend for Handle {
    async fn call(&self, connection: ConnectionId, request: Request) -> Reply {
        let (sender, receiver) = oneshot::channel();
        let stopping = || {
            Reply::Error(crate::endpoint::agent_error(
                crate::endpoint::code::TRY_AGAIN,
                "the agent is stopping",
                "",
            ))
        };
        let command = Command::Call(connection, request, sender);
        if self.0.send(command).await.is_err() {
            return stopping();
        }
        receiver.await.unwrap_or_else(|_| stopping())
    }

    async fn abandon(&self, connection: ConnectionId, attachment: Attachment) {
        let (sender, receiver) = oneshot::channel();
        if self
            .0
            .send(Command::Abandon(connection, attachment, sender))
            .await
            .is_ok()
        {
            // The loop's end: a restarted agent gives back what was only reserved.
            let _ = receiver.await;
        }
    }
}

/// An ADD whose second half waits for the workers.
#[derive(Debug)]
struct Waiter {
    attachment: Attachment,
    deadline: Instant,
    reply: oneshot::Sender<Reply>,
}

/// An ADD that came before the agent was ready, or knew the pod.
#[derive(Debug)]
struct Early {
    connection: ConnectionId,
    request: Request,
    deadline: Instant,
    reply: oneshot::Sender<Reply>,
}

/// What is wrong, by where it comes from.
#[derive(Debug, Default)]
struct Faults {
    documents: Vec<DocumentFault>,
    tables: Vec<String>,
    uplinks: BTreeMap<u8, String>,
    endpoints: BTreeMap<Attachment, String>,
    kernel: Option<String>,
    host: Option<String>,
    routes: Vec<String>,
    leftovers: Vec<String>,
}

/// The agent.
pub struct Agent {
    config: Config,
    started: Instant,
    state: ClusterState,
    endpoints: Endpoints,
    identities: PodIdentities,
    policies: Policies,
    services: Services,
    datapath: Datapath,
    netlink: Netlink,
    host: HostKernel,
    /// The host's routes as they were last written.
    routes: Option<Vec<Wanted>>,
    underlay: Underlay,
    masquerade: Masquerade,
    shared: Arc<Shared>,
    peers: BTreeMap<String, PeerId>,
    synced: bool,
    /// When the first and the last change came that is not published yet.
    dirty: Option<(Instant, Instant)>,
    /// The most that the kernel is to be asked, and not before when.
    ask: Option<Notice>,
    ask_after: Instant,
    /// The generation since which an endpoint's tables are complete.
    complete: BTreeMap<Attachment, Generation>,
    /// Attachments whose ADD is between its halves, and whose ADD it is.
    pending: BTreeMap<Attachment, ConnectionId>,
    waiting: Vec<Waiter>,
    early: Vec<Early>,
    faults: Faults,
    history: History,
    /// Whether ports that an earlier agent claimed and this one does not are given back.
    settled: bool,
    retry: Instant,
    refresh: Instant,
    look: Instant,
}

/// What an agent is made of.
#[derive(Debug)]
pub struct Parts {
    /// The configuration, resolved.
    pub config: Config,
    /// Endpoints and addresses.
    pub endpoints: Endpoints,
    /// Identities.
    pub identities: PodIdentities,
    /// The kernel.
    pub netlink: Netlink,
    /// The kernel's side of the host link.
    pub host: HostKernel,
}

impl Agent {
    /// Puts an agent together over a started datapath.
    #[must_use]
    pub fn new(parts: Parts, datapath: Datapath, shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        let history = History::new(datapath.started());
        let managed = "managed-neighbours";
        let managed = !parts
            .config
            .debug
            .disable
            .iter()
            .any(|name| name == managed);
        let services = &parts.config.services;
        let node = &parts.config.node.name;
        Self {
            underlay: Underlay::new(&parts.config.uplink.interfaces, managed),
            services: Services::new(services.enabled, node, services.node_port_range),
            masquerade: Masquerade {
                enabled: parts.config.masquerade.enabled,
                exclude: (parts.config.masquerade.exclude.iter())
                    .filter_map(|range| Prefix::new(range.address(), range.prefix()))
                    .collect(),
            },
            config: parts.config,
            started: now,
            state: ClusterState::default(),
            endpoints: parts.endpoints,
            identities: parts.identities,
            policies: Policies::default(),
            datapath,
            netlink: parts.netlink,
            host: parts.host,
            routes: None,
            shared,
            peers: BTreeMap::new(),
            synced: false,
            dirty: None,
            ask: Some(Notice::Routes),
            ask_after: now,
            complete: BTreeMap::new(),
            pending: BTreeMap::new(),
            waiting: Vec::new(),
            early: Vec::new(),
            faults: Faults::default(),
            history,
            settled: false,
            retry: now,
            refresh: now + REFRESH,
            look: now,
        }
    }

    /// Runs until `stop`, then stops the datapath: how many frames came back, and of how many.
    pub async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        mut events: mpsc::Receiver<Event>,
        mut notices: mpsc::Receiver<Notice>,
        stop: impl Future<Output = ()>,
    ) -> (usize, usize) {
        let mut stop = std::pin::pin!(stop);
        self.restore();
        let questions = self.datapath.questions();
        loop {
            self.settle(Instant::now());
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(command) = commands.recv() => self.command(command),
                Some(event) = events.recv() => self.event(event),
                Some(notice) = notices.recv() => self.notice(notice),
                () = questions.notified() => self.answer_questions(),
                () = tokio::time::sleep_until(self.wake().into()) => {}
            }
        }
        // Whoever waits is told to come again; the next agent does it.
        self.waiting.clear();
        self.early.clear();
        self.datapath.stop()
    }

    fn wake(&self) -> Instant {
        let now = Instant::now();
        let mut wake = self.retry;
        if let Some((first, last)) = self.dirty
            && self.may_publish()
        {
            wake = wake.min((first + PUBLISH_WITHIN).min(last + PUBLISH_QUIET));
        }
        if self.ask.is_some() {
            wake = wake.min(self.ask_after);
        }
        if let Some(deadline) = self.early.iter().map(|early| early.deadline).min() {
            wake = wake.min(deadline);
        }
        for waiter in &self.waiting {
            // An acknowledgement says nothing by itself; a pod's object comes as an event.
            let due = if self.complete.contains_key(&waiter.attachment) {
                now + LOOK
            } else {
                waiter.deadline
            };
            wake = wake.min(due);
        }
        wake
    }

    /// Does what is due.
    fn settle(&mut self, now: Instant) {
        if now >= self.ask_after
            && let Some(notice) = self.ask.take()
        {
            self.ask_kernel(notice);
            let end = Instant::now();
            self.ask_after = end + ASK_EVERY.max((end - now) * 10);
        }
        if now >= self.retry {
            self.retry = now + RETRY;
            self.try_again(now);
        }
        if let Some((first, last)) = self.dirty
            && self.may_publish()
            && (now >= first + PUBLISH_WITHIN || now >= last + PUBLISH_QUIET)
        {
            self.publish();
        }
        self.answer_early(now);
        self.answer_waiting(now);
        self.report();
    }

    fn try_again(&mut self, now: Instant) {
        self.hear_of_flows();
        let mut changed = self.identities.retry(&self.state, now);
        if now >= self.refresh {
            self.refresh = now + REFRESH;
            changed.extend(self.identities.refresh(&self.state, now));
            let in_use: BTreeSet<_> = self.identities.numbers().collect();
            self.policies.retain(|id| in_use.contains(&id));
        }
        if !changed.is_empty() {
            self.update_policies(&changed);
            self.changed();
        }
        if self.underlay.unresolved() {
            self.ask_kernel(Notice::Neighbours);
        }
        self.reconcile_uplinks();
        self.reopen();
        self.reconcile_host();
        if !self.faults.routes.is_empty() {
            self.routes = None;
            self.route_host();
        }
        self.look_at_sockets(now);
        // A large table of workers may have let go of old publications meanwhile.
        self.datapath.acknowledged();
    }

    /// Empties the workers' rings of events; returns how many they have lost since the start.
    fn hear_of_flows(&mut self) -> u64 {
        let rings = &self.datapath.shared().events;
        for ring in rings {
            while let Some(event) = ring.take() {
                self.history.keep(event);
            }
        }
        rings.iter().map(FlowEvents::lost).sum()
    }

    /// Keeps masquerade off the ports that programs of the node have.
    fn look_at_sockets(&mut self, now: Instant) {
        if !self.masquerade.enabled || now < self.look {
            return;
        }
        self.look = now + LOOK_AT_SOCKETS;
        match reserved::taken(self.config.masquerade.ports) {
            Ok(ports) => self.datapath.shared().taken.set(ports),
            Err(error) => tracing::warn!(%error, "the node's sockets cannot be read"),
        }
    }

    /// Looks for what workers could not decide.
    fn answer_questions(&mut self) {
        let now = Instant::now();
        let mut news = false;
        while let Some(question) = self.datapath.question() {
            match question {
                Question::Neighbour { uplink, address } => {
                    news |= self.underlay.want(uplink, address, now);
                }
            }
        }
        if news {
            self.ask_kernel(Notice::Neighbours);
        }
    }

    /// Something is another than what the tables say.
    fn changed(&mut self) {
        let now = Instant::now();
        let first = self.dirty.map_or(now, |(first, _)| first);
        self.dirty = Some((first, now));
    }

    /// Not before the source has spoken: what a restart brings back would be without names.
    fn may_publish(&self) -> bool {
        self.synced || self.started.elapsed() > SYNC_WITHIN
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Changes(changes) => self.changes(changes),
            Event::Synced => {
                self.synced = true;
                tracing::info!(
                    nodes = self.state.nodes().count(),
                    pods = self.state.pods().count(),
                    "the cluster's objects are known"
                );
                self.changed();
            }
            Event::Faults(faults) => {
                for fault in &faults {
                    if !self.faults.documents.contains(fault) {
                        tracing::warn!(%fault, "a document is refused");
                    }
                }
                if faults.is_empty() {
                    tracing::info!("all documents are in force");
                }
                self.faults.documents = faults;
            }
        }
    }

    fn changes(&mut self, changes: Vec<Change>) {
        let mut keys = BTreeSet::new();
        for change in changes {
            let key = match &change {
                Change::Set(object) => object.key(),
                Change::Remove(key) => key.clone(),
            };
            if self.state.apply(change) {
                keys.insert(key);
            }
        }
        if keys.is_empty() {
            return;
        }
        self.identities.update(&self.state, &keys, Instant::now());
        self.update_policies(&keys);
        self.services.update(&self.state, &keys);
        if keys.iter().any(|key| matches!(key, ObjectKey::Node(_))) {
            self.nodes_changed();
        }
        self.changed();
    }

    fn update_policies(&mut self, changed: &BTreeSet<ObjectKey>) {
        let identities = self.identities.by_pod();
        self.policies.update(&self.state, identities, changed);
    }

    /// Keeps an endpoint. Policies know its pod by its addresses, which may be news.
    fn set_endpoint(&mut self, endpoint: Endpoint) {
        let pod = endpoint.pod.clone();
        self.state.set_endpoint(endpoint);
        self.pod_readdressed(pod);
    }

    fn forget_endpoint(&mut self, attachment: &Attachment) {
        if let Some(endpoint) = self.state.remove_endpoint(attachment) {
            self.pod_readdressed(endpoint.pod);
        }
    }

    fn pod_readdressed(&mut self, pod: Option<PodRef>) {
        if let Some(PodRef {
            namespace, name, ..
        }) = pod
        {
            let key = ObjectKey::Pod(PodKey { namespace, name });
            self.update_policies(&[key].into());
        }
    }

    fn nodes_changed(&mut self) {
        for node in self.state.nodes() {
            if node.name != self.config.node.name && !self.peers.contains_key(&node.name) {
                // Never reused, so that a flow's memory of a node is of that node.
                let number = u32::try_from(self.peers.len()).unwrap_or(u32::MAX) + 1;
                self.peers.insert(node.name.clone(), PeerId(number));
            }
        }
        let ranges = self.own().map(|own| own.pod_cidrs.clone());
        self.endpoints
            .ipam()
            .set_ranges(&ranges.unwrap_or_default());
        self.ask = Some(Notice::Routes);
    }

    fn own(&self) -> Option<&Node> {
        self.state.node(&self.config.node.name)
    }

    /// What of the uplinks' traffic is ours; `None` while this node's addresses are not known.
    fn overlay(&self) -> Option<Overlay> {
        let own = self.own()?;
        let overlay = Overlay {
            port: self.config.overlay.port,
            ipv4: own.internal_ips.iter().find_map(|ip| match ip {
                IpAddr::V4(v4) => Some(*v4),
                IpAddr::V6(_) => None,
            }),
            ipv6: own.internal_ips.iter().find_map(|ip| match ip {
                IpAddr::V4(_) => None,
                IpAddr::V6(v6) => Some(*v6),
            }),
        };
        (overlay.ipv4.is_some() || overlay.ipv6.is_some()).then_some(overlay)
    }

    /// Makes the tables anew and hands them to the workers.
    fn publish(&mut self) {
        self.dirty = None;
        let compiled = self.compile(compile);
        for fault in &compiled.faults {
            if !self.faults.tables.contains(fault) {
                tracing::warn!("{fault}");
            }
        }
        self.faults.tables.clone_from(&compiled.faults);
        self.services.moved(&compiled.moved);
        let services_change = self.services.is_stale();
        let compiled = self.with_services(compiled);
        self.hand_over(compiled);
        if services_change {
            let node_ports = self.services.node_ports(&self.state);
            self.datapath.claim_node_ports(node_ports);
        }
        if !std::mem::replace(&mut self.settled, true) {
            self.datapath.settle_claims();
        }
        self.route_host();
    }

    fn with_services(&mut self, compiled: Compiled) -> Compiled {
        let (tables, faults) = self.services.apply(&self.state, compiled.tables);
        for fault in faults {
            tracing::warn!("{fault}");
        }
        Compiled { tables, ..compiled }
    }

    /// The same for this node's endpoints alone, since somebody waits for them.
    fn publish_endpoints(&mut self) {
        let compiled = self.compile(compile_endpoints);
        // A contradiction may be of this endpoint's making, or end with it.
        if !compiled.faults.is_empty() || !self.faults.tables.is_empty() {
            self.changed();
        }
        // Services are judged against whole tables alone: in these, a node that was just heard of
        // has no range yet, and its pods would seem to be outside of the cluster.
        self.services.moved(&compiled.moved);
        if self.services.is_stale() {
            self.changed();
        }
        self.hand_over(compiled);
    }

    fn compile(&mut self, how: fn(&Snapshot, &Inputs<'_>) -> Compiled) -> Compiled {
        let policies = self.policies.endpoints(&self.state);
        let uplinks: Vec<UplinkLink> = (self.datapath.uplinks().values())
            .flat_map(|uplink| uplink.links.iter().map(|(entry, _)| *entry))
            .collect();
        let placed = (self.datapath.pods().iter())
            .map(|(attachment, pod)| (attachment.clone(), pod.placed))
            .collect();
        let inputs = Inputs {
            node: &self.config.node.name,
            overlay_port: self.config.overlay.port,
            overlay_mtu: self.config.overlay.mtu,
            state: &self.state,
            identities: self.identities.by_pod(),
            underlay: &self.underlay,
            masquerade: &self.masquerade,
            peers: &self.peers,
            uplinks: &uplinks,
            host: self.datapath.host().map(HostLink::placed),
            placed: &placed,
            policies: &policies,
        };
        how(self.datapath.tables(), &inputs)
    }

    fn hand_over(&mut self, compiled: Compiled) {
        let generation = compiled.tables.generation();
        (self.complete).retain(|known, _| compiled.complete.contains(known));
        for attachment in compiled.complete {
            self.complete.entry(attachment).or_insert(generation);
        }
        tracing::debug!(generation = generation.0, "tables published");
        self.datapath.publish(compiled.tables);
    }

    /// Answers ADDs whose tables every worker has, and those that waited too long.
    fn answer_waiting(&mut self, now: Instant) {
        if self.waiting.is_empty() {
            return;
        }
        let acknowledged = self.datapath.acknowledged();
        let mut still = Vec::new();
        for waiter in std::mem::take(&mut self.waiting) {
            match self.verdict(&waiter, acknowledged, now) {
                None => still.push(waiter),
                Some(reply) => {
                    // What failed is still between its halves until its connection ends.
                    if matches!(reply, Reply::Attached) {
                        self.pending.remove(&waiter.attachment);
                    }
                    // A caller who is gone has its connection's end seen to elsewhere.
                    drop(waiter.reply.send(reply));
                }
            }
        }
        self.waiting = still;
    }
}
