//! What the datapath answers itself: a pod's questions for its gateway.
//!
//! The gateway (169.254.1.1 and fe80::1) is nowhere but here. ARP (RFC 826) and neighbour
//! solicitations (RFC 4861) for it are answered with the MAC of the veth's host end; what a pod
//! asks of other addresses is none of its business, since its link holds nobody else. ICMP echo
//! requests to the gateway are answered too, in place, whatever their size; it serves nothing
//! else and reassembles no fragments.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::io::packet::Packet;
use crate::io::umem::Umem;
use crate::parse::{EthernetHeader, Fragment, Headers, L3};
use crate::snapshot::Endpoint;
use crate::verdict::DropReason;
use crate::wire::{arp, checksum, ethernet, icmp, icmpv6, ipv4, ipv6, ndp};

/// The pods' IPv4 gateway.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The pods' IPv6 gateway.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// As [`Headers::dst_bytes`] has them.
const GATEWAY_V4_BYTES: [u8; 16] = ipv6::v4_mapped(GATEWAY_V4.octets());
const GATEWAY_V6_BYTES: [u8; 16] = GATEWAY_V6.octets();

/// Hops that an echo reply may go; it goes one.
const ECHO_TTL: u8 = 64;

/// What became of a packet that may be a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It holds the answer now: send it back where it came from.
    Reply,
    /// An announcement that needs no answer.
    Heard,
    /// No question at all: forward it.
    NotForUs,
}

/// Answers a pod's question, in place.
pub fn answer(
    packet: &mut Packet,
    umem: &Umem,
    headers: &Headers,
    endpoint: &Endpoint,
) -> Result<Answer, DropReason> {
    // The frame's source MAC is the first thing that a pod could forge.
    if headers.l2.src != endpoint.mac {
        return Err(DropReason::SpoofedMac);
    }
    match headers.kind {
        L3::Arp { .. } => answer_arp(packet, umem, headers, endpoint),
        L3::V6 { .. } => match headers.icmp {
            Some((icmpv6::NEIGHBOR_SOLICITATION, _)) => {
                answer_solicitation(packet, umem, headers, endpoint)
            }
            Some((icmpv6::NEIGHBOR_ADVERTISEMENT, _)) => Ok(Answer::Heard),
            _ if headers.dst_bytes == GATEWAY_V6_BYTES => {
                answer_echo(packet, umem, headers, endpoint)
            }
            _ => Ok(Answer::NotForUs),
        },
        L3::V4 { .. } if headers.dst_bytes == GATEWAY_V4_BYTES => {
            answer_echo(packet, umem, headers, endpoint)
        }
        L3::V4 { .. } => Ok(Answer::NotForUs),
    }
}

fn answer_arp(
    packet: &mut Packet,
    umem: &Umem,
    headers: &Headers,
    endpoint: &Endpoint,
) -> Result<Answer, DropReason> {
    let mut reply = [0; arp::FRAME_LEN];
    {
        let request = arp::Arp::new(&packet.head(umem)[usize::from(headers.l3_offset)..])?;
        if request.sender_mac() != endpoint.mac {
            return Err(DropReason::SpoofedMac);
        }
        let sender = Ipv4Addr::from(request.sender_ip());
        // A probe (RFC 5227 section 2.1.1) has no sender address yet.
        if !sender.is_unspecified() && !endpoint.addresses.contains(&sender.into()) {
            return Err(DropReason::SpoofedAddress);
        }
        if request.sender_ip() == request.target_ip() {
            return Ok(Answer::Heard);
        }
        if request.operation() != arp::REQUEST || request.target_ip() != GATEWAY_V4.octets() {
            return Err(DropReason::ForeignNeighbour);
        }
        arp::build_reply(&mut reply, request, endpoint.gateway_mac)
            .ok_or(DropReason::TruncatedArp)?;
    }
    replace(packet, umem, &reply)
}

