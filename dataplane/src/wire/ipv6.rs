//! IPv6 and its extension headers (RFC 8200, AH: RFC 4302).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |Version| Traffic Class |           Flow Label                  |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |         Payload Length        |  Next Header  |   Hop Limit   |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                 Source Address (16 bytes)                     |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |               Destination Address (16 bytes)                  |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!
//! options, routing             fragment
//! +--------+--------+-----+    +--------+--------+-------------+-+-+-+
//! |  Next  | Len/8-1| ... |    |  Next  |    0   |   Offset    |0 0|M|
//! +--------+--------+-----+    +--------+--------+-------------+-+-+-+
//!                              |          Identification             |
//!                              +-------------------------------------+
//! ```
//!
//! Options are stepped over, never read; jumbograms (RFC 2675) are not supported. There is
//! no header checksum.

use std::net::IpAddr;

use super::ipv4::ECN_MASK;
use super::{ParseError, array_at, protocol, put_u16, u16_at, u32_at};

/// Bytes in the fixed header.
pub const HEADER_LEN: usize = 40;
/// Offset of the payload length.
pub const PAYLOAD_LEN_OFFSET: usize = 4;
/// Offset of the next header.
pub const NEXT_HEADER_OFFSET: usize = 6;
/// Offset of the hop limit.
pub const HOP_LIMIT_OFFSET: usize = 7;
/// Offset of the source address.
pub const SRC_OFFSET: usize = 8;
/// Offset of the destination address.
pub const DST_OFFSET: usize = 24;
/// Bytes in a fragment header.
pub const FRAGMENT_LEN: usize = 8;
/// The least MTU of an IPv6 link.
pub const MIN_MTU: usize = 1280;

/// Read view of an IPv6 header.
#[derive(Debug, Clone, Copy)]
pub struct Ipv6<'a>(&'a [u8; HEADER_LEN]);

impl<'a> Ipv6<'a> {
    /// The header at the start of `bytes`. That the payload is all there is not checked.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv6`], [`ParseError::BadIpv6Version`].
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        let header = bytes
            .first_chunk::<HEADER_LEN>()
            .ok_or(ParseError::TruncatedIpv6)?;
        if header[0] >> 4 != 6 {
            return Err(ParseError::BadIpv6Version);
        }
        Ok(Self(header))
    }

    /// DSCP and ECN.
    #[must_use]
    pub const fn traffic_class(self) -> u8 {
        (u16_at(self.0, 0) >> 4) as u8
    }

    /// Flow label, 20 bits.
    #[must_use]
    pub const fn flow_label(self) -> u32 {
        u32_at(self.0, 0) & 0x000f_ffff
    }

    /// Bytes after this header, extension headers included.
    #[must_use]
    pub const fn payload_len(self) -> u16 {
        u16_at(self.0, PAYLOAD_LEN_OFFSET)
    }

    /// What follows this header.
    #[must_use]
    pub const fn next_header(self) -> u8 {
        self.0[NEXT_HEADER_OFFSET]
    }

    /// Hop limit.
    #[must_use]
    pub const fn hop_limit(self) -> u8 {
        self.0[HOP_LIMIT_OFFSET]
    }

    /// Source address.
    #[must_use]
    pub fn src(self) -> [u8; 16] {
        array_at(self.0, SRC_OFFSET)
    }

    /// Destination address.
    #[must_use]
    pub fn dst(self) -> [u8; 16] {
        array_at(self.0, DST_OFFSET)
    }
}

/// Write view of an IPv6 header.
#[derive(Debug)]
pub struct Ipv6Mut<'a>(&'a mut [u8; HEADER_LEN]);

