//! Two nodes, their workers and the wire between them, in one thread and without a kernel: the
//! whole way of a packet, over links in memory, at a time that the test chooses.

mod common;

use common::frames::{self, Kind, frame};
use common::{Cluster, remote_pod};
use skein_dataplane::fixtures::{endpoint, pod_mac, pod_v4, pod_v6};
use skein_dataplane::hairpin::{GATEWAY_V4, GATEWAY_V6};
use skein_dataplane::ids::WorkerId;
use skein_dataplane::verdict::DropReason;

/// Every kind of packet, from pod to pod, on one node and across, on one worker and on several.
#[test]
fn packets_cross_with_one_hop_less_and_their_bytes_untouched() {
    for workers in [1, 2, 4] {
        let mut cluster = Cluster::new(workers);
        for kind in Kind::ALL {
            for (to_node, to_pod) in [(1, 2), (2, 1)] {
                let sent = frame(kind, (1, 1), (to_node, to_pod), 64, b"payload");
                cluster.send(1, 1, sent);
                cluster.run();
                let arrived = cluster.received(to_node, to_pod);
                assert_eq!(
                    arrived.len(),
                    1,
                    "{kind:?} to pod {to_pod} on node {to_node}"
                );
                let expected = frame(kind, (1, 1), (to_node, to_pod), 63, b"payload");
                assert_eq!(
                    arrived[0][12..],
                    expected[12..],
                    "{kind:?} over {workers} workers"
                );
                assert_eq!(arrived[0][..6], pod_mac(to_node, to_pod).0);
            }
        }
        cluster.finish();
    }
}

#[test]
fn the_same_over_an_ipv6_underlay_with_a_right_outer_checksum() {
    let mut cluster = Cluster::over_ipv6(2);
    for kind in Kind::ALL {
        let payload = [0x5a; 301];
        cluster.send(1, 1, frame(kind, (1, 1), (2, 1), 64, &payload));
        let wire = cluster.take_from_wire(1).remove(0);
        frames::assert_udp_checksum_v6(&wire);
        cluster.send_from_wire(2, wire);
        cluster.run();
        let expected = frame(kind, (1, 1), (2, 1), 63, &payload);
        assert_eq!(cluster.received(2, 1)[0][12..], expected[12..], "{kind:?}");
    }
    cluster.finish();
}

#[test]
fn a_flow_is_decided_once() {
    let mut cluster = Cluster::new(1);
    for _ in 0..10 {
        cluster.send(1, 1, frame(Kind::UdpV4, (1, 1), (2, 1), 64, b"x"));
        cluster.run();
    }
    assert_eq!(cluster.received(2, 1).len(), 10);
    for node in [1, 2] {
        assert_eq!(cluster.count(node, |stats| stats.flow_misses.value()), 1);
        assert_eq!(cluster.count(node, |stats| stats.flow_hits.value()), 9);
    }
    cluster.finish();
}

#[test]
fn the_gateway_answers_for_itself_alone() {
    let mut cluster = Cluster::new(1);
    cluster.send(1, 1, frames::arp_request((1, 1), GATEWAY_V4));
    cluster.send(1, 1, frames::solicitation((1, 1), GATEWAY_V6));
    cluster.run();
    let answers = cluster.received(1, 1);
    assert_eq!(answers.len(), 2);
    frames::assert_arp_reply(&answers[0], (1, 1));
    frames::assert_advertisement(&answers[1], (1, 1));
    cluster.send(1, 1, frames::arp_request((1, 1), pod_v4(1, 2)));
    cluster.send(1, 1, frames::solicitation((1, 1), pod_v6(1, 2)));
    cluster.run();
    assert!(cluster.received(1, 1).is_empty());
    assert_eq!(cluster.drops(1, DropReason::ForeignNeighbour), 2);
    // Questions in somebody else's name: the MAC in the ARP packet and its address, the MAC in
    // the solicitation's option.
    let arp = || frames::arp_request((1, 1), GATEWAY_V4);
    let forge = |mut frame: Vec<u8>, at: usize, bytes: &[u8]| {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let neighbour = pod_mac(1, 2).0;
    cluster.expect_drop(1, 1, forge(arp(), 22, &neighbour), DropReason::SpoofedMac);
    let address = pod_v4(1, 2).octets();
    cluster.expect_drop(1, 1, forge(arp(), 28, &address), DropReason::SpoofedAddress);
    let solicitation = frames::solicitation_from((1, 1), neighbour, GATEWAY_V6);
    cluster.expect_drop(1, 1, solicitation, DropReason::SpoofedMac);
    cluster.finish();
}

#[test]
fn what_a_pod_may_not_say_is_dropped_under_its_name() {
    let mut cluster = Cluster::new(1);
    let good = || frame(Kind::UdpV4, (1, 1), (2, 1), 64, b"x");
    let mut mac = good();
    mac[6..12].copy_from_slice(&pod_mac(1, 2).0);
    cluster.expect_drop(1, 1, mac, DropReason::SpoofedMac);
    let mut address = frame(Kind::UdpV4, (1, 2), (2, 1), 64, b"x");
    address[6..12].copy_from_slice(&pod_mac(1, 1).0);
    cluster.expect_drop(1, 1, address, DropReason::SpoofedAddress);
    let elsewhere = |address| frames::to_address((1, 1), address);
    cluster.expect_drop(1, 1, elsewhere([224, 0, 0, 1]), DropReason::Multicast);
    cluster.expect_drop(1, 1, elsewhere([9, 9, 9, 9]), DropReason::NoRoute);
    let expired = frame(Kind::UdpV4, (1, 1), (2, 1), 1, b"x");
    cluster.expect_drop(1, 1, expired, DropReason::TtlExceeded);
    let big = frame(Kind::UdpV4, (1, 1), (2, 1), 64, &[0; 1423]);
    cluster.expect_drop(1, 1, big, DropReason::TooBig);
    cluster.send(1, 1, frame(Kind::UdpV4, (1, 1), (2, 1), 64, &[0; 1422]));
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 1, "the largest that fits");
    cluster.expect_drop(1, 1, good()[..13].to_vec(), DropReason::TruncatedEthernet);
    cluster.expect_drop(1, 1, good()[..30].to_vec(), DropReason::TruncatedIpv4);
    cluster.finish();
}

