//! The parser against frames that etherparse builds, and against etherparse's reading of
//! frames with extension headers.

use std::net::Ipv4Addr;

use etherparse::{
    IpAuthHeader, IpFragOffset, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv4Options,
    Ipv6Extensions, Ipv6FlowLabel, Ipv6Header, Ipv6RawExtHeader, Ipv6RoutingExtensions,
    PacketBuilder, SlicedPacket, TcpHeader, TransportSlice,
};
use proptest::prelude::*;
use skein_dataplane::parse::{self, Fragment, Headers, L3};
use skein_dataplane::wire::{MacAddr, checksum, protocol, udp, vxlan};

#[path = "../fuzz/src/parse_target.rs"]
mod parse_target;

/// What a random packet carries.
#[derive(Debug, Clone)]
enum Transport {
    Tcp {
        src: u16,
        dst: u16,
        flags: u8,
        option_words: usize,
    },
    Udp {
        src: u16,
        dst: u16,
    },
    Echo {
        id: u16,
        seq: u16,
        reply: bool,
    },
}

fn transport() -> impl Strategy<Value = Transport> {
    prop_oneof![
        any::<(u16, u16, u8)>().prop_flat_map(|(src, dst, flags)| {
            (0..=10_usize).prop_map(move |option_words| Transport::Tcp {
                src,
                dst,
                flags,
                option_words,
            })
        }),
        any::<(u16, u16)>().prop_map(|(src, dst)| Transport::Udp { src, dst }),
        any::<(u16, u16, bool)>().prop_map(|(id, seq, reply)| Transport::Echo { id, seq, reply }),
    ]
}

fn ipv4() -> impl Strategy<Value = IpHeaders> {
    any::<(u8, u16, bool, u8, [u8; 4], [u8; 4])>().prop_flat_map(|(tos, id, df, ttl, src, dst)| {
        (0..=10_usize).prop_map(move |option_words| {
            let mut header = Ipv4Header::new(0, ttl, IpNumber::UDP, src, dst).unwrap();
            header.dscp = (tos >> 2).try_into().unwrap();
            header.ecn = (tos & 3).try_into().unwrap();
            (header.identification, header.dont_fragment) = (id, df);
            header.fragment_offset = IpFragOffset::ZERO;
            header.options = Ipv4Options::try_from(&vec![1; option_words * 4][..]).unwrap();
            IpHeaders::Ipv4(header, Ipv4Extensions::default())
        })
    })
}

fn raw_extension() -> impl Strategy<Value = Option<Ipv6RawExtHeader>> {
    // Payload of 6 + 8 n bytes; the first two zero, so that a routing header has type 0 with
    // no segments left.
    prop::option::of((0..12_usize).prop_map(|units| {
        Ipv6RawExtHeader::new_raw(IpNumber::UDP, &vec![0; 6 + 8 * units]).unwrap()
    }))
}

fn ipv6() -> impl Strategy<Value = IpHeaders> {
    let fixed = (
        any::<u8>(),
        0_u32..1 << 20,
        any::<u8>(),
        any::<[u8; 16]>(),
        any::<[u8; 16]>(),
    );
    let auth =
        prop::option::of((0..8_usize).prop_map(|words| {
            IpAuthHeader::new(IpNumber::UDP, 1, 2, &vec![7; words * 4]).unwrap()
        }));
    let extensions = (
        raw_extension(),
        raw_extension(),
        raw_extension(),
        raw_extension(),
        auth,
    );
    (fixed, extensions).prop_map(|((class, label, hops, src, dst), extensions)| {
        let (hop_by_hop, destination, routing, last, auth) = extensions;
        let header = Ipv6Header {
            traffic_class: class,
            flow_label: Ipv6FlowLabel::try_new(label).unwrap(),
            payload_length: 0,
            next_header: IpNumber::UDP,
            hop_limit: hops,
            // Not IPv4-mapped, whatever the rest.
            source: {
                let mut a = src;
                a[0] |= 0x20;
                a
            },
            destination: {
                let mut a = dst;
                a[0] |= 0x20;
                a
            },
        };
        let extensions = Ipv6Extensions {
            hop_by_hop_options: hop_by_hop,
            destination_options: destination,
            routing: routing.map(|routing| Ipv6RoutingExtensions {
                routing,
                final_destination_options: last,
            }),
            fragment: None,
            auth,
        };
        IpHeaders::Ipv6(header, extensions)
    })
}

