use std::fmt::Write as _;
use std::time::Duration;

use proptest::prelude::*;
use skein_dataplane::fixtures::{endpoint, node, peer, remote};
use skein_dataplane::ids::WorkerId;
use skein_dataplane::service::{Affinity, Choice, Client, From, choose};
use skein_dataplane::snapshot::{Frontend, TrafficPolicy};
use skein_dataplane::time::Instant;

use super::*;
use crate::state::service::{EndpointSlice, SliceEndpoint, SlicePort};
use crate::state::{Change, Object};
use crate::watch::manifest;

/// Node 1 of three, in zone a with node 2; node 3 is in zone b.
const NODES: &str = "\
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}
spec: {podCIDRs: [10.244.1.0/24, 'fd00:10:244:1::/64']}
---
apiVersion: v1
kind: Node
metadata: {name: n2, labels: {topology.kubernetes.io/zone: a}}
spec: {podCIDRs: [10.244.2.0/24, 'fd00:10:244:2::/64']}
---
apiVersion: v1
kind: Node
metadata: {name: n3, labels: {topology.kubernetes.io/zone: b}}
spec: {podCIDRs: [10.244.3.0/24, 'fd00:10:244:3::/64']}
";

struct World {
    state: ClusterState,
    services: Services,
    tables: Snapshot,
}

impl World {
    /// All pods .1 to .9 of all nodes are known.
    fn new() -> Self {
        let mut world = Self::of(Services::new(true, "n1", node_ports()));
        world.set(NODES);
        for pod in 1..=9 {
            world.know(1, pod);
            world.know(2, pod);
            world.know(3, pod);
        }
        world
    }

    fn of(services: Services) -> Self {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        builder.set_peer(peer(1, 2)).unwrap();
        builder.set_peer(peer(1, 3)).unwrap();
        Self {
            state: ClusterState::default(),
            services,
            tables: builder.finish(),
        }
    }

    fn know(&mut self, node: u8, pod: u8) {
        self.tables(|builder| {
            if node == 1 {
                builder.set_endpoint(endpoint(1, pod), WorkerId(0)).unwrap();
            } else {
                let (address, known) = remote(node, pod);
                builder.set_remote_pod(address, known).unwrap();
            }
        });
    }

    fn forget(&mut self, node: u8, pod: u8) {
        self.tables(|builder| {
            if node == 1 {
                builder.remove_endpoint(skein_dataplane::ids::EndpointId(pod.into()));
            } else {
                builder.remove_remote_pod(remote(node, pod).0);
            }
        });
    }

    fn tables(&mut self, change: impl FnOnce(&mut SnapshotBuilder)) {
        let mut builder = SnapshotBuilder::new(&self.tables);
        change(&mut builder);
        self.services.moved(builder.moved());
        self.tables = builder.finish();
    }

    fn set(&mut self, text: &str) {
        let objects = manifest::parse(text).unwrap_or_else(|faults| panic!("{text}: {faults:?}"));
        for (_, object) in objects {
            self.change(Change::Set(object));
        }
    }

    fn change(&mut self, change: Change) {
        let key = match &change {
            Change::Set(object) => object.key(),
            Change::Remove(key) => key.clone(),
        };
        if self.state.apply(change) {
            self.services.update(&self.state, &[key].into());
        }
    }

    fn publish(&mut self) -> Vec<String> {
        let next = SnapshotBuilder::new(&self.tables).finish();
        let (tables, faults) = self.services.apply(&self.state, next);
        self.tables = tables;
        faults
    }