#[test]
fn what_the_wire_may_not_bring_is_dropped_under_its_name() {
    let mut cluster = Cluster::new(1);
    cluster.send(1, 1, frame(Kind::TcpV4, (1, 1), (2, 1), 64, b"x"));
    let good = cluster.take_from_wire(1).remove(0);
    let outer = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frames::fix_ipv4_checksum(&mut frame[14..]);
        frame
    };
    let inner = |at: usize, address: std::net::Ipv4Addr| {
        let mut frame = good.clone();
        frame[at..at + 4].copy_from_slice(&address.octets());
        frames::fix_ipv4_checksum(&mut frame[64..]);
        frame
    };
    // Outer source at 26, outer destination at 30, destination port at 36, VXLAN at 42, inner
    // Ethernet at 50, inner addresses at 76 and 80.
    let cases = [
        (outer(26, &[192, 168, 77, 9]), DropReason::UnknownPeer),
        (outer(30, &[192, 168, 77, 9]), DropReason::NotForUs),
        (outer(36, &[0, 53]), DropReason::NotForUs),
        (outer(42, &[0]), DropReason::BadVxlanFlags),
        (outer(46, &[0, 0, 0]), DropReason::BadIdentity),
        (outer(50, &[2, 2, 2, 2, 2, 2]), DropReason::ForeignRouterMac),
        (outer(15, &[3]), DropReason::EcnUnsupported),
        (inner(76, pod_v4(2, 2)), DropReason::ForeignInnerSource),
        (inner(76, pod_v4(3, 1)), DropReason::ForeignInnerSource),
        (inner(80, pod_v4(1, 2)), DropReason::OverlayTransit),
    ];
    for (frame, reason) in cases {
        cluster.expect_drop_from_wire(2, frame, reason);
    }
    // Its node may have heard of the pod's new labels before this one has.
    cluster.send_from_wire(2, outer(46, &[0, 1, 77]));
    cluster.send_from_wire(2, good);
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 2, "the packet itself is good");
    cluster.finish();
}

#[test]
fn a_local_pods_address_is_not_a_peers_even_where_the_peers_range_holds_it() {
    let mut cluster = Cluster::new(1);
    cluster.send(1, 1, frame(Kind::TcpV4, (1, 1), (2, 1), 64, b"x"));
    let mut claimed = cluster.take_from_wire(1).remove(0);
    // The inner source, of node 1's range.
    claimed[76..80].copy_from_slice(&pod_v4(1, 9).octets());
    frames::fix_ipv4_checksum(&mut claimed[64..]);
    cluster.send_from_wire(2, claimed.clone());
    cluster.run();
    assert_eq!(cluster.received(2, 1).len(), 1, "a pod not heard of yet");
    cluster.change(2, |builder| {
        let mut local = endpoint(2, 2);
        local.addresses.push(pod_v4(1, 9).into());
        builder.set_endpoint(local, WorkerId(0)).unwrap();
    });
    cluster.expect_drop_from_wire(2, claimed, DropReason::ForeignInnerSource);
    cluster.finish();
}

