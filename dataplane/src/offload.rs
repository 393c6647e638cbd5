//! Checksums that a sender's kernel left unfinished (`CHECKSUM_PARTIAL`).
//!
//! A pod's kernel counts on its veth to complete TCP and UDP checksums, so a frame from a veth
//! may carry only the pseudo-header's sum in the field. Sent on as it is, the receiver drops
//! it. A link that can announces it as partial to the next kernel, which then never computes
//! it at all; before any other link, and before an encapsulation, it is completed here.
//!
//! The field alone tells: it equals the folded pseudo-header sum. A finished checksum does so
//! once in 65536 times, and completing it again gives the same value, so nothing is lost.
//!
//! Deliberately absent: checksums inside tunnels, which come first ([`crate::nested`]), and
//! SCTP. Its CRC32c covers neither IP header nor frame, so it is right at the end if it was at
//! the start; that a pod's kernel computes it and does not count on the device is seen to when
//! the veth is made (`tx-checksum-sctp` off), since a missing one looks like any other.

use crate::io::packet::{Packet, PartialChecksum};
use crate::io::umem::Umem;
use crate::parse::{Fragment, Headers};
use crate::verdict::DropReason;
use crate::wire::{checksum, ipv4, ipv6, protocol, tcp, udp};

/// The packet's unfinished checksum, if it has one.
#[must_use]
pub fn unfinished(packet: &Packet, umem: &Umem, headers: &Headers) -> Option<PartialChecksum> {
    // A fragment's checksum spans the other fragments too: the kernel completes it before it
    // cuts the packet.
    if headers.fragment != Fragment::None {
        return None;
    }
    let offset = match headers.protocol {
        protocol::TCP => tcp::CHECKSUM_OFFSET,
        protocol::UDP => udp::CHECKSUM_OFFSET,
        _ => return None,
    };
    let start = usize::from(headers.l4_offset);
    let head = packet.head(umem);
    let field = head
        .get(start + offset..)?
        .first_chunk()
        .copied()
        .map(u16::from_be_bytes)?;
    let len = headers.l4_len() as u32;
    let pseudo = if headers.is_v4() {
        let ip = ipv4::Ipv4::new(&head[usize::from(headers.l3_offset)..]).ok()?;
        checksum::pseudo_v4(
            ip.src(),
            ip.dst(),
            headers.protocol,
            u16::try_from(len).ok()?,
        )
    } else {
        let ip = ipv6::Ipv6::new(&head[usize::from(headers.l3_offset)..]).ok()?;
        checksum::pseudo_v6(ip.src(), ip.dst(), headers.protocol, len)
    };
    checksum::is_partial(pseudo, field).then_some(PartialChecksum {
        start: headers.l4_offset,
        offset: offset as u16,
    })
}

/// Completes the packet's partial checksum, if it has one.
pub fn finish(packet: &mut Packet, umem: &Umem) -> Result<(), DropReason> {
    let Some(field) = packet.partial_checksum.take() else {
        return Ok(());
    };
    complete(packet, umem, field, packet.len())
}

/// Completes the checksum of the bytes from `field.start` to `end`.
pub fn complete(
    packet: &mut Packet,
    umem: &Umem,
    PartialChecksum { start, offset }: PartialChecksum,
    end: usize,
) -> Result<(), DropReason> {
    let mut left = end.saturating_sub(start.into());
    let covered = packet.slices_from(umem, start.into()).map(|slice| {
        let slice = &slice[..slice.len().min(left)];
        left -= slice.len();
        slice
    });
    let sum = checksum::complete(covered);
    // A computed zero reads as "no checksum" in UDP; all ones is as good elsewhere.
    let sum = checksum::udp_nonzero(sum);
    let field = packet
        .head_mut(umem)
        .get_mut(usize::from(start) + usize::from(offset)..)
        .and_then(|rest| rest.first_chunk_mut())
        .ok_or(DropReason::BadChecksumField)?;
    *field = sum.to_be_bytes();
    Ok(())
}
