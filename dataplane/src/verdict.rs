//! The one list of ways in which a packet can end without being forwarded.
//!
//! Each reason is a counter of each worker and a stable name for metrics and `skeinctl drops`.

use crate::wire::ParseError;

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The stable name, as metrics and tools show it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What it means, in a sentence.
            #[must_use]
            pub fn explanation(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc,)+).trim_ascii(),)+ }
            }
        }
    };
}

drop_reasons! {
    // What the parser refuses.
    /// The frame is shorter than an Ethernet header.
    TruncatedEthernet = "truncated_ethernet",
    /// Neither ARP nor IP: VLAN tags, LLDP and the like.
    UnknownEtherType = "unknown_ethertype",
    /// An ARP packet that is cut short.
    TruncatedArp = "truncated_arp",
    /// An ARP packet that is not for IPv4 over Ethernet.
    BadArp = "bad_arp",
    /// An IPv4 header that is cut short.
    TruncatedIpv4 = "truncated_ipv4",
    /// The EtherType says IPv4, the version field does not.
    BadIpv4Version = "bad_ipv4_version",
    /// An IPv4 header length below 20 bytes.
    BadIpv4HeaderLength = "bad_ipv4_header_length",
    /// An IPv4 total length that the header or the frame contradicts.
    BadIpv4Length = "bad_ipv4_length",
    /// An IPv4 header whose checksum is wrong.
    BadIpv4Checksum = "bad_ipv4_checksum",
    /// An IPv6 header that is cut short.
    TruncatedIpv6 = "truncated_ipv6",
    /// The EtherType says IPv6, the version field does not.
    BadIpv6Version = "bad_ipv6_version",
    /// An IPv6 payload length longer than the frame.
    BadIpv6Length = "bad_ipv6_length",
    /// An IPv4-mapped address in an IPv6 header.
    MappedIpv6Address = "mapped_ipv6_address",
    /// An IPv6 extension header that is cut short.
    TruncatedIpv6Extension = "truncated_ipv6_extension",
    /// An IPv6 extension header where it may not stand.
    BadIpv6Extension = "bad_ipv6_extension",
    /// More IPv6 extension headers than any sender needs.
    TooManyExtensions = "too_many_extensions",
    /// A fragment whose offset or length cannot be.
    BadFragment = "bad_fragment",
    /// A TCP, UDP, SCTP or ICMP header that is cut short.
    TruncatedL4 = "truncated_l4",
    /// A TCP data offset that cannot be.
    BadTcpOffset = "bad_tcp_offset",
    /// A UDP length that contradicts the packet's.
    BadUdpLength = "bad_udp_length",
    /// The uplink handed up a packet that is no whole UDP datagram to the overlay port.
    NotVxlan = "not_vxlan",
    /// A VXLAN header that is cut short.
    TruncatedVxlan = "truncated_vxlan",
    /// A VXLAN header without a valid VNI (RFC 7348 section 5).
    BadVxlanFlags = "bad_vxlan_flags",
    /// A neighbour discovery message that is cut short.
    TruncatedNdp = "truncated_ndp",
    /// A neighbour solicitation that RFC 4861 section 7.1.1 says to discard.
    BadNdp = "bad_ndp",
    /// Bytes behind an IP packet of several segments: that is no padding.
    TrailingBytes = "trailing_bytes",
    /// Multicast: the pod network carries none.
    Multicast = "multicast",
    /// Broadcast, by its Ethernet or IPv4 address: the pod network carries none.
    Broadcast = "broadcast",

    // What the source may not do.
    /// The source MAC is not the pod's own.
    SpoofedMac = "spoofed_mac",
    /// The source address is not one of the pod's own.
    SpoofedAddress = "spoofed_address",
    /// An ARP or neighbour message for something else than the gateway.
    ForeignNeighbour = "foreign_neighbour",
    /// The link has no endpoint in the tables (yet, or any more).
    UnknownLink = "unknown_link",

    // What the overlay refuses.
    /// VXLAN from an outer address that is no known node.
    UnknownPeer = "unknown_peer",
    /// VXLAN whose inner source does not belong to the node that sent it.
    ForeignInnerSource = "foreign_inner_source",
    /// VXLAN whose inner frame is not addressed to this node's router MAC.
    ForeignRouterMac = "foreign_router_mac",
    /// VXLAN whose VNI is no identity.
    BadIdentity = "bad_identity",
    /// The outer header says congestion, the inner transport cannot (RFC 6040 section 4.2).
    EcnUnsupported = "ecn_unsupported",
    /// To the overlay's port of a node from inside the pod network, where it would forge identities.
    OverlayPort = "overlay_port",
    /// The kernel forwarded it into the host link, in the name of a pod or of another node.
    ForwardedClusterSource = "forwarded_cluster_source",
    /// By an uplink and without a tunnel, in the name of a pod or of this node.
    ForeignPlainSource = "foreign_plain_source",
    /// By an uplink and without a tunnel, and neither for a Service nor an answer to a connection.
    NotForUs = "not_for_us",
    /// From a node's own address to a node's own address: that is not the pod network's traffic.
    NodeToNode = "node_to_node",
    /// From the overlay to an address that is not on this node: nothing is forwarded twice.
    OverlayTransit = "overlay_transit",

    // What policies say.
    /// The receiving pod's network policies allow it by none of their rules.
    PolicyDeniedIngress = "policy_denied_ingress",
    /// The sending pod's network policies allow it by none of their rules.
    PolicyDeniedEgress = "policy_denied_egress",
    // What Services refuse.
    /// To a Service that has no endpoint to serve it.
    NoEndpoints = "no_endpoints",
    /// To a Service whose traffic policy is Local, without an endpoint on this node.
    NoLocalEndpoints = "no_local_endpoints",
    /// To a load balancer's address from outside of its source ranges.
    SourceRangeDenied = "source_range_denied",
    /// To the address of a Service, on a port or protocol that it does not have.
    NoServicePort = "no_service_port",
    // What connections refuse.
    /// An ICMP error that quotes a packet of no connection that is known.
    IcmpErrorUnrelated = "icmp_error_unrelated",
    /// A fragment whose first never came, or came too late.
    FragmentWithoutFirst = "fragment_without_first",
    /// A fragment of an SCTP packet that is to get other ports: its checksum spans the others.
    SctpFragment = "sctp_fragment",
    /// The table of connections is full of ones that are worth more.
    ConnectionsFull = "connections_full",
    /// The endpoint has its share of connections already, and the table is not empty enough for more.
    ConnectionShareUsed = "connection_share_used",
    /// No port is left for the translated source towards this destination.
    NoFreePort = "no_free_port",
    /// The source is to be the node's address, which has none of that IP version.
    NoNodeAddress = "no_node_address",

    // What the route says.
    /// No endpoint, peer or route has this destination.
    NoRoute = "no_route",
    /// The next hop's MAC address is not known (yet).
    NeighbourUnresolved = "neighbour_unresolved",
    /// The TTL or hop limit ran out.
    TtlExceeded = "ttl_exceeded",
    /// Too large for the path, and not to be fragmented.
    TooBig = "too_big",
    /// From the overlay, too large for the pod, and not to be fragmented.
    TooBigForPod = "too_big_for_pod",
    /// No free frame for the fragments of a packet that is too large for the path.
    NoFrameForFragment = "no_frame_for_fragment",
    /// Too large for the path by so much that it would be cut into more fragments than allowed.
    TooManyFragments = "too_many_fragments",
    /// To the gateway itself, which answers whole echo requests and nothing else.
    GatewayRefused = "gateway_refused",
    /// No room in front of the packet for the encapsulation.
    NoHeadroom = "no_headroom",
    /// A checksum that was to be completed lies outside the packet.
    BadChecksumField = "bad_checksum_field",

    // What the machine could not take.
    /// The egress link's transmit ring was full.
    TransmitFull = "transmit_full",
    /// The egress link was closed.
    LinkClosed = "link_closed",
    /// The ring to the worker that owns the egress link was full.
    HandoverFull = "handover_full",
}

