//! The host link in the node's kernel: a veth pair and the routes into it.
//!
//! `skein0` is the end in the node's network stack, `skein0-dp` the datapath's. Routes to all pod
//! ranges, this node's and its peers', and to the addresses of Services point into `skein0` with the path's MTU and the node's own
//! address as source, by the gateway that pods have too, whose MAC stands in permanent neighbour
//! entries. Routes carry a protocol number of their own, so that an agent finds those of an
//! earlier one. Devices and routes stay when the agent stops: until the next one comes, what is
//! sent to pods is dropped and takes no other way.
//!
//! Addresses are the uplinks'; `skein0` has none. The node's other routes are left alone, and a
//! route of somebody else to the same range is reported and stays.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;

use skein_cni::ethtool::Ethtool;
use skein_cni::mac::MacAddr as DeviceMac;
use skein_cni::netlink::{Link, Netlink, NetlinkError, Route, Veth, VethEnd};
use skein_dataplane::hairpin::{GATEWAY_V4, GATEWAY_V6};
use skein_dataplane::snapshot::Snapshot;

use crate::cidr::Cidr;
use crate::endpoint::DISABLE_FEATURES;
use crate::mac::{self, MacAddr, fnv1a64};

/// The end in the node's network stack.
pub const HOST_END: &str = "skein0";

/// The datapath's end.
pub const OUR_END: &str = "skein0-dp";

/// Protocol number of our routes (`rtm_protocol`); nobody in `linux/rtnetlink.h` has it.
pub const ROUTE_PROTOCOL: u8 = 83;

/// The least MTU that IPv6 takes (RFC 8200 section 5).
const MIN_MTU: u32 = 1280;

/// Outer headers before the inner IP packet, in bytes, as the outer path counts them.
const OVERHEAD_IPV4: u32 = 50;
const OVERHEAD_IPV6: u32 = 70;

/// The pair, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostDevice {
    /// Index of the end in the node's stack.
    pub index: u32,
    /// Index of the datapath's end.
    pub our_index: u32,
    /// MAC of the end in the node's stack.
    pub mac: MacAddr,
    /// MAC of the datapath's end, the gateway's.
    pub gateway_mac: MacAddr,
    /// MTU of both, in bytes.
    pub mtu: u32,
}

/// A route that the node shall have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Where to.
    pub range: Cidr,
    /// Source of what the host sends there: the node's own address.
    pub source: IpAddr,
    /// MTU of the path, in bytes.
    pub mtu: u32,
}

/// The routes that follow from the published tables and this node's own ranges, of pods and of
/// Services; `own_mtu` is that of its pods, in bytes. None to a range of a family that the node has no address of.
#[must_use]
pub fn routes(tables: &Snapshot, own_ranges: &[Cidr], own_mtu: u32) -> Vec<Wanted> {
    let source = |ipv4: bool| {
        let addresses = tables.node().addresses.iter().copied();
        addresses.into_iter().find(|ip| ip.is_ipv4() == ipv4)
    };
    let own = own_ranges.iter().map(|&range| (range, own_mtu));
    let peers = tables.peers().flat_map(|peer| {
        let mtu = peer.hop.as_ref().map_or(own_mtu, |hop| {
            let ipv4 = hop.outer_dst.is_ipv4();
            let overhead = if ipv4 { OVERHEAD_IPV4 } else { OVERHEAD_IPV6 };
            hop.mtu.saturating_sub(overhead)
        });
        let ranges = peer.pod_prefixes.iter();
        ranges.filter_map(move |range| Some((Cidr::containing(range.address(), range.len())?, mtu)))
    });
    let mut wanted: Vec<Wanted> = (own.chain(peers))
        .filter_map(|(range, mtu)| {
            Some(Wanted {
                range,
                source: source(range.address().is_ipv4())?,
                mtu: mtu.max(MIN_MTU),
            })
        })
        .collect();
    wanted.sort_by_key(|wanted| (wanted.range.address(), wanted.range.prefix()));
    wanted
}

/// The kernel's side of the host link.
pub struct HostKernel {
    netlink: Netlink,
}

impl std::fmt::Debug for HostKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostKernel").finish_non_exhaustive()
    }
}

impl HostKernel {
    /// Connects to the kernel, in the network namespace of the calling thread.
    pub fn new() -> Result<Self, String> {
        let netlink = Netlink::open().map_err(|error| error.to_string())?;
        Ok(Self { netlink })
    }

    /// Finds the pair or makes it, and sets what of it is not as it shall be. Takes nothing up: a
    /// new pair has no program yet. The MACs follow from the node's name.
    pub fn ensure(&mut self, node: &str, mtu: u32) -> Result<HostDevice, String> {
        let mtu = mtu.max(MIN_MTU);
        self.ensure_pair(node, mtu)
            .map_err(|error| error.to_string())?
            .ok_or_else(|| {
                format!(
                    "device {HOST_END} is there and its other end is not {OUR_END}: \
                     somebody else's; remove it (ip link delete {HOST_END})"
                )
            })
    }

