//! The TCP segment that refuses a connection (RFC 9293 section 3.5.2): what a client is told at
//! once when a Service has nobody to serve it, in place of a time-out.
//!
//! Stands beside [`crate::icmp_error`], and is built the same way: in the refused segment's own
//! frame. It comes from the address that the client asked for.

use crate::parse::{EthernetHeader, Fragment, Headers};
use crate::wire::tcp::{Tcp, TcpFlags};
use crate::wire::{checksum, ethernet, ipv4, ipv6, protocol, tcp};

/// The longest frame that [`build`] writes.
pub const FRAME_MAX_LEN: usize = ethernet::HEADER_LEN + ipv6::HEADER_LEN + tcp::HEADER_LEN;

const TTL: u8 = 64;

/// Whether a packet is one that is refused by a reset: a reset itself never is.
#[must_use]
pub fn answers(headers: &Headers) -> bool {
    headers.protocol == protocol::TCP
        && headers.fragment == Fragment::None
        && !headers.tcp_flags.contains(TcpFlags::RST)
}

/// Writes the frame that refuses the segment of the frame `refused`, with these headers, to
/// `out`; returns its length.
#[must_use]
pub fn build(
    out: &mut [u8; FRAME_MAX_LEN],
    l2: EthernetHeader,
    headers: &Headers,
    refused: &[u8],
) -> Option<usize> {
    let segment = Tcp::new(refused.get(usize::from(headers.l4_offset)..)?).ok()?;
    let (frame, rest) = out.split_first_chunk_mut()?;
    ethernet::write_header(frame, l2, headers.ether_type);
    const LEN: usize = tcp::HEADER_LEN;
    let (pseudo, ip_len) = if headers.is_v4() {
        let refused = ipv4::Ipv4::new(refused.get(usize::from(headers.l3_offset)..)?).ok()?;
        let fields = ipv4::Ipv4Fields {
            tos: 0,
            total_len: (ipv4::HEADER_LEN + LEN) as u16,
            id: 0,
            dont_fragment: true,
            ttl: TTL,
            protocol: protocol::TCP,
            src: refused.dst(),
            dst: refused.src(),
        };
        ipv4::write_header(rest.first_chunk_mut()?, &fields);
        let sum = checksum::pseudo_v4(fields.src, fields.dst, protocol::TCP, LEN as u16);
        (sum, ipv4::HEADER_LEN)
    } else {
        let fields = ipv6::Ipv6Fields {
            traffic_class: 0,
            flow_label: 0,
            payload_len: LEN as u16,
            next_header: protocol::TCP,
            hop_limit: TTL,
            src: headers.dst_bytes,
            dst: headers.src_bytes,
        };
        ipv6::write_header(rest.first_chunk_mut()?, &fields);
        let sum = checksum::pseudo_v6(fields.src, fields.dst, protocol::TCP, LEN as u32);
        (sum, ipv6::HEADER_LEN)
    };
    let reset: &mut [u8; LEN] = rest.get_mut(ip_len..)?.first_chunk_mut()?;
    let (sequence, acknowledgement, flags) = answer_to(segment, headers);
    *reset = [0; LEN];
    reset[..2].copy_from_slice(&segment.dst_port().to_be_bytes());
    reset[2..4].copy_from_slice(&segment.src_port().to_be_bytes());
    reset[tcp::SEQUENCE_OFFSET..][..4].copy_from_slice(&sequence.to_be_bytes());
    reset[tcp::ACK_OFFSET..][..4].copy_from_slice(&acknowledgement.to_be_bytes());
    reset[tcp::DATA_OFFSET_OFFSET] = (LEN as u8 / 4) << 4;
    reset[tcp::FLAGS_OFFSET] = flags.0;
    let sum = pseudo.with(reset).checksum();
    reset[tcp::CHECKSUM_OFFSET..][..2].copy_from_slice(&sum.to_be_bytes());
    Some(ethernet::HEADER_LEN + ip_len + LEN)
}

/// Sequence, acknowledgement and flags: a segment that acknowledges something says itself where
/// the reset is expected; any other is acknowledged whole.
fn answer_to(segment: Tcp<'_>, headers: &Headers) -> (u32, u32, TcpFlags) {
    let flags = segment.flags();
    if flags.contains(TcpFlags::ACK) {
        return (segment.acknowledgement(), 0, TcpFlags::RST);
    }
    let data = headers.l4_len().saturating_sub(segment.header_len()) as u32;
    let counted =
        u32::from(flags.contains(TcpFlags::SYN)) + u32::from(flags.contains(TcpFlags::FIN));
    let next = segment.sequence().wrapping_add(data).wrapping_add(counted);
    (0, next, TcpFlags::RST.union(TcpFlags::ACK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::parse;
    use crate::wire::ethernet::MacAddr;

    const L2: EthernetHeader = EthernetHeader {
        dst: MacAddr([2, 0, 0, 0, 0, 1]),
        src: MacAddr([2, 0, 0, 0, 0, 2]),
    };

    fn refused(v6: bool, flags: impl Fn(&mut etherparse::TcpHeader), data: &[u8]) -> Vec<u8> {
        let mut header = etherparse::TcpHeader::new(40000, 80, 1000, 500);
        flags(&mut header);
        let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
        let builder = if v6 {
            builder.ipv6([1; 16], [2; 16], 9)
        } else {
            builder.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9)
        };
        let mut bytes = Vec::new();
        let builder = builder.tcp_header(header);
        builder.write(&mut bytes, data).unwrap();
        bytes
    }

    fn check(
        v6: bool,
        flags: impl Fn(&mut etherparse::TcpHeader),
        data: &[u8],
    ) -> (u32, u32, bool) {
        let frame = refused(v6, flags, data);
        let headers = parse(&frame, frame.len()).unwrap();
        let mut out = [0; FRAME_MAX_LEN];
        let len = build(&mut out, L2, &headers, &frame).unwrap();
        let answer = parse(&out[..len], len).unwrap();
        assert_eq!((answer.src(), answer.dst()), (headers.dst(), headers.src()));
        assert_eq!((answer.src_port, answer.dst_port), (80, 40000));
        assert!(answer.tcp_flags.contains(TcpFlags::RST));
        assert!(!answers(&answer), "a reset is not answered");
        let l4 = usize::from(answer.l4_offset);
        let pseudo = if v6 {
            checksum::pseudo_v6(answer.src_bytes, answer.dst_bytes, protocol::TCP, 20)
        } else {
            checksum::pseudo_v4([10, 0, 0, 2], [10, 0, 0, 1], protocol::TCP, 20)
        };
        assert!(checksum::verify(pseudo, [&out[l4..len]]));
        let tcp = Tcp::new(&out[l4..len]).unwrap();
        (
            tcp.sequence(),
            tcp.acknowledgement(),
            tcp.flags().contains(TcpFlags::ACK),
        )
    }

    #[test]
    fn a_request_to_connect_is_acknowledged_by_the_refusal() {
        for v6 in [false, true] {
            assert_eq!(check(v6, |tcp| tcp.syn = true, b""), (0, 1001, true));
            assert_eq!(check(v6, |tcp| tcp.fin = true, b"1234"), (0, 1005, true));
        }
    }

    #[test]
    fn a_segment_with_an_acknowledgement_is_refused_where_it_expects_that() {
        let ack = |tcp: &mut etherparse::TcpHeader| {
            tcp.ack = true;
            tcp.acknowledgment_number = 77;
        };
        assert_eq!(check(false, ack, b"data"), (77, 0, false));
    }
}
