//! Where a packet leaves: to a pod or the host on this node, through the tunnel to another node,
//! or out of the cluster.

use std::net::IpAddr;
use std::sync::Arc;

use super::party::{Party, Place};
use super::{Ask, Depends, Question};
use crate::classify::Source;
use crate::encap::{Tunnel, TunnelEnds};
use crate::flow::{Action, Delivery};
use crate::ids::{IdentityId, LinkId, WorkerId};
use crate::nested;
use crate::parse::{EthernetHeader, Headers};
use crate::snapshot::{Endpoint, Node, Peer, Snapshot, Tracked};
use crate::verdict::DropReason;

/// In whose name a packet leaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speaker {
    /// The identity of whose address it comes from once it is translated.
    pub identity: IdentityId,
    /// Whether its connection goes through this node by a translation of its source: then what
    /// another node sends of it goes on from here, and nothing else does.
    pub through_here: bool,
    /// Whether it answers.
    pub is_answer: bool,
}

/// The way to whom the packet is for once it is translated.
pub(super) fn to(
    ask: &Ask<'_>,
    sender: &Party<'_>,
    speaker: Speaker,
    receiver: &Party<'_>,
    depends: &mut Depends<'_>,
) -> Result<Action, DropReason> {
    let in_transit = matches!(ask.source, Source::Overlay { .. }) && !speaker.through_here;
    let as_this_node = speaker.identity == IdentityId::HOST;
    match receiver.place {
        Place::Pod(pod) => Ok(to_local(pod, ask, depends)),
        Place::Host => {
            if sender.is_node() {
                return Err(DropReason::NodeToNode);
            }
            let host = ask.tables.host().ok_or(DropReason::NoRoute)?;
            Ok(to_local(host, ask, depends))
        }
        Place::Nobody => Err(DropReason::NoRoute),
        Place::Peer(_) | Place::PeerNode(_) | Place::Outside if in_transit => {
            Err(DropReason::OverlayTransit)
        }
        // What this node's translation sends to another node itself is no pod's: the overlay
        // would not take it.
        Place::PeerNode(_) if as_this_node && speaker.through_here => {
            to_outside(receiver.address, ask, depends)
        }
        Place::PeerNode(_) if sender.is_node() => Err(DropReason::NodeToNode),
        Place::Peer(peer) | Place::PeerNode(peer) => to_peer(peer, speaker.identity, ask, depends),
        // The kernel forwarded the question, from where no uplink leads.
        Place::Outside if speaker.is_answer && ask.tables.exit(receiver.address).is_none() => {
            let host = ask.tables.host().ok_or(DropReason::NoRoute)?;
            Ok(to_local(host, ask, depends))
        }
        Place::Outside => to_outside(receiver.address, ask, depends),
    }
}

fn to_local(endpoint: &Endpoint, ask: &Ask<'_>, depends: &Depends<'_>) -> Action {
    // For what comes from the overlay, the sender's node has done both.
    let first_hop = !matches!(ask.source, Source::Overlay { .. });
    Action {
        egress: endpoint.link,
        mtu: endpoint.mtu,
        decrement_ttl: first_hop,
        nested: first_hop && nested::may_carry(ask.headers),
        delivery: Delivery::Local(EthernetHeader {
            dst: endpoint.mac,
            src: endpoint.gateway_mac,
        }),
        translation: None,
        conn: None,
        depends: depends.stamps,
    }
}

fn to_peer(
    peer: &Tracked<Arc<Peer>>,
    speaker: IdentityId,
    ask: &Ask<'_>,
    depends: &Depends<'_>,
) -> Result<Action, DropReason> {
    let Ask {
        tables,
        headers,
        worker,
        hash,
        ..
    } = *ask;
    let tunnel = tunnel_to(peer, speaker, headers, tables.node(), hash)?;
    let hop = peer.hop.as_ref().ok_or(DropReason::NoRoute)?;
    Ok(Action {
        egress: uplink_queue(hop.uplink, tables, worker, hash).ok_or(DropReason::LinkClosed)?,
        mtu: hop.mtu.saturating_sub(tunnel.overhead()),
        decrement_ttl: true,
        nested: nested::may_carry(headers),
        delivery: Delivery::Tunnel(tunnel),
        translation: None,
        conn: None,
        depends: depends.stamps,
    })
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

/// Out of the cluster, by the most specific route of an uplink.
fn to_outside(
    address: IpAddr,
    ask: &Ask<'_>,
    depends: &mut Depends<'_>,
) -> Result<Action, DropReason> {
    let Ask {
        tables,
        headers,
        worker,
        hash,
        ..
    } = *ask;
    let exit = tables.exit(address).ok_or(DropReason::NoRoute)?;
    let next_hop = exit.gateway.unwrap_or(address);
    let Some(neighbour) = tables.neighbour(exit.uplink, next_hop) else {
        ask.shared.questions.ask(Question::Neighbour {
            uplink: exit.uplink,
            address: next_hop,
        });
        return Err(DropReason::NeighbourUnresolved);
    };
    depends.on(neighbour.epoch());
    Ok(Action {
        egress: uplink_queue(exit.uplink, tables, worker, hash).ok_or(DropReason::LinkClosed)?,
        mtu: exit.mtu,
        decrement_ttl: true,
        nested: nested::may_carry(headers),
        delivery: Delivery::Wire(EthernetHeader {
            dst: **neighbour,
            src: exit.src_mac,
        }),
        translation: None,
        conn: None,
        depends: depends.stamps,
    })
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