    fn ensure_pair(&mut self, node: &str, mtu: u32) -> Result<Option<HostDevice>, NetlinkError> {
        let hash = |end: &str| {
            let texts = ["host link", node, end];
            fnv1a64(texts.into_iter().flat_map(|text| text.bytes().chain([0])))
        };
        let macs = [HOST_END, OUR_END].map(|end| mac::from_hash(hash(end)));
        let ends = [HOST_END, OUR_END].map(|name| self.netlink.link_by_name(name));
        let [host, ours] = match ends {
            [Ok(Some(host)), Ok(Some(ours))] => [host, ours],
            [Ok(None), Ok(_)] => self.make_pair(macs, mtu)?,
            [Err(error), _] | [_, Err(error)] => return Err(error),
            [Ok(Some(_)), Ok(None)] => return Ok(None),
        };
        let paired = host.kind == "veth"
            && host.peer_index == Some(ours.index)
            && !host.peer_is_elsewhere
            && ours.peer_index == Some(host.index);
        if !paired {
            return Ok(None);
        }
        for (link, mac) in [(&host, macs[0]), (&ours, macs[1])] {
            let mac = DeviceMac::new(mac.0);
            if link.mac != Some(mac) {
                self.netlink.set_link_mac(link.index, mac)?;
            }
            if link.mtu != mtu {
                self.netlink.set_link_mtu(link.index, mtu)?;
            }
        }
        Ok(Some(HostDevice {
            index: host.index,
            our_index: ours.index,
            mac: macs[0],
            gateway_mac: macs[1],
            mtu,
        }))
    }

    fn make_pair(&mut self, macs: [MacAddr; 2], mtu: u32) -> Result<[Link; 2], NetlinkError> {
        let end = |name, mac: MacAddr| VethEnd {
            name,
            mac: Some(DeviceMac::new(mac.0)),
            netns: None,
        };
        self.netlink.add_veth(&Veth {
            end: end(HOST_END, macs[0]),
            peer: end(OUR_END, macs[1]),
            mtu,
            queues: 1,
        })?;
        let mut made = Vec::new();
        for name in [HOST_END, OUR_END] {
            let link = self.netlink.link_by_name(name)?;
            made.push(link.ok_or_else(|| NetlinkError::Answer {
                verb: format!("look up link {name}"),
                reason: "it went as soon as it was made".into(),
            })?);
        }
        let [host, ours] = <[Link; 2]>::try_from(made).map_err(|_| NetlinkError::Answer {
            verb: format!("make link {HOST_END}"),
            reason: "it has not two ends".into(),
        })?;
        Ok([host, ours])
    }

    /// What a new or adopted pair needs before it is used.
    pub fn prepare(&mut self, device: &HostDevice) -> Result<(), String> {
        for index in [device.index, device.our_index] {
            self.netlink
                .disable_address_generation(index)
                .map_err(|error| error.to_string())?;
        }
        // The datapath's end speaks for nobody in the kernel; that of the host must know IPv6,
        // whatever the default for new devices is. A kernel without IPv6 has neither file.
        for (name, off) in [(OUR_END, "1"), (HOST_END, "0")] {
            let path = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
            let same = fs::read_to_string(&path).is_ok_and(|now| now.trim() == off);
            if !same && let Err(error) = fs::write(&path, off) {
                tracing::warn!(path, %error, "a setting of the host link stays");
            }
        }
        // As in pods: merged segments must not arrive as one frame.
        let shortfall = Ethtool::open(HOST_END)
            .and_then(|ethtool| ethtool.set_features(DISABLE_FEATURES, false))
            .map_err(|error| error.to_string())?;
        if shortfall.unchanged.is_empty() {
            Ok(())
        } else {
            let stay = shortfall.unchanged.join(", ");
            Err(format!("{HOST_END}: features that stay on: {stay}"))
        }
    }

    /// Takes the host's end up where it is down, and writes the gateway's neighbour entries.
    pub fn take_up(&mut self, device: &HostDevice) -> Result<(), String> {
        let gateways = [IpAddr::V4(GATEWAY_V4), IpAddr::V6(GATEWAY_V6)];
        let up = |netlink: &mut Netlink| {
            let link = netlink.link_by_index(device.index)?;
            if !link.is_some_and(|link| link.is_up) {
                netlink.set_link_up(device.index, true)?;
            }
            let known = netlink.neighbours()?;
            let mac = DeviceMac::new(device.gateway_mac.0);
            for ip in gateways {
                let held = known.iter().any(|entry| {
                    (entry.ifindex, entry.ip, entry.mac) == (device.index, ip, Some(mac))
                        && entry.is_permanent
                });
                if !held {
                    netlink.add_permanent_neighbour(device.index, ip, mac)?;
                }
            }
            Ok(())
        };
        up(&mut self.netlink).map_err(|error: NetlinkError| error.to_string())
    }

