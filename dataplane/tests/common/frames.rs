//! Frames that the fixture pods send, built by etherparse: nothing of the code under test.

use std::net::{Ipv4Addr, Ipv6Addr};

use etherparse::PacketBuilder;
use skein_dataplane::fixtures::{
    HOST_LINK, gateway_mac, host, host_mac, node_v6, pod_mac, pod_v4, pod_v6, underlay,
};

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    UdpV4,
    UdpV6,
    TcpV4,
    TcpV6,
    EchoV4,
    EchoV6,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::UdpV4,
        Self::UdpV6,
        Self::TcpV4,
        Self::TcpV6,
        Self::EchoV4,
        Self::EchoV6,
    ];
}

/// A pod, as (node, pod).
pub type Pod = (u8, u8);

/// In a pod's place: the node's own network stack.
pub const HOST: u8 = HOST_LINK.0 as u8;

fn mac(of: Pod) -> [u8; 6] {
    if of.1 == HOST {
        host_mac(of.0).0
    } else {
        pod_mac(of.0, of.1).0
    }
}

fn gateway(of: Pod) -> [u8; 6] {
    if of.1 == HOST {
        host(of.0).gateway_mac.0
    } else {
        gateway_mac(of.0, of.1).0
    }
}

fn v4(of: Pod) -> [u8; 4] {
    match underlay(of.0) {
        std::net::IpAddr::V4(node) if of.1 == HOST => node.octets(),
        _ => pod_v4(of.0, of.1).octets(),
    }
}

fn v6(of: Pod) -> [u8; 16] {
    match node_v6(of.0) {
        std::net::IpAddr::V6(node) if of.1 == HOST => node.octets(),
        _ => pod_v6(of.0, of.1).octets(),
    }
}

/// A frame from pod to pod as the sender's kernel makes it.
pub fn frame(kind: Kind, from: Pod, to: Pod, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2(mac(from), gateway(from));
    let v4 = |builder: etherparse::PacketBuilderStep<etherparse::Ethernet2Header>| {
        builder.ipv4(v4(from), v4(to), ttl)
    };
    let v6 = |builder: etherparse::PacketBuilderStep<etherparse::Ethernet2Header>| {
        builder.ipv6(v6(from), v6(to), ttl)
    };
    let mut out = Vec::new();
    let written = match kind {
        Kind::UdpV4 => v4(ethernet).udp(1234, 53).write(&mut out, payload),
        Kind::UdpV6 => v6(ethernet).udp(1234, 53).write(&mut out, payload),
        Kind::TcpV4 => v4(ethernet)
            .tcp(1234, 80, 7, 512)
            .syn()
            .write(&mut out, payload),
        Kind::TcpV6 => v6(ethernet)
            .tcp(1234, 80, 7, 512)
            .syn()
            .write(&mut out, payload),
        Kind::EchoV4 => v4(ethernet)
            .icmpv4_echo_request(9, 1)
            .write(&mut out, payload),
        Kind::EchoV6 => v6(ethernet)
            .icmpv6_echo_request(9, 1)
            .write(&mut out, payload),
    };
    written.unwrap();
    out
}

/// A UDP packet of a pod to any IPv4 address.
pub fn to_address(from: Pod, to: [u8; 4]) -> Vec<u8> {
    udp_v4(from, v4(from), to, 2)
}

/// A UDP packet by that pod's or host's link, whatever its addresses.
pub fn udp_v4(by: Pod, from: [u8; 4], to: [u8; 4], port: u16) -> Vec<u8> {
    let mut out = Vec::new();
    PacketBuilder::ethernet2(mac(by), gateway(by))
        .ipv4(from, to, 64)
        .udp(1, port)
        .write(&mut out, b"x")
        .unwrap();
    out
}

/// A pod asks who has an IPv4 address.
pub fn arp_request(from: Pod, target: Ipv4Addr) -> Vec<u8> {
    let mac = pod_mac(from.0, from.1).0;
    let mut out = vec![0xff; 6];
    out.extend(mac);
    out.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    out.extend(mac);
    out.extend(pod_v4(from.0, from.1).octets());
    out.extend([0; 6]);
    out.extend(target.octets());
    out
}

pub fn assert_arp_reply(frame: &[u8], to: Pod) {
    let (mac, gateway) = (pod_mac(to.0, to.1).0, gateway_mac(to.0, to.1).0);
    let mut expected = mac.to_vec();
    expected.extend(gateway);
    expected.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2]);
    expected.extend(gateway);
    expected.extend([169, 254, 1, 1]);
    expected.extend(mac);
    expected.extend(pod_v4(to.0, to.1).octets());
    assert_eq!(frame, expected);
}

