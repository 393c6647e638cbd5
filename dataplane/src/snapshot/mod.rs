//! The contract with control: all that a worker may read.
//!
//! A [`Snapshot`] is immutable. Control makes the next one from the last with a
//! [`SnapshotBuilder`], which refuses what contradicts itself and moves the epochs of what
//! changed; all the rest is shared, so a publication costs what the change costs. Workers read
//! it through a [`Reader`], refreshed once a batch.

mod build;
mod epochs;
mod lpm;
pub mod maglev;
mod outside;
mod policy_map;
mod publish;
mod service_map;

use std::net::IpAddr;
use std::sync::Arc;

pub use build::{BuildError, MAX_LINKS, SnapshotBuilder};
pub use epochs::{EpochSlot, EpochStamp, Epochs};
pub use lpm::{Lpm, Prefix};
pub use outside::{Exit, Masquerade};
pub use policy_map::{PortProtocol, PortRange, RuleId, RulePorts, Rules, RulesBuilder};
pub use publish::{Publisher, Reader};
pub use service_map::{
    Candidate, Frontend, FrontendKind, Reach, Service, ServiceEntry, ServiceError, ServiceId,
    ServiceMap, TrafficPolicy,
};

use crate::ids::{EndpointId, Generation, IdentityId, LinkId, PeerId, WorkerId};
use crate::policy::EndpointPolicy;
use crate::wire::ethernet::MacAddr;

/// This node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// MAC to which peers address inner frames: [`router_mac`] of its underlay address.
    pub router_mac: MacAddr,
    /// UDP port of the overlay.
    pub overlay_port: u16,
    /// Addresses at which the node takes overlay packets.
    pub addresses: Vec<IpAddr>,
    /// Ranges of its own pods' addresses: one without a pod is nobody's.
    pub pod_prefixes: Vec<Prefix>,
}

/// What is at the far end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkRole {
    /// A pod's veth.
    Pod(EndpointId),
    /// Our end of the veth into the node's own network stack.
    Host,
    /// A queue of an uplink device; the number is the device's position in the configuration.
    Uplink(u8),
}

/// A link as every worker sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEntry {
    /// The one worker that receives from it and sends to it.
    pub worker: WorkerId,
    /// What is at the far end.
    pub role: LinkRole,
}

/// One interface of a pod on this node, or the node's own network stack behind the host link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its number, chosen by control.
    pub id: EndpointId,
    /// Its link.
    pub link: LinkId,
    /// MAC of the pod's end of the veth: the only source MAC that it may use.
    pub mac: MacAddr,
    /// MAC of the host's end: what the pod sends to, and what frames to it come from.
    pub gateway_mac: MacAddr,
    /// Its addresses: the only source addresses that it may use.
    pub addresses: Vec<IpAddr>,
    /// Its security identity.
    pub identity: IdentityId,
    /// The largest IP packet that it takes, in bytes.
    pub mtu: u32,
}

/// How to reach a peer: a resolved next hop on an uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Position of the uplink device in the configuration.
    pub uplink: u8,
    /// Outer source address: this node's, of the family of `outer_dst`.
    pub outer_src: IpAddr,
    /// Outer destination address: the peer's.
    pub outer_dst: IpAddr,
    /// MAC of the uplink.
    pub src_mac: MacAddr,
    /// MAC of the next hop; `None` while the kernel has not resolved it.
    pub dst_mac: Option<MacAddr>,
    /// The largest outer IP packet on this path, in bytes.
    pub mtu: u32,
}

/// Another node that runs Skein.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number, chosen by control.
    pub id: PeerId,
    /// Where inner frames to it are addressed.
    pub router_mac: MacAddr,
    /// Outer source addresses that are its own.
    pub addresses: Vec<IpAddr>,
    /// Ranges of pod addresses that are its own.
    pub pod_prefixes: Vec<Prefix>,
    /// How to reach it; `None` without a route.
    pub hop: Option<Hop>,
}

/// A pod on another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePod {
    /// The node that it runs on.
    pub peer: PeerId,
    /// Its security identity.
    pub identity: IdentityId,
}

