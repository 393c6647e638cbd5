//! Gives a packet the addresses and ports that its connection has on the other side of a
//! translation: a Service's for a backend's, the node's for a pod's, and back.
//!
//! Stands after [`crate::rewrite`] has counted the hop and before the packet is cut or tunnelled.
//! Checksums are updated, not computed anew (RFC 1624), so one that was wrong stays wrong; an
//! unfinished one (`CHECKSUM_PARTIAL`) holds the pseudo-header's sum alone, which ports are not
//! part of. SCTP's CRC32c is computed anew, over the whole packet, and only when a port changes:
//! it does not cover addresses (RFC 9260 section 6.8).
//!
//! Deliberately absent: application protocols that carry addresses in their payload.

use crate::conntrack::Tuple;
use crate::io::packet::{Packet, PartialChecksum};
use crate::io::umem::Umem;
use crate::parse::{Fragment, Headers};
use crate::verdict::DropReason;
use crate::wire::{checksum, icmp, ipv4, ipv6, protocol, sctp, tcp, udp};

/// What a packet is to be: the tuple that it has once it is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    to: Tuple,
}

impl Translation {
    /// What makes a packet of the tuple `from` one of `to`; `None` where they are the same.
    #[must_use]
    pub fn between(from: &Tuple, to: &Tuple) -> Option<Self> {
        (from != to).then_some(Self { to: *to })
    }

    /// The tuple that a packet has afterwards.
    #[must_use]
    pub fn result(&self) -> &Tuple {
        &self.to
    }

    /// Translates a packet whose headers, as it came, are these.
    pub fn apply(
        &self,
        packet: &mut Packet,
        umem: &Umem,
        headers: &Headers,
    ) -> Result<(), DropReason> {
        let l3 = usize::from(headers.l3_offset);
        set_addresses(&mut packet.head_mut(umem)[l3..], headers.is_v4(), &self.to)?;
        if matches!(headers.fragment, Fragment::Later { .. }) {
            return Ok(());
        }
        let l4 = usize::from(headers.l4_offset);
        match headers.protocol {
            protocol::TCP => self.tcp_or_udp(packet, umem, headers, tcp::CHECKSUM_OFFSET),
            protocol::UDP => self.tcp_or_udp(packet, umem, headers, udp::CHECKSUM_OFFSET),
            protocol::SCTP => self.sctp(packet, umem, headers),
            protocol::ICMP | protocol::ICMPV6 if headers.icmp.is_some() => {
                self.icmp(&mut packet.head_mut(umem)[l4..], headers)
            }
            // Nothing behind the addresses is known to depend on them.
            _ => Ok(()),
        }
    }

    fn tcp_or_udp(
        &self,
        packet: &mut Packet,
        umem: &Umem,
        headers: &Headers,
        field: usize,
    ) -> Result<(), DropReason> {
        let partial = packet.partial_checksum
            == Some(PartialChecksum {
                start: headers.l4_offset,
                offset: field as u16,
            });
        let l4 = &mut packet.head_mut(umem)[usize::from(headers.l4_offset)..];
        let (before, now) = (self.addresses_before(headers), self.addresses());
        let old_ports = *l4.first_chunk::<4>().ok_or(DropReason::TruncatedL4)?;
        let ports = self.ports();
        l4[..4].copy_from_slice(&ports);
        let sum: &mut [u8; 2] = l4
            .get_mut(field..)
            .and_then(|rest| rest.first_chunk_mut())
            .ok_or(DropReason::TruncatedL4)?;
        let old = u16::from_be_bytes(*sum);
        let new = if partial {
            checksum::update_partial_bytes(old, &before, &now)
        } else if headers.protocol == protocol::UDP && old == 0 {
            // None was sent (RFC 768), and none is missed.
            0
        } else {
            let addressed = checksum::update_bytes(old, &before, &now);
            let new = checksum::update_bytes(addressed, &old_ports, &ports);
            if headers.protocol == protocol::UDP {
                checksum::udp_nonzero(new)
            } else {
                new
            }
        };
        *sum = new.to_be_bytes();
        Ok(())
    }