fn answer_solicitation(
    packet: &mut Packet,
    umem: &Umem,
    headers: &Headers,
    endpoint: &Endpoint,
) -> Result<Answer, DropReason> {
    let mut reply = [0; ndp::ADVERTISEMENT_FRAME_LEN];
    {
        let message = packet
            .head(umem)
            .get(usize::from(headers.l4_offset)..headers.l3_end())
            .ok_or(DropReason::TruncatedNdp)?;
        let question =
            ndp::Solicitation::parse(headers.src_bytes, headers.dst_bytes, headers.ttl, message)?;
        if question.source_link.is_some_and(|mac| mac != endpoint.mac) {
            return Err(DropReason::SpoofedMac);
        }
        let asker = Ipv6Addr::from(question.src);
        // The kernel asks from its link-local address, too, which it makes by itself.
        if !asker.is_unspecified()
            && !asker.is_unicast_link_local()
            && !endpoint.addresses.contains(&asker.into())
        {
            return Err(DropReason::SpoofedAddress);
        }
        if question.target != GATEWAY_V6.octets() {
            // A test for duplicates of its own address: silence says that there is none.
            return if headers.src_bytes == [0; 16] {
                Ok(Answer::Heard)
            } else {
                Err(DropReason::ForeignNeighbour)
            };
        }
        let answer = question.answer(headers.l2.src, endpoint.gateway_mac);
        ndp::build_advertisement(&mut reply, &answer).ok_or(DropReason::TruncatedNdp)?;
    }
    replace(packet, umem, &reply)
}

/// Answers an echo request to the gateway (RFC 792, RFC 4443 section 4.2).
fn answer_echo(
    packet: &mut Packet,
    umem: &Umem,
    headers: &Headers,
    endpoint: &Endpoint,
) -> Result<Answer, DropReason> {
    // To a link-local address the kernel speaks from its own, which it makes by itself.
    let own = match headers.src() {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => true,
        address => endpoint.addresses.contains(&address),
    };
    if !own {
        return Err(DropReason::SpoofedAddress);
    }
    let (request, reply) = if headers.is_v4() {
        (icmp::ECHO_REQUEST, icmp::ECHO_REPLY)
    } else {
        (icmpv6::ECHO_REQUEST, icmpv6::ECHO_REPLY)
    };
    let (l3, l4) = (
        usize::from(headers.l3_offset),
        usize::from(headers.l4_offset),
    );
    let extended = headers.is_v6() && l4 != l3 + ipv6::HEADER_LEN;
    let whole = headers.fragment == Fragment::None;
    if headers.icmp != Some((request, 0)) || !whole || extended {
        return Err(DropReason::GatewayRefused);
    }
    let head = packet.head_mut(umem);
    ethernet::EthernetMut::new(head)?.set_addresses(EthernetHeader {
        dst: endpoint.mac,
        src: endpoint.gateway_mac,
    });
    let [.., a, b, c, d] = headers.src_bytes;
    if headers.is_v4() {
        let mut ip = ipv4::Ipv4Mut::new(&mut head[l3..])?;
        ip.set_src(GATEWAY_V4.octets());
        ip.set_dst([a, b, c, d]);
        ip.set_ttl(ECHO_TTL);
    } else {
        let mut ip = ipv6::Ipv6Mut::new(&mut head[l3..])?;
        ip.set_src(GATEWAY_V6_BYTES);
        ip.set_dst(headers.src_bytes);
        ip.set_hop_limit(ECHO_TTL);
    }
    // The addresses only change places, so that the type is all that the checksum sees.
    let [kind, code, high, low] = head[l4..]
        .first_chunk_mut()
        .ok_or(DropReason::TruncatedL4)?;
    let old = u16::from_be_bytes([*kind, *code]);
    let new = u16::from_be_bytes([reply, *code]);
    let sum = checksum::update(u16::from_be_bytes([*high, *low]), old, new);
    *kind = reply;
    [*high, *low] = sum.to_be_bytes();
    Ok(Answer::Reply)
}

fn replace(packet: &mut Packet, umem: &Umem, reply: &[u8]) -> Result<Answer, DropReason> {
    // Both questions fit in one segment; an answer is at most as long as what it replaces
    // plus an option, and the rest of the chunk has room for that.
    if packet.segments().len() != 1 || !packet.resize_head(reply.len()) {
        return Err(DropReason::ForeignNeighbour);
    }
    packet.head_mut(umem).copy_from_slice(reply);
    Ok(Answer::Reply)
}
