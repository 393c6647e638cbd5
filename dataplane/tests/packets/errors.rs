//! ICMP errors from the gateway, and echo requests to it.

use std::time::Duration;

use skein_dataplane::fixtures::{endpoint, gateway_mac, pod_mac};
use skein_dataplane::hairpin::{GATEWAY_V4, GATEWAY_V6};
use skein_dataplane::icmp_error::{BURST, INTERVAL};
use skein_dataplane::ids::WorkerId;
use skein_dataplane::verdict::DropReason;

use crate::common::frames::{self, Kind, frame, sum};
use crate::common::{Cluster, naive};
use crate::{FAR, FROM, MTU, NEAR};

/// The frame is dropped for that reason, and its sender is told so.
fn told(cluster: &mut Cluster, frame: Vec<u8>, reason: DropReason) -> (u8, u8, u32) {
    let errors = cluster.count(1, |stats| stats.icmp_errors.value());
    let packet = frame[naive::IP..].to_vec();
    cluster.expect_drop(FROM.0, FROM.1, frame, reason);
    let back = cluster.received(FROM.0, FROM.1);
    assert_eq!(back.len(), 1, "one error for {}", reason.name());
    let now = cluster.count(1, |stats| stats.icmp_errors.value());
    assert_eq!(now, errors + 1);
    let (kind, code, word, quote) = naive::icmp_error(&back[0], FROM);
    assert!(quote.len() >= 28 || quote.len() == packet.len());
    assert_eq!(quote, packet[..quote.len()], "as it was sent");
    (kind, code, word)
}

fn untold(cluster: &mut Cluster, frame: Vec<u8>, reason: DropReason) {
    cluster.expect_drop(FROM.0, FROM.1, frame, reason);
    assert!(cluster.received(FROM.0, FROM.1).is_empty());
}

#[test]
fn what_does_not_fit_is_answered_with_the_paths_mtu() {
    for (mut cluster, far_mtu) in [(Cluster::new(1), 1450), (Cluster::over_ipv6(2), 1430)] {
        for (to, mtu) in [(NEAR, 1450), (FAR, far_mtu)] {
            for payload in [1600, 9000, 60_000] {
                let payload = vec![7; payload];
                let v4 = frame(Kind::UdpV4, FROM, to, 64, &payload);
                let said = told(&mut cluster, v4, DropReason::TooBig);
                assert_eq!(said, (3, 4, mtu));
                let v6 = frame(Kind::TcpV6, FROM, to, 64, &payload);
                let said = told(&mut cluster, v6, DropReason::TooBig);
                assert_eq!(said, (2, 0, mtu));
            }
        }
        cluster.finish();
    }
}

#[test]
fn a_partial_checksum_is_quoted_as_it_came() {
    let mut cluster = Cluster::new(1);
    let big = frames::unfinish(frame(Kind::TcpV4, FROM, NEAR, 64, &[7; 2000]));
    let said = told(&mut cluster, big, DropReason::TooBig);
    assert_eq!(said, (3, 4, MTU as u32));
    cluster.finish();
}

#[test]
fn what_expires_or_has_no_way_is_answered() {
    let mut cluster = Cluster::new(1);
    for to in [NEAR, FAR] {
        for (kind, expected) in [(Kind::UdpV4, (11, 0, 0)), (Kind::EchoV6, (3, 0, 0))] {
            for ttl in [0, 1] {
                let expired = frame(kind, FROM, to, ttl, b"x");
                let said = told(&mut cluster, expired, DropReason::TtlExceeded);
                assert_eq!(said, expected);
            }
        }
    }
    // The node's own range, where nobody has the address, and no node's range.
    for (kind, expected) in [(Kind::UdpV4, (3, 1, 0)), (Kind::UdpV6, (1, 0, 0))] {
        for nobody in [(1, 77), (99, 1)] {
            let lost = frame(kind, FROM, nobody, 64, b"x");
            let said = told(&mut cluster, lost, DropReason::NoRoute);
            assert_eq!(said, expected);
        }
    }
    cluster.finish();
}