fn build(ip: &IpHeaders, transport: &Transport, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let step = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]).ip(ip.clone());
    let v6 = matches!(ip, IpHeaders::Ipv6(..));
    match *transport {
        Transport::Tcp {
            src,
            dst,
            flags,
            option_words,
        } => {
            let mut tcp = TcpHeader::new(src, dst, 1, 2);
            let bit = |mask| flags & mask != 0;
            (tcp.fin, tcp.syn, tcp.rst, tcp.psh) = (bit(1), bit(2), bit(4), bit(8));
            (tcp.ack, tcp.urg, tcp.ece, tcp.cwr) = (bit(16), bit(32), bit(64), bit(128));
            tcp.set_options_raw(&vec![1; option_words * 4]).unwrap();
            step.tcp_header(tcp).write(&mut frame, payload)
        }
        Transport::Udp { src, dst } => step.udp(src, dst).write(&mut frame, payload),
        Transport::Echo { id, seq, reply } => match (v6, reply) {
            (false, false) => step.icmpv4_echo_request(id, seq).write(&mut frame, payload),
            (false, true) => step.icmpv4_echo_reply(id, seq).write(&mut frame, payload),
            (true, false) => step.icmpv6_echo_request(id, seq).write(&mut frame, payload),
            (true, true) => step.icmpv6_echo_reply(id, seq).write(&mut frame, payload),
        },
    }
    .unwrap();
    frame
}

/// A frame, and where padding begins in it.
fn packet() -> impl Strategy<Value = (IpHeaders, Transport, Vec<u8>, usize)> {
    let payload = prop::collection::vec(any::<u8>(), 0..200);
    (
        prop_oneof![ipv4(), ipv6()],
        transport(),
        payload,
        0..46_usize,
    )
        .prop_map(|(ip, transport, payload, padding)| {
            let mut frame = build(&ip, &transport, &payload);
            let end = frame.len();
            frame.resize(end + padding, 0);
            (ip, transport, frame, end)
        })
}

