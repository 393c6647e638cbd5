//! Connections through two nodes: Services translated and translated back, policies that stop
//! both directions, node ports by way of another node, errors that find the right pod, fragments
//! in the wrong order, and the outside.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use common::Cluster;
use common::frames::{self, Pod};
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use skein_dataplane::fixtures::{gateway_mac, pod_mac, pod_v4, uplink_mac};
use skein_dataplane::ids::EndpointId;
use skein_dataplane::parse::parse;
use skein_dataplane::policy::EndpointPolicy;
use skein_dataplane::service::ServiceId;
use skein_dataplane::snapshot::{
    Candidate, Exit, FrontendKind, Masquerade, Reach, Rules, Service, TrafficPolicy,
};
use skein_dataplane::verdict::DropReason;

const VIRTUAL: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const NODE_PORT: u16 = 30_080;
const PORT: u16 = 80;
const TARGET: u16 = 8080;
const CLIENT: u16 = 40_000;

const NEAR: Pod = (1, 1);
const FAR: Pod = (2, 1);

/// A UDP frame that a pod sends.
fn udp(from: Pod, to: (Ipv4Addr, u16), port: u16, payload: &[u8]) -> Vec<u8> {
    let l2 = PacketBuilder::ethernet2(pod_mac(from.0, from.1).0, gateway_mac(from.0, from.1).0);
    let l3 = l2.ipv4(pod_v4(from.0, from.1).octets(), to.0.octets(), 64);
    let mut frame = Vec::new();
    l3.udp(port, to.1).write(&mut frame, payload).unwrap();
    frame
}

/// A UDP frame from outside to a node, by the wire.
fn from_outside(node: u8, to: Ipv4Addr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let l2 = PacketBuilder::ethernet2(ROUTER, uplink_mac(node).0);
    let l3 = l2.ipv4(OUTSIDE.octets(), to.octets(), 64);
    let mut frame = Vec::new();
    let l4 = l3.udp(ports.0, ports.1);
    l4.write(&mut frame, payload).unwrap();
    frame
}

const ROUTER: [u8; 6] = [2, 0x99, 0, 0, 0, 1];

/// Addresses, ports and payload of a UDP frame whose checksums are right.
fn read(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16), Vec<u8>) {
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(etherparse::NetSlice::Ipv4(ip)) = &sliced.net else {
        panic!("no IPv4")
    };
    let header = ip.header();
    assert_eq!(
        header.header_checksum(),
        header.to_header().calc_header_checksum()
    );
    let (from, to) = (header.source_addr(), header.destination_addr());
    let Some(TransportSlice::Udp(udp)) = &sliced.transport else {
        panic!("no UDP")
    };
    let right = udp.to_header().calc_checksum_ipv4_raw(
        header.source(),
        header.destination(),
        udp.payload(),
    );
    assert_eq!(udp.checksum(), right.unwrap(), "the UDP checksum");
    let payload = udp.payload().to_vec();
    (
        (from, udp.source_port()),
        (to, udp.destination_port()),
        payload,
    )
}

fn service(candidates: &[Pod], local: impl Fn(Pod) -> bool) -> Service {
    Service {
        protocol: 17,
        ipv4: true,
        reach: vec![
            Reach::Address(FrontendKind::ClusterIp, VIRTUAL.into(), PORT),
            Reach::NodePort(NODE_PORT),
        ],
        candidates: (candidates.iter())
            .map(|&pod| Candidate {
                address: pod_v4(pod.0, pod.1).into(),
                port: TARGET,
                local: local(pod),
                cluster: true,
                node: local(pod),
            })
            .collect(),
        internal: TrafficPolicy::Cluster,
        external: TrafficPolicy::Cluster,
        affinity: None,
        source_ranges: vec![],
    }
}

fn serve(cluster: &mut Cluster, candidates: &[Pod]) {
    for node in [1, 2] {
        let service = service(candidates, |pod| pod.0 == node);
        cluster.change(node, |builder| {
            let id = ServiceId::new(7).unwrap();
            builder.set_service(id, service).unwrap();
        });
    }
}