#[test]
fn about_some_packets_no_error_is_sent() {
    let mut cluster = Cluster::new(1);
    // Errors, a message of no known type, a later fragment.
    let unrelated = DropReason::IcmpErrorUnrelated;
    let about_nothing = [(3, unrelated), (11, unrelated), (200, DropReason::NoRoute)];
    for (kind, reason) in about_nothing {
        let message = [kind, 0, 0, 0, 0, 0, 0, 0, 0x45, 0, 0, 28];
        let packet = naive::ipv4(FROM, (99, 1), 1, &[], &message);
        let packet = naive::framed(FROM, &packet);
        untold(&mut cluster, packet, reason);
    }
    let message = [1, 0, 0, 0, 0, 0, 0, 0, 0x60, 0, 0, 0];
    let packet = naive::framed(FROM, &naive::ipv6(FROM, (99, 1), 58, &message));
    untold(&mut cluster, packet, unrelated);
    let whole = naive::ipv4(FROM, (99, 1), 17, &[], &[0, 1, 0, 2, 0, 40, 0, 0].repeat(5));
    let fragments = naive::cut_v4(&whole, 16);
    let [first, later, ..] = &fragments[..] else {
        panic!("three fragments")
    };
    let said = told(
        &mut cluster,
        naive::framed(FROM, first),
        DropReason::NoRoute,
    );
    assert_eq!(said, (3, 1, 0));
    let later = naive::framed(FROM, later);
    untold(&mut cluster, later, DropReason::NoRoute);
    // Nobody is told of a forged source.
    let mut forged = frame(Kind::UdpV4, NEAR, FAR, 1, b"x");
    forged[6..12].copy_from_slice(&pod_mac(FROM.0, FROM.1).0);
    untold(&mut cluster, forged, DropReason::SpoofedAddress);
    cluster.finish();
}

#[test]
fn multicast_and_broadcast_are_dropped_each_under_its_name() {
    let mut cluster = Cluster::new(1);
    let to = |address| frames::to_address(FROM, address);
    untold(&mut cluster, to([224, 0, 0, 251]), DropReason::Multicast);
    untold(&mut cluster, to([255; 4]), DropReason::Broadcast);
    let mut v6 = naive::ipv6(FROM, FAR, 17, &[0, 1, 0, 2, 0, 8, 1, 1]);
    v6[24..26].copy_from_slice(&[0xff, 0x02]);
    untold(
        &mut cluster,
        naive::framed(FROM, &v6),
        DropReason::Multicast,
    );
    // To everybody on the link, whatever the packet says.
    for (station, reason) in [
        ([0xff; 6], DropReason::Broadcast),
        ([0x01, 0, 0x5e, 0, 0, 1], DropReason::Multicast),
    ] {
        let mut frame = frame(Kind::UdpV4, FROM, FAR, 1, b"x");
        frame[..6].copy_from_slice(&station);
        untold(&mut cluster, frame, reason);
    }
    cluster.finish();
}

#[test]
fn an_endpoint_has_its_share_of_errors_and_no_more() {
    let mut cluster = Cluster::new(1);
    cluster.advance(Duration::from_secs(10));
    let sent = BURST + 44;
    for _ in 0..sent {
        let big = frame(Kind::UdpV4, FROM, FAR, 64, &[0; 1500]);
        cluster.send(FROM.0, FROM.1, big);
    }
    // Another pod's share is its own.
    cluster.send(
        NEAR.0,
        NEAR.1,
        frame(Kind::UdpV4, NEAR, FAR, 64, &[0; 1500]),
    );
    cluster.run();
    let told = cluster.received(FROM.0, FROM.1).len() as u64;
    assert_eq!(cluster.received(NEAR.0, NEAR.1).len(), 1);
    // The run itself took a few milliseconds.
    assert!(
        (u64::from(BURST)..u64::from(sent)).contains(&told),
        "{told}"
    );
    let limited = cluster.count(1, |stats| stats.icmp_errors_limited.value());
    assert_eq!(told + limited, sent.into());
    assert_eq!(cluster.drops(1, DropReason::TooBig), u64::from(sent) + 1);
    cluster.advance(INTERVAL);
    let again = frame(Kind::UdpV4, FROM, FAR, 64, &[0; 1500]);
    let (_, back) = cluster.exchange(FROM, FAR, again);
    assert_eq!(back.len(), 1, "and soon one more");
    cluster.finish();
}

