//! ICMP errors: which connection one is about, and what it says once that is translated.
//!
//! An error quotes the packet that it is about as its sender saw it. The connection is found by
//! that quote, turned round; then the quote becomes the packet that the receiver of the error
//! sent, and the error's own addresses follow (RFC 5508 section 4, RFC 5461). Only the slow path
//! comes here: errors are few, and each is about another packet.
//!
//! Deliberately absent: the quote's own transport checksum, which nobody verifies, since a quote
//! is seldom whole; quotes of later fragments, which name no port.

use crate::conntrack::Tuple;
use crate::io::packet::Packet;
use crate::io::umem::Umem;
use crate::parse::Headers;
use crate::translate;
use crate::verdict::DropReason;
use crate::wire::{checksum, icmp, icmpv6, ipv4, ipv6, protocol};

/// The packet that an ICMP error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quote {
    /// As it was when the error was made.
    pub tuple: Tuple,
    l3_offset: usize,
    l4_offset: usize,
    is_v4: bool,
}

impl Quote {
    /// Reads the quote of an ICMP error whose headers are these; `head` is the frame's. `None`
    /// when so little is quoted that no connection can be told from it.
    #[must_use]
    pub fn read(head: &[u8], headers: &Headers) -> Option<Self> {
        let end = headers.l3_end().min(head.len());
        let head = &head[..end];
        let l3_offset = usize::from(headers.payload_offset);
        let ip = head.get(l3_offset..)?;
        let is_v4 = headers.is_v4();
        let (src, dst, protocol, header_len) = if is_v4 {
            quoted_v4(ip)?
        } else {
            quoted_v6(ip)?
        };
        let l4 = ip.get(header_len..)?;
        let (src_port, dst_port) = ports(l4, protocol, is_v4)?;
        Some(Self {
            tuple: Tuple {
                src,
                dst,
                src_port,
                dst_port,
                protocol,
            },
            l3_offset,
            l4_offset: l3_offset + header_len,
            is_v4,
        })
    }

    /// Makes the quote one of a packet with the tuple `quoted`, and the error itself one from
    /// `src` to `dst` (IPv4-mapped where IPv4).
    pub fn rewrite(
        &self,
        packet: &mut Packet,
        umem: &Umem,
        headers: &Headers,
        (src, dst): ([u8; 16], [u8; 16]),
        quoted: &Tuple,
    ) -> Result<(), DropReason> {
        let head = packet.head_mut(umem);
        let ip = head
            .get_mut(self.l3_offset..)
            .ok_or(DropReason::TruncatedL4)?;
        translate::set_addresses(ip, self.is_v4, quoted)?;
        let l4 = head
            .get_mut(self.l4_offset..)
            .ok_or(DropReason::TruncatedL4)?;
        match quoted.protocol {
            protocol::TCP | protocol::UDP | protocol::SCTP => {
                l4[..2].copy_from_slice(&quoted.src_port.to_be_bytes());
                l4[2..4].copy_from_slice(&quoted.dst_port.to_be_bytes());
            }
            protocol::ICMP | protocol::ICMPV6 if l4.len() >= icmp::HEADER_LEN => {
                let identifier = quoted.src_port | quoted.dst_port;
                let field = icmp::IDENTIFIER_OFFSET..icmp::IDENTIFIER_OFFSET + 2;
                l4[field].copy_from_slice(&identifier.to_be_bytes());
            }
            _ => {}
        }
        let outer = Tuple {
            src,
            dst,
            ..*quoted
        };
        let l3 = usize::from(headers.l3_offset);
        translate::set_addresses(&mut head[l3..], self.is_v4, &outer)?;
        self.finish(packet, umem, headers, &outer)
    }

    /// The error's checksum, over all that was changed.
    fn finish(
        &self,
        packet: &mut Packet,
        umem: &Umem,
        headers: &Headers,
        outer: &Tuple,
    ) -> Result<(), DropReason> {
        let l4 = usize::from(headers.l4_offset);
        let pseudo = if self.is_v4 {
            checksum::Sum::new()
        } else {
            let len = headers.l4_len() as u32;
            checksum::pseudo_v6(outer.src, outer.dst, protocol::ICMPV6, len)
        };
        let place = l4 + icmp::CHECKSUM_OFFSET;
        let old = packet
            .head(umem)
            .get(place..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .map(u16::from_be_bytes)
            .ok_or(DropReason::TruncatedL4)?;
        let sum = checksum::transport(pseudo, packet.slices_from(umem, l4), old);
        packet.head_mut(umem)[place..place + 2].copy_from_slice(&sum.to_be_bytes());
        Ok(())
    }
}

type Addresses = ([u8; 16], [u8; 16], u8, usize);

fn quoted_v4(ip: &[u8]) -> Option<Addresses> {
    let header: &[u8; ipv4::HEADER_LEN] = ip.first_chunk()?;
    let header_len = usize::from(header[ipv4::VERSION_IHL_OFFSET] & 0x0f) * 4;
    let offset = u16::from_be_bytes([
        header[ipv4::FRAGMENT_OFFSET],
        header[ipv4::FRAGMENT_OFFSET + 1],
    ]);
    let good = header[ipv4::VERSION_IHL_OFFSET] >> 4 == 4 && header_len >= ipv4::HEADER_LEN;
    if !good || offset & 0x1fff != 0 {
        return None;
    }
    let address = |at: usize| {
        let bytes: Option<[u8; 4]> = header[at..].first_chunk().copied();
        bytes.map(ipv6::v4_mapped)
    };
    Some((
        address(ipv4::SRC_OFFSET)?,
        address(ipv4::DST_OFFSET)?,
        header[ipv4::PROTOCOL_OFFSET],
        header_len,
    ))
}

fn quoted_v6(ip: &[u8]) -> Option<Addresses> {
    let header = ipv6::Ipv6::new(ip).ok()?;
    let mut next = header.next_header();
    let mut at = ipv6::HEADER_LEN;
    for _ in 0..crate::parse::MAX_EXTENSIONS {
        if !ipv6::is_extension(next) {
            return Some((header.src(), header.dst(), next, at));
        }
        let rest = ip.get(at..)?;
        if next == protocol::FRAGMENT {
            let fragment = ipv6::FragmentHeader::new(rest).ok()?;
            if fragment.offset() != 0 {
                return None;
            }
            next = fragment.next_header();
            at += ipv6::FRAGMENT_LEN;
        } else {
            let extension = ipv6::Extension::new(next, rest).ok()?;
            next = extension.next_header();
            at += extension.header_len();
        }
    }
    None
}

/// Ports as a [`Tuple`] has them; eight bytes of transport header are always quoted (RFC 792).
fn ports(l4: &[u8], protocol: u8, is_v4: bool) -> Option<(u16, u16)> {
    let word = |at: usize| {
        let bytes = l4.get(at..at + 2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    match protocol {
        protocol::TCP | protocol::UDP | protocol::SCTP => Some((word(0)?, word(2)?)),
        protocol::ICMP | protocol::ICMPV6 => {
            let kind = *l4.first()?;
            let identifier = word(icmp::IDENTIFIER_OFFSET)?;
            let (request, reply) = if is_v4 {
                (icmp::ECHO_REQUEST, icmp::ECHO_REPLY)
            } else {
                (icmpv6::ECHO_REQUEST, icmpv6::ECHO_REPLY)
            };
            match kind {
                kind if kind == request => Some((identifier, 0)),
                kind if kind == reply => Some((0, identifier)),
                _ => Some((0, 0)),
            }
        }
        _ => Some((0, 0)),
    }
}
