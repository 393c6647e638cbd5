//! ICMPv6 (RFC 4443), and the errors that the datapath sends as an IPv6 router.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |     Type      |     Code      |           Checksum            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! | packet too big: MTU.  Other errors: unused                    |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  errors: as much of the packet that they are about as fits in |
//! |  1280 bytes                                                   |
//! ```
//!
//! Type below 128: an error. The checksum covers a pseudo-header. The read view is
//! [`Icmp`](super::icmp::Icmp); neighbour discovery is in [`ndp`](super::ndp).

use super::ethernet::{self, ETHER_TYPE_IPV6, EthernetHeader};
use super::icmp::{CHECKSUM_OFFSET, HEADER_LEN};
use super::ipv6::{self, Ipv6, Ipv6Fields};
use super::{checksum, protocol, put_u16};

/// Type: destination unreachable.
pub const UNREACHABLE: u8 = 1;
/// Type: packet too big.
pub const PACKET_TOO_BIG: u8 = 2;
/// Type: time exceeded.
pub const TIME_EXCEEDED: u8 = 3;
/// Type: echo request.
pub const ECHO_REQUEST: u8 = 128;
/// Type: echo reply.
pub const ECHO_REPLY: u8 = 129;
/// Type: neighbour solicitation.
pub const NEIGHBOR_SOLICITATION: u8 = 135;
/// Type: neighbour advertisement.
pub const NEIGHBOR_ADVERTISEMENT: u8 = 136;
/// Type: redirect.
pub const REDIRECT: u8 = 137;

/// Code of [`UNREACHABLE`]: no route.
pub const CODE_NO_ROUTE: u8 = 0;
/// Code of [`UNREACHABLE`]: a policy forbids it.
pub const CODE_PROHIBITED: u8 = 1;
/// Code of [`UNREACHABLE`]: the host does not answer.
pub const CODE_ADDRESS_UNREACHABLE: u8 = 3;
/// Code of [`UNREACHABLE`]: nobody listens.
pub const CODE_PORT_UNREACHABLE: u8 = 4;

/// Longest error packet, IPv6 header included (RFC 4443 section 3): the least MTU.
pub const ERROR_MAX_LEN: usize = ipv6::MIN_MTU;
/// Longest frame that [`build_error`] writes.
pub const ERROR_FRAME_MAX_LEN: usize = ethernet::HEADER_LEN + ERROR_MAX_LEN;

const ERROR_HOP_LIMIT: u8 = 64;

/// Whether a type is echo request or reply.
#[must_use]
pub const fn is_echo(kind: u8) -> bool {
    matches!(kind, ECHO_REQUEST | ECHO_REPLY)
}

/// Whether a type reports an error and quotes the packet that it is about.
#[must_use]
pub const fn is_error(kind: u8) -> bool {
    kind < 128
}

/// Whether an error may be sent about a message of this type: not about errors or redirects
/// (RFC 4443 section 2.4(e)).
#[must_use]
pub const fn is_query(kind: u8) -> bool {
    !is_error(kind) && kind != REDIRECT
}

/// The errors that the datapath sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Icmpv6Error {
    /// Destination unreachable.
    Unreachable {
        /// One of this module's codes.
        code: u8,
    },
    /// Larger than the next link's MTU.
    PacketTooBig {
        /// The MTU, of the IPv6 packet in bytes.
        mtu: u32,
    },
    /// The hop limit ran out on the way.
    TimeExceeded,
}

impl Icmpv6Error {
    const fn header(self) -> [u8; HEADER_LEN] {
        match self {
            Self::Unreachable { code } => [UNREACHABLE, code, 0, 0, 0, 0, 0, 0],
            Self::PacketTooBig { mtu } => {
                let [a, b, c, d] = mtu.to_be_bytes();
                [PACKET_TOO_BIG, 0, 0, 0, a, b, c, d]
            }
            Self::TimeExceeded => [TIME_EXCEEDED, 0, 0, 0, 0, 0, 0, 0],
        }
    }
}

