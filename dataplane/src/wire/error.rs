//! The ways a frame can be malformed. One variant a fault, so that each has its own counter
//! and a reader of the counters knows what a peer sent.

use thiserror::Error;

/// Why a frame was refused by the parser or by a header view.
///
/// Small, `Copy`, carries no data: the offending frame is counted and dropped, never kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum ParseError {
    /// Fewer than 14 bytes of Ethernet header.
    #[error("frame is shorter than an Ethernet header")]
    TruncatedEthernet,
    /// Neither ARP, IPv4 nor IPv6; VLAN tags are among these.
    #[error("EtherType is not ARP, IPv4 or IPv6")]
    UnknownEtherType,
    /// Fewer than 28 bytes of ARP.
    #[error("ARP packet is cut short")]
    TruncatedArp,
    /// Hardware or protocol type or length is not Ethernet with IPv4.
    #[error("ARP packet is not for IPv4 over Ethernet")]
    BadArp,
    /// The IPv4 header, options included, does not fit.
    #[error("IPv4 header is cut short")]
    TruncatedIpv4,
    /// EtherType says IPv4, the version field does not.
    #[error("IPv4 version field is not 4")]
    BadIpv4Version,
    /// IHL below five words.
    #[error("IPv4 header length is below 20 bytes")]
    BadIpv4HeaderLength,
    /// Total length shorter than the header, or longer than the frame.
    #[error("IPv4 total length does not match the frame")]
    BadIpv4Length,
    /// The header checksum does not verify (RFC 1812 section 5.2.2).
    #[error("IPv4 header checksum is wrong")]
    BadIpv4Checksum,
    /// Fewer than 40 bytes of IPv6 header.
    #[error("IPv6 header is cut short")]
    TruncatedIpv6,
    /// EtherType says IPv6, the version field does not.
    #[error("IPv6 version field is not 6")]
    BadIpv6Version,
    /// Payload length longer than the frame.
    #[error("IPv6 payload length does not match the frame")]
    BadIpv6Length,
    /// An IPv4-mapped address in an IPv6 header: it would be taken for the IPv4 address.
    #[error("IPv6 header holds an IPv4-mapped address")]
    MappedIpv6Address,
    /// An extension header runs past the packet.
    #[error("IPv6 extension header is cut short")]
    TruncatedIpv6Extension,
    /// Hop-by-hop options not first, a second fragment header, a live type 0 routing header,
    /// or an authentication header of impossible length.
    #[error("IPv6 extension header is not allowed there")]
    BadIpv6Extension,
    /// More extension headers, or more bytes of them, than the stated limit.
    #[error("IPv6 extension header chain is too long")]
    TooManyExtensions,
    /// A fragment that ends beyond 65535 bytes, is no multiple of eight while more follow,
    /// or would overwrite a TCP header (RFC 3128).
    #[error("fragment offset or length is impossible")]
    BadFragment,
    /// The TCP, UDP, ICMP or SCTP header does not fit.
    #[error("transport header is cut short")]
    TruncatedL4,
    /// TCP data offset below five words or beyond the segment.
    #[error("TCP data offset is impossible")]
    BadTcpOffset,
    /// UDP length below eight or beyond the packet.
    #[error("UDP length does not match the packet")]
    BadUdpLength,
    /// Asked for VXLAN in a packet that is no whole UDP datagram.
    #[error("packet is no whole UDP datagram, so no VXLAN")]
    NotVxlan,
    /// Fewer than eight bytes of VXLAN header.
    #[error("VXLAN header is cut short")]
    TruncatedVxlan,
    /// The I flag is not set, so the VNI is not valid (RFC 7348 section 5).
    #[error("VXLAN header has no valid VNI")]
    BadVxlanFlags,
    /// The neighbour discovery message, or an option in it, does not fit.
    #[error("neighbour discovery message is cut short")]
    TruncatedNdp,
    /// A neighbour solicitation that RFC 4861 section 7.1.1 says to discard.
    #[error("neighbour solicitation is not valid")]
    BadNdp,
}
