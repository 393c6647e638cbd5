//! What a pod's kernel does with packets, as plainly as it can be written: nothing of the code
//! under test.

use std::ops::Range;

use skein_dataplane::fixtures::{gateway_mac, pod_mac, pod_v4, pod_v6};

use super::frames::{Pod, fix_ipv4_checksum, sum};

/// Where the IP header starts in a frame.
pub const IP: usize = 14;

/// An Ethernet frame of a pod with that IP packet inside.
pub fn framed(from: Pod, packet: &[u8]) -> Vec<u8> {
    let mut frame = gateway_mac(from.0, from.1).0.to_vec();
    frame.extend(pod_mac(from.0, from.1).0);
    frame.extend(if packet[0] >> 4 == 4 {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    });
    frame.extend(packet);
    frame
}

/// An IPv4 packet from pod to pod, of any protocol and with any options.
pub fn ipv4(from: Pod, to: Pod, protocol: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let header_len = 20 + options.len();
    let mut packet = vec![0x40 | (header_len / 4) as u8, 0];
    packet.extend(((header_len + payload.len()) as u16).to_be_bytes());
    packet.extend([0xbe, 0xef, 0, 0, 64, protocol, 0, 0]);
    packet.extend(pod_v4(from.0, from.1).octets());
    packet.extend(pod_v4(to.0, to.1).octets());
    packet.extend(options);
    fix_header(&mut packet);
    packet.extend(payload);
    packet
}

/// An IPv6 packet from pod to pod; extension headers are part of the payload.
pub fn ipv6(from: Pod, to: Pod, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next_header, 64]);
    packet.extend(pod_v6(from.0, from.1).octets());
    packet.extend(pod_v6(to.0, to.1).octets());
    packet.extend(payload);
    packet
}