/// Gives a node a default route, and the router's MAC.
fn connect(cluster: &mut Cluster, node: u8) {
    cluster.change(node, |builder| {
        let router: IpAddr = [192, 168, 77, 254].into();
        let exit = Exit {
            uplink: 0,
            gateway: Some(router),
            src_mac: uplink_mac(node),
            mtu: 1500,
        };
        builder.set_exits([("0.0.0.0/0".parse().unwrap(), Some(exit))]);
        let mac = skein_dataplane::wire::ethernet::MacAddr(ROUTER);
        builder.set_neighbours([((0, router), mac)]);
        builder.set_masquerade(&Masquerade {
            enabled: true,
            exclude: vec![],
        });
    });
}

fn only(mut frames: Vec<Vec<u8>>) -> Vec<u8> {
    assert_eq!(frames.len(), 1, "one frame");
    frames.remove(0)
}

#[test]
fn a_service_is_translated_on_the_way_out_and_back() {
    for backend in [FAR, (1, 2)] {
        let mut cluster = Cluster::new(2);
        serve(&mut cluster, &[backend]);
        let own = (pod_v4(1, 1), CLIENT);
        let real = (pod_v4(backend.0, backend.1), TARGET);
        for _ in 0..2 {
            cluster.send(1, 1, udp(NEAR, (VIRTUAL, PORT), CLIENT, b"question"));
            cluster.run();
            let asked = read(&only(cluster.received(backend.0, backend.1)));
            assert_eq!(asked, (own, real, b"question".to_vec()));
            cluster.send(backend.0, backend.1, udp(backend, own, TARGET, b"answer"));
            cluster.run();
            let answered = read(&only(cluster.received(1, 1)));
            assert_eq!(answered, ((VIRTUAL, PORT), own, b"answer".to_vec()));
        }
        assert_eq!(cluster.all_drops(1) + cluster.all_drops(2), 0);
        cluster.finish();
    }
}

#[test]
fn a_pod_that_is_its_own_backend_hears_from_its_node() {
    let mut cluster = Cluster::new(1);
    serve(&mut cluster, &[NEAR]);
    cluster.send(1, 1, udp(NEAR, (VIRTUAL, PORT), CLIENT, b"?"));
    cluster.run();
    let (from, to, _) = read(&only(cluster.received(1, 1)));
    assert_eq!(
        (from.0, to),
        (Ipv4Addr::new(192, 168, 77, 1), (pod_v4(1, 1), TARGET))
    );
    cluster.send(1, 1, udp(NEAR, from, TARGET, b"!"));
    cluster.run();
    let (from, to, payload) = read(&only(cluster.received(1, 1)));
    assert_eq!((from, to), ((VIRTUAL, PORT), (pod_v4(1, 1), CLIENT)));
    assert_eq!(payload, b"!");
    cluster.finish();
}

#[test]
fn a_backend_that_is_gone_is_left_at_the_next_datagram() {
    let mut cluster = Cluster::new(1);
    serve(&mut cluster, &[FAR]);
    cluster.send(1, 1, udp(NEAR, (VIRTUAL, PORT), CLIENT, b"1"));
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 1);
    serve(&mut cluster, &[(1, 2)]);
    cluster.send(1, 1, udp(NEAR, (VIRTUAL, PORT), CLIENT, b"2"));
    cluster.run();
    assert_eq!(
        (cluster.received(2, 1).len(), cluster.received(1, 2).len()),
        (0, 1)
    );
    serve(&mut cluster, &[]);
    cluster.expect_drop(
        1,
        1,
        udp(NEAR, (VIRTUAL, PORT), CLIENT, b"3"),
        DropReason::NoEndpoints,
    );
    cluster.finish();
}

