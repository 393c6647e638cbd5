//! The node's own network stack on the pod network, over two nodes in memory: host and pod in
//! every combination, and what nobody may say there.

mod common;

use std::net::{IpAddr, Ipv4Addr};

use common::Cluster;
use common::frames::{self, HOST, Kind, Pod, frame, udp_v4};
use skein_dataplane::fixtures::{host, host_mac, pod_mac, pod_v4, underlay};
use skein_dataplane::hairpin::GATEWAY_V4;
use skein_dataplane::ids::IdentityId;
use skein_dataplane::verdict::DropReason;

const OVERLAY_PORT: u16 = skein_dataplane::fixtures::OVERLAY_PORT;

fn node_v4(node: u8) -> [u8; 4] {
    match underlay(node) {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(_) => unreachable!("fixtures have IPv4 underlay addresses"),
    }
}

/// Every pair of a host and a pod, nearby and far, both ways.
const PAIRS: [(Pod, Pod); 6] = [
    ((1, HOST), (1, 1)),
    ((1, 1), (1, HOST)),
    ((1, HOST), (2, 1)),
    ((2, 1), (1, HOST)),
    ((1, 2), (2, HOST)),
    ((2, HOST), (1, 2)),
];

fn every_pair_speaks(mut cluster: Cluster) {
    for kind in Kind::ALL {
        for (from, to) in PAIRS {
            cluster.send(from.0, from.1, frame(kind, from, to, 64, b"payload"));
            cluster.run();
            let arrived = cluster.received(to.0, to.1);
            assert_eq!(arrived.len(), 1, "{kind:?} from {from:?} to {to:?}");
            // One hop less, and not another byte: both addresses are the true ones.
            let expected = frame(kind, from, to, 63, b"payload");
            assert_eq!(arrived[0][12..], expected[12..], "{kind:?} {from:?}");
            let (mac, gateway) = if to.1 == HOST {
                (host_mac(to.0), Some(host(to.0).gateway_mac))
            } else {
                (pod_mac(to.0, to.1), None)
            };
            assert_eq!(arrived[0][..6], mac.0);
            if let Some(gateway) = gateway {
                assert_eq!(arrived[0][6..12], gateway.0);
            }
        }
    }
    for node in [1, 2] {
        assert_eq!(cluster.all_drops(node), 0);
    }
    cluster.finish();
}

#[test]
fn host_and_pods_speak_in_every_combination() {
    for workers in [1, 2, 4] {
        every_pair_speaks(Cluster::new(workers));
    }
}

#[test]
fn the_same_over_an_ipv6_underlay() {
    every_pair_speaks(Cluster::over_ipv6(2));
}

#[test]
fn unfinished_checksums_of_the_host_are_announced_nearby_and_finished_for_the_wire() {
    let mut cluster = Cluster::new(2);
    for kind in [Kind::TcpV4, Kind::TcpV6, Kind::UdpV4, Kind::UdpV6] {
        for (from, to) in PAIRS {
            let partial = frames::unfinish(frame(kind, from, to, 64, b"payload"));
            cluster.send(from.0, from.1, partial);
            cluster.run();
            let sent = cluster.sent(to.0, to.1).remove(0);
            assert_eq!(sent.partial_checksum.is_some(), from.0 == to.0);
            if from.0 != to.0 {
                let whole = frame(kind, from, to, 63, b"payload");
                assert_eq!(sent.bytes[12..], whole[12..], "{kind:?} {from:?}");
            }
        }
    }
    cluster.finish();
}

