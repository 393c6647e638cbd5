//! The parser on hand-written frames: what it finds, and each way it refuses.

use skein_dataplane::parse::{self, Fragment, L3, ParseError, TcpFlags};
use skein_dataplane::wire::checksum::Sum;
use skein_dataplane::wire::protocol;

const ETHERNET: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

fn ethernet(ether_type: u16, payload: &[u8]) -> Vec<u8> {
    [&ETHERNET[..], &ether_type.to_be_bytes(), payload].concat()
}

/// An IPv4 frame from 10.0.0.1 to 10.0.0.2; `fragment` is the word of flags and offset.
fn v4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let [len_high, len_low] = (20 + payload.len() as u16).to_be_bytes();
    let [high, low] = fragment.to_be_bytes();
    let mut header = [
        0x45, 0xb9, len_high, len_low, 0xab, 0xcd, high, low, 64, protocol, 0, 0, 10, 0, 0, 1, 10,
        0, 0, 2,
    ];
    let sum = Sum::new().with(&header).checksum();
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    ethernet(0x0800, &[&header[..], payload].concat())
}

/// An IPv6 frame from fd00::1 to fd00::2.
fn v6(next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = [0; 40];
    header[..4].copy_from_slice(&[0x6b, 0x91, 0x23, 0x45]);
    header[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
    (header[6], header[7]) = (next_header, 63);
    (header[8], header[23], header[24], header[39]) = (0xfd, 1, 0xfd, 2);
    ethernet(0x86dd, &[&header[..], payload].concat())
}

const UDP: [u8; 12] = [0x9c, 0x40, 0, 53, 0, 12, 0xbe, 0xef, 1, 2, 3, 4];
const TCP: [u8; 24] = [
    0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 2, 0x60, 0x12, 1, 0, 0, 0, 0, 0, 2, 4, 5, 0xb4,
];
const ECHO: [u8; 8] = [8, 0, 0, 0, 0x12, 0x34, 0, 1];
const SCTP: [u8; 12] = [0x0b, 0x59, 0x0b, 0x5a, 1, 2, 3, 4, 5, 6, 7, 8];
const OPTIONS: [u8; 8] = [0, 0, 1, 4, 0, 0, 0, 0];

/// `kind` of extension before what follows, named `next`.
fn extension(next: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = [&OPTIONS[..], body].concat();
    bytes[0] = next;
    bytes
}

fn fragment_header(next: u8, offset_and_more: u16) -> [u8; 8] {
    let [high, low] = offset_and_more.to_be_bytes();
    [next, 0, high, low, 0xde, 0xad, 0xbe, 0xef]
}

fn parsed(frame: &[u8]) -> parse::Headers {
    parse::parse(frame, frame.len()).unwrap_or_else(|error| panic!("{error}: {frame:02x?}"))
}

#[test]
fn tcp_over_ipv4() {
    let headers = parsed(&v4(protocol::TCP, 0x4000, &TCP));
    assert_eq!(headers.l2.dst.to_string(), "02:00:00:00:00:02");
    assert_eq!(headers.l2.src.to_string(), "02:00:00:00:00:01");
    assert_eq!(
        (headers.ether_type, headers.kind),
        (0x0800, L3::V4 { options: false })
    );
    assert_eq!(
        (headers.l3_offset, headers.l4_offset, headers.payload_offset),
        (14, 34, 58)
    );
    assert_eq!(
        (headers.protocol, headers.ttl, headers.dscp_ecn),
        (6, 64, 0xb9)
    );
    assert!(headers.dont_fragment);
    assert_eq!(
        (headers.ip_total_len, headers.l4_len(), headers.l3_end()),
        (44, 24, 58)
    );
    assert_eq!(headers.src().to_string(), "10.0.0.1");
    assert_eq!(headers.dst().to_string(), "10.0.0.2");
    assert_eq!(
        headers.src_bytes,
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]
    );
    assert_eq!((headers.src_port, headers.dst_port), (40000, 80));
    assert_eq!(headers.tcp_flags, TcpFlags::SYN.union(TcpFlags::ACK));
    assert_eq!(
        (headers.fragment, headers.fragment_id),
        (Fragment::None, 0xabcd)
    );
    assert_eq!(headers.icmp, None);
}