#[test]
fn a_policy_stops_a_connection_both_ways_at_the_next_packets() {
    let mut cluster = Cluster::new(2);
    let question = || udp(NEAR, (pod_v4(2, 1), TARGET), CLIENT, b"?");
    let answer = || udp(FAR, (pod_v4(1, 1), CLIENT), TARGET, b"!");
    cluster.send(1, 1, question());
    cluster.run();
    cluster.send(2, 1, answer());
    cluster.run();
    assert_eq!(
        (cluster.received(2, 1).len(), cluster.received(1, 1).len()),
        (1, 1)
    );
    // What the far pod takes is nobody's any more; what it answers was asked.
    let closed = || EndpointPolicy {
        own: vec![],
        ingress: Some(Arc::new(Rules::default())),
        egress: None,
    };
    cluster.change(2, |builder| {
        builder.set_policy(EndpointId(1), closed()).unwrap();
    });
    cluster.send(2, 1, answer());
    cluster.send(1, 1, question());
    cluster.run();
    assert_eq!(
        (cluster.received(2, 1).len(), cluster.received(1, 1).len()),
        (0, 0)
    );
    assert_eq!(cluster.drops(2, DropReason::PolicyDeniedIngress), 2);
    // The near pod may not be asked, but what it asks is answered.
    cluster.change(2, |builder| {
        let open = EndpointPolicy::OPEN;
        builder.set_policy(EndpointId(1), open).unwrap();
    });
    cluster.change(1, |builder| {
        builder.set_policy(EndpointId(1), closed()).unwrap();
    });
    cluster.send(1, 1, question());
    cluster.run();
    cluster.send(2, 1, answer());
    cluster.run();
    assert_eq!(
        (cluster.received(2, 1).len(), cluster.received(1, 1).len()),
        (1, 1)
    );
    cluster.send(2, 1, udp(FAR, (pod_v4(1, 1), 53), TARGET, b"unasked"));
    cluster.run();
    assert_eq!(cluster.received(1, 1).len(), 0);
    assert_eq!(cluster.drops(1, DropReason::PolicyDeniedIngress), 1);
    cluster.finish();
}

#[test]
fn a_node_port_answers_the_outside_by_way_of_the_backends_node() {
    for backend in [NEAR, FAR] {
        let mut cluster = Cluster::new(1);
        serve(&mut cluster, &[backend]);
        connect(&mut cluster, 1);
        let node = Ipv4Addr::new(192, 168, 77, 1);
        let asked = from_outside(1, node, (CLIENT, NODE_PORT), b"?");
        cluster.send_from_wire(1, asked);
        cluster.run();
        let (from, to, _) = read(&only(cluster.received(backend.0, backend.1)));
        assert_eq!(from.0, node, "under policy Cluster the node asks");
        assert_eq!(to, (pod_v4(backend.0, backend.1), TARGET));
        let answer = udp(backend, from, TARGET, b"!");
        cluster.send(backend.0, backend.1, answer);
        if backend.0 == 2 {
            let tunnelled = only(cluster.take_from_wire(2));
            cluster.send_from_wire(1, tunnelled);
        }
        let answered = read(&only(cluster.take_from_wire(1)));
        assert_eq!(
            answered,
            ((node, NODE_PORT), (OUTSIDE, CLIENT), b"!".to_vec())
        );
        assert_eq!(cluster.all_drops(1) + cluster.all_drops(2), 0);
        // What is neither a Service's nor an answer is not ours.
        let stray = from_outside(1, node, (CLIENT, 30_081), b"?");
        cluster.expect_drop_from_wire(1, stray, DropReason::NotForUs);
        cluster.finish();
    }
}

