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
