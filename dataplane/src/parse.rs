//! One pass over a frame: bytes in, [`Headers`] or the one reason why not out.
//!
//! First stage after a frame is received, and again for the frame inside a VXLAN packet.
//! Everything behind works from the offsets and fields found here and need not check lengths
//! again. Only the contiguous head of a frame is read; payload may lie in further segments.
//!
//! Deliberately absent: transport checksums (they may be partial, and payload is not looked
//! at), IP options and TCP options, reassembly, and any judgement on addresses except
//! IPv4-mapped ones, which would make an IPv6 packet pass for an IPv4 one in a flow key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use crate::wire::ParseError;
use crate::wire::arp::{self, Arp};
pub use crate::wire::ethernet::EthernetHeader;
use crate::wire::ethernet::{
    self, ETHER_TYPE_ARP, ETHER_TYPE_IPV4, ETHER_TYPE_IPV6, Ethernet, MacAddr,
};
use crate::wire::icmp::{self, Icmp};
use crate::wire::ipv4::Ipv4;
use crate::wire::ipv6::{self, Extension, FragmentHeader, Ipv6};
pub use crate::wire::sctp::Chunk;
use crate::wire::sctp::{self, Sctp};
use crate::wire::tcp::Tcp;
pub use crate::wire::tcp::TcpFlags;
use crate::wire::udp::{self, Udp};
use crate::wire::vxlan::{self, VxlanHeader};
use crate::wire::{icmpv6, protocol};

/// Most IPv6 extension headers in one packet.
pub const MAX_EXTENSIONS: usize = 8;
/// Most bytes of IPv6 extension headers in one packet (RFC 8504 section 5.3 lets a node set
/// such limits). With it, all headers of a tunnelled frame fit in one 3800-byte head.
pub const MAX_EXTENSION_BYTES: usize = 1024;
/// How much of a frame's head must be contiguous for every acceptable header to be seen:
/// outer Ethernet, IP and VXLAN, inner Ethernet, both with longest extension chains, TCP.
pub const HEAD_LEN: usize = 2 * (ethernet::HEADER_LEN + ipv6::HEADER_LEN + MAX_EXTENSION_BYTES)
    + udp::HEADER_LEN
    + vxlan::HEADER_LEN
    + 60;

/// What lies above Ethernet, with what only that has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum L3 {
    /// ARP; source and destination addresses are the sender's and target's.
    Arp {
        /// [`arp::REQUEST`], [`arp::REPLY`] or something else.
        operation: u16,
    },
    /// IPv4.
    V4 {
        /// Whether there are IP options.
        options: bool,
    },
    /// IPv6.
    V6 {
        /// Flow label, 20 bits.
        flow_label: u32,
        /// Offset in the frame of the fragment header, if there is one.
        fragment_header: Option<u16>,
    },
}

/// Which part of an IP packet a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fragment {
    /// All of it.
    #[default]
    None,
    /// The first of several; the transport header is here.
    First,
    /// A later one: no transport header, ports are zero.
    Later {
        /// Where its payload starts in the whole packet's, in bytes: at least 8.
        offset: u16,
    },
}