#[test]
fn the_outside_sees_the_node_and_its_errors_find_the_pod() {
    let mut cluster = Cluster::new(1);
    connect(&mut cluster, 1);
    cluster.send(1, 1, udp(NEAR, (OUTSIDE, 53), CLIENT, b"?"));
    let sent = only(cluster.take_from_wire(1));
    let (from, to, _) = read(&sent);
    assert_eq!(
        (from.0, to),
        (Ipv4Addr::new(192, 168, 77, 1), (OUTSIDE, 53))
    );
    assert!((61_000..62_000).contains(&from.1), "a port of masquerade");
    cluster.send_from_wire(1, from_outside(1, from.0, (53, from.1), b"!"));
    cluster.run();
    let answered = read(&only(cluster.received(1, 1)));
    assert_eq!(
        answered,
        ((OUTSIDE, 53), (pod_v4(1, 1), CLIENT), b"!".to_vec())
    );
    // A router on the way says that the packet was too big.
    let error = |about: &[u8], router: [u8; 4]| {
        let l2 = PacketBuilder::ethernet2(ROUTER, uplink_mac(1).0);
        let l3 = l2.ipv4(router, from.0.octets(), 60);
        let mut frame = Vec::new();
        let l4 = l3.icmpv4_raw(3, 4, [0, 0, 5, 0]);
        l4.write(&mut frame, &about[14..42]).unwrap();
        frame
    };
    cluster.send_from_wire(1, error(&sent, [198, 51, 100, 1]));
    cluster.run();
    let told = only(cluster.received(1, 1));
    let headers = parse(&told, told.len()).unwrap();
    assert_eq!(
        headers.src(),
        IpAddr::from([198, 51, 100, 1]),
        "the router speaks for itself"
    );
    assert_eq!(headers.dst(), IpAddr::from(pod_v4(1, 1)));
    assert_eq!(frames::sum(&told[34..]), 0xffff, "the ICMP checksum");
    let quote = &told[42..];
    assert_eq!(
        quote[12..16],
        pod_v4(1, 1).octets(),
        "the quote is the pod's packet"
    );
    assert_eq!(quote[20..22], CLIENT.to_be_bytes());
    // About a packet that nobody sent.
    let mut unknown = sent;
    unknown[34..36].copy_from_slice(&1_u16.to_be_bytes());
    let stray = error(&unknown, [198, 51, 100, 1]);
    cluster.expect_drop_from_wire(1, stray, DropReason::IcmpErrorUnrelated);
    cluster.finish();
}

#[test]
fn a_pod_cannot_put_an_error_into_anothers_connection() {
    let mut cluster = Cluster::new(1);
    let asked = udp(NEAR, (pod_v4(2, 1), TARGET), CLIENT, b"?");
    cluster.send(1, 1, asked.clone());
    cluster.run();
    // Pod 2 of the node says that it stands between the two.
    let l2 = PacketBuilder::ethernet2(pod_mac(1, 2).0, gateway_mac(1, 2).0);
    let l3 = l2.ipv4(pod_v4(1, 2).octets(), pod_v4(1, 1).octets(), 64);
    let mut forged = Vec::new();
    let l4 = l3.icmpv4_raw(3, 4, [0, 0, 2, 0]);
    l4.write(&mut forged, &asked[14..42]).unwrap();
    cluster.expect_drop(1, 2, forged, DropReason::IcmpErrorUnrelated);
    cluster.finish();
}

#[test]
fn a_later_fragment_waits_for_its_first_and_for_no_longer_than_that() {
    let mut cluster = Cluster::new(1);
    serve(&mut cluster, &[FAR]);
    let whole = udp(NEAR, (VIRTUAL, PORT), CLIENT, &[7; 64]);
    let parts = common::naive::cut_v4(&whole[14..], 40);
    let framed = |part: &[u8]| [&whole[..14], part].concat();
    cluster.send(1, 1, framed(&parts[1]));
    cluster.run();
    assert!(cluster.received(2, 1).is_empty(), "its ports are not known");
    cluster.send(1, 1, framed(&parts[0]));
    cluster.run();
    let arrived = cluster.received(2, 1);
    assert_eq!(arrived.len(), parts.len(), "both, in their order");
    for part in &arrived {
        assert_eq!(part[30..34], pod_v4(2, 1).octets(), "translated");
    }
    assert_eq!(arrived[0][36..38], TARGET.to_be_bytes());
    let datagram = common::naive::reassemble(&arrived, 1500);
    assert_eq!(datagram[28..], [7; 64]);
    cluster.advance(Duration::from_secs(1));
    cluster.finish();
}

#[test]
fn an_unused_address_of_the_nodes_own_pods_is_nobodys() {
    let mut cluster = Cluster::new(1);
    connect(&mut cluster, 1);
    let lost = udp(NEAR, (pod_v4(1, 77), 53), CLIENT, b"?");
    cluster.expect_drop(1, 1, lost, DropReason::NoRoute);
    assert!(cluster.take_from_wire(1).is_empty());
    let mut claimed = from_outside(1, Ipv4Addr::new(192, 168, 77, 1), (1, 2), b"x");
    claimed[26..30].copy_from_slice(&pod_v4(1, 77).octets());
    frames::fix_ipv4_checksum(&mut claimed[14..]);
    cluster.expect_drop_from_wire(1, claimed, DropReason::ForeignPlainSource);
    cluster.finish();
}
