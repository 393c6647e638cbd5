//! The datapath as control holds it: workers, the links that they own, and the publisher.
//!
//! Opens a device, hands its links to workers, and closes it the other way round. Deliberately
//! absent: what stands in the tables.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use skein_cni::agent::Attachment;
use skein_dataplane::conntrack::{Limits, PortPool};
use skein_dataplane::ids::{EndpointId, Generation, LinkId, WorkerId};
use skein_dataplane::io::claims::Claims;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::program::Overlay;
use skein_dataplane::slow::{Question, Shared};
use skein_dataplane::snapshot::{self, Publisher, Snapshot};
use skein_dataplane::stats::LinkStats;
use skein_dataplane::wire::ethernet::MacAddr;
use skein_dataplane::worker::{Group, PollMode, WorkerOptions};
use tokio::sync::Notify;

use crate::compile::{HostPlaced, Placed, UplinkLink};
use crate::config::{self, Config};
use crate::host::HostDevice;
use crate::numbers::LinkNumbers;
use crate::open::{Attached, Opened, Opener};
use crate::state::Endpoint;

/// Chunks of packet memory: 32 MiB, and up to 128 bytes of kernel memory a chunk and socket
/// (docs/adr/0001-umem.md).
pub const CHUNKS: u32 = 8192;

/// Flows that a worker's table holds.
const FLOWS: usize = 1 << 16;

/// How long a worker may take to close a link.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// How many connections there may be where none is configured: a five-hundredth of the memory
/// for them, as many as a busy node needs on any machine, and no burden on a small one.
fn limits(configured: u32) -> Limits {
    const LEAST: usize = 65_536;
    const MOST: usize = 1 << 20;
    if configured > 0 {
        return Limits::new(configured as usize);
    }
    let machine = rustix::system::sysinfo();
    let memory = machine.totalram as u64 * u64::from(machine.mem_unit);
    let fitting = Limits::within(usize::try_from(memory / 500).unwrap_or(usize::MAX));
    Limits::new(fitting.connections().clamp(LEAST, MOST))
}

/// The CPUs of the workers where none are configured: half of those that this process may run
/// on, at least one, at most four.
#[must_use]
pub fn default_cpus(allowed: &[usize]) -> Vec<usize> {
    let count = (allowed.len() / 2).clamp(1, 4);
    // The last ones: interrupts and whoever does not choose tend to be on the first.
    allowed.iter().rev().take(count).rev().copied().collect()
}

/// The CPUs that this process may run on.
pub fn allowed_cpus() -> std::io::Result<Vec<usize>> {
    let mask = rustix::thread::sched_getaffinity(None)?;
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    Ok(all.filter(|&cpu| mask.is_set(cpu)).collect())
}

/// A pod's device, opened.
pub struct PodLink {
    /// Its place in the tables.
    pub placed: Placed,
    /// What its owner counts.
    pub stats: Arc<LinkStats>,
    /// The endpoint as it was when it was opened.
    pub endpoint: Endpoint,
    attached: Box<dyn Attached>,
}

impl PodLink {
    /// The mode that its program runs in.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.attached.mode()
    }
}

/// The host link, opened.
pub struct HostLink {
    /// The devices that it was opened on.
    pub device: HostDevice,
    /// Its link.
    pub link: LinkId,
    /// Who owns it.
    pub worker: WorkerId,
    /// What its owner counts.
    pub stats: Arc<LinkStats>,
    attached: Box<dyn Attached>,
}

impl HostLink {
    /// The mode that its program runs in.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.attached.mode()
    }

    /// As the tables have it.
    #[must_use]
    pub fn placed(&self) -> HostPlaced {
        HostPlaced {
            link: self.link,
            worker: self.worker,
            mac: self.device.mac,
            gateway_mac: self.device.gateway_mac,
            mtu: self.device.mtu,
        }
    }
}

/// An uplink, opened.
pub struct UplinkDevice {
    /// Its index when it was opened.
    pub index: u32,
    /// Its queues.
    pub links: Vec<(UplinkLink, Arc<LinkStats>)>,
    overlay: Overlay,
    attached: Box<dyn Attached>,
}

