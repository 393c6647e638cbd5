//! The cluster as control knows it → the tables that workers read. Pure: the same inputs give
//! the same tables, and nothing here asks the kernel or a file.
//!
//! First what the tables shall hold is written down, contradictions settled (the first by name
//! wins, the rest are faults to report); then the last publication is moved there step by step,
//! in an order in which no step contradicts another. What does not change is shared.

mod endpoint;
mod route;
pub mod service;

use std::collections::BTreeMap;
use std::net::IpAddr;

use skein_cni::agent::Attachment;
use skein_dataplane::ids::{EndpointId, IdentityId, LinkId, PeerId, WorkerId};
use skein_dataplane::snapshot::{self, Masquerade, Peer, RemotePod, Snapshot, SnapshotBuilder};
use skein_dataplane::wire::ethernet::MacAddr;

pub use self::route::{primary, tunnel};
use crate::neighbour::Underlay;
use crate::state::{ClusterState, Endpoint, PodKey};

/// A queue of an uplink, opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UplinkLink {
    /// Its link.
    pub link: LinkId,
    /// Who owns it.
    pub worker: WorkerId,
    /// Position of the device in the configuration.
    pub uplink: u8,
}

/// An endpoint's link, opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The endpoint's number.
    pub id: EndpointId,
    /// Its link.
    pub link: LinkId,
    /// Who owns it.
    pub worker: WorkerId,
}

/// The host link, opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPlaced {
    /// Its link.
    pub link: LinkId,
    /// Who owns it.
    pub worker: WorkerId,
    /// MAC of the end in the node's own network stack.
    pub mac: MacAddr,
    /// MAC of our end.
    pub gateway_mac: MacAddr,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
}

/// All that the tables follow from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// This node's name.
    pub node: &'a str,
    /// UDP port of the overlay.
    pub overlay_port: u16,
    /// MTU of the underlay, in bytes; 0: the uplink's.
    pub overlay_mtu: u32,
    /// The cluster.
    pub state: &'a ClusterState,
    /// Identities of pods.
    pub identities: &'a BTreeMap<PodKey, IdentityId>,
    /// The way to peers, and out of the cluster.
    pub underlay: &'a Underlay,
    /// Whose packets to the outside take the node's address.
    pub masquerade: &'a Masquerade,
    /// Numbers of peers, by node name.
    pub peers: &'a BTreeMap<String, PeerId>,
    /// Opened queues of uplinks.
    pub uplinks: &'a [UplinkLink],
    /// The opened host link.
    pub host: Option<HostPlaced>,
    /// Opened links of endpoints.
    pub placed: &'a BTreeMap<Attachment, Placed>,
}

/// Tables, and what is to be said about them.
#[derive(Debug)]
pub struct Compiled {
    /// The next publication.
    pub tables: Snapshot,
    /// Contradictions in the inputs, and how each was settled.
    pub faults: Vec<String>,
    /// Endpoints that the tables hold with the identity of their very pod.
    pub complete: Vec<Attachment>,
    /// Addresses of pods that the tables have gained or lost; Services may wait for them.
    pub moved: Vec<IpAddr>,
}

/// What the tables shall hold.
#[derive(Debug)]
struct Desired {
    node: snapshot::Node,
    host: Option<(snapshot::Endpoint, WorkerId)>,
    peers: BTreeMap<PeerId, Peer>,
    endpoints: endpoint::Local,
    remote: BTreeMap<IpAddr, RemotePod>,
    complete: Vec<Attachment>,
    faults: Vec<String>,
}

/// Makes the next tables from the last and the inputs.
#[must_use]
pub fn compile(last: &Snapshot, inputs: &Inputs<'_>) -> Compiled {
    let mut faults = Vec::new();
    let (node, peers) = route::peers(inputs, &mut faults);
    let (endpoints, complete) = endpoint::local(inputs, last, &mut faults);
    let remote = endpoint::remote(inputs, &peers, &endpoints, &mut faults);
    let desired = Desired {
        host: inputs.host.map(|host| endpoint::host(&host, &node)),
        node,
        peers,
        endpoints,
        remote,
        complete,
        faults,
    };
    apply(last, inputs, desired)
}

