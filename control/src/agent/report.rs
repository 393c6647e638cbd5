//! Views for `skeinctl`, and facts for metrics and health.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use serde::Serialize;
use skein_cni::agent::{AgentError, Reply};
use skein_dataplane::ids::{IdentityId, PeerId};
use skein_dataplane::policy::Side;
use skein_dataplane::stats::LinkStats;
use skein_dataplane::verdict::DropReason;

use super::Agent;
use crate::compile::policy::Note;
use crate::compile::tunnel;
use crate::config::Source;
use crate::endpoint::{agent_error, code};
use crate::observe::Facts;
use crate::state::{Endpoint, PodKey};
use crate::views;

impl Agent {
    pub(super) fn view(&mut self, name: &str) -> Result<Reply, AgentError> {
        match name {
            "status" => document(&self.status()),
            "endpoints" => document(&self.endpoints_view()),
            "ipcache" => document(&self.ipcache()),
            "identities" => document(&self.identities_view()),
            "policies" => document(&self.policies_view()),
            "services" => document(&self.services_view()),
            "drops" => document(&self.drops()),
            "workers" => document(&self.workers()),
            "config" => document(&self.config),
            "metrics" => document(&views::Metrics {
                text: self.shared.metrics(),
            }),
            _ => Err(agent_error(code::REFUSED, format!("no view '{name}'"), "")),
        }
    }

    /// What keeps an ADD from succeeding; empty when nothing does.
    pub(super) fn not_ready(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if !self.synced {
            reasons.push("the cluster's objects are not read yet".to_owned());
        }
        let name = &self.config.node.name;
        match self.own() {
            None => reasons.push(format!("there is no Node object of the name {name}")),
            Some(own) => {
                if own.internal_ips.is_empty() {
                    reasons.push(format!("Node {name} has no InternalIP"));
                }
                if own.pod_cidrs.is_empty() {
                    reasons.push(format!("Node {name} has no podCIDRs"));
                }
            }
        }
        reasons.extend(self.faults.uplinks.values().cloned());
        reasons
    }

