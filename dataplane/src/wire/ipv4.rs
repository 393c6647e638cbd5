//! IPv4 (RFC 791; DSCP and ECN: RFC 2474, RFC 3168).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |Version|  IHL  |   DSCP    |ECN|          Total Length         |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |         Identification        |0|D|M|     Fragment Offset     |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |  Time to Live |    Protocol   |        Header Checksum        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                         Source Address                        |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                      Destination Address                      |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                    Options                    |    Padding    |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Options are carried, never read.

use super::{ParseError, array_at, checksum, put_u16, u16_at};

/// Bytes in a header without options.
pub const HEADER_LEN: usize = 20;
/// Offset of version and header length.
pub const VERSION_IHL_OFFSET: usize = 0;
/// Offset of DSCP and ECN.
pub const TOS_OFFSET: usize = 1;
/// Offset of the total length.
pub const TOTAL_LEN_OFFSET: usize = 2;
/// Offset of the identification.
pub const ID_OFFSET: usize = 4;
/// Offset of flags and fragment offset.
pub const FRAGMENT_OFFSET: usize = 6;
/// Offset of the time to live.
pub const TTL_OFFSET: usize = 8;
/// Offset of the protocol.
pub const PROTOCOL_OFFSET: usize = 9;
/// Offset of the header checksum.
pub const CHECKSUM_OFFSET: usize = 10;
/// Offset of the source address.
pub const SRC_OFFSET: usize = 12;
/// Offset of the destination address.
pub const DST_OFFSET: usize = 16;

/// The flag that has no meaning.
pub const RESERVED_FLAG: u16 = 0x8000;
const DONT_FRAGMENT: u16 = 0x4000;
/// The flag of every fragment but the last.
pub const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET_MASK: u16 = 0x1fff;
/// Mask of the ECN field in the TOS byte (and the IPv6 traffic class).
pub const ECN_MASK: u8 = 0x03;
/// Congestion experienced.
pub const ECN_CE: u8 = 0x03;

/// Read view of an IPv4 header.
#[derive(Debug, Clone, Copy)]
pub struct Ipv4<'a> {
    fixed: &'a [u8; HEADER_LEN],
    options: &'a [u8],
}

