//! Services as the packet path reads them: where they are reached, and whom they may choose.
//!
//! An entry is one port of one Service in one address family: what has backends, an epoch and a
//! number of its own. Control decides which backends may be chosen, by readiness, topology and
//! traffic policy; here is only what a choice looks up.
//!
//! ```text
//! address, port, protocol ─▶ frontends ──┐
//! one of the node's, port ─▶ node ports ─┴▶ ServiceId ─▶ backends, two choices, epoch
//! ```
//!
//! NodePorts stand once, not for each of the node's addresses. The parts are persistent maps, so
//! a change costs its own Services, whatever their number; the tables of a Service are built when
//! its backends change and shared by all its frontends and by all publications until then.
//!
//! Deliberately absent: names, readiness, zones, and the addresses of headless Services.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::maglev::{MAX_BACKENDS, Maglev};
use super::{EpochSlot, Epochs, Prefix, Tracked};

/// One port of one Service in one address family. Chosen by control; never used again for
/// another, since connections remember it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(NonZeroU32);

impl ServiceId {
    /// The Service of that number; `None` for zero.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }

    /// The number, never zero.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a packet is addressed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    /// Destination address.
    pub address: IpAddr,
    /// Destination port; zero for a protocol without ports.
    pub port: u16,
    /// Protocol number (TCP, UDP, SCTP).
    pub protocol: u8,
}

/// How clients reach a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrontendKind {
    /// An address of the cluster alone, nobody else's, whatever the port.
    ClusterIp,
    /// An address that a load balancer sends to this node.
    LoadBalancer,
    /// An address that somebody routes to this node.
    ExternalIp,
    /// A port of each of the node's own addresses.
    NodePort,
}

/// One way to reach a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// By an address of its own (never of kind [`FrontendKind::NodePort`]).
    Address(FrontendKind, IpAddr, u16),
    /// By a port of each of the node's own addresses, of the Service's family.
    NodePort(u16),
}

/// Whom a Service may choose for a kind of client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TrafficPolicy {
    /// Any backend.
    #[default]
    Cluster,
    /// Backends on this node alone.
    Local,
}

/// A place where a Service is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Whether it is on this node.
    pub local: bool,
    /// Whether new connections may go there under [`TrafficPolicy::Cluster`].
    pub cluster: bool,
    /// Whether new connections may go there under [`TrafficPolicy::Local`]. One that is neither
    /// keeps the connections that it has.
    pub node: bool,
}

impl Candidate {
    /// Whether new connections may go there under a policy.
    #[must_use]
    pub fn takes_new(&self, policy: TrafficPolicy) -> bool {
        match policy {
            TrafficPolicy::Cluster => self.cluster,
            TrafficPolicy::Local => self.node,
        }
    }
}

/// One port of a Service in one address family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Protocol number.
    pub protocol: u8,
    /// Whether its addresses are IPv4.
    pub ipv4: bool,
    /// Where it is reached.
    pub reach: Vec<Reach>,
    /// Where it is served, of the same family.
    pub candidates: Vec<Candidate>,
    /// The policy for the cluster's own clients at its ClusterIP.
    pub internal: TrafficPolicy,
    /// The policy for clients from outside.
    pub external: TrafficPolicy,
    /// How long a client stays with its backend after its last new connection.
    pub affinity: Option<Duration>,
    /// Who may use its load balancer's addresses; empty: everybody.
    pub source_ranges: Vec<Prefix>,
}

/// A choice among the candidates of one policy.
#[derive(Clone, Debug)]
enum Pool {
    /// Nobody.
    Empty,
    /// One, at this position.
    One(u32),
    /// Several: the table gives a place among these positions.
    Many(Box<[u32]>, Maglev),
}

impl Pool {
    fn new(candidates: &[Candidate], policy: TrafficPolicy) -> Self {
        let positions: Box<[u32]> = (0..candidates.len() as u32)
            .filter(|&at| candidates[at as usize].takes_new(policy))
            .collect();
        let places: Vec<(IpAddr, u16)> = positions
            .iter()
            .map(|&at| {
                (
                    candidates[at as usize].address,
                    candidates[at as usize].port,
                )
            })
            .collect();
        match (&*positions, Maglev::new(&places)) {
            ([], _) => Self::Empty,
            (_, Some(table)) => Self::Many(positions, table),
            // More than a table holds are refused before.
            ([one, ..], None) => Self::One(*one),
        }
    }

    fn pick(&self, hash: u64) -> Option<usize> {
        match self {
            Self::Empty => None,
            Self::One(at) => Some(*at as usize),
            Self::Many(positions, table) => Some(positions[table.pick(hash)] as usize),
        }
    }

