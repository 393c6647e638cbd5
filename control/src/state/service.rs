//! Services and EndpointSlices as control knows them: what the packet path needs, checked.

use std::fmt;
use std::net::IpAddr;

use super::PodKey;
use crate::cidr::Cidr;

/// Name of a Service, or of an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A transport protocol of a Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// Its number in the IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        use skein_dataplane::wire::protocol;
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
            Self::Sctp => protocol::SCTP,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

/// `spec.type`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceType {
    /// An address of the cluster.
    #[default]
    ClusterIp,
    /// That, and a port of each node.
    NodePort,
    /// That, and a load balancer's addresses.
    LoadBalancer,
    /// A name in DNS; nothing to serve.
    ExternalName,
}

/// `spec.trafficDistribution`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distribution {
    /// Evenly.
    #[default]
    Even,
    /// Within the zone, while it has endpoints (`PreferClose`, `PreferSameZone`).
    SameZone,
    /// On the node, while it has endpoints, else as within the zone.
    SameNode,
}

/// An entry of `spec.ports`
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, by which EndpointSlices carry its target; empty for the only one.
    pub name: String,
    /// Protocol.
    pub protocol: Protocol,
    /// Port at the Service's addresses.
    pub port: u16,
    /// Port of each node.
    pub node_port: Option<u16>,
}

/// A Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name
    pub key: ServiceKey,
    /// Label `service.kubernetes.io/service-proxy-name`: who serves it in our place
    pub proxy: Option<String>,
    /// Label `service.kubernetes.io/headless`, or `spec.clusterIP: None`
    pub headless: bool,
    /// `spec.type`
    pub kind: ServiceType,
    /// `spec.clusterIPs`, or `spec.clusterIP`
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`
    pub external_ips: Vec<IpAddr>,
    /// Addresses of `status.loadBalancer.ingress` that are this node's to serve: those of ipMode
    /// `Proxy` terminate elsewhere
    pub ingress: Vec<IpAddr>,
    /// `spec.ports`
    pub ports: Vec<ServicePort>,
    /// `spec.loadBalancerSourceRanges`
    pub source_ranges: Vec<Cidr>,
    /// `spec.internalTrafficPolicy` is `Local`
    pub internal_local: bool,
    /// `spec.externalTrafficPolicy` is `Local`
    pub external_local: bool,
    /// `spec.sessionAffinityConfig.clientIP.timeoutSeconds`, with `sessionAffinity: ClientIP`
    pub affinity_seconds: Option<u32>,
    /// `spec.publishNotReadyAddresses`
    pub publish_not_ready: bool,
    /// `spec.trafficDistribution`
    pub distribution: Distribution,
}

/// An entry of an EndpointSlice's `ports`, with a number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicePort {
    /// The Service port's name.
    pub name: String,
    /// Protocol.
    pub protocol: Protocol,
    /// Port of the endpoints.
    pub port: u16,
}

/// An entry of an EndpointSlice's `endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// The first of `addresses`: those behind it are never used.
    pub address: Option<IpAddr>,
    /// `conditions.ready`
    pub ready: bool,
    /// `conditions.serving`
    pub serving: bool,
    /// `conditions.terminating`
    pub terminating: bool,
    /// `nodeName`
    pub node: Option<String>,
    /// `zone`
    pub zone: Option<String>,
    /// `hints.forZones`
    pub zone_hints: Vec<String>,
    /// `hints.forNodes`
    pub node_hints: Vec<String>,
    /// `targetRef`, where it is a Pod
    pub pod: Option<PodKey>,
}

/// An EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Namespace and name
    pub key: ServiceKey,
    /// Label `kubernetes.io/service-name`, in the same namespace; none for slices of nobody's,
    /// and for those that another proxy serves or that belong to a headless Service
    pub service: Option<ServiceKey>,
    /// Whether `addressType` is `IPv4`; none for names
    pub ipv4: Option<bool>,
    /// `ports`
    pub ports: Vec<SlicePort>,
    /// `endpoints`
    pub endpoints: Vec<SliceEndpoint>,
}

/// A ServiceCIDR.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceCidr {
    /// `metadata.name`
    pub name: String,
    /// `spec.cidrs`
    pub cidrs: Vec<Cidr>,
}
