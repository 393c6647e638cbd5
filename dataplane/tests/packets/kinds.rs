//! Packets out of the ordinary that pass as they are: IPv4 options, IPv6 extension headers,
//! SCTP, protocols that nobody here knows.

use skein_dataplane::verdict::DropReason;
use skein_dataplane::wire::sctp;

use crate::common::{Cluster, naive};
use crate::{FAR, FROM, NEAR};

/// Everything but the Ethernet addresses and the TTL arrives as it was sent.
fn passes(cluster: &mut Cluster, packet: impl Fn((u8, u8)) -> Vec<u8>, what: &str) {
    for to in [NEAR, FAR] {
        let sent = naive::framed(FROM, &packet(to));
        let (arrived, back) = cluster.exchange(FROM, to, sent.clone());
        assert!(back.is_empty(), "{what} to {to:?}");
        assert_eq!(arrived.len(), 1, "{what} to {to:?}");
        let expected = naive::one_hop_later(sent);
        assert_eq!(arrived[0].bytes[12..], expected[12..], "{what} to {to:?}");
        assert_eq!(arrived[0].partial_checksum, None);
    }
}

const UDP: [u8; 12] = [0, 7, 0, 9, 0, 12, 0, 0, 1, 2, 3, 4];

#[test]
fn ipv4_options() {
    let mut cluster = Cluster::new(1);
    for options in [
        &[0x94, 4, 0, 0][..],
        &[7, 39, 4, 0, 0, 0, 0].repeat(5)[..32],
        &[1; 40],
        // Not even well formed: the hosts' affair.
        &[0x83, 0, 0xff, 1],
    ] {
        let packet = |to| naive::ipv4(FROM, to, 17, options, &UDP);
        passes(&mut cluster, packet, "options");
    }
    cluster.finish();
}

#[test]
fn ipv6_extension_headers() {
    let mut cluster = Cluster::new(1);
    // Hop-by-hop and destination options hold padding, the routing header is of type 4 with
    // nothing left, the fragment header is of a packet in one piece.
    let hop_by_hop = |next: u8| vec![next, 0, 1, 4, 0, 0, 0, 0];
    let destination = |next: u8| [vec![next, 1, 1, 12], vec![0; 12]].concat();
    let routing = |next: u8| vec![next, 0, 4, 0, 0, 0, 0, 0];
    let atomic = |next: u8| vec![next, 0, 0, 0, 0, 0, 0, 9];
    let chains: [(u8, Vec<Vec<u8>>); 5] = [
        (0, vec![hop_by_hop(17)]),
        (60, vec![destination(17)]),
        (43, vec![routing(17)]),
        (44, vec![atomic(17)]),
        (
            0,
            vec![hop_by_hop(60), destination(43), routing(44), atomic(17)],
        ),
    ];
    for (first, chain) in chains {
        let payload = [chain.concat(), UDP.to_vec()].concat();
        let packet = |to| naive::ipv6(FROM, to, first, &payload);
        passes(&mut cluster, packet, "extension headers");
    }
    cluster.finish();
}

#[test]
fn sctp_keeps_its_checksum() {
    let mut cluster = Cluster::new(1);
    let mut message = [
        &[0x0b, 0x59, 0x0b, 0x5a, 1, 2, 3, 4, 0, 0, 0, 0][..],
        &[7; 900],
    ]
    .concat();
    let crc = sctp::checksum([&message[..]]);
    message[8..12].copy_from_slice(&crc.to_le_bytes());
    let v4 = |to| naive::ipv4(FROM, to, 132, &[], &message);
    passes(&mut cluster, v4, "SCTP over IPv4");
    let v6 = |to| naive::ipv6(FROM, to, 132, &message);
    passes(&mut cluster, v6, "SCTP over IPv6");
    cluster.finish();
}

#[test]
fn protocols_that_nobody_here_knows() {
    let mut cluster = Cluster::new(1);
    for protocol in [2, 50, 89, 112, 253] {
        let v4 = |to| naive::ipv4(FROM, to, protocol, &[], b"anything");
        passes(&mut cluster, v4, "unknown over IPv4");
        let v6 = |to| naive::ipv6(FROM, to, protocol, b"anything");
        passes(&mut cluster, v6, "unknown over IPv6");
    }
    let empty = |to| naive::ipv6(FROM, to, 59, b"");
    passes(&mut cluster, empty, "no next header");
    assert_eq!(cluster.drops(1, DropReason::NoRoute), 0);
    cluster.finish();
}