/// What one pass over a frame found. Offsets are in bytes from the start of the buffer that
/// was parsed, and headers lie wholly inside its contiguous head.
///
/// For ARP, `l4_offset` and `payload_offset` are where the ARP packet ends, and the fields of
/// IP and transport are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Headers {
    /// Ethernet addresses.
    pub l2: EthernetHeader,
    /// EtherType.
    pub ether_type: u16,
    /// ARP, IPv4 or IPv6.
    pub kind: L3,
    /// Where ARP or IP starts.
    pub l3_offset: u16,
    /// Where the transport header starts, after options and extension headers.
    pub l4_offset: u16,
    /// Where the transport payload starts; `l4_offset` for later fragments and protocols
    /// that are not known.
    pub payload_offset: u16,
    /// IP protocol, after IPv6 extension headers.
    pub protocol: u8,
    /// Time to live or hop limit.
    pub ttl: u8,
    /// TOS byte or traffic class: DSCP and ECN.
    pub dscp_ecn: u8,
    /// The IPv4 flag; always set for IPv6, which routers never fragment.
    pub dont_fragment: bool,
    /// Bytes of IP header and payload by the header; the frame may be longer (padding).
    pub ip_total_len: u32,
    /// Source address, IPv4-mapped if IPv4.
    pub src_bytes: [u8; 16],
    /// Destination address, IPv4-mapped if IPv4.
    pub dst_bytes: [u8; 16],
    /// Source port; the identifier of an ICMP echo; else zero.
    pub src_port: u16,
    /// Destination port, else zero.
    pub dst_port: u16,
    /// Type and code of ICMP over IPv4 or ICMPv6 over IPv6.
    pub icmp: Option<(u8, u8)>,
    /// TCP flags, else none set.
    pub tcp_flags: TcpFlags,
    /// The verification tag and first chunk of SCTP, if the head shows them.
    pub sctp: Option<Chunk>,
    /// Which part of a packet this is.
    pub fragment: Fragment,
    /// What joins its fragments: IPv4 identification (always there), or that of the IPv6
    /// fragment header, else zero.
    pub fragment_id: u32,
}

impl Headers {
    /// Source address.
    #[must_use]
    pub fn src(&self) -> IpAddr {
        self.address(self.src_bytes)
    }

    /// Destination address.
    #[must_use]
    pub fn dst(&self) -> IpAddr {
        self.address(self.dst_bytes)
    }

    fn address(&self, bytes: [u8; 16]) -> IpAddr {
        match self.kind {
            L3::V6 { .. } => IpAddr::V6(Ipv6Addr::from(bytes)),
            L3::V4 { .. } | L3::Arp { .. } => {
                let [.., a, b, c, d] = bytes;
                IpAddr::V4(Ipv4Addr::new(a, b, c, d))
            }
        }
    }

    /// Whether this is IPv4.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        matches!(self.kind, L3::V4 { .. })
    }

    /// Whether this is IPv6.
    #[must_use]
    pub const fn is_v6(&self) -> bool {
        matches!(self.kind, L3::V6 { .. })
    }

    /// Where the IP packet ends in the buffer, padding left out.
    #[must_use]
    pub fn l3_end(&self) -> usize {
        usize::from(self.l3_offset) + self.ip_total_len as usize
    }

    /// Bytes of transport header and payload, by the IP header.
    #[must_use]
    pub fn l4_len(&self) -> usize {
        self.l3_end().saturating_sub(usize::from(self.l4_offset))
    }

    /// Whether this is an ICMP message that reports an error and quotes the packet that it is
    /// about, from `payload_offset` on.
    #[must_use]
    pub fn is_icmp_error(&self) -> bool {
        match (self.kind, self.icmp) {
            (L3::V4 { .. }, Some((kind, _))) => icmp::is_error(kind),
            (L3::V6 { .. }, Some((kind, _))) => icmpv6::is_error(kind),
            _ => false,
        }
    }

    /// Whether an ICMP error about this packet may be sent (RFC 1122 section 3.2.2, RFC 4443
    /// section 2.4(e)): it is IP, no ICMP error or redirect, not a later fragment, from one
    /// host, and to one host on either layer. Rate limits are the caller's.
    #[must_use]
    pub fn permits_icmp_error(&self) -> bool {
        self.is_answerable() && !self.is_to_group()
    }

    /// Whether "packet too big" or "fragmentation needed" about this packet may be sent. As
    /// [`permits_icmp_error`](Self::permits_icmp_error), but IPv6 wants it about packets to
    /// a group too, for path MTU discovery.
    #[must_use]
    pub fn permits_too_big(&self) -> bool {
        self.is_answerable() && (self.is_v6() || !self.is_to_group())
    }

    fn is_answerable(&self) -> bool {
        let kind_allows = match (self.kind, self.icmp) {
            (L3::Arp { .. }, _) => false,
            (_, None) => true,
            (L3::V4 { .. }, Some((kind, _))) => icmp::is_query(kind),
            (L3::V6 { .. }, Some((kind, _))) => icmpv6::is_query(kind),
        };
        let one_source = match self.src() {
            IpAddr::V4(src) => {
                let reserved = src.octets()[0] >= 240;
                !(src.is_unspecified() || src.is_multicast() || src.is_loopback() || reserved)
            }
            IpAddr::V6(src) => !(src.is_unspecified() || src.is_multicast()),
        };
        kind_allows && one_source && !matches!(self.fragment, Fragment::Later { .. })
    }

    fn is_to_group(&self) -> bool {
        let dst = self.dst();
        self.l2.dst.is_multicast() || dst.is_multicast() || dst == IpAddr::V4(Ipv4Addr::BROADCAST)
    }
}

