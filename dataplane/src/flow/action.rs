//! What the slow path decided for a flow, compiled so that a hit only applies it.

use crate::conntrack::{ConnRef, Direction};
use crate::encap::Tunnel;
use crate::ids::LinkId;
use crate::parse::EthernetHeader;
use crate::slow::MOST_STAMPS;
use crate::snapshot::EpochStamp;
use crate::translate::Translation;

/// How a packet leaves.
#[derive(Clone, Debug)]
pub enum Delivery {
    /// To a pod on this node, in a frame with these addresses.
    Local(EthernetHeader),
    /// To another node, behind this header.
    Tunnel(Tunnel),
    /// Out of the cluster, in a frame with these addresses.
    Wire(EthernetHeader),
}

/// A decision to forward. (A refusal is not kept: it costs the slow path each time, so that
/// a pod that sends what it may not cannot push the flows of others out of the table.)
#[derive(Clone, Debug)]
pub struct Action {
    /// Where the packet goes out.
    pub egress: LinkId,
    /// The largest IP packet that the path takes, in bytes.
    pub mtu: u32,
    /// Whether this node counts as the hop between the pods. One of the two does: the
    /// sender's, so that a packet that expires never crosses the wire.
    pub decrement_ttl: bool,
    /// Whether the flow may be a tunnel of the pod's own, whose inner checksums are looked at.
    pub nested: bool,
    /// Its addresses and ports on the other side of a translation.
    pub translation: Option<Translation>,
    /// The connection that it belongs to, and which way it goes there. The decision stands only
    /// as long as the connection.
    pub conn: Option<(ConnRef, Direction)>,
    /// How it leaves.
    pub delivery: Delivery,
    /// What the decision depends on; unused places hold the node's stamp once more.
    pub depends: [EpochStamp; MOST_STAMPS],
}