#[test]
fn udp_over_ipv6() {
    let headers = parsed(&v6(protocol::UDP, &UDP));
    assert_eq!(
        headers.kind,
        L3::V6 {
            flow_label: 0x1_2345,
            fragment_header: None
        }
    );
    assert_eq!(
        (headers.l3_offset, headers.l4_offset, headers.payload_offset),
        (14, 54, 62)
    );
    assert_eq!(
        (headers.protocol, headers.ttl, headers.dscp_ecn),
        (17, 63, 0xb9)
    );
    assert!(headers.dont_fragment);
    assert_eq!((headers.ip_total_len, headers.l4_len()), (52, 12));
    assert_eq!(headers.src().to_string(), "fd00::1");
    assert_eq!(headers.dst().to_string(), "fd00::2");
    assert_eq!((headers.src_port, headers.dst_port), (40000, 53));
    assert_eq!((headers.fragment, headers.fragment_id), (Fragment::None, 0));
}

#[test]
fn arp() {
    let mut packet = [
        0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 169, 254, 1, 1,
    ];
    let headers = parsed(&ethernet(0x0806, &packet));
    assert_eq!(headers.kind, L3::Arp { operation: 1 });
    assert_eq!(headers.src().to_string(), "10.0.0.1");
    assert_eq!(headers.dst().to_string(), "169.254.1.1");
    assert_eq!(
        (headers.l3_offset, headers.l4_offset, headers.payload_offset),
        (14, 42, 42)
    );
    assert!(!headers.permits_too_big());
    packet[4] = 8;
    assert_eq!(fault(&ethernet(0x0806, &packet)), ParseError::BadArp);
    assert_eq!(
        fault(&ethernet(0x0806, &packet[..27])),
        ParseError::TruncatedArp
    );
}

#[test]
fn ports_and_identifiers_by_protocol() {
    let mut reply6 = ECHO;
    reply6[0] = 129;
    let unreachable = [3, 1, 0, 0, 0x12, 0x34, 0, 0];
    // (frame, source port, destination port, ICMP, header length)
    for (frame, src, dst, icmp, len) in [
        (v4(protocol::SCTP, 0, &SCTP), 2905, 2906, None, 12),
        (v6(protocol::SCTP, &SCTP), 2905, 2906, None, 12),
        (v4(protocol::ICMP, 0, &ECHO), 0x1234, 0, Some((8, 0)), 8),
        (v6(protocol::ICMPV6, &reply6), 0x1234, 0, Some((129, 0)), 8),
        (v4(protocol::ICMP, 0, &unreachable), 0, 0, Some((3, 1)), 8),
        // Each family's ICMP means nothing to the other.
        (v4(protocol::ICMPV6, 0, &reply6), 0, 0, None, 0),
        (v6(protocol::ICMP, &ECHO), 0, 0, None, 0),
        (v4(protocol::ESP, 0, &[1; 9]), 0, 0, None, 0),
        (v4(99, 0, &[]), 0, 0, None, 0),
        (v6(protocol::NO_NEXT_HEADER, &[]), 0, 0, None, 0),
        (v6(protocol::ESP, &[1; 9]), 0, 0, None, 0),
    ] {
        let headers = parsed(&frame);
        assert_eq!(
            (headers.src_port, headers.dst_port, headers.icmp),
            (src, dst, icmp)
        );
        assert_eq!(
            headers.payload_offset - headers.l4_offset,
            len,
            "{frame:02x?}"
        );
    }
}

#[test]
fn extension_headers_are_stepped_over() {
    let mut auth = vec![protocol::UDP, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1];
    auth.extend(UDP);
    let chain = extension(protocol::AH, &auth);
    let chain = extension(protocol::ROUTING, &chain);
    let chain = extension(protocol::DESTINATION_OPTIONS, &chain);
    let headers = parsed(&v6(protocol::HOP_BY_HOP, &chain));
    assert_eq!((headers.protocol, headers.dst_port), (protocol::UDP, 53));
    assert_eq!(
        (headers.l4_offset, headers.payload_offset),
        (14 + 40 + 36, 14 + 40 + 36 + 8)
    );
}

#[test]
fn padding_is_left_out() {
    let mut frame = v4(protocol::UDP, 0, &UDP);
    let end = frame.len();
    frame.resize(60, 0xff);
    let headers = parsed(&frame);
    assert_eq!((headers.l3_end(), headers.l4_len()), (end, 12));
}

#[test]
fn payload_may_lie_in_later_segments() {
    let frame = v4(protocol::TCP, 0, &[&TCP[..], &[7; 3000]].concat());
    let whole = parsed(&frame);
    assert_eq!(parse::parse(&frame[..58], frame.len()), Ok(whole));
    assert_eq!(
        parse::parse(&frame[..57], frame.len()),
        Err(ParseError::BadTcpOffset)
    );
}

