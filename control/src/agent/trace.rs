//! `skeinctl trace`: a packet that is only thought of, walked through the stages that decide.

use std::collections::BTreeMap;
use std::net::IpAddr;

use skein_dataplane::conntrack::Direction;
use skein_dataplane::ids::EndpointId;
use skein_dataplane::policy::{Judgement, Side};
use skein_dataplane::slow::{Exit, Explanation, Probe, explain};
use skein_dataplane::time::Instant;
use skein_dataplane::verdict::DropReason;
use skein_dataplane::wire::protocol;

use super::Agent;
use crate::state::PodKey;
use crate::views::{TraceStage, TraceView};

impl Agent {
    pub(super) fn trace(&self, arguments: &BTreeMap<String, String>) -> Result<TraceView, String> {
        let text = |name: &str| arguments.get(name).map(String::as_str);
        let from = key(text("from").ok_or("trace needs --from namespace/pod")?);
        let to = text("to").ok_or("trace needs --to namespace/pod or an address")?;
        let port = text("port").unwrap_or("0");
        let port: u16 = port
            .parse()
            .map_err(|_| format!("port: '{port}' is no port"))?;
        let id = self.endpoint_of(&from).ok_or_else(|| {
            format!("pod {from} is not on this node: ask the agent of the node that it runs on")
        })?;
        let target = self.target(to)?;
        let protocol = number(text("protocol").unwrap_or("tcp"), target)?;
        let has_ports = [protocol::TCP, protocol::UDP, protocol::SCTP].contains(&protocol);
        if has_ports && port == 0 {
            return Err("trace needs --port for this protocol".to_owned());
        }
        let probe = Probe {
            from: id,
            to: target,
            protocol,
            port,
        };
        let elapsed = self.datapath.started().elapsed().unwrap_or_default();
        let now = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let (tables, shared) = (self.datapath.tables(), self.datapath.shared());
        let explanation = explain(tables, shared, &probe, Instant::from_nanos(now))
            .ok_or_else(|| format!("pod {from} has no address of the IP version of {target}"))?;
        Ok(self.told(&from, target, port, &explanation))
    }

    fn told(&self, from: &PodKey, to: IpAddr, port: u16, what: &Explanation) -> TraceView {
        let mut stages = Vec::new();
        let mut stage = |stage: &str, decision: String| {
            let stage = stage.to_owned();
            stages.push(TraceStage { stage, decision });
        };
        stage("classify", format!("pod {from}, identity {}", what.sender));
        stage(
            "conntrack",
            match what.known {
                None => "a new connection".to_owned(),
                Some(Direction::Original) => "a connection that is known".to_owned(),
                Some(Direction::Reply) => "an answer of a connection that is known".to_owned(),
            },
        );
        if let Some(decision) = service(what, to) {
            stage("service", decision);
        }
        let receiver = what.receiver.map(|(address, ..)| self.named(address));
        if let Some(judgement) = what.egress {
            stage("policy-egress", self.judged(from, Side::Egress, judgement));
        }
        if let Some((exit, mtu, _)) = what.exit {
            stage("route", self.way(exit, mtu, what.source));
        }
        match (what.ingress, what.exit) {
            (Some(judgement), _) => {
                let pod = what.receiver.and_then(|(address, ..)| self.pod_at(address));
                let decision = match pod {
                    Some(pod) => self.judged(&pod, Side::Ingress, judgement),
                    None => judgement_alone(judgement),
                };
                stage("policy-ingress", decision);
            }
            (None, Some((Exit::Peer(peer), ..))) => stage(
                "policy-ingress",
                format!("judged on {}: ask its agent's policies", self.node_of(peer)),
            ),
            (None, _) => {}
        }
        TraceView {
            from: from.to_string(),
            to: receiver.unwrap_or_else(|| to.to_string()),
            address: to,
            port,
            verdict: if what.dropped.is_some() {
                "dropped"
            } else {
                "forwarded"
            }
            .to_owned(),
            reason: what.dropped.map_or("", DropReason::name).to_owned(),
            explanation: (what.dropped)
                .map_or("", DropReason::explanation)
                .to_owned(),
            stages,
        }
    }

    /// A judgement with the rule that it follows from, or with what would have been needed.
    fn judged(&self, pod: &PodKey, side: Side, judgement: Judgement) -> String {
        match judgement {
            Judgement::Allowed(rule) => match self.policies.rule(rule) {
                Some(name) => format!("allowed by {name}"),
                None => "allowed by a policy that is gone by now".to_owned(),
            },
            Judgement::Denied => {
                let applied = self.policies.applied(pod, side);
                let rules: Vec<String> = (applied.iter())
                    .map(|applied| match applied.rules.as_slice() {
                        [] => format!("{} allows nothing", applied.policy),
                        rules => format!("{} allows {}", applied.policy, rules.join("; or ")),
                    })
                    .collect();
                format!(
                    "denied: no rule of the policies for {pod} fits: {}",
                    rules.join("; ")
                )
            }
            other => judgement_alone(other),
        }
    }

