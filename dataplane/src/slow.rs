//! The way of a packet that no flow-table entry covers, down to the one [`Action`] that its
//! flow keeps.
//!
//! The order stands here and nowhere else: origin → route.

use std::net::IpAddr;
use std::sync::Arc;

use crate::classify::Source;
use crate::encap::{Tunnel, TunnelEnds};
use crate::flow::{Action, Delivery};
use crate::ids::{IdentityId, LinkId, PeerId, WorkerId};
use crate::nested;
use crate::parse::{EthernetHeader, Headers};
use crate::snapshot::{Endpoint, EpochSlot, EpochStamp, Node, Peer, Snapshot, Tracked};
use crate::verdict::DropReason;

/// Decides for a packet with these (inner) headers, on that worker. `hash` is the flow's: it
/// picks the uplink queue and the outer source port.
pub fn decide(
    source: &Source<'_>,
    headers: &Headers,
    tables: &Snapshot,
    worker: WorkerId,
    hash: u64,
) -> Result<Action, DropReason> {
    let mut depends = Depends::new(tables);
    let destination = headers.dst();
    let identity = origin(source, headers.src(), tables, &mut depends)?;
    if let Some(endpoint) = tables.local(destination) {
        depends.on(endpoint.epoch());
        return Ok(to_local(endpoint, source, headers, &depends));
    }
    if is_host(identity) && tables.is_node(destination) {
        return Err(DropReason::NodeToNode);
    }
    if tables.node().addresses.contains(&destination) {
        let host = tables.host().ok_or(DropReason::NoRoute)?;
        return Ok(to_local(host, source, headers, &depends));
    }
    if matches!(source, Source::Overlay { .. }) {
        return Err(DropReason::OverlayTransit);
    }
    let peer = to_peer(destination, tables, &mut depends)?;
    let tunnel = tunnel_to(peer, identity, headers, tables.node(), hash)?;
    let hop = peer.hop.as_ref().ok_or(DropReason::NoRoute)?;
    Ok(Action {
        egress: uplink_queue(hop.uplink, tables, worker, hash).ok_or(DropReason::LinkClosed)?,
        mtu: hop.mtu.saturating_sub(tunnel.overhead()),
        decrement_ttl: true,
        nested: nested::may_carry(headers),
        delivery: Delivery::Tunnel(tunnel),
        depends: depends.stamps,
    })
}

/// What the decision depends on, at most four slots.
struct Depends<'a> {
    tables: &'a Snapshot,
    stamps: [EpochStamp; 4],
    used: usize,
}

impl<'a> Depends<'a> {
    fn new(tables: &'a Snapshot) -> Self {
        Self {
            tables,
            stamps: [tables.epochs().stamp(EpochSlot::NODE); 4],
            used: 1,
        }
    }

    fn on(&mut self, slot: EpochSlot) {
        self.stamps[self.used] = self.tables.epochs().stamp(slot);
        self.used += 1;
    }
}

/// Whether it is the identity of a node rather than of a pod.
fn is_host(identity: IdentityId) -> bool {
    matches!(identity, IdentityId::HOST | IdentityId::REMOTE_NODE)
}

/// The identity that the packet is judged by. A packet from the overlay must come from the node
/// that its inner source belongs to, be it a pod's address or the node's own; a node's own
/// address has the identity of a node and no other address has. A pod that is known here has its
/// own identity, whatever the VNI says: when labels change, one node hears of it before the other.
fn origin(
    source: &Source<'_>,
    address: IpAddr,
    tables: &Snapshot,
    depends: &mut Depends<'_>,
) -> Result<IdentityId, DropReason> {
    match *source {
        Source::Pod(endpoint) => {
            let endpoint = tables
                .endpoint(endpoint.id)
                .ok_or(DropReason::UnknownLink)?;
            depends.on(endpoint.epoch());
            Ok(endpoint.identity)
        }
        Source::Host(host) => forwarded_or_own(host, address, tables),
        Source::Overlay { peer, identity, .. } => {
            // A pod's address on this node is nobody else's, even where a peer's range holds it.
            let node = tables.peer_by_address(address);
            let owner = node.or_else(|| tables.peer_of(address));
            if tables.local(address).is_some() || owner != Some(peer) {
                return Err(DropReason::ForeignInnerSource);
            }
            // What a node says of itself is "remote node", and of its pods never that.
            if (identity == IdentityId::REMOTE_NODE) != node.is_some()
                || identity == IdentityId::HOST
            {
                return Err(DropReason::BadIdentity);
            }
            let sender = tables.peer(peer).ok_or(DropReason::UnknownPeer)?;
            depends.on(sender.epoch());
            if let Some(pod) = tables.remote_pod(address) {
                depends.on(pod.epoch());
                return Ok(pod.identity);
            }
            Ok(identity)
        }
    }
}