impl<'a> Ipv6Mut<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv6`], [`ParseError::BadIpv6Version`].
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, ParseError> {
        let header = bytes
            .first_chunk_mut::<HEADER_LEN>()
            .ok_or(ParseError::TruncatedIpv6)?;
        if header[0] >> 4 != 6 {
            return Err(ParseError::BadIpv6Version);
        }
        Ok(Self(header))
    }

    /// Takes one from the hop limit and returns what is left. At zero or one nothing is
    /// written and `None` says that the packet has expired.
    pub fn decrement_hop_limit(&mut self) -> Option<u8> {
        let left = self.0[HOP_LIMIT_OFFSET]
            .checked_sub(1)
            .filter(|&left| left > 0)?;
        self.0[HOP_LIMIT_OFFSET] = left;
        Some(left)
    }

    /// Sets the hop limit.
    pub const fn set_hop_limit(&mut self, hop_limit: u8) {
        self.0[HOP_LIMIT_OFFSET] = hop_limit;
    }

    /// Sets the two ECN bits; higher bits of `ecn` are ignored.
    pub const fn set_ecn(&mut self, ecn: u8) {
        self.0[1] = (self.0[1] & !(ECN_MASK << 4)) | ((ecn & ECN_MASK) << 4);
    }

    /// Sets DSCP and ECN.
    pub const fn set_traffic_class(&mut self, class: u8) {
        self.0[0] = 0x60 | (class >> 4);
        self.0[1] = (self.0[1] & 0x0f) | (class << 4);
    }

    /// Sets the payload length.
    pub const fn set_payload_len(&mut self, len: u16) {
        put_u16(self.0, PAYLOAD_LEN_OFFSET, len);
    }

    /// Sets the source address. The transport checksum is the caller's to update.
    pub fn set_src(&mut self, address: [u8; 16]) {
        self.0[SRC_OFFSET..DST_OFFSET].copy_from_slice(&address);
    }

    /// Sets the destination address. The transport checksum is the caller's to update.
    pub fn set_dst(&mut self, address: [u8; 16]) {
        self.0[DST_OFFSET..].copy_from_slice(&address);
    }
}

/// What a new header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Fields {
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label; only its low 20 bits are written.
    pub flow_label: u32,
    /// Bytes after this header.
    pub payload_len: u16,
    /// What follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
}

/// Writes a header.
pub fn write_header(out: &mut [u8; HEADER_LEN], fields: &Ipv6Fields) {
    let first = 6 << 28 | u32::from(fields.traffic_class) << 20 | (fields.flow_label & 0x000f_ffff);
    out[..PAYLOAD_LEN_OFFSET].copy_from_slice(&first.to_be_bytes());
    put_u16(out, PAYLOAD_LEN_OFFSET, fields.payload_len);
    out[NEXT_HEADER_OFFSET] = fields.next_header;
    out[HOP_LIMIT_OFFSET] = fields.hop_limit;
    out[SRC_OFFSET..DST_OFFSET].copy_from_slice(&fields.src);
    out[DST_OFFSET..].copy_from_slice(&fields.dst);
}

/// Whether `next_header` is an extension header that can be stepped over.
#[must_use]
pub const fn is_extension(next_header: u8) -> bool {
    matches!(
        next_header,
        protocol::HOP_BY_HOP
            | protocol::ROUTING
            | protocol::FRAGMENT
            | protocol::DESTINATION_OPTIONS
            | protocol::AH
    )
}

/// Whether an address is IPv4-mapped, `::ffff:a.b.c.d` (RFC 4291 section 2.5.5.2).
#[must_use]
pub fn is_v4_mapped(address: &[u8; 16]) -> bool {
    address[..12] == V4_MAPPED_PREFIX
}

/// `::ffff:0:0/96`, before an IPv4 address.
pub const V4_MAPPED_PREFIX: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// An IPv4 address as 16 bytes, IPv4-mapped.
#[must_use]
pub const fn v4_mapped([a, b, c, d]: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// The address that those bytes are, IPv4 where they are [mapped](v4_mapped).
#[must_use]
pub fn ip_of_mapped(bytes: [u8; 16]) -> IpAddr {
    if is_v4_mapped(&bytes) {
        let [.., a, b, c, d] = bytes;
        IpAddr::from([a, b, c, d])
    } else {
        IpAddr::from(bytes)
    }
}

/// The bytes of an address, [mapped](v4_mapped) where it is IPv4.
#[must_use]
pub fn ip_to_mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4_mapped(v4.octets()),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Read view of an extension header of any kind but fragment.
#[derive(Debug, Clone, Copy)]
pub struct Extension<'a>(&'a [u8]);