/// Computes an IPv4 header's checksum anew, options included.
pub fn fix_header(packet: &mut [u8]) {
    let len = header_len(packet);
    packet[10..12].fill(0);
    let checksum = !sum(&packet[..len]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// The frame one hop later: TTL one less, and the checksum right again.
pub fn one_hop_later(mut frame: Vec<u8>) -> Vec<u8> {
    if frame[IP] >> 4 == 4 {
        frame[IP + 8] -= 1;
        fix_header(&mut frame[IP..]);
    } else {
        frame[IP + 7] -= 1;
    }
    frame
}

/// Clears DF, as a pod does that leaves path MTU discovery be.
pub fn may_be_cut(mut frame: Vec<u8>, id: u16) -> Vec<u8> {
    frame[IP + 4..IP + 6].copy_from_slice(&id.to_be_bytes());
    frame[IP + 6] &= !0x40;
    fix_ipv4_checksum(&mut frame[IP..]);
    frame
}

pub fn header_len(packet: &[u8]) -> usize {
    usize::from(packet[0] & 0x0f) * 4
}

pub fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Where an IPv4 fragment's payload stands in the whole packet's.
pub fn placed(packet: &[u8]) -> Range<usize> {
    let start = usize::from(word(packet, 6) & 0x1fff) * 8;
    start..start + usize::from(word(packet, 2)) - header_len(packet)
}

pub fn more_follow(packet: &[u8]) -> bool {
    packet[6] & 0x20 != 0
}

/// Cuts an IPv4 packet into fragments of `len` bytes of payload, a multiple of eight.
pub fn cut_v4(packet: &[u8], len: usize) -> Vec<Vec<u8>> {
    let (header, payload) = packet.split_at(header_len(packet));
    let count = payload.len().div_ceil(len);
    let fragment = |(number, part): (usize, &[u8])| {
        let mut fragment = header.to_vec();
        let more = if number + 1 < count { 0x2000 } else { 0 };
        let field = (number * len / 8) as u16 | more;
        fragment[2..4].copy_from_slice(&((header.len() + part.len()) as u16).to_be_bytes());
        fragment[6..8].copy_from_slice(&field.to_be_bytes());
        fix_header(&mut fragment);
        fragment.extend(part);
        fragment
    };
    payload.chunks(len).enumerate().map(fragment).collect()
}

/// Cuts an IPv6 packet without extension headers into fragments.
pub fn cut_v6(packet: &[u8], len: usize) -> Vec<Vec<u8>> {
    let (header, payload) = packet.split_at(40);
    let count = payload.len().div_ceil(len);
    let fragment = |(number, part): (usize, &[u8])| {
        let mut fragment = header.to_vec();
        fragment[4..6].copy_from_slice(&((8 + part.len()) as u16).to_be_bytes());
        fragment[6] = 44;
        let field = (number * len) as u16 | u16::from(number + 1 < count);
        fragment.extend([header[6], 0]);
        fragment.extend(field.to_be_bytes());
        fragment.extend([0, 0, 0xbe, 0xef]);
        fragment.extend(part);
        fragment
    };
    payload.chunks(len).enumerate().map(fragment).collect()
}

/// Puts IPv4 fragments, in any order, together to the packet that was cut. Each must be well
/// formed, no larger than `mtu`, and they must fill the packet without a gap or an overlap.
pub fn reassemble(frames: &[Vec<u8>], mtu: usize) -> Vec<u8> {
    let mut fragments: Vec<&[u8]> = frames.iter().map(|frame| &frame[IP..]).collect();
    fragments.sort_by_key(|fragment| placed(fragment).start);
    let first = fragments[0];
    let mut whole = first[..header_len(first)].to_vec();
    let mut at = 0;
    for (number, fragment) in fragments.iter().enumerate() {
        assert!(fragment.len() <= mtu, "{} bytes", fragment.len());
        assert_eq!(fragment.len(), usize::from(word(fragment, 2)));
        assert_eq!(sum(&fragment[..header_len(fragment)]), 0xffff, "checksum");
        assert_eq!(fragment[4..6], first[4..6], "one identification");
        assert_eq!(fragment[8..10], first[8..10], "TTL and protocol");
        assert_eq!(fragment[12..20], first[12..20], "addresses");
        let place = placed(fragment);
        assert_eq!(place.start, at, "no gap, no overlap");
        assert_eq!(more_follow(fragment), number + 1 < fragments.len());
        at = place.end;
        whole.extend(&fragment[header_len(fragment)..]);
    }
    let len = whole.len() as u16;
    whole[2..4].copy_from_slice(&len.to_be_bytes());
    whole[6..8].fill(0);
    fix_header(&mut whole);
    whole
}

/// What an ICMP error says: type, code, the second word, and the packet that it quotes. Panics
/// unless it is well formed and the gateway's, addressed to that pod.
pub fn icmp_error(frame: &[u8], to: Pod) -> (u8, u8, u32, Vec<u8>) {
    assert_eq!(frame[..6], pod_mac(to.0, to.1).0);
    assert_eq!(frame[6..12], gateway_mac(to.0, to.1).0);
    let packet = &frame[IP..];
    let message = if packet[0] >> 4 == 4 {
        assert_eq!((packet[9], header_len(packet)), (1, 20));
        assert_eq!(packet.len(), usize::from(word(packet, 2)));
        assert_eq!(sum(&packet[..20]), 0xffff, "header checksum");
        assert_eq!(packet[12..16], [169, 254, 1, 1]);
        assert_eq!(packet[16..20], pod_v4(to.0, to.1).octets());
        assert_eq!(sum(&packet[20..]), 0xffff, "ICMP checksum");
        &packet[20..]
    } else {
        assert_eq!(packet[6], 58);
        assert_eq!(packet.len(), 40 + usize::from(word(packet, 4)));
        assert!(packet.len() <= 1280);
        assert_eq!(packet[8..10], [0xfe, 0x80]);
        assert_eq!(packet[10..24], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(packet[24..40], pod_v6(to.0, to.1).octets());
        let mut all = packet[8..].to_vec();
        all.splice(..0, [packet[4], packet[5], 0, 58]);
        assert_eq!(sum(&all), 0xffff, "ICMPv6 checksum");
        &packet[40..]
    };
    let second = u32::from_be_bytes(message[4..8].try_into().unwrap());
    (message[0], message[1], second, message[8..].to_vec())
}
