//! VXLAN: the header of a tunnel, made once for a flow and copied in front of each packet.
//!
//! ```text
//! │ Ethernet 14 │ IPv4 20 or IPv6 40 │ UDP 8 │ VXLAN 8 │ inner Ethernet 14 │ inner IP packet
//! ├──────────────────────── ready header, 64 or 84 bytes ─────────────────┤
//! ```
//!
//! RFC 7348 for the format, RFC 6040 for ECN, RFC 6935 and 6936 for UDP checksums over IPv6:
//! computed on the way out, zero accepted on the way in; over IPv4 zero. The VNI carries the
//! sender's identity.

use std::net::IpAddr;

use crate::ids::IdentityId;
use crate::io::packet::Packet;
use crate::io::umem::Umem;
use crate::parse::{EthernetHeader, Headers};
use crate::verdict::DropReason;
use crate::wire::{checksum, ethernet, ipv4, ipv6, protocol, udp, vxlan};

/// Length of the ready header over IPv6, the longest.
const MAX_HEADER: usize = ethernet::HEADER_LEN
    + ipv6::HEADER_LEN
    + udp::HEADER_LEN
    + vxlan::HEADER_LEN
    + ethernet::HEADER_LEN;

/// The lowest outer source port; with the flow's hash it spreads flows over paths (RFC 7348
/// section 5 asks for the dynamic range).
const FIRST_SOURCE_PORT: u16 = 49152;

const OUTER_TTL: u8 = 64;

/// The two ends of a tunnel.
#[derive(Clone, Debug)]
pub struct TunnelEnds {
    /// MACs of the uplink and the next hop.
    pub outer: EthernetHeader,
    /// This node's address.
    pub outer_src: IpAddr,
    /// The peer's address, of the same family.
    pub outer_dst: IpAddr,
    /// UDP port of the overlay.
    pub port: u16,
    /// Router MACs of the two nodes.
    pub inner: EthernetHeader,
}

/// A ready header.
#[derive(Clone, Debug)]
pub struct Tunnel {
    header: [u8; MAX_HEADER],
    len: u8,
    /// Pseudo-header sum of the outer UDP checksum without the length; `None` over IPv4.
    pseudo: Option<checksum::Sum>,
}

