//! What a Service says → where a port of it is reached, and by which rules it chooses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use skein_dataplane::snapshot::{self, FrontendKind, Prefix, Reach, TrafficPolicy};

use super::endpoints::Served;
use crate::config::PortRange;
use crate::state::service::{Service, ServicePort, ServiceType};

/// Why a Service has no place in the tables; none where it has.
#[must_use]
pub fn not_served(service: &Service) -> Option<String> {
    if let Some(proxy) = &service.proxy {
        return Some(format!("proxy '{proxy}' serves it"));
    }
    if service.kind == ServiceType::ExternalName {
        return Some("it is a name in DNS".into());
    }
    if service.headless {
        return Some("it is headless".into());
    }
    (service.cluster_ips.is_empty()).then(|| "it has no clusterIP".into())
}

/// What a Service asks for in vain.
pub(super) fn faults(service: &Service, node_ports: PortRange) -> Vec<String> {
    let name = &service.key;
    let mut faults = Vec::new();
    for port in service.ports.iter().filter_map(|port| port.node_port) {
        if !(node_ports.first..=node_ports.last).contains(&port) {
            faults.push(format!(
                "Service {name}: nodePort {port} lies outside of services.node_port_range \
                 {node_ports} and is not served"
            ));
        }
    }
    for ip in service.external_ips.iter().chain(&service.ingress) {
        if !(service.cluster_ips.iter()).any(|own| own.is_ipv4() == ip.is_ipv4()) {
            faults.push(format!(
                "Service {name}: {ip} is not of the family of its clusterIP and is not served"
            ));
        }
    }
    faults
}

/// A port of a Service at one of its ClusterIPs, as the tables take it.
pub(super) fn compile(
    service: &Service,
    port: &ServicePort,
    cluster_ip: IpAddr,
    served: &[Served],
    node_ports: PortRange,
) -> snapshot::Service {
    let policy = |local| match local {
        true => TrafficPolicy::Local,
        false => TrafficPolicy::Cluster,
    };
    let ranges = service.source_ranges.iter();
    snapshot::Service {
        protocol: port.protocol.number(),
        ipv4: cluster_ip.is_ipv4(),
        reach: reach(service, port, cluster_ip, node_ports),
        candidates: served.iter().filter_map(Served::candidate).collect(),
        internal: policy(service.internal_local),
        external: policy(service.external_local),
        affinity: (service.affinity_seconds).map(|s| Duration::from_secs(s.into())),
        source_ranges: ranges
            .filter_map(|range| Prefix::new(range.address(), range.prefix()))
            .collect(),
    }
}

/// Where a port is reached. An address that is both a load balancer's and an external one is the
/// load balancer's, whose source ranges hold.
fn reach(
    service: &Service,
    port: &ServicePort,
    cluster_ip: IpAddr,
    node_ports: PortRange,
) -> Vec<Reach> {
    let mut addresses = BTreeMap::from([(cluster_ip, FrontendKind::ClusterIp)]);
    let balanced = service.kind == ServiceType::LoadBalancer;
    let ingress = service.ingress.iter().filter(|_| balanced);
    let others = (ingress.map(|ip| (*ip, FrontendKind::LoadBalancer)))
        .chain((service.external_ips.iter()).map(|ip| (*ip, FrontendKind::ExternalIp)));
    for (ip, kind) in others.filter(|(ip, _)| ip.is_ipv4() == cluster_ip.is_ipv4()) {
        addresses.entry(ip).or_insert(kind);
    }
    let node_port = port
        .node_port
        .filter(|port| (node_ports.first..=node_ports.last).contains(port));
    (addresses.into_iter())
        .map(|(ip, kind)| Reach::Address(kind, ip, port.port))
        .chain(node_port.map(Reach::NodePort))
        .collect()
}