    /// A line a Service: where it is reached → who is chosen (`*`: also under policy Local),
    /// behind a bar who keeps what they have.
    fn dump(&self) -> String {
        let mut lines = Vec::new();
        for (_, entry) in self.tables.services().iter() {
            let mut line = format!("{}", entry.protocol);
            for reach in &entry.reach {
                let _ = match reach {
                    Reach::Address(kind, ip, port) => {
                        let kind = format!("{kind:?}");
                        write!(line, " {}:{ip}:{port}", &kind[..1])
                    }
                    Reach::NodePort(port) => write!(line, " node:{port}"),
                };
            }
            line.push_str(" ->");
            for (cluster, mark) in [(true, ""), (false, " |")] {
                let some = entry.candidates.iter().filter(|one| one.cluster == cluster);
                let mut before = mark;
                for one in some {
                    let star = if one.node { "*" } else { "" };
                    let _ = write!(line, "{before} {}:{}{star}", one.address, one.port);
                    before = "";
                }
            }
            lines.push(line);
        }
        lines.sort();
        lines.join("\n")
    }
}

fn node_ports() -> PortRange {
    PortRange {
        first: 30000,
        last: 32767,
    }
}

fn service(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n"
    )
}

fn slice(name: &str, service: &str, rest: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}, \
         namespace: shop, labels: {{kubernetes.io/service-name: {service}}}}}\n{rest}\n"
    )
}

/// A slice of IPv4 endpoints on port 8080.
fn endpoints(service_: &str, endpoints: &str) -> String {
    let rest = format!("addressType: IPv4\nports: [{{port: 8080}}]\nendpoints:\n{endpoints}");
    slice(&format!("{service_}-1"), service_, &rest)
}

/// What comes of one Service with that spec and those endpoints.
fn check(spec: &str, of: &str, expected: &str) {
    let mut world = World::new();
    world.set(&service("web", spec));
    world.set(&endpoints("web", of));
    assert_eq!(world.publish(), Vec::<String>::new(), "{spec}");
    assert_eq!(world.dump(), expected, "{spec}\n{of}");
}

const PLAIN: &str = "{clusterIP: 10.96.0.10, ports: [{port: 80}]}";

const TWO: &str = "\
- {addresses: [10.244.1.5], nodeName: n1, zone: a}
- {addresses: [10.244.2.5], nodeName: n2, zone: a}
";

#[test]
fn frontends_follow_the_spec() {
    let to = "-> 10.244.1.5:8080* 10.244.2.5:8080";
    check(PLAIN, TWO, &format!("6 C:10.96.0.10:80 {to}"));
    let spec = "{type: NodePort, clusterIPs: [10.96.0.10], externalIPs: [192.0.2.1], \
                ports: [{port: 80, nodePort: 30080}]}";
    let all = format!("6 C:10.96.0.10:80 E:192.0.2.1:80 node:30080 {to}");
    check(spec, TWO, &all);
    let text = service(
        "web",
        "{type: LoadBalancer, clusterIP: 10.96.0.10, externalIPs: [203.0.113.1], \
         ports: [{port: 80}]}",
    ) + "status: {loadBalancer: {ingress: [{ip: 203.0.113.1}, {ip: 203.0.113.2, ipMode: VIP}, \
         {ip: 203.0.113.3, ipMode: Proxy}, {hostname: lb.example.com}]}}\n";
    let mut world = World::new();
    world.set(&text);
    world.publish();
    let expected = "6 C:10.96.0.10:80 L:203.0.113.1:80 L:203.0.113.2:80 ->";
    assert_eq!(world.dump(), expected);
    // The same status on another type is left over from before.
    world.set(&text.replace("LoadBalancer,", "ClusterIP,"));
    world.publish();
    assert_eq!(world.dump(), "6 C:10.96.0.10:80 E:203.0.113.1:80 ->");
}