#[test]
fn the_wire_format_is_what_peers_of_other_versions_expect() {
    let mut cluster = Cluster::new(1);
    cluster.send(1, 1, frame(Kind::UdpV4, (1, 1), (2, 1), 64, b"x"));
    let wire = cluster.take_from_wire(1).remove(0);
    let outer = etherparse::SlicedPacket::from_ethernet(&wire).unwrap();
    let Some(etherparse::NetSlice::Ipv4(ip)) = outer.net else {
        panic!("outer IPv4")
    };
    assert!(ip.header().dont_fragment());
    assert_eq!(ip.header().source(), [192, 168, 77, 1]);
    assert_eq!(
        ip.header().header_checksum(),
        ip.header().to_header().calc_header_checksum()
    );
    let Some(etherparse::TransportSlice::Udp(udp)) = outer.transport else {
        panic!("outer UDP")
    };
    assert!(udp.source_port() >= 49152);
    assert_eq!(udp.destination_port(), 8472);
    assert_eq!(udp.checksum(), 0);
    assert_eq!(usize::from(udp.length()), wire.len() - 34);
    // Flags with the I bit, reserved, the identity of pod 1 on node 1 (1001), reserved.
    assert_eq!(udp.payload()[..8], [8, 0, 0, 0, 0, 0x03, 0xe9, 0]);
    assert_eq!(udp.payload()[8..14], [0x02, 0x53, 192, 168, 77, 2]);
    cluster.finish();
}

#[test]
fn unfinished_checksums_are_announced_nearby_and_finished_for_the_wire() {
    let mut cluster = Cluster::new(2);
    for kind in [Kind::TcpV4, Kind::TcpV6, Kind::UdpV4, Kind::UdpV6] {
        let partial = frames::unfinish(frame(kind, (1, 1), (1, 2), 64, b"payload"));
        cluster.send(1, 1, partial);
        cluster.run();
        assert!(
            cluster.sent(1, 2)[0].partial_checksum.is_some(),
            "{kind:?} to a neighbour"
        );
        let partial = frames::unfinish(frame(kind, (1, 1), (2, 1), 64, b"payload"));
        cluster.send(1, 1, partial);
        cluster.run();
        let sent = cluster.sent(2, 1);
        assert_eq!(sent[0].partial_checksum, None);
        let whole = frame(kind, (1, 1), (2, 1), 63, b"payload");
        assert_eq!(sent[0].bytes[12..], whole[12..], "{kind:?} across the wire");
    }
    cluster.finish();
}

#[test]
fn congestion_marks_cross_the_tunnel() {
    let mut cluster = Cluster::new(1);
    cluster.send(
        1,
        1,
        frames::with_ecn(frame(Kind::TcpV4, (1, 1), (2, 1), 64, b"x"), 2),
    );
    let mut wire = cluster.take_from_wire(1).remove(0);
    assert_eq!(
        wire[15] & 3,
        2,
        "the outer header says that the inner transport can"
    );
    wire[15] |= 3;
    frames::fix_ipv4_checksum(&mut wire[14..]);
    cluster.send_from_wire(2, wire);
    cluster.run();
    let arrived = cluster.received(2, 1).remove(0);
    assert_eq!(arrived[15] & 3, 3);
    let mut again = arrived.clone();
    frames::fix_ipv4_checksum(&mut again[14..]);
    assert_eq!(again, arrived, "the checksum followed");
    cluster.finish();
}

#[test]
fn a_change_is_seen_by_established_flows_at_their_next_packet_and_by_no_others() {
    let mut cluster = Cluster::new(1);
    let to_far = || frame(Kind::UdpV4, (1, 1), (2, 1), 64, b"x");
    let to_near = || frame(Kind::UdpV4, (1, 1), (1, 2), 64, b"x");
    cluster.send(1, 1, to_far());
    cluster.send(1, 1, to_near());
    cluster.run();
    cluster.change(1, |builder| builder.remove_remote_pod(pod_v4(2, 1).into()));
    cluster.send(1, 1, to_far());
    cluster.send(1, 1, to_near());
    cluster.run();
    assert_eq!(cluster.count(1, |stats| stats.flow_stale.value()), 1);
    assert_eq!(cluster.count(1, |stats| stats.flow_hits.value()), 1);
    // Other pods of that node come and go: nobody notices who talks to a pod that is known.
    let to_other = || frame(Kind::UdpV4, (1, 1), (2, 2), 64, b"x");
    cluster.send(1, 1, to_other());
    cluster.run();
    cluster.change(1, |builder| {
        builder
            .set_remote_pod(pod_v4(2, 77).into(), remote_pod(2, 77))
            .unwrap();
    });
    cluster.change(1, |builder| builder.remove_remote_pod(pod_v4(2, 77).into()));
    cluster.send(1, 1, to_other());
    cluster.run();
    assert_eq!(cluster.count(1, |stats| stats.flow_stale.value()), 1);
    cluster.finish();
}

#[test]
fn a_link_that_goes_gives_all_its_frames_back() {
    let mut cluster = Cluster::new(2);
    for round in 0..3 {
        for _ in 0..50 {
            cluster.send(1, 1, frame(Kind::UdpV4, (1, 1), (1, 2), 64, b"x"));
        }
        if round == 1 {
            cluster.remove_pod(1, 2);
        }
        cluster.run();
    }
    assert_eq!(cluster.received(1, 2).len(), 50);
    // Its address still lies in this node's own range, where nobody has it any more.
    assert_eq!(cluster.drops(1, DropReason::NoRoute), 100);
    cluster.finish();
}
