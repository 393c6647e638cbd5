//! Whom the rules of one policy mean in one direction: kept while an endpoint needs it, and
//! brought up to date by each identity and pod that comes, changes or goes.
//!
//! Peers are identities wherever labels tell them apart. Two things need the pods themselves,
//! by their addresses: a port that each of them calls by that name and has elsewhere (egress
//! only: for ingress it is the endpoint's own port), and labels that are part of no identity.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::Side;
use skein_dataplane::snapshot::{PortProtocol, PortRange};

use super::subjects::{Subject, Subjects, beyond_identities};
use crate::policy::{NetworkPolicy, Peer, PortNumber, Rule};
use crate::state::PodKey;

/// A pod as a peer, by its addresses.
#[derive(Clone, Debug)]
pub(super) struct PodPeer<'a> {
    pub(super) subject: Subject,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) named_ports: &'a BTreeMap<(PortProtocol, String), u16>,
}

/// What a rule allows a pod by its address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ByAddress {
    pub(super) addresses: Vec<IpAddr>,
    /// Whether the rule's own ports are meant: it is selected by a label beyond its identity.
    pub(super) selected: bool,
    /// The ports that it calls by the names in the rule.
    pub(super) named: Vec<PortRange>,
}

/// Whom one rule means.
#[derive(Clone, Debug, Default)]
pub(super) struct RulePeers {
    pub(super) identities: BTreeSet<IdentityId>,
    pub(super) pods: BTreeMap<PodKey, ByAddress>,
}

/// Whom the rules of a policy mean in a direction, rule by rule.
#[derive(Clone, Debug)]
pub(super) struct PolicyPeers {
    /// Moves with every change; no two tables ever share one.
    pub(super) version: u64,
    pub(super) rules: Vec<RulePeers>,
}

impl PolicyPeers {
    /// Of all that is known. Pods are looked at only where a rule needs them.
    pub(super) fn new<'a>(
        version: u64,
        policy: &NetworkPolicy,
        side: Side,
        subjects: &Subjects,
        pods: impl Fn() -> Vec<(PodKey, PodPeer<'a>)>,
    ) -> Self {
        let namespace = &policy.key.namespace;
        let rules = policy.rules(side).unwrap_or_default();
        let pods = if rules.iter().any(|rule| needs_pods(rule, side)) {
            pods()
        } else {
            Vec::new()
        };
        let of_rule = |rule: &Rule| RulePeers {
            identities: (rule.peers.iter())
                .filter(|peer| !beyond_identities(peer))
                .flat_map(|peer| subjects.selected(peer, namespace))
                .collect(),
            pods: (pods.iter())
                .filter_map(|(key, pod)| {
                    Some((key.clone(), by_address(rule, side, namespace, pod)?))
                })
                .collect(),
        };
        Self {
            version,
            rules: rules.iter().map(of_rule).collect(),
        }
    }

    /// Takes note of an identity that is new, or gone (`None`); true when some rule means it.
    pub(super) fn identity(
        &mut self,
        policy: &NetworkPolicy,
        side: Side,
        id: IdentityId,
        subject: Option<&Subject>,
    ) -> bool {
        let mut changed = false;
        let rules = policy.rules(side).unwrap_or_default();
        for (rule, peers) in rules.iter().zip(&mut self.rules) {
            let means = |subject: &Subject| {
                (rule.peers.iter())
                    .any(|peer| !beyond_identities(peer) && subject.is(peer, &policy.key.namespace))
            };
            changed |= if subject.is_some_and(means) {
                peers.identities.insert(id)
            } else {
                peers.identities.remove(&id)
            };
        }
        changed
    }

    /// Takes note of a pod that is new, different or gone (`None`); true when some rule means it
    /// by its address and does so in another way than before.
    pub(super) fn pod(
        &mut self,
        policy: &NetworkPolicy,
        side: Side,
        key: &PodKey,
        pod: Option<&PodPeer<'_>>,
    ) -> bool {
        let mut changed = false;
        let rules = policy.rules(side).unwrap_or_default();
        for (rule, peers) in rules.iter().zip(&mut self.rules) {
            if !needs_pods(rule, side) {
                continue;
            }
            let now = pod.and_then(|pod| by_address(rule, side, &policy.key.namespace, pod));
            if peers.pods.get(key) != now.as_ref() {
                changed = true;
                match now {
                    Some(now) => peers.pods.insert(key.clone(), now),
                    None => peers.pods.remove(key),
                };
            }
        }
        changed
    }
}

/// Whether only pods themselves can tell what a rule allows.
fn needs_pods(rule: &Rule, side: Side) -> bool {
    let named = |rule: &Rule| {
        let mut ports = rule.ports.iter();
        ports.any(|port| matches!(port.number, PortNumber::Named(_)))
    };
    (side == Side::Egress && named(rule)) || rule.peers.iter().any(beyond_identities)
}

/// What a rule of a policy of that namespace allows a pod by its address, if anything.
fn by_address(rule: &Rule, side: Side, namespace: &str, pod: &PodPeer<'_>) -> Option<ByAddress> {
    if !needs_pods(rule, side) {
        return None;
    }
    let by_labels = |peer: &Peer| pod.subject.is(peer, namespace);
    let selected = (rule.peers.iter()).any(|peer| beyond_identities(peer) && by_labels(peer));
    let mut found = ByAddress {
        selected,
        ..ByAddress::default()
    };
    if side == Side::Egress {
        found.named = (rule.ports.iter())
            .filter_map(|port| match &port.number {
                PortNumber::Named(name) => {
                    let number = pod.named_ports.get(&(port.protocol, name.clone()))?;
                    Some(PortRange::port(port.protocol, *number))
                }
                _ => None,
            })
            .collect();
    }
    let whole = selected || rule.peers.is_empty() || rule.peers.iter().any(by_labels);
    found.addresses = (pod.addresses.iter().copied())
        .filter(|&address| whole || rule.peers.iter().any(|peer| in_block(peer, address)))
        .collect();
    let allows = found.selected || !found.named.is_empty();
    (allows && !found.addresses.is_empty()).then_some(found)
}

fn in_block(peer: &Peer, address: IpAddr) -> bool {
    match peer {
        Peer::Block { range, except } => {
            range.contains(address) && !except.iter().any(|hole| hole.contains(address))
        }
        Peer::Pods { .. } => false,
    }
}
