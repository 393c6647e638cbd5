//! Network policies with real pods: three namespaces of three pods on two nodes, all of whom ask
//! all on two ports over TCP and UDP, IPv4 and IPv6, in one case after another. Who answers is
//! compared with the oracle that the compiled tables are held against; who does not has left a
//! drop of a policy's behind.

mod common;
#[path = "../../control/tests/policy_oracle/oracle.rs"]
#[expect(dead_code, reason = "the tests of the tables ask it for more")]
mod oracle;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::Cluster;
use oracle::{Direction, Flow, Model, PeerKind, PodModel, PortModel};
use serde_json::{Value, json};
use skein_perf::cmd::Running;
use skein_perf::probe::reach::{Protocol, Target};
use skein_perf::{AgentOptions, LabOptions, Pod, check};

const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const PODS: [&str; 3] = ["a", "b", "c"];
const PORTS: [u16; 2] = [80, 81];

/// How long an answer may take: nobody's promise, a busy machine's patience.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long a policy may take until every worker has it.
const IN_FORCE: Duration = Duration::from_secs(30);

struct Stage {
    cluster: Cluster,
    model: Model,
    /// In the order of the model's pods.
    pods: Vec<Pod>,
    _servers: Vec<Running>,
}

/// Pods `a`, `b` and `c` of `x`, `y` and `z`, each pod on another node than the one before, and
/// a server in each.
fn stage() -> Stage {
    let mut cluster = Cluster::bare(&LabOptions::default());
    for number in [1, 2] {
        cluster.start_agent(number, &AgentOptions::default());
    }
    cluster
        .lab
        .wait_for_peers()
        .expect("nodes that know each other");
    let mut model = Model::default();
    let mut pods = Vec::new();
    let mut servers = Vec::new();
    for namespace in NAMESPACES {
        let labels = vec![("ns".to_owned(), namespace.to_owned())];
        let manifest = json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": namespace, "labels": { "ns": namespace } },
        });
        let file = format!("namespace-{namespace}");
        cluster.lab.apply(&file, &manifest).unwrap();
        model.namespaces.insert(namespace.to_owned(), labels);
        for name in PODS {
            let labels = BTreeMap::from([("pod".to_owned(), name.to_owned())]);
            let node = cluster.lab.node(pods.len() % 2 + 1);
            let pod = node.add_pod(namespace, name, &labels).expect("CNI ADD");
            servers.push(check::answer(pod.netns(), &PORTS).unwrap());
            model.pods.push(PodModel {
                namespace: namespace.into(),
                name: name.into(),
                labels: labels.into_iter().collect(),
                addresses: pod.info().ips.clone(),
                ports: Vec::<PortModel>::new(),
                is_local: true,
                tells_addresses: true,
            });
            pods.push(pod);
        }
    }
    Stage {
        cluster,
        model,
        pods,
        _servers: servers,
    }
}

impl Stage {
    /// Puts these policies in the place of those before, and waits until the workers have them.
    fn set(&mut self, policies: &[Value]) {
        let before = std::mem::take(&mut self.model.policies);
        for (_, name) in before.keys() {
            self.cluster.lab.withdraw(name).unwrap();
        }
        for policy in policies {
            let text = |field: &str| policy["metadata"][field].as_str().unwrap().to_owned();
            self.cluster.lab.apply(&text("name"), policy).unwrap();
            let key = (text("namespace"), text("name"));
            self.model.policies.insert(key, policy.clone());
        }
        let start = Instant::now();
        while !self.in_force() {
            assert!(start.elapsed() < IN_FORCE, "policies are not in force");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Whether each node has as many policies as there are, those that there are apply to pods,
    /// and the workers have the tables of after that.
    fn in_force(&self) -> bool {
        let nodes = self.cluster.lab.nodes();
        let count = |page: &str| -> Option<usize> {
            let mut lines = page.lines();
            let line = lines.find_map(|line| line.strip_prefix("skein_policies "))?;
            line.parse().ok()
        };
        let all = nodes.iter().all(|node| {
            let page = node.view("metrics").unwrap();
            count(page["text"].as_str().unwrap()) == Some(self.model.policies.len())
        });
        // A node names those that apply to its own pods.
        let views: Vec<String> = (nodes.iter())
            .map(|node| node.view("policies").unwrap()["pods"].to_string())
            .collect();
        let named = (self.model.policies.keys()).all(|(namespace, name)| {
            let policy = format!("\"{namespace}/{name}\"");
            views.iter().any(|view| view.contains(&policy))
        });
        // Tables follow the state within a tenth of a second.
        std::thread::sleep(Duration::from_millis(200));
        all && named
            && nodes.iter().all(|node| {
                let status = node.view("status").unwrap();
                status["generation"] == status["acknowledged"]
            })
    }

    /// Packets that policies have stopped.
    fn denied(&self) -> u64 {
        let nodes = self.cluster.lab.nodes().iter();
        nodes
            .map(|node| {
                let view = node.view("drops").unwrap();
                let drops = view["drops"].as_array().unwrap().iter();
                drops
                    .filter(|drop| {
                        drop["reason"]
                            .as_str()
                            .unwrap()
                            .starts_with("policy_denied_")
                    })
                    .map(|drop| drop["count"].as_u64().unwrap())
                    .sum::<u64>()
            })
            .sum()
    }

    /// Lets all ask all, compares, and returns how many were denied.
    fn probe(&self, case: &str) -> u64 {
        let before = self.denied();
        let pods = &self.pods;
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..pods.len())
                .map(|from| scope.spawn(move || (from, ask(pods, from))))
                .collect();
            asking
                .into_iter()
                .map(|asking| asking.join().unwrap())
                .collect()
        });
        let mut denied = 0;
        for (from, answers) in answers {
            for (to, target, reached) in answers {
                let expected = self.expected(from, to, target);
                let (from, to) = (self.pods[from].full_name(), self.pods[to].full_name());
                let policies: Vec<_> = self.model.policies.values().collect();
                assert_eq!(
                    reached, expected,
                    "{case}: {from} to {to} at {target}: {policies:#?}"
                );
                denied += u64::from(!expected);
            }
        }
        let dropped = self.denied() - before;
        assert!(
            dropped >= denied && (dropped == 0) == (denied == 0),
            "{case}: {denied} denied, policies dropped {dropped}"
        );
        denied
    }

    fn expected(&self, from: usize, to: usize, target: Target) -> bool {
        let address = target.address.ip();
        let flow = |peer, address| Flow {
            peer: PeerKind::Pod(peer),
            address,
            protocol: match target.protocol {
                Protocol::Tcp => 6,
                Protocol::Udp => 17,
            },
            port: target.address.port(),
        };
        let own = self.pods[from].ip(address.is_ipv6()).unwrap();
        (self.model).allows(from, Direction::Out, &flow(to, address))
            && (self.model).allows(to, Direction::In, &flow(from, own))
    }
}