/// A table's entry with the slot that moves when it changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracked<T> {
    value: T,
    epoch: EpochSlot,
}

impl<T> Tracked<T> {
    /// The slot on which flows through this entry depend.
    #[must_use]
    pub fn epoch(&self) -> EpochSlot {
        self.epoch
    }
}

impl<T> std::ops::Deref for Tracked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// One publication of all tables.
///
/// Invariants, kept by [`SnapshotBuilder`]: an endpoint's link has the role of that endpoint,
/// the host's that of the host;
/// an address belongs to one endpoint or one remote pod; what names a peer or an endpoint names
/// one that is there, and so does a policy; an outer address or a range belongs to one peer.
#[derive(Clone, Debug)]
pub struct Snapshot {
    generation: Generation,
    node: Arc<Node>,
    links: imbl::Vector<Option<LinkEntry>>,
    uplinks: imbl::OrdMap<u8, Arc<Vec<LinkId>>>,
    host: Option<Arc<Endpoint>>,
    endpoints: imbl::HashMap<EndpointId, Tracked<Arc<Endpoint>>>,
    local: imbl::HashMap<IpAddr, EndpointId>,
    /// Of the endpoints that any policy isolates.
    policies: imbl::HashMap<EndpointId, Arc<EndpointPolicy>>,
    peers: imbl::HashMap<PeerId, Tracked<Arc<Peer>>>,
    peer_by_address: imbl::HashMap<IpAddr, PeerId>,
    peer_by_prefix: Lpm<PeerId>,
    remote: imbl::HashMap<IpAddr, Tracked<RemotePod>>,
    services: ServiceMap,
    outside: outside::Outside,
    epochs: Epochs,
}

impl Snapshot {
    /// Tables of a node with nothing on it, generation zero.
    #[must_use]
    pub fn empty(node: Node) -> Self {
        Self {
            generation: Generation(0),
            node: Arc::new(node),
            links: imbl::Vector::new(),
            uplinks: imbl::OrdMap::new(),
            host: None,
            endpoints: imbl::HashMap::new(),
            local: imbl::HashMap::new(),
            policies: imbl::HashMap::new(),
            peers: imbl::HashMap::new(),
            peer_by_address: imbl::HashMap::new(),
            peer_by_prefix: Lpm::default(),
            remote: imbl::HashMap::new(),
            services: ServiceMap::default(),
            outside: outside::Outside::default(),
            epochs: Epochs::default(),
        }
    }

    /// Number of this publication.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// This node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// A link's entry.
    #[must_use]
    pub fn link(&self, id: LinkId) -> Option<LinkEntry> {
        self.links.get(id.0 as usize).copied().flatten()
    }

    /// The queues of an uplink device, in order.
    #[must_use]
    pub fn uplink_links(&self, uplink: u8) -> &[LinkId] {
        self.uplinks
            .get(&uplink)
            .map_or(&[], |links| links.as_slice())
    }

    /// The node's own network stack, once the host link is open. Flows through it depend on
    /// [`EpochSlot::NODE`].
    #[must_use]
    pub fn host(&self) -> Option<&Endpoint> {
        self.host.as_deref()
    }

    /// Whether it is an underlay address of this node or of another.
    #[must_use]
    pub fn is_node(&self, address: IpAddr) -> bool {
        self.node.addresses.contains(&address) || self.peer_by_address.contains_key(&address)
    }

    /// Whether a packet so addressed would be taken for one of the overlay by a node.
    #[must_use]
    pub fn is_overlay_port(&self, address: IpAddr, port: u16, protocol: u8) -> bool {
        protocol == crate::wire::protocol::UDP
            && port == self.node.overlay_port
            && self.is_node(address)
    }

    /// A local endpoint.
    #[must_use]
    pub fn endpoint(&self, id: EndpointId) -> Option<&Tracked<Arc<Endpoint>>> {
        self.endpoints.get(&id)
    }

    /// All local endpoints, in no order.
    pub fn endpoints(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.values().map(|endpoint| &***endpoint)
    }

