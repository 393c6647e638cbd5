//! Named small clusters for tests and benchmarks: node N has the underlay addresses
//! 192.168.77.N and fd77::N, and the pod ranges 10.244.N.0/24 and fd00:10:244:N::/64; pod P of
//! it has the addresses .P and ::P, link and endpoint number P.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use crate::conntrack::{Limits, PortPool};
use crate::ids::{EndpointId, IdentityId, LinkId, PeerId};
use crate::slow::Shared;
use crate::snapshot::{Endpoint, Hop, Node, Peer, Prefix, RemotePod, router_mac};
use crate::wire::ethernet::MacAddr;

/// The overlay port of all fixtures.
pub const OVERLAY_PORT: u16 = 8472;

/// The link number of every fixture node's one uplink.
pub const UPLINK: LinkId = LinkId(0);

/// The number of every fixture node's host link.
pub const HOST_LINK: LinkId = LinkId(99);

/// What the workers of a fixture node share: room for 3072 connections.
#[must_use]
pub fn shared() -> Arc<Shared> {
    let ports = PortPool::new(61_000..=61_999);
    Arc::new(Shared::new(Limits::new(3072), ports, 4, || {}))
}

/// The underlay address of a node.
#[must_use]
pub fn underlay(node: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(192, 168, 77, node))
}

/// The IPv4 address of a pod.
#[must_use]
pub fn pod_v4(node: u8, pod: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, node, pod)
}

/// The IPv6 address of a pod.
#[must_use]
pub fn pod_v6(node: u8, pod: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x10, 0x244, node.into(), 0, 0, 0, pod.into())
}

/// The pod ranges of a node.
#[must_use]
pub fn pod_prefixes(node: u8) -> Vec<Prefix> {
    [
        Prefix::new(pod_v4(node, 0).into(), 24),
        Prefix::new(pod_v6(node, 0).into(), 64),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// MAC of a node's uplink.
#[must_use]
pub fn uplink_mac(node: u8) -> MacAddr {
    MacAddr([0x02, 0x11, 0, 0, 0, node])
}

/// MAC of a pod.
#[must_use]
pub fn pod_mac(node: u8, pod: u8) -> MacAddr {
    MacAddr([0x02, 0x22, 0, 0, node, pod])
}

/// MAC of the host's end of a pod's veth.
#[must_use]
pub fn gateway_mac(node: u8, pod: u8) -> MacAddr {
    MacAddr([0x02, 0x33, 0, 0, node, pod])
}

/// MAC of the host link's end in the node's own network stack.
#[must_use]
pub fn host_mac(node: u8) -> MacAddr {
    MacAddr([0x02, 0x44, 0, 0, 0, node])
}

/// The IPv6 address of a node, beside [`underlay`].
#[must_use]
pub fn node_v6(node: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, node.into()))
}

/// A node's own network stack as its datapath sees it.
#[must_use]
pub fn host(node: u8) -> Endpoint {
    Endpoint {
        id: EndpointId::HOST,
        link: HOST_LINK,
        mac: host_mac(node),
        gateway_mac: MacAddr([0x02, 0x55, 0, 0, 0, node]),
        addresses: vec![underlay(node), node_v6(node)],
        identity: IdentityId::HOST,
        mtu: 1450,
    }
}

/// Identity of a pod.
#[must_use]
pub fn identity(node: u8, pod: u8) -> IdentityId {
    IdentityId::new(1000 * u32::from(node) + u32::from(pod)).unwrap_or(IdentityId::UNMANAGED)
}

/// A node as it sees itself.
#[must_use]
pub fn node(node: u8) -> Node {
    Node {
        router_mac: router_mac(underlay(node)),
        overlay_port: OVERLAY_PORT,
        addresses: vec![underlay(node), node_v6(node)],
        pod_prefixes: pod_prefixes(node),
    }
}

/// A pod as its own node sees it.
#[must_use]
pub fn endpoint(node: u8, pod: u8) -> Endpoint {
    Endpoint {
        id: EndpointId(pod.into()),
        link: LinkId(pod.into()),
        mac: pod_mac(node, pod),
        gateway_mac: gateway_mac(node, pod),
        addresses: vec![pod_v4(node, pod).into(), pod_v6(node, pod).into()],
        identity: identity(node, pod),
        mtu: 1450,
    }
}

/// Node `far` as node `near` sees it.
#[must_use]
pub fn peer(near: u8, far: u8) -> Peer {
    Peer {
        id: PeerId(far.into()),
        router_mac: router_mac(underlay(far)),
        addresses: vec![underlay(far), node_v6(far)],
        pod_prefixes: pod_prefixes(far),
        hop: Some(Hop {
            uplink: 0,
            outer_src: underlay(near),
            outer_dst: underlay(far),
            src_mac: uplink_mac(near),
            dst_mac: Some(uplink_mac(far)),
            mtu: 1500,
        }),
    }
}

/// A pod as other nodes see it, by its IPv4 address.
#[must_use]
pub fn remote(node: u8, pod: u8) -> (IpAddr, RemotePod) {
    let known = RemotePod {
        peer: PeerId(node.into()),
        identity: identity(node, pod),
    };
    (pod_v4(node, pod).into(), known)
}

/// A flow key that only its number tells from others.
#[must_use]
pub fn flow_key(number: u16) -> crate::flow::FlowKey {
    let endpoint = endpoint(1, 1);
    let mut headers = crate::parse::Headers {
        l2: crate::wire::ethernet::EthernetHeader {
            dst: endpoint.gateway_mac,
            src: endpoint.mac,
        },
        ether_type: crate::wire::ethernet::ETHER_TYPE_IPV4,
        kind: crate::parse::L3::V4 { options: false },
        l3_offset: 14,
        l4_offset: 34,
        payload_offset: 42,
        protocol: crate::wire::protocol::UDP,
        ttl: 64,
        dscp_ecn: 0,
        dont_fragment: false,
        ip_total_len: 28,
        src_bytes: [0; 16],
        dst_bytes: [0; 16],
        src_port: number,
        dst_port: 53,
        icmp: None,
        tcp_flags: crate::parse::TcpFlags(0),
        sctp: None,
        fragment: crate::parse::Fragment::None,
        fragment_id: 0,
    };
    headers.src_bytes[12..].copy_from_slice(&pod_v4(1, 1).octets());
    crate::flow::FlowKey::new(&crate::classify::Source::Pod(&endpoint), &headers)
}