impl Tunnel {
    /// The header for one flow; `None` when the ends are of different families.
    #[must_use]
    pub fn new(
        ends: &TunnelEnds,
        identity: IdentityId,
        ether_type: u16,
        hash: u64,
    ) -> Option<Self> {
        let mut writer = Writer {
            header: [0; MAX_HEADER],
            len: 0,
        };
        let pseudo = match (ends.outer_src, ends.outer_dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                ethernet::write_header(writer.next(), ends.outer, ethernet::ETHER_TYPE_IPV4);
                let fields = ipv4::Ipv4Fields {
                    tos: 0,
                    total_len: 0,
                    id: 0,
                    dont_fragment: true,
                    ttl: OUTER_TTL,
                    protocol: protocol::UDP,
                    src: src.octets(),
                    dst: dst.octets(),
                };
                ipv4::write_header(writer.next(), &fields);
                None
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                ethernet::write_header(writer.next(), ends.outer, ethernet::ETHER_TYPE_IPV6);
                let fields = ipv6::Ipv6Fields {
                    traffic_class: 0,
                    flow_label: (hash >> 44) as u32,
                    payload_len: 0,
                    next_header: protocol::UDP,
                    hop_limit: OUTER_TTL,
                    src: src.octets(),
                    dst: dst.octets(),
                };
                ipv6::write_header(writer.next(), &fields);
                Some(checksum::pseudo_v6(
                    src.octets(),
                    dst.octets(),
                    protocol::UDP,
                    0,
                ))
            }
            _ => return None,
        };
        let ports: &mut [u8; udp::HEADER_LEN] = writer.next();
        let src_port = FIRST_SOURCE_PORT | (hash >> 32) as u16;
        ports[..2].copy_from_slice(&src_port.to_be_bytes());
        ports[2..4].copy_from_slice(&ends.port.to_be_bytes());
        vxlan::write_header(writer.next(), identity.number());
        ethernet::write_header(writer.next(), ends.inner, ether_type);
        Some(Self {
            header: writer.header,
            len: writer.len as u8,
            pseudo,
        })
    }

    /// Bytes that the tunnel adds to an IP packet, seen by the outer IP layer.
    #[must_use]
    pub fn overhead(&self) -> u32 {
        u32::from(self.len) - ethernet::HEADER_LEN as u32
    }

    /// Puts the header in front of a packet, in place of its Ethernet header. The packet's own
    /// checksums are complete; `inner` are its headers.
    pub fn push(
        &self,
        packet: &mut Packet,
        umem: &Umem,
        inner: &Headers,
    ) -> Result<(), DropReason> {
        let len = usize::from(self.len);
        if !packet.push_front(len - ethernet::HEADER_LEN) {
            return Err(DropReason::NoHeadroom);
        }
        let outer_len = packet.len() - ethernet::HEADER_LEN;
        let outer_len = u16::try_from(outer_len).map_err(|_| DropReason::TooBig)?;
        let ecn = inner.dscp_ecn & ipv4::ECN_MASK;
        let head = packet.head_mut(umem);
        head[..len].copy_from_slice(&self.header[..len]);
        match self.pseudo {
            None => {
                let mut outer = ipv4::Ipv4Mut::new(&mut head[ethernet::HEADER_LEN..])?;
                outer.set_total_len(outer_len);
                outer.set_ecn(ecn);
                let udp = &mut head[ethernet::HEADER_LEN + ipv4::HEADER_LEN..];
                let udp_len = outer_len - ipv4::HEADER_LEN as u16;
                udp::UdpMut::new(udp)?.set_length(udp_len);
            }
            Some(pseudo) => {
                let udp_len = outer_len - ipv6::HEADER_LEN as u16;
                let mut outer = ipv6::Ipv6Mut::new(&mut head[ethernet::HEADER_LEN..])?;
                outer.set_payload_len(udp_len);
                outer.set_ecn(ecn);
                let start = ethernet::HEADER_LEN + ipv6::HEADER_LEN;
                udp::UdpMut::new(&mut head[start..])?.set_length(udp_len);
                let sum = packet
                    .slices_from(umem, start)
                    .fold(pseudo.with_u16(udp_len), checksum::Sum::with)
                    .checksum();
                let udp = &mut packet.head_mut(umem)[start..];
                udp::UdpMut::new(udp)?.set_checksum(checksum::udp_nonzero(sum));
            }
        }
        Ok(())
    }
}

/// Takes the outer headers off: cuts the packet down to the inner frame, which starts at
/// `inner_offset`.
pub fn pull(packet: &mut Packet, inner_offset: usize) -> Result<(), DropReason> {
    if packet.pull_front(inner_offset) {
        Ok(())
    } else {
        Err(DropReason::TruncatedVxlan)
    }
}

/// Passes the outer header's congestion mark on to the inner one (RFC 6040 section 4.2).
pub fn combine_ecn(
    outer_ecn: u8,
    packet: &mut Packet,
    umem: &Umem,
    inner: &Headers,
) -> Result<(), DropReason> {
    const NOT_ECT: u8 = 0;
    const ECT_1: u8 = 1;
    const ECT_0: u8 = 2;
    let merged = match (inner.dscp_ecn & ipv4::ECN_MASK, outer_ecn & ipv4::ECN_MASK) {
        (NOT_ECT, ipv4::ECN_CE) => return Err(DropReason::EcnUnsupported),
        (ECT_0 | ECT_1, ipv4::ECN_CE) => ipv4::ECN_CE,
        (ECT_0, ECT_1) => ECT_1,
        _ => return Ok(()),
    };
    let ip = &mut packet.head_mut(umem)[usize::from(inner.l3_offset)..];
    if inner.is_v4() {
        ipv4::Ipv4Mut::new(ip)?.set_ecn(merged);
    } else {
        ipv6::Ipv6Mut::new(ip)?.set_ecn(merged);
    }
    Ok(())
}

struct Writer {
    header: [u8; MAX_HEADER],
    len: usize,
}

impl Writer {
    /// The next `N` bytes of the header.
    fn next<const N: usize>(&mut self) -> &mut [u8; N] {
        let start = self.len;
        self.len += N;
        self.header[start..]
            .first_chunk_mut()
            .expect("MAX_HEADER holds the longest header")
    }
}
