//! Network policies → what each endpoint of this node allows, kept up change by change.
//!
//! ```text
//! policy  ──selects──▶ pods of its namespace ──▶ endpoint: its policies, each direction
//! policy's rules ──mean──▶ identities, addresses ──▶ Rules, one for each different set
//! ```
//!
//! Of each policy is known which pods it selects. Whom its rules mean is worked out only once an
//! endpoint of this node needs it, and from then on corrected by what changes: a pod's labels
//! are looked at by the policies of its namespace and by those in use here; a namespace's, for
//! each of its pods; a new identity, by those in use. Tables are made anew when whom they mean
//! has changed, and shared by all endpoints that the same policies select.
//!
//! A table is keyed by identities, not by pods, so that what an unknown pod may do is settled
//! before this node hears of the pod. Pods in their node's network are the node: no policy
//! selects them, and no selector means them.

mod names;
mod notes;
mod peers;
mod subjects;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use skein_cni::agent::Attachment;
use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::{EndpointPolicy, Side};
use skein_dataplane::snapshot::{
    PortProtocol, PortRange, Prefix, RuleId, RulePorts, Rules, RulesBuilder,
};

pub use self::names::RuleName;
use self::names::RuleNames;
pub use self::notes::{Applied, Note};
use self::peers::{PodPeer, PolicyPeers};
use self::subjects::{Subject, Subjects};
use crate::cidr::Cidr;
use crate::identity::LabelSet;
use crate::policy::{NetworkPolicy, Peer, PolicyKey, PortNumber, Rule};
use crate::state::{ClusterState, Labels, ObjectKey, Phase, Pod, PodKey};

/// A policy, and how many pods it selects.
#[derive(Debug)]
struct Held {
    policy: Arc<NetworkPolicy>,
    pods: usize,
}

/// Which tables an endpoint needs: those of the policies that isolate it, with the endpoint's
/// own numbers for the ports that they name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct GroupKey {
    side: Side,
    policies: Vec<Arc<PolicyKey>>,
    ports: Vec<(PortProtocol, String, u16)>,
}

/// Tables, and of which peers they were made.
#[derive(Debug)]
struct Group {
    versions: Vec<u64>,
    rules: Arc<Rules>,
}

/// The policies of the cluster as this node needs them.
#[derive(Debug, Default)]
pub struct Policies {
    held: BTreeMap<Arc<PolicyKey>, Held>,
    /// By which policies a pod is selected, in order; pods that none selects are not here.
    selected: HashMap<PodKey, Vec<Arc<PolicyKey>>>,
    subjects: Subjects,
    names: RuleNames,
    peers: HashMap<(Arc<PolicyKey>, Side), PolicyPeers>,
    groups: HashMap<GroupKey, Group>,
    notes: Vec<Note>,
    version: u64,
}

impl Policies {
    /// Takes note of what changed. `state` and `identities` are as they are now.
    pub fn update(
        &mut self,
        state: &ClusterState,
        identities: &BTreeMap<PodKey, IdentityId>,
        changed: &BTreeSet<ObjectKey>,
    ) {
        let mut pods = BTreeSet::new();
        for key in changed {
            match key {
                ObjectKey::NetworkPolicy(key) => self.policy_changed(state, key),
                ObjectKey::Namespace(name) => {
                    pods.extend(state.pods_in(name).map(|pod| pod.key.clone()));
                }
                ObjectKey::Pod(key) => {
                    pods.insert(key.clone());
                }
                ObjectKey::Node(_)
                | ObjectKey::Service(_)
                | ObjectKey::EndpointSlice(_)
                | ObjectKey::ServiceCidr(_) => {}
            }
        }
        if pods.is_empty() {
            return;
        }
        let attached = attached(state);
        for key in pods {
            let pod = state.pod(&key).filter(|pod| is_peer(pod));
            let identity = identities.get(&key);
            if let (Some(pod), Some(&id)) = (pod, identity) {
                self.learn(id, &LabelSet::of_pod(pod, state.namespace(&key.namespace)));
            }
            self.pod_changed(state, &key, pod, &attached);
        }
    }