#[test]
fn ports_are_matched_by_name_and_protocol_and_families_kept_apart() {
    let mut world = World::new();
    world.set(&service(
        "dns",
        "{clusterIPs: [10.96.0.53, 'fd96::53'], ports: [{name: dns, port: 53, protocol: UDP}, \
         {name: dns-tcp, port: 53}, {name: web, port: 80, targetPort: http}]}",
    ));
    let ports = "ports: [{name: dns, port: 5353, protocol: UDP}, {name: dns-tcp, port: 5353}, \
                 {name: web, port: 8080}, {name: web, port: 9090, protocol: UDP}]\n";
    let v4 = format!("addressType: IPv4\n{ports}endpoints: [{{addresses: [10.244.2.1]}}]");
    // A rollout that renames nothing but the number: another slice, another target.
    let new = "addressType: IPv4\nports: [{name: web, port: 8081}]\n\
               endpoints: [{addresses: [10.244.3.1]}]";
    let v6 = format!("addressType: IPv6\n{ports}endpoints: [{{addresses: ['fd00:10:244:1::2']}}]");
    world.set(&slice("dns-1", "dns", &v4));
    world.set(&slice("dns-2", "dns", new));
    world.set(&slice("dns-3", "dns", &v6));
    world.publish();
    assert_eq!(
        world.dump(),
        "17 C:10.96.0.53:53 -> 10.244.2.1:5353\n\
         17 C:fd96::53:53 -> fd00:10:244:1::2:5353*\n\
         6 C:10.96.0.53:53 -> 10.244.2.1:5353\n\
         6 C:10.96.0.53:80 -> 10.244.2.1:8080 10.244.3.1:8081\n\
         6 C:fd96::53:53 -> fd00:10:244:1::2:5353*\n\
         6 C:fd96::53:80 -> fd00:10:244:1::2:8080*"
    );
}

#[test]
fn ready_ones_are_chosen_and_then_those_that_end_and_serve() {
    let here = "- {addresses: [10.244.1.5], nodeName: n1, conditions: {";
    let there = "- {addresses: [10.244.2.5], nodeName: n2, conditions: {";
    let (ends, not) = (
        "ready: false, serving: true, terminating: true}}\n",
        "ready: false}}\n",
    );
    let over = "ready: false, serving: false, terminating: true}}\n";
    let ready = "}}\n";
    let cases = [
        (ends, ready, "10.244.2.5:8080 | 10.244.1.5:8080*"),
        (ready, ends, "10.244.1.5:8080* | 10.244.2.5:8080"),
        (ends, ends, "10.244.1.5:8080* 10.244.2.5:8080"),
        (ends, not, "10.244.1.5:8080*"),
        (not, ends, "10.244.2.5:8080"),
        (over, ends, "10.244.2.5:8080"),
        (not, over, ""),
    ];
    for (one, other, expected) in cases {
        let expected = format!("6 C:10.96.0.10:80 -> {expected}");
        check(
            PLAIN,
            &format!("{here}{one}{there}{other}"),
            expected.trim_end(),
        );
    }
    let published = "{clusterIP: 10.96.0.10, publishNotReadyAddresses: true, ports: [{port: 80}]}";
    let both = "6 C:10.96.0.10:80 -> 10.244.1.5:8080* 10.244.2.5:8080";
    check(published, &format!("{here}{not}{there}{over}"), both);
}

