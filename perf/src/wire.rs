//! The links between nodes.
//!
//! Two nodes share one veth pair, `eth0` in both. One node, or more than two, are joined by a
//! bridge in a namespace of its own, `<lab>-wire`: never in a node, whose kernel must stay free
//! of anything that forwards. The bridge stands for the switch of a data centre. A host outside
//! the cluster may stand on it too, in `<lab>-outside`: the nodes' default gateway, with an
//! address of its own behind itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::cmd::Cmd;
use crate::lab::{LabOptions, Underlay};

/// The uplink's name in every node.
pub const UPLINK: &str = "eth0";

/// Offloads that let a veth carry frames which no real wire does: whole super-packets.
const SEGMENTATION: [&str; 5] = [
    "tso",
    "gso",
    "tx-udp_tnl-segmentation",
    "tx-udp_tnl-csum-segmentation",
    "tx-udp-segmentation",
];

/// A node's IPv4 address on the wire, a /24.
pub fn address_v4(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 77, node)
}

/// A node's IPv6 address on the wire, a /64.
pub fn address_v6(node: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(node))
}

/// The number of the outside host on the wire, beyond every node's.
const OUTSIDE: u8 = 250;

/// The outside host's addresses on the wire.
pub fn outside_on_wire() -> [IpAddr; 2] {
    [address_v4(OUTSIDE).into(), address_v6(OUTSIDE).into()]
}

/// The outside host's addresses that only a router leads to (RFC 5737, RFC 3849).
pub fn outside_beyond() -> [IpAddr; 2] {
    [
        Ipv4Addr::new(203, 0, 113, 1).into(),
        Ipv6Addr::new(0x2001, 0xdb8, 0x113, 0, 0, 0, 0, 1).into(),
    ]
}

/// The name of the namespace of the outside host.
pub fn outside_namespace(lab: &str) -> String {
    format!("{lab}-outside")
}

/// The name of the namespace with the bridge.
pub fn namespace(lab: &str) -> String {
    format!("{lab}-wire")
}

/// Joins the nodes' namespaces, which exist and have no links yet, and gives them addresses.
///
/// # Errors
/// The `ip` or `ethtool` command that failed.
pub fn build(lab: &str, nodes: &[String], options: &LabOptions) -> Result<()> {
    let mtu = options.mtu;
    if let ([one, two], false) = (nodes, options.outside) {
        ip(&format!(
            "link add name {UPLINK} mtu {mtu} netns {one} type veth \
             peer name {UPLINK} mtu {mtu} netns {two}"
        ))?;
    } else {
        let wire = namespace(lab);
        ip(&format!("netns add {wire}"))?;
        quiet(&wire)?;
        ip(&format!(
            "-n {wire} link add name switch0 mtu {mtu} type bridge stp_state 0"
        ))?;
        ip(&format!("-n {wire} link set switch0 up"))?;
        for (number, node) in (1..).zip(nodes) {
            let port = format!("port{number}");
            ip(&format!(
                "link add name {UPLINK} mtu {mtu} netns {node} type veth \
                 peer name {port} mtu {mtu} netns {wire}"
            ))?;
            ip(&format!("-n {wire} link set {port} master switch0 up"))?;
            if options.real_packets {
                no_segmentation(&wire, &port)?;
            }
        }
    }
    for (number, node) in (1u8..).zip(nodes) {
        address(node, number, options)?;
    }
    if options.outside {
        outside(lab, nodes, options)?;
    }
    Ok(())
}

/// The host outside, and the nodes' default routes to it.
fn outside(lab: &str, nodes: &[String], options: &LabOptions) -> Result<()> {
    let (wire, host, mtu) = (namespace(lab), outside_namespace(lab), options.mtu);
    ip(&format!("netns add {host}"))?;
    ip(&format!(
        "link add name {UPLINK} mtu {mtu} netns {host} type veth \
         peer name outside mtu {mtu} netns {wire}"
    ))?;
    ip(&format!("-n {wire} link set outside master switch0 up"))?;
    if options.real_packets {
        no_segmentation(&wire, "outside")?;
    }
    address(&host, OUTSIDE, options)?;
    for (beyond, on_wire) in outside_beyond().into_iter().zip(outside_on_wire()) {
        let unused = if beyond.is_ipv4() {
            Underlay::V6
        } else {
            Underlay::V4
        };
        if options.underlay == unused {
            continue;
        }
        let (length, family) = if beyond.is_ipv4() { (32, "-4") } else { (128, "-6") };
        ip(&format!("-n {host} address add {beyond}/{length} dev lo"))?;
        for node in nodes {
            ip(&format!("-n {node} {family} route add default via {on_wire}"))?;
        }
    }
    Ok(())
}

fn address(node: &str, number: u8, options: &LabOptions) -> Result<()> {
    if options.real_packets {
        no_segmentation(node, UPLINK)?;
    }
    ip(&format!("-n {node} link set lo up"))?;
    ip(&format!("-n {node} link set {UPLINK} up"))?;
    if options.underlay != Underlay::V6 {
        let address = address_v4(number);
        ip(&format!("-n {node} address add {address}/24 dev {UPLINK}"))?;
    }
    if options.underlay != Underlay::V4 {
        let address = address_v6(number);
        // Duplicate address detection would keep the address tentative for a second.
        ip(&format!(
            "-n {node} address add {address}/64 dev {UPLINK} nodad"
        ))?;
    }
    Ok(())
}

/// Turns off what would let frames above the MTU cross a veth in one piece.
///
/// # Errors
/// ethtool's, where the kernel refuses.
pub fn no_segmentation(namespace: &str, link: &str) -> Result<()> {
    let offs = SEGMENTATION.iter().flat_map(|feature| [*feature, "off"]);
    Cmd::new("ethtool")
        .args(["-K", link])
        .args(offs)
        .prefix(["ip", "netns", "exec", namespace])
        .run()
        .map(drop)
}

/// A namespace that says nothing by itself: no IPv6 addresses of its own on its links.
fn quiet(namespace: &str) -> Result<()> {
    let off = "for x in all default; do echo 1 > /proc/sys/net/ipv6/conf/$x/disable_ipv6; done";
    Cmd::new("sh")
        .args(["-ec", off])
        .prefix(["ip", "netns", "exec", namespace])
        .run()
        .map(drop)
}

pub(crate) fn ip(arguments: &str) -> Result<()> {
    Cmd::line(&format!("ip {arguments}")).run().map(drop)
}