impl<'a> Extension<'a> {
    /// The extension header of kind `kind` at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv6Extension`]; [`ParseError::BadIpv6Extension`] for an
    /// authentication header shorter than its fixed part.
    #[inline]
    pub fn new(kind: u8, bytes: &'a [u8]) -> Result<Self, ParseError> {
        let &[_, units, ..] = bytes else {
            return Err(ParseError::TruncatedIpv6Extension);
        };
        let len = if kind == protocol::AH {
            // In words, minus two (RFC 4302 section 2.2); the fixed part is 12 bytes.
            (usize::from(units) + 2) * 4
        } else {
            (usize::from(units) + 1) * 8
        };
        if kind == protocol::AH && len < 12 {
            return Err(ParseError::BadIpv6Extension);
        }
        Ok(Self(
            bytes.get(..len).ok_or(ParseError::TruncatedIpv6Extension)?,
        ))
    }

    /// What follows.
    #[must_use]
    pub fn next_header(self) -> u8 {
        self.0.first().copied().unwrap_or(protocol::NO_NEXT_HEADER)
    }

    /// Bytes in this header.
    #[must_use]
    pub const fn header_len(self) -> usize {
        self.0.len()
    }

    /// For a routing header: its type and the segments left.
    #[must_use]
    pub const fn routing(self) -> Option<(u8, u8)> {
        match self.0 {
            &[_, _, kind, left, ..] => Some((kind, left)),
            _ => None,
        }
    }
}

/// Read view of a fragment header (RFC 8200 section 4.5).
#[derive(Debug, Clone, Copy)]
pub struct FragmentHeader<'a>(&'a [u8; FRAGMENT_LEN]);

impl<'a> FragmentHeader<'a> {
    /// The header at the start of `bytes`.
    ///
    /// # Errors
    /// [`ParseError::TruncatedIpv6Extension`].
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Result<Self, ParseError> {
        Ok(Self(
            bytes
                .first_chunk()
                .ok_or(ParseError::TruncatedIpv6Extension)?,
        ))
    }

    /// What follows, in the first fragment.
    #[must_use]
    pub const fn next_header(self) -> u8 {
        self.0[0]
    }

    /// Where this fragment's part starts in the whole fragmentable part, in bytes.
    #[must_use]
    pub const fn offset(self) -> u16 {
        u16_at(self.0, 2) & !7
    }

    /// Whether a later fragment follows.
    #[must_use]
    pub const fn more_fragments(self) -> bool {
        self.0[3] & 1 != 0
    }

