//! Nodes → this node's own facts, and the peers with the way to them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use skein_dataplane::ids::PeerId;
use skein_dataplane::snapshot::{self, Exit, Hop, Peer, Prefix, SnapshotBuilder, router_mac};
use skein_dataplane::wire::ethernet::MacAddr;

use super::Inputs;
use crate::cidr::Cidr;
use crate::state::Node;

/// The address that a node's router MAC is derived from, and that peers prefer: IPv4 first.
#[must_use]
pub fn primary(node: &Node) -> Option<IpAddr> {
    let ips = || node.internal_ips.iter().copied();
    ips().find(IpAddr::is_ipv4).or_else(|| ips().next())
}

/// The pair of addresses between which two nodes tunnel: IPv4 if both have one, else IPv6.
#[must_use]
pub fn tunnel(own: &Node, peer: &Node) -> Option<(IpAddr, IpAddr)> {
    [true, false].into_iter().find_map(|ipv4| {
        let of = |node: &Node| {
            let ips = node.internal_ips.iter().copied();
            ips.into_iter().find(|ip| ip.is_ipv4() == ipv4)
        };
        Some((of(own)?, of(peer)?))
    })
}

pub(super) fn peers(
    inputs: &Inputs<'_>,
    faults: &mut Vec<String>,
) -> (snapshot::Node, BTreeMap<PeerId, Peer>) {
    let own = inputs.state.node(inputs.node);
    let node = snapshot::Node {
        router_mac: own.and_then(primary).map_or(MacAddr::ZERO, router_mac),
        overlay_port: inputs.overlay_port,
        addresses: own.map(|own| own.internal_ips.clone()).unwrap_or_default(),
        pod_prefixes: own
            .map(|own| own.pod_cidrs.iter().copied().filter_map(prefix).collect())
            .unwrap_or_default(),
    };
    let mut claims = Claims::default();
    if let Some(own) = own {
        claims.take(own, faults);
    }
    let mut peers = BTreeMap::new();
    for other in inputs.state.nodes() {
        if other.name == inputs.node {
            continue;
        }
        let (addresses, prefixes) = claims.take(other, faults);
        let (Some(&id), Some(primary)) = (inputs.peers.get(&other.name), primary(other)) else {
            continue;
        };
        let hop = own.and_then(|own| hop(inputs, own, other));
        peers.insert(
            id,
            Peer {
                id,
                router_mac: router_mac(primary),
                addresses,
                pod_prefixes: prefixes.into_iter().filter_map(prefix).collect(),
                hop,
            },
        );
    }
    (node, peers)
}

/// The ways out of the cluster.
pub(super) fn outside(inputs: &Inputs<'_>, builder: &mut SnapshotBuilder) {
    let exits = inputs.underlay.exits().iter().filter_map(|route| {
        let prefix = Prefix::new(route.destination, route.prefix)?;
        let exit = route.exit.as_ref().map(|exit| Exit {
            uplink: exit.uplink,
            gateway: exit.gateway,
            src_mac: exit.source_mac,
            mtu: exit.mtu,
        });
        Some((prefix, exit))
    });
    builder.set_exits(exits);
    builder.set_neighbours(inputs.underlay.outside());
    builder.set_masquerade(inputs.masquerade);
}

fn prefix(range: Cidr) -> Option<Prefix> {
    Prefix::new(range.address(), range.prefix())
}

fn hop(inputs: &Inputs<'_>, own: &Node, peer: &Node) -> Option<Hop> {
    let (outer_src, outer_dst) = tunnel(own, peer)?;
    let hop = inputs.underlay.hop(outer_dst).ok()?;
    let configured = match inputs.overlay_mtu {
        0 => u32::MAX,
        mtu => mtu,
    };
    Some(Hop {
        uplink: hop.uplink,
        outer_src,
        outer_dst,
        src_mac: hop.source_mac,
        dst_mac: hop.next_hop_mac,
        mtu: hop.mtu.min(configured),
    })
}

/// Who has which address and range already; the first by name keeps what two claim.
#[derive(Default)]
struct Claims {
    addresses: BTreeMap<IpAddr, String>,
    /// By first address; none overlaps another.
    ranges: BTreeMap<IpAddr, (Cidr, String)>,
}

impl Claims {
    fn take(&mut self, node: &Node, faults: &mut Vec<String>) -> (Vec<IpAddr>, Vec<Cidr>) {
        let name = &node.name;
        let mut addresses = Vec::new();
        for &ip in &node.internal_ips {
            match self.addresses.get(&ip) {
                Some(other) => faults.push(format!(
                    "node {name}: InternalIP {ip} is node {other}'s too, who keeps it"
                )),
                None => {
                    self.addresses.insert(ip, name.clone());
                    addresses.push(ip);
                }
            }
        }
        let mut ranges = Vec::new();
        for &range in &node.pod_cidrs {
            match self.overlapping(range) {
                Some((held, other)) => faults.push(format!(
                    "node {name}: podCIDR {range} overlaps {held} of node {other}, who keeps it"
                )),
                None => {
                    let entry = (range, name.clone());
                    self.ranges.insert(range.address(), entry);
                    ranges.push(range);
                }
            }
        }
        (addresses, ranges)
    }

    /// A range that shares an address with this one. Of two ranges that do, one holds the
    /// other; so it is the last that begins before, or the first that begins after.
    fn overlapping(&self, range: Cidr) -> Option<&(Cidr, String)> {
        let before = self.ranges.range(..=range.address()).next_back();
        let after = self.ranges.range(range.address()..).next();
        (before.into_iter().chain(after))
            .map(|(_, entry)| entry)
            .find(|(held, _)| held.overlaps(range))
    }
}
