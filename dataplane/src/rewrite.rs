//! Changes a packet's own headers as its flow's action says: the hop's TTL and the frame's MACs.

use crate::io::packet::Packet;
use crate::io::umem::Umem;
use crate::parse::{EthernetHeader, Headers};
use crate::verdict::DropReason;
use crate::wire::{ethernet, ipv4, ipv6};

/// Takes one from the TTL or hop limit.
pub fn decrement_ttl(
    packet: &mut Packet,
    umem: &Umem,
    headers: &Headers,
) -> Result<(), DropReason> {
    let ip = &mut packet.head_mut(umem)[usize::from(headers.l3_offset)..];
    let left = if headers.is_v4() {
        ipv4::Ipv4Mut::new(ip)?.decrement_ttl()
    } else {
        ipv6::Ipv6Mut::new(ip)?.decrement_hop_limit()
    };
    left.map(|_| ()).ok_or(DropReason::TtlExceeded)
}

/// Addresses the frame to its next receiver.
pub fn set_addresses(
    packet: &mut Packet,
    umem: &Umem,
    addresses: EthernetHeader,
) -> Result<(), DropReason> {
    ethernet::EthernetMut::new(packet.head_mut(umem))?.set_addresses(addresses);
    Ok(())
}
