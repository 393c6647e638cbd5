//! ICMP (RFC 792), and the errors that the datapath sends as an IPv4 router (RFC 1812).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |     Type      |     Code      |           Checksum            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! | echo: Identifier              | echo: Sequence Number         |
//! | fragmentation needed: unused  | next hop's MTU (RFC 1191)     |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  echo: data.  Errors: the packet that they are about ...
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-
//! ```
//!
//! [`Icmp`] also reads ICMPv6, whose first eight bytes look the same. Whether an error may be
//! sent at all is for the caller to ask of the parsed headers; rate limits are its own.

use super::ethernet::{self, ETHER_TYPE_IPV4, EthernetHeader};
use super::ipv4::{self, Ipv4, Ipv4Fields};
use super::{ParseError, checksum, protocol, put_u16, u16_at};

/// Bytes before data or quoted packet.
pub const HEADER_LEN: usize = 8;
/// Offset of the checksum.
pub const CHECKSUM_OFFSET: usize = 2;
/// Offset of an echo's identifier.
pub const IDENTIFIER_OFFSET: usize = 4;
/// Offset of an echo's sequence number.
pub const SEQUENCE_OFFSET: usize = 6;

/// Type: echo reply.
pub const ECHO_REPLY: u8 = 0;
/// Type: destination unreachable.
pub const UNREACHABLE: u8 = 3;
/// Type: echo request.
pub const ECHO_REQUEST: u8 = 8;
/// Type: time exceeded.
pub const TIME_EXCEEDED: u8 = 11;

/// Code of [`UNREACHABLE`]: no route to the host's network.
pub const CODE_NET_UNREACHABLE: u8 = 0;
/// Code of [`UNREACHABLE`]: the host does not answer.
pub const CODE_HOST_UNREACHABLE: u8 = 1;
/// Code of [`UNREACHABLE`]: nobody listens.
pub const CODE_PORT_UNREACHABLE: u8 = 3;
/// Code of [`UNREACHABLE`]: too big for the next link, and not to be fragmented.
pub const CODE_FRAGMENTATION_NEEDED: u8 = 4;
/// Code of [`UNREACHABLE`]: a policy forbids it.
pub const CODE_PROHIBITED: u8 = 13;

/// Longest error datagram, IP header included (RFC 1812 section 4.3.2.3).
pub const ERROR_MAX_LEN: usize = 576;
/// Longest frame that [`build_error`] writes.
pub const ERROR_FRAME_MAX_LEN: usize = ethernet::HEADER_LEN + ERROR_MAX_LEN;

/// Internetwork control precedence, for errors (RFC 1812 section 4.3.2.5).
const ERROR_TOS: u8 = 0xc0;
const ERROR_TTL: u8 = 64;

/// Whether a type is echo request or reply.
#[must_use]
pub const fn is_echo(kind: u8) -> bool {
    matches!(kind, ECHO_REPLY | ECHO_REQUEST)
}

/// Whether a type reports an error (or a redirect) and quotes the packet that it is about.
#[must_use]
pub const fn is_error(kind: u8) -> bool {
    matches!(kind, UNREACHABLE | 4 | 5 | TIME_EXCEEDED | 12)
}

/// Whether a type is a known query or its answer: about those alone an error may be sent
/// (RFC 1122 section 3.2.2).
#[must_use]
pub const fn is_query(kind: u8) -> bool {
    matches!(kind, ECHO_REPLY | ECHO_REQUEST | 9 | 10 | 13..=18 | 42 | 43)
}

/// Read view of the first eight bytes of an ICMP or ICMPv6 message.
#[derive(Debug, Clone, Copy)]
pub struct Icmp<'a>(&'a [u8; HEADER_LEN]);

impl<'a> Icmp<'a> {
    /// The message at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedL4`].
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        Ok(Self(bytes.first_chunk().ok_or(ParseError::TruncatedL4)?))
    }

    /// Type.
    #[must_use]
    pub const fn kind(self) -> u8 {
        self.0[0]
    }

    /// Code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0[1]
    }

    /// Checksum as it stands.
    #[must_use]
    pub const fn checksum(self) -> u16 {
        u16_at(self.0, CHECKSUM_OFFSET)
    }

    /// An echo's identifier.
    #[must_use]
    pub const fn identifier(self) -> u16 {
        u16_at(self.0, IDENTIFIER_OFFSET)
    }

    /// An echo's sequence number; the MTU of a "fragmentation needed".
    #[must_use]
    pub const fn sequence(self) -> u16 {
        u16_at(self.0, SEQUENCE_OFFSET)
    }
}