#[test]
fn hints_narrow_the_choice_only_where_all_have_one_and_some_are_ours() {
    let one = "- {addresses: [10.244.1.5], nodeName: n1, zone: a";
    let near = "- {addresses: [10.244.2.5], nodeName: n2, zone: a";
    let far = "- {addresses: [10.244.3.5], nodeName: n3, zone: b";
    let zone = |name: &str| format!(", hints: {{forZones: [{{name: {name}}}]}}}}\n");
    let node = |name: &str, zone: &str| {
        format!(", hints: {{forZones: [{{name: {zone}}}], forNodes: [{{name: {name}}}]}}}}\n")
    };
    let (here, beside, away) = ("10.244.1.5:8080*", "10.244.2.5:8080", "10.244.3.5:8080");
    let spread =
        |word: &str| PLAIN.replace("ports", &format!("trafficDistribution: {word}, ports"));
    let none = "}\n";
    let cases = [
        // Zones, as the slices say.
        (
            PLAIN.to_owned(),
            format!("{one}{}{near}{}{far}{}", zone("a"), zone("a"), zone("b")),
            format!("{here} {beside} | {away}"),
        ),
        (
            PLAIN.to_owned(),
            format!("{one}{}{near}{}{far}{none}", zone("a"), zone("a")),
            format!("{here} {beside} {away}"),
        ),
        (
            PLAIN.to_owned(),
            format!("{one}{}{far}{}", zone("b"), zone("b")),
            format!("{here} {away}"),
        ),
        // Nodes before zones.
        (
            PLAIN.to_owned(),
            format!("{one}{}{near}{}", node("n1", "a"), node("n2", "a")),
            format!("{here} | {beside}"),
        ),
        (
            PLAIN.to_owned(),
            format!("{near}{}{far}{}", node("n2", "a"), node("n3", "b")),
            format!("{beside} | {away}"),
        ),
        // Nobody writes hints: the Service's wish.
        (
            spread("PreferClose"),
            format!("{one}{none}{near}{none}{far}{none}"),
            format!("{here} {beside} | {away}"),
        ),
        (
            spread("PreferSameZone"),
            format!("{far}{none}"),
            away.to_owned(),
        ),
        (
            spread("PreferSameNode"),
            format!("{one}{none}{near}{none}{far}{none}"),
            format!("{here} | {beside} {away}"),
        ),
        (
            spread("PreferSameNode"),
            format!("{near}{none}{far}{none}"),
            format!("{beside} | {away}"),
        ),
        // What the slices say goes before it.
        (
            spread("PreferSameNode"),
            format!("{one}{}{near}{}", zone("a"), zone("a")),
            format!("{here} {beside}"),
        ),
    ];
    for (spec, of, expected) in cases {
        check(&spec, &of, &format!("6 C:10.96.0.10:80 -> {expected}"));
    }
}

#[test]
fn a_pod_of_the_cluster_waits_for_its_identity_and_others_do_not() {
    let mut world = World::new();
    world.set(&service("web", PLAIN));
    world.set(&endpoints(
        "web",
        "- {addresses: [10.244.2.77], nodeName: n2}\n\
         - {addresses: [10.244.1.77], nodeName: n1}\n\
         - {addresses: [192.168.77.2], nodeName: n2}\n\
         - {addresses: [198.51.100.9]}\n\
         - {addresses: [127.0.0.1]}\n\
         - {addresses: [169.254.169.254]}\n",
    ));
    world.publish();
    let start = "6 C:10.96.0.10:80 -> ";
    let always = "192.168.77.2:8080 198.51.100.9:8080";
    assert_eq!(world.dump(), format!("{start}{always}"));
    world.know(2, 77);
    world.publish();
    assert_eq!(world.dump(), format!("{start}10.244.2.77:8080 {always}"));
    world.know(1, 77);
    world.forget(2, 77);
    world.publish();
    assert_eq!(world.dump(), format!("{start}10.244.1.77:8080* {always}"));
    // The view says why.
    let key = ServiceKey {
        namespace: "shop".into(),
        name: "web".into(),
    };
    let (port, _) = world.services.ports_of(&key).next().unwrap();
    let service = world.state.service(&key).unwrap();
    let served = world
        .services
        .served(&world.state, &world.tables, service, port);
    let why = |ip: &str| {
        let found = served.iter().find(|one| one.address.to_string() == ip);
        found.map(Served::reason).unwrap()
    };
    assert_eq!(why("10.244.2.77"), "no pod of this address is known yet");
    assert_eq!(why("127.0.0.1"), "no host has this address");
    assert_eq!(why("10.244.1.77"), "");
}

#[test]
fn no_service_leads_to_an_overlay_port() {
    let mut world = World::new();
    let spec = "{clusterIP: 10.96.0.10, ports: [{name: u, port: 1, protocol: UDP}, \
                {name: t, port: 1}]}";
    world.set(&service("web", spec));
    let rest = "addressType: IPv4\nports: [{name: u, port: 8472, protocol: UDP}, \
                {name: t, port: 8472}]\nendpoints: [{addresses: [192.168.77.2]}, \
                {addresses: [10.244.2.1]}]";
    world.set(&slice("web-1", "web", rest));
    world.publish();
    assert_eq!(
        world.dump(),
        "17 C:10.96.0.10:1 -> 10.244.2.1:8472\n\
         6 C:10.96.0.10:1 -> 10.244.2.1:8472 192.168.77.2:8472"
    );
}