    /// Identification.
    #[must_use]
    pub const fn id(self) -> u32 {
        u32_at(self.0, 4)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&[0x6b, 0x91, 0x23, 0x45, 0x00, 0x08, 0x11, 0x40]);
        bytes[8] = 0xfd;
        bytes[23] = 1;
        bytes[24] = 0xfd;
        bytes[39] = 2;
        let view = Ipv6::new(&bytes).unwrap();
        assert_eq!((view.traffic_class(), view.flow_label()), (0xb9, 0x1_2345));
        assert_eq!(
            (view.payload_len(), view.next_header(), view.hop_limit()),
            (8, 17, 64)
        );
        assert_eq!(
            (view.src()[0], view.src()[15], view.dst()[15]),
            (0xfd, 1, 2)
        );
        assert_eq!(
            Ipv6::new(&bytes[..39]).unwrap_err(),
            ParseError::TruncatedIpv6
        );
        bytes[0] = 0x4b;
        assert_eq!(Ipv6::new(&bytes).unwrap_err(), ParseError::BadIpv6Version);
        assert_eq!(
            Ipv6Mut::new(&mut bytes).unwrap_err(),
            ParseError::BadIpv6Version
        );
    }

    #[test]
    fn extension_lengths_by_kind() {
        let bytes = [6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let options = Extension::new(protocol::DESTINATION_OPTIONS, &bytes).unwrap();
        assert_eq!((options.next_header(), options.header_len()), (6, 16));
        let auth = Extension::new(protocol::AH, &bytes).unwrap();
        assert_eq!(auth.header_len(), 12);
        for (kind, bytes, fault) in [
            (
                protocol::ROUTING,
                &bytes[..15],
                ParseError::TruncatedIpv6Extension,
            ),
            (
                protocol::ROUTING,
                &bytes[..1],
                ParseError::TruncatedIpv6Extension,
            ),
            (
                protocol::AH,
                &[6, 0, 0, 0, 0, 0, 0, 0],
                ParseError::BadIpv6Extension,
            ),
        ] {
            assert_eq!(Extension::new(kind, bytes).unwrap_err(), fault);
        }
    }

    #[test]
    fn fragment_header_golden_bytes() {
        let bytes = [17, 0, 0x05, 0xa9, 0xde, 0xad, 0xbe, 0xef];
        let view = FragmentHeader::new(&bytes).unwrap();
        assert_eq!(
            (view.next_header(), view.offset(), view.id()),
            (17, 1448, 0xdead_beef)
        );
        assert!(view.more_fragments());
        // No cross-check: etherparse 0.19 takes the M bit and the offset's low bits from
        // other places in the fourth byte than RFC 8200 section 4.5 draws them.
        assert_eq!(
            FragmentHeader::new(&bytes[..7]).unwrap_err(),
            ParseError::TruncatedIpv6Extension
        );
    }

    proptest! {
        #[test]
        fn written_headers_are_read_back_by_etherparse(
            traffic_class: u8, flow_label in 0_u32..1 << 20, payload_len: u16, next_header: u8,
            hop_limit in 2_u8.., src: [u8; 16], dst: [u8; 16], class: u8, ecn: u8,
        ) {
            let fields = Ipv6Fields {
                traffic_class, flow_label, payload_len, next_header, hop_limit, src, dst,
            };
            let mut bytes = [0xff; HEADER_LEN];
            write_header(&mut bytes, &fields);
            let (theirs, _) = etherparse::Ipv6Header::from_slice(&bytes).unwrap();
            prop_assert_eq!(theirs.traffic_class, traffic_class);
            prop_assert_eq!(theirs.flow_label.value(), flow_label);
            prop_assert_eq!(theirs.payload_length, payload_len);
            prop_assert_eq!((theirs.source, theirs.destination), (src, dst));

            let mut view = Ipv6Mut::new(&mut bytes).unwrap();
            view.set_traffic_class(class);
            view.set_ecn(ecn);
            view.set_payload_len(7);
            view.set_src(dst);
            view.set_dst(src);
            prop_assert_eq!(view.decrement_hop_limit(), Some(hop_limit - 1));
            let (theirs, _) = etherparse::Ipv6Header::from_slice(&bytes).unwrap();
            prop_assert_eq!(theirs.traffic_class, (class & !3) | (ecn & 3));
            prop_assert_eq!(theirs.flow_label.value(), flow_label);
            prop_assert_eq!((theirs.payload_length, theirs.hop_limit), (7, hop_limit - 1));
            prop_assert_eq!((theirs.source, theirs.destination), (dst, src));
        }

        #[test]
        fn an_expiring_packet_is_left_alone(hop_limit in 0_u8..2) {
            let mut bytes = [0; HEADER_LEN];
            bytes[0] = 0x60;
            bytes[HOP_LIMIT_OFFSET] = hop_limit;
            let before = bytes;
            prop_assert_eq!(Ipv6Mut::new(&mut bytes).unwrap().decrement_hop_limit(), None);
            prop_assert_eq!(bytes, before);
        }
    }
}
