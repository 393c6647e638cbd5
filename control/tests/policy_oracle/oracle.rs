//! What NetworkPolicy says, read from the manifests as they are, rule by rule. Knows nothing of
//! Skein, so that the tests in the lab ask it too.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;

/// Labels as they are listed.
pub type Labels = Vec<(String, String)>;

/// A cluster in few words.
#[derive(Default)]
pub struct Model {
    /// Labels of namespaces, but for the one that each has by itself.
    pub namespaces: BTreeMap<String, Labels>,
    pub pods: Vec<PodModel>,
    /// Policies by namespace and name, as they are written.
    pub policies: BTreeMap<(String, String), Value>,
}

#[derive(Clone, Debug)]
pub struct PodModel {
    pub namespace: String,
    pub name: String,
    pub labels: Labels,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<PortModel>,
    pub is_local: bool,
    /// Whether the manifest tells its addresses; only a local one's may be known without.
    pub tells_addresses: bool,
}

/// A port of a container that has a name.
#[derive(Clone, Debug)]
pub struct PortModel {
    pub name: String,
    pub protocol: String,
    pub number: u16,
    pub of_sidecar: bool,
}

/// Which way a flow goes, seen from the pod that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
}

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerKind {
    /// A pod, by its place in the world.
    Pod(usize),
    OwnNode,
    OtherNode,
    World,
}

/// A flow as one of its ends sees it.
#[derive(Clone, Debug)]
pub struct Flow {
    pub peer: PeerKind,
    pub address: IpAddr,
    pub protocol: u8,
    pub port: u16,
}

impl Model {
    /// Whether the policies let a flow of that pod through.
    pub fn allows(&self, pod: usize, direction: Direction, flow: &Flow) -> bool {
        let from_own_node = direction == Direction::In && flow.peer == PeerKind::OwnNode;
        if from_own_node || flow.peer == PeerKind::Pod(pod) {
            return true;
        }
        let isolating: Vec<&Value> = (self.policies.values())
            .filter(|policy| self.selects(policy, pod) && is_about(policy, direction))
            .collect();
        isolating.is_empty()
            || isolating.iter().any(|policy| {
                rules(policy, direction)
                    .any(|rule| self.rule_matches(policy, rule, pod, direction, flow))
            })
    }

    /// Whether one rule does.
    pub fn rule_allows(
        &self,
        key: &(String, String),
        index: usize,
        pod: usize,
        direction: Direction,
        flow: &Flow,
    ) -> bool {
        let policy = &self.policies[key];
        let rule = rules(policy, direction).nth(index).unwrap();
        self.selects(policy, pod)
            && is_about(policy, direction)
            && self.rule_matches(policy, rule, pod, direction, flow)
    }

    fn selects(&self, policy: &Value, pod: usize) -> bool {
        let pod = &self.pods[pod];
        policy["metadata"]["namespace"] == pod.namespace.as_str()
            && matches(&policy["spec"]["podSelector"], &pod.labels)
    }

    fn rule_matches(
        &self,
        policy: &Value,
        rule: &Value,
        pod: usize,
        direction: Direction,
        flow: &Flow,
    ) -> bool {
        let list = |field: &str| rule[field].as_array().cloned().unwrap_or_default();
        let peers = match direction {
            Direction::In => list("from"),
            Direction::Out => list("to"),
        };
        let ports = list("ports");
        // A name is that of the pod that takes the packet.
        let taker = match (direction, flow.peer) {
            (Direction::In, _) => Some(&self.pods[pod]),
            (Direction::Out, PeerKind::Pod(peer)) => Some(&self.pods[peer]),
            (Direction::Out, _) => None,
        };
        (peers.is_empty()
            || peers
                .iter()
                .any(|peer| self.peer_matches(policy, peer, flow)))
            && (ports.is_empty() || ports.iter().any(|port| port_matches(port, taker, flow)))
    }