    /// Moves the kernel's routes to what is wanted: ours that are not wanted go, on whatever
    /// device they are. Says what could not be done.
    pub fn sync(&mut self, device: &HostDevice, wanted: &[Wanted]) -> Vec<String> {
        let all = match self.netlink.routes() {
            Ok(all) => all,
            Err(error) => return vec![error.to_string()],
        };
        let wanted = desired(device, wanted);
        let mut faults = Vec::new();
        let is_ours = |route: &&Route| route.protocol == ROUTE_PROTOCOL;
        // By place, since each ClusterIP may be a route.
        let places: BTreeSet<_> = wanted.iter().map(place).collect();
        let mut held: BTreeMap<_, &Route> = BTreeMap::new();
        for route in all.iter().filter(is_ours) {
            if places.contains(&place(route)) {
                held.entry(place(route)).or_insert(route);
                continue;
            }
            match self.netlink.delete_route(route) {
                Err(error) if !error.is_missing() => faults.push(error.to_string()),
                _ => {}
            }
        }
        for route in &wanted {
            let done = match held.get(&place(route)) {
                Some(held) if same(route, held) => continue,
                Some(_) => self.netlink.replace_route(route),
                None => self.netlink.add_route(route),
            };
            match done {
                Err(error) if error.is_exists() => faults.push(format!(
                    "the node has another route to {}/{}, which keeps its own traffic from \
                     pods there: remove it",
                    route.destination, route.prefix_len
                )),
                Err(error) => faults.push(error.to_string()),
                Ok(()) => {}
            }
        }
        faults
    }
}

/// The kernel's routes for what is wanted, in an order in which each can be added.
fn desired(device: &HostDevice, wanted: &[Wanted]) -> Vec<Route> {
    let mut routes = Vec::new();
    // The gateway itself, so that a strict reverse path filter takes its ICMP errors.
    let v4 = wanted.iter().find(|wanted| wanted.source.is_ipv4());
    routes.extend(v4.map(|wanted| Route {
        source: Some(wanted.source),
        protocol: ROUTE_PROTOCOL,
        ..Route::on_link(GATEWAY_V4.into(), 32, device.index)
    }));
    routes.extend(wanted.iter().map(|wanted| {
        let range = wanted.range;
        let gateway = if range.address().is_ipv4() {
            IpAddr::V4(GATEWAY_V4)
        } else {
            IpAddr::V6(GATEWAY_V6)
        };
        Route {
            mtu: Some(wanted.mtu),
            source: Some(wanted.source),
            onlink: gateway.is_ipv4(),
            protocol: ROUTE_PROTOCOL,
            ..Route::via(range.address(), range.prefix(), gateway, device.index)
        }
    }));
    routes
}

/// Two routes of one place replace each other.
fn place(route: &Route) -> (IpAddr, u8, u32, u32) {
    (
        route.destination,
        route.prefix_len,
        route.ifindex,
        route.table,
    )
}

/// Whether nothing that we set differs; the kernel adds what we leave to it.
fn same(one: &Route, other: &Route) -> bool {
    (one.gateway, one.mtu, one.source) == (other.gateway, other.mtu, other.source)
}

#[cfg(test)]
mod tests {
    use skein_dataplane::fixtures::{node, peer, underlay};
    use skein_dataplane::snapshot::SnapshotBuilder;

    use super::*;

    #[test]
    fn routes_follow_the_tables_and_the_paths_mtu() {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        let mut far = peer(1, 2);
        if let Some(hop) = &mut far.hop {
            hop.mtu = 9000;
        }
        builder.set_peer(far).unwrap();
        let mut lost = peer(1, 3);
        lost.hop = None;
        builder.set_peer(lost).unwrap();
        let tables = builder.finish();
        let own: Vec<Cidr> = ["10.244.1.0/24", "fd00:10:244:1::/64"]
            .map(|text| text.parse().unwrap())
            .into();
        let found = routes(&tables, &own, 1400);
        let v4: Vec<_> = (found.iter())
            .filter(|wanted| wanted.source == underlay(1))
            .map(|wanted| (wanted.range.to_string(), wanted.mtu))
            .collect();
        assert_eq!(
            v4,
            [
                ("10.244.1.0/24".into(), 1400),
                ("10.244.2.0/24".into(), 8950),
                ("10.244.3.0/24".into(), 1400)
            ]
        );
        assert_eq!(found.len(), 6, "as many again of IPv6");
        // A node with IPv4 alone speaks IPv4 alone.
        let mut alone = node(1);
        alone.addresses.retain(IpAddr::is_ipv4);
        let mut builder = SnapshotBuilder::new(&tables);
        builder.set_node(alone);
        assert_eq!(routes(&builder.finish(), &own, 1400).len(), 3);
    }
}