fn pseudo(headers: &Headers, len: usize) -> checksum::Sum {
    let (src, dst) = (headers.src_bytes, headers.dst_bytes);
    if headers.is_v6() {
        checksum::pseudo_v6(src, dst, headers.protocol, len as u32)
    } else {
        let last = |bytes: [u8; 16]| *bytes.last_chunk().unwrap();
        checksum::pseudo_v4(last(src), last(dst), headers.protocol, len as u16)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn valid_packets_are_read_as_built((ip, transport, frame, end) in packet()) {
        let headers = parse::parse(&frame, frame.len()).unwrap();
        prop_assert_eq!(headers.l2.src, MacAddr([2, 0, 0, 0, 0, 1]));
        prop_assert_eq!(headers.l3_end(), end);
        prop_assert_eq!(headers.fragment, Fragment::None);
        match &ip {
            IpHeaders::Ipv4(built, _) => {
                prop_assert_eq!(headers.kind, L3::V4 { options: !built.options.is_empty() });
                prop_assert_eq!(headers.src(), Ipv4Addr::from(built.source));
                prop_assert_eq!(headers.dst(), Ipv4Addr::from(built.destination));
                prop_assert_eq!(headers.fragment_id, u32::from(built.identification));
                prop_assert_eq!(headers.dont_fragment, built.dont_fragment);
                prop_assert_eq!(headers.ttl, built.time_to_live);
                prop_assert_eq!(headers.dscp_ecn, built.dscp.value() << 2 | built.ecn.value());
                prop_assert_eq!(usize::from(headers.l4_offset), 14 + built.header_len());
            }
            IpHeaders::Ipv6(built, extensions) => {
                let flow_label = built.flow_label.value();
                prop_assert_eq!(headers.kind, L3::V6 { flow_label, fragment_header: None });
                prop_assert_eq!(headers.src_bytes, built.source);
                prop_assert_eq!(headers.dst_bytes, built.destination);
                prop_assert_eq!(headers.ttl, built.hop_limit);
                prop_assert_eq!(headers.dscp_ecn, built.traffic_class);
                prop_assert_eq!(
                    usize::from(headers.l4_offset), 54 + extensions.header_len());
            }
        }
        let header_len = usize::from(headers.payload_offset - headers.l4_offset);
        let ports = (headers.src_port, headers.dst_port);
        match transport {
            Transport::Tcp { src, dst, flags, option_words } => {
                prop_assert_eq!(ports, (src, dst));
                prop_assert_eq!(headers.tcp_flags.0, flags);
                prop_assert_eq!(header_len, 20 + 4 * option_words);
            }
            Transport::Udp { src, dst } => {
                prop_assert_eq!(ports, (src, dst));
                prop_assert_eq!(header_len, 8);
            }
            Transport::Echo { id, reply, .. } => {
                prop_assert_eq!(ports, (id, 0));
                let kind = match (headers.is_v6(), reply) {
                    (false, false) => 8,
                    (false, true) => 0,
                    (true, false) => 128,
                    (true, true) => 129,
                };
                prop_assert_eq!(headers.icmp, Some((kind, 0)));
            }
        }
        // Their checksum, our sum; ICMPv4 has no pseudo-header.
        let segment = &frame[usize::from(headers.l4_offset)..end];
        let start = match headers.protocol {
            protocol::ICMP => checksum::Sum::new(),
            _ => pseudo(&headers, segment.len()),
        };
        prop_assert!(checksum::verify(start, [segment]));
    }

    #[test]
    fn etherparse_finds_the_same((_, _, frame, end) in packet()) {
        let headers = parse::parse(&frame, frame.len()).unwrap();
        let theirs = SlicedPacket::from_ethernet(&frame[..end]).unwrap();
        let payload = match theirs.transport.unwrap() {
            TransportSlice::Tcp(tcp) => {
                prop_assert_eq!(headers.src_port, tcp.source_port());
                prop_assert_eq!(headers.dst_port, tcp.destination_port());
                tcp.payload().len()
            }
            TransportSlice::Udp(udp) => {
                prop_assert_eq!(headers.src_port, udp.source_port());
                prop_assert_eq!(headers.dst_port, udp.destination_port());
                udp.payload().len()
            }
            TransportSlice::Icmpv4(icmp) => {
                prop_assert_eq!(headers.icmp, Some((icmp.type_u8(), icmp.code_u8())));
                icmp.payload().len()
            }
            TransportSlice::Icmpv6(icmp) => {
                prop_assert_eq!(headers.icmp, Some((icmp.type_u8(), icmp.code_u8())));
                end - usize::from(headers.payload_offset)
            }
        };
        prop_assert_eq!(end - usize::from(headers.payload_offset), payload);
    }

    /// Cut anywhere, a frame is refused unless all headers are there and the rest may follow
    /// in another segment.
    #[test]
    fn cut_frames_are_refused((_, _, frame, end) in packet(), cut in 0_usize..700) {
        let headers = parse::parse(&frame, frame.len()).unwrap();
        let cut = cut.min(end - 1);
        prop_assert!(parse::parse(&frame[..cut], cut).is_err());
        let head = parse::parse(&frame[..cut], frame.len());
        prop_assert_eq!(head.ok(), (cut >= headers.payload_offset.into()).then_some(headers));
    }

    #[test]
    fn a_tunnelled_frame_reads_as_it_did_outside(
        (_, _, frame, end) in packet(), (outer_ip, ..) in packet(), vni in 0_u32..1 << 24,
    ) {
        let mut body = vec![0; vxlan::HEADER_LEN];
        vxlan::write_header(body.first_chunk_mut().unwrap(), vni);
        body.extend(&frame[..end]);
        let outer = build(&outer_ip, &Transport::Udp { src: 50000, dst: 8472 }, &body);
        let headers = parse::parse(&outer, outer.len()).unwrap();
        let tunnel = parse::parse_vxlan(&outer, &headers).unwrap();
        prop_assert_eq!(tunnel.vni, vni);
        prop_assert_eq!(tunnel.inner_end, outer.len());
        let shift = headers.l4_offset + (udp::HEADER_LEN + vxlan::HEADER_LEN) as u16;
        prop_assert_eq!(tunnel.inner_offset, shift);
        let inside = parse::parse_at(&outer, shift.into(), tunnel.inner_end).unwrap();
        let mut expected = parse::parse(&frame, frame.len()).unwrap();
        expected.l3_offset += shift;
        expected.l4_offset += shift;
        expected.payload_offset += shift;
        prop_assert_eq!(inside, expected);
    }

    #[test]
    fn arbitrary_bytes_never_panic(frame in prop::collection::vec(any::<u8>(), 0..200)) {
        parse_target::check(&frame);
    }

    #[test]
    fn arbitrary_packets_behind_a_good_ethertype_never_panic(
        ether_type in prop::sample::select(vec![0x0800_u16, 0x0806, 0x86dd]),
        first in 0x40_u8..0x70,
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut frame = vec![2; 12];
        frame.extend(ether_type.to_be_bytes());
        frame.push(first);
        frame.extend(rest);
        parse_target::check(&frame);
    }

    #[test]
    fn mutated_packets_never_panic(
        (_, _, mut frame, _) in packet(),
        edits in prop::collection::vec((0_usize..100, any::<u8>()), 1..6),
    ) {
        for (at, value) in edits {
            let at = at % frame.len();
            frame[at] = value;
        }
        parse_target::check(&frame);
    }
}