/// Parses the frame whose contiguous head is `frame` and which is `total_len` bytes long over
/// all its segments. At least `min(total_len, HEAD_LEN)` bytes of head are needed; with fewer
/// a good frame may be called truncated.
///
/// # Errors
/// The first fault met, from the outside in.
pub fn parse(frame: &[u8], total_len: usize) -> Result<Headers, ParseError> {
    parse_at(frame, 0, total_len)
}

/// Parses the Ethernet frame that starts at `offset` of a buffer, as the one inside a VXLAN
/// packet does. `total_len` is where it ends, counted like all offsets from the buffer's
/// start.
///
/// # Errors
/// The first fault met, from the outside in.
pub fn parse_at(buffer: &[u8], offset: usize, total_len: usize) -> Result<Headers, ParseError> {
    // Offsets have 16 bits, and headers further out than that are beyond every limit.
    let head_len = buffer.len().min(total_len).min(usize::from(u16::MAX));
    let head = &buffer[..head_len];
    let bytes = head.get(offset..).ok_or(ParseError::TruncatedEthernet)?;
    let (l2, payload) = Ethernet::new(bytes)?;
    let frame = Frame {
        head,
        l3: offset + ethernet::HEADER_LEN,
        total_len,
    };
    let mut headers = frame.headers(l2.addresses(), l2.ether_type());
    match headers.ether_type {
        ETHER_TYPE_IPV4 => parse_ipv4(&frame, payload, &mut headers)?,
        ETHER_TYPE_IPV6 => parse_ipv6(&frame, payload, &mut headers)?,
        ETHER_TYPE_ARP => {
            let packet = Arp::new(payload)?;
            headers.kind = L3::Arp {
                operation: packet.operation(),
            };
            headers.src_bytes = ipv6::v4_mapped(packet.sender_ip());
            headers.dst_bytes = ipv6::v4_mapped(packet.target_ip());
            headers.l4_offset = narrow(frame.l3 + arp::PACKET_LEN);
            headers.payload_offset = headers.l4_offset;
        }
        _ => return Err(ParseError::UnknownEtherType),
    }
    Ok(headers)
}