    fn way(&self, exit: Exit, mtu: u32, source: Option<IpAddr>) -> String {
        let to = match exit {
            Exit::Endpoint(id) => {
                let pod = self.datapath.tables().endpoint(id);
                let address = pod.and_then(|pod| pod.addresses.first().copied());
                let name = address.map_or_else(|| "a pod".to_owned(), |ip| self.named(ip));
                format!("to {name} on this node")
            }
            Exit::Host => "to this node itself".to_owned(),
            Exit::Peer(peer) => format!("through the overlay to {}", self.node_of(peer)),
            Exit::World => "out of the cluster by an uplink".to_owned(),
        };
        let source = source.map_or_else(String::new, |ip| format!(", from this node's {ip}"));
        format!("{to}{source}, packets of up to {mtu} bytes")
    }

    fn node_of(&self, peer: skein_dataplane::ids::PeerId) -> String {
        let mut peers = self.peers.iter();
        let named = peers.find(|(_, id)| **id == peer);
        named.map_or_else(
            || "another node".to_owned(),
            |(name, _)| format!("node {name}"),
        )
    }

    fn endpoint_of(&self, key: &PodKey) -> Option<EndpointId> {
        let endpoint = self.state.endpoints().find(|endpoint| {
            (endpoint.pod.as_ref())
                .is_some_and(|pod| pod.namespace == key.namespace && pod.name == key.name)
        })?;
        Some(self.datapath.pods().get(&endpoint.attachment)?.placed.id)
    }

    /// The address that somebody means: an address, or a pod's, IPv4 where it has one.
    fn target(&self, to: &str) -> Result<IpAddr, String> {
        if let Ok(address) = to.parse() {
            return Ok(address);
        }
        let ips = self.addresses_of(to)?;
        let v4 = ips.iter().find(|ip| ip.is_ipv4());
        (v4.or(ips.first()).copied()).ok_or_else(|| format!("pod {to} has no address yet"))
    }

    fn pod_at(&self, address: IpAddr) -> Option<PodKey> {
        let local = self
            .state
            .endpoints()
            .find(|one| one.ips.contains(&address));
        let local = local
            .and_then(|endpoint| endpoint.pod.as_ref())
            .map(|pod| PodKey {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
            });
        local.or_else(|| {
            let mut pods = self.state.pods();
            let pod = pods.find(|pod| !pod.host_network && pod.ips.contains(&address))?;
            Some(pod.key.clone())
        })
    }

    fn named(&self, address: IpAddr) -> String {
        self.pod_at(address)
            .map_or_else(|| address.to_string(), |pod| format!("{pod} ({address})"))
    }
}

fn judgement_alone(judgement: Judgement) -> String {
    match judgement {
        Judgement::NotIsolated => "allowed: no policy applies",
        Judgement::AlwaysAllowed => "always allowed: the node to its pods, a pod to itself",
        Judgement::Allowed(_) => "allowed",
        Judgement::Denied => "denied",
    }
    .to_owned()
}

fn service(what: &Explanation, to: IpAddr) -> Option<String> {
    let refused = matches!(
        what.dropped,
        Some(
            DropReason::NoEndpoints
                | DropReason::NoLocalEndpoints
                | DropReason::SourceRangeDenied
                | DropReason::NoServicePort
        )
    );
    match (&what.backend, what.dropped) {
        (Some(backend), _) => {
            let at = std::net::SocketAddr::new(backend.address, backend.port);
            Some(format!("{to} is a Service's; a backend, {at} for one"))
        }
        (None, Some(reason)) if refused => Some(format!("refused: {}", reason.explanation())),
        (None, _) => what
            .receiver
            .map(|_| "the address is no Service's".to_owned()),
    }
}

fn key(text: &str) -> PodKey {
    let (namespace, name) = text.split_once('/').unwrap_or(("default", text));
    PodKey {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn number(name: &str, target: IpAddr) -> Result<u8, String> {
    match name.to_lowercase().as_str() {
        "tcp" => Ok(protocol::TCP),
        "udp" => Ok(protocol::UDP),
        "sctp" => Ok(protocol::SCTP),
        "icmp" | "icmpv6" if target.is_ipv4() => Ok(protocol::ICMP),
        "icmp" | "icmpv6" => Ok(protocol::ICMPV6),
        _ => Err(format!(
            "protocol: '{name}' is none of tcp, udp, sctp, icmp"
        )),
    }
}