/// Writes the whole frame that tells the sender of `offending` about `error`, from the
/// router's address `src`. `offending` is the head of its IPv6 packet as it was received; as
/// much of it is quoted as fits in [`ERROR_MAX_LEN`], without Ethernet padding. Returns the
/// frame's length, at most [`ERROR_FRAME_MAX_LEN`], or `None` if `out` is too short or
/// `offending` no IPv6 packet.
#[must_use]
pub fn build_error(
    out: &mut [u8],
    l2: EthernetHeader,
    src: [u8; 16],
    error: Icmpv6Error,
    offending: &[u8],
) -> Option<usize> {
    const QUOTE_MAX_LEN: usize = ERROR_MAX_LEN - ipv6::HEADER_LEN - HEADER_LEN;
    let about = Ipv6::new(offending).ok()?;
    let quote_len = (ipv6::HEADER_LEN + usize::from(about.payload_len()))
        .min(offending.len())
        .min(QUOTE_MAX_LEN);
    let quote = &offending[..quote_len];

    let len = HEADER_LEN + quote_len;
    let body = write_headers(out, l2, src, about.src(), ERROR_HOP_LIMIT, len)?;
    let (header, rest) = body.split_first_chunk_mut::<HEADER_LEN>()?;
    *header = error.header();
    rest.copy_from_slice(quote);
    write_checksum(body, src, about.src());
    Some(ethernet::HEADER_LEN + ipv6::HEADER_LEN + len)
}

/// Writes Ethernet and IPv6 headers for an ICMPv6 message of `len` bytes and returns those.
pub(super) fn write_headers(
    out: &mut [u8],
    l2: EthernetHeader,
    src: [u8; 16],
    dst: [u8; 16],
    hop_limit: u8,
    len: usize,
) -> Option<&mut [u8]> {
    let (ethernet, rest) = out.split_first_chunk_mut()?;
    let (ip, rest) = rest.split_first_chunk_mut()?;
    let message = rest.get_mut(..len)?;
    ethernet::write_header(ethernet, l2, ETHER_TYPE_IPV6);
    ipv6::write_header(
        ip,
        &Ipv6Fields {
            traffic_class: 0,
            flow_label: 0,
            payload_len: u16::try_from(len).ok()?,
            next_header: protocol::ICMPV6,
            hop_limit,
            src,
            dst,
        },
    );
    Some(message)
}

/// Computes the checksum of a whole message and writes it; shorter than a header, nothing.
pub(super) fn write_checksum(message: &mut [u8], src: [u8; 16], dst: [u8; 16]) {
    let len = message.len() as u32;
    let Some(header) = message.first_chunk_mut::<HEADER_LEN>() else {
        return;
    };
    put_u16(header, CHECKSUM_OFFSET, 0);
    let pseudo = checksum::pseudo_v6(src, dst, protocol::ICMPV6, len);
    let sum = pseudo.with(message).checksum();
    if let Some(header) = message.first_chunk_mut::<HEADER_LEN>() {
        put_u16(header, CHECKSUM_OFFSET, sum);
    }
}

#[cfg(test)]
mod tests {
    use etherparse::Icmpv6Type;
    use proptest::prelude::*;

    use super::*;
    use crate::parse;
    use crate::wire::MacAddr;