#[test]
fn what_is_not_ours_has_no_place() {
    let labelled = |label: &str| {
        service("web", PLAIN).replace(
            "namespace: shop}",
            &format!("namespace: shop, labels: {{{label}}}}}"),
        )
    };
    let cases = [
        (
            service("web", "{clusterIP: None, ports: [{port: 80}]}"),
            "it is headless",
        ),
        (
            service("web", "{ports: [{port: 80}]}"),
            "it has no clusterIP",
        ),
        (
            service("web", "{type: ExternalName, externalName: example.com}"),
            "it is a name in DNS",
        ),
        (
            labelled("service.kubernetes.io/service-proxy-name: other"),
            "proxy 'other' serves it",
        ),
        (
            labelled("service.kubernetes.io/headless: ''"),
            "it is headless",
        ),
    ];
    for (text, reason) in cases {
        let mut world = World::new();
        // One that was served before is served no more.
        world.set(&service("web", PLAIN));
        world.set(&endpoints("web", TWO));
        world.publish();
        assert_eq!(world.tables.services().len(), 1);
        world.set(&text);
        world.publish();
        assert_eq!(world.dump(), "", "{text}");
        let service = world.state.services().next().unwrap();
        assert_eq!(not_served(service).as_deref(), Some(reason));
    }
    let mut world = World::of(Services::new(false, "n1", node_ports()));
    world.set(NODES);
    world.set(&service("web", PLAIN));
    world.publish();
    assert_eq!(world.dump(), "");
    assert_eq!(world.services.ranges(&world.state, &[]), []);
}

#[test]
fn slices_of_another_proxy_are_not_read() {
    let mut world = World::new();
    world.set(&service("web", PLAIN));
    let other = endpoints("web", TWO).replace(
        "service-name: web",
        "service-name: web, service.kubernetes.io/service-proxy-name: other",
    );
    world.set(&other);
    world.publish();
    assert_eq!(world.dump(), "6 C:10.96.0.10:80 ->");
}

#[test]
fn policies_affinity_and_ranges_reach_the_tables() {
    let mut world = World::new();
    world.set(&service(
        "web",
        "{type: LoadBalancer, clusterIP: 10.96.0.10, ports: [{port: 80, nodePort: 30080}], \
         internalTrafficPolicy: Local, externalTrafficPolicy: Local, sessionAffinity: ClientIP, \
         loadBalancerSourceRanges: [' 192.0.2.1/24', 'fd00::/8']}",
    ));
    world.publish();
    let (_, entry) = world.tables.services().iter().next().unwrap();
    assert_eq!(entry.internal, TrafficPolicy::Local);
    assert_eq!(entry.external, TrafficPolicy::Local);
    assert_eq!(entry.affinity, Some(Duration::from_secs(10_800)));
    let ranges: Vec<_> = entry
        .source_ranges
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(ranges, ["192.0.2.0/24", "fd00::/8"]);
}