    fn memory_bytes(&self) -> usize {
        match self {
            Self::Empty | Self::One(_) => 0,
            Self::Many(positions, table) => size_of_val::<[u32]>(positions) + table.memory_bytes(),
        }
    }
}

/// The choices that follow from a Service's candidates.
#[derive(Debug)]
struct Pools {
    cluster: Pool,
    node: Pool,
}

/// A Service with its choices.
#[derive(Debug)]
pub struct ServiceEntry {
    service: Service,
    pools: Arc<Pools>,
}

impl std::ops::Deref for ServiceEntry {
    type Target = Service;

    fn deref(&self) -> &Service {
        &self.service
    }
}

impl ServiceEntry {
    /// Of a normalized Service; shares the choices with `before` where its candidates are the
    /// same.
    fn new(service: Service, before: Option<&Self>) -> Self {
        let pools = match before {
            Some(before) if before.candidates == service.candidates => before.pools.clone(),
            _ => Arc::new(Pools {
                cluster: Pool::new(&service.candidates, TrafficPolicy::Cluster),
                node: Pool::new(&service.candidates, TrafficPolicy::Local),
            }),
        };
        Self { service, pools }
    }

    /// The candidate for a hash under a policy.
    #[must_use]
    pub fn pick(&self, policy: TrafficPolicy, hash: u64) -> Option<&Candidate> {
        let pool = match policy {
            TrafficPolicy::Cluster => &self.pools.cluster,
            TrafficPolicy::Local => &self.pools.node,
        };
        pool.pick(hash).map(|at| &self.candidates[at])
    }

    /// The candidate of that address and port, chosen or not.
    #[must_use]
    pub fn candidate(&self, address: IpAddr, port: u16) -> Option<&Candidate> {
        self.candidates
            .binary_search_by_key(&(address, port), |candidate| {
                (candidate.address, candidate.port)
            })
            .ok()
            .map(|at| &self.candidates[at])
    }

    /// What its candidates and tables take, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of_val::<[Candidate]>(&self.candidates)
            + self.pools.cluster.memory_bytes()
            + self.pools.node.memory_bytes()
    }
}

/// One form for what means the same, so that "differs" means something.
fn normalize(service: &mut Service) {
    service.reach.sort_unstable();
    service.reach.dedup();
    service.candidates.sort_unstable();
    service
        .candidates
        .dedup_by_key(|candidate| (candidate.address, candidate.port));
}

/// Why a Service was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// Two Services claim one frontend.
    #[error("{reach:?} belongs to service {owner:?} already")]
    Taken {
        /// Where both would be reached.
        reach: Reach,
        /// Who is.
        owner: ServiceId,
    },
    /// More backends than a table tells apart.
    #[error("{0} backends: at most {MAX_BACKENDS} are served")]
    TooMany(usize),
    /// An address of the other family.
    #[error("{0} is not of the service's address family")]
    Family(IpAddr),
}

/// All Services of a publication.
#[derive(Clone, Debug, Default)]
pub struct ServiceMap {
    frontends: imbl::HashMap<Frontend, (FrontendKind, ServiceId)>,
    /// By whether the family is IPv4, port, protocol.
    node_ports: imbl::HashMap<(bool, u16, u8), ServiceId>,
    /// How many frontends each ClusterIP has.
    cluster_ips: imbl::HashMap<IpAddr, u32>,
    entries: imbl::HashMap<ServiceId, Tracked<Arc<ServiceEntry>>>,
}

impl ServiceMap {
    /// The Service that is reached there, and how. `own` says whether the address is this node's.
    #[must_use]
    pub fn find(
        &self,
        frontend: Frontend,
        own: impl FnOnce() -> bool,
    ) -> Option<(FrontendKind, ServiceId, &ServiceEntry)> {
        let (kind, id) = match self.frontends.get(&frontend) {
            Some(&found) => found,
            None => {
                let key = (frontend.address.is_ipv4(), frontend.port, frontend.protocol);
                let &id = self.node_ports.get(&key)?;
                if !own() {
                    return None;
                }
                (FrontendKind::NodePort, id)
            }
        };
        // An entry goes together with its frontends.
        let entry = self.entries.get(&id)?;
        Some((kind, id, entry))
    }

    /// Whether it is a ClusterIP, on whatever port.
    #[must_use]
    pub fn is_cluster_ip(&self, address: IpAddr) -> bool {
        self.cluster_ips.contains_key(&address)
    }

