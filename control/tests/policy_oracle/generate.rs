//! Random objects, of few names and values, so that selectors, ranges and ports meet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::{Value, json};
use skein_dataplane::policy::Side;

use super::SIDES;
use super::oracle::{Flow, Labels, PeerKind, PodModel, PortModel};
use super::world::World;

pub const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const PROTOCOLS: [(&str, u8); 3] = [("TCP", 6), ("UDP", 17), ("SCTP", 132)];
const PORT_NAMES: [&str; 3] = ["http", "dns", "web"];
const PORTS: std::ops::Range<u16> = 78..86;

/// The sequence of Steele and others' SplitMix64: small, and the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    fn port(&mut self) -> u16 {
        PORTS.start + self.below(PORTS.len()) as u16
    }

    pub fn labels(&mut self) -> Labels {
        let mut labels = Vec::new();
        for name in ["x", "y"] {
            if !self.one_in(3) {
                labels.push((name.to_owned(), (*self.pick(&["1", "2", ""])).to_owned()));
            }
        }
        labels
    }

    pub fn named_ports(&mut self) -> Vec<PortModel> {
        (0..self.below(4))
            .map(|_| PortModel {
                name: (*self.pick(&PORT_NAMES)).into(),
                protocol: self.pick(&PROTOCOLS).0.into(),
                number: self.port(),
                of_sidecar: self.one_in(3),
            })
            .collect()
    }
}

/// Addresses that no other pod has or had.
pub fn addresses(world: &mut World, is_local: bool) -> Vec<IpAddr> {
    world.made += 1;
    let (node, pod) = (if is_local { 1 } else { 2 }, world.made);
    vec![
        Ipv4Addr::new(10, 0, node, pod).into(),
        Ipv6Addr::new(0xfd00, 0, 0, node.into(), 0, 0, 0, pod.into()).into(),
    ]
}

/// Labels of a pod, among them the one that a StatefulSet gives.
pub fn pod_labels(name: &str, random: &mut Random) -> Labels {
    let mut labels = random.labels();
    labels.push(("statefulset.kubernetes.io/pod-name".into(), name.into()));
    labels
}

pub fn pod(world: &mut World, random: &mut Random) -> PodModel {
    let is_local = !random.one_in(3);
    let addresses = addresses(world, is_local);
    let name = format!("p{}", world.made);
    PodModel {
        namespace: (*random.pick(&NAMESPACES)).into(),
        labels: pod_labels(&name, random),
        name,
        addresses,
        ports: random.named_ports(),
        is_local,
        tells_addresses: !is_local || random.one_in(2),
    }
}

fn selector(random: &mut Random, names_pods: bool) -> Value {
    let mut selector = json!({});
    let set = |random: &mut Random, key: &str| -> Value {
        let values: Vec<_> = (0..=random.below(2))
            .map(|_| *random.pick(&["1", "2", ""]))
            .collect();
        match random.below(4) {
            0 => json!({ "key": key, "operator": "In", "values": values }),
            1 => json!({ "key": key, "operator": "NotIn", "values": values }),
            2 => json!({ "key": key, "operator": "Exists" }),
            _ => json!({ "key": key, "operator": "DoesNotExist", "values": [] }),
        }
    };
    if random.one_in(2) {
        let name = *random.pick(&["x", "y"]);
        selector["matchLabels"] = json!({ name: *random.pick(&["1", "2"]) });
    }
    if random.one_in(3) {
        let name = *random.pick(&["x", "y"]);
        selector["matchExpressions"] = json!([set(random, name)]);
    }
    if names_pods && random.one_in(8) {
        let name = format!("p{}", random.below(8) + 1);
        let operator = *random.pick(&["In", "NotIn"]);
        selector["matchExpressions"] = json!([{
            "key": "statefulset.kubernetes.io/pod-name", "operator": operator, "values": [name]
        }]);
    }
    if !names_pods && random.one_in(4) {
        let name = *random.pick(&NAMESPACES);
        selector["matchLabels"] = json!({ "kubernetes.io/metadata.name": name });
    }
    selector
}