impl<'a> Ipv4<'a> {
    /// The header at the start of `bytes`: version 4, IHL at least five words and inside
    /// `bytes`, total length at least the header. That the packet itself is all there, and
    /// the checksum, are not checked.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv4`], [`ParseError::BadIpv4Version`],
    /// [`ParseError::BadIpv4HeaderLength`], [`ParseError::BadIpv4Length`].
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let (fixed, rest) = bytes
            .split_first_chunk::<HEADER_LEN>()
            .ok_or(ParseError::TruncatedIpv4)?;
        let first = fixed[VERSION_IHL_OFFSET];
        if first >> 4 != 4 {
            return Err(ParseError::BadIpv4Version);
        }
        let options_len = (usize::from(first & 0x0f) * 4)
            .checked_sub(HEADER_LEN)
            .ok_or(ParseError::BadIpv4HeaderLength)?;
        let options = rest.get(..options_len).ok_or(ParseError::TruncatedIpv4)?;
        let view = Self { fixed, options };
        if usize::from(view.total_len()) < view.header_len() {
            return Err(ParseError::BadIpv4Length);
        }
        Ok(view)
    }

    /// Bytes of header, options included: 20 to 60.
    #[must_use]
    pub const fn header_len(self) -> usize {
        HEADER_LEN + self.options.len()
    }

    /// DSCP and ECN.
    #[must_use]
    pub const fn tos(self) -> u8 {
        self.fixed[TOS_OFFSET]
    }

    /// Bytes of header and payload.
    #[must_use]
    pub const fn total_len(self) -> u16 {
        u16_at(self.fixed, TOTAL_LEN_OFFSET)
    }

    /// Identification, which joins the fragments of one packet.
    #[must_use]
    pub const fn id(self) -> u16 {
        u16_at(self.fixed, ID_OFFSET)
    }

    /// Whether routers must not fragment it.
    #[must_use]
    pub const fn dont_fragment(self) -> bool {
        u16_at(self.fixed, FRAGMENT_OFFSET) & DONT_FRAGMENT != 0
    }

    /// Whether a later fragment follows.
    #[must_use]
    pub const fn more_fragments(self) -> bool {
        u16_at(self.fixed, FRAGMENT_OFFSET) & MORE_FRAGMENTS != 0
    }

    /// Where this fragment's payload starts in the whole packet's, in bytes.
    #[must_use]
    pub const fn fragment_offset(self) -> u16 {
        (u16_at(self.fixed, FRAGMENT_OFFSET) & OFFSET_MASK) << 3
    }

    /// Time to live.
    #[must_use]
    pub const fn ttl(self) -> u8 {
        self.fixed[TTL_OFFSET]
    }

    /// What the payload is.
    #[must_use]
    pub const fn protocol(self) -> u8 {
        self.fixed[PROTOCOL_OFFSET]
    }

    /// Header checksum as it stands.
    #[must_use]
    pub const fn checksum(self) -> u16 {
        u16_at(self.fixed, CHECKSUM_OFFSET)
    }

    /// Whether the header checksum, over the options too, is right.
    #[must_use]
    pub fn checksum_ok(self) -> bool {
        checksum::Sum::new()
            .with(self.fixed)
            .with(self.options)
            .fold()
            == 0xffff
    }

    /// Source address.
    #[must_use]
    pub fn src(self) -> [u8; 4] {
        array_at(self.fixed, SRC_OFFSET)
    }

    /// Destination address.
    #[must_use]
    pub fn dst(self) -> [u8; 4] {
        array_at(self.fixed, DST_OFFSET)
    }

    /// Option bytes, padding included.
    #[must_use]
    pub const fn options(self) -> &'a [u8] {
        self.options
    }
}

/// Write view of the fixed part of an IPv4 header. Each setter keeps the header checksum
/// right by an incremental update (RFC 1624): a checksum that was wrong stays wrong.
#[derive(Debug)]
pub struct Ipv4Mut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> Ipv4Mut<'a> {
    /// The header at the start of `bytes`; only its length and version are checked.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv4`], [`ParseError::BadIpv4Version`].
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, ParseError> {
        let header = bytes.first_chunk_mut().ok_or(ParseError::TruncatedIpv4)?;
        if header[VERSION_IHL_OFFSET] >> 4 != 4 {
            return Err(ParseError::BadIpv4Version);
        }
        Ok(Self(header))
    }

    /// Sets the even-aligned word at `at`, one of this module's offsets.
    fn set_word(&mut self, at: usize, new: u16) {
        let old = u16_at(self.0, at);
        let sum = checksum::update(u16_at(self.0, CHECKSUM_OFFSET), old, new);
        put_u16(self.0, at, new);
        put_u16(self.0, CHECKSUM_OFFSET, sum);
    }

    /// Takes one from the time to live and returns what is left. At zero or one nothing is
    /// written and `None` says that the packet has expired.
    pub fn decrement_ttl(&mut self) -> Option<u8> {
        let left = self.0[TTL_OFFSET].checked_sub(1).filter(|&left| left > 0)?;
        self.set_word(
            TTL_OFFSET,
            u16::from_be_bytes([left, self.0[PROTOCOL_OFFSET]]),
        );
        Some(left)
    }

    /// Sets the time to live.
    pub fn set_ttl(&mut self, ttl: u8) {
        self.set_word(
            TTL_OFFSET,
            u16::from_be_bytes([ttl, self.0[PROTOCOL_OFFSET]]),
        );
    }

    /// Sets the two ECN bits; higher bits of `ecn` are ignored.
    pub fn set_ecn(&mut self, ecn: u8) {
        let tos = (self.0[TOS_OFFSET] & !ECN_MASK) | (ecn & ECN_MASK);
        self.set_tos(tos);
    }

    /// Sets DSCP and ECN.
    pub fn set_tos(&mut self, tos: u8) {
        self.set_word(
            VERSION_IHL_OFFSET,
            u16::from_be_bytes([self.0[VERSION_IHL_OFFSET], tos]),
        );
    }

    /// Sets the total length.
    pub fn set_total_len(&mut self, len: u16) {
        self.set_word(TOTAL_LEN_OFFSET, len);
    }

    /// Sets the identification.
    pub fn set_id(&mut self, id: u16) {
        self.set_word(ID_OFFSET, id);
    }

    /// Sets the source address. The transport checksum is the caller's to update.
    pub fn set_src(&mut self, address: [u8; 4]) {
        self.set_address(SRC_OFFSET, address);
    }

    /// Sets the destination address. The transport checksum is the caller's to update.
    pub fn set_dst(&mut self, address: [u8; 4]) {
        self.set_address(DST_OFFSET, address);
    }

    fn set_address(&mut self, at: usize, [a, b, c, d]: [u8; 4]) {
        self.set_word(at, u16::from_be_bytes([a, b]));
        self.set_word(at + 2, u16::from_be_bytes([c, d]));
    }
}