    fn sctp(&self, packet: &mut Packet, umem: &Umem, headers: &Headers) -> Result<(), DropReason> {
        let l4 = usize::from(headers.l4_offset);
        if (headers.src_port, headers.dst_port) == (self.to.src_port, self.to.dst_port) {
            return Ok(());
        }
        if headers.fragment != Fragment::None {
            // The CRC spans fragments that are not here.
            return Err(DropReason::SctpFragment);
        }
        sctp::SctpMut::new(&mut packet.head_mut(umem)[l4..])?
            .set_ports(self.to.src_port, self.to.dst_port);
        let crc = sctp::checksum(packet.slices_from(umem, l4));
        sctp::SctpMut::new(&mut packet.head_mut(umem)[l4..])?.set_checksum(crc);
        Ok(())
    }

    fn icmp(&self, message: &mut [u8], headers: &Headers) -> Result<(), DropReason> {
        let header: &mut [u8; icmp::HEADER_LEN] =
            message.first_chunk_mut().ok_or(DropReason::TruncatedL4)?;
        let mut sum = u16::from_be_bytes([
            header[icmp::CHECKSUM_OFFSET],
            header[icmp::CHECKSUM_OFFSET + 1],
        ]);
        if headers.is_v6() {
            sum = checksum::update_bytes(sum, &self.addresses_before(headers), &self.addresses());
        }
        if is_echo(headers) {
            // One of the two is the identifier and the other is zero.
            let identifier = self.to.src_port | self.to.dst_port;
            let field = icmp::IDENTIFIER_OFFSET..icmp::IDENTIFIER_OFFSET + 2;
            let old = u16::from_be_bytes([header[field.start], header[field.start + 1]]);
            sum = checksum::update(sum, old, identifier);
            header[field].copy_from_slice(&identifier.to_be_bytes());
        }
        header[icmp::CHECKSUM_OFFSET..icmp::CHECKSUM_OFFSET + 2]
            .copy_from_slice(&sum.to_be_bytes());
        Ok(())
    }

    /// Source and destination as a checksum sees them. IPv4-mapped addresses do as well as bare
    /// ones, since what stands before the address is the same before and after.
    fn addresses(&self) -> [u8; 32] {
        joined(self.to.src, self.to.dst)
    }

    fn addresses_before(&self, headers: &Headers) -> [u8; 32] {
        joined(headers.src_bytes, headers.dst_bytes)
    }

    fn ports(&self) -> [u8; 4] {
        let [a, b] = self.to.src_port.to_be_bytes();
        let [c, d] = self.to.dst_port.to_be_bytes();
        [a, b, c, d]
    }
}

/// Sets both addresses of the IP header at the start of `ip`.
pub(crate) fn set_addresses(ip: &mut [u8], is_v4: bool, to: &Tuple) -> Result<(), DropReason> {
    if is_v4 {
        let mut header = ipv4::Ipv4Mut::new(ip)?;
        header.set_src(v4_of(to.src));
        header.set_dst(v4_of(to.dst));
    } else {
        let mut header = ipv6::Ipv6Mut::new(ip)?;
        header.set_src(to.src);
        header.set_dst(to.dst);
    }
    Ok(())
}

fn v4_of([.., a, b, c, d]: [u8; 16]) -> [u8; 4] {
    [a, b, c, d]
}

fn joined(src: [u8; 16], dst: [u8; 16]) -> [u8; 32] {
    let mut both = [0; 32];
    both[..16].copy_from_slice(&src);
    both[16..].copy_from_slice(&dst);
    both
}

fn is_echo(headers: &Headers) -> bool {
    match headers.icmp {
        Some((kind, _)) if headers.is_v4() => icmp::is_echo(kind),
        Some((kind, _)) => crate::wire::icmpv6::is_echo(kind),
        None => false,
    }
}
