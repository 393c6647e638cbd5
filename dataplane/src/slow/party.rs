//! Who is at either end of a connection: where it is, and the identity that policy knows it by.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Ask, Depends};
use crate::classify::Source;
use crate::ids::IdentityId;
use crate::snapshot::{Endpoint, EpochSlot, Peer, Snapshot, Tracked};
use crate::verdict::DropReason;

/// Where somebody is, seen from this node.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'a> {
    /// A pod on this node.
    Pod(&'a Endpoint),
    /// This node itself.
    Host,
    /// A pod on another node.
    Peer(&'a Tracked<Arc<Peer>>),
    /// Another node itself.
    PeerNode(&'a Tracked<Arc<Peer>>),
    /// Outside the cluster.
    Outside,
    /// Nowhere: an address of this node's pods that no pod has.
    Nobody,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Party<'a> {
    pub address: IpAddr,
    pub identity: IdentityId,
    pub place: Place<'a>,
}

impl Party<'_> {
    /// Whether it is a node rather than a pod.
    pub fn is_node(&self) -> bool {
        matches!(self.place, Place::Host | Place::PeerNode(_))
    }
}

/// Who has this address.
pub(super) fn at<'a>(
    tables: &'a Snapshot,
    address: IpAddr,
    depends: &mut Depends<'_>,
) -> Party<'a> {
    let party = |identity, place| Party {
        address,
        identity,
        place,
    };
    if let Some(pod) = tables.local(address) {
        depends.on(pod.epoch());
        return party(pod.identity, Place::Pod(pod));
    }
    if tables.node().addresses.contains(&address) {
        return party(IdentityId::HOST, Place::Host);
    }
    let node = tables.peer_by_address(address);
    if let Some(peer) = node.and_then(|id| tables.peer(id)) {
        depends.on(peer.epoch());
        return party(IdentityId::REMOTE_NODE, Place::PeerNode(peer));
    }
    if let Some(peer) = tables.peer_of(address).and_then(|id| tables.peer(id)) {
        depends.on(peer.epoch());
        let identity = match tables.remote_pod(address) {
            Some(pod) => {
                depends.on(pod.epoch());
                pod.identity
            }
            None => {
                depends.on(EpochSlot::STRANGERS);
                IdentityId::UNMANAGED
            }
        };
        return party(identity, Place::Peer(peer));
    }
    depends.on(EpochSlot::OUTSIDE);
    let mut own_ranges = tables.node().pod_prefixes.iter();
    if own_ranges.any(|range| range.contains(address)) {
        return party(IdentityId::UNMANAGED, Place::Nobody);
    }
    let world = match address {
        IpAddr::V4(_) => IdentityId::WORLD_IPV4,
        IpAddr::V6(_) => IdentityId::WORLD_IPV6,
    };
    party(world, Place::Outside)
}

/// Who sent the packet, once it is known that they may use its source address. A packet from
/// the overlay must come from the node that its inner source belongs to, be it a pod's address
/// or the node's own; a node's own address has the identity of a node and no other address has.
/// A pod that is known here has its own identity, whatever the VNI says: when labels change, one
/// node hears of it before the other.
pub(super) fn sender<'a>(
    ask: &Ask<'a>,
    depends: &mut Depends<'_>,
) -> Result<Party<'a>, DropReason> {
    let tables = ask.tables;
    let mut party = at(tables, ask.headers.src(), depends);
    match *ask.source {
        Source::Pod(endpoint) => match party.place {
            Place::Pod(pod) if pod.id == endpoint.id => Ok(party),
            // Control took the address away while the packet was on its way.
            _ => Err(DropReason::SpoofedAddress),
        },
        // Pods and other nodes have ways of their own, so whoever speaks in their names by the
        // host link is somebody else.
        Source::Host(_) => match party.place {
            Place::Host | Place::Outside => Ok(party),
            Place::Pod(_) | Place::Peer(_) | Place::PeerNode(_) | Place::Nobody => {
                Err(DropReason::ForwardedClusterSource)
            }
        },
        Source::Overlay { peer, identity, .. } => {
            let (owner, is_node) = match party.place {
                Place::Peer(owner) => (owner, false),
                Place::PeerNode(owner) => (owner, true),
                // A pod's address on this node is nobody else's, even where a peer's range
                // holds it.
                Place::Pod(_) | Place::Host | Place::Outside | Place::Nobody => {
                    return Err(DropReason::ForeignInnerSource);
                }
            };
            if owner.id != peer {
                return Err(DropReason::ForeignInnerSource);
            }
            // What a node says of itself is "remote node", and of its pods never that.
            if (identity == IdentityId::REMOTE_NODE) != is_node || identity == IdentityId::HOST {
                return Err(DropReason::BadIdentity);
            }
            if !is_node && tables.remote_pod(party.address).is_none() {
                party.identity = identity;
            }
            Ok(party)
        }
        Source::Outside => match party.place {
            Place::Outside | Place::PeerNode(_) => Ok(party),
            Place::Pod(_) | Place::Peer(_) | Place::Host | Place::Nobody => {
                Err(DropReason::ForeignPlainSource)
            }
        },
    }
}
