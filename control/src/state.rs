//! What the agent knows of the cluster and of its own endpoints: plain maps with one owner.
//!
//! Objects come in as [`Change`]s from a source, endpoints from the CNI socket. Everything else
//! is computed from here. Deliberately absent: locks, clocks, and anything that could fail.

pub mod service;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use skein_cni::agent::{Attachment, PodRef};
use skein_dataplane::snapshot::PortProtocol;

use self::service::{EndpointSlice, Service, ServiceCidr, ServiceKey};
use crate::cidr::Cidr;
use crate::mac::MacAddr;
use crate::policy::{NetworkPolicy, PolicyKey};

/// Labels or annotations.
pub type Labels = BTreeMap<String, String>;

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`
    pub name: String,
    /// `metadata.annotations`
    pub annotations: Labels,
    /// `spec.podCIDRs`, or `spec.podCIDR`
    pub pod_cidrs: Vec<Cidr>,
    /// Addresses of type `InternalIP`
    pub internal_ips: Vec<IpAddr>,
    /// Label `topology.kubernetes.io/zone`; empty where it is left out
    pub zone: String,
}

/// A namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// `metadata.name`
    pub name: String,
    /// `metadata.labels`
    pub labels: Labels,
}

/// Name of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodKey {
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
}

impl fmt::Display for PodKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// How far a pod's life has gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Not yet all running, or not said.
    #[default]
    Pending,
    /// Running.
    Running,
    /// Ended (`Succeeded` or `Failed`): its addresses may belong to another pod by now.
    Ended,
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name
    pub key: PodKey,
    /// `metadata.uid`; empty where a manifest leaves it out
    pub uid: String,
    /// `metadata.labels`
    pub labels: Labels,
    /// `metadata.annotations`
    pub annotations: Labels,
    /// `spec.nodeName`
    pub node_name: String,
    /// `spec.hostNetwork`
    pub host_network: bool,
    /// `spec.serviceAccountName`
    pub service_account: String,
    /// `status.podIPs`
    pub ips: Vec<IpAddr>,
    /// `status.phase`
    pub phase: Phase,
    /// Named ports of its containers, by protocol and name
    pub named_ports: BTreeMap<(PortProtocol, String), u16>,
}

impl Pod {
    /// Whether the runtime means this very pod. A static pod is known to the runtime by the
    /// hash of its configuration, which its mirror carries as an annotation; an old runtime, or
    /// a manifest without a uid, leaves only the name.
    #[must_use]
    pub fn is(&self, reference: &PodRef) -> bool {
        let named = self.key.namespace == reference.namespace && self.key.name == reference.name;
        named
            && (reference.uid.is_empty()
                || self.uid.is_empty()
                || self.uid == reference.uid
                || self.annotations.get("kubernetes.io/config.hash") == Some(&reference.uid))
    }
}

/// An interface of a pod on this node, as the agent made it; also the record that a restarted
/// agent reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Container and interface
    pub attachment: Attachment,
    /// The CNI network's name
    pub network: String,
    /// Path of the network namespace
    pub netns: String,
    /// The Kubernetes pod, where the runtime named one
    pub pod: Option<PodRef>,
    /// Addresses
    pub ips: Vec<IpAddr>,
    /// Name of the host end of the veth
    pub host_ifname: String,
    /// MAC of the pod's end
    #[serde(with = "crate::mac")]
    pub pod_mac: MacAddr,
    /// MAC of the host end
    #[serde(with = "crate::mac")]
    pub host_mac: MacAddr,
    /// MTU of both ends, in bytes
    pub device_mtu: u32,
    /// MTU of the pod's routes, in bytes
    pub route_mtu: u32,
    /// Whether the pod's kernel computes checksums itself
    #[serde(default)]
    pub full_checksums: bool,
    /// Queues of the veth
    pub queues: u32,
    /// Index of the host end; `None` between the halves of an ADD
    pub ifindex: Option<u32>,
}

/// An object of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A node.
    Node(Node),
    /// A namespace.
    Namespace(Namespace),
    /// A pod.
    Pod(Pod),
    /// A network policy.
    NetworkPolicy(NetworkPolicy),
    /// A Service.
    Service(Service),
    /// Endpoints of a Service.
    EndpointSlice(EndpointSlice),
    /// Ranges of Service addresses.
    ServiceCidr(ServiceCidr),
}

/// What tells objects apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectKey {
    /// A node's name.
    Node(String),
    /// A namespace's name.
    Namespace(String),
    /// A pod's namespace and name.
    Pod(PodKey),
    /// A network policy's namespace and name.
    NetworkPolicy(PolicyKey),
    /// A Service's namespace and name.
    Service(ServiceKey),
    /// An EndpointSlice's namespace and name.
    EndpointSlice(ServiceKey),
    /// A ServiceCIDR's name.
    ServiceCidr(String),
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Pod(key) => write!(f, "Pod {key}"),
            Self::NetworkPolicy(key) => write!(f, "NetworkPolicy {key}"),
            Self::Service(key) => write!(f, "Service {key}"),
            Self::EndpointSlice(key) => write!(f, "EndpointSlice {key}"),
            Self::ServiceCidr(name) => write!(f, "ServiceCIDR {name}"),
        }
    }
}

impl Object {
    /// The object's key.
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        match self {
            Self::Node(node) => ObjectKey::Node(node.name.clone()),
            Self::Namespace(namespace) => ObjectKey::Namespace(namespace.name.clone()),
            Self::Pod(pod) => ObjectKey::Pod(pod.key.clone()),
            Self::NetworkPolicy(policy) => ObjectKey::NetworkPolicy(policy.key.clone()),
            Self::Service(service) => ObjectKey::Service(service.key.clone()),
            Self::EndpointSlice(slice) => ObjectKey::EndpointSlice(slice.key.clone()),
            Self::ServiceCidr(range) => ObjectKey::ServiceCidr(range.name.clone()),
        }
    }
}

/// One change of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The object is new or different.
    Set(Object),
    /// The object is gone.
    Remove(ObjectKey),
}

/// The cluster, and this node's endpoints.
#[derive(Clone, Debug, Default)]
pub struct ClusterState {
    nodes: BTreeMap<String, Node>,
    namespaces: BTreeMap<String, Namespace>,
    pods: BTreeMap<PodKey, Pod>,
    policies: BTreeMap<PolicyKey, NetworkPolicy>,
    services: BTreeMap<ServiceKey, Service>,
    slices: BTreeMap<ServiceKey, EndpointSlice>,
    service_cidrs: BTreeMap<String, ServiceCidr>,
    endpoints: BTreeMap<Attachment, Endpoint>,
}

fn set<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: V) -> bool {
    if map.get(&key) == Some(&value) {
        return false;
    }
    map.insert(key, value);
    true
}

impl ClusterState {
    /// Applies a change; false when it changes nothing.
    pub fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Set(Object::Node(node)) => set(&mut self.nodes, node.name.clone(), node),
            Change::Set(Object::Namespace(namespace)) => {
                set(&mut self.namespaces, namespace.name.clone(), namespace)
            }
            Change::Set(Object::Pod(pod)) => set(&mut self.pods, pod.key.clone(), pod),
            Change::Set(Object::NetworkPolicy(policy)) => {
                set(&mut self.policies, policy.key.clone(), policy)
            }
            Change::Set(Object::Service(service)) => {
                set(&mut self.services, service.key.clone(), service)
            }
            Change::Set(Object::EndpointSlice(slice)) => {
                set(&mut self.slices, slice.key.clone(), slice)
            }
            Change::Set(Object::ServiceCidr(range)) => {
                set(&mut self.service_cidrs, range.name.clone(), range)
            }
            Change::Remove(ObjectKey::Node(name)) => self.nodes.remove(&name).is_some(),
            Change::Remove(ObjectKey::Namespace(name)) => self.namespaces.remove(&name).is_some(),
            Change::Remove(ObjectKey::Pod(key)) => self.pods.remove(&key).is_some(),
            Change::Remove(ObjectKey::NetworkPolicy(key)) => self.policies.remove(&key).is_some(),
            Change::Remove(ObjectKey::Service(key)) => self.services.remove(&key).is_some(),
            Change::Remove(ObjectKey::EndpointSlice(key)) => self.slices.remove(&key).is_some(),
            Change::Remove(ObjectKey::ServiceCidr(name)) => {
                self.service_cidrs.remove(&name).is_some()
            }
        }
    }

    /// Adds or replaces an endpoint.
    pub fn set_endpoint(&mut self, endpoint: Endpoint) -> bool {
        set(&mut self.endpoints, endpoint.attachment.clone(), endpoint)
    }

    /// Removes an endpoint.
    pub fn remove_endpoint(&mut self, attachment: &Attachment) -> Option<Endpoint> {
        self.endpoints.remove(attachment)
    }

    /// A node.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name)
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// A namespace.
    #[must_use]
    pub fn namespace(&self, name: &str) -> Option<&Namespace> {
        self.namespaces.get(name)
    }

    /// A pod.
    #[must_use]
    pub fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    /// The pod that the runtime means, once the source has shown that very one.
    #[must_use]
    pub fn pod_of(&self, reference: &PodRef) -> Option<&Pod> {
        let key = PodKey {
            namespace: reference.namespace.clone(),
            name: reference.name.clone(),
        };
        self.pods.get(&key).filter(|pod| pod.is(reference))
    }

    /// All pods, by namespace and name.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// The pods of a namespace, by name.
    pub fn pods_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Pod> {
        let first = PodKey {
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        (self.pods.range(first..))
            .map(|(_, pod)| pod)
            .take_while(move |pod| pod.key.namespace == namespace)
    }

    /// A network policy.
    #[must_use]
    pub fn policy(&self, key: &PolicyKey) -> Option<&NetworkPolicy> {
        self.policies.get(key)
    }

    /// A Service.
    #[must_use]
    pub fn service(&self, key: &ServiceKey) -> Option<&Service> {
        self.services.get(key)
    }

    /// All Services, by namespace and name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// An EndpointSlice.
    #[must_use]
    pub fn slice(&self, key: &ServiceKey) -> Option<&EndpointSlice> {
        self.slices.get(key)
    }

    /// All ServiceCIDRs, by name.
    pub fn service_cidrs(&self) -> impl Iterator<Item = &ServiceCidr> {
        self.service_cidrs.values()
    }

    /// An endpoint.
    #[must_use]
    pub fn endpoint(&self, attachment: &Attachment) -> Option<&Endpoint> {
        self.endpoints.get(attachment)
    }

    /// All endpoints, by container and interface.
    pub fn endpoints(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> Pod {
        Pod {
            key: PodKey {
                namespace: "default".into(),
                name: "web".into(),
            },
            uid: uid.into(),
            ..Pod::default()
        }
    }

    fn reference(uid: &str) -> PodRef {
        PodRef {
            namespace: "default".into(),
            name: "web".into(),
            uid: uid.into(),
        }
    }

    #[test]
    fn a_change_that_changes_nothing_is_noticed() {
        let mut state = ClusterState::default();
        assert!(state.apply(Change::Set(Object::Pod(pod("1")))));
        assert!(!state.apply(Change::Set(Object::Pod(pod("1")))));
        assert!(state.apply(Change::Set(Object::Pod(pod("2")))));
        let key = Object::Pod(pod("2")).key();
        assert!(state.apply(Change::Remove(key.clone())));
        assert!(!state.apply(Change::Remove(key)));
        assert_eq!(state.pods().count(), 0);
    }

    #[test]
    fn the_pod_is_the_one_of_that_uid() {
        let mut state = ClusterState::default();
        state.apply(Change::Set(Object::Pod(pod("old"))));
        assert!(state.pod_of(&reference("new")).is_none());
        assert!(state.pod_of(&reference("old")).is_some());
        assert!(state.pod_of(&reference("")).is_some());
        let mut mirror = pod("api-server-gave-this");
        mirror
            .annotations
            .insert("kubernetes.io/config.hash".into(), "abc".into());
        state.apply(Change::Set(Object::Pod(mirror)));
        assert!(state.pod_of(&reference("abc")).is_some());
    }
}