    /// Takes note of an identity, which need not be that of a pod that is known.
    pub fn learn(&mut self, id: IdentityId, labels: &LabelSet) {
        let subject = Subject::from(labels);
        if self.subjects.get(id) == Some(&subject) {
            return;
        }
        self.subjects.insert(id, subject);
        self.identity_changed(id);
    }

    /// Forgets the identities that nothing uses any more.
    pub fn retain(&mut self, in_use: impl Fn(IdentityId) -> bool) {
        let gone: Vec<_> = self.subjects.ids().filter(|&id| !in_use(id)).collect();
        for id in gone {
            self.subjects.remove(id);
            self.identity_changed(id);
        }
    }

    /// What each endpoint of this node allows; one whose pod is not known (yet, or any more) is
    /// left out.
    pub fn endpoints(&mut self, state: &ClusterState) -> BTreeMap<Attachment, EndpointPolicy> {
        let mut policies = BTreeMap::new();
        let mut groups = HashSet::new();
        for endpoint in state.endpoints() {
            let Some(reference) = &endpoint.pod else {
                policies.insert(endpoint.attachment.clone(), EndpointPolicy::OPEN);
                continue;
            };
            let Some(pod) = state.pod_of(reference).filter(|pod| is_peer(pod)) else {
                continue;
            };
            let mut of_side = |side| {
                let key = self.group_of(pod, side)?;
                let rules = self.rules(state, &key);
                groups.insert(key);
                Some(rules)
            };
            let (ingress, egress) = (of_side(Side::Ingress), of_side(Side::Egress));
            let policy = if ingress.is_none() && egress.is_none() {
                EndpointPolicy::OPEN
            } else {
                EndpointPolicy {
                    own: endpoint.ips.clone(),
                    ingress,
                    egress,
                }
            };
            policies.insert(endpoint.attachment.clone(), policy);
        }
        self.forget_unused(&groups);
        self.take_notes(state);
        policies
    }

    /// The rule of that number.
    #[must_use]
    pub fn rule(&self, id: RuleId) -> Option<&RuleName> {
        self.names.name(id)
    }