/// What a pod reaches of what it asks.
fn ask(pods: &[Pod], from: usize) -> Vec<(usize, Target, bool)> {
    let mut targets = Vec::new();
    for (to, pod) in pods.iter().enumerate().filter(|&(to, _)| to != from) {
        for (v6, port) in [(false, 80), (false, 81), (true, 80), (true, 81)] {
            let address = (pod.ip(v6).unwrap(), port).into();
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                targets.push((to, Target { protocol, address }));
            }
        }
    }
    let all: Vec<Target> = targets.iter().map(|&(_, target)| target).collect();
    let reached = check::reach(pods[from].netns(), &all, PATIENCE).unwrap();
    (targets.into_iter())
        .map(|(to, target)| (to, target, reached.0[&target.to_string()]))
        .collect()
}

fn policy(name: &str, namespace: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": name, "namespace": namespace }, "spec": spec,
    })
}

/// Whom a rule may mean: each kind of peer, alone and together.
fn peers(model: &Model) -> Vec<Value> {
    let pod = |name: &str| json!({ "podSelector": { "matchLabels": { "pod": name } } });
    let namespace = |name: &str| json!({ "namespaceSelector": { "matchLabels": { "ns": name } } });
    let both = json!({
        "namespaceSelector": { "matchExpressions": [
            { "key": "ns", "operator": "NotIn", "values": ["x"] }
        ] },
        "podSelector": { "matchExpressions": [
            { "key": "pod", "operator": "In", "values": ["a", "c"] }
        ] },
    });
    let one = format!("{}/32", model.pods[3].addresses[0]);
    let one_v6 = format!("{}/128", model.pods[3].addresses[1]);
    vec![
        json!([]),
        json!([pod("b")]),
        json!([{ "podSelector": {} }]),
        json!([{ "namespaceSelector": {} }]),
        json!([namespace("y"), pod("c")]),
        json!([both]),
        json!([{ "namespaceSelector": { "matchLabels": {
            "kubernetes.io/metadata.name": "z"
        } } }]),
        json!([{ "ipBlock": { "cidr": "0.0.0.0/0", "except": [one] } }, { "ipBlock": {
            "cidr": one_v6
        } }]),
    ]
}

fn ports() -> [Value; 4] {
    [
        json!([]),
        json!([{ "port": 80 }]),
        json!([{ "protocol": "UDP", "port": 81 }, { "protocol": "TCP", "port": 81 }]),
        json!([{ "protocol": "UDP" }, { "port": 80, "endPort": 90 }]),
    ]
}

#[test]
fn who_reaches_whom_is_what_the_policies_say() {
    let mut stage = stage();
    assert_eq!(stage.probe("no policy"), 0);
    let mut cases = Vec::new();
    for (which, peers) in peers(&stage.model).into_iter().enumerate() {
        for (what, ports) in ports().into_iter().enumerate() {
            let name = format!("p{which}-{what}");
            let rule = |field: &str| json!([{ field: peers, "ports": ports }]);
            let selected = json!({ "matchLabels": { "pod": "a" } });
            let ingress = json!({ "podSelector": selected, "ingress": rule("from") });
            cases.push(vec![policy(&format!("in-{name}"), "x", &ingress)]);
            let egress = json!({
                "podSelector": {}, "policyTypes": ["Egress"], "egress": rule("to")
            });
            cases.push(vec![policy(&format!("out-{name}"), "x", &egress)]);
        }
    }
    // Several add up, also those of both ends.
    let deny = json!({ "podSelector": {}, "policyTypes": ["Ingress", "Egress"] });
    let both = json!({
        "podSelector": { "matchLabels": { "pod": "a" } },
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{ "from": [{ "podSelector": {} }], "ports": [{ "port": 80 }] }],
        "egress": [{ "to": [{ "namespaceSelector": {} }] }],
    });
    cases.push(vec![policy("deny", "x", &deny)]);
    cases.push(vec![policy("deny", "x", &deny), policy("both", "x", &both)]);
    cases.push(vec![
        policy("both-x", "x", &both),
        policy("both-y", "y", &both),
    ]);
    assert!(cases.len() >= 60);
    let mut denied = 0;
    for case in cases {
        let names: Vec<_> = (case.iter())
            .map(|policy| policy["metadata"]["name"].to_string())
            .collect();
        stage.set(&case);
        denied += stage.probe(&names.join(", "));
    }
    assert!(denied > 1000, "{denied}");
    stage.set(&[]);
    assert_eq!(stage.probe("no policy any more"), 0);
    drop(stage._servers);
    stage.cluster.pods = stage.pods;
    stage.cluster.finish();
}
