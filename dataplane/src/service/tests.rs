use std::net::Ipv4Addr;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::fixtures::{node, node_v6, pod_v4, underlay};
use crate::snapshot::{Candidate, Reach, Service, ServiceError, SnapshotBuilder, TrafficPolicy::*};
use crate::wire::protocol::{TCP, UDP};

const VIRTUAL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));
const BALANCER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));

fn id(number: u32) -> ServiceId {
    ServiceId::new(number).unwrap()
}

fn at(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

/// A pod of node 1, which is the node of all these tests, or of node 2.
fn candidate(node: u8, pod: u8) -> Candidate {
    Candidate {
        address: pod_v4(node, pod).into(),
        port: 8080,
        local: node == 1,
        cluster: true,
        node: node == 1,
    }
}

fn service(candidates: Vec<Candidate>) -> Service {
    Service {
        protocol: TCP,
        ipv4: true,
        reach: vec![
            Reach::Address(FrontendKind::ClusterIp, VIRTUAL, 80),
            Reach::Address(FrontendKind::LoadBalancer, BALANCER, 80),
            Reach::NodePort(30080),
        ],
        candidates,
        internal: Cluster,
        external: Cluster,
        affinity: None,
        source_ranges: vec![],
    }
}

fn tables(services: Vec<Service>) -> Snapshot {
    let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
    for (number, service) in (1..).zip(services) {
        builder.set_service(id(number), service).unwrap();
    }
    builder.finish()
}

fn frontend(address: IpAddr, port: u16) -> Frontend {
    Frontend {
        address,
        port,
        protocol: TCP,
    }
}

fn client(from: From) -> Client {
    let address = match from {
        From::Pod => pod_v4(1, 200).into(),
        From::Host => underlay(1),
        From::Outside => Ipv4Addr::new(198, 51, 100, 1).into(),
    };
    Client {
        address,
        port: 40_000,
        from,
    }
}

fn ask(tables: &Snapshot, to: Frontend, from: From, hash: u64) -> Choice {
    let affinity = Affinity::with_entries(8);
    choose(tables, &affinity, to, client(from), hash, at(0))
}

fn backend(choice: Choice) -> Backend {
    match choice {
        Choice::Backend(backend) => backend,
        other => panic!("no backend: {other:?}"),
    }
}

#[test]
fn each_frontend_leads_to_the_service_and_nothing_else_does() {
    let tables = tables(vec![service(vec![candidate(2, 5)])]);
    for (address, port) in [(VIRTUAL, 80), (BALANCER, 80), (underlay(1), 30080)] {
        let found = backend(ask(&tables, frontend(address, port), From::Pod, 7));
        assert_eq!(found.address, IpAddr::from(pod_v4(2, 5)));
        assert_eq!((found.port, found.service), (8080, id(1)));
    }
    let others = [
        (BALANCER, 81),
        (underlay(1), 80),
        // Another node's ports are that node's to serve, and this Service has no IPv6.
        (underlay(2), 30080),
        (node_v6(1), 30080),
    ];
    for (address, port) in others {
        let choice = ask(&tables, frontend(address, port), From::Pod, 7);
        assert_eq!(choice, Choice::NotAService, "{address} {port}");
    }
    let refused = Choice::Refused(DropReason::NoServicePort);
    assert_eq!(ask(&tables, frontend(VIRTUAL, 81), From::Pod, 7), refused);
    let datagram = Frontend {
        protocol: UDP,
        ..frontend(VIRTUAL, 80)
    };
    assert_eq!(ask(&tables, datagram, From::Pod, 7), refused);
    assert!(tables.is_service_address(VIRTUAL) && !tables.is_service_address(BALANCER));
}

#[test]
fn policies_say_who_serves_whom_and_whose_source_stays() {
    // Whether the ClusterIP or the NodePort is asked, by whom, under which policies; what comes.
    type Case = (
        bool,
        From,
        TrafficPolicy,
        TrafficPolicy,
        Result<bool, DropReason>,
    );
    let none_here = Err(DropReason::NoLocalEndpoints);
    let cases: &[Case] = &[
        (true, From::Pod, Cluster, Local, Ok(false)),
        (true, From::Host, Cluster, Local, Ok(false)),
        (true, From::Pod, Local, Cluster, none_here),
        (true, From::Host, Local, Cluster, none_here),
        (true, From::Outside, Cluster, Local, Ok(true)),
        (false, From::Outside, Cluster, Cluster, Ok(true)),
        (false, From::Outside, Local, Cluster, Ok(true)),
        (false, From::Outside, Cluster, Local, none_here),
        (false, From::Pod, Local, Local, Ok(false)),
        (false, From::Host, Local, Local, Ok(false)),
    ];
    for &(at_cluster_ip, from, internal, external, expected) in cases {
        let to = if at_cluster_ip {
            frontend(VIRTUAL, 80)
        } else {
            frontend(underlay(1), 30080)
        };
        let with = |candidates| Service {
            internal,
            external,
            ..service(candidates)
        };
        let case = format!("{to:?} {from:?} {internal:?} {external:?}");
        let far = tables(vec![with(vec![candidate(2, 5)])]);
        match (ask(&far, to, from, 3), expected) {
            (Choice::Backend(found), Ok(snat)) => assert_eq!(found.snat, snat, "{case}"),
            (Choice::Refused(reason), Err(expected)) => assert_eq!(reason, expected, "{case}"),
            other => panic!("{case}: {other:?}"),
        }
        // With a backend here policy Local serves from it alone, and keeps the source.
        let both = tables(vec![with(vec![candidate(1, 5), candidate(2, 5)])]);
        let found: Vec<Backend> = (0..500)
            .map(|hash| backend(ask(&both, to, from, hash)))
            .collect();
        let all_here = found.iter().all(|backend| backend.local);
        assert_eq!(all_here, expected.is_err(), "{case}");
        assert!(!all_here || found.iter().all(|backend| !backend.snat));
        // And nobody at all is nobody at all, whatever the policy.
        let nobody = tables(vec![with(vec![])]);
        let refused = Choice::Refused(DropReason::NoEndpoints);
        assert_eq!(ask(&nobody, to, from, 3), refused, "{case}");
    }
}

#[test]
fn a_backend_that_meets_itself_gets_another_source() {
    let tables = tables(vec![service(vec![candidate(1, 200)])]);
    let found = backend(ask(&tables, frontend(VIRTUAL, 80), From::Pod, 1));
    assert_eq!(found.address, client(From::Pod).address);
    assert!(found.snat);
}

#[test]
fn source_ranges_guard_the_load_balancers_address_alone() {
    let ranges = vec!["198.51.100.0/24".parse().unwrap()];
    let with = |source_ranges| Service {
        source_ranges,
        ..service(vec![candidate(2, 5)])
    };
    let narrow = tables(vec![with(ranges)]);
    let wrong = tables(vec![with(vec!["fd00::/8".parse().unwrap()])]);
    let denied = Choice::Refused(DropReason::SourceRangeDenied);
    let balancer = frontend(BALANCER, 80);
    backend(ask(&narrow, balancer, From::Outside, 1));
    assert_eq!(ask(&narrow, balancer, From::Pod, 1), denied);
    assert_eq!(ask(&wrong, balancer, From::Outside, 1), denied);
    backend(ask(&wrong, frontend(underlay(1), 30080), From::Outside, 1));
    backend(ask(&wrong, frontend(VIRTUAL, 80), From::Pod, 1));
}

#[test]
fn what_ends_keeps_its_connections_and_gets_no_new_ones() {
    let mut ends = candidate(2, 5);
    (ends.cluster, ends.node) = (false, false);
    let tables = tables(vec![service(vec![ends, candidate(2, 6)])]);
    for hash in 0..300 {
        let found = backend(ask(&tables, frontend(VIRTUAL, 80), From::Pod, hash));
        assert_eq!(found.address, IpAddr::from(pod_v4(2, 6)));
    }
    assert!(tables.is_backend(id(1), pod_v4(2, 5).into(), 8080));
    assert!(tables.is_backend(id(1), pod_v4(2, 6).into(), 8080));
    assert!(!tables.is_backend(id(1), pod_v4(2, 6).into(), 8081));
    assert!(!tables.is_backend(id(1), pod_v4(2, 7).into(), 8080));
    assert!(!tables.is_backend(id(2), pod_v4(2, 6).into(), 8080));
}

#[test]
fn a_client_stays_until_its_timeout_or_its_backends_end() {
    let many: Vec<Candidate> = (1..=20).map(|pod| candidate(2, pod)).collect();
    let with = |candidates| Service {
        affinity: Some(Duration::from_secs(10)),
        ..service(candidates)
    };
    let mut tables = tables(vec![with(many.clone())]);
    let affinity = Affinity::with_entries(64);
    let to = frontend(VIRTUAL, 80);
    let ask = |tables: &Snapshot, hash, now| {
        backend(choose(tables, &affinity, to, client(From::Pod), hash, now)).address
    };
    // Two hashes that would choose differently.
    let free = |hash| backend(self::ask(&tables, to, From::Pod, hash)).address;
    let other = (1..).find(|&hash| free(hash) != free(0)).unwrap();
    let (first, second) = (free(0), free(other));
    assert_eq!(ask(&tables, 0, at(100)), first);
    assert_eq!(ask(&tables, other, at(105)), first);
    // Seen at 105, so until 115 inclusive; a nanosecond later it is over.
    assert_eq!(ask(&tables, other, at(115)), first);
    let over = at(125) + Duration::from_nanos(1);
    assert_eq!(ask(&tables, other, over), second);
    assert_eq!(ask(&tables, 0, at(126)), second);
    // Another client has its own.
    let stranger = Client {
        address: pod_v4(1, 201).into(),
        ..client(From::Pod)
    };
    let choice = choose(&tables, &affinity, to, stranger, 0, at(126));
    assert_eq!(backend(choice).address, first);
    // The backend ends.
    let left = many.into_iter().map(|mut candidate| {
        candidate.cluster = candidate.address != second;
        candidate
    });
    let mut builder = SnapshotBuilder::new(&tables);
    builder.set_service(id(1), with(left.collect())).unwrap();
    tables = builder.finish();
    let moved = ask(&tables, 0, at(127));
    assert_ne!(moved, second);
    assert_eq!(ask(&tables, other, at(128)), moved);
}

#[test]
fn affinity_is_bounded_and_lets_go_of_the_oldest() {
    let many = (1..=200).map(|pod| candidate(2, pod)).collect();
    let tables = tables(vec![Service {
        affinity: Some(Duration::from_secs(1000)),
        ..service(many)
    }]);
    // One set of eight.
    let affinity = Affinity::with_entries(8);
    let to = frontend(VIRTUAL, 80);
    let ask = |number: u32, hash, now| {
        let client = Client {
            address: Ipv4Addr::from_bits(number).into(),
            ..client(From::Pod)
        };
        backend(choose(&tables, &affinity, to, client, hash, now)).address
    };
    let first: Vec<IpAddr> = (0..8).map(|n| ask(n, u64::from(n), at(n.into()))).collect();
    for n in 0..8u32 {
        assert_eq!(ask(n, 99, at(10 + u64::from(n))), first[n as usize]);
    }
    ask(8, 0, at(20));
    // Client 0 was the oldest; the others still have theirs.
    for n in 1..8u32 {
        assert_eq!(ask(n, 99, at(21)), first[n as usize]);
    }
    let (before, after) = (ask(100, 99, at(22)), ask(0, 99, at(22)));
    assert_eq!(before, after, "a hash alone chooses again");
}

#[test]
fn only_what_differs_moves_an_epoch() {
    let two = vec![candidate(2, 5), candidate(2, 6)];
    let first = tables(vec![service(two.clone()), {
        let mut other = service(two.clone());
        other.reach = vec![Reach::NodePort(30081)];
        other
    }]);
    let stamps = [1, 2].map(|n| first.epochs().stamp(first.service_epoch(id(n)).unwrap()));
    let mut builder = SnapshotBuilder::new(&first);
    let mut turned = service(two.clone());
    turned.reach.reverse();
    turned.candidates.reverse();
    builder.set_service(id(1), turned).unwrap();
    assert!(
        stamps
            .iter()
            .all(|&stamp| builder.tables().epochs().holds(stamp))
    );
    builder
        .set_service(id(1), service(two[..1].to_vec()))
        .unwrap();
    assert!(!builder.tables().epochs().holds(stamps[0]));
    assert!(builder.tables().epochs().holds(stamps[1]));
    builder.remove_service(id(2));
    let last = builder.finish();
    assert!(!last.epochs().holds(stamps[1]));
    assert_eq!(last.service_epoch(id(2)), None);
    assert_eq!(
        ask(&last, frontend(underlay(1), 30081), From::Pod, 1),
        Choice::NotAService
    );
    assert_eq!(last.services().len(), 1);
}

#[test]
fn contradictions_are_refused_and_change_nothing() {
    let first = tables(vec![service(vec![candidate(2, 5)])]);
    let mut builder = SnapshotBuilder::new(&first);
    for taken in service(vec![]).reach {
        let twin = Service {
            reach: vec![taken],
            ..service(vec![])
        };
        let refused = builder.set_service(id(2), twin.clone());
        assert_eq!(
            refused,
            Err(ServiceError::Taken {
                reach: taken,
                owner: id(1)
            })
        );
        // The same on UDP is another frontend.
        let datagram = Service {
            protocol: UDP,
            ..twin
        };
        builder.set_service(id(3), datagram).unwrap();
        builder.remove_service(id(3));
    }
    let mut mixed = service(vec![candidate(2, 5)]);
    mixed.candidates[0].address = node_v6(2);
    assert_eq!(
        builder.set_service(id(1), mixed),
        Err(ServiceError::Family(node_v6(2)))
    );
    let last = builder.finish();
    assert_eq!(last.services().len(), 1);
    backend(ask(&last, frontend(VIRTUAL, 80), From::Pod, 1));
}

#[test]
fn ten_thousand_connections_spread_as_chance_would() {
    let many: Vec<Candidate> = (1..=10).map(|pod| candidate(2, pod)).collect();
    let tables = tables(vec![service(many)]);
    let mut counts = [0f64; 11];
    let mut state = 1u64;
    for _ in 0..10_000 {
        // Knuth's MMIX generator: fixed numbers that look like hashes.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let found = backend(ask(&tables, frontend(VIRTUAL, 80), From::Pod, state >> 16));
        let IpAddr::V4(address) = found.address else {
            panic!("{found:?}")
        };
        counts[usize::from(address.octets()[3])] += 1.0;
    }
    let chi: f64 = counts[1..]
        .iter()
        .map(|n| (n - 1000.0).powi(2) / 1000.0)
        .sum();
    // 9 degrees of freedom: 27.88 is passed once in a thousand; the numbers are fixed.
    assert!(chi < 27.88, "{chi}: {counts:?}");
}

/// What the tables hold, as a list.
#[derive(Clone, Debug, Default)]
struct Naive(Vec<(ServiceId, Service)>);

impl Naive {
    fn set(&mut self, number: ServiceId, service: Service) -> bool {
        let clash = self.0.iter().any(|(other, held)| {
            *other != number
                && held.protocol == service.protocol
                && held
                    .reach
                    .iter()
                    .any(|one| service.reach.iter().any(|new| same(*one, *new)))
        });
        if !clash {
            self.0.retain(|(other, _)| *other != number);
            self.0.push((number, service));
        }
        !clash
    }

    /// Who may be chosen, or what else comes.
    fn allowed(&self, to: Frontend, from: From) -> Result<Vec<(IpAddr, u16)>, Choice> {
        let found = self.0.iter().find_map(|(_, service)| {
            let kind = service.reach.iter().find_map(|reach| match *reach {
                Reach::Address(kind, address, port) => {
                    ((address, port) == (to.address, to.port)).then_some(kind)
                }
                Reach::NodePort(port) => (node(1).addresses.contains(&to.address)
                    && to.address.is_ipv4()
                    && port == to.port)
                    .then_some(FrontendKind::NodePort),
            });
            kind.filter(|_| service.protocol == to.protocol)
                .map(|kind| (kind, service))
        });
        let Some((kind, service)) = found else {
            let own = self.0.iter().flat_map(|(_, service)| &service.reach).any(|reach| {
                matches!(reach, Reach::Address(FrontendKind::ClusterIp, address, _) if *address == to.address)
            });
            return Err(if own {
                Choice::Refused(DropReason::NoServicePort)
            } else {
                Choice::NotAService
            });
        };
        let local = match (kind, from) {
            (FrontendKind::ClusterIp, _) => service.internal == Local,
            (_, From::Outside) => service.external == Local,
            _ => false,
        };
        let of = |local: bool| {
            let member = |c: &&Candidate| if local { c.node } else { c.cluster };
            let members = service.candidates.iter().filter(member);
            members.map(|c| (c.address, c.port)).collect::<Vec<_>>()
        };
        match (of(local), local && !of(false).is_empty()) {
            (some, _) if !some.is_empty() => Ok(some),
            (_, true) => Err(Choice::Refused(DropReason::NoLocalEndpoints)),
            _ => Err(Choice::Refused(DropReason::NoEndpoints)),
        }
    }
}

fn same(one: Reach, other: Reach) -> bool {
    match (one, other) {
        (Reach::Address(_, a, p), Reach::Address(_, b, q)) => (a, p) == (b, q),
        (Reach::NodePort(p), Reach::NodePort(q)) => p == q,
        _ => false,
    }
}

fn policies() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![Just(Cluster), Just(Local)]
}