/// Whose packet the node's kernel routed into the host link: its own, or one that it forwards
/// and that is judged by its address. Pods and other nodes have ways of their own, so whoever
/// speaks in their names here is somebody else.
fn forwarded_or_own(
    host: &Endpoint,
    address: IpAddr,
    tables: &Snapshot,
) -> Result<IdentityId, DropReason> {
    if host.addresses.contains(&address) {
        return Ok(host.identity);
    }
    let of_cluster = tables.local(address).is_some()
        || tables.peer_of(address).is_some()
        || tables.is_node(address);
    Err(if of_cluster {
        DropReason::ForwardedClusterSource
    } else {
        // The world: its answers have no way back by us.
        DropReason::ForwardedFromOutside
    })
}

fn to_local(
    endpoint: &Endpoint,
    source: &Source<'_>,
    headers: &Headers,
    depends: &Depends<'_>,
) -> Action {
    // For what comes from the overlay, the sender's node has done both.
    let first_hop = !matches!(source, Source::Overlay { .. });
    Action {
        egress: endpoint.link,
        mtu: endpoint.mtu,
        decrement_ttl: first_hop,
        nested: first_hop && nested::may_carry(headers),
        delivery: Delivery::Local(EthernetHeader {
            dst: endpoint.mac,
            src: endpoint.gateway_mac,
        }),
        depends: depends.stamps,
    }
}

fn to_peer<'a>(
    destination: IpAddr,
    tables: &'a Snapshot,
    depends: &mut Depends<'_>,
) -> Result<&'a Tracked<Arc<Peer>>, DropReason> {
    let id: PeerId = tables
        .peer_by_address(destination)
        .or_else(|| tables.peer_of(destination))
        .ok_or(DropReason::NoRoute)?;
    let peer = tables.peer(id).ok_or(DropReason::NoRoute)?;
    depends.on(peer.epoch());
    if let Some(pod) = tables.remote_pod(destination) {
        depends.on(pod.epoch());
    }
    Ok(peer)
}

fn tunnel_to(
    peer: &Peer,
    identity: IdentityId,
    headers: &Headers,
    node: &Node,
    hash: u64,
) -> Result<Tunnel, DropReason> {
    let hop = peer.hop.as_ref().ok_or(DropReason::NoRoute)?;
    let dst_mac = hop.dst_mac.ok_or(DropReason::NeighbourUnresolved)?;
    let ends = TunnelEnds {
        outer: EthernetHeader {
            dst: dst_mac,
            src: hop.src_mac,
        },
        outer_src: hop.outer_src,
        outer_dst: hop.outer_dst,
        port: node.overlay_port,
        inner: EthernetHeader {
            dst: peer.router_mac,
            src: node.router_mac,
        },
    };
    let identity = match identity {
        IdentityId::HOST => IdentityId::REMOTE_NODE,
        pod => pod,
    };
    Tunnel::new(&ends, identity, headers.ether_type, hash).ok_or(DropReason::NoRoute)
}

/// The uplink queue for a flow: one of the worker's own, where it has any.
fn uplink_queue(uplink: u8, tables: &Snapshot, worker: WorkerId, hash: u64) -> Option<LinkId> {
    let queues = tables.uplink_links(uplink);
    let own = |&link: &LinkId| {
        tables
            .link(link)
            .is_some_and(|entry| entry.worker == worker)
    };
    let mine = queues.iter().copied().filter(own).count();
    if mine > 0 {
        return queues.iter().copied().filter(own).nth(hash as usize % mine);
    }
    queues.get(hash as usize % queues.len().max(1)).copied()
}
