//! Policies in words: what applies to a pod, and which policy does less than its author may
//! think.

use std::fmt;

use skein_dataplane::policy::Side;

use super::{Policies, is_peer};
use crate::policy::{Peer, PolicyKey, PortNumber, Rule, Selector};
use crate::state::{ClusterState, Pod, PodKey};

/// A policy that does nothing, or cannot do all that it says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// The policy.
    pub policy: PolicyKey,
    /// What about it.
    pub text: String,
}

/// A policy that isolates a pod of this node in a direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The policy.
    pub policy: PolicyKey,
    /// What each of its rules allows, in words; without rules it allows nothing.
    pub rules: Vec<String>,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "policy {} {}", self.policy, self.text)
    }
}

impl Policies {
    /// The policies that isolate a pod in a direction, by name; none: everything is allowed.
    #[must_use]
    pub fn applied(&self, pod: &PodKey, side: Side) -> Vec<Applied> {
        let selected = self.selected.get(pod).into_iter().flatten();
        selected
            .filter_map(|key| {
                let rules = self.held[key].policy.rules(side)?;
                Some(Applied {
                    policy: PolicyKey::clone(key),
                    rules: rules.iter().map(|rule| describe(rule, side)).collect(),
                })
            })
            .collect()
    }

    /// How many policies select no pod.
    #[must_use]
    pub fn selecting_nothing(&self) -> usize {
        self.held.values().filter(|held| held.pods == 0).count()
    }

    /// Policies that select nothing, and names of ports that nobody has, as far as this node's
    /// pods are concerned. As of the last [`endpoints`](Self::endpoints).
    #[must_use]
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    pub(super) fn take_notes(&mut self, state: &ClusterState) {
        let mut notes: Vec<Note> = (self.held.iter())
            .filter(|(_, held)| held.pods == 0)
            .map(|(key, _)| Note {
                policy: PolicyKey::clone(key),
                text: "selects no pod".into(),
            })
            .collect();
        for endpoint in state.endpoints() {
            let reference = endpoint.pod.as_ref();
            let pod = reference.and_then(|reference| state.pod_of(reference));
            if let Some(pod) = pod.filter(|pod| is_peer(pod)) {
                self.unknown_ports(pod, &mut notes);
            }
        }
        for ((key, side), peers) in &self.peers {
            let rules = self.held[key].policy.rules(*side).unwrap_or_default();
            let missing = rules.iter().zip(&peers.rules).enumerate();
            for (index, (rule, peers)) in missing {
                let found = peers.pods.values().any(|pod| !pod.named.is_empty());
                if *side == Side::Egress && !found {
                    notes.extend(named(rule).map(|port| Note {
                        policy: PolicyKey::clone(key),
                        text: format!(
                            "spec.egress[{index}] names port {port}, which none of its peers has"
                        ),
                    }));
                }
            }
        }
        notes.sort_unstable();
        notes.dedup();
        self.notes = notes;
    }

    /// Ports that ingress rules for a pod name and the pod does not have.
    fn unknown_ports(&self, pod: &Pod, notes: &mut Vec<Note>) {
        for key in self.selected.get(&pod.key).into_iter().flatten() {
            let rules = self.held[key].policy.rules(Side::Ingress);
            for (index, rule) in rules.unwrap_or_default().iter().enumerate() {
                for port in &rule.ports {
                    if let PortNumber::Named(name) = &port.number
                        && !pod.named_ports.contains_key(&(port.protocol, name.clone()))
                    {
                        notes.push(Note {
                            policy: PolicyKey::clone(key),
                            text: format!(
                                "spec.ingress[{index}] names port {port}, which pod {} does not \
                                 have",
                                pod.key
                            ),
                        });
                    }
                }
            }
        }
    }
}

/// The ports of a rule that have names.
fn named(rule: &Rule) -> impl Iterator<Item = &crate::policy::Port> {
    (rule.ports.iter()).filter(|port| matches!(port.number, PortNumber::Named(_)))
}

/// What a rule allows, in words.
fn describe(rule: &Rule, side: Side) -> String {
    let ports: Vec<_> = rule.ports.iter().map(ToString::to_string).collect();
    let ports = if ports.is_empty() {
        "everything".to_owned()
    } else {
        ports.join(", ")
    };
    let peers: Vec<_> = rule.peers.iter().map(describe_peer).collect();
    let peers = if peers.is_empty() {
        "anyone".to_owned()
    } else {
        peers.join(", or ")
    };
    let way = match side {
        Side::Ingress => "from",
        Side::Egress => "to",
    };
    format!("{ports} {way} {peers}")
}

fn describe_peer(peer: &Peer) -> String {
    let some = |selector: &&Selector| !selector.requirements().is_empty();
    match peer {
        Peer::Pods { namespaces, pods } => {
            let pods = match pods.as_ref().filter(some) {
                None => "every pod".to_owned(),
                Some(selector) => format!("pods with {selector}"),
            };
            match namespaces {
                None => format!("{pods} of this namespace"),
                Some(all) if all.requirements().is_empty() => format!("{pods} of any namespace"),
                Some(selector) => format!("{pods} of namespaces with {selector}"),
            }
        }
        Peer::Block { range, except } if except.is_empty() => range.to_string(),
        Peer::Block { range, except } => {
            let except: Vec<_> = except.iter().map(ToString::to_string).collect();
            format!("{range} except {}", except.join(" and "))
        }
    }
}