impl UplinkDevice {
    /// The mode that its program runs in, and why not in the one wished for.
    #[must_use]
    pub fn mode(&self) -> (&'static str, Option<String>) {
        (self.attached.mode(), self.attached.fallback())
    }
}

/// The datapath.
pub struct Datapath {
    group: Group,
    publisher: Publisher,
    store: Arc<FrameStore>,
    opener: Box<dyn Opener>,
    numbers: LinkNumbers,
    next_endpoint: u32,
    pods: BTreeMap<Attachment, PodLink>,
    uplinks: BTreeMap<u8, UplinkDevice>,
    host: Option<HostLink>,
    started: SystemTime,
    shared: Arc<Shared>,
    claims: Arc<Claims>,
    /// Node ports of Services, by protocol.
    node_ports: BTreeSet<(u8, u16)>,
    questions: Arc<Notify>,
}

/// A link that was opened and handed to a worker.
struct Owned {
    link: LinkId,
    worker: WorkerId,
    stats: Arc<LinkStats>,
    attached: Box<dyn Attached>,
}

impl Datapath {
    /// Starts the workers, with empty tables.
    pub fn start(
        config: &Config,
        store: Arc<FrameStore>,
        opener: Box<dyn Opener>,
    ) -> Result<Self, String> {
        let cpus = if config.workers.cpus.is_empty() {
            let allowed = allowed_cpus().map_err(|e| format!("CPU affinity: {e}"))?;
            default_cpus(&allowed)
        } else {
            config
                .workers
                .cpus
                .iter()
                .map(|&cpu| cpu as usize)
                .collect()
        };
        let questions = Arc::new(Notify::new());
        let wake = questions.clone();
        let claims = Arc::new(Claims::default());
        let range = config.masquerade.ports;
        // Port zero is nobody's; a range of it alone is none.
        let ports = range.first.max(1)..=range.last;
        let pool = PortPool::with_claims(ports, Box::new(claims.clone()));
        let limits = limits(config.conntrack.max);
        let shared = Arc::new(Shared::new(limits, pool, cpus.len(), move || {
            wake.notify_one();
        }));
        let options = WorkerOptions {
            cpus,
            poll: match config.workers.poll {
                config::PollMode::Adaptive => PollMode::Adaptive,
                config::PollMode::Busy => PollMode::Busy,
                config::PollMode::Interrupt => PollMode::Interrupt,
            },
            flows: FLOWS,
            shared: shared.clone(),
        };
        let mut publisher = Publisher::new(Snapshot::empty(snapshot::Node {
            router_mac: MacAddr::ZERO,
            overlay_port: config.overlay.port,
            addresses: Vec::new(),
            pod_prefixes: Vec::new(),
        }));
        let started = SystemTime::now();
        let group = Group::start(&options, &store, &mut publisher).map_err(|e| e.to_string())?;
        Ok(Self {
            group,
            publisher,
            store,
            opener,
            numbers: LinkNumbers::default(),
            next_endpoint: 1,
            pods: BTreeMap::new(),
            uplinks: BTreeMap::new(),
            host: None,
            started,
            shared,
            claims,
            node_ports: BTreeSet::new(),
            questions,
        })
    }

    /// Tells when workers have questions.
    #[must_use]
    pub fn questions(&self) -> Arc<Notify> {
        self.questions.clone()
    }

    /// The oldest question of a worker.
    #[must_use]
    pub fn question(&self) -> Option<Question> {
        self.shared.questions.take()
    }

    /// When the workers' clock began.
    #[must_use]
    pub fn started(&self) -> SystemTime {
        self.started
    }

    /// Has the uplinks send packets to these node ports to the datapath, and to no others.
    pub fn claim_node_ports(&mut self, ports: BTreeSet<(u8, u16)>) {
        if ports != self.node_ports {
            self.claims.replace(&self.node_ports, &ports);
            self.node_ports = ports;
        }
    }

    /// Gives ports back that an earlier agent claimed for connections which did not come back.
    pub fn settle_claims(&self) {
        self.claims.settle();
    }

    /// What the workers share.
    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The workers.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The packet memory.
    #[must_use]
    pub fn store(&self) -> &Arc<FrameStore> {
        &self.store
    }

