//! What must hold of the parser and the header views, whatever the bytes.
//!
//! Also compiled into the datapath's own tests, which replay the stored cases.

use skein_dataplane::parse::{self, Fragment, Headers, L3, ParseError};
use skein_dataplane::wire::icmp::{self, IcmpError};
use skein_dataplane::wire::icmpv6::{self, Icmpv6Error};
use skein_dataplane::wire::ipv4::{Ipv4, Ipv4Mut};
use skein_dataplane::wire::ipv6::Ipv6Mut;
use skein_dataplane::wire::ndp::{self, Solicitation};
use skein_dataplane::wire::tcp::Tcp;
use skein_dataplane::wire::{MacAddr, arp, checksum, protocol, sctp};

const OWN: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

/// Parses `frame` in every way that the datapath does.
///
/// # Panics
/// When something that must hold does not.
pub fn check(frame: &[u8]) {
    let parsed = parse::parse(frame, frame.len());
    if let Ok(headers) = &parsed {
        holds(frame, 0, frame.len(), headers);
        head_is_enough(frame, headers);
        elsewhere(frame, headers);
        answers(frame, headers);
        rewrites(frame, headers);
    }
    // More payload in later segments, or less frame than buffer.
    for total_len in [frame.len() + 1, frame.len() + 70_000, frame.len() / 2, 20] {
        if let Ok(headers) = parse::parse(frame, total_len) {
            holds(frame, 0, total_len, &headers);
        }
    }
    for offset in [0, 8, 50, frame.len(), frame.len() + 1, usize::MAX] {
        if let Ok(headers) = parse::parse_at(frame, offset, frame.len()) {
            holds(frame, offset, frame.len(), &headers);
        }
    }
}

/// Offsets are in order and inside the frame; fields that have no source are zero.
fn holds(buffer: &[u8], offset: usize, total_len: usize, headers: &Headers) {
    let head_len = buffer.len().min(total_len);
    let [l3, l4, payload] =
        [headers.l3_offset, headers.l4_offset, headers.payload_offset].map(usize::from);
    assert_eq!(l3, offset + 14);
    assert!(
        l3 < l4 && l4 <= payload && payload <= head_len,
        "{headers:?}"
    );
    if let L3::Arp { .. } = headers.kind {
        assert_eq!((headers.protocol, headers.ip_total_len), (0, 0));
        return;
    }
    assert!(
        payload <= headers.l3_end() && headers.l3_end() <= total_len,
        "{headers:?}"
    );
    assert!(headers.l4_len() >= payload - l4);
    assert!(l4 - l3 <= 60 || headers.is_v6());
    assert!(l4 - l3 <= 40 + parse::MAX_EXTENSION_BYTES);
    assert_eq!(headers.src().is_ipv4(), headers.is_v4());
    assert_eq!(
        headers
            .src_bytes
            .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]),
        headers.is_v4()
    );
    if let Fragment::Later { offset } = headers.fragment {
        assert!(offset >= 8 && offset % 8 == 0);
        assert_eq!(
            (headers.src_port, headers.dst_port, headers.icmp),
            (0, 0, None)
        );
        assert_eq!(l4, payload);
    }
    if headers.icmp.is_some() {
        assert!(matches!(
            headers.protocol,
            protocol::ICMP | protocol::ICMPV6
        ));
        assert_eq!(headers.dst_port, 0);
    }
    if let Ok(outer) = parse::parse_vxlan(buffer, headers) {
        assert!(outer.vni < 1 << 24);
        assert_eq!(usize::from(outer.inner_offset), payload + 8);
        assert!(usize::from(outer.inner_offset) <= outer.inner_end);
        assert!(outer.inner_end <= headers.l3_end());
        let inner = usize::from(outer.inner_offset);
        if let Ok(headers) = parse::parse_at(buffer, inner, outer.inner_end) {
            assert!(headers.l3_end() <= outer.inner_end || matches!(headers.kind, L3::Arp { .. }));
        }
    }
}

/// Headers end at `payload_offset`: no byte behind is needed, every one before is.
fn head_is_enough(frame: &[u8], headers: &Headers) {
    let payload = usize::from(headers.payload_offset);
    assert!(payload <= parse::HEAD_LEN);
    // (SCTP's first chunk stands behind the header that all packets have.)
    let without_chunk = |headers: &Headers| Headers {
        sctp: None,
        ..*headers
    };
    let alone = parse::parse(&frame[..payload], frame.len());
    assert_eq!(
        alone.as_ref().map(without_chunk),
        Ok(without_chunk(headers))
    );
    parse::parse(&frame[..payload - 1], frame.len()).expect_err("a header is cut short");
    let end = headers.l3_end();
    if end > 14 {
        parse::parse(frame, end - 1).expect_err("the packet is longer than the frame");
    }
}

