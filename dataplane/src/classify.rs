//! Who sent this packet, and may it claim to be who it says?
//!
//! For a pod: its link tells which endpoint it is, and its MAC and address must be that
//! endpoint's. For the host link: its MAC alone, since the node's kernel may also forward what
//! others sent; whose address it is says the slow path. For the overlay: the outer source must be a node that is known and the frame
//! addressed to this one. What needs the tables' larger maps (does the inner source belong to
//! that node?) is asked on a flow-table miss, in [`crate::slow`].

use std::net::IpAddr;

use crate::ids::{IdentityId, PeerId};
use crate::parse::{Headers, L3};
use crate::snapshot::{Endpoint, Snapshot};
use crate::verdict::DropReason;
use crate::wire::ethernet::MacAddr;
use crate::wire::protocol;
use crate::wire::vxlan::VxlanHeader;

/// Where a packet comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A pod on this node.
    Pod(&'a Endpoint),
    /// The node's own network stack, by the host link.
    Host(&'a Endpoint),
    /// Another node.
    Overlay {
        /// Which one.
        peer: PeerId,
        /// The outer source address, IPv4-mapped if IPv4.
        outer_src: [u8; 16],
        /// What the VNI says of the sender.
        identity: IdentityId,
    },
    /// Outside the cluster, or a node's own traffic, by an uplink and without a tunnel.
    Outside,
}

/// Checks that a frame from a pod's link claims nothing that is not the pod's.
pub fn pod<'a>(
    tables: &Snapshot,
    endpoint: &'a Endpoint,
    headers: &Headers,
) -> Result<Source<'a>, DropReason> {
    if headers.l2.src != endpoint.mac {
        return Err(DropReason::SpoofedMac);
    }
    if matches!(headers.kind, L3::V4 { .. } | L3::V6 { .. }) {
        to_one_host(headers)?;
        if !endpoint.addresses.contains(&headers.src()) {
            return Err(DropReason::SpoofedAddress);
        }
        not_to_overlay(tables, headers)?;
    }
    Ok(Source::Pod(endpoint))
}

/// Checks a frame from the host link.
pub fn host<'a>(
    tables: &Snapshot,
    host: &'a Endpoint,
    headers: &Headers,
) -> Result<Source<'a>, DropReason> {
    if headers.l2.src != host.mac {
        return Err(DropReason::SpoofedMac);
    }
    if matches!(headers.kind, L3::V4 { .. } | L3::V6 { .. }) {
        to_one_host(headers)?;
        not_to_overlay(tables, headers)?;
    }
    Ok(Source::Host(host))
}

/// Whether a packet from an uplink is one of the overlay: to its port, at an address of this node.
#[must_use]
pub fn is_overlay(tables: &Snapshot, headers: &Headers) -> bool {
    let node = tables.node();
    headers.protocol == protocol::UDP
        && headers.dst_port == node.overlay_port
        && node.addresses.contains(&headers.dst())
}

/// Checks the outer headers of a packet of the overlay; `payload` is the UDP payload.
pub fn overlay<'a>(
    tables: &Snapshot,
    outer: &Headers,
    payload: &[u8],
) -> Result<Source<'a>, DropReason> {
    let vni = VxlanHeader::new(payload)?.vni();
    let peer = tables
        .peer_by_address(outer.src())
        .ok_or(DropReason::UnknownPeer)?;
    let identity = IdentityId::new(vni).ok_or(DropReason::BadIdentity)?;
    Ok(Source::Overlay {
        peer,
        outer_src: outer.src_bytes,
        identity,
    })
}

/// Checks a packet that an uplink took in without a tunnel.
pub fn outside(tables: &Snapshot, headers: &Headers) -> Result<Source<'static>, DropReason> {
    match headers.kind {
        L3::Arp { .. } => Err(DropReason::NotForUs),
        L3::V4 { .. } | L3::V6 { .. } => {
            to_one_host(headers)?;
            not_to_overlay(tables, headers)?;
            Ok(Source::Outside)
        }
    }
}

/// Checks that the inner frame of an overlay packet is addressed to this node's router.
pub fn inner(tables: &Snapshot, inner: &Headers) -> Result<(), DropReason> {
    if inner.l2.dst != tables.node().router_mac {
        return Err(DropReason::ForeignRouterMac);
    }
    match inner.kind {
        L3::Arp { .. } => Err(DropReason::ForeignNeighbour),
        L3::V4 { .. } | L3::V6 { .. } => {
            to_one_host(inner)?;
            not_to_overlay(tables, inner)
        }
    }
}

/// Refuses what a node would take for an overlay packet. Looked at in each packet and not once a
/// flow, since the fragments of a packet are one flow, of which only the first has the port.
fn not_to_overlay(tables: &Snapshot, headers: &Headers) -> Result<(), DropReason> {
    let to_port =
        headers.protocol == protocol::UDP && headers.dst_port == tables.node().overlay_port;
    if to_port && tables.is_node(headers.dst()) {
        return Err(DropReason::OverlayPort);
    }
    Ok(())
}

/// Refuses what is for a group of hosts. A frame to all or many of the link's stations is never
/// forwarded, whatever its IP destination (RFC 1812 section 5.3.4).
fn to_one_host(headers: &Headers) -> Result<(), DropReason> {
    let frame = headers.l2.dst;
    let all = match headers.dst() {
        IpAddr::V4(v4) => v4.is_broadcast(),
        IpAddr::V6(_) => false,
    };
    if all {
        Err(DropReason::Broadcast)
    } else if headers.dst().is_multicast() {
        Err(DropReason::Multicast)
    } else if frame.is_multicast() {
        Err(if frame == MacAddr::BROADCAST {
            DropReason::Broadcast
        } else {
            DropReason::Multicast
        })
    } else {
        Ok(())
    }
}
