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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parse;

    const ASKER: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
    const GATEWAY: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    const GROUP: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 1];
    const ASKER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);
    const OWN_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    /// A solicitation for the gateway with these option bytes and a right checksum.
    fn message(src: [u8; 16], dst: [u8; 16], options: &[u8]) -> Vec<u8> {
        let mut bytes = vec![135, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend(GATEWAY);
        bytes.extend(options);
        icmpv6::write_checksum(&mut bytes, src, dst);
        bytes
    }

    const SOURCE_LINK: [u8; 8] = [1, 1, 2, 0, 0, 0, 0, 7];

    #[test]
    fn a_solicitation_is_read_and_answered() {
        let bytes = message(ASKER, GROUP, &SOURCE_LINK);
        let asked = Solicitation::parse(ASKER, GROUP, 255, &bytes).unwrap();
        assert_eq!(
            asked,
            Solicitation {
                src: ASKER,
                target: GATEWAY,
                source_link: Some(ASKER_MAC)
            }
        );
        let mut out = [0; 100];
        let says = asked.answer(MacAddr::ZERO, OWN_MAC);
        assert_eq!(
            build_advertisement(&mut out, &says),
            Some(ADVERTISEMENT_FRAME_LEN)
        );
        let frame = &out[..ADVERTISEMENT_FRAME_LEN];
        assert_eq!(
            frame[..14],
            [2, 0, 0, 0, 0, 7, 2, 0, 0, 0, 0, 1, 0x86, 0xdd]
        );
        assert_eq!(frame[14..22], [0x60, 0, 0, 0, 0, 32, 58, 255]);
        assert_eq!(frame[54..56], [136, 0]);
        assert_eq!(frame[58..62], [0xe0, 0, 0, 0]);
        assert_eq!(frame[62..78], GATEWAY);
        assert_eq!(frame[78..], [2, 1, 2, 0, 0, 0, 0, 1]);

        let headers = parse::parse(frame, frame.len()).unwrap();
        assert_eq!((headers.src_bytes, headers.dst_bytes), (GATEWAY, ASKER));
        assert_eq!(headers.icmp, Some((136, 0)));
        let (theirs, body) = etherparse::Icmpv6Header::from_slice(&frame[54..]).unwrap();
        let expected = theirs
            .icmp_type
            .calc_checksum(GATEWAY, ASKER, body)
            .unwrap();
        assert_eq!(theirs.checksum, expected);
        assert_eq!(build_advertisement(&mut out[..85], &says), None);
    }

    #[test]
    fn without_an_option_the_frame_says_who_asks() {
        let bytes = message(ASKER, GROUP, &[]);
        let asked = Solicitation::parse(ASKER, GROUP, 255, &bytes).unwrap();
        assert_eq!(asked.answer(ASKER_MAC, OWN_MAC).l2.dst, ASKER_MAC);
    }

    #[test]
    fn a_probe_for_duplicates_is_answered_to_all() {
        let bytes = message(UNSPECIFIED, GROUP, &[]);
        let asked = Solicitation::parse(UNSPECIFIED, GROUP, 255, &bytes).unwrap();
        let says = asked.answer(ASKER_MAC, OWN_MAC);
        assert_eq!(says.l2.dst.to_string(), "33:33:00:00:00:01");
        assert!(!says.solicited && says.replace);
        assert_eq!(says.dst, ALL_NODES);
    }

    #[test]
    fn what_the_rfc_discards_is_discarded() {
        let good = message(ASKER, GROUP, &SOURCE_LINK);
        let parse = |src, dst, hops, bytes: &[u8]| Solicitation::parse(src, dst, hops, bytes);
        let bad = Err(ParseError::BadNdp);
        let cut = Err(ParseError::TruncatedNdp);
        assert_eq!(parse(ASKER, GROUP, 254, &good), bad);
        assert_eq!(parse(ASKER, GROUP, 255, &good[..23]), cut);
        let mut wrong = good.clone();
        wrong[2] ^= 1;
        assert_eq!(parse(ASKER, GROUP, 255, &wrong), bad);
        for (at, value) in [(0, 136), (1, 1), (TARGET_OFFSET, 0xff)] {
            let mut wrong = good.clone();
            wrong[at] = value;
            icmpv6::write_checksum(&mut wrong, ASKER, GROUP);
            assert_eq!(parse(ASKER, GROUP, 255, &wrong), bad, "{at}");
        }
        let options = |bytes: &[u8]| parse(ASKER, GROUP, 255, &message(ASKER, GROUP, bytes));
        assert_eq!(options(&[14, 0, 0, 0, 0, 0, 0, 0]), bad);
        assert_eq!(options(&[14, 2, 0, 0, 0, 0, 0, 0]), cut);
        assert_eq!(options(&[14]), cut);
        assert_eq!(
            options(&[1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            bad
        );
        assert!(options(&[14, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 7]).is_ok());
        // An asker without an address says no MAC, and asks the solicited-node group.
        let none = UNSPECIFIED;
        assert_eq!(
            parse(none, GROUP, 255, &message(none, GROUP, &SOURCE_LINK)),
            bad
        );
        assert_eq!(parse(none, GATEWAY, 255, &message(none, GATEWAY, &[])), bad);
    }

    proptest! {
        #[test]
        fn any_options_end_in_an_answer_or_a_fault(
            options in prop::collection::vec(prop_oneof![0_u8..4, any::<u8>()], 0..80),
        ) {
            let bytes = message(ASKER, GROUP, &options);
            if let Err(fault) = Solicitation::parse(ASKER, GROUP, 255, &bytes) {
                prop_assert!(matches!(fault, ParseError::BadNdp | ParseError::TruncatedNdp));
            }
        }
    }
}