/// The VXLAN header of what a host sends says "remote node", never "host".
#[test]
fn a_host_is_a_remote_node_on_the_wire() {
    let mut cluster = Cluster::new(1);
    cluster.send(1, HOST, frame(Kind::UdpV4, (1, HOST), (2, 1), 64, b"x"));
    let wire = cluster.take_from_wire(1).remove(0);
    assert_eq!(wire[42..50], [8, 0, 0, 0, 0, 0, 2, 0]);
    // The same packet with another identity, and in another's name.
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = wire.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frames::fix_ipv4_checksum(&mut frame[14..]);
        frames::fix_ipv4_checksum(&mut frame[64..]);
        frame
    };
    let vni = |identity: u32| with(46, &identity.to_be_bytes()[1..]);
    let source = |address: [u8; 4]| with(76, &address);
    let cases = [
        (vni(IdentityId::HOST.number()), DropReason::BadIdentity),
        (vni(1001), DropReason::BadIdentity),
        // A pod that is not known here, as if it were a node.
        (source(pod_v4(1, 77).octets()), DropReason::BadIdentity),
        // Another node's address, and the receiver's own.
        (source([192, 168, 77, 3]), DropReason::ForeignInnerSource),
        (source(node_v4(2)), DropReason::ForeignInnerSource),
        // From the address of a node that is known to be another.
        (with(26, &[192, 168, 77, 3]), DropReason::UnknownPeer),
    ];
    for (frame, reason) in cases {
        cluster.expect_drop_from_wire(2, frame, reason);
    }
    cluster.send_from_wire(2, wire.clone());
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 1, "the packet itself is good");
    cluster.finish();
}

#[test]
fn what_the_kernel_forwards_into_the_host_link_is_judged_by_its_address() {
    let mut cluster = Cluster::new(1);
    let pod = pod_v4(1, 1).octets();
    let from = |source: [u8; 4]| udp_v4((1, HOST), source, pod, 53);
    let pods = [pod_v4(1, 2), pod_v4(2, 1), pod_v4(2, 200)].map(|ip| ip.octets());
    for source in [pods[0], pods[1], pods[2], node_v4(2), pod] {
        let reason = DropReason::ForwardedClusterSource;
        cluster.expect_drop(1, HOST, from(source), reason);
    }
    for (count, source) in (1..).zip([[9, 9, 9, 9], [198, 51, 100, 7]]) {
        cluster.send(1, HOST, from(source));
        cluster.run();
        assert_eq!(cluster.received(1, 1).len(), 1, "the world, {count}");
    }
    let mut mac = from(node_v4(1));
    mac[6..12].copy_from_slice(&pod_mac(1, 2).0);
    cluster.expect_drop(1, HOST, mac, DropReason::SpoofedMac);
    assert!(cluster.received(1, HOST).is_empty(), "nobody is told");
    cluster.send(1, HOST, from(node_v4(1)));
    cluster.run();
    assert_eq!(cluster.received(1, 1).len(), 1, "the host's own is good");
    cluster.finish();
}

#[test]
fn a_pod_cannot_speak_as_a_node() {
    let mut cluster = Cluster::new(1);
    let pod = pod_v4(1, 2).octets();
    for source in [node_v4(1), node_v4(2)] {
        let forged = udp_v4((1, 1), source, pod, 53);
        cluster.expect_drop(1, 1, forged, DropReason::SpoofedAddress);
    }
    cluster.finish();
}

#[test]
fn nobody_inside_reaches_the_overlay_port_of_a_node() {
    let mut cluster = Cluster::new(1);
    for node in [1, 2] {
        let own = pod_v4(1, 1).octets();
        let forged = udp_v4((1, 1), own, node_v4(node), OVERLAY_PORT);
        cluster.expect_drop(1, 1, forged.clone(), DropReason::OverlayPort);
        let mut v6 = frame(Kind::UdpV6, (1, 1), (node, HOST), 64, b"x");
        v6[56..58].copy_from_slice(&OVERLAY_PORT.to_be_bytes());
        cluster.expect_drop(1, 1, v6, DropReason::OverlayPort);
        // In fragments, of which the later one comes first: it waits for one that never comes.
        let fragment = |offset: u16, more: bool| {
            let mut frame = forged.clone();
            frame.truncate(34);
            frame.extend_from_slice(&forged[34..42]);
            frame[16..18].copy_from_slice(&28u16.to_be_bytes());
            let field = (offset / 8) | (u16::from(more) << 13);
            frame[20..22].copy_from_slice(&field.to_be_bytes());
            frames::fix_ipv4_checksum(&mut frame[14..]);
            frame
        };
        cluster.send(1, 1, fragment(8, false));
        cluster.run();
        cluster.expect_drop(1, 1, fragment(0, true), DropReason::OverlayPort);
        assert!(cluster.received(node, HOST).is_empty());
    }
    // Not from a host either, nor from a node that lets its pods do it.
    let host = udp_v4((1, HOST), node_v4(1), node_v4(2), OVERLAY_PORT);
    cluster.expect_drop(1, HOST, host, DropReason::OverlayPort);
    cluster.send(1, 1, frame(Kind::UdpV4, (1, 1), (2, HOST), 64, b"x"));
    let mut wire = cluster.take_from_wire(1).remove(0);
    wire[86..88].copy_from_slice(&OVERLAY_PORT.to_be_bytes());
    cluster.expect_drop_from_wire(2, wire, DropReason::OverlayPort);
    // To a pod, the port is like any other.
    let pod = pod_v4(2, 1).octets();
    cluster.send(
        1,
        1,
        udp_v4((1, 1), pod_v4(1, 1).octets(), pod, OVERLAY_PORT),
    );
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 1);
    cluster.finish();
}