/// A pod asks who has an IPv6 address.
pub fn solicitation(from: Pod, target: Ipv6Addr) -> Vec<u8> {
    solicitation_from(from, pod_mac(from.0, from.1).0, target)
}

/// The same, saying that the asker's MAC is `link`.
pub fn solicitation_from(from: Pod, link: [u8; 6], target: Ipv6Addr) -> Vec<u8> {
    let mac = pod_mac(from.0, from.1).0;
    let tail = &target.octets()[13..];
    let mut group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0];
    group[13..].copy_from_slice(tail);
    let mut message = target.octets().to_vec();
    message.extend([1, 1]);
    message.extend(link);
    let mut out = Vec::new();
    PacketBuilder::ethernet2(mac, [0x33, 0x33, 0xff, tail[0], tail[1], tail[2]])
        .ipv6(pod_v6(from.0, from.1).octets(), group, 255)
        .icmpv6_raw(135, 0, [0; 4])
        .write(&mut out, &message)
        .unwrap();
    out
}

pub fn assert_advertisement(frame: &[u8], to: Pod) {
    let gateway = gateway_mac(to.0, to.1).0;
    assert_eq!(frame[..6], pod_mac(to.0, to.1).0);
    assert_eq!(frame[6..12], gateway);
    let packet = etherparse::PacketHeaders::from_ethernet_slice(frame).unwrap();
    let Some(etherparse::NetHeaders::Ipv6(ip, _)) = packet.net else {
        panic!("IPv6")
    };
    assert_eq!(ip.hop_limit, 255);
    assert_eq!(ip.destination, pod_v6(to.0, to.1).octets());
    assert_eq!(
        ip.source,
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1).octets()
    );
    let message = &frame[54..];
    assert_eq!(message[0], 136);
    assert_eq!(message[8..24], ip.source);
    assert_eq!(message[24..26], [2, 1]);
    assert_eq!(message[26..32], gateway);
    let mut pseudo = [&ip.source[..], &ip.destination[..]].concat();
    pseudo.extend((message.len() as u32).to_be_bytes());
    pseudo.extend([0, 0, 0, 58]);
    assert_eq!(sum(&[&pseudo[..], message].concat()), 0xffff);
}

/// Replaces the finished transport checksum by the sum over the pseudo-header, as a kernel does
/// that counts on its device.
pub fn unfinish(mut frame: Vec<u8>) -> Vec<u8> {
    let v4 = frame[12..14] == [8, 0];
    let (addresses, l4, protocol) = if v4 {
        (26..34, 34, frame[23])
    } else {
        (22..54, 54, frame[20])
    };
    let field = l4 + if protocol == 6 { 16 } else { 6 };
    let mut pseudo = frame[addresses].to_vec();
    pseudo.extend([0, protocol]);
    pseudo.extend(((frame.len() - l4) as u16).to_be_bytes());
    let partial = sum(&pseudo);
    frame[field..field + 2].copy_from_slice(&partial.to_be_bytes());
    frame
}

/// Sets the ECN bits of an IPv4 frame.
pub fn with_ecn(mut frame: Vec<u8>, ecn: u8) -> Vec<u8> {
    frame[15] = frame[15] & !3 | ecn;
    fix_ipv4_checksum(&mut frame[14..]);
    frame
}

/// Computes the checksum of an IPv4 header without options anew.
pub fn fix_ipv4_checksum(ip: &mut [u8]) {
    ip[10..12].fill(0);
    let checksum = !sum(&ip[..20]);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// The UDP checksum of an IPv6 frame is right.
pub fn assert_udp_checksum_v6(frame: &[u8]) {
    assert_eq!(frame[20], 17);
    let mut all = frame[22..54].to_vec();
    all.extend([0, 17]);
    all.extend(((frame.len() - 54) as u16).to_be_bytes());
    all.extend(&frame[54..]);
    assert_ne!(frame[60..62], [0, 0]);
    assert_eq!(sum(&all), 0xffff);
}

/// The ones-complement sum, written as naively as it goes.
pub fn sum(bytes: &[u8]) -> u16 {
    let mut total = 0u32;
    for pair in bytes.chunks(2) {
        total += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&low| u32::from(low));
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}