/// What a new header without options says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Fields {
    /// DSCP and ECN.
    pub tos: u8,
    /// Bytes of header and payload.
    pub total_len: u16,
    /// Identification.
    pub id: u16,
    /// Whether routers must not fragment it.
    pub dont_fragment: bool,
    /// Time to live.
    pub ttl: u8,
    /// What the payload is.
    pub protocol: u8,
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
}

/// Writes a header without options, its checksum computed.
pub fn write_header(out: &mut [u8; HEADER_LEN], fields: &Ipv4Fields) {
    out[VERSION_IHL_OFFSET] = 0x45;
    out[TOS_OFFSET] = fields.tos;
    put_u16(out, TOTAL_LEN_OFFSET, fields.total_len);
    put_u16(out, ID_OFFSET, fields.id);
    put_u16(
        out,
        FRAGMENT_OFFSET,
        if fields.dont_fragment {
            DONT_FRAGMENT
        } else {
            0
        },
    );
    out[TTL_OFFSET] = fields.ttl;
    out[PROTOCOL_OFFSET] = fields.protocol;
    put_u16(out, CHECKSUM_OFFSET, 0);
    out[SRC_OFFSET..DST_OFFSET].copy_from_slice(&fields.src);
    out[DST_OFFSET..].copy_from_slice(&fields.dst);
    let sum = checksum::Sum::new().with(out).checksum();
    put_u16(out, CHECKSUM_OFFSET, sum);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header with one word of options: no-operation three times, end of list.
    const GOLDEN: [u8; 24] = [
        0x46, 0xb9, 0x00, 0x1c, 0xbe, 0xef, 0x40, 0x00, 0x40, 0x11, 0x61, 0x3d, 10, 244, 0, 1, 10,
        244, 1, 2, 1, 1, 1, 0,
    ];

    #[test]
    fn golden_bytes_with_options() {
        let view = Ipv4::new(&GOLDEN).unwrap();
        assert_eq!(
            (view.header_len(), view.total_len(), view.tos()),
            (24, 28, 0xb9)
        );
        assert_eq!((view.id(), view.ttl(), view.protocol()), (0xbeef, 64, 17));
        assert!(view.dont_fragment() && !view.more_fragments());
        assert_eq!(view.fragment_offset(), 0);
        assert_eq!((view.src(), view.dst()), ([10, 244, 0, 1], [10, 244, 1, 2]));
        assert_eq!(view.options(), [1, 1, 1, 0]);
        let (theirs, _) = etherparse::Ipv4Header::from_slice(&GOLDEN).unwrap();
        assert_eq!(theirs.calc_header_checksum(), view.checksum());
        assert!(view.checksum_ok());
        assert_eq!(theirs.dscp.value() << 2 | theirs.ecn.value(), view.tos());
    }

    #[test]
    fn each_fault_has_its_reason() {
        let with = |at: usize, value: u8| {
            let mut bytes = GOLDEN;
            bytes[at] = value;
            Ipv4::new(&bytes).map(|_| ()).unwrap_err()
        };
        assert_eq!(with(0, 0x66), ParseError::BadIpv4Version);
        assert_eq!(with(0, 0x44), ParseError::BadIpv4HeaderLength);
        assert_eq!(with(0, 0x47), ParseError::TruncatedIpv4);
        assert_eq!(with(3, 23), ParseError::BadIpv4Length);
        assert_eq!(
            Ipv4::new(&GOLDEN[..19]).unwrap_err(),
            ParseError::TruncatedIpv4
        );
        assert_eq!(
            Ipv4::new(&GOLDEN[..23]).unwrap_err(),
            ParseError::TruncatedIpv4
        );
    }

    #[test]
    fn an_expiring_packet_is_left_alone() {
        for ttl in [0, 1] {
            let mut bytes = GOLDEN;
            bytes[TTL_OFFSET] = ttl;
            let before = bytes;
            assert_eq!(Ipv4Mut::new(&mut bytes).unwrap().decrement_ttl(), None);
            assert_eq!(bytes, before);
        }
        let mut bytes = GOLDEN;
        assert_eq!(Ipv4Mut::new(&mut bytes).unwrap().decrement_ttl(), Some(63));
        assert!(Ipv4::new(&bytes).unwrap().checksum_ok());
        assert_eq!(
            Ipv4Mut::new(&mut bytes[..19]).unwrap_err(),
            ParseError::TruncatedIpv4
        );
        bytes[0] = 0x65;
        assert_eq!(
            Ipv4Mut::new(&mut bytes).unwrap_err(),
            ParseError::BadIpv4Version
        );
    }

    proptest! {
        /// RFC 1624 against a full recomputation by etherparse, after every setter.
        #[test]
        fn setters_keep_the_checksum_right(
            tos: u8, total_len in 20_u16.., id: u16, dont_fragment: bool, ttl in 2_u8..,
            protocol: u8, src: [u8; 4], dst: [u8; 4],
            new_tos: u8, new_len in 20_u16.., new_id: u16, new_src: [u8; 4], new_dst: [u8; 4],
            ecn in 0_u8..4,
        ) {
            let fields =
                Ipv4Fields { tos, total_len, id, dont_fragment, ttl, protocol, src, dst };
            let mut bytes = [0xff; HEADER_LEN];
            write_header(&mut bytes, &fields);
            let (theirs, _) = etherparse::Ipv4Header::from_slice(&bytes).unwrap();
            prop_assert_eq!(theirs.calc_header_checksum(), theirs.header_checksum);
            prop_assert_eq!(theirs.dont_fragment, dont_fragment);
            prop_assert_eq!((theirs.source, theirs.destination), (src, dst));

            let steps: [&dyn Fn(&mut Ipv4Mut<'_>); 8] = [
                &|ip| ip.set_ttl(ttl),
                &|ip| assert_eq!(ip.decrement_ttl(), Some(ttl - 1)),
                &|ip| ip.set_tos(new_tos),
                &|ip| ip.set_ecn(ecn),
                &|ip| ip.set_total_len(new_len),
                &|ip| ip.set_id(new_id),
                &|ip| ip.set_src(new_src),
                &|ip| ip.set_dst(new_dst),
            ];
            for step in steps {
                step(&mut Ipv4Mut::new(&mut bytes).unwrap());
                let (theirs, _) = etherparse::Ipv4Header::from_slice(&bytes).unwrap();
                prop_assert_eq!(theirs.calc_header_checksum(), theirs.header_checksum);
            }
            let view = Ipv4::new(&bytes).unwrap();
            prop_assert_eq!(view.tos(), (new_tos & !3) | ecn);
            prop_assert_eq!((view.total_len(), view.id()), (new_len, new_id));
            prop_assert_eq!((view.src(), view.dst()), (new_src, new_dst));
            prop_assert_eq!(view.ttl(), ttl - 1);
        }
    }
}