#[test]
fn nodes_speak_to_each_other_by_the_underlay_alone() {
    let mut cluster = Cluster::new(1);
    for to in [node_v4(1), node_v4(2)] {
        let own = udp_v4((1, HOST), node_v4(1), to, 53);
        cluster.expect_drop(1, HOST, own, DropReason::NodeToNode);
    }
    cluster.send(1, HOST, frame(Kind::UdpV4, (1, HOST), (2, 1), 64, b"x"));
    let mut wire = cluster.take_from_wire(1).remove(0);
    wire[80..84].copy_from_slice(&node_v4(2));
    frames::fix_ipv4_checksum(&mut wire[64..]);
    cluster.expect_drop_from_wire(2, wire, DropReason::NodeToNode);
    cluster.finish();
}

#[test]
fn the_host_is_told_as_a_pod_is() {
    let mut cluster = Cluster::new(1);
    let cases = [
        (frame(Kind::UdpV4, (1, HOST), (2, 1), 1, b"x"), [11, 0]),
        (
            frame(Kind::UdpV4, (1, HOST), (1, 1), 64, &[0; 1423]),
            [3, 4],
        ),
        (udp_v4((1, HOST), node_v4(1), [9, 9, 9, 9], 53), [3, 1]),
    ];
    for (mut sent, kind) in cases {
        // Do not fragment.
        sent[20] |= 0x40;
        frames::fix_ipv4_checksum(&mut sent[14..]);
        cluster.send(1, HOST, sent);
        cluster.run();
        let error = cluster.received(1, HOST).remove(0);
        assert_eq!(error[..6], host_mac(1).0);
        assert_eq!(error[26..30], GATEWAY_V4.octets());
        assert_eq!(error[30..34], node_v4(1));
        assert_eq!(error[34..36], kind);
    }
    // The gateway answers it, too.
    let mut echo = frame(Kind::EchoV4, (1, HOST), (1, 1), 64, b"x");
    echo[30..34].copy_from_slice(&GATEWAY_V4.octets());
    frames::fix_ipv4_checksum(&mut echo[14..]);
    cluster.send(1, HOST, echo);
    cluster.run();
    let answer = cluster.received(1, HOST).remove(0);
    assert_eq!(
        Ipv4Addr::from(<[u8; 4]>::try_from(&answer[26..30]).unwrap()),
        GATEWAY_V4
    );
    assert_eq!(answer[34], 0, "an echo reply");
    cluster.finish();
}

#[test]
fn without_the_host_link_a_node_is_not_there() {
    let mut cluster = Cluster::new(1);
    let to_host = || frame(Kind::UdpV4, (1, 1), (1, HOST), 64, b"x");
    cluster.send(1, 1, to_host());
    cluster.run();
    assert_eq!(cluster.received(1, HOST).len(), 1);
    cluster.change(1, |builder| builder.set_host(None).unwrap());
    cluster.expect_drop(1, 1, to_host(), DropReason::NoRoute);
    cluster.finish();
}