/// The errors that the datapath sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpError {
    /// Destination unreachable, for any reason but size.
    Unreachable {
        /// One of this module's codes.
        code: u8,
    },
    /// Larger than the next link's MTU, and not to be fragmented (RFC 1191).
    FragmentationNeeded {
        /// The MTU, of the IP packet in bytes.
        mtu: u16,
    },
    /// The time to live ran out on the way.
    TimeExceeded,
}

impl IcmpError {
    const fn header(self) -> [u8; HEADER_LEN] {
        match self {
            Self::Unreachable { code } => [UNREACHABLE, code, 0, 0, 0, 0, 0, 0],
            Self::FragmentationNeeded { mtu } => {
                let [high, low] = mtu.to_be_bytes();
                [
                    UNREACHABLE,
                    CODE_FRAGMENTATION_NEEDED,
                    0,
                    0,
                    0,
                    0,
                    high,
                    low,
                ]
            }
            Self::TimeExceeded => [TIME_EXCEEDED, 0, 0, 0, 0, 0, 0, 0],
        }
    }
}

/// Writes the whole frame that tells the sender of `offending` about `error`, from the
/// router's address `src`. `offending` is the head of its IPv4 packet as it was received; as
/// much of it is quoted as fits in [`ERROR_MAX_LEN`] (RFC 1812 section 4.3.2.3), without
/// Ethernet padding. Returns the frame's length, at most [`ERROR_FRAME_MAX_LEN`], or `None`
/// if `out` is too short or `offending` no IPv4 packet.
#[must_use]
pub fn build_error(
    out: &mut [u8],
    l2: EthernetHeader,
    src: [u8; 4],
    error: IcmpError,
    offending: &[u8],
) -> Option<usize> {
    const QUOTE_MAX_LEN: usize = ERROR_MAX_LEN - ipv4::HEADER_LEN - HEADER_LEN;
    let about = Ipv4::new(offending).ok()?;
    let quote_len = usize::from(about.total_len())
        .min(offending.len())
        .min(QUOTE_MAX_LEN);
    let quote = &offending[..quote_len];

    let (ethernet, rest) = out.split_first_chunk_mut()?;
    let (ip, rest) = rest.split_first_chunk_mut()?;
    let message = rest.get_mut(..HEADER_LEN + quote_len)?;
    ethernet::write_header(ethernet, l2, ETHER_TYPE_IPV4);
    ipv4::write_header(
        ip,
        &Ipv4Fields {
            tos: ERROR_TOS,
            total_len: (ipv4::HEADER_LEN + HEADER_LEN + quote_len) as u16,
            id: 0,
            dont_fragment: true,
            ttl: ERROR_TTL,
            protocol: protocol::ICMP,
            src,
            dst: about.src(),
        },
    );
    let (header, body) = message.split_first_chunk_mut::<HEADER_LEN>()?;
    *header = error.header();
    body.copy_from_slice(quote);
    let sum = checksum::Sum::new().with(header).with(body).checksum();
    put_u16(header, CHECKSUM_OFFSET, sum);
    Some(ethernet::HEADER_LEN + ipv4::HEADER_LEN + HEADER_LEN + quote_len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parse::{self, L3};
    use crate::wire::MacAddr;

    const L2: EthernetHeader = EthernetHeader {
        dst: MacAddr([2, 0, 0, 0, 0, 1]),
        src: MacAddr([2, 0, 0, 0, 0, 2]),
    };
    const GATEWAY: [u8; 4] = [169, 254, 1, 1];

    #[test]
    fn golden_echo() {
        let bytes = [8, 0, 0xca, 0xfe, 0x12, 0x34, 0x00, 0x01, 0xff];
        let view = Icmp::new(&bytes).unwrap();
        assert_eq!(
            (view.kind(), view.code(), view.checksum()),
            (ECHO_REQUEST, 0, 0xcafe)
        );
        assert_eq!((view.identifier(), view.sequence()), (0x1234, 1));
        assert_eq!(Icmp::new(&bytes[..7]).unwrap_err(), ParseError::TruncatedL4);
    }

    #[test]
    fn kinds_are_told_apart() {
        for kind in 0..=u8::MAX {
            assert!(!(is_error(kind) && is_query(kind)), "{kind}");
            assert!(!is_echo(kind) || is_query(kind), "{kind}");
        }
        assert!(!is_error(200) && !is_query(200));
    }

    #[test]
    fn golden_fragmentation_needed() {
        let mut offending = [0; 30];
        let fields = Ipv4Fields {
            tos: 0,
            total_len: 28,
            id: 7,
            dont_fragment: true,
            ttl: 64,
            protocol: protocol::UDP,
            src: [10, 0, 0, 1],
            dst: [10, 0, 0, 2],
        };
        ipv4::write_header(offending.first_chunk_mut().unwrap(), &fields);
        offending[20..28].copy_from_slice(&[0, 1, 0, 2, 0, 8, 0, 0]);
        let mut out = [0; ERROR_FRAME_MAX_LEN];
        let error = IcmpError::FragmentationNeeded { mtu: 1450 };
        let len = build_error(&mut out, L2, GATEWAY, error, &offending).unwrap();
        // Two bytes of padding are not quoted.
        assert_eq!(len, 14 + 20 + 8 + 28);
        assert_eq!(
            out[..34],
            [
                2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0xc0, 0, 56, 0, 0, 0x40, 0, 64, 1,
                0x85, 0x05, 169, 254, 1, 1, 10, 0, 0, 1,
            ]
        );
        assert_eq!(out[34..36], [3, 4]);
        assert_eq!(out[38..42], [0, 0, 0x05, 0xaa]);
        assert_eq!(out[42..len], offending[..28]);
    }

    proptest! {
        #[test]
        fn errors_parse_back_with_right_checksums(
            payload in prop::collection::vec(any::<u8>(), 0..1500),
            options in 0_usize..=10,
            padding in 0_usize..46,
            head in 20_usize..2000,
            which in 0_u8..3,
            mtu: u16,
            room in 0_usize..700,
        ) {
            let options = vec![1_u8; options * 4];
            let mut header = etherparse::Ipv4Header::new(
                payload.len() as u16, 64, 6.into(), [10, 0, 0, 1], [10, 0, 0, 2],
            ).unwrap();
            header.options = options.as_slice().try_into().unwrap();
            header.set_payload_len(payload.len()).unwrap();
            header.header_checksum = header.calc_header_checksum();
            let mut offending = header.to_bytes().to_vec();
            offending.extend(&payload);
            let whole = offending.len();
            offending.resize(whole + padding, 0);
            // The contiguous head, which holds at least the IP header.
            offending.truncate(head.max(header.header_len()));

            let error = match which {
                0 => IcmpError::Unreachable { code: CODE_PROHIBITED },
                1 => IcmpError::FragmentationNeeded { mtu },
                _ => IcmpError::TimeExceeded,
            };
            let quoted = whole.min(offending.len()).min(ERROR_MAX_LEN - 28);
            let mut out = vec![0xee; room];
            let built = build_error(&mut out, L2, GATEWAY, error, &offending);
            if room < 42 + quoted {
                prop_assert_eq!(built, None);
                return Ok(());
            }
            let len = built.unwrap();
            prop_assert_eq!(len, 42 + quoted);
            prop_assert!(len <= ERROR_FRAME_MAX_LEN);
            prop_assert!(out[len..].iter().all(|&byte| byte == 0xee));

            let headers = parse::parse(&out[..len], len).unwrap();
            prop_assert_eq!(headers.kind, L3::V4 { options: false });
            prop_assert!(headers.is_icmp_error());
            prop_assert!(!headers.permits_icmp_error());
            prop_assert_eq!(headers.dst().to_string(), "10.0.0.1");
            prop_assert_eq!(headers.l3_end(), len);
            prop_assert!(checksum::verify(checksum::Sum::new(), [&out[34..len]]));
            prop_assert_eq!(&out[42..len], &offending[..quoted]);
            let theirs = etherparse::Icmpv4Header::from_slice(&out[34..len]).unwrap().0;
            use etherparse::icmpv4::{DestUnreachableHeader as Dest, TimeExceededCode};
            use etherparse::Icmpv4Type;
            let expected = match error {
                IcmpError::Unreachable { .. } =>
                    Icmpv4Type::DestinationUnreachable(Dest::FilterProhibited),
                IcmpError::FragmentationNeeded { mtu } => Icmpv4Type::DestinationUnreachable(
                    Dest::FragmentationNeeded { next_hop_mtu: mtu }),
                IcmpError::TimeExceeded =>
                    Icmpv4Type::TimeExceeded(TimeExceededCode::TtlExceededInTransit),
            };
            prop_assert_eq!(theirs.icmp_type, expected);
        }

        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut out = [0; ERROR_FRAME_MAX_LEN];
            if Ipv4::new(&bytes).is_err() {
                let built = build_error(&mut out, L2, GATEWAY, IcmpError::TimeExceeded, &bytes);
                prop_assert_eq!(built, None);
            }
        }
    }
}