/// Parses the IP packet that starts at `offset` of a buffer, without a frame of its own, as the
/// one inside a GRE or GTP-U packet does; Ethernet addresses are zero. `total_len` is where it
/// may end at most.
///
/// # Errors
/// The first fault met, from the outside in; [`ParseError::UnknownEtherType`] for a version
/// that is neither 4 nor 6.
pub fn parse_ip_at(buffer: &[u8], offset: usize, total_len: usize) -> Result<Headers, ParseError> {
    let head_len = buffer.len().min(total_len).min(usize::from(u16::MAX));
    let head = &buffer[..head_len];
    let bytes = head.get(offset..).ok_or(ParseError::TruncatedIpv4)?;
    let frame = Frame {
        head,
        l3: offset,
        total_len,
    };
    let none = EthernetHeader {
        dst: MacAddr::ZERO,
        src: MacAddr::ZERO,
    };
    let version = bytes.first().map(|first| first >> 4);
    let mut headers;
    match version {
        Some(4) => {
            headers = frame.headers(none, ETHER_TYPE_IPV4);
            parse_ipv4(&frame, bytes, &mut headers)?;
        }
        Some(6) => {
            headers = frame.headers(none, ETHER_TYPE_IPV6);
            parse_ipv6(&frame, bytes, &mut headers)?;
        }
        Some(_) => return Err(ParseError::UnknownEtherType),
        None => return Err(ParseError::TruncatedIpv4),
    }
    Ok(headers)
}

/// The frame under the parser's hand.
struct Frame<'a> {
    /// The buffer's contiguous head, at most 65535 bytes.
    head: &'a [u8],
    /// Where ARP or IP starts: inside `head`, or just at its end.
    l3: usize,
    /// Where the frame ends, over all segments.
    total_len: usize,
}

impl Frame<'_> {
    /// Headers that say no more than where they start.
    fn headers(&self, l2: EthernetHeader, ether_type: u16) -> Headers {
        Headers {
            l2,
            ether_type,
            kind: L3::Arp { operation: 0 },
            l3_offset: narrow(self.l3),
            l4_offset: 0,
            payload_offset: 0,
            protocol: 0,
            ttl: 0,
            dscp_ecn: 0,
            dont_fragment: false,
            ip_total_len: 0,
            src_bytes: [0; 16],
            dst_bytes: [0; 16],
            src_port: 0,
            dst_port: 0,
            icmp: None,
            tcp_flags: TcpFlags::default(),
            sctp: None,
            fragment: Fragment::None,
            fragment_id: 0,
        }
    }
}

/// Offsets inside a head of at most 65535 bytes fit.
#[inline]
fn narrow(offset: usize) -> u16 {
    debug_assert!(offset <= usize::from(u16::MAX), "offset beyond the head");
    offset as u16
}

fn parse_ipv4(frame: &Frame<'_>, bytes: &[u8], out: &mut Headers) -> Result<(), ParseError> {
    let ip = Ipv4::new(bytes)?;
    let total_len = usize::from(ip.total_len());
    if frame.l3 + total_len > frame.total_len {
        return Err(ParseError::BadIpv4Length);
    }
    if !ip.checksum_ok() {
        return Err(ParseError::BadIpv4Checksum);
    }
    out.kind = L3::V4 {
        options: !ip.options().is_empty(),
    };
    out.protocol = ip.protocol();
    out.ttl = ip.ttl();
    out.dscp_ecn = ip.tos();
    out.dont_fragment = ip.dont_fragment();
    out.ip_total_len = u32::from(ip.total_len());
    out.src_bytes = ipv6::v4_mapped(ip.src());
    out.dst_bytes = ipv6::v4_mapped(ip.dst());
    out.fragment_id = u32::from(ip.id());
    let payload_len = total_len - ip.header_len();
    out.fragment = fragment(
        ip.fragment_offset(),
        ip.more_fragments(),
        payload_len,
        ip.protocol(),
    )?;
    parse_l4(frame, frame.l3 + ip.header_len(), out)
}