#[test]
fn a_frontend_is_the_firsts_by_name_until_it_lets_go() {
    let mut world = World::new();
    let spec =
        |ip: &str| format!("{{clusterIP: {ip}, externalIPs: [192.0.2.1], ports: [{{port: 80}}]}}");
    world.set(&service("b", &spec("10.96.0.2")));
    world.publish();
    assert_eq!(world.dump(), "6 C:10.96.0.2:80 E:192.0.2.1:80 ->");
    world.set(&service("a", &spec("10.96.0.1")));
    let faults = world.publish();
    let lost = "Service shop/b: 192.0.2.1 port 80 (TCP) is Service shop/a's too, who keeps it";
    assert_eq!(faults, [lost]);
    let both = "6 C:10.96.0.1:80 E:192.0.2.1:80 ->\n6 C:10.96.0.2:80 ->";
    assert_eq!(world.dump(), both);
    // Said once, and known until it ends.
    world.set(&endpoints("b", ""));
    assert_eq!(world.publish(), Vec::<String>::new());
    assert_eq!(world.services.faults().collect::<Vec<_>>(), [lost]);
    let key = ObjectKey::Service(ServiceKey {
        namespace: "shop".into(),
        name: "a".into(),
    });
    world.change(Change::Remove(key));
    world.publish();
    assert_eq!(world.dump(), "6 C:10.96.0.2:80 E:192.0.2.1:80 ->");
    assert_eq!(world.services.faults().count(), 0);
}

#[test]
fn what_cannot_be_served_is_said() {
    let mut world = World::new();
    world.set(&service(
        "web",
        "{type: NodePort, clusterIP: 10.96.0.10, externalIPs: ['fd77::9'], \
         ports: [{port: 80, nodePort: 8472}]}",
    ));
    let faults = world.publish();
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(
        faults[0].contains("nodePort 8472 lies outside of services.node_port_range 30000-32767")
    );
    assert!(faults[1].contains("fd77::9 is not of the family"));
    assert_eq!(world.dump(), "6 C:10.96.0.10:80 ->");
}

#[test]
fn an_unrelated_change_moves_no_epoch_and_numbers_are_not_used_again() {
    let mut world = World::new();
    world.set(&service("a", PLAIN));
    world.set(&endpoints("a", TWO));
    world.set(&service("b", &PLAIN.replace("10.96.0.10", "10.96.0.11")));
    world.publish();
    let id = |world: &World, name: &str| {
        let key = ServiceKey {
            namespace: "shop".into(),
            name: name.into(),
        };
        world.services.ports_of(&key).next().unwrap().1
    };
    let (a, b) = (id(&world, "a"), id(&world, "b"));
    let stamp = |world: &World, id| {
        let slot = world.tables.service_epoch(id).unwrap();
        world.tables.epochs().stamp(slot)
    };
    let (of_a, of_b) = (stamp(&world, a), stamp(&world, b));
    world.set(&endpoints("b", TWO));
    world.forget(3, 9);
    world.publish();
    assert!(world.tables.epochs().holds(of_a));
    assert!(!world.tables.epochs().holds(of_b));
    let text = service("a", PLAIN);
    let key = manifest::parse(&text).unwrap()[0].1.key();
    world.change(Change::Remove(key));
    world.publish();
    assert_eq!(world.tables.service_epoch(a), None);
    world.set(&text);
    world.publish();
    assert_ne!(id(&world, "a"), a);
    assert_eq!(
        world.dump().matches("10.244").count(),
        4,
        "its slice was there all the time"
    );
}

#[test]
fn the_host_routes_configured_ranges_or_the_clusters_or_each_address() {
    let mut world = World::new();
    world.set(&service("a", PLAIN));
    world.set(&service(
        "b",
        "{clusterIPs: [10.96.0.11, 'fd96::1'], ports: [{port: 80}]}",
    ));
    world.set(&service("c", "{clusterIP: None, ports: [{port: 80}]}"));
    let texts = |world: &World, configured: &[Cidr]| {
        let ranges = world.services.ranges(&world.state, configured);
        ranges.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        texts(&world, &[]),
        ["10.96.0.10/32", "10.96.0.11/32", "fd96::1/128"]
    );
    world.set(
        "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\n\
         spec: {cidrs: [10.96.0.0/16, 'fd96::/112']}\n",
    );
    assert_eq!(texts(&world, &[]), ["10.96.0.0/16", "fd96::/112"]);
    assert_eq!(
        texts(&world, &["10.90.0.0/16".parse().unwrap()]),
        ["10.90.0.0/16"]
    );
}

