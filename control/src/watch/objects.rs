//! Nodes, namespaces and pods as manifests write them → as control knows them.
//!
//! The types are those few fields that the agent reads. (The complete generated types cost 54 s
//! of one core in every clean build, measured with k8s-openapi 0.29 at this profile, for three
//! kinds of object.)

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;
use skein_dataplane::snapshot::PortProtocol;

use crate::cidr::Cidr;
use crate::state::{Labels, Namespace, Node, Phase, Pod, PodKey};

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Metadata {
    name: String,
    namespace: Option<String>,
    uid: String,
    pub(super) labels: Option<Labels>,
    annotations: Option<Labels>,
}

impl Metadata {
    pub(super) fn named(&self) -> Result<String, String> {
        let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
        match self.name.as_str() {
            "" => Err("metadata.name is missing".to_owned()),
            name if name.len() > 253 || !name.chars().all(valid) => {
                Err(format!("metadata.name '{name}' is no Kubernetes name"))
            }
            name => Ok(name.to_owned()),
        }
    }

    /// The namespace of an object that has one; an object without one is in `default`.
    pub(super) fn in_namespace(&self) -> String {
        (self.namespace.clone())
            .filter(|namespace| !namespace.is_empty())
            .unwrap_or_else(|| "default".into())
    }
}

#[derive(Deserialize)]
pub(super) struct NodeManifest {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<NodeSpec>,
    #[serde(default)]
    status: Option<NodeStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pod_cidrs: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeStatus {
    addresses: Option<Vec<NodeAddress>>,
}

#[derive(Deserialize)]
struct NodeAddress {
    r#type: String,
    address: String,
}

impl NodeManifest {
    pub(super) fn check(self) -> Result<Node, String> {
        let name = self.metadata.named()?;
        let spec = self.spec.unwrap_or_default();
        let ranges = match spec.pod_cidrs {
            Some(ranges) if !ranges.is_empty() => ranges,
            _ => spec.pod_cidr.into_iter().collect(),
        };
        let pod_cidrs = ranges
            .iter()
            .map(|text| {
                text.parse()
                    .map_err(|error| format!("spec.podCIDRs: {error}"))
            })
            .collect::<Result<Vec<Cidr>, String>>()?;
        for (index, range) in pod_cidrs.iter().enumerate() {
            if let Some(other) = pod_cidrs[..index]
                .iter()
                .find(|other| other.overlaps(*range))
            {
                return Err(format!("spec.podCIDRs: {range} overlaps {other}"));
            }
        }
        let internal_ips = (self
            .status
            .unwrap_or_default()
            .addresses
            .unwrap_or_default())
        .iter()
        .filter(|address| address.r#type == "InternalIP")
        .map(|address| ip("status.addresses", &address.address))
        .collect::<Result<_, _>>()?;
        let zone = (self.metadata.labels)
            .and_then(|mut labels| labels.remove("topology.kubernetes.io/zone"))
            .unwrap_or_default();
        Ok(Node {
            name,
            zone,
            annotations: self.metadata.annotations.unwrap_or_default(),
            pod_cidrs,
            internal_ips,
        })
    }
}

#[derive(Deserialize)]
pub(super) struct NamespaceManifest {
    metadata: Metadata,
}

impl NamespaceManifest {
    pub(super) fn check(self) -> Result<Namespace, String> {
        let name = self.metadata.named()?;
        let mut labels = self.metadata.labels.unwrap_or_default();
        // The API server sets this one on every namespace; policies rely on it.
        labels.insert("kubernetes.io/metadata.name".into(), name.clone());
        Ok(Namespace { name, labels })
    }
}

#[derive(Deserialize)]
pub(super) struct PodManifest {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<PodSpec>,
    #[serde(default)]
    status: Option<PodStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: Option<bool>,
    service_account_name: Option<String>,
    containers: Option<Vec<Container>>,
    init_containers: Option<Vec<Container>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    restart_policy: Option<String>,
    ports: Option<Vec<ContainerPort>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerPort {
    #[serde(default)]
    name: Option<String>,
    container_port: u16,
    #[serde(default)]
    protocol: Option<String>,
}

impl PodSpec {
    /// Ports by protocol and name, of the containers that run as long as the pod does: of two
    /// that share a name, the first one's.
    fn named_ports(&self) -> Result<BTreeMap<(PortProtocol, String), u16>, String> {
        let sidecars = (self.init_containers.iter().flatten())
            .filter(|container| container.restart_policy.as_deref() == Some("Always"));
        let containers = self.containers.iter().flatten().chain(sidecars);
        let mut named = BTreeMap::new();
        for port in containers.flat_map(|container| container.ports.iter().flatten()) {
            let field = "spec.containers[].ports[].protocol";
            let protocol = super::policy::protocol(field, port.protocol.as_deref())?;
            if let Some(name) = port.name.clone().filter(|name| !name.is_empty()) {
                named.entry((protocol, name)).or_insert(port.container_port);
            }
        }
        Ok(named)
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Deserialize)]
struct PodIp {
    ip: String,
}

impl PodManifest {
    pub(super) fn check(self) -> Result<Pod, String> {
        let name = self.metadata.named()?;
        let spec = self.spec.unwrap_or_default();
        let status = self.status.unwrap_or_default();
        let ips = match status.pod_ips {
            Some(ips) if !ips.is_empty() => ips.into_iter().map(|entry| entry.ip).collect(),
            _ => Vec::from_iter(status.pod_ip),
        };
        let phase = match status.phase.as_deref() {
            None | Some("" | "Pending" | "Unknown") => Phase::Pending,
            Some("Running") => Phase::Running,
            Some("Succeeded" | "Failed") => Phase::Ended,
            Some(other) => return Err(format!("status.phase '{other}' is no phase of a pod")),
        };
        let named_ports = spec.named_ports()?;
        Ok(Pod {
            key: PodKey {
                namespace: self.metadata.in_namespace(),
                name,
            },
            uid: self.metadata.uid,
            labels: self.metadata.labels.unwrap_or_default(),
            annotations: self.metadata.annotations.unwrap_or_default(),
            node_name: spec.node_name.unwrap_or_default(),
            host_network: spec.host_network.unwrap_or_default(),
            service_account: (spec.service_account_name)
                .filter(|account| !account.is_empty())
                .unwrap_or_else(|| "default".into()),
            ips: ips
                .iter()
                .map(|text| ip("status.podIPs", text))
                .collect::<Result<_, _>>()?,
            phase,
            named_ports,
        })
    }
}

pub(super) fn ip(field: &str, text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{field}: '{text}' is no IP address"))
}