fn parse_ipv6(frame: &Frame<'_>, bytes: &[u8], out: &mut Headers) -> Result<(), ParseError> {
    let ip = Ipv6::new(bytes)?;
    let total_len = ipv6::HEADER_LEN + usize::from(ip.payload_len());
    if frame.l3 + total_len > frame.total_len {
        return Err(ParseError::BadIpv6Length);
    }
    out.kind = L3::V6 {
        flow_label: ip.flow_label(),
        fragment_header: None,
    };
    out.protocol = ip.next_header();
    out.ttl = ip.hop_limit();
    out.dscp_ecn = ip.traffic_class();
    out.dont_fragment = true;
    out.ip_total_len = total_len as u32;
    out.src_bytes = ip.src();
    out.dst_bytes = ip.dst();
    if ipv6::is_v4_mapped(&out.src_bytes) || ipv6::is_v4_mapped(&out.dst_bytes) {
        return Err(ParseError::MappedIpv6Address);
    }
    let mut l4 = frame.l3 + ipv6::HEADER_LEN;
    if ipv6::is_extension(out.protocol) {
        l4 = walk_extensions(frame, l4, out)?;
    }
    parse_l4(frame, l4, out)
}

/// Steps over IPv6 extension headers from `start`; returns where they end. Stops behind the
/// fragment header of a later fragment: what follows there is no header.
#[cold]
fn walk_extensions(
    frame: &Frame<'_>,
    start: usize,
    out: &mut Headers,
) -> Result<usize, ParseError> {
    let end = out.l3_end();
    let packet = &frame.head[..end.min(frame.head.len())];
    let mut at = start;
    let mut fragmented = false;
    for _ in 0..MAX_EXTENSIONS {
        let kind = out.protocol;
        if !ipv6::is_extension(kind) {
            return Ok(at);
        }
        let bytes = packet.get(at..).ok_or(ParseError::TruncatedIpv6Extension)?;
        if kind == protocol::FRAGMENT {
            let header = FragmentHeader::new(bytes)?;
            if std::mem::replace(&mut fragmented, true) {
                return Err(ParseError::BadIpv6Extension);
            }
            if let L3::V6 {
                fragment_header, ..
            } = &mut out.kind
            {
                *fragment_header = Some(narrow(at));
            }
            at += ipv6::FRAGMENT_LEN;
            out.protocol = header.next_header();
            out.fragment_id = header.id();
            out.fragment = fragment(
                header.offset(),
                header.more_fragments(),
                end - at,
                out.protocol,
            )?;
            if matches!(out.fragment, Fragment::Later { .. }) {
                return Ok(at);
            }
        } else {
            let header = Extension::new(kind, bytes)?;
            let misplaced = kind == protocol::HOP_BY_HOP && at != start;
            // Type 0 with segments left is deprecated, to be refused (RFC 5095).
            let live_type_0 = kind == protocol::ROUTING
                && header
                    .routing()
                    .is_some_and(|(kind, left)| kind == 0 && left > 0);
            if misplaced || live_type_0 {
                return Err(ParseError::BadIpv6Extension);
            }
            at += header.header_len();
            out.protocol = header.next_header();
        }
        if at - start > MAX_EXTENSION_BYTES {
            return Err(ParseError::TooManyExtensions);
        }
    }
    if ipv6::is_extension(out.protocol) {
        return Err(ParseError::TooManyExtensions);
    }
    Ok(at)
}

/// Judges fragment fields; an "atomic" fragment, first and last in one, is none (RFC 6946).
fn fragment(
    offset: u16,
    more: bool,
    payload_len: usize,
    protocol: u8,
) -> Result<Fragment, ParseError> {
    if offset == 0 && !more {
        return Ok(Fragment::None);
    }
    let beyond = usize::from(offset) + payload_len > usize::from(u16::MAX);
    let ragged = more && (payload_len == 0 || !payload_len.is_multiple_of(8));
    // At eight bytes in, it would overwrite the flags of a TCP header that the first fragment
    // had shown (RFC 3128).
    let overwrites_tcp = protocol == protocol::TCP && offset == 8;
    if beyond || ragged || overwrites_tcp {
        return Err(ParseError::BadFragment);
    }
    Ok(if offset == 0 {
        Fragment::First
    } else {
        Fragment::Later { offset }
    })
}