    fn peer_matches(&self, policy: &Value, peer: &Value, flow: &Flow) -> bool {
        if let Some(block) = peer.get("ipBlock") {
            let holes = block["except"].as_array().cloned().unwrap_or_default();
            return in_range(&block["cidr"], flow.address)
                && !holes.iter().any(|hole| in_range(hole, flow.address));
        }
        let PeerKind::Pod(index) = flow.peer else {
            return false;
        };
        let pod = &self.pods[index];
        let in_namespace = match peer.get("namespaceSelector") {
            None => policy["metadata"]["namespace"] == pod.namespace.as_str(),
            Some(selector) => {
                let mut labels = self.namespaces[&pod.namespace].clone();
                labels.push(("kubernetes.io/metadata.name".into(), pod.namespace.clone()));
                matches(selector, &labels)
            }
        };
        let pods = peer.get("podSelector");
        in_namespace && pods.is_none_or(|selector| matches(selector, &pod.labels))
    }
}

fn is_about(policy: &Value, direction: Direction) -> bool {
    let spec = &policy["spec"];
    let types = spec["policyTypes"].as_array().cloned().unwrap_or_default();
    match (types.is_empty(), direction) {
        (true, Direction::In) => true,
        (true, Direction::Out) => spec["egress"]
            .as_array()
            .is_some_and(|list| !list.is_empty()),
        (false, Direction::In) => types.iter().any(|of| of == "Ingress"),
        (false, Direction::Out) => types.iter().any(|of| of == "Egress"),
    }
}

fn rules(policy: &Value, direction: Direction) -> impl Iterator<Item = &Value> {
    let list = match direction {
        Direction::In => &policy["spec"]["ingress"],
        Direction::Out => &policy["spec"]["egress"],
    };
    list.as_array().into_iter().flatten()
}

fn port_matches(port: &Value, taker: Option<&PodModel>, flow: &Flow) -> bool {
    let protocol = port["protocol"].as_str().unwrap_or("TCP");
    let number = match protocol {
        "TCP" => 6,
        "UDP" => 17,
        "SCTP" => 132,
        other => panic!("{other}"),
    };
    if flow.protocol != number {
        return false;
    }
    match &port["port"] {
        Value::Null => true,
        Value::Number(first) => {
            let first = first.as_u64().unwrap();
            let last = port["endPort"].as_u64().unwrap_or(first);
            (first..=last).contains(&flow.port.into())
        }
        Value::String(name) => taker.is_some_and(|pod| {
            // Containers first, then sidecars; the first of a name counts.
            let mut known = pod.ports.iter().filter(|port| !port.of_sidecar);
            let mut sidecars = pod.ports.iter().filter(|port| port.of_sidecar);
            let is_it = |port: &&PortModel| port.name == *name && port.protocol == protocol;
            let found = known.find(is_it).or_else(|| sidecars.find(is_it));
            found.is_some_and(|port| port.number == flow.port)
        }),
        other => panic!("{other}"),
    }
}

fn matches(selector: &Value, labels: &[(String, String)]) -> bool {
    let value_of = |key: &str| {
        labels
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value)
    };
    let wanted = selector["matchLabels"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    let expressions = selector["matchExpressions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let holds = |expression: &Value| {
        let value = value_of(expression["key"].as_str().unwrap());
        let values = expression["values"].as_array().cloned().unwrap_or_default();
        let listed = value.is_some_and(|value| values.iter().any(|of| of == value.as_str()));
        match expression["operator"].as_str().unwrap() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => panic!("{other}"),
        }
    };
    (wanted.iter()).all(|(key, value)| value_of(key).is_some_and(|of| value == of.as_str()))
        && expressions.iter().all(holds)
}

/// Bit by bit, apart from the code that is tested.
fn in_range(range: &Value, address: IpAddr) -> bool {
    let (first, bits) = range.as_str().unwrap().split_once('/').unwrap();
    let bits: usize = bits.parse().unwrap();
    let digits = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => format!("{:032b}", v4.to_bits()),
        IpAddr::V6(v6) => format!("{:0128b}", v6.to_bits()),
    };
    let (first, address) = (digits(first.parse().unwrap()), digits(address));
    first.len() == address.len() && first[..bits] == address[..bits]
}
