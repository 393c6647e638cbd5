//! Network policies: the look-up among few and many rules, which must cost the same; and what
//! compiling a large cluster's policies costs, at once and for one change.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use skein_cni::agent::{Attachment, PodRef};
use skein_control::compile::policy::Policies;
use skein_control::identity::LabelSet;
use skein_control::mac::MacAddr;
use skein_control::policy::{
    NetworkPolicy, Operator, Peer, PolicyKey, Port, PortNumber, Requirement, Rule, Selector,
};
use skein_control::state::{
    Change, ClusterState, Endpoint, Namespace, Object, ObjectKey, Pod, PodKey,
};
use skein_dataplane::ids::IdentityId;
use skein_dataplane::policy::{EndpointPolicy, PeerOf, Side};
use skein_dataplane::snapshot::{PortProtocol, PortRange, Prefix, RuleId, RulePorts, RulesBuilder};
use skein_dataplane::wire::protocol::TCP;

const NAMESPACES: u32 = 100;
const PODS: u32 = 50_000;
const POLICIES: u32 = 5_000;
/// Different sets of labels in a namespace.
const APPS: u32 = 50;
/// Pods of this node.
const LOCAL: u32 = 110;

fn address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + number).into()
}

fn identity(number: u32) -> IdentityId {
    IdentityId::new(IdentityId::FIRST_DYNAMIC + number).expect("few enough")
}

fn only(port: u32) -> Arc<RulePorts> {
    let port = PortRange::port(PortProtocol::Tcp, port as u16);
    Arc::new(RulePorts::Only(vec![port]))
}

/// So many rules: a third name identities, a third ranges, a third single addresses.
fn policy(rules: u32) -> EndpointPolicy {
    let mut builder = RulesBuilder::default();
    for number in 0..rules {
        let (rule, ports) = (RuleId(number), only(number % 50_000));
        match number % 3 {
            0 => builder.identity(identity(number), rule, &ports),
            1 => {
                let range = Prefix::new(address(number << 4), 28).expect("of IPv4");
                builder.block(range, Vec::new(), rule, &ports);
            }
            _ => builder.address(address(number << 4), rule, &ports),
        }
    }
    EndpointPolicy {
        ingress: Some(Arc::new(builder.finish())),
        ..EndpointPolicy::OPEN
    }
}

fn look_up(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("policy look-up");
    for rules in [10, 1_000, 100_000] {
        let policy = policy(rules);
        let mut judge = |name: &str, wrong: u32| {
            let mut number = 0;
            group.bench_function(BenchmarkId::new(name, rules), |bencher| {
                bencher.iter(|| {
                    // Around the rules by a step that has no factor in common with them.
                    number = (number + 7919) % rules;
                    let peer = PeerOf {
                        identity: identity(number),
                        address: address(number << 4),
                    };
                    let port = (number % 50_000 + wrong) as u16;
                    policy.judge(Side::Ingress, black_box(peer), TCP, port)
                });
            });
        };
        judge("allowed", 0);
        judge("denied", 1);
    }
    group.finish();
}

fn labels(pairs: &[(&str, String)]) -> BTreeMap<String, String> {
    (pairs.iter())
        .map(|(name, value)| ((*name).to_owned(), value.clone()))
        .collect()
}

fn namespace(number: u32) -> String {
    format!("ns{}", number % NAMESPACES)
}

fn pod(number: u32, app: u32) -> Pod {
    Pod {
        key: PodKey {
            namespace: namespace(number),
            name: format!("p{number}"),
        },
        labels: labels(&[("app", format!("a{app}"))]),
        service_account: "default".into(),
        ips: vec![address(number)],
        ..Pod::default()
    }
}

fn app(number: u32) -> Selector {
    Selector::new(vec![Requirement {
        label: "app".into(),
        operator: Operator::In([format!("a{}", number % APPS)].into()),
    }])
}

/// One app of a namespace takes a port from another, and from a third one of half of all
/// namespaces.
fn network_policy(number: u32, port: u16) -> NetworkPolicy {
    let of = number / NAMESPACES;
    let team = Requirement {
        label: "team".into(),
        operator: Operator::In(["t0".to_owned()].into()),
    };
    let peers = vec![
        Peer::Pods {
            namespaces: None,
            pods: Some(app(of + 1)),
        },
        Peer::Pods {
            namespaces: Some(Selector::new(vec![team])),
            pods: Some(app(of + 2)),
        },
    ];
    let ports = vec![Port {
        protocol: PortProtocol::Tcp,
        number: PortNumber::Range(port, port),
    }];
    NetworkPolicy {
        key: PolicyKey {
            namespace: namespace(number),
            name: format!("np{number}"),
        },
        pods: app(of),
        ingress: Some(vec![Rule { peers, ports }]),
        egress: None,
    }
}