fn addresses() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0u8..3).prop_map(|n| IpAddr::from([10, 96, 0, n])),
        Just(underlay(1)),
        Just(underlay(2)),
        Just(BALANCER),
    ]
}

fn reaches() -> impl Strategy<Value = Reach> {
    prop_oneof![
        (80u16..83).prop_map(Reach::NodePort),
        ((0u8..3), 80u16..83).prop_map(|(n, port)| {
            Reach::Address(FrontendKind::ClusterIp, [10, 96, 0, n].into(), port)
        }),
        (80u16..83).prop_map(|port| Reach::Address(FrontendKind::ExternalIp, BALANCER, port)),
    ]
}

fn services() -> impl Strategy<Value = Service> {
    let candidates =
        prop::collection::btree_map((1u8..3, 1u8..6), (any::<bool>(), any::<bool>()), 0..6);
    (
        prop_oneof![Just(TCP), Just(UDP)],
        prop::collection::vec(reaches(), 0..4),
        candidates,
        policies(),
        policies(),
    )
        .prop_map(|(protocol, mut reach, candidates, internal, external)| {
            // One Service does not name one frontend twice.
            reach.sort();
            reach.dedup();
            let candidates = candidates
                .into_iter()
                .map(|((node, pod), (any, here))| Candidate {
                    cluster: any,
                    node: here && node == 1,
                    ..candidate(node, pod)
                });
            Service {
                protocol,
                reach,
                candidates: candidates.collect(),
                internal,
                external,
                ..service(vec![])
            }
        })
}