#[test]
fn fragments() {
    let first = parsed(&v4(protocol::UDP, 0x2000, &[&UDP[..], &[0; 4]].concat()));
    assert_eq!((first.fragment, first.dst_port), (Fragment::First, 53));
    let later = parsed(&v4(protocol::UDP, 0x0002, &UDP));
    assert_eq!(
        (later.fragment, later.dst_port),
        (Fragment::Later { offset: 16 }, 0)
    );
    assert_eq!((later.l4_offset, later.payload_offset), (34, 34));
    assert!(first.permits_icmp_error() && !later.permits_icmp_error());

    let body = [&fragment_header(protocol::UDP, 1)[..], &UDP, &[0; 4]].concat();
    let first = parsed(&v6(protocol::FRAGMENT, &body));
    assert_eq!(
        (first.fragment, first.fragment_id),
        (Fragment::First, 0xdead_beef)
    );
    assert_eq!(
        first.kind,
        L3::V6 {
            flow_label: 0x1_2345,
            fragment_header: Some(54)
        }
    );
    assert_eq!((first.l4_offset, first.dst_port), (62, 53));

    let body = [
        &fragment_header(protocol::DESTINATION_OPTIONS, 16)[..],
        &[0xff; 8],
    ]
    .concat();
    let later = parsed(&v6(protocol::FRAGMENT, &body));
    assert_eq!(later.fragment, Fragment::Later { offset: 16 });
    assert_eq!(
        (later.protocol, later.l4_offset),
        (protocol::DESTINATION_OPTIONS, 62)
    );

    let body = [&fragment_header(protocol::UDP, 0)[..], &UDP].concat();
    let atomic = parsed(&v6(protocol::FRAGMENT, &body));
    assert_eq!((atomic.fragment, atomic.dst_port), (Fragment::None, 53));
}

#[test]
fn a_datagram_shorter_than_its_packet_is_allowed() {
    let headers = parsed(&v4(protocol::UDP, 0, &[&UDP[..], &[0; 8]].concat()));
    assert_eq!(headers.l4_len(), 20);
}

fn fault(frame: &[u8]) -> ParseError {
    parse::parse(frame, frame.len()).expect_err("a fault")
}

/// `frame` with one byte changed.
fn with(mut frame: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    frame[at] = value;
    frame
}

