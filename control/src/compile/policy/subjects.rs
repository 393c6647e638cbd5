//! Every identity that this node knows of, and which of them a selector means.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use skein_dataplane::ids::IdentityId;

use crate::identity::{LEFT_OUT, LabelSet};
use crate::policy::{Operator, Peer, Selector};
use crate::state::Labels;

/// What an identity, or a pod, is selected by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) namespace: String,
    pub(super) namespace_labels: Labels,
    pub(super) labels: Labels,
}

impl Subject {
    /// Whether a peer of a policy of that namespace means it by its labels.
    pub(super) fn is(&self, peer: &Peer, policy_namespace: &str) -> bool {
        let Peer::Pods { namespaces, pods } = peer else {
            return false;
        };
        let in_namespace = match namespaces {
            None => self.namespace == policy_namespace,
            Some(selector) => selector.matches(&self.namespace_labels),
        };
        in_namespace && pods.as_ref().is_none_or(|pods| pods.matches(&self.labels))
    }
}

impl From<&LabelSet> for Subject {
    fn from(labels: &LabelSet) -> Self {
        Self {
            namespace: labels.namespace().to_owned(),
            namespace_labels: labels.namespace_labels(),
            labels: labels.pod_labels(),
        }
    }
}

/// Whether it asks for a label that no identity carries, so that only pods themselves can tell.
pub(super) fn beyond_identities(peer: &Peer) -> bool {
    let Peer::Pods {
        pods: Some(pods), ..
    } = peer
    else {
        return false;
    };
    (pods.requirements().iter()).any(|needed| LEFT_OUT.contains(&needed.label.as_str()))
}

/// The identities, by what selectors ask for first.
#[derive(Debug, Default)]
pub(super) struct Subjects {
    known: BTreeMap<IdentityId, Subject>,
    by_namespace: HashMap<String, BTreeSet<IdentityId>>,
    by_label: HashMap<(String, String), BTreeSet<IdentityId>>,
}

impl Subjects {
    pub(super) fn get(&self, id: IdentityId) -> Option<&Subject> {
        self.known.get(&id)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = IdentityId> + '_ {
        self.known.keys().copied()
    }

    pub(super) fn insert(&mut self, id: IdentityId, subject: Subject) {
        self.remove(id);
        let namespace = self.by_namespace.entry(subject.namespace.clone());
        namespace.or_default().insert(id);
        for (name, value) in &subject.labels {
            let label = self.by_label.entry((name.clone(), value.clone()));
            label.or_default().insert(id);
        }
        self.known.insert(id, subject);
    }

    pub(super) fn remove(&mut self, id: IdentityId) {
        let Some(subject) = self.known.remove(&id) else {
            return;
        };
        if let Some(ids) = self.by_namespace.get_mut(&subject.namespace) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_namespace.remove(&subject.namespace);
            }
        }
        for label in subject.labels {
            if let Some(ids) = self.by_label.get_mut(&label) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_label.remove(&label);
                }
            }
        }
    }

    /// The identities that a peer of a policy of that namespace means. Looks only at those that
    /// have one label that the peer asks for, or else at those of the namespace.
    pub(super) fn selected(&self, peer: &Peer, policy_namespace: &str) -> BTreeSet<IdentityId> {
        let Peer::Pods { namespaces, pods } = peer else {
            return BTreeSet::new();
        };
        let asked = pods.as_ref().and_then(label_asked_for);
        let of_label = |(name, values): (&str, &BTreeSet<String>)| -> Vec<IdentityId> {
            (values.iter())
                .filter_map(|value| self.by_label.get(&(name.to_owned(), value.clone())))
                .flatten()
                .copied()
                .collect()
        };
        let candidates = match (asked, namespaces) {
            (Some(asked), _) => of_label(asked),
            (None, None) => (self.by_namespace.get(policy_namespace).into_iter())
                .flatten()
                .copied()
                .collect(),
            (None, Some(_)) => self.known.keys().copied().collect(),
        };
        (candidates.into_iter())
            .filter(|id| self.known[id].is(peer, policy_namespace))
            .collect()
    }
}

/// A label that must have one of a few values.
fn label_asked_for(selector: &Selector) -> Option<(&str, &BTreeSet<String>)> {
    (selector.requirements().iter())
        .filter_map(|needed| match &needed.operator {
            Operator::In(values) => Some((needed.label.as_str(), values)),
            _ => None,
        })
        .min_by_key(|(_, values)| values.len())
}