    /// How many policies there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn policy_changed(&mut self, state: &ClusterState, key: &PolicyKey) {
        let key = Arc::new(key.clone());
        let policy = state.policy(&key);
        self.names.set(&key, policy);
        for side in [Side::Ingress, Side::Egress] {
            self.peers.remove(&(key.clone(), side));
        }
        self.groups
            .retain(|group, _| !group.policies.contains(&key));
        self.held.remove(&key);
        let mut pods = 0;
        for pod in state.pods_in(&key.namespace) {
            let selects = |policy: &NetworkPolicy| is_peer(pod) && policy.pods.matches(&pod.labels);
            let is_selected = policy.is_some_and(selects);
            pods += usize::from(is_selected);
            set_member(&mut self.selected, &pod.key, &key, is_selected);
        }
        if let Some(policy) = policy {
            let policy = Arc::new(policy.clone());
            self.held.insert(key, Held { policy, pods });
        }
    }

    fn pod_changed(
        &mut self,
        state: &ClusterState,
        key: &PodKey,
        pod: Option<&Pod>,
        attached: &Attached,
    ) {
        let first = PolicyKey {
            namespace: key.namespace.clone(),
            name: String::new(),
        };
        let of_namespace = (self.held.range_mut(Arc::new(first)..))
            .take_while(|(policy, _)| policy.namespace == key.namespace);
        let before = self.selected.remove(key).unwrap_or_default();
        let mut now = Vec::new();
        for (name, held) in of_namespace {
            let is_selected = pod.is_some_and(|pod| held.policy.pods.matches(&pod.labels));
            held.pods += usize::from(is_selected);
            held.pods -= usize::from(before.binary_search(name).is_ok());
            if is_selected {
                now.push(name.clone());
            }
        }
        if !now.is_empty() {
            self.selected.insert(key.clone(), now);
        }
        let peer = pod.map(|pod| pod_peer(state, pod, attached));
        let mut version = self.version;
        for ((policy, side), peers) in &mut self.peers {
            let policy = &self.held[policy].policy;
            if peers.pod(policy, *side, key, peer.as_ref()) {
                version += 1;
                peers.version = version;
            }
        }
        self.version = version;
    }

    fn identity_changed(&mut self, id: IdentityId) {
        let subject = self.subjects.get(id);
        let mut version = self.version;
        for ((policy, side), peers) in &mut self.peers {
            let policy = &self.held[policy].policy;
            if peers.identity(policy, *side, id, subject) {
                version += 1;
                peers.version = version;
            }
        }
        self.version = version;
    }

    /// The tables that a pod needs in a direction; `None` when nothing isolates it there.
    fn group_of(&self, pod: &Pod, side: Side) -> Option<GroupKey> {
        let mut policies = self.selected.get(&pod.key)?.clone();
        policies.retain(|key| self.held[key].policy.rules(side).is_some());
        if policies.is_empty() {
            return None;
        }
        let mut ports = Vec::new();
        if side == Side::Ingress {
            let rules = (policies.iter()).flat_map(|key| self.held[key].policy.rules(side));
            for port in rules.flatten().flat_map(|rule| &rule.ports) {
                if let PortNumber::Named(name) = &port.number
                    && let Some(&number) = pod.named_ports.get(&(port.protocol, name.clone()))
                {
                    ports.push((port.protocol, name.clone(), number));
                }
            }
            ports.sort_unstable();
            ports.dedup();
        }
        Some(GroupKey {
            side,
            policies,
            ports,
        })
    }

    /// The tables of a group: as they were, or made anew where those whom they mean changed.
    fn rules(&mut self, state: &ClusterState, key: &GroupKey) -> Arc<Rules> {
        let mut versions = Vec::new();
        for policy in &key.policies {
            versions.push(self.peers_of(state, policy, key.side));
        }
        if let Some(group) = self.groups.get(key)
            && group.versions == versions
        {
            return group.rules.clone();
        }
        let rules = Arc::new(self.build(key));
        let group = Group {
            versions,
            rules: rules.clone(),
        };
        self.groups.insert(key.clone(), group);
        rules
    }

    /// Sees to it that the peers of a policy are known; their version.
    fn peers_of(&mut self, state: &ClusterState, key: &Arc<PolicyKey>, side: Side) -> u64 {
        if let Some(peers) = self.peers.get(&(key.clone(), side)) {
            return peers.version;
        }
        let version = self.next_version();
        let policy = &self.held[key].policy;
        let pods = || {
            let attached = attached(state);
            (state.pods().filter(|pod| is_peer(pod)))
                .map(|pod| (pod.key.clone(), pod_peer(state, pod, &attached)))
                .collect()
        };
        let peers = PolicyPeers::new(version, policy, side, &self.subjects, pods);
        self.peers.insert((key.clone(), side), peers);
        version
    }

    fn build(&self, key: &GroupKey) -> Rules {
        let mut builder = RulesBuilder::default();
        for name in &key.policies {
            let policy = &self.held[name].policy;
            let peers = &self.peers[&(name.clone(), key.side)].rules;
            let rules = policy.rules(key.side).unwrap_or_default();
            for (index, (rule, peers)) in rules.iter().zip(peers).enumerate() {
                let name = RuleName {
                    policy: policy.key.clone(),
                    side: key.side,
                    index,
                };
                let Some(id) = self.names.id(&name) else {
                    continue;
                };
                let ports = Arc::new(ports_of(rule, &key.ports));
                let some = *ports != RulePorts::Only(Vec::new());
                if some {
                    add_peers(&mut builder, id, rule, &peers.identities, &ports);
                }
                for pod in peers.pods.values() {
                    let named = Arc::new(RulePorts::Only(pod.named.clone()));
                    for &address in &pod.addresses {
                        if pod.selected && some {
                            builder.address(address, id, &ports);
                        }
                        if !pod.named.is_empty() {
                            builder.address(address, id, &named);
                        }
                    }
                }
            }
        }
        builder.finish()
    }

    fn forget_unused(&mut self, groups: &HashSet<GroupKey>) {
        self.groups.retain(|key, _| groups.contains(key));
        let used: HashSet<_> = (groups.iter())
            .flat_map(|group| group.policies.iter().map(|key| (key.clone(), group.side)))
            .collect();
        self.peers.retain(|key, _| used.contains(key));
    }
}

