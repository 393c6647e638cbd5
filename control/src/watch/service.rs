//! Services, EndpointSlices and ServiceCIDRs as manifests write them → as control knows them.
//!
//! Defaults are those that the API server fills in, so that a manifest written by hand needs no
//! more than one for it would; except that nobody hands out a ClusterIP to a Service without.

use std::net::IpAddr;

use serde::Deserialize;

use super::objects::{Metadata, ip};
use crate::cidr::Cidr;
use crate::state::PodKey;
use crate::state::service::{
    Distribution, EndpointSlice, Protocol, Service, ServiceCidr, ServiceKey, ServicePort,
    ServiceType, SliceEndpoint, SlicePort,
};

/// Who serves a Service in the place of the cluster's own proxy.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// A Service that no proxy shall serve, and its slices.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// Whose slice it is.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// `timeoutSeconds` of session affinity where it is not said.
const AFFINITY_SECONDS: u32 = 10_800;

/// The longest that the API takes: a day.
const AFFINITY_SECONDS_MAX: u32 = 86_400;

impl Metadata {
    fn key(&self) -> Result<ServiceKey, String> {
        Ok(ServiceKey {
            name: self.named()?,
            namespace: self.in_namespace(),
        })
    }

    fn label(&self, name: &str) -> Option<&String> {
        self.labels.as_ref()?.get(name)
    }
}