/// Service number N of many, at 10.96.N with five endpoints of its own port.
fn load(world: &mut World, n: u32) {
    let [.., high, low] = n.to_be_bytes();
    let endpoints = (1..=5).map(|pod| SliceEndpoint {
        address: Some(IpAddr::from([10, 244, 2, pod])),
        ready: true,
        serving: true,
        ..SliceEndpoint::default()
    });
    world.change(Change::Set(Object::Service(Service {
        key: load_key(n),
        cluster_ips: vec![[10, 96, high, low].into()],
        ports: vec![ServicePort {
            port: 80,
            ..ServicePort::default()
        }],
        ..Service::default()
    })));
    world.change(Change::Set(Object::EndpointSlice(EndpointSlice {
        key: load_key(n),
        service: Some(load_key(n)),
        ipv4: Some(true),
        ports: vec![SlicePort {
            port: 8080 + u16::from(low),
            ..SlicePort::default()
        }],
        endpoints: endpoints.collect(),
    })));
}

fn load_key(n: u32) -> ServiceKey {
    ServiceKey {
        namespace: "load".into(),
        name: format!("s{n}"),
    }
}

fn find(world: &World, n: u32) -> Choice {
    let [.., high, low] = n.to_be_bytes();
    let frontend = Frontend {
        address: [10, 96, high, low].into(),
        port: 80,
        protocol: 6,
    };
    let client = Client {
        address: [10, 244, 1, 1].into(),
        port: 1,
        from: From::Pod,
    };
    let hash = u64::from(n) * 7919;
    let affinity = Affinity::with_entries(8);
    choose(
        &world.tables,
        &affinity,
        frontend,
        client,
        hash,
        Instant::default(),
    )
}

/// That they load, what each lookup finds, and what their tables take.
#[test]
fn thirty_thousand_services_of_five_endpoints_load() {
    let mut world = World::new();
    for n in 0..30_000 {
        load(&mut world, n);
    }
    assert_eq!(world.publish(), Vec::<String>::new());
    assert_eq!(world.tables.services().len(), 30_000);
    for n in 0..30_000 {
        match find(&world, n) {
            Choice::Backend(found) => assert_eq!(found.port, 8080 + (n & 255) as u16),
            other => panic!("{n}: {other:?}"),
        }
    }
    let bytes: usize = (world.tables.services().iter())
        .map(|(_, entry)| entry.memory_bytes())
        .sum();
    // 2053 bytes of table, five positions, five endpoints each.
    assert!(bytes < 75_000_000, "{bytes} bytes");
    // One change costs one Service: all others are shared with the tables before.
    let before = shares(&world.tables);
    let mut slice = world.state.slice(&load_key(17)).unwrap().clone();
    slice.endpoints.pop();
    world.change(Change::Set(Object::EndpointSlice(slice)));
    world.publish();
    let differ = shares(&world.tables)
        .into_iter()
        .filter(|(id, at)| before[id] != *at)
        .count();
    assert_eq!(differ, 1);
}

/// Where each Service's entry lies.
fn shares(tables: &Snapshot) -> BTreeMap<ServiceId, usize> {
    (tables.services().iter())
        .map(|(id, entry)| (id, std::ptr::from_ref(entry) as usize))
        .collect()
}

/// A change of a small cluster.
#[derive(Clone, Debug)]
enum Step {
    Set(String),
    Remove(ObjectKey),
    Know(u8, u8),
    Forget(u8, u8),
    Publish,
}