    /// What the kernel offers.
    #[must_use]
    pub fn features(&self) -> String {
        self.opener.features()
    }

    /// Whether links take frames larger than a chunk of packet memory.
    #[must_use]
    pub fn takes_large_frames(&self) -> bool {
        self.opener.takes_large_frames()
    }

    /// Open pods.
    #[must_use]
    pub fn pods(&self) -> &BTreeMap<Attachment, PodLink> {
        &self.pods
    }

    /// Open uplinks, by their position in the configuration.
    #[must_use]
    pub fn uplinks(&self) -> &BTreeMap<u8, UplinkDevice> {
        &self.uplinks
    }

    /// The host link, once it is open.
    #[must_use]
    pub fn host(&self) -> Option<&HostLink> {
        self.host.as_ref()
    }

    /// The tables published last.
    #[must_use]
    pub fn tables(&self) -> &Snapshot {
        self.publisher.current()
    }

    /// Publishes tables and wakes the workers.
    pub fn publish(&mut self, tables: Snapshot) {
        self.publisher.publish(tables);
        self.group.wake();
    }

    /// The generation that every worker has; frees what nobody reads any more.
    pub fn acknowledged(&mut self) -> Generation {
        self.publisher.reclaim();
        self.publisher.acknowledged()
    }

    /// Opens a pod's device and hands it to the worker that owns the fewest.
    pub fn open_pod(&mut self, endpoint: &Endpoint) -> Result<(), String> {
        let Owned {
            link,
            worker,
            stats,
            attached,
        } = self.open(|opener, link, pool| opener.open_pod(endpoint, link, pool))?;
        let placed = Placed {
            id: EndpointId(self.next_endpoint),
            link,
            worker,
        };
        self.next_endpoint += 1;
        self.pods.insert(
            endpoint.attachment.clone(),
            PodLink {
                placed,
                stats,
                endpoint: endpoint.clone(),
                attached,
            },
        );
        Ok(())
    }