#[derive(Deserialize)]
pub(super) struct ServiceManifest {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<ServiceSpec>,
    #[serde(default)]
    status: Option<ServiceStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ServiceSpec {
    r#type: Option<String>,
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Option<Vec<String>>,
    #[serde(rename = "externalIPs")]
    external_ips: Option<Vec<String>>,
    ports: Option<Vec<PortManifest>>,
    load_balancer_source_ranges: Option<Vec<String>>,
    internal_traffic_policy: Option<String>,
    external_traffic_policy: Option<String>,
    session_affinity: Option<String>,
    session_affinity_config: Option<AffinityConfig>,
    publish_not_ready_addresses: Option<bool>,
    traffic_distribution: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PortManifest {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    protocol: Option<String>,
    port: u16,
    #[serde(default)]
    node_port: Option<u16>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AffinityConfig {
    #[serde(rename = "clientIP")]
    client_ip: Option<ClientIpConfig>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ClientIpConfig {
    timeout_seconds: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ServiceStatus {
    load_balancer: Option<LoadBalancer>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LoadBalancer {
    ingress: Option<Vec<Ingress>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Ingress {
    ip: Option<String>,
    ip_mode: Option<String>,
}

impl ServiceManifest {
    pub(super) fn check(self) -> Result<Service, String> {
        let key = self.metadata.key()?;
        let spec = self.spec.unwrap_or_default();
        let kind = word(
            "spec.type",
            spec.r#type.as_deref(),
            &[
                ("ClusterIP", ServiceType::ClusterIp),
                ("NodePort", ServiceType::NodePort),
                ("LoadBalancer", ServiceType::LoadBalancer),
                ("ExternalName", ServiceType::ExternalName),
            ],
        )?;
        let texts = match spec.cluster_ips {
            Some(texts) if !texts.is_empty() => texts,
            _ => Vec::from_iter(spec.cluster_ip),
        };
        let none = texts.iter().any(|text| text == "None");
        let local =
            |field, text: Option<&str>| word(field, text, &[("Cluster", false), ("Local", true)]);
        Ok(Service {
            proxy: self.metadata.label(PROXY_NAME).cloned(),
            headless: none || self.metadata.label(HEADLESS).is_some(),
            key,
            kind,
            cluster_ips: if none {
                Vec::new()
            } else {
                cluster_ips(&texts)?
            },
            external_ips: ips("spec.externalIPs", spec.external_ips.as_deref())?,
            ingress: ingress(self.status.unwrap_or_default())?,
            ports: ports(spec.ports.unwrap_or_default())?,
            source_ranges: ranges(&spec.load_balancer_source_ranges.unwrap_or_default())?,
            internal_local: local(
                "spec.internalTrafficPolicy",
                spec.internal_traffic_policy.as_deref(),
            )?,
            external_local: local(
                "spec.externalTrafficPolicy",
                spec.external_traffic_policy.as_deref(),
            )?,
            affinity_seconds: affinity(
                spec.session_affinity.as_deref(),
                spec.session_affinity_config,
            )?,
            publish_not_ready: spec.publish_not_ready_addresses.unwrap_or_default(),
            distribution: word(
                "spec.trafficDistribution",
                spec.traffic_distribution.as_deref(),
                &[
                    ("", Distribution::Even),
                    ("PreferClose", Distribution::SameZone),
                    ("PreferSameZone", Distribution::SameZone),
                    ("PreferSameNode", Distribution::SameNode),
                ],
            )?,
        })
    }
}

/// One of some words; the first where none is given.
fn word<T: Copy>(field: &str, text: Option<&str>, words: &[(&str, T)]) -> Result<T, String> {
    let Some(text) = text.filter(|text| !text.is_empty()) else {
        return Ok(words[0].1);
    };
    let found = words.iter().find(|(word, _)| *word == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<_> = (words.iter().map(|(word, _)| *word))
            .filter(|word| !word.is_empty())
            .collect();
        format!("{field}: '{text}' is none of {}", known.join(", "))
    })
}

fn ips(field: &str, texts: Option<&[String]>) -> Result<Vec<IpAddr>, String> {
    let texts = texts.unwrap_or_default();
    texts.iter().map(|text| ip(field, text.trim())).collect()
}

/// At most one of each family.
fn cluster_ips(texts: &[String]) -> Result<Vec<IpAddr>, String> {
    let given: Vec<String> = (texts.iter())
        .filter(|text| !text.is_empty())
        .cloned()
        .collect();
    let ips = ips("spec.clusterIPs", Some(&given))?;
    for ipv4 in [true, false] {
        let of_family = ips.iter().filter(|ip| ip.is_ipv4() == ipv4);
        if of_family.count() > 1 {
            return Err("spec.clusterIPs: at most one address of each family".into());
        }
    }
    Ok(ips)
}

/// Addresses that nodes serve: without an ipMode, and with `VIP`.
fn ingress(status: ServiceStatus) -> Result<Vec<IpAddr>, String> {
    let field = "status.loadBalancer.ingress";
    let entries = status.load_balancer.unwrap_or_default().ingress;
    let mut ips = Vec::new();
    for entry in entries.unwrap_or_default() {
        let modes = [("VIP", true), ("Proxy", false)];
        let ours = word(&format!("{field}.ipMode"), entry.ip_mode.as_deref(), &modes)?;
        // A name has no address to serve.
        if let Some(text) = entry.ip.filter(|text| !text.is_empty()) {
            let address = ip(field, &text)?;
            if ours {
                ips.push(address);
            }
        }
    }
    Ok(ips)
}

fn protocol(field: &str, text: Option<&str>) -> Result<Protocol, String> {
    let words = [
        ("TCP", Protocol::Tcp),
        ("UDP", Protocol::Udp),
        ("SCTP", Protocol::Sctp),
    ];
    word(field, text, &words)
}

fn ports(entries: Vec<PortManifest>) -> Result<Vec<ServicePort>, String> {
    let mut ports: Vec<ServicePort> = Vec::new();
    for entry in entries {
        let port = ServicePort {
            name: entry.name.unwrap_or_default(),
            protocol: protocol("spec.ports.protocol", entry.protocol.as_deref())?,
            port: entry.port,
            node_port: entry.node_port.filter(|&port| port != 0),
        };
        if port.port == 0 {
            return Err("spec.ports.port: 0 is no port".into());
        }
        if ports.iter().any(|other| other.name == port.name) {
            let fault = match port.name.as_str() {
                "" => "spec.ports: each of several ports needs a name".to_owned(),
                name => format!("spec.ports: two ports have the name '{name}'"),
            };
            return Err(fault);
        }
        let key = (port.protocol, port.port);
        if ports
            .iter()
            .any(|other| (other.protocol, other.port) == key)
        {
            return Err(format!("spec.ports: {} {} stands twice", key.0, key.1));
        }
        ports.push(port);
    }
    Ok(ports)
}

/// The API takes ranges with blanks around them and with bits set behind the prefix.
fn ranges(texts: &[String]) -> Result<Vec<Cidr>, String> {
    let range = |text: &String| {
        let text = text.trim();
        let (address, prefix) = text.split_once('/')?;
        Cidr::containing(address.parse().ok()?, prefix.parse().ok()?)
    };
    let fault = |text| format!("spec.loadBalancerSourceRanges: '{text}' is no range of addresses");
    (texts.iter())
        .map(|text| range(text).ok_or_else(|| fault(text)))
        .collect()
}

fn affinity(word_: Option<&str>, config: Option<AffinityConfig>) -> Result<Option<u32>, String> {
    let words = [("None", false), ("ClientIP", true)];
    if !word("spec.sessionAffinity", word_, &words)? {
        return Ok(None);
    }
    let seconds = (config.and_then(|config| config.client_ip))
        .and_then(|client| client.timeout_seconds)
        .unwrap_or(AFFINITY_SECONDS);
    if !(1..=AFFINITY_SECONDS_MAX).contains(&seconds) {
        return Err(format!(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: {seconds} is not between 1 and \
             {AFFINITY_SECONDS_MAX}"
        ));
    }
    Ok(Some(seconds))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSliceManifest {
    metadata: Metadata,
    address_type: String,
    #[serde(default)]
    ports: Option<Vec<SlicePortManifest>>,
    #[serde(default)]
    endpoints: Option<Vec<EndpointManifest>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SlicePortManifest {
    name: Option<String>,
    protocol: Option<String>,
    port: Option<u16>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct EndpointManifest {
    addresses: Vec<String>,
    conditions: Option<Conditions>,
    node_name: Option<String>,
    zone: Option<String>,
    hints: Option<Hints>,
    target_ref: Option<TargetRef>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Hints {
    for_zones: Option<Vec<Hint>>,
    for_nodes: Option<Vec<Hint>>,
}

#[derive(Deserialize)]
struct Hint {
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TargetRef {
    kind: String,
    namespace: Option<String>,
    name: String,
}

impl EndpointSliceManifest {
    pub(super) fn check(self) -> Result<EndpointSlice, String> {
        let key = self.metadata.key()?;
        let families = [("IPv4", Some(true)), ("IPv6", Some(false)), ("FQDN", None)];
        let ipv4 = word("addressType", Some(&self.address_type), &families)?;
        let others = [PROXY_NAME, HEADLESS];
        let ours = !others
            .iter()
            .any(|name| self.metadata.label(name).is_some());
        let service = (self.metadata.label(SERVICE_NAME))
            .filter(|name| ours && !name.is_empty())
            .map(|name| ServiceKey {
                namespace: key.namespace.clone(),
                name: name.clone(),
            });
        let mut ports = Vec::new();
        for entry in self.ports.unwrap_or_default() {
            let protocol = protocol("ports.protocol", entry.protocol.as_deref())?;
            match entry.port {
                Some(0) => return Err("ports.port: 0 is no port".into()),
                // "All ports" has no meaning behind a Service.
                None => {}
                Some(port) => ports.push(SlicePort {
                    name: entry.name.unwrap_or_default(),
                    protocol,
                    port,
                }),
            }
        }
        let endpoints = (self.endpoints.unwrap_or_default().into_iter())
            .map(|entry| entry.check(ipv4, &key.namespace))
            .collect::<Result<_, String>>()?;
        Ok(EndpointSlice {
            key,
            service,
            ipv4,
            ports,
            endpoints,
        })
    }
}

impl EndpointManifest {
    fn check(self, ipv4: Option<bool>, namespace: &str) -> Result<SliceEndpoint, String> {
        let field = "endpoints.addresses";
        let Some(first) = self.addresses.first() else {
            return Err(format!("{field}: an endpoint without an address"));
        };
        let address = match ipv4 {
            None => None,
            Some(ipv4) => {
                let address = ip(field, first)?;
                if address.is_ipv4() != ipv4 {
                    return Err(format!("{field}: {address} is not of the addressType"));
                }
                Some(address)
            }
        };
        let names = |hints: Option<Vec<Hint>>| {
            let hints = hints.unwrap_or_default().into_iter();
            hints.map(|hint| hint.name).collect()
        };
        let conditions = self.conditions.unwrap_or_default();
        let ready = conditions.ready.unwrap_or(true);
        let hints = self.hints.unwrap_or_default();
        let pod = self.target_ref.filter(|target| target.kind == "Pod");
        Ok(SliceEndpoint {
            address,
            ready,
            serving: conditions.serving.unwrap_or(ready),
            terminating: conditions.terminating.unwrap_or_default(),
            node: self.node_name.filter(|name| !name.is_empty()),
            zone: self.zone.filter(|name| !name.is_empty()),
            zone_hints: names(hints.for_zones),
            node_hints: names(hints.for_nodes),
            pod: pod.map(|target| PodKey {
                namespace: target.namespace.unwrap_or_else(|| namespace.to_owned()),
                name: target.name,
            }),
        })
    }
}

#[derive(Deserialize)]
pub(super) struct ServiceCidrManifest {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<ServiceCidrSpec>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ServiceCidrSpec {
    cidrs: Vec<String>,
}

impl ServiceCidrManifest {
    pub(super) fn check(self) -> Result<ServiceCidr, String> {
        let cidrs = self.spec.unwrap_or_default().cidrs;
        let range = |text: &String| text.parse().map_err(|error| format!("spec.cidrs: {error}"));
        Ok(ServiceCidr {
            name: self.metadata.named()?,
            cidrs: cidrs.iter().map(range).collect::<Result<_, String>>()?,
        })
    }
}
