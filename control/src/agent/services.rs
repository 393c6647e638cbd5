//! The view of Services: where each is reached, who serves it, and who is not chosen and why.

use skein_dataplane::snapshot::{FrontendKind, Reach, ServiceEntry};

use super::Agent;
use crate::compile::service::endpoints::Served;
use crate::compile::service::not_served;
use crate::state::service::Service;
use crate::views;

impl Agent {
    pub(super) fn services_view(&self) -> views::ServicesView {
        let disabled = (!self.config.services.enabled)
            .then(|| "services.enabled is false: another proxy serves it".to_owned());
        let mut services = Vec::new();
        for service in self.state.services() {
            match disabled.clone().or_else(|| not_served(service)) {
                Some(reason) => services.push(views::ServiceView {
                    not_served: reason,
                    ..named(service)
                }),
                None => services.extend(self.ports_view(service)),
            }
        }
        views::ServicesView { services }
    }

    /// A Service as the published tables have it.
    fn ports_view(&self, service: &Service) -> Vec<views::ServiceView> {
        let tables = self.datapath.tables();
        let mut ports = Vec::new();
        for (key, id) in self.services.ports_of(&service.key) {
            let Some(entry) = tables.services().get(id) else {
                continue;
            };
            let served = self.services.served(&self.state, tables, service, key);
            ports.push(views::ServiceView {
                id: id.number(),
                port_name: key.name.clone(),
                protocol: key.protocol.to_string(),
                family: if key.ipv4 { "ipv4" } else { "ipv6" }.into(),
                frontends: frontends(entry),
                internal_policy: policy(service.internal_local).into(),
                external_policy: policy(service.external_local).into(),
                affinity_seconds: service.affinity_seconds.unwrap_or(0),
                source_ranges: (entry.source_ranges.iter())
                    .map(ToString::to_string)
                    .collect(),
                backends: served.into_iter().map(backend).collect(),
                faults: self.services.faults_of(&service.key).to_vec(),
                ..named(service)
            });
        }
        ports
    }
}

fn named(service: &Service) -> views::ServiceView {
    views::ServiceView {
        namespace: service.key.namespace.clone(),
        name: service.key.name.clone(),
        ..views::ServiceView::default()
    }
}

fn policy(local: bool) -> &'static str {
    if local { "Local" } else { "Cluster" }
}

fn frontends(entry: &ServiceEntry) -> Vec<views::FrontendView> {
    let frontend = |reach: &Reach| match *reach {
        Reach::Address(kind, address, port) => views::FrontendView {
            kind: kind_name(kind).into(),
            address: Some(address),
            port,
        },
        Reach::NodePort(port) => views::FrontendView {
            kind: kind_name(FrontendKind::NodePort).into(),
            address: None,
            port,
        },
    };
    entry.reach.iter().map(frontend).collect()
}

fn kind_name(kind: FrontendKind) -> &'static str {
    match kind {
        FrontendKind::ClusterIp => "cluster_ip",
        FrontendKind::LoadBalancer => "load_balancer",
        FrontendKind::ExternalIp => "external_ip",
        FrontendKind::NodePort => "node_port",
    }
}

fn backend(served: Served) -> views::BackendView {
    let pod = served.endpoint.pod.as_ref();
    views::BackendView {
        address: served.address,
        port: served.port,
        pod: pod.map_or_else(String::new, ToString::to_string),
        state: served.condition().into(),
        selected: served.cluster,
        selected_local: served.on_node,
        local: served.local,
        reason: served.reason().into(),
        node: served.endpoint.node.unwrap_or_default(),
        zone: served.endpoint.zone.unwrap_or_default(),
    }
}
