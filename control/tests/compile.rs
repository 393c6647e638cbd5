//! Cluster states and the tables that must come of them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;
use skein_cni::agent::{Attachment, PodRef};
use skein_control::compile::{
    Compiled, HostPlaced, Inputs, Placed, UplinkLink, compile, compile_endpoints,
};
use skein_control::neighbour::Underlay;
use skein_control::state::{Change, ClusterState, Endpoint, Node, Object, Phase, Pod, PodKey};
use skein_dataplane::ids::{EndpointId, IdentityId, LinkId, PeerId, WorkerId};
use skein_dataplane::policy::EndpointPolicy;
use skein_dataplane::snapshot::{self, Masquerade, Snapshot};
use skein_dataplane::wire::ethernet::MacAddr;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A cluster in the making, seen from node `n1`.
#[derive(Default)]
struct World {
    state: ClusterState,
    identities: BTreeMap<PodKey, IdentityId>,
    peers: BTreeMap<String, PeerId>,
    uplinks: Vec<UplinkLink>,
    host: Option<HostPlaced>,
    placed: BTreeMap<Attachment, Placed>,
    policies: BTreeMap<Attachment, EndpointPolicy>,
}

impl World {
    fn node(&mut self, n: u32, ips: &[&str], ranges: &[&str]) {
        let name = format!("n{n}");
        self.peers.insert(name.clone(), PeerId(n));
        self.state.apply(Change::Set(Object::Node(Node {
            name,
            internal_ips: ips.iter().map(|text| ip(text)).collect(),
            pod_cidrs: ranges.iter().map(|text| text.parse().unwrap()).collect(),
            ..Node::default()
        })));
    }

    fn pod(&mut self, name: &str, node: u32, ips: &[&str], change: impl FnOnce(&mut Pod)) {
        let key = PodKey {
            namespace: "d".into(),
            name: name.into(),
        };
        let number = 300 + self.identities.len() as u32;
        let identity = IdentityId::new(number).unwrap();
        self.identities.insert(key.clone(), identity);
        let mut pod = Pod {
            key,
            uid: format!("uid-{name}"),
            node_name: format!("n{node}"),
            ips: ips.iter().map(|text| ip(text)).collect(),
            ..Pod::default()
        };
        change(&mut pod);
        self.state.apply(Change::Set(Object::Pod(pod)));
    }

    fn endpoint(&mut self, n: u32, address: &str, pod: Option<&str>) -> Attachment {
        let attachment = Attachment {
            container_id: format!("c{n}"),
            ifname: "eth0".into(),
        };
        let placed = Placed {
            id: EndpointId(n),
            link: LinkId(n),
            worker: WorkerId(0),
        };
        self.placed.insert(attachment.clone(), placed);
        self.state.set_endpoint(Endpoint {
            network: "skein".into(),
            attachment: attachment.clone(),
            netns: "/n".into(),
            pod: pod.map(|name| PodRef {
                namespace: "d".into(),
                name: name.into(),
                uid: format!("uid-{name}"),
            }),
            ips: vec![ip(address)],
            host_ifname: format!("sk{n}"),
            pod_mac: MacAddr([2, 0, 0, 0, 0, n as u8]),
            host_mac: MacAddr([2, 0, 0, 0, 1, n as u8]),
            device_mtu: 65_535,
            route_mtu: 1450,
            full_checksums: false,
            queues: 1,
            ifindex: Some(n),
        });
        attachment
    }

    fn compile(&self, last: &Snapshot) -> Compiled {
        self.compile_with(compile, last)
    }