/// Reads the transport header at `l4`, which options and extension headers end at.
fn parse_l4(frame: &Frame<'_>, l4: usize, out: &mut Headers) -> Result<(), ParseError> {
    let end = out.l3_end();
    // What the head holds of the packet, padding left out.
    let bytes = frame.head[..end.min(frame.head.len())]
        .get(l4..)
        .unwrap_or(&[]);
    out.l4_offset = narrow(l4);
    out.payload_offset = out.l4_offset;
    if matches!(out.fragment, Fragment::Later { .. }) {
        return Ok(());
    }
    let header_len = match (out.protocol, out.kind) {
        (protocol::TCP, _) => {
            let tcp = Tcp::new(bytes)?;
            out.src_port = tcp.src_port();
            out.dst_port = tcp.dst_port();
            out.tcp_flags = tcp.flags();
            tcp.header_len()
        }
        (protocol::UDP, _) => {
            let udp = Udp::new(bytes)?;
            out.src_port = udp.src_port();
            out.dst_port = udp.dst_port();
            // A first fragment's length is that of the whole datagram. Shorter than the
            // packet is allowed: the surplus is UDP options (RFC 9868).
            if out.fragment == Fragment::None && usize::from(udp.length()) > end - l4 {
                return Err(ParseError::BadUdpLength);
            }
            udp::HEADER_LEN
        }
        (protocol::SCTP, _) => {
            let sctp = Sctp::new(bytes)?;
            out.src_port = sctp.src_port();
            out.dst_port = sctp.dst_port();
            out.sctp = Chunk::first(sctp.tag(), &bytes[sctp::HEADER_LEN..]);
            sctp::HEADER_LEN
        }
        (protocol::ICMP, L3::V4 { .. }) => {
            let message = Icmp::new(bytes)?;
            out.icmp = Some((message.kind(), message.code()));
            if icmp::is_echo(message.kind()) {
                out.src_port = message.identifier();
            }
            icmp::HEADER_LEN
        }
        (protocol::ICMPV6, L3::V6 { .. }) => {
            let message = Icmp::new(bytes)?;
            out.icmp = Some((message.kind(), message.code()));
            if icmpv6::is_echo(message.kind()) {
                out.src_port = message.identifier();
            }
            icmp::HEADER_LEN
        }
        _ => 0,
    };
    out.payload_offset = narrow(l4 + header_len);
    Ok(())
}

/// The VXLAN header of a packet, and where the frame inside lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vxlan {
    /// The 24-bit network identifier.
    pub vni: u32,
    /// Where the inner frame starts.
    pub inner_offset: u16,
    /// Where it ends by the UDP length: `total_len` for [`parse_at`].
    pub inner_end: usize,
}

/// Reads the VXLAN header behind the UDP header that `headers`, of the same `frame`, found.
/// That the port is the overlay's is for the caller to know.
///
/// # Errors
/// [`ParseError::NotVxlan`] for a fragment or something else than UDP,
/// [`ParseError::TruncatedVxlan`], [`ParseError::BadVxlanFlags`].
pub fn parse_vxlan(frame: &[u8], headers: &Headers) -> Result<Vxlan, ParseError> {
    if headers.protocol != protocol::UDP
        || headers.fragment != Fragment::None
        || !(headers.is_v4() || headers.is_v6())
    {
        return Err(ParseError::NotVxlan);
    }
    let l4 = usize::from(headers.l4_offset);
    let udp = Udp::new(frame.get(l4..).unwrap_or(&[])).map_err(|_| ParseError::NotVxlan)?;
    let inner_end = l4 + usize::from(udp.length());
    let payload = usize::from(headers.payload_offset);
    let head = &frame[..inner_end.min(frame.len())];
    let header = VxlanHeader::new(head.get(payload..).unwrap_or(&[]))?;
    let inner = payload + vxlan::HEADER_LEN;
    let inner_offset = u16::try_from(inner).map_err(|_| ParseError::TruncatedVxlan)?;
    Ok(Vxlan {
        vni: header.vni(),
        inner_offset,
        inner_end,
    })
}