fn endpoint(number: u32) -> Endpoint {
    Endpoint {
        attachment: Attachment {
            container_id: format!("c{number}"),
            ifname: "eth0".into(),
        },
        network: "skein".into(),
        netns: String::new(),
        pod: Some(PodRef {
            namespace: namespace(number),
            name: format!("p{number}"),
            uid: String::new(),
        }),
        ips: vec![address(number)],
        host_ifname: String::new(),
        pod_mac: MacAddr::ZERO,
        host_mac: MacAddr::ZERO,
        device_mtu: 1450,
        route_mtu: 1450,
        queues: 1,
        full_checksums: false,
        ifindex: Some(number),
    }
}

/// A cluster, and the identities of its pods.
struct Cluster {
    state: ClusterState,
    identities: BTreeMap<PodKey, IdentityId>,
    numbers: HashMap<LabelSet, IdentityId>,
    keys: BTreeSet<ObjectKey>,
}

impl Cluster {
    fn new() -> Self {
        let mut cluster = Self {
            state: ClusterState::default(),
            identities: BTreeMap::new(),
            numbers: HashMap::new(),
            keys: BTreeSet::new(),
        };
        for number in 0..NAMESPACES {
            cluster.put(Object::Namespace(Namespace {
                name: namespace(number),
                labels: labels(&[("team", format!("t{}", number % 2))]),
            }));
        }
        for number in 0..PODS {
            cluster.put_pod(pod(number, number / NAMESPACES % APPS));
        }
        for number in 0..POLICIES {
            cluster.put(Object::NetworkPolicy(network_policy(number, 80)));
        }
        for number in 0..LOCAL {
            cluster.state.set_endpoint(endpoint(number));
        }
        cluster
    }

    fn put(&mut self, object: Object) -> ObjectKey {
        let key = object.key();
        self.keys.insert(key.clone());
        self.state.apply(Change::Set(object));
        key
    }

    fn put_pod(&mut self, pod: Pod) -> ObjectKey {
        let labels = LabelSet::of_pod(&pod, self.state.namespace(&pod.key.namespace));
        let next = identity(self.numbers.len() as u32);
        let id = *self.numbers.entry(labels).or_insert(next);
        self.identities.insert(pod.key.clone(), id);
        self.put(Object::Pod(pod))
    }

    fn compile(&self, policies: &mut Policies, changed: &BTreeSet<ObjectKey>) -> usize {
        policies.update(&self.state, &self.identities, changed);
        policies.endpoints(&self.state).len()
    }
}

/// Memory of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    4096 * pages.unwrap_or(0u64)
}

fn compile(criterion: &mut Criterion) {
    let mut cluster = Cluster::new();
    let before = resident();
    let mut policies = Policies::default();
    cluster.compile(&mut policies, &cluster.keys);
    println!(
        "{POLICIES} policies over {PODS} pods, {LOCAL} of them here: {} KiB of memory",
        (resident() - before) / 1024
    );
    let mut group = criterion.benchmark_group("policy compile");
    group.sample_size(10);
    group.bench_function("all", |bencher| {
        bencher.iter(|| {
            let mut policies = Policies::default();
            cluster.compile(&mut policies, &cluster.keys)
        });
    });
    let mut turn = 0;
    group.bench_function("a pod's labels", |bencher| {
        bencher.iter(|| {
            turn += 1;
            let key = cluster.put_pod(pod(PODS - 1, turn % APPS));
            cluster.compile(&mut policies, &[key].into())
        });
    });
    group.bench_function("a pod's labels, a new identity", |bencher| {
        bencher.iter(|| {
            turn += 1;
            let key = cluster.put_pod(pod(PODS - 1, APPS + turn));
            cluster.compile(&mut policies, &[key].into())
        });
    });
    group.bench_function("a policy", |bencher| {
        bencher.iter(|| {
            turn += 1;
            let policy = network_policy(0, (turn % 60_000) as u16 + 1);
            let key = cluster.put(Object::NetworkPolicy(policy));
            cluster.compile(&mut policies, &[key].into())
        });
    });
    group.finish();
}

criterion_group!(benches, look_up, compile);
criterion_main!(benches);