    /// A Service.
    #[must_use]
    pub fn get(&self, id: ServiceId) -> Option<&Tracked<Arc<ServiceEntry>>> {
        self.entries.get(&id)
    }

    /// All Services, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (ServiceId, &ServiceEntry)> {
        self.entries.iter().map(|(&id, entry)| (id, &***entry))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whom a frontend of this protocol and family belongs to.
    fn owner(&self, service: &Service, reach: Reach) -> Option<ServiceId> {
        match reach {
            Reach::Address(_, address, port) => {
                let frontend = Frontend {
                    address,
                    port,
                    protocol: service.protocol,
                };
                self.frontends.get(&frontend).map(|&(_, id)| id)
            }
            Reach::NodePort(port) => {
                let key = (service.ipv4, port, service.protocol);
                self.node_ports.get(&key).copied()
            }
        }
    }

    fn check(&self, id: ServiceId, service: &Service) -> Result<(), ServiceError> {
        if service.candidates.len() > MAX_BACKENDS {
            return Err(ServiceError::TooMany(service.candidates.len()));
        }
        let served = service.candidates.iter().map(|candidate| candidate.address);
        let reached = service.reach.iter().filter_map(|reach| match reach {
            Reach::Address(_, address, _) => Some(*address),
            Reach::NodePort(_) => None,
        });
        if let Some(other) = served
            .chain(reached)
            .find(|address| address.is_ipv4() != service.ipv4)
        {
            return Err(ServiceError::Family(other));
        }
        for &reach in &service.reach {
            if let Some(owner) = self.owner(service, reach).filter(|&owner| owner != id) {
                return Err(ServiceError::Taken { reach, owner });
            }
        }
        Ok(())
    }

    /// Adds a Service or changes it; its epoch moves only when it differs.
    pub(super) fn set(
        &mut self,
        id: ServiceId,
        mut service: Service,
        epochs: &mut Epochs,
    ) -> Result<(), ServiceError> {
        normalize(&mut service);
        let before = self.entries.get(&id).cloned();
        if before
            .as_ref()
            .is_some_and(|entry| entry.service == service)
        {
            return Ok(());
        }
        self.check(id, &service)?;
        if (before.as_ref()).is_none_or(|entry| entry.service.reach != service.reach) {
            // Whoever sent to an address that was nobody's must notice; and to a node's own port.
            epochs.bump(EpochSlot::OUTSIDE);
            let is_node_port = |reach: &Reach| matches!(reach, Reach::NodePort(_));
            if service.reach.iter().any(is_node_port) {
                epochs.bump(EpochSlot::NODE);
            }
        }
        if let Some(before) = &before {
            self.forget(&before.service);
        }
        for &reach in &service.reach {
            match reach {
                Reach::Address(kind, address, port) => {
                    let frontend = Frontend {
                        address,
                        port,
                        protocol: service.protocol,
                    };
                    self.frontends.insert(frontend, (kind, id));
                    if kind == FrontendKind::ClusterIp {
                        *self.cluster_ips.entry(address).or_insert(0) += 1;
                    }
                }
                Reach::NodePort(port) => {
                    let key = (service.ipv4, port, service.protocol);
                    self.node_ports.insert(key, id);
                }
            }
        }
        let epoch = match &before {
            Some(before) => {
                epochs.bump(before.epoch);
                before.epoch
            }
            None => epochs.allocate(),
        };
        let value = Arc::new(ServiceEntry::new(service, before.as_ref().map(|b| &***b)));
        self.entries.insert(id, Tracked { value, epoch });
        Ok(())
    }

    /// Removes a Service with its frontends; does nothing when it is not there.
    pub(super) fn remove(&mut self, id: ServiceId, epochs: &mut Epochs) {
        if let Some(entry) = self.entries.remove(&id) {
            self.forget(&entry.service);
            epochs.release(entry.epoch);
        }
    }

    fn forget(&mut self, service: &Service) {
        for &reach in &service.reach {
            match reach {
                Reach::Address(kind, address, port) => {
                    self.frontends.remove(&Frontend {
                        address,
                        port,
                        protocol: service.protocol,
                    });
                    if kind == FrontendKind::ClusterIp {
                        let left = self.cluster_ips.get(&address).map_or(0, |n| n - 1);
                        if left == 0 {
                            self.cluster_ips.remove(&address);
                        } else {
                            self.cluster_ips.insert(address, left);
                        }
                    }
                }
                Reach::NodePort(port) => {
                    let key = (service.ipv4, port, service.protocol);
                    self.node_ports.remove(&key);
                }
            }
        }
    }
}