#[test]
fn from_the_overlay_what_a_pod_cannot_take_is_cut_or_dropped_under_its_name() {
    let mut cluster = Cluster::new(1);
    cluster.change(2, |builder| {
        let mut small = endpoint(FAR.0, FAR.1);
        small.mtu = 1000;
        builder.set_endpoint(small, WorkerId(0)).unwrap();
    });
    for kind in [Kind::UdpV4, Kind::UdpV6] {
        let before = cluster.drops(2, DropReason::TooBigForPod);
        let whole = frame(kind, FROM, FAR, 64, &[7; 1200]);
        let (arrived, back) = cluster.exchange(FROM, FAR, whole);
        assert!(arrived.is_empty() && back.is_empty());
        assert_eq!(cluster.drops(2, DropReason::TooBigForPod), before + 1);
    }
    let whole = naive::may_be_cut(frame(Kind::UdpV4, FROM, FAR, 64, &[7; 1200]), 7);
    cluster.send(FROM.0, FROM.1, whole.clone());
    cluster.run();
    let arrived = cluster.received(FAR.0, FAR.1);
    assert_eq!(arrived.len(), 2);
    let whole = naive::one_hop_later(whole);
    assert_eq!(naive::reassemble(&arrived, 1000), whole[naive::IP..]);
    cluster.finish();
}

/// An echo request of that size to the gateway, from the pod's own address or its link-local one.
fn echo(v6_from_link_local: bool, v4: bool, size: usize) -> Vec<u8> {
    let kind = if v4 { Kind::EchoV4 } else { Kind::EchoV6 };
    let mut frame = frame(kind, FROM, FAR, 1, &vec![0xa5; size]);
    if v4 {
        frame[30..34].copy_from_slice(&GATEWAY_V4.octets());
        frames::fix_ipv4_checksum(&mut frame[14..]);
        return frame;
    }
    frame[38..54].copy_from_slice(&GATEWAY_V6.octets());
    if v6_from_link_local {
        frame[22..38]
            .copy_from_slice(&[0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x22, 0, 0xff, 1, 2, 3, 4]);
    }
    frame[56..58].fill(0);
    let checksum = !sum(&with_pseudo_v6(&frame));
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
    frame
}

fn with_pseudo_v6(frame: &[u8]) -> Vec<u8> {
    let mut all = vec![frame[18], frame[19], 0, 58];
    all.extend(&frame[22..]);
    all
}

#[test]
fn the_gateway_answers_echo_requests_of_any_size() {
    let mut cluster = Cluster::new(1);
    for size in [0, 1, 56, 1400, 9001, 60_000] {
        let (_, back) = cluster.exchange(FROM, NEAR, echo(false, true, size));
        let reply = &back[0];
        assert_eq!(reply[..6], pod_mac(FROM.0, FROM.1).0);
        assert_eq!(reply[6..12], gateway_mac(FROM.0, FROM.1).0);
        let asked = echo(false, true, size);
        assert_eq!(reply[26..30], asked[30..34]);
        assert_eq!(reply[30..34], asked[26..30]);
        assert_eq!((reply[22], reply[34], reply[35]), (64, 0, 0));
        assert_eq!(sum(&reply[14..34]), 0xffff);
        assert_eq!(sum(&reply[34..]), 0xffff);
        assert_eq!(reply[38..], asked[38..], "identifier, sequence and data");
        for link_local in [false, true] {
            let asked = echo(link_local, false, size);
            let (_, back) = cluster.exchange(FROM, NEAR, asked.clone());
            let reply = &back[0];
            assert_eq!(reply[22..38], asked[38..54]);
            assert_eq!(reply[38..54], asked[22..38]);
            assert_eq!((reply[21], reply[54], reply[55]), (64, 129, 0));
            assert_eq!(sum(&with_pseudo_v6(reply)), 0xffff);
            assert_eq!(reply[58..], asked[58..]);
        }
    }
    assert_eq!(cluster.count(1, |stats| stats.answered.value()), 18);
    cluster.finish();
}

#[test]
fn the_gateway_serves_nothing_else() {
    let mut cluster = Cluster::new(1);
    let mut udp = frames::to_address(FROM, GATEWAY_V4.octets());
    let said = told(&mut cluster, udp.clone(), DropReason::GatewayRefused);
    assert_eq!(said, (3, 3, 0));
    udp[26..30].copy_from_slice(&[10, 244, 1, 9]);
    frames::fix_ipv4_checksum(&mut udp[14..]);
    untold(&mut cluster, udp, DropReason::SpoofedAddress);
    // A reply that nobody asked for, and the second half of a request.
    let mut reply = echo(false, false, 8);
    reply[54] = 129;
    let said = told(&mut cluster, reply, DropReason::GatewayRefused);
    assert_eq!(said, (1, 4, 0));
    let later = &naive::cut_v4(&echo(false, true, 100)[naive::IP..], 64)[1];
    let later = naive::framed(FROM, later);
    untold(&mut cluster, later, DropReason::GatewayRefused);
    cluster.finish();
}