/// Moves this node's links alone: what an ADD or DEL needs, at the cost of the node's pods
/// and not of the cluster. All else stays as the last tables have it.
#[must_use]
pub fn compile_endpoints(last: &Snapshot, inputs: &Inputs<'_>) -> Compiled {
    let mut faults = Vec::new();
    let (endpoints, complete) = endpoint::local(inputs, last, &mut faults);
    let mut builder = SnapshotBuilder::new(last);
    let mut refused = Vec::new();
    // A link that was closed has its number only until the next tables, which these may be.
    apply_uplinks(last, inputs.uplinks, &mut builder, &mut refused);
    remove_endpoints(last, &endpoints, &mut builder);
    for address in endpoints.values().flat_map(|(entry, _)| &entry.addresses) {
        builder.remove_remote_pod(*address);
    }
    for (endpoint, worker) in endpoints.into_values() {
        refused.extend(builder.set_endpoint(endpoint, worker).err());
    }
    faults.extend(refused.iter().map(ToString::to_string));
    finish(builder, inputs, faults, complete)
}

/// Ends with the tables; an endpoint that they refused is not complete.
fn finish(
    builder: SnapshotBuilder,
    inputs: &Inputs<'_>,
    faults: Vec<String>,
    mut complete: Vec<Attachment>,
) -> Compiled {
    let moved = builder.moved().to_vec();
    let tables = builder.finish();
    complete.retain(|attachment| {
        let placed = inputs.placed.get(attachment);
        placed.is_some_and(|placed| {
            let there = tables.endpoint(placed.id);
            there.is_some_and(|endpoint| endpoint.link == placed.link)
        })
    });
    Compiled {
        tables,
        faults,
        complete,
        moved,
    }
}

fn remove_endpoints(last: &Snapshot, wanted: &endpoint::Local, builder: &mut SnapshotBuilder) {
    let gone = last.endpoints().map(|endpoint| endpoint.id);
    for id in gone.filter(|id| !wanted.contains_key(id)) {
        builder.remove_endpoint(id);
    }
}

/// Moves the tables to what they shall hold.
fn apply(last: &Snapshot, inputs: &Inputs<'_>, mut desired: Desired) -> Compiled {
    let mut builder = SnapshotBuilder::new(last);
    let mut refused = Vec::new();
    builder.set_node(desired.node);
    route::outside(inputs, &mut builder);
    apply_uplinks(last, inputs.uplinks, &mut builder, &mut refused);
    refused.extend(builder.set_host(desired.host.take()).err());

    // What goes makes room for what comes.
    remove_endpoints(last, &desired.endpoints, &mut builder);
    for (address, _) in last.remote_pods() {
        if !desired.remote.contains_key(&address) {
            builder.remove_remote_pod(address);
        }
    }
    // A range or address that moves from one peer to another leaves the first before.
    for before in last.peers() {
        let wanted = desired.peers.get(&before.id);
        let mut less = before.clone();
        less.addresses
            .retain(|address| wanted.is_some_and(|peer| peer.addresses.contains(address)));
        less.pod_prefixes
            .retain(|prefix| wanted.is_some_and(|peer| peer.pod_prefixes.contains(prefix)));
        refused.extend(builder.set_peer(less).err());
    }
    let wanted: Vec<PeerId> = desired.peers.keys().copied().collect();
    for peer in desired.peers.into_values() {
        refused.extend(builder.set_peer(peer).err());
    }
    for (address, pod) in desired.remote {
        refused.extend(builder.set_remote_pod(address, pod).err());
    }
    for before in last.peers() {
        if wanted.binary_search(&before.id).is_err() {
            refused.extend(builder.remove_peer(before.id).err());
        }
    }
    for (endpoint, worker) in desired.endpoints.into_values() {
        refused.extend(builder.set_endpoint(endpoint, worker).err());
    }
    let refused = refused.iter().map(ToString::to_string);
    desired.faults.extend(refused);
    finish(builder, inputs, desired.faults, desired.complete)
}

fn apply_uplinks(
    last: &Snapshot,
    uplinks: &[UplinkLink],
    builder: &mut SnapshotBuilder,
    refused: &mut Vec<snapshot::BuildError>,
) {
    for position in 0..=u8::MAX {
        for &link in last.uplink_links(position) {
            let entry = last.link(link);
            let stays = uplinks.iter().any(|wanted| {
                wanted.link == link
                    && wanted.uplink == position
                    && entry.is_some_and(|entry| entry.worker == wanted.worker)
            });
            if !stays {
                builder.remove_uplink_link(link);
            }
        }
    }
    for wanted in uplinks {
        if builder.tables().link(wanted.link).is_none() {
            let added = builder.add_uplink_link(wanted.link, wanted.worker, wanted.uplink);
            refused.extend(added.err());
        }
    }
}

/// How an endpoint is called in messages.
fn describe(endpoint: &Endpoint) -> String {
    match &endpoint.pod {
        Some(pod) => format!("pod {}/{}", pod.namespace, pod.name),
        None => format!("container {}", endpoint.attachment.container_id),
    }
}