    /// What is wrong while pods can be added all the same.
    fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = Vec::new();
        faults.extend(self.faults.documents.iter().map(ToString::to_string));
        faults.extend(self.faults.tables.iter().cloned());
        faults.extend(self.faults.endpoints.values().cloned());
        faults.extend(self.faults.kernel.iter().cloned());
        faults.extend(self.faults.host.iter().cloned());
        faults.extend(self.faults.routes.iter().cloned());
        faults.extend(self.services.faults().cloned());
        faults.extend(self.faults.leftovers.iter().cloned());
        faults.extend(self.identities.faults());
        faults.extend(self.endpoints.damaged().iter().cloned());
        for peer in self.peers_view() {
            if !peer.reachable {
                faults.push(format!(
                    "node {} is not reachable: {}",
                    peer.node, peer.reason
                ));
            }
        }
        faults
    }

    /// Leaves facts for metrics and health.
    pub(super) fn report(&mut self) {
        let ready = self.not_ready();
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let generation = self.datapath.tables().generation().0;
        let mut gauges: BTreeMap<_, _> = [
            (
                "skein_endpoints",
                (
                    "Endpoints on this node",
                    count(self.endpoints.iter().count()),
                ),
            ),
            (
                "skein_peers",
                ("Other nodes", count(self.peers_known().count())),
            ),
            (
                "skein_services",
                (
                    "Ports of Services that are served, in each address family",
                    count(self.datapath.tables().services().len()),
                ),
            ),
            (
                "skein_documents_refused",
                (
                    "Documents that are refused now",
                    count(self.faults.documents.len()),
                ),
            ),
            (
                "skein_generation",
                (
                    "Number of the tables published last",
                    i64::try_from(generation).unwrap_or(0),
                ),
            ),
            (
                "skein_frames",
                (
                    "Frames of packet memory",
                    i64::from(self.datapath.store().umem().chunks()),
                ),
            ),
            (
                "skein_frames_free",
                (
                    "Frames in the common store",
                    count(self.datapath.store().available()),
                ),
            ),
        ]
        .into();
        let usage = [
            ("skein_addresses_used_ipv4", "skein_addresses_ipv4", true),
            ("skein_addresses_used_ipv6", "skein_addresses_ipv6", false),
        ];
        for (used, total, ipv4) in usage {
            let usage = self.endpoints.ipam().usage(ipv4);
            gauges.insert(used, ("Pod addresses handed out", count(usage.used)));
            let all = i64::try_from(usage.total).unwrap_or(i64::MAX);
            gauges.insert(total, ("Pod addresses of this node", all));
        }
        gauges.extend(self.policy_gauges());
        gauges.extend(self.connection_gauges());
        self.shared.set(Facts {
            not_ready: ready,
            beat: Instant::now(),
            gauges,
        });
    }

    fn policy_gauges(&self) -> [(&'static str, (&'static str, i64)); 3] {
        let policies = &self.policies;
        let gauge = |help, number| (help, i64::try_from(number).unwrap_or(i64::MAX));
        let unselecting = "Network policies that select no pod";
        let notes = "Reasons why network policies do less than they say";
        [
            (
                "skein_policies",
                gauge("Network policies in force", policies.len()),
            ),
            (
                "skein_policies_selecting_nothing",
                gauge(unselecting, policies.selecting_nothing()),
            ),
            ("skein_policy_notes", gauge(notes, policies.notes().len())),
        ]
    }

    fn peers_known(&self) -> impl Iterator<Item = (&str, PeerId)> {
        (self.peers.iter())
            .filter(|(name, _)| self.state.node(name).is_some())
            .map(|(name, id)| (name.as_str(), *id))
    }

    fn peers_view(&self) -> Vec<views::PeerStatus> {
        let own = self.own();
        let mut peers = Vec::new();
        for (name, _) in self.peers_known() {
            let tunnel = self
                .state
                .node(name)
                .zip(own)
                .and_then(|(peer, own)| tunnel(own, peer));
            let mut status = views::PeerStatus {
                node: name.to_owned(),
                address: tunnel.map(|(_, remote)| remote),
                ..views::PeerStatus::default()
            };
            match tunnel.map(|(_, remote)| self.underlay.hop(remote)) {
                None => status.reason = "no InternalIP of a family that both nodes have".into(),
                Some(Err(error)) => status.reason = error.to_string(),
                Some(Ok(hop)) => {
                    let names = &self.config.uplink.interfaces;
                    status.uplink = names
                        .get(usize::from(hop.uplink))
                        .cloned()
                        .unwrap_or_default();
                    status.mtu = hop.mtu;
                    status.reachable = hop.next_hop_mac.is_some();
                    if !status.reachable {
                        status.reason = format!("next hop {} does not answer", hop.next_hop);
                    }
                }
            }
            peers.push(status);
        }
        peers
    }

    fn status(&mut self) -> views::Status {
        let not_ready = self.not_ready();
        let faults = self.faults();
        let acknowledged = self.datapath.acknowledged().0;
        let mut addresses = BTreeMap::new();
        for (family, ipv4) in [("ipv4", true), ("ipv6", false)] {
            let usage = self.endpoints.ipam().usage(ipv4);
            if usage.total > 0 {
                let usage = views::AddressUsage {
                    used: usage.used,
                    total: u64::try_from(usage.total).unwrap_or(u64::MAX),
                };
                addresses.insert(family.to_owned(), usage);
            }
        }
        let store = self.datapath.store();
        views::Status {
            node: self.config.node.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            healthy: not_ready.is_empty() && faults.is_empty(),
            ready: not_ready.is_empty(),
            not_ready,
            faults,
            notes: self.policies.notes().iter().map(Note::to_string).collect(),
            uptime_seconds: self.started.elapsed().as_secs(),
            source: match self.config.cluster.source {
                Source::Directory => "directory".into(),
                Source::Kubernetes => "kubernetes".into(),
            },
            synced: self.synced,
            generation: self.datapath.tables().generation().0,
            acknowledged,
            features: self.datapath.features(),
            workers: self.datapath.group().len(),
            endpoints: self.endpoints.iter().count(),
            peers: self.peers_view(),
            uplinks: self.uplinks_view(),
            addresses,
            frames: views::Frames {
                total: store.umem().chunks() as usize,
                free: store.available(),
            },
        }
    }

    fn uplinks_view(&self) -> Vec<views::UplinkStatus> {
        let names = self.config.uplink.interfaces.iter();
        (0u8..=u8::MAX)
            .zip(names)
            .map(|(position, name)| {
                let open = self.datapath.uplinks().get(&position);
                let (mode, fallback) = open.map_or(("closed", None), |open| open.mode());
                let device = self.underlay.uplinks().get(usize::from(position));
                let device = device.and_then(Option::as_ref).map(|uplink| &uplink.device);
                let links = || open.into_iter().flat_map(|open| &open.links);
                let sum = |field: fn(&LinkStats) -> u64| {
                    links().map(|(_, stats)| field(stats)).sum::<u64>()
                };
                views::UplinkStatus {
                    name: name.clone(),
                    mode: mode.into(),
                    fallback: fallback.unwrap_or_default(),
                    queues: open.map_or(0, |open| open.links.len()),
                    mtu: device.map_or(0, |device| device.mtu),
                    mac: device.map_or_else(String::new, |device| device.mac.to_string()),
                    rx_packets: sum(|stats| stats.rx_packets.value()),
                    tx_packets: sum(|stats| stats.tx_packets.value()),
                    rx_dropped: sum(|stats| stats.kernel_rx_dropped.value()),
                    rx_fill_empty: sum(|stats| stats.kernel_rx_fill_empty.value()),
                    tx_full: sum(|stats| stats.tx_full.value()),
                }
            })
            .collect()
    }

    fn endpoints_view(&self) -> views::EndpointsView {
        let endpoints = self
            .endpoints
            .iter()
            .map(|endpoint| self.endpoint_view(endpoint));
        views::EndpointsView {
            endpoints: endpoints.collect(),
        }
    }

    fn endpoint_view(&self, endpoint: &Endpoint) -> views::EndpointView {
        let attachment = &endpoint.attachment;
        let open = self.datapath.pods().get(attachment);
        let entry = open.and_then(|open| self.datapath.tables().endpoint(open.placed.id));
        let state = if self.faults.endpoints.contains_key(attachment) {
            "lost"
        } else if open.is_none() {
            "reserved"
        } else if self.complete.contains_key(attachment)
            && !self
                .waiting
                .iter()
                .any(|waiter| waiter.attachment == *attachment)
        {
            "ready"
        } else {
            "waiting"
        };
        let count = |field: fn(&LinkStats) -> u64| open.map_or(0, |open| field(&open.stats));
        let pod = endpoint.pod.as_ref();
        views::EndpointView {
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
            namespace: pod.map_or_else(String::new, |pod| pod.namespace.clone()),
            pod: pod.map_or_else(String::new, |pod| pod.name.clone()),
            uid: pod.map_or_else(String::new, |pod| pod.uid.clone()),
            state: state.into(),
            identity: entry.map_or(0, |entry| entry.identity.number()),
            ips: endpoint.ips.clone(),
            mac: endpoint.pod_mac.to_string(),
            host_ifname: endpoint.host_ifname.clone(),
            ifindex: endpoint.ifindex.unwrap_or_default(),
            mtu: endpoint.route_mtu,
            worker: open.map(|open| open.placed.worker.0),
            mode: open.map_or_else(String::new, |open| open.mode().into()),
            rx_packets: count(|stats| stats.rx_packets.value()),
            rx_bytes: count(|stats| stats.rx_bytes.value()),
            tx_packets: count(|stats| stats.tx_packets.value()),
            tx_bytes: count(|stats| stats.tx_bytes.value()),
            rx_dropped: count(|stats| stats.kernel_rx_dropped.value()),
            rx_fill_empty: count(|stats| stats.kernel_rx_fill_empty.value()),
            tx_full: count(|stats| stats.tx_full.value()),
        }
    }

    fn ipcache(&self) -> views::Ipcache {
        let tables = self.datapath.tables();
        let names: BTreeMap<PeerId, &str> =
            self.peers_known().map(|(name, id)| (id, name)).collect();
        let name_of = |peer: PeerId| names.get(&peer).copied().unwrap_or_default().to_owned();
        let tunnel_of = |peer: PeerId| {
            let hop = tables.peer(peer).and_then(|peer| peer.hop.as_ref());
            hop.map(|hop| hop.outer_dst)
        };
        let host = |ip: std::net::IpAddr| {
            let bits = if ip.is_ipv4() { 32 } else { 128 };
            format!("{ip}/{bits}")
        };
        let mut keyed = Vec::new();
        for endpoint in tables.endpoints() {
            for &ip in &endpoint.addresses {
                let entry = views::IpcacheEntry {
                    prefix: host(ip),
                    kind: "local".into(),
                    identity: endpoint.identity.number(),
                    node: self.config.node.name.clone(),
                    tunnel: None,
                };
                keyed.push((ip, entry));
            }
        }
        for (ip, pod) in tables.remote_pods() {
            let entry = views::IpcacheEntry {
                prefix: host(ip),
                kind: "remote".into(),
                identity: pod.identity.number(),
                node: name_of(pod.peer),
                tunnel: tunnel_of(pod.peer),
            };
            keyed.push((ip, entry));
        }
        for peer in tables.peers() {
            for prefix in &peer.pod_prefixes {
                let entry = views::IpcacheEntry {
                    prefix: prefix.to_string(),
                    kind: "range".into(),
                    identity: 0,
                    node: name_of(peer.id),
                    tunnel: tunnel_of(peer.id),
                };
                keyed.push((prefix.address(), entry));
            }
        }
        keyed.sort_by(|(a, one), (b, other)| (a, &one.prefix).cmp(&(b, &other.prefix)));
        views::Ipcache {
            entries: keyed.into_iter().map(|(_, entry)| entry).collect(),
        }
    }

    fn identities_view(&self) -> views::Identities {
        let reserved = [
            IdentityId::HOST,
            IdentityId::REMOTE_NODE,
            IdentityId::WORLD_IPV4,
            IdentityId::WORLD_IPV6,
            IdentityId::UNMANAGED,
            IdentityId::HEALTH,
        ];
        let mut identities: Vec<_> = (reserved.iter())
            .map(|id| views::IdentityView {
                identity: id.number(),
                name: id.to_string(),
                ..views::IdentityView::default()
            })
            .collect();
        for (id, labels, pods) in self.identities.in_use() {
            identities.push(views::IdentityView {
                identity: id.number(),
                name: String::new(),
                labels: labels.entries().clone(),
                pods,
            });
        }
        views::Identities { identities }
    }

    fn policies_view(&self) -> views::Policies {
        let applied = |pod: &PodKey, side| {
            (self.policies.applied(pod, side).into_iter())
                .map(|applied| views::AppliedPolicy {
                    policy: applied.policy.to_string(),
                    allows: applied.rules,
                })
                .collect()
        };
        let pods: BTreeSet<PodKey> = (self.state.endpoints())
            .filter_map(|endpoint| self.state.pod_of(endpoint.pod.as_ref()?))
            .map(|pod| pod.key.clone())
            .collect();
        let pods = pods.into_iter().map(|key| views::PodPolicies {
            ingress: applied(&key, Side::Ingress),
            egress: applied(&key, Side::Egress),
            namespace: key.namespace,
            pod: key.name,
        });
        let notes = self.policies.notes().iter().map(|note| views::PolicyNote {
            policy: note.policy.to_string(),
            note: note.text.clone(),
        });
        views::Policies {
            pods: pods.collect(),
            notes: notes.collect(),
        }
    }

    fn drops(&self) -> views::Drops {
        let drops = DropReason::ALL.iter().map(|&reason| views::DropView {
            reason: reason.name().into(),
            count: self.shared.drops(reason),
            explanation: reason.explanation().into(),
        });
        views::Drops {
            drops: drops.collect(),
        }
    }

    fn workers(&self) -> views::Workers {
        let links_of = |worker: usize| {
            let pods = self.datapath.pods().values().map(|pod| pod.placed.worker);
            let uplinks = self.datapath.uplinks().values().flat_map(|u| &u.links);
            let host = self.datapath.host().map(|host| host.worker);
            pods.chain(uplinks.map(|(entry, _)| entry.worker))
                .chain(host)
                .filter(|owner| usize::from(owner.0) == worker)
                .count()
        };
        let workers = self.datapath.group().stats().enumerate();
        let workers = workers.map(|(worker, (stats, cpu))| views::WorkerView {
            worker,
            cpu,
            links: links_of(worker),
            rx_packets: stats.rx_packets.value(),
            rx_bytes: stats.rx_bytes.value(),
            tx_packets: stats.tx_packets.value(),
            tx_bytes: stats.tx_bytes.value(),
            answered: stats.answered.value(),
            drops: DropReason::ALL
                .iter()
                .map(|&r| stats.drops(r).value())
                .sum(),
            flow_hits: stats.flow_hits.value(),
            flow_misses: stats.flow_misses.value(),
            flow_stale: stats.flow_stale.value(),
            flow_evictions: stats.flow_evictions.value(),
            flows: stats.flows.value(),
            handovers: stats.handovers.value(),
            busy_rounds: stats.busy_rounds.value(),
            sleeps: stats.sleeps.value(),
            free_frames: stats.free_frames.value(),
        });
        views::Workers {
            workers: workers.collect(),
        }
    }
}

pub(super) fn document<T: Serialize>(view: &T) -> Result<Reply, AgentError> {
    serde_json::to_value(view)
        .map(|document| Reply::View { document })
        .map_err(|error| agent_error(code::STATE, "the view cannot be written", error.to_string()))
}