fn steps() -> impl Strategy<Value = Step> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let key = |name: &str| ServiceKey {
        namespace: "shop".into(),
        name: name.into(),
    };
    let ip = prop::sample::select(vec!["10.96.0.1", "10.96.0.2", "'fd96::1'", "None"]);
    let ports = prop::sample::select(vec![
        "{port: 80}",
        "{port: 80, nodePort: 30080}",
        "{name: x, port: 80}, {name: y, port: 81, protocol: UDP}",
        "{port: 81, nodePort: 80}",
    ]);
    let more = prop::sample::select(vec![
        "",
        ", externalIPs: [192.0.2.1]",
        ", trafficDistribution: PreferClose",
        ", publishNotReadyAddresses: true",
    ]);
    let set = (name.clone(), ip, ports, more).prop_map(|(name, ip, ports, more)| {
        Step::Set(service(
            name,
            &format!("{{type: NodePort, clusterIP: {ip}, ports: [{ports}]{more}}}"),
        ))
    });
    let pod = (1u8..4, 8u8..12, 0usize..3, any::<bool>());
    let pods = prop::collection::vec(pod, 0..4);
    let slices = (name.clone(), name.clone(), pods).prop_map(|(of, name, pods)| {
        let mut rest =
            "addressType: IPv4\nports: [{port: 8080}, {name: x, port: 8081}]\nendpoints:\n"
                .to_owned();
        for (node, pod, condition, named) in pods {
            let condition = [
                "{}",
                "{ready: false}",
                "{ready: false, serving: true, terminating: true}",
            ][condition];
            let node_name = if named {
                format!("nodeName: n{node}, zone: z,")
            } else {
                String::new()
            };
            let _ = writeln!(
                rest,
                "- {{addresses: [10.244.{node}.{pod}], {node_name} conditions: {condition}}}"
            );
        }
        Step::Set(slice(&format!("slice-{name}"), of, &rest))
    });
    let node = (1u8..4, prop::sample::select(vec!["a", "z"])).prop_map(|(n, zone)| {
        Step::Set(format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: n{n}, labels: \
             {{topology.kubernetes.io/zone: {zone}}}}}\nspec: {{podCIDR: 10.244.{n}.0/24}}\n"
        ))
    });
    prop_oneof![
        4 => set,
        4 => slices,
        1 => node,
        2 => (1u8..4, 8u8..12).prop_map(|(node, pod)| Step::Know(node, pod)),
        2 => (1u8..4, 8u8..12).prop_map(|(node, pod)| Step::Forget(node, pod)),
        1 => name.clone().prop_map(move |name| Step::Remove(ObjectKey::Service(key(name)))),
        1 => name.prop_map(move |name| {
            Step::Remove(ObjectKey::EndpointSlice(key(&format!("slice-{name}"))))
        }),
        3 => Just(Step::Publish),
    ]
}

proptest! {
    /// Compiled piece by piece, or all at once from the same cluster: the same tables and faults.
    #[test]
    fn pieces_make_the_whole(steps in prop::collection::vec(steps(), 1..40)) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Set(text) => world.set(&text),
                Step::Remove(key) => world.change(Change::Remove(key)),
                Step::Know(node, pod) => world.know(node, pod),
                Step::Forget(node, pod) => world.forget(node, pod),
                Step::Publish => { world.publish(); }
            }
        }
        world.publish();
        let mut whole = World::new();
        for pod in 8..12 {
            for node in 1..4 {
                let known = match node {
                    1 => world.tables.local([10, 244, 1, pod].into()).is_some(),
                    _ => world.tables.remote_pod(remote(node, pod).0).is_some(),
                };
                if known { whole.know(node, pod) } else { whole.forget(node, pod) }
            }
        }
        for object in world.state.nodes().cloned().map(Object::Node) {
            whole.change(Change::Set(object));
        }
        for object in world.state.services().cloned().map(Object::Service) {
            whole.change(Change::Set(object));
        }
        for name in ["a", "b", "c"] {
            let key = ServiceKey { namespace: "shop".into(), name: format!("slice-{name}") };
            if let Some(slice) = world.state.slice(&key) {
                whole.change(Change::Set(Object::EndpointSlice(slice.clone())));
            }
        }
        whole.publish();
        prop_assert_eq!(world.dump(), whole.dump());
        let faults = |world: &World| world.services.faults().cloned().collect::<Vec<_>>();
        prop_assert_eq!(faults(&world), faults(&whole));
    }
}