    /// Opens a device as a link with a number of its own, and hands it to the worker that owns the
    /// fewest.
    fn open(
        &mut self,
        open: impl FnOnce(&mut dyn Opener, LinkId, &mut FramePool) -> Result<Opened, String>,
    ) -> Result<Owned, String> {
        let mut pool = FramePool::new(self.store.clone());
        let link = self.numbers.take(self.publisher.acknowledged());
        let opened = open(&mut *self.opener, link, &mut pool);
        drop(pool);
        let Opened { links, attachment } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                // No worker has seen it.
                self.numbers.give(link, Generation(0));
                return Err(error);
            }
        };
        let worker = self.least_loaded();
        let stats = Arc::new(LinkStats::default());
        for (id, link) in links {
            self.group
                .add_link(worker, id, link, stats.clone())
                .map_err(|e| e.to_string())?;
        }
        Ok(Owned {
            link,
            worker,
            stats,
            attached: attachment,
        })
    }

    fn least_loaded(&self) -> WorkerId {
        let load = |worker: WorkerId| {
            let pods = self.pods.values();
            pods.filter(|pod| pod.placed.worker == worker).count()
        };
        (0..self.group.len() as u16)
            .map(WorkerId)
            .min_by_key(|&worker| load(worker))
            .unwrap_or(WorkerId(0))
    }

    /// Closes a pod's link, then removes its device, then its program: in this order no packet
    /// passes by the datapath. Does nothing for a pod that is not open.
    pub fn close_pod(&mut self, attachment: &Attachment) -> Result<(), String> {
        let Some(pod) = self.pods.remove(attachment) else {
            return Ok(());
        };
        let closed = self
            .group
            .remove_link(pod.placed.worker, pod.placed.link, CLOSE_LIMIT)
            .map_err(|e| e.to_string());
        // The next publication is without it.
        let without = self.publisher.current().generation().next();
        self.numbers.give(pod.placed.link, without);
        let removed = self.opener.remove_pod(&pod.endpoint);
        let detached = pod.attached.detach();
        closed.and(removed).and(detached)
    }

    /// Opens the host link, or says of an open one what its devices are like now.
    pub fn open_host(&mut self, device: HostDevice) -> Result<(), String> {
        if let Some(open) = &mut self.host
            && open.device.our_index == device.our_index
        {
            open.device = device;
            return Ok(());
        }
        if let Err(error) = self.close_host() {
            tracing::warn!(error, "closing a host link whose devices are gone");
        }
        let Owned {
            link,
            worker,
            stats,
            attached,
        } = self.open(|opener, link, pool| opener.open_host(&device, link, pool))?;
        self.host = Some(HostLink {
            device,
            link,
            worker,
            stats,
            attached,
        });
        Ok(())
    }

    /// Closes the host link, whose devices are gone or others by now.
    pub fn close_host(&mut self) -> Result<(), String> {
        let Some(host) = self.host.take() else {
            return Ok(());
        };
        let closed = self
            .group
            .remove_link(host.worker, host.link, CLOSE_LIMIT)
            .map_err(|e| e.to_string());
        let without = self.publisher.current().generation().next();
        self.numbers.give(host.link, without);
        closed.and(host.attached.detach())
    }

    /// Opens an uplink, its queues spread over the workers.
    pub fn open_uplink(
        &mut self,
        position: u8,
        device: &str,
        index: u32,
        overlay: Overlay,
    ) -> Result<(), String> {
        let mut pool = FramePool::new(self.store.clone());
        let acknowledged = self.publisher.acknowledged();
        let mut taken = Vec::new();
        let numbers = &mut self.numbers;
        let mut number = || {
            let id = numbers.take(acknowledged);
            taken.push(id);
            id
        };
        let opened = self
            .opener
            .open_uplink(device, overlay, &self.claims, &mut number, &mut pool);
        drop(pool);
        let used: Vec<LinkId> = match &opened {
            Ok(opened) => opened.links.iter().map(|(id, _)| *id).collect(),
            Err(_) => Vec::new(),
        };
        for id in taken.into_iter().filter(|id| !used.contains(id)) {
            self.numbers.give(id, Generation(0));
        }
        let Opened { links, attachment } = opened?;
        let mut placed = Vec::new();
        for (queue, (id, link)) in links.into_iter().enumerate() {
            let worker = WorkerId((queue % self.group.len()) as u16);
            let stats = Arc::new(LinkStats::default());
            self.group
                .add_link(worker, id, link, stats.clone())
                .map_err(|e| e.to_string())?;
            let entry = UplinkLink {
                link: id,
                worker,
                uplink: position,
            };
            placed.push((entry, stats));
        }
        self.uplinks.insert(
            position,
            UplinkDevice {
                index,
                links: placed,
                overlay,
                attached: attachment,
            },
        );
        Ok(())
    }

    /// Changes what of the uplinks' traffic is ours.
    pub fn set_overlay(&mut self, overlay: Overlay) -> Result<(), String> {
        for uplink in self.uplinks.values_mut() {
            if uplink.overlay != overlay {
                uplink.attached.set_overlay(overlay)?;
                uplink.overlay = overlay;
            }
        }
        Ok(())
    }

    /// Closes an uplink whose device is gone.
    pub fn close_uplink(&mut self, position: u8) -> Result<(), String> {
        let Some(uplink) = self.uplinks.remove(&position) else {
            return Ok(());
        };
        let without = self.publisher.current().generation().next();
        let mut result = Ok(());
        for (entry, _) in uplink.links {
            let closed = self
                .group
                .remove_link(entry.worker, entry.link, CLOSE_LIMIT)
                .map_err(|e| e.to_string());
            result = result.and(closed);
            self.numbers.give(entry.link, without);
        }
        result.and(uplink.attached.detach())
    }

    /// Stops the workers and closes every socket. Programs stay where they are, so that what is
    /// ours is dropped until the next agent comes. Returns how many frames came back, and of
    /// how many.
    #[must_use]
    pub fn stop(self) -> (usize, usize) {
        self.group.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_take_half_of_the_cpus() {
        assert_eq!(default_cpus(&[0]), [0]);
        assert_eq!(default_cpus(&[0, 1]), [1]);
        assert_eq!(default_cpus(&[0, 1, 2, 3]), [2, 3]);
        assert_eq!(default_cpus(&(0..64).collect::<Vec<_>>()), [60, 61, 62, 63]);
        assert!(!allowed_cpus().unwrap().is_empty());
    }
}