    const L2: EthernetHeader = EthernetHeader {
        dst: MacAddr([2, 0, 0, 0, 0, 1]),
        src: MacAddr([2, 0, 0, 0, 0, 2]),
    };
    const GATEWAY: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    #[test]
    fn golden_packet_too_big() {
        let mut offending = [0; 50];
        let (mut src, mut dst) = ([0; 16], [0; 16]);
        (src[0], src[15], dst[0], dst[15]) = (0xfd, 1, 0xfd, 2);
        let fields = Ipv6Fields {
            traffic_class: 0,
            flow_label: 0,
            payload_len: 8,
            next_header: protocol::UDP,
            hop_limit: 64,
            src,
            dst,
        };
        ipv6::write_header(offending.first_chunk_mut().unwrap(), &fields);
        let mut out = [0; ERROR_FRAME_MAX_LEN];
        let error = Icmpv6Error::PacketTooBig { mtu: 1430 };
        let len = build_error(&mut out, L2, GATEWAY, error, &offending).unwrap();
        assert_eq!(len, 14 + 40 + 8 + 48);
        assert_eq!(out[12..22], [0x86, 0xdd, 0x60, 0, 0, 0, 0, 56, 58, 64]);
        assert_eq!(out[54..56], [2, 0]);
        assert_eq!(out[58..62], [0, 0, 0x05, 0x96]);
        assert_eq!(out[62..len], offending[..48]);
    }

    #[test]
    fn redirects_are_no_queries() {
        assert!(is_query(ECHO_REQUEST) && is_query(NEIGHBOR_ADVERTISEMENT));
        assert!(!is_query(REDIRECT) && !is_error(REDIRECT));
        assert!(!is_query(PACKET_TOO_BIG) && is_error(PACKET_TOO_BIG));
    }

    proptest! {
        #[test]
        fn errors_parse_back_with_right_checksums(
            payload in prop::collection::vec(any::<u8>(), 0..1500),
            src_low: u8,
            padding in 0_usize..46,
            head in 40_usize..2000,
            which in 0_u8..3,
            mtu: u32,
            room in 0_usize..1400,
        ) {
            let (mut src, dst) = ([0xfd; 16], [0xfc; 16]);
            src[15] = src_low;
            let header = etherparse::Ipv6Header {
                payload_length: payload.len() as u16,
                next_header: 17.into(),
                hop_limit: 1,
                source: src,
                destination: dst,
                ..Default::default()
            };
            let mut offending = header.to_bytes().to_vec();
            offending.extend(&payload);
            let whole = offending.len();
            offending.resize(whole + padding, 0);
            offending.truncate(head);

            let error = match which {
                0 => Icmpv6Error::Unreachable { code: CODE_PROHIBITED },
                1 => Icmpv6Error::PacketTooBig { mtu },
                _ => Icmpv6Error::TimeExceeded,
            };
            let quoted = whole.min(offending.len()).min(ERROR_MAX_LEN - 48);
            let mut out = vec![0xee; room];
            let built = build_error(&mut out, L2, GATEWAY, error, &offending);
            if room < 62 + quoted {
                prop_assert_eq!(built, None);
                return Ok(());
            }
            let len = built.unwrap();
            prop_assert_eq!(len, 62 + quoted);
            prop_assert!(len <= ERROR_FRAME_MAX_LEN);
            prop_assert!(out[len..].iter().all(|&byte| byte == 0xee));

            let headers = parse::parse(&out[..len], len).unwrap();
            prop_assert!(headers.is_v6() && headers.is_icmp_error());
            prop_assert_eq!((headers.src_bytes, headers.dst_bytes), (GATEWAY, src));
            prop_assert_eq!(&out[62..len], &offending[..quoted]);
            let (theirs, body) = etherparse::Icmpv6Header::from_slice(&out[54..len]).unwrap();
            let expected = theirs.icmp_type.calc_checksum(GATEWAY, src, body).unwrap();
            prop_assert_eq!(theirs.checksum, expected);
            use etherparse::icmpv6::{DestUnreachableCode, TimeExceededCode};
            let expected = match error {
                Icmpv6Error::Unreachable { .. } =>
                    Icmpv6Type::DestinationUnreachable(DestUnreachableCode::Prohibited),
                Icmpv6Error::PacketTooBig { mtu } => Icmpv6Type::PacketTooBig { mtu },
                Icmpv6Error::TimeExceeded =>
                    Icmpv6Type::TimeExceeded(TimeExceededCode::HopLimitExceeded),
            };
            prop_assert_eq!(theirs.icmp_type, expected);
        }
    }
}
