//! Identities of the cluster's pods, kept up with their labels.
//!
//! Every node computes every pod's identity from its labels: whoever meets a set of labels
//! first makes its number, so a node need not wait for the pod's own node to do so.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use skein_dataplane::ids::IdentityId;

use crate::identity::{Allocator, LabelSet};
use crate::state::{ClusterState, ObjectKey, Phase, PodKey};

/// Pods and their identities.
#[derive(Debug)]
pub struct PodIdentities {
    allocator: Allocator,
    labels: BTreeMap<PodKey, LabelSet>,
    by_pod: BTreeMap<PodKey, IdentityId>,
    /// Pods whose number could not be had, with the reason.
    missing: BTreeMap<PodKey, String>,
}

impl PodIdentities {
    /// None yet.
    #[must_use]
    pub fn new(allocator: Allocator) -> Self {
        Self {
            allocator,
            labels: BTreeMap::new(),
            by_pod: BTreeMap::new(),
            missing: BTreeMap::new(),
        }
    }

    /// Identities by pod.
    #[must_use]
    pub fn by_pod(&self) -> &BTreeMap<PodKey, IdentityId> {
        &self.by_pod
    }

    /// The numbers in use.
    pub fn numbers(&self) -> impl Iterator<Item = IdentityId> + '_ {
        self.allocator.held().map(|(id, _)| id)
    }

    /// Pods without an identity, and why.
    pub fn faults(&self) -> impl Iterator<Item = String> {
        self.missing
            .iter()
            .map(|(pod, reason)| format!("pod {pod} has no identity: {reason}"))
    }

    /// The numbers in use, with their labels and how many pods have them.
    #[must_use]
    pub fn in_use(&self) -> Vec<(IdentityId, &LabelSet, usize)> {
        let mut pods: BTreeMap<IdentityId, usize> = BTreeMap::new();
        for id in self.by_pod.values() {
            *pods.entry(*id).or_default() += 1;
        }
        let mut list: Vec<_> = (self.allocator.held())
            .map(|(id, labels)| (id, labels, pods.get(&id).copied().unwrap_or(0)))
            .collect();
        list.sort_by_key(|(id, _, _)| *id);
        list
    }

    /// Looks again at the pods that these changes touch.
    pub fn update(&mut self, state: &ClusterState, changed: &BTreeSet<ObjectKey>, now: Instant) {
        let mut pods = BTreeSet::new();
        for key in changed {
            match key {
                ObjectKey::Pod(key) => {
                    pods.insert(key.clone());
                }
                ObjectKey::Namespace(name) => {
                    pods.extend(state.pods_in(name).map(|pod| pod.key.clone()));
                }
                ObjectKey::Node(_)
                | ObjectKey::NetworkPolicy(_)
                | ObjectKey::Service(_)
                | ObjectKey::EndpointSlice(_)
                | ObjectKey::ServiceCidr(_) => {}
            }
        }
        for key in pods {
            self.look(state, &key, now);
        }
    }

    fn look(&mut self, state: &ClusterState, key: &PodKey, now: Instant) {
        let pod = state
            .pod(key)
            .filter(|pod| !pod.host_network && pod.phase != Phase::Ended);
        let Some(pod) = pod else {
            self.labels.remove(key);
            self.by_pod.remove(key);
            self.missing.remove(key);
            return;
        };
        let labels = LabelSet::of_pod(pod, state.namespace(&key.namespace));
        match self.allocator.allocate(&labels, now) {
            Ok(id) => {
                self.by_pod.insert(key.clone(), id);
                self.missing.remove(key);
            }
            Err(error) => {
                // The old number stands for labels that the pod no longer has.
                self.by_pod.remove(key);
                self.missing.insert(key.clone(), error.to_string());
            }
        }
        self.labels.insert(key.clone(), labels);
    }

    /// Tries again what failed; the pods of which something came.
    pub fn retry(&mut self, state: &ClusterState, now: Instant) -> BTreeSet<ObjectKey> {
        let pods: Vec<_> = self.missing.keys().cloned().collect();
        for key in &pods {
            self.look(state, key, now);
        }
        (pods.into_iter())
            .filter(|key| !self.missing.contains_key(key))
            .map(ObjectKey::Pod)
            .collect()
    }

    /// Says of all numbers that they are in use, and forgets those that no pod has. The pods
    /// whose number changed, since somebody had removed it.
    pub fn refresh(&mut self, state: &ClusterState, now: Instant) -> BTreeSet<ObjectKey> {
        let used: BTreeSet<&LabelSet> = self.labels.values().collect();
        self.allocator.retain(|labels| used.contains(labels));
        let held: Vec<_> = (self.allocator.held())
            .map(|(id, labels)| (id, labels.clone()))
            .collect();
        let moved: BTreeSet<LabelSet> = (held.into_iter())
            .filter(|(id, labels)| self.allocator.allocate(labels, now).ok() != Some(*id))
            .map(|(_, labels)| labels)
            .collect();
        let pods: Vec<_> = (self.labels.iter())
            .filter(|(_, labels)| moved.contains(labels))
            .map(|(key, _)| key.clone())
            .collect();
        for key in &pods {
            self.look(state, key, now);
        }
        pods.into_iter().map(ObjectKey::Pod).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Change, Namespace, Object, Pod};

    fn pod(name: &str, app: &str) -> Object {
        Object::Pod(Pod {
            key: PodKey {
                namespace: "d".into(),
                name: name.into(),
            },
            labels: [("app".to_owned(), app.to_owned())].into(),
            ..Pod::default()
        })
    }

    #[test]
    fn identities_follow_labels() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = ClusterState::default();
        let mut pods = PodIdentities::new(Allocator::new(folder.path()).unwrap());
        let now = Instant::now();
        let apply = |state: &mut ClusterState, pods: &mut PodIdentities, change: Change| {
            let key = match &change {
                Change::Set(object) => object.key(),
                Change::Remove(key) => key.clone(),
            };
            state.apply(change);
            pods.update(state, &[key].into(), now);
        };
        for object in [pod("a", "x"), pod("b", "x"), pod("c", "y")] {
            apply(&mut state, &mut pods, Change::Set(object));
        }
        let number = |pods: &PodIdentities, name: &str| {
            let key = PodKey {
                namespace: "d".into(),
                name: name.into(),
            };
            pods.by_pod().get(&key).copied()
        };
        assert_eq!(number(&pods, "a"), number(&pods, "b"));
        assert_ne!(number(&pods, "a"), number(&pods, "c"));
        let before = number(&pods, "a");
        let namespace = Object::Namespace(Namespace {
            name: "d".into(),
            labels: [("team".to_owned(), "t".to_owned())].into(),
        });
        apply(&mut state, &mut pods, Change::Set(namespace));
        assert_ne!(number(&pods, "a"), before);
        apply(&mut state, &mut pods, Change::Remove(pod("c", "y").key()));
        assert_eq!(number(&pods, "c"), None);
        assert!(pods.refresh(&state, now).is_empty());
        let in_use = pods.in_use();
        assert_eq!(in_use.len(), 1);
        assert_eq!(in_use[0].2, 2);
    }

    #[test]
    fn a_pod_without_number_says_why_and_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = folder.path().join("cluster");
        let allocator = Allocator::new(&cluster).unwrap();
        std::fs::rename(&cluster, folder.path().join("away")).unwrap();
        let mut state = ClusterState::default();
        let mut pods = PodIdentities::new(allocator);
        let now = Instant::now();
        state.apply(Change::Set(pod("a", "x")));
        pods.update(&state, &[pod("a", "x").key()].into(), now);
        assert!(
            pods.faults()
                .next()
                .unwrap()
                .contains("pod d/a has no identity")
        );
        std::fs::rename(folder.path().join("away"), &cluster).unwrap();
        assert_eq!(pods.retry(&state, now), [pod("a", "x").key()].into());
        assert_eq!(pods.faults().count(), 0);
        assert!(pods.retry(&state, now).is_empty());
        // The number's file goes, and others take the number: pods get another.
        let (key, id) = pods.by_pod().first_key_value().unwrap();
        let (key, id) = (key.clone(), *id);
        let file = cluster.join(format!("skein.io/identities/{}.yaml", id.number()));
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "of others").unwrap();
        assert!(pods.refresh(&state, now).is_empty());
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        let later = now + std::time::Duration::from_hours(1);
        assert_eq!(pods.refresh(&state, later), [pod("a", "x").key()].into());
        assert_eq!(pods.by_pod().get(&key), None);
        std::fs::remove_dir(&file).unwrap();
        std::fs::write(&file, "of others").unwrap();
        assert!(!pods.retry(&state, now).is_empty());
        assert_ne!(pods.by_pod()[&key], id);
    }
}