proptest! {
    #[test]
    fn frontends_and_choices_agree_with_a_list(
        steps in prop::collection::vec((1u32..5, prop::option::weighted(0.8, services())), 1..20),
        probes in prop::collection::vec(
            (addresses(), 80u16..84, prop_oneof![Just(TCP), Just(UDP)], any::<u64>(), 0usize..3),
            30,
        ),
    ) {
        let mut tables = Snapshot::empty(node(1));
        let mut naive = Naive::default();
        for (number, step) in steps {
            let mut builder = SnapshotBuilder::new(&tables);
            match step {
                Some(service) => {
                    let taken = builder.set_service(id(number), service.clone()).is_ok();
                    prop_assert_eq!(taken, naive.set(id(number), service));
                }
                None => {
                    builder.remove_service(id(number));
                    naive.0.retain(|(other, _)| *other != id(number));
                }
            }
            tables = builder.finish();
        }
        for (address, port, protocol, hash, from) in probes {
            let from = [From::Pod, From::Host, From::Outside][from];
            let to = Frontend { address, port, protocol };
            match (ask(&tables, to, from, hash), naive.allowed(to, from)) {
                (Choice::Backend(found), Ok(allowed)) => {
                    prop_assert!(allowed.contains(&(found.address, found.port)));
                    prop_assert!(tables.is_backend(found.service, found.address, found.port));
                }
                (choice, Err(expected)) => prop_assert_eq!(choice, expected),
                (choice, Ok(allowed)) => prop_assert!(false, "{:?} {:?}", choice, allowed),
            }
        }
    }
}