impl From<ParseError> for DropReason {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::TruncatedEthernet => Self::TruncatedEthernet,
            ParseError::UnknownEtherType => Self::UnknownEtherType,
            ParseError::TruncatedArp => Self::TruncatedArp,
            ParseError::BadArp => Self::BadArp,
            ParseError::TruncatedIpv4 => Self::TruncatedIpv4,
            ParseError::BadIpv4Version => Self::BadIpv4Version,
            ParseError::BadIpv4HeaderLength => Self::BadIpv4HeaderLength,
            ParseError::BadIpv4Length => Self::BadIpv4Length,
            ParseError::BadIpv4Checksum => Self::BadIpv4Checksum,
            ParseError::TruncatedIpv6 => Self::TruncatedIpv6,
            ParseError::BadIpv6Version => Self::BadIpv6Version,
            ParseError::BadIpv6Length => Self::BadIpv6Length,
            ParseError::MappedIpv6Address => Self::MappedIpv6Address,
            ParseError::TruncatedIpv6Extension => Self::TruncatedIpv6Extension,
            ParseError::BadIpv6Extension => Self::BadIpv6Extension,
            ParseError::TooManyExtensions => Self::TooManyExtensions,
            ParseError::BadFragment => Self::BadFragment,
            ParseError::TruncatedL4 => Self::TruncatedL4,
            ParseError::BadTcpOffset => Self::BadTcpOffset,
            ParseError::BadUdpLength => Self::BadUdpLength,
            ParseError::NotVxlan => Self::NotVxlan,
            ParseError::TruncatedVxlan => Self::TruncatedVxlan,
            ParseError::BadVxlanFlags => Self::BadVxlanFlags,
            ParseError::TruncatedNdp => Self::TruncatedNdp,
            ParseError::BadNdp => Self::BadNdp,
        }
    }
}

/// How many reasons there are.
pub const DROP_REASONS: usize = DropReason::ALL.len();

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_numbers_dense() {
        let names: HashSet<_> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), DROP_REASONS);
        for (number, &reason) in DropReason::ALL.iter().enumerate() {
            assert_eq!(reason as usize, number);
        }
    }

    #[test]
    fn each_reason_explains_itself() {
        for reason in DropReason::ALL {
            assert!(reason.explanation().ends_with('.'), "{}", reason.name());
        }
    }
}