/// Adds the peers that a rule names by their labels, their ranges, or not at all.
fn add_peers(
    builder: &mut RulesBuilder,
    id: RuleId,
    rule: &Rule,
    identities: &BTreeSet<IdentityId>,
    ports: &Arc<RulePorts>,
) {
    if rule.peers.is_empty() {
        builder.everyone(id, ports);
    }
    for &identity in identities {
        builder.identity(identity, id, ports);
    }
    for peer in &rule.peers {
        if let Peer::Block { range, except } = peer
            && let Some(range) = prefix(*range)
        {
            let except = except.iter().copied().filter_map(prefix).collect();
            builder.block(range, except, id, ports);
        }
    }
}

fn prefix(range: Cidr) -> Option<Prefix> {
    Prefix::new(range.address(), range.prefix())
}

/// The ports of a rule, those with names as far as the numbers are known.
fn ports_of(rule: &Rule, named: &[(PortProtocol, String, u16)]) -> RulePorts {
    if rule.ports.is_empty() {
        return RulePorts::Every;
    }
    let range = |port: &crate::policy::Port| match &port.number {
        PortNumber::Every => Some(PortRange::every(port.protocol)),
        PortNumber::Range(first, last) => PortRange::new(port.protocol, *first, *last),
        PortNumber::Named(name) => {
            let mut named = named.iter();
            let known = named.find(|(protocol, of, _)| *protocol == port.protocol && of == name);
            known.map(|&(protocol, _, number)| PortRange::port(protocol, number))
        }
    };
    RulePorts::Only(rule.ports.iter().filter_map(range).collect())
}

/// Whether policies can mean it: not a pod in its node's network, nor one that has ended.
fn is_peer(pod: &Pod) -> bool {
    !pod.host_network && pod.phase != Phase::Ended
}

/// Addresses of this node's pods as they were handed out, which the API tells only later.
type Attached = BTreeMap<PodKey, Vec<IpAddr>>;

fn attached(state: &ClusterState) -> Attached {
    let mut attached = Attached::new();
    for endpoint in state.endpoints() {
        let pod = endpoint
            .pod
            .as_ref()
            .and_then(|reference| state.pod_of(reference));
        if let Some(pod) = pod {
            let addresses = attached.entry(pod.key.clone()).or_default();
            addresses.extend(&endpoint.ips);
        }
    }
    attached
}

fn pod_peer<'a>(state: &ClusterState, pod: &'a Pod, attached: &Attached) -> PodPeer<'a> {
    let namespace = state.namespace(&pod.key.namespace);
    PodPeer {
        subject: Subject {
            namespace: pod.key.namespace.clone(),
            namespace_labels: namespace.map_or_else(Labels::new, |found| found.labels.clone()),
            labels: pod.labels.clone(),
        },
        addresses: attached.get(&pod.key).unwrap_or(&pod.ips).clone(),
        named_ports: &pod.named_ports,
    }
}

/// Puts a policy into a pod's ordered list, or takes it out.
fn set_member(
    selected: &mut HashMap<PodKey, Vec<Arc<PolicyKey>>>,
    pod: &PodKey,
    policy: &Arc<PolicyKey>,
    is_selected: bool,
) {
    let before = selected.get(pod).map(|list| list.binary_search(policy));
    match (before, is_selected) {
        (None, true) => {
            selected.insert(pod.clone(), vec![policy.clone()]);
        }
        (Some(Err(at)), true) => {
            if let Some(list) = selected.get_mut(pod) {
                list.insert(at, policy.clone());
            }
        }
        (Some(Ok(at)), false) => {
            if let Some(list) = selected.get_mut(pod) {
                list.remove(at);
                if list.is_empty() {
                    selected.remove(pod);
                }
            }
        }
        _ => {}
    }
}