/// The same frame further inside a buffer parses to the same headers, moved.
fn elsewhere(frame: &[u8], headers: &Headers) {
    let mut buffer = vec![0xa5; 50];
    buffer.extend_from_slice(frame);
    let mut moved = parse::parse_at(&buffer, 50, buffer.len()).expect("the same frame");
    for offset in [
        &mut moved.l3_offset,
        &mut moved.l4_offset,
        &mut moved.payload_offset,
    ] {
        *offset -= 50;
    }
    if let L3::V6 {
        fragment_header: Some(offset),
        ..
    } = &mut moved.kind
    {
        *offset -= 50;
    }
    assert_eq!(moved, *headers);
}

/// What is built about a frame parses again.
fn answers(frame: &[u8], headers: &Headers) {
    let l2 = headers.l2.answer_from(OWN);
    let packet = &frame[usize::from(headers.l3_offset)..];
    let message = &frame
        [usize::from(headers.l4_offset)..headers.l3_end().max(usize::from(headers.l4_offset))];
    let mut out = [0; icmpv6::ERROR_FRAME_MAX_LEN];
    let built = match headers.kind {
        L3::Arp { .. } => {
            let request = arp::Arp::new(packet).expect("parsed before");
            arp::build_reply(&mut out, request, OWN)
        }
        L3::V4 { .. } => {
            let error = IcmpError::FragmentationNeeded { mtu: 1450 };
            icmp::build_error(&mut out, l2, [169, 254, 1, 1], error, packet)
        }
        L3::V6 { .. } => {
            solicitation(headers, message);
            let error = Icmpv6Error::PacketTooBig { mtu: 1430 };
            icmpv6::build_error(&mut out, l2, [0xfd; 16], error, packet)
        }
    };
    parse_built(&out[..built.expect("room for an answer")]);
}

/// Reads a message as a neighbour solicitation, whose checksum is put right first: hardly any
/// made frame would come by otherwise.
fn solicitation(headers: &Headers, message: &[u8]) {
    let (src, dst) = (headers.src_bytes, headers.dst_bytes);
    let mut message = message.to_vec();
    let pseudo = checksum::pseudo_v6(src, dst, protocol::ICMPV6, message.len() as u32);
    if let Some(field) = message.get_mut(icmp::CHECKSUM_OFFSET..icmp::CHECKSUM_OFFSET + 2) {
        field.fill(0);
        let sum = checksum::transport(pseudo, [&message[..]], 0);
        message[icmp::CHECKSUM_OFFSET..icmp::CHECKSUM_OFFSET + 2]
            .copy_from_slice(&sum.to_be_bytes());
    }
    if let Ok(asked) = Solicitation::parse(src, dst, headers.ttl, &message) {
        let mut out = [0; ndp::ADVERTISEMENT_FRAME_LEN];
        let says = asked.answer(headers.l2.src, OWN);
        let len = ndp::build_advertisement(&mut out, &says).expect("room");
        parse_built(&out[..len]);
    }
}

fn parse_built(frame: &[u8]) {
    match parse::parse(frame, frame.len()) {
        // The answer goes to the address that asked, whatever that is.
        Ok(_) | Err(ParseError::MappedIpv6Address) => {}
        Err(error) => panic!("{error}: {frame:02x?}"),
    }
}

/// Writes keep what they do not name, and the IPv4 checksum.
fn rewrites(frame: &[u8], headers: &Headers) {
    let mut copy = frame.to_vec();
    let packet = &mut copy[usize::from(headers.l3_offset)..];
    let left = match headers.kind {
        L3::Arp { .. } => return,
        L3::V4 { .. } => {
            let mut ip = Ipv4Mut::new(packet).expect("parsed before");
            ip.set_ecn(3);
            let left = ip.decrement_ttl();
            assert!(Ipv4::new(packet).expect("still a header").checksum_ok());
            left
        }
        L3::V6 { .. } => {
            let mut ip = Ipv6Mut::new(packet).expect("parsed before");
            ip.set_ecn(3);
            ip.decrement_hop_limit()
        }
    };
    assert_eq!(left, headers.ttl.checked_sub(1).filter(|&left| left > 0));
    let expected = Headers {
        ttl: left.unwrap_or(headers.ttl),
        dscp_ecn: headers.dscp_ecn | 3,
        ..*headers
    };
    assert_eq!(parse::parse(&copy, copy.len()), Ok(expected));

    let segment = &frame[usize::from(headers.l4_offset)..headers.l3_end()];
    let (left, right) = segment.split_at(segment.len() / 3);
    assert_eq!(
        checksum::complete([segment]),
        checksum::complete([left, right])
    );
    if headers.protocol == protocol::SCTP {
        assert_eq!(sctp::checksum([segment]), sctp::checksum([left, right]));
    }
    if headers.protocol == protocol::TCP && headers.fragment == Fragment::None {
        let tcp = Tcp::new(segment).expect("parsed before");
        assert_eq!(
            tcp.header_len(),
            usize::from(headers.payload_offset - headers.l4_offset)
        );
    }
}
