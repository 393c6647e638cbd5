//! Unfinished checksums inside tunnels that a pod makes itself.
//!
//! A VXLAN, Geneve, GRE, IP-in-IP or GTP-U device in a pod hands its packets down with the
//! *inner* TCP or UDP checksum still partial: the pod's kernel counts on its veth to know where
//! it is. The far end of the pod's tunnel would drop every such packet, so the inner checksum is
//! completed here, for the wire and for local pods alike. It comes before the outer one
//! ([`crate::offload`]): a kernel that has finished the outer checksum has done so for the
//! inner one completed (local checksum offload), and one that has not wants it summed over that.
//!
//! ```text
//!  Ethernet │ IP │ UDP │ VXLAN │ Ethernet │ IP │ TCP, partial │ …
//!  Ethernet │ IP │ GRE, checksum zero │ IP │ UDP │ …
//! ```
//!
//! Only packets of flows whose transport may be such a tunnel are looked at ([`may_carry`],
//! asked once a flow), at most [`MAX_DEPTH`] tunnels deep. What does not parse is left as it is.
//!
//! Deliberately absent: tunnels on other ports, FOU and GUE, and inner SCTP.

use arrayvec::ArrayVec;

use crate::io::packet::{Packet, PartialChecksum};
use crate::io::umem::Umem;
use crate::offload;
use crate::parse::{self, Fragment, Headers};
use crate::verdict::DropReason;
use crate::wire::{Payload, geneve, gre, gtpu, protocol, vxlan};

/// Tunnels in tunnels that are looked into.
pub const MAX_DEPTH: usize = 3;

/// VXLAN's port by IANA, and the one that Linux had before.
const VXLAN_PORTS: [u16; 2] = [4789, 8472];

/// Whether packets with these headers may be a tunnel's.
#[must_use]
pub fn may_carry(headers: &Headers) -> bool {
    match headers.protocol {
        protocol::GRE | protocol::IPV4 | protocol::IPV6 => true,
        protocol::UDP => {
            VXLAN_PORTS.contains(&headers.dst_port)
                || matches!(headers.dst_port, geneve::PORT | gtpu::PORT)
        }
        _ => false,
    }
}

/// Completes what is unfinished inside a packet with these headers. Its own checksum is not
/// touched.
pub fn finish(packet: &mut Packet, umem: &Umem, headers: &Headers) -> Result<(), DropReason> {
    // Each level has a checksum of its transport, and may have one of GRE.
    let mut unfinished = ArrayVec::<(PartialChecksum, usize), { 2 * MAX_DEPTH }>::new();
    let mut outer = *headers;
    for _ in 0..MAX_DEPTH {
        let head = packet.head(umem);
        if let Some(field) = gre_checksum(head, &outer) {
            unfinished.push((field, outer.l3_end()));
        }
        let Some(inner) = inside(head, &outer) else {
            break;
        };
        if let Some(field) = offload::unfinished(packet, umem, &inner) {
            unfinished.push((field, inner.l3_end()));
        }
        outer = inner;
    }
    // From the inside out: an outer checksum covers the inner ones.
    while let Some((field, end)) = unfinished.pop() {
        offload::complete(packet, umem, field, end)?;
    }
    Ok(())
}

/// The checksum of a GRE header, if it is left to the device: zero, since there is no
/// pseudo-header. One that is zero by chance stays zero, or becomes its other representation.
fn gre_checksum(head: &[u8], outer: &Headers) -> Option<PartialChecksum> {
    if outer.protocol != protocol::GRE || outer.fragment != Fragment::None {
        return None;
    }
    let header = gre::Gre::new(transport_payload(head, outer)?)?;
    (header.checksum() == Some(0)).then_some(PartialChecksum {
        start: outer.l4_offset,
        offset: gre::CHECKSUM_OFFSET as u16,
    })
}

/// The headers of the packet that a tunnel's packet carries, if it is one. A fragment carries
/// none: kernels complete checksums before they cut.
fn inside(head: &[u8], outer: &Headers) -> Option<Headers> {
    if outer.fragment != Fragment::None {
        return None;
    }
    let bytes = transport_payload(head, outer)?;
    let (skip, payload) = match (outer.protocol, outer.dst_port) {
        (protocol::IPV4 | protocol::IPV6, _) => (0, Payload::Ip),
        (protocol::GRE, _) => {
            let header = gre::Gre::new(bytes)?;
            (header.header_len(), header.payload()?)
        }
        (protocol::UDP, geneve::PORT) => geneve::payload(bytes)?,
        (protocol::UDP, gtpu::PORT) => (gtpu::payload(bytes)?, Payload::Ip),
        (protocol::UDP, port) if VXLAN_PORTS.contains(&port) => {
            vxlan::VxlanHeader::new(bytes).ok()?;
            (vxlan::HEADER_LEN, Payload::Ethernet)
        }
        _ => return None,
    };
    let at = usize::from(outer.payload_offset) + skip;
    match payload {
        Payload::Ethernet => parse::parse_at(head, at, outer.l3_end()),
        Payload::Ip => parse::parse_ip_at(head, at, outer.l3_end()),
    }
    .ok()
}

fn transport_payload<'a>(head: &'a [u8], headers: &Headers) -> Option<&'a [u8]> {
    head.get(usize::from(headers.payload_offset)..headers.l3_end().min(head.len()))
}
