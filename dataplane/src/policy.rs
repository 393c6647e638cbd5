//! May this peer and this endpoint talk? A pure look-up in what control compiled.
//!
//! Asked by the slow path, after services have been translated, since a virtual address has no
//! identity: for the endpoint that a flow begins at, and for the one that it ends at. Replies
//! are not asked for: who may speak may be answered.
//!
//! NetworkPolicy isolates an endpoint in a direction as soon as one policy selects it there; then
//! only what some rule allows gets through. Deliberately absent: the rules' names, which control
//! keeps by their numbers, and any memory of earlier answers, which is the flow table's.

use std::net::IpAddr;
use std::sync::Arc;

use crate::ids::IdentityId;
use crate::snapshot::{RuleId, Rules};

/// Which way a flow goes, seen from the endpoint that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// It ends here.
    Ingress,
    /// It begins here.
    Egress,
}

/// The other end of a flow, after services have been translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerOf {
    /// Its identity.
    pub identity: IdentityId,
    /// Its address.
    pub address: IpAddr,
}

/// What an endpoint's policies say of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// No policy isolates the endpoint in this direction.
    NotIsolated,
    /// No policy can forbid it: the node to its own pods, a pod to itself.
    AlwaysAllowed,
    /// This rule allows it.
    Allowed(RuleId),
    /// Policies isolate the endpoint, and none of their rules allows it.
    Denied,
}

impl Judgement {
    /// Whether the flow may go on.
    #[must_use]
    pub fn allows(self) -> bool {
        self != Self::Denied
    }
}

/// The policies of one endpoint; by default none isolates it.
///
/// Rules are shared between endpoints that the same policies select.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EndpointPolicy {
    /// The endpoint's own addresses.
    pub own: Vec<IpAddr>,
    /// What it takes; `None` while nothing isolates it there.
    pub ingress: Option<Arc<Rules>>,
    /// What it may send; `None` while nothing isolates it there.
    pub egress: Option<Arc<Rules>>,
}

impl EndpointPolicy {
    /// The policy of an endpoint that no NetworkPolicy selects.
    pub const OPEN: Self = Self {
        own: Vec::new(),
        ingress: None,
        egress: None,
    };

    /// Whether they are the same; tables that are shared are not compared entry by entry.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let same = |one: &Option<Arc<Rules>>, other: &Option<Arc<Rules>>| match (one, other) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
            (None, None) => true,
            _ => false,
        };
        self.own == other.own
            && same(&self.ingress, &other.ingress)
            && same(&self.egress, &other.egress)
    }

    /// Judges the first packet of a flow. `port` is the flow's destination port, that of the
    /// endpoint itself for ingress and the peer's for egress; it counts for TCP, UDP and SCTP
    /// alone.
    #[must_use]
    pub fn judge(&self, side: Side, peer: PeerOf, protocol: u8, port: u16) -> Judgement {
        let rules = match side {
            Side::Ingress => &self.ingress,
            Side::Egress => &self.egress,
        };
        let Some(rules) = rules else {
            return Judgement::NotIsolated;
        };
        // The node must reach its pods (kubelet's probes), and a pod cannot shut itself out.
        let from_node = side == Side::Ingress && peer.identity == IdentityId::HOST;
        if from_node || self.own.contains(&peer.address) {
            return Judgement::AlwaysAllowed;
        }
        match rules.lookup(peer.identity, peer.address, protocol, port) {
            Some(rule) => Judgement::Allowed(rule),
            None => Judgement::Denied,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{PortProtocol, PortRange, RulePorts, RulesBuilder};
    use crate::wire::protocol;

    fn peer(identity: IdentityId, address: &str) -> PeerOf {
        PeerOf {
            identity,
            address: address.parse().unwrap(),
        }
    }

    /// One that takes TCP port 80 from the outside and sends nothing.
    fn web() -> EndpointPolicy {
        let mut ingress = RulesBuilder::default();
        let ports = RulePorts::Only(vec![PortRange::port(PortProtocol::Tcp, 80)]);
        ingress.identity(IdentityId::WORLD_IPV4, RuleId(7), &Arc::new(ports));
        EndpointPolicy {
            own: vec!["10.0.0.1".parse().unwrap()],
            ingress: Some(Arc::new(ingress.finish())),
            egress: Some(Arc::default()),
        }
    }

    #[test]
    fn each_kind_of_judgement() {
        let world = peer(IdentityId::WORLD_IPV4, "198.51.100.7");
        let node = peer(IdentityId::HOST, "192.168.0.1");
        let itself = peer(IdentityId::UNMANAGED, "10.0.0.1");
        let denied = Judgement::Denied;
        let cases = [
            (Side::Ingress, world, 80, Judgement::Allowed(RuleId(7))),
            (Side::Ingress, world, 81, denied),
            (Side::Egress, world, 80, denied),
            (Side::Ingress, node, 81, Judgement::AlwaysAllowed),
            (Side::Egress, node, 81, denied),
            (Side::Ingress, itself, 81, Judgement::AlwaysAllowed),
            (Side::Egress, itself, 81, Judgement::AlwaysAllowed),
        ];
        for (side, peer, port, expected) in cases {
            let found = web().judge(side, peer, protocol::TCP, port);
            assert_eq!(found, expected, "{side:?} {peer:?} {port}");
            assert_eq!(found.allows(), expected != denied);
            let open = EndpointPolicy::OPEN.judge(side, peer, protocol::TCP, port);
            assert_eq!(open, Judgement::NotIsolated);
        }
        let other_node = peer(IdentityId::REMOTE_NODE, "192.168.0.2");
        let probe = web().judge(Side::Ingress, other_node, protocol::TCP, 81);
        assert_eq!(probe, denied);
    }

    #[test]
    fn a_rule_with_ports_allows_no_protocol_without_them() {
        let world = peer(IdentityId::WORLD_IPV4, "198.51.100.7");
        for number in [protocol::ICMP, protocol::UDP, protocol::SCTP, protocol::ESP] {
            let found = web().judge(Side::Ingress, world, number, 80);
            assert_eq!(found, Judgement::Denied);
        }
        let mut ingress = RulesBuilder::default();
        ingress.everyone(RuleId(1), &Arc::new(RulePorts::Every));
        let policy = EndpointPolicy {
            ingress: Some(Arc::new(ingress.finish())),
            ..EndpointPolicy::OPEN
        };
        let found = policy.judge(Side::Ingress, world, protocol::ICMP, 0);
        assert_eq!(found, Judgement::Allowed(RuleId(1)));
    }
}