fn block(random: &mut Random) -> Value {
    let blocks = [
        json!({ "cidr": "0.0.0.0/0" }),
        json!({ "cidr": "::/0" }),
        json!({ "cidr": "10.0.0.0/8", "except": ["10.0.1.0/24"] }),
        json!({ "cidr": "10.0.1.0/24", "except": ["10.0.1.2/32", "10.0.1.4/30"] }),
        json!({ "cidr": "10.0.2.1/16", "except": [] }),
        json!({ "cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "198.51.100.0/25"] }),
        json!({ "cidr": "198.51.100.0/24" }),
        json!({ "cidr": "192.168.0.0/24", "except": ["192.168.0.2/32"] }),
        json!({ "cidr": "fd00::/16", "except": ["fd00:0:0:1::/64"] }),
        json!({ "cidr": "fd00:0:0:1::4/126" }),
    ];
    json!({ "ipBlock": random.pick(&blocks) })
}

fn peer(random: &mut Random) -> Value {
    match random.below(4) {
        0 => block(random),
        1 => json!({ "podSelector": selector(random, true) }),
        2 => json!({ "namespaceSelector": selector(random, false) }),
        _ => json!({
            "namespaceSelector": selector(random, false), "podSelector": selector(random, true)
        }),
    }
}

fn port(random: &mut Random) -> Value {
    let mut port = json!({});
    if random.one_in(2) {
        port["protocol"] = json!(random.pick(&PROTOCOLS).0);
    }
    match random.below(5) {
        0 => {}
        1 => port["port"] = json!(random.pick(&PORT_NAMES)),
        2 => {
            let first = random.port();
            port["port"] = json!(first);
            port["endPort"] = json!(first + random.below(6) as u16);
        }
        _ => port["port"] = json!(random.port()),
    }
    port
}

fn rule(random: &mut Random, peers: &str) -> Value {
    let mut rule = json!({});
    if !random.one_in(5) {
        let list: Vec<_> = (0..random.below(3)).map(|_| peer(random)).collect();
        rule[peers] = json!(list);
    }
    if !random.one_in(3) {
        let list: Vec<_> = (0..random.below(3)).map(|_| port(random)).collect();
        rule["ports"] = json!(list);
    }
    rule
}

pub fn policy(random: &mut Random) -> Value {
    let mut spec = json!({});
    // A missing selector is an empty one.
    if !random.one_in(6) {
        spec["podSelector"] = selector(random, true);
    }
    if !random.one_in(3) {
        let list: Vec<_> = (0..random.below(3)).map(|_| rule(random, "from")).collect();
        spec["ingress"] = json!(list);
    }
    if !random.one_in(3) {
        let list: Vec<_> = (0..random.below(3)).map(|_| rule(random, "to")).collect();
        spec["egress"] = json!(list);
    }
    match random.below(5) {
        0 => spec["policyTypes"] = json!(["Ingress"]),
        1 => spec["policyTypes"] = json!(["Egress"]),
        2 => spec["policyTypes"] = json!(["Egress", "Ingress"]),
        3 => spec["policyTypes"] = json!([]),
        _ => {}
    }
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {
            "namespace": random.pick(&NAMESPACES), "name": format!("np{}", random.below(6)),
        },
        "spec": spec,
    })
}

/// A flow of a pod on this node, by the pod's place; `None` when there is no such pod.
pub fn flow(world: &World, random: &mut Random) -> Option<(usize, Side, Flow)> {
    let local: Vec<_> = (0..world.model.pods.len())
        .filter(|&pod| world.model.pods[pod].is_local)
        .collect();
    if local.is_empty() {
        return None;
    }
    let pod = *random.pick(&local);
    let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
    let (peer, addresses) = match random.below(8) {
        0 => (PeerKind::OwnNode, vec![ip("192.168.0.1"), ip("fd77::1")]),
        1 => (PeerKind::OtherNode, vec![ip("192.168.0.2"), ip("fd77::2")]),
        2 => {
            let outside = ["198.51.100.7", "198.51.100.200", "10.0.1.99", "2001:db8::1"];
            let address = random.pick(&outside);
            (PeerKind::World, vec![ip(address)])
        }
        _ => {
            let index = random.below(world.model.pods.len());
            (
                PeerKind::Pod(index),
                world.model.pods[index].addresses.clone(),
            )
        }
    };
    let protocol = match random.below(7) {
        0 => 1,
        other => PROTOCOLS[other % 3].1,
    };
    let flow = Flow {
        peer,
        address: *random.pick(&addresses),
        protocol,
        port: random.port(),
    };
    Some((pod, *random.pick(&SIDES), flow))
}
