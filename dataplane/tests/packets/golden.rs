//! Packets as Linux 6.18 left them on a pod's veth, captured there: VXLAN with and without an
//! outer checksum, carrying the first packet of a TCP connection and a datagram, both with the
//! inner checksum left to the device. The other tunnels carry the same inner packet behind
//! their headers by the book.

use crate::FROM;
use crate::common::frames::sum;
use crate::common::{Cluster, naive};

const DATAGRAM_WITHOUT_CHECKSUM: &str = "
    0233 0000 0101 0222 0000 0101 0800 4500 0058 7895 0000 4011 e916 0af4 0101 0af4
    0201 8b47 12b5 0044 0000 0800 0000 0000 2a00 020a 0000 0002 020a 0000 0001 0800
    4500 0026 b22e 4000 4011 f544 c0a8 0901 c0a8 0902 dd30 1388 0012 9377 6120 6461
    7461 6772 616d";

const SYN_WITHOUT_CHECKSUM: &str = "
    0233 0000 0101 0222 0000 0101 0800 4500 006e 7896 0000 4011 e8ff 0af4 0101 0af4
    0201 a698 12b5 005a 0000 0800 0000 0000 2a00 020a 0000 0002 020a 0000 0001 0800
    4500 003c 925f 4000 4006 1509 c0a8 0901 c0a8 0902 ada6 0050 09fd a14c 0000 0000
    a002 fd5c 9382 0000 0204 0582 0402 080a 1eca 53f6 0000 0000 0103 030a";

const DATAGRAM_WITH_CHECKSUM: &str = "
    0233 0000 0101 0222 0000 0101 0800 4500 0058 7897 0000 4011 e914 0af4 0101 0af4
    0201 9a99 2118 0044 7d2b 0800 0000 0000 2b00 020a 0000 0002 020a 0000 0001 0800
    4500 0026 9079 4000 4011 18fa c0a8 0801 c0a8 0802 8bec 1388 0012 9177 6120 6461
    7461 6772 616d";

const SYN_WITH_CHECKSUM: &str = "
    0233 0000 0101 0222 0000 0101 0800 4500 006e 7898 0000 4011 e8fd 0af4 0101 0af4
    0201 a008 2118 005a 779b 0800 0000 0000 2b00 020a 0000 0002 020a 0000 0001 0800
    4500 003c e841 4000 4006 c126 c0a8 0801 c0a8 0802 b2fa 0050 9801 4cac 0000 0000
    a002 fd5c 9182 0000 0204 0582 0402 080a 138e 765e 0000 0000 0103 030a";

/// Where the inner Ethernet and IP headers and the inner transport start in those.
const INNER_FRAME: usize = 50;
const INNER: usize = 64;
const INNER_L4: usize = 84;

/// What tcpdump says that the checksums of the two connection attempts should be.
const SYN_CHECKSUM: [u8; 2] = [0xeb, 0x7d];
const OTHER_SYN_CHECKSUM: [u8; 2] = [0x97, 0x99];

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks(2)
        .map(|pair| (pair[0] << 4 | pair[1]) as u8)
        .collect()
}

/// The transport checksum at `l4` of the IPv4 packet at `l3` is right.
fn is_right(frame: &[u8], l3: usize, l4: usize) -> bool {
    let mut all = frame[l3 + 12..l3 + 20].to_vec();
    all.extend([0, frame[l3 + 9]]);
    all.extend(((frame.len() - l4) as u16).to_be_bytes());
    all.extend(&frame[l4..]);
    sum(&all) == 0xffff
}

#[test]
fn vxlan_of_a_pods_kernel_arrives_with_every_checksum_right() {
    let mut cluster = Cluster::new(1);
    for (hex, outer, known) in [
        (DATAGRAM_WITHOUT_CHECKSUM, false, None),
        (SYN_WITHOUT_CHECKSUM, false, Some(SYN_CHECKSUM)),
        (DATAGRAM_WITH_CHECKSUM, true, None),
        (SYN_WITH_CHECKSUM, true, Some(OTHER_SYN_CHECKSUM)),
    ] {
        let sent = bytes(hex);
        assert!(!is_right(&sent, INNER, INNER_L4));
        let (arrived, _) = cluster.exchange(FROM, crate::FAR, sent.clone());
        let arrived = &arrived[0].bytes;
        assert!(is_right(arrived, INNER, INNER_L4), "the inner checksum");
        assert_eq!(is_right(arrived, 14, 34), outer, "the outer checksum");
        let field = INNER_L4 + if sent[INNER + 9] == 6 { 16 } else { 6 };
        if let Some(known) = known {
            assert_eq!(arrived[field..field + 2], known);
        }
        // Nothing else is another, but for the hop.
        let mut expected = naive::one_hop_later(sent);
        expected[field..field + 2].copy_from_slice(&arrived[field..field + 2]);
        assert_eq!(arrived[12..], expected[12..]);
    }
    cluster.finish();
}

/// The connection attempt in a tunnel of that protocol, or UDP port, behind that header.
fn in_tunnel(protocol: u8, port: Option<u16>, header: &[u8], bridged: bool) -> Vec<u8> {
    let carried = &bytes(SYN_WITHOUT_CHECKSUM)[if bridged { INNER_FRAME } else { INNER }..];
    let mut payload = [header, carried].concat();
    if let Some(port) = port {
        let [high, low] = port.to_be_bytes();
        let len = 8 + payload.len() as u8;
        payload.splice(..0, [0xa6, 0x98, high, low, 0, len, 0, 0]);
    }
    naive::framed(
        FROM,
        &naive::ipv4(FROM, crate::FAR, protocol, &[], &payload),
    )
}

#[test]
fn geneve_gre_ipip_and_gtpu_too() {
    let mut cluster = Cluster::new(1);
    let geneve = [0, 0, 0x65, 0x58, 0, 0, 0x2a, 0];
    // G-PDU of tunnel 1, 60 bytes.
    let gtpu = [0x30, 0xff, 0, 60, 0, 0, 0, 1];
    for (what, sent) in [
        ("Geneve", in_tunnel(17, Some(6081), &geneve, true)),
        ("GRE", in_tunnel(47, None, &[0, 0, 8, 0], false)),
        ("gretap", in_tunnel(47, None, &[0, 0, 0x65, 0x58], true)),
        ("IPIP", in_tunnel(4, None, &[], false)),
        ("GTP-U", in_tunnel(17, Some(2152), &gtpu, false)),
    ] {
        let (arrived, _) = cluster.exchange(FROM, crate::FAR, sent.clone());
        let mut expected = naive::one_hop_later(sent);
        let field = expected.len() - 40 + 16;
        expected[field..field + 2].copy_from_slice(&SYN_CHECKSUM);
        assert_eq!(arrived[0].bytes[12..], expected[12..], "{what}");
    }
    cluster.finish();
}