/// `frame` with one byte of its IPv4 header changed and the checksum put right.
fn with_v4(frame: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    let mut frame = with(frame, at, value);
    frame[24..26].fill(0);
    let sum = Sum::new().with(&frame[14..34]).checksum();
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

#[test]
fn each_fault_of_ethernet_and_ipv4_has_its_reason() {
    let udp = v4(protocol::UDP, 0, &UDP);
    for (frame, expected) in [
        (vec![], ParseError::TruncatedEthernet),
        (udp[..13].to_vec(), ParseError::TruncatedEthernet),
        (ethernet(0x8100, &udp[10..]), ParseError::UnknownEtherType),
        (ethernet(0x0026, &udp[14..]), ParseError::UnknownEtherType),
        (udp[..33].to_vec(), ParseError::TruncatedIpv4),
        (with(udp.clone(), 14, 0x65), ParseError::BadIpv4Version),
        (with(udp.clone(), 14, 0x44), ParseError::BadIpv4HeaderLength),
        (with(udp.clone(), 14, 0x4f), ParseError::TruncatedIpv4),
        (with_v4(udp.clone(), 17, 19), ParseError::BadIpv4Length),
        (with_v4(udp.clone(), 17, 33), ParseError::BadIpv4Length),
        (with(udp.clone(), 22, 63), ParseError::BadIpv4Checksum),
        (v4(protocol::UDP, 0, &UDP[..7]), ParseError::TruncatedL4),
        (v4(protocol::UDP, 0, &UDP[..11]), ParseError::BadUdpLength),
        (
            v4(protocol::UDP, 0, &[0, 1, 0, 2, 0, 7, 0, 0]),
            ParseError::BadUdpLength,
        ),
        (v4(protocol::TCP, 0, &TCP[..19]), ParseError::TruncatedL4),
        (v4(protocol::TCP, 0, &TCP[..23]), ParseError::BadTcpOffset),
        (
            with(v4(protocol::TCP, 0, &TCP), 46, 0x40),
            ParseError::BadTcpOffset,
        ),
        (v4(protocol::ICMP, 0, &ECHO[..7]), ParseError::TruncatedL4),
        (v4(protocol::SCTP, 0, &SCTP[..11]), ParseError::TruncatedL4),
        // The end of the packet counts, not that of the frame.
        (with_v4(udp.clone(), 17, 27), ParseError::TruncatedL4),
        // Not a multiple of eight, empty, beyond 65535, over a TCP header, short first.
        (v4(protocol::UDP, 0x2002, &UDP), ParseError::BadFragment),
        (v4(protocol::UDP, 0x2000, &[]), ParseError::BadFragment),
        (v4(protocol::UDP, 0x1fff, &UDP), ParseError::BadFragment),
        (v4(protocol::TCP, 0x0001, &TCP), ParseError::BadFragment),
        (
            v4(protocol::TCP, 0x2000, &TCP[..16]),
            ParseError::TruncatedL4,
        ),
    ] {
        assert_eq!(fault(&frame), expected, "{frame:02x?}");
    }
}

#[test]
fn each_fault_of_ipv6_has_its_reason() {
    let udp = v6(protocol::UDP, &UDP);
    let (mut routing, mut mapped) = (extension(protocol::UDP, &UDP), udp.clone());
    routing[2..4].copy_from_slice(&[0, 1]);
    mapped[38..54].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    let hop_by_hop_late = extension(protocol::HOP_BY_HOP, &extension(protocol::UDP, &UDP));
    let nested = [
        &fragment_header(protocol::FRAGMENT, 1)[..],
        &fragment_header(protocol::UDP, 1),
        &[0; 8],
    ]
    .concat();
    let mut long = extension(protocol::UDP, &[&[0; 1024][..], &UDP].concat());
    long[1] = 128;
    for (frame, expected) in [
        (udp[..53].to_vec(), ParseError::TruncatedIpv6),
        (with(udp.clone(), 14, 0x4b), ParseError::BadIpv6Version),
        (with(udp.clone(), 19, 13), ParseError::BadIpv6Length),
        (mapped, ParseError::MappedIpv6Address),
        (with(udp.clone(), 19, 7), ParseError::TruncatedL4),
        (
            v6(protocol::ROUTING, &routing),
            ParseError::BadIpv6Extension,
        ),
        (
            v6(protocol::DESTINATION_OPTIONS, &hop_by_hop_late),
            ParseError::BadIpv6Extension,
        ),
        (
            v6(protocol::FRAGMENT, &nested),
            ParseError::BadIpv6Extension,
        ),
        (
            v6(protocol::AH, &[17, 0, 0, 0, 0, 0, 0, 0]),
            ParseError::BadIpv6Extension,
        ),
        (
            v6(protocol::HOP_BY_HOP, &[]),
            ParseError::TruncatedIpv6Extension,
        ),
        (
            v6(protocol::HOP_BY_HOP, &[17, 1, 0, 0, 0, 0, 0, 0]),
            ParseError::TruncatedIpv6Extension,
        ),
        (
            v6(protocol::FRAGMENT, &[17, 0, 0, 0, 0]),
            ParseError::TruncatedIpv6Extension,
        ),
        (
            v6(protocol::FRAGMENT, &fragment_header(protocol::UDP, 1)),
            ParseError::BadFragment,
        ),
        (
            v6(protocol::DESTINATION_OPTIONS, &long),
            ParseError::TooManyExtensions,
        ),
    ] {
        assert_eq!(fault(&frame), expected, "{frame:02x?}");
    }
}

#[test]
fn the_number_of_extensions_is_limited() {
    let chain = |count: usize| {
        let mut body = extension(protocol::UDP, &UDP);
        for _ in 1..count {
            body = extension(protocol::DESTINATION_OPTIONS, &body);
        }
        v6(protocol::DESTINATION_OPTIONS, &body)
    };
    assert_eq!(parsed(&chain(parse::MAX_EXTENSIONS)).dst_port, 53);
    assert_eq!(
        fault(&chain(parse::MAX_EXTENSIONS + 1)),
        ParseError::TooManyExtensions
    );
}

/// VXLAN with this first byte around `inner`, in UDP over IPv4.
fn vxlan(flags: u8, inner: &[u8]) -> Vec<u8> {
    let len = (16 + inner.len() as u16).to_be_bytes();
    let header = [
        0xc3, 0x51, 0x21, 0x18, len[0], len[1], 0, 0, flags, 0, 0, 0, 1, 2, 3, 0xff,
    ];
    v4(protocol::UDP, 0, &[&header[..], inner].concat())
}

#[test]
fn an_overlay_packet_is_read_twice() {
    let inner = v6(protocol::UDP, &UDP);
    let mut frame = vxlan(0x08, &inner);
    let end = frame.len();
    frame.extend([0; 9]);
    let outer = parsed(&frame);
    let tunnel = parse::parse_vxlan(&frame, &outer).unwrap();
    assert_eq!(
        (tunnel.vni, tunnel.inner_offset, tunnel.inner_end),
        (0x01_0203, 50, end)
    );
    let inside = parse::parse_at(&frame, 50, tunnel.inner_end).unwrap();
    assert_eq!(
        (inside.l3_offset, inside.l4_offset, inside.payload_offset),
        (64, 104, 112)
    );
    assert_eq!((inside.dst_port, inside.l3_end()), (53, end));
    // What the outer packet does not hold, the inner may not claim.
    assert_eq!(
        parse::parse_at(&frame, 50, end - 1),
        Err(ParseError::BadIpv6Length)
    );
}

#[test]
fn each_fault_of_vxlan_has_its_reason() {
    let read = |frame: &[u8]| parse::parse_vxlan(frame, &parsed(frame));
    assert_eq!(read(&vxlan(0xf7, &[])), Err(ParseError::BadVxlanFlags));
    assert!(read(&vxlan(0xff, &[])).is_ok());
    assert_eq!(
        read(&v4(protocol::UDP, 0, &UDP)),
        Err(ParseError::TruncatedVxlan)
    );
    assert_eq!(read(&v4(protocol::TCP, 0, &TCP)), Err(ParseError::NotVxlan));
    let fragment = [&UDP[..], &[0; 4]].concat();
    assert_eq!(
        read(&v4(protocol::UDP, 0x2000, &fragment)),
        Err(ParseError::NotVxlan)
    );
    assert_eq!(
        read(&v4(protocol::UDP, 0x0008, &fragment)),
        Err(ParseError::NotVxlan)
    );
    let frame = vxlan(0x08, &[]);
    let headers = parsed(&frame);
    assert_eq!(
        parse::parse_vxlan(&frame[..45], &headers),
        Err(ParseError::TruncatedVxlan)
    );
    assert_eq!(parse::parse_vxlan(&[], &headers), Err(ParseError::NotVxlan));
}

#[test]
fn errors_are_sent_about_one_host_to_one_host() {
    let good = v4(protocol::UDP, 0, &UDP);
    assert!(parsed(&good).permits_icmp_error());
    // Ethernet group; source zero, loopback, multicast, reserved; destination multicast,
    // broadcast.
    assert!(!parsed(&with(good.clone(), 0, 3)).permits_too_big());
    for source in [
        [0, 0, 0, 0],
        [127, 0, 0, 1],
        [224, 0, 0, 1],
        [255, 255, 255, 255],
    ] {
        let mut frame = good.clone();
        frame[26..30].copy_from_slice(&source);
        assert!(
            !parsed(&with_v4(frame, 22, 64)).permits_icmp_error(),
            "{source:?}"
        );
    }
    for destination in [[224, 0, 0, 1], [255, 255, 255, 255]] {
        let mut frame = good.clone();
        frame[30..34].copy_from_slice(&destination);
        assert!(
            !parsed(&with_v4(frame, 22, 64)).permits_too_big(),
            "{destination:?}"
        );
    }
    let unreachable = [3, 1, 0, 0, 0, 0, 0, 0];
    let error = parsed(&v4(protocol::ICMP, 0, &unreachable));
    assert!(error.is_icmp_error() && !error.permits_too_big());
    assert!(parsed(&v4(protocol::ICMP, 0, &ECHO)).permits_icmp_error());

    let good = v6(protocol::UDP, &UDP);
    assert!(parsed(&good).permits_icmp_error());
    let multicast = parsed(&with(with(good.clone(), 38, 0xff), 0, 0x33));
    assert!(!multicast.permits_icmp_error() && multicast.permits_too_big());
    assert!(!parsed(&with(good, 22, 0xff)).permits_too_big());
    let redirect = parsed(&v6(protocol::ICMPV6, &[137, 0, 0, 0, 0, 0, 0, 0]));
    assert!(!redirect.permits_too_big());
}