    /// The local endpoint that has this address.
    #[must_use]
    pub fn local(&self, address: IpAddr) -> Option<&Tracked<Arc<Endpoint>>> {
        self.local.get(&address).and_then(|&id| self.endpoint(id))
    }

    /// The policies of an endpoint. Flows judged by them depend on the endpoint's own epoch.
    #[must_use]
    pub fn policy(&self, id: EndpointId) -> &EndpointPolicy {
        const OPEN: &EndpointPolicy = &EndpointPolicy::OPEN;
        self.policies.get(&id).map_or(OPEN, |policy| policy)
    }

    /// A peer.
    #[must_use]
    pub fn peer(&self, id: PeerId) -> Option<&Tracked<Arc<Peer>>> {
        self.peers.get(&id)
    }

    /// All peers, in no order.
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.peers.values().map(|peer| &***peer)
    }

    /// The peer whose outer address this is.
    #[must_use]
    pub fn peer_by_address(&self, address: IpAddr) -> Option<PeerId> {
        self.peer_by_address.get(&address).copied()
    }

    /// The pod on another node that has this address, where this node has heard of it.
    #[must_use]
    pub fn remote_pod(&self, address: IpAddr) -> Option<&Tracked<RemotePod>> {
        self.remote.get(&address)
    }

    /// All pods on other nodes, in no order.
    pub fn remote_pods(&self) -> impl Iterator<Item = (IpAddr, RemotePod)> + '_ {
        self.remote.iter().map(|(&address, pod)| (address, **pod))
    }

    /// The peer that a pod address belongs to: by the pod itself, else by its range.
    #[must_use]
    pub fn peer_of(&self, address: IpAddr) -> Option<PeerId> {
        self.remote
            .get(&address)
            .map(|pod| pod.peer)
            .or_else(|| self.peer_by_prefix.lookup(address).copied())
    }

    /// Services.
    #[must_use]
    pub fn services(&self) -> &ServiceMap {
        &self.services
    }

    /// The slot on which connections of a Service depend; `None` once it is gone.
    #[must_use]
    pub fn service_epoch(&self, id: ServiceId) -> Option<EpochSlot> {
        self.services.get(id).map(Tracked::epoch)
    }

    /// Whether connections of a Service may stay with a backend: new ones go there, or it ends
    /// and still serves.
    #[must_use]
    pub fn is_backend(&self, id: ServiceId, address: IpAddr, port: u16) -> bool {
        self.services
            .get(id)
            .is_some_and(|entry| entry.candidate(address, port).is_some())
    }

    /// Whether it is a Service's own address (ClusterIP), on whatever port: nobody else has it,
    /// so a packet to it that no frontend takes goes nowhere. The addresses of load balancers
    /// and external ones may be somebody's on other ports.
    #[must_use]
    pub fn is_service_address(&self, address: IpAddr) -> bool {
        self.services.is_cluster_ip(address)
    }

    /// The epochs, against which cached decisions are held.
    #[must_use]
    pub fn epochs(&self) -> &Epochs {
        &self.epochs
    }
}

/// The router MAC of the node with that underlay address: locally administered, `02:53` and
/// the four bytes of an IPv4 address, or `02:54` and the 32-bit FNV-1a hash of an IPv6 address.
#[must_use]
pub fn router_mac(underlay: IpAddr) -> MacAddr {
    let (kind, tail) = match underlay {
        IpAddr::V4(v4) => (0x53, v4.octets()),
        IpAddr::V6(v6) => (0x54, fnv1a(&v6.octets()).to_be_bytes()),
    };
    MacAddr([0x02, kind, tail[0], tail[1], tail[2], tail[3]])
}

/// The 32-bit FNV-1a hash (draft-eastlake-fnv).
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn router_macs_are_what_peers_expect() {
        assert_eq!(
            router_mac("192.168.77.1".parse().unwrap()),
            MacAddr([0x02, 0x53, 192, 168, 77, 1])
        );
        assert_eq!(fnv1a(b"foobar"), 0xbf9c_f968);
        let v6 = router_mac("fd77::1".parse().unwrap());
        assert_eq!(v6.0[..2], [0x02, 0x54]);
    }
}