    fn compile_with(
        &self,
        how: fn(&Snapshot, &Inputs<'_>) -> Compiled,
        last: &Snapshot,
    ) -> Compiled {
        how(
            last,
            &Inputs {
                node: "n1",
                overlay_port: 8472,
                overlay_mtu: 0,
                state: &self.state,
                identities: &self.identities,
                underlay: &Underlay::default(),
                masquerade: &Masquerade::default(),
                peers: &self.peers,
                uplinks: &self.uplinks,
                host: self.host,
                placed: &self.placed,
                policies: &self.policies,
            },
        )
    }

    fn tables(&self) -> Snapshot {
        let compiled = self.compile(&empty());
        assert_eq!(compiled.faults, Vec::<String>::new());
        compiled.tables
    }
}

fn empty() -> Snapshot {
    Snapshot::empty(snapshot::Node {
        router_mac: MacAddr::ZERO,
        overlay_port: 0,
        addresses: vec![],
        pod_prefixes: vec![],
    })
}

/// Two nodes; one pod here, one there.
fn small() -> World {
    let mut world = World::default();
    world.node(1, &["192.0.2.1", "2001:db8::1"], &["10.1.1.0/24"]);
    world.node(2, &["192.0.2.2"], &["10.1.2.0/24"]);
    world.pod("here", 1, &[], |_| {});
    world.pod("there", 2, &["10.1.2.5"], |_| {});
    world.endpoint(1, "10.1.1.2", Some("here"));
    world
}

#[test]
fn pods_here_and_there_are_found() {
    let tables = small().tables();
    assert_eq!(tables.node().overlay_port, 8472);
    assert_eq!(tables.node().router_mac.to_string(), "02:53:c0:00:02:01");
    let local = tables.local(ip("10.1.1.2")).unwrap();
    assert_eq!(local.identity.number(), 300);
    let remote = tables.remote_pod(ip("10.1.2.5")).unwrap();
    assert_eq!((remote.peer, remote.identity.number()), (PeerId(2), 301));
    assert_eq!(tables.peer_of(ip("10.1.2.200")), Some(PeerId(2)));
    assert_eq!(tables.peer_by_address(ip("192.0.2.2")), Some(PeerId(2)));
    // The kernel was not asked about it: known, but not reached.
    assert_eq!(tables.peer(PeerId(2)).unwrap().hop, None);
}

#[test]
fn the_host_has_the_nodes_own_addresses() {
    let mut world = small();
    assert!(world.tables().host().is_none());
    let placed = HostPlaced {
        link: LinkId(50),
        worker: WorkerId(1),
        mac: MacAddr([2, 0, 0, 0, 9, 1]),
        gateway_mac: MacAddr([2, 0, 0, 0, 9, 2]),
        mtu: 1450,
    };
    world.host = Some(placed);
    let tables = world.tables();
    let host = tables.host().unwrap();
    assert_eq!(host.addresses, [ip("192.0.2.1"), ip("2001:db8::1")]);
    assert_eq!((host.identity, host.link), (IdentityId::HOST, placed.link));
    // Adding a pod leaves it alone; a link that closes takes it away.
    let attachment = world.endpoint(2, "10.1.1.3", None);
    let next = world.compile_with(compile_endpoints, &tables).tables;
    assert_eq!(next.host(), tables.host());
    assert!(next.local(ip("10.1.1.3")).is_some(), "{attachment:?}");
    world.host = None;
    assert!(world.compile(&next).tables.host().is_none());
}

#[test]
fn an_endpoint_is_complete_once_its_very_pod_is_known() {
    let mut world = small();
    let attachment = world.endpoint(2, "10.1.1.3", Some("late"));
    let compiled = world.compile(&empty());
    assert!(!compiled.complete.contains(&attachment));
    let local = compiled.tables.local(ip("10.1.1.3")).unwrap();
    assert_eq!(local.identity, IdentityId::UNMANAGED);
    world.pod("late", 1, &[], |pod| pod.uid = "another".into());
    assert!(!world.compile(&empty()).complete.contains(&attachment));
    world.pod("late", 1, &[], |_| {});
    let compiled = world.compile(&empty());
    assert!(compiled.complete.contains(&attachment));
    let known = compiled.tables.local(ip("10.1.1.3")).unwrap().identity;
    assert_ne!(known, IdentityId::UNMANAGED);
    // The pod's object goes before the endpoint: it keeps what it was.
    let key = PodKey {
        namespace: "d".into(),
        name: "late".into(),
    };
    world.state.apply(Change::Remove(
        Object::Pod(Pod {
            key,
            ..Pod::default()
        })
        .key(),
    ));
    let after = world.compile(&compiled.tables).tables;
    assert_eq!(after.local(ip("10.1.1.3")).unwrap().identity, known);
    // What was never a pod's need not wait.
    let plain = world.endpoint(3, "10.1.1.4", None);
    assert!(world.compile(&empty()).complete.contains(&plain));
}

#[test]
fn pods_without_addresses_of_their_own_are_left_out() {
    let mut world = small();
    world.pod("host", 2, &["192.0.2.2"], |pod| pod.host_network = true);
    world.pod("done", 2, &["10.1.2.6"], |pod| pod.phase = Phase::Ended);
    world.pod("nowhere", 9, &["10.1.2.7"], |_| {});
    world.pod("mine", 1, &["10.1.1.77"], |_| {});
    assert_eq!(world.tables().remote_pods().count(), 1);
}

#[test]
fn contradictions_are_settled_and_said() {
    let mut world = small();
    world.node(
        3,
        &["192.0.2.2", "192.0.2.3"],
        &["10.1.2.128/25", "10.1.3.0/24"],
    );
    world.pod("twin", 2, &["10.1.2.5"], |_| {});
    world.pod("thief", 2, &["10.1.1.2"], |_| {});
    let compiled = world.compile(&empty());
    let said = compiled.faults.join("\n");
    for part in [
        "node n3: InternalIP 192.0.2.2 is node n2's too",
        "node n3: podCIDR 10.1.2.128/25 overlaps 10.1.2.0/24 of node n2",
        "pod d/twin: its address 10.1.2.5 is another pod's",
        "pod d/thief on node n2: its address 10.1.1.2 is a pod's on this node",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(compiled.faults.len(), 4);
    let tables = compiled.tables;
    assert_eq!(tables.peer_by_address(ip("192.0.2.2")), Some(PeerId(2)));
    assert_eq!(tables.peer_by_address(ip("192.0.2.3")), Some(PeerId(3)));
    assert_eq!(tables.peer_of(ip("10.1.2.200")), Some(PeerId(2)));
    assert!(tables.local(ip("10.1.1.2")).is_some());
}

#[test]
fn ranges_and_pods_move_between_nodes_in_one_step() {
    let mut world = small();
    world.node(3, &["192.0.2.3"], &["10.1.3.0/24"]);
    let before = world.tables();
    // n2 and n3 swap ranges and addresses, a pod moves along; then n2 goes.
    world.node(2, &["192.0.2.3"], &["10.1.3.0/24"]);
    world.node(3, &["192.0.2.2"], &["10.1.2.0/24"]);
    world.pod("there", 3, &["10.1.2.5"], |_| {});
    let swapped = world.compile(&before);
    assert_eq!(swapped.faults, Vec::<String>::new());
    assert_eq!(swapped.tables.peer_of(ip("10.1.2.9")), Some(PeerId(3)));
    assert_eq!(swapped.tables.peer_of(ip("10.1.3.9")), Some(PeerId(2)));
    let node = Node {
        name: "n2".into(),
        ..Node::default()
    };
    world.state.apply(Change::Remove(Object::Node(node).key()));
    let gone = world.compile(&swapped.tables);
    assert_eq!(gone.faults, Vec::<String>::new());
    assert!(gone.tables.peer(PeerId(2)).is_none());
    assert!(gone.tables.remote_pod(ip("10.1.2.5")).is_some());
    // An address that was a pod's elsewhere becomes one of ours.
    world.endpoint(7, "10.1.2.5", None);
    world.pod("there", 3, &[], |_| {});
    let ours = world.compile(&gone.tables);
    assert_eq!(ours.faults, Vec::<String>::new());
    assert!(ours.tables.local(ip("10.1.2.5")).is_some());
}

#[test]
fn uplink_queues_come_and_go() {
    let mut world = small();
    let queue = |link, worker| UplinkLink {
        link: LinkId(link),
        worker: WorkerId(worker),
        uplink: 0,
    };
    world.uplinks = vec![queue(10, 0), queue(11, 1)];
    let tables = world.tables();
    assert_eq!(tables.uplink_links(0), [LinkId(10), LinkId(11)]);
    world.uplinks = vec![queue(11, 1), queue(12, 0)];
    let tables = world.compile(&tables).tables;
    assert_eq!(tables.uplink_links(0), [LinkId(11), LinkId(12)]);
    assert!(tables.link(LinkId(10)).is_none());
}

#[test]
fn what_does_not_change_keeps_its_epochs() {
    let world = small();
    let tables = world.tables();
    let slot = tables.peer(PeerId(2)).unwrap().epoch();
    let stamp = tables.epochs().stamp(slot);
    let again = world.compile(&tables).tables;
    assert!(again.epochs().holds(stamp));
    assert!(again.generation() > tables.generation());
}

#[test]
fn endpoints_alone_move_and_the_rest_stays() {
    let mut world = small();
    let tables = world.tables();
    world.pod("later", 2, &["10.1.2.9"], |_| {});
    let new = world.endpoint(2, "10.1.1.3", None);
    world.endpoint(3, "10.1.2.5", None);
    let step = world.compile_with(compile_endpoints, &tables);
    assert_eq!(step.faults, Vec::<String>::new());
    assert!(step.complete.contains(&new));
    assert!(step.tables.local(ip("10.1.1.3")).is_some());
    // Its address was a pod's elsewhere: ours wins.
    assert!(step.tables.local(ip("10.1.2.5")).is_some());
    assert!(step.tables.remote_pod(ip("10.1.2.5")).is_none());
    assert!(step.tables.remote_pod(ip("10.1.2.9")).is_none());
    world.state.remove_endpoint(&new);
    let step = world.compile_with(compile_endpoints, &step.tables);
    assert!(step.tables.local(ip("10.1.1.3")).is_none());
    assert!(step.tables.local(ip("10.1.1.2")).is_some());
}

#[test]
fn an_endpoint_that_the_tables_refuse_is_not_complete() {
    for how in [compile, compile_endpoints] {
        let mut world = small();
        let refused = world.endpoint(2, "10.1.1.3", None);
        world.placed.get_mut(&refused).unwrap().link = LinkId(snapshot::MAX_LINKS);
        let compiled = world.compile_with(how, &empty());
        assert!(!compiled.complete.contains(&refused));
        assert_eq!(compiled.faults.len(), 1, "{:?}", compiled.faults);
        assert_eq!(compiled.complete.len(), 1);
    }
}

#[test]
fn a_closed_uplinks_number_is_free_in_the_next_tables_whichever_they_are() {
    for how in [compile, compile_endpoints] {
        let mut world = small();
        world.uplinks = vec![UplinkLink {
            link: LinkId(10),
            worker: WorkerId(0),
            uplink: 0,
        }];
        let before = world.tables();
        world.uplinks.clear();
        let step = world.compile_with(how, &before);
        assert_eq!(step.tables.link(LinkId(10)), None);
    }
}

/// One thing that happens to a cluster.
#[derive(Clone, Debug)]
enum Step {
    Node(u32, u8, u8),
    NoNode(u32),
    Pod(u8, u32, u8),
    NoPod(u8),
    Endpoint(u32, u8),
    NoEndpoint(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u32..5, 0u8..5, 0u8..5).prop_map(|(n, ip, range)| Step::Node(n, ip, range)),
        (1u32..5).prop_map(Step::NoNode),
        (0u8..6, 1u32..5, 0u8..8).prop_map(|(pod, n, ip)| Step::Pod(pod, n, ip)),
        (0u8..6).prop_map(Step::NoPod),
        (1u32..5, 0u8..8).prop_map(|(n, ip)| Step::Endpoint(n, ip)),
        (1u32..5).prop_map(Step::NoEndpoint),
    ]
}

fn take(world: &mut World, step: &Step) {
    match *step {
        Step::Node(n, ip, range) => world.node(
            n,
            &[&format!("192.0.2.{ip}")],
            &[&format!("10.1.{range}.0/24")],
        ),
        Step::NoNode(n) => {
            let name = format!("n{n}");
            let node = Node {
                name,
                ..Node::default()
            };
            world.state.apply(Change::Remove(Object::Node(node).key()));
        }
        Step::Pod(pod, n, ip) => {
            world.pod(&format!("p{pod}"), n, &[&format!("10.1.0.{ip}")], |_| {});
        }
        Step::NoPod(pod) => {
            let key = PodKey {
                namespace: "d".into(),
                name: format!("p{pod}"),
            };
            let gone = Object::Pod(Pod {
                key,
                ..Pod::default()
            });
            world.state.apply(Change::Remove(gone.key()));
        }
        Step::Endpoint(n, ip) => {
            world.endpoint(n, &format!("10.1.0.{ip}"), None);
        }
        Step::NoEndpoint(n) => {
            let attachment = Attachment {
                container_id: format!("c{n}"),
                ifname: "eth0".into(),
            };
            world.state.remove_endpoint(&attachment);
        }
    }
}

proptest! {
    /// Whatever happens in whatever order, tables made step by step hold the same as tables
    /// made at once, and the builder refuses nothing.
    #[test]
    fn the_way_does_not_matter(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::default();
        let mut tables = empty();
        for step in &steps {
            take(&mut world, step);
            // Steps of endpoints alone in between change nothing in the end.
            tables = world.compile_with(compile_endpoints, &tables).tables;
            tables = world.compile(&tables).tables;
        }
        let compiled = world.compile(&tables);
        let at_once = world.compile(&empty());
        prop_assert_eq!(&compiled.faults, &at_once.faults);
        let list = |tables: &Snapshot| {
            let mut remote: Vec<_> = tables.remote_pods().collect();
            remote.sort_by_key(|(address, _)| *address);
            let mut peers: Vec<_> = tables.peers().cloned().collect();
            peers.sort_by_key(|peer| peer.id);
            let mut endpoints: Vec<_> = tables.endpoints().cloned().collect();
            endpoints.sort_by_key(|endpoint| endpoint.id);
            (remote, peers, endpoints)
        };
        prop_assert_eq!(list(&compiled.tables), list(&at_once.tables));
    }
}
