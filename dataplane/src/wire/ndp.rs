//! Neighbour discovery (RFC 4861): solicitations read, advertisements written.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |   135 / 136   |       0       |           Checksum            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |R|S|O|                     Reserved                            |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                       Target Address (16 bytes)               |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  Option type  |   Length / 8  |  link-layer address (6) ...   |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//! R, S and O (router, solicited, override) are the advertisement's.
//!
//! No router discovery, no redirects, no secure discovery.

use super::ethernet::{self, EthernetHeader};
use super::{MacAddr, ParseError, array_at, checksum, icmpv6, ipv6, protocol};

/// Bytes of a solicitation or advertisement before its options.
pub const MESSAGE_LEN: usize = 24;
/// Bytes of a link-layer address option for Ethernet.
pub const LINK_OPTION_LEN: usize = 8;
/// Bytes of the frame that [`build_advertisement`] writes.
pub const ADVERTISEMENT_FRAME_LEN: usize =
    ethernet::HEADER_LEN + ipv6::HEADER_LEN + MESSAGE_LEN + LINK_OPTION_LEN;
/// Hop limit of every neighbour discovery message: a lower one came through a router.
pub const HOP_LIMIT: u8 = 255;

const TARGET_OFFSET: usize = 8;
const OPTION_SOURCE_LINK: u8 = 1;
const OPTION_TARGET_LINK: u8 = 2;
const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const UNSPECIFIED: [u8; 16] = [0; 16];
/// `ff02::1:ff00:0/104`, before the last three bytes of the target.
const SOLICITED_NODE_PREFIX: [u8; 13] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff];

/// A neighbour solicitation that passed every check of RFC 4861 section 7.1.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Solicitation {
    /// Who asks; unspecified while it tests that its address is not taken.
    pub src: [u8; 16],
    /// The address asked for.
    pub target: [u8; 16],
    /// The asker's MAC address, if it says so.
    pub source_link: Option<MacAddr>,
}

impl Solicitation {
    /// Reads the ICMPv6 message `message`, all of it, which came in an IPv6 packet with these
    /// addresses and hop limit.
    ///
    /// # Errors
    /// [`ParseError::TruncatedNdp`]; [`ParseError::BadNdp`] if it is to be discarded, or is
    /// no solicitation.
    pub fn parse(
        src: [u8; 16],
        dst: [u8; 16],
        hop_limit: u8,
        message: &[u8],
    ) -> Result<Self, ParseError> {
        let (fixed, options) = message
            .split_first_chunk::<MESSAGE_LEN>()
            .ok_or(ParseError::TruncatedNdp)?;
        let target: [u8; 16] = array_at(fixed, TARGET_OFFSET);
        let [kind, code, ..] = *fixed;
        let len = u32::try_from(message.len()).map_err(|_| ParseError::BadNdp)?;
        let pseudo = checksum::pseudo_v6(src, dst, protocol::ICMPV6, len);
        let valid = kind == icmpv6::NEIGHBOR_SOLICITATION
            && code == 0
            && hop_limit == HOP_LIMIT
            && target[0] != 0xff
            && checksum::verify(pseudo, [message]);
        if !valid {
            return Err(ParseError::BadNdp);
        }
        let source_link = source_link(options)?;
        let solicited_node = dst[..13] == SOLICITED_NODE_PREFIX;
        if src == UNSPECIFIED && (source_link.is_some() || !solicited_node) {
            return Err(ParseError::BadNdp);
        }
        Ok(Self {
            src,
            target,
            source_link,
        })
    }

    /// The answer of a router that holds the target address at `own` (RFC 4861 section
    /// 7.2.4). An asker without an address is told by multicast. `asker` is where the
    /// solicitation's frame came from.
    #[must_use]
    pub fn answer(&self, asker: MacAddr, own: MacAddr) -> Advertisement {
        let probe = self.src == UNSPECIFIED;
        let (dst, dst_mac) = if probe {
            (ALL_NODES, MacAddr::ipv6_multicast(ALL_NODES))
        } else {
            (self.src, self.source_link.unwrap_or(asker))
        };
        Advertisement {
            l2: EthernetHeader {
                dst: dst_mac,
                src: own,
            },
            src: self.target,
            dst,
            target: self.target,
            target_link: own,
            router: true,
            solicited: !probe,
            replace: true,
        }
    }
}

/// Walks the options for the asker's MAC address. An option of length zero, or beyond the
/// message, spoils the message; unknown ones are stepped over.
fn source_link(mut options: &[u8]) -> Result<Option<MacAddr>, ParseError> {
    let mut found = None;
    while let &[kind, units, ..] = options {
        let len = usize::from(units) * 8;
        if len == 0 {
            return Err(ParseError::BadNdp);
        }
        let (option, rest) = options
            .split_at_checked(len)
            .ok_or(ParseError::TruncatedNdp)?;
        if kind == OPTION_SOURCE_LINK {
            // Eight bytes is the length for Ethernet (RFC 2464 section 6).
            let bytes: &[u8; LINK_OPTION_LEN] =
                option.try_into().map_err(|_| ParseError::BadNdp)?;
            found = Some(MacAddr(array_at(bytes, 2)));
        }
        options = rest;
    }
    if options.is_empty() {
        Ok(found)
    } else {
        Err(ParseError::TruncatedNdp)
    }
}

/// What a neighbour advertisement says, and to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advertisement {
    /// Addresses of the frame.
    pub l2: EthernetHeader,
    /// Source of the packet.
    pub src: [u8; 16],
    /// Destination of the packet.
    pub dst: [u8; 16],
    /// The address that is told about.
    pub target: [u8; 16],
    /// Where it is.
    pub target_link: MacAddr,
    /// R: the sender is a router.
    pub router: bool,
    /// S: this answers a solicitation from `dst`.
    pub solicited: bool,
    /// O: it replaces what the receiver had cached.
    pub replace: bool,
}

/// Writes the whole frame of an advertisement, checksum computed. Returns its length,
/// [`ADVERTISEMENT_FRAME_LEN`], or `None` if `out` is shorter.
#[must_use]
pub fn build_advertisement(out: &mut [u8], says: &Advertisement) -> Option<usize> {
    let len = MESSAGE_LEN + LINK_OPTION_LEN;
    let message = icmpv6::write_headers(out, says.l2, says.src, says.dst, HOP_LIMIT, len)?;
    let (fixed, option) = message.split_first_chunk_mut::<MESSAGE_LEN>()?;
    let flags =
        u8::from(says.router) << 7 | u8::from(says.solicited) << 6 | u8::from(says.replace) << 5;
    fixed[..TARGET_OFFSET].copy_from_slice(&[
        icmpv6::NEIGHBOR_ADVERTISEMENT,
        0,
        0,
        0,
        flags,
        0,
        0,
        0,
    ]);
    fixed[TARGET_OFFSET..].copy_from_slice(&says.target);
    option[..2].copy_from_slice(&[OPTION_TARGET_LINK, 1]);
    option[2..].copy_from_slice(&says.target_link.0);
    icmpv6::write_checksum(message, says.src, says.dst);
    Some(ADVERTISEMENT_FRAME_LEN)
}
