//! How packets reach other nodes and the outside: uplink devices, routes, and next hops' MACs.
//!
//! The kernel decides; this asks it and keeps the answer. A next hop's MAC is kept resolved by
//! the kernel itself where it can (managed neighbours, Linux 5.16); elsewhere the kernel is
//! poked again whenever the MAC is not good or goes stale, since our packets, which it does not
//! see, keep no entry alive.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::mac::MacAddr;
use crate::netlink::{Device, Neighbour, Netlink, Route, TableRoute};

/// An uplink device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// The device.
    pub device: Device,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// How packets reach a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerHop {
    /// Position of the uplink in the configuration.
    pub uplink: u8,
    /// Source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The gateway, or the peer itself.
    pub next_hop: IpAddr,
    /// The uplink's MAC.
    pub source_mac: MacAddr,
    /// The next hop's MAC; `None` while it is not resolved.
    pub next_hop_mac: Option<MacAddr>,
    /// MTU of the path as far as this node knows it, in bytes.
    pub mtu: u32,
}

/// A route of the node to destinations outside of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitRoute {
    /// First address of the destinations.
    pub destination: IpAddr,
    /// Length of their prefix, in bits.
    pub prefix: u8,
    /// The way by an uplink; `None` where the kernel has another for them, or none: then a wider
    /// route must not stand in for it.
    pub exit: Option<ByUplink>,
}

/// A way out by an uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByUplink {
    /// Position of the uplink in the configuration.
    pub uplink: u8,
    /// The next hop; `None` where they are on the link itself.
    pub gateway: Option<IpAddr>,
    /// The uplink's MAC.
    pub source_mac: MacAddr,
    /// The largest IP packet on this path, in bytes.
    pub mtu: u32,
}

/// Hosts on the uplinks' own links that are kept resolved at most: below the kernel's own limit
/// of neighbours (`gc_thresh3`, 1024), which it shares with everything else.
const MOST_OUTSIDE: usize = 512;

/// A host that does not answer is forgotten after this long.
const OUTSIDE_PATIENCE: Duration = Duration::from_secs(5);

/// Why packets do not reach a peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoHop {
    /// The kernel has no route to it.
    #[error("no route to {0}")]
    NoRoute(IpAddr),
    /// Its address is this node's own, or the route refuses it.
    #[error("{0} is not on another machine: its route is local, blackhole or the like")]
    NotRemote(IpAddr),
    /// The route leaves by a device that is no uplink.
    #[error("the route to {address} leaves by {device}, which is not in uplink.interfaces")]
    OtherDevice {
        /// The peer's address.
        address: IpAddr,
        /// The device.
        device: String,
    },
}

/// What the kernel knows of the way to other nodes.
#[derive(Debug, Default)]
pub struct Underlay {
    names: Vec<String>,
    managed: bool,
    uplinks: Vec<Option<Uplink>>,
    devices: Vec<Device>,
    routes: BTreeMap<IpAddr, Option<Route>>,
    exits: Vec<ExitRoute>,
    /// Hosts outside that workers asked for, by uplink, and since when.
    outside: BTreeMap<(u8, IpAddr), Instant>,
    neighbours: BTreeMap<(u32, IpAddr), Neighbour>,
    /// Those that the kernel resolves for us.
    asked: BTreeSet<(u32, IpAddr)>,
}

impl Underlay {
    /// For these uplinks; `managed` false does without managed neighbours.
    #[must_use]
    pub fn new(uplinks: &[String], managed: bool) -> Self {
        Self {
            names: uplinks.to_vec(),
            managed,
            uplinks: vec![None; uplinks.len()],
            ..Self::default()
        }
    }

    /// The uplinks, in the order of the configuration; `None` for one that is not there.
    #[must_use]
    pub fn uplinks(&self) -> &[Option<Uplink>] {
        &self.uplinks
    }

    /// Asks for everything: devices, addresses, and the routes to these peers. True when
    /// something is another than before.
    pub fn ask_routes(
        &mut self,
        netlink: &mut Netlink,
        peers: &BTreeSet<IpAddr>,
    ) -> io::Result<bool> {
        let devices = netlink.devices()?;
        let mut uplinks = Vec::new();
        for name in &self.names {
            let device = devices.iter().find(|device| device.name == *name);
            uplinks.push(match device {
                Some(device) => Some(Uplink {
                    addresses: netlink.addresses(device.index)?,
                    device: device.clone(),
                }),
                None => None,
            });
        }
        let mut routes = BTreeMap::new();
        for &peer in peers {
            routes.insert(peer, netlink.route(peer)?);
        }
        let mut changed = uplinks != self.uplinks || routes != self.routes;
        self.uplinks = uplinks;
        self.devices = devices;
        self.routes = routes;
        let exits = self.exits_of(netlink.main_routes()?);
        changed |= exits != self.exits;
        self.exits = exits;
        Ok(self.ask_neighbours(netlink)? || changed)
    }

    /// Asks for the next hops' MACs, and has the kernel resolve those that are not good. True
    /// when something is another than before.
    pub fn ask_neighbours(&mut self, netlink: &mut Netlink) -> io::Result<bool> {
        let wanted = self.wanted(Instant::now());
        let mut neighbours: BTreeMap<_, _> = (netlink.neighbours()?.into_iter())
            .map(|neighbour| ((neighbour.device, neighbour.address), neighbour))
            .filter(|(key, _)| wanted.contains(key))
            .collect();
        let mut poked = false;
        for &(device, address) in &wanted {
            let held = neighbours.get(&(device, address)).is_some_and(|known| {
                if self.managed {
                    known.managed
                } else {
                    known.mac.is_some() && !known.stale
                }
            });
            if !held {
                self.resolve(netlink, device, address)?;
                self.asked.insert((device, address));
                poked = true;
            }
        }
        if poked {
            neighbours = (netlink.neighbours()?.into_iter())
                .map(|neighbour| ((neighbour.device, neighbour.address), neighbour))
                .filter(|(key, _)| wanted.contains(key))
                .collect();
            // A kernel before 5.16 takes the request and forgets the flag.
            if self.managed && neighbours.values().all(|neighbour| !neighbour.managed) {
                self.managed = false;
                for &(device, address) in &wanted {
                    self.resolve(netlink, device, address)?;
                }
            }
        }
        let gone: Vec<_> = self.asked.difference(&wanted).copied().collect();
        for (device, address) in gone {
            self.asked.remove(&(device, address));
            netlink.forget(device, address)?;
        }
        let macs = |neighbours: &BTreeMap<(u32, IpAddr), Neighbour>| {
            let good = neighbours.iter();
            good.map(|(key, neighbour)| (*key, neighbour.mac))
                .collect::<Vec<_>>()
        };
        let changed = macs(&neighbours) != macs(&self.neighbours);
        self.neighbours = neighbours;
        Ok(changed)
    }

    /// The next hops that shall be kept resolved, by device.
    fn wanted(&mut self, now: Instant) -> BTreeSet<(u32, IpAddr)> {
        let mut wanted: BTreeSet<_> = (self.routes.values().flatten())
            .filter(|route| route.unicast && self.uplink_of(route.device).is_some())
            .map(|route| (route.device, route.next_hop))
            .collect();
        let device_of = |uplink: u8| {
            let uplink = self.uplinks.get(usize::from(uplink))?.as_ref()?;
            Some(uplink.device.index)
        };
        let gateways = self.exits.iter();
        let gateways = gateways.filter_map(|route| {
            let exit = route.exit.as_ref()?;
            Some((device_of(exit.uplink)?, exit.gateway?))
        });
        wanted.extend(gateways);
        let mut outside = std::mem::take(&mut self.outside);
        outside.retain(|&(uplink, address), since| {
            let Some(device) = device_of(uplink) else {
                return false;
            };
            let known = self.neighbours.get(&(device, address));
            known.is_some_and(|known| known.mac.is_some())
                || now.saturating_duration_since(*since) < OUTSIDE_PATIENCE
        });
        for &(uplink, address) in outside.keys() {
            wanted.extend(device_of(uplink).map(|device| (device, address)));
        }
        self.outside = outside;
        wanted
    }

    /// Notes that somebody sends to a host on an uplink's own link; true when that is news.
    pub fn want(&mut self, uplink: u8, address: IpAddr, now: Instant) -> bool {
        if self.outside.contains_key(&(uplink, address)) {
            return false;
        }
        if self.outside.len() >= MOST_OUTSIDE {
            // Whoever still sends to it asks again.
            let oldest = self.outside.iter().min_by_key(|(_, since)| **since);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.outside.remove(&oldest);
            }
        }
        self.outside.insert((uplink, address), now);
        true
    }

    /// The routes out of the cluster: of two to the same destinations, the better.
    #[must_use]
    pub fn exits(&self) -> &[ExitRoute] {
        &self.exits
    }

    /// The next hops outside whose MACs are known, by uplink.
    pub fn outside(&self) -> impl Iterator<Item = ((u8, IpAddr), MacAddr)> {
        self.neighbours
            .iter()
            .filter_map(|(&(device, address), known)| {
                let (uplink, _) = self.uplink_of(device)?;
                Some(((uplink, address), known.mac?))
            })
    }

    fn exits_of(&self, mut routes: Vec<TableRoute>) -> Vec<ExitRoute> {
        routes.sort_by_key(|route| (route.destination, route.prefix, route.metric));
        routes.dedup_by_key(|route| (route.destination, route.prefix));
        (routes.into_iter())
            .map(|route| ExitRoute {
                destination: route.destination,
                prefix: route.prefix,
                exit: self.uplink_of(route.device).map(|(uplink, of)| ByUplink {
                    uplink,
                    gateway: route.gateway,
                    source_mac: of.device.mac,
                    mtu: route.mtu.unwrap_or(u32::MAX).min(of.device.mtu),
                }),
            })
            .collect()
    }

    fn resolve(&self, netlink: &mut Netlink, device: u32, address: IpAddr) -> io::Result<()> {
        match netlink.resolve(device, address, self.managed) {
            // The device went down or away meanwhile: a notice of that is on its way.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NetworkDown | io::ErrorKind::InvalidInput
                ) || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Whether some next hop has no MAC yet.
    #[must_use]
    pub fn unresolved(&self) -> bool {
        let peers = self.routes.keys();
        let mut peers = peers.map(|&peer| self.hop(peer));
        peers.any(|hop| hop.is_ok_and(|hop| hop.next_hop_mac.is_none()))
            || self.outside.keys().any(|&(uplink, address)| {
                let device = self
                    .uplinks
                    .get(usize::from(uplink))
                    .and_then(Option::as_ref);
                device.is_some_and(|of| {
                    let known = self.neighbours.get(&(of.device.index, address));
                    known.is_none_or(|known| known.mac.is_none())
                })
            })
    }

    fn uplink_of(&self, device: u32) -> Option<(u8, &Uplink)> {
        let position = self.uplinks.iter().position(|uplink| {
            uplink
                .as_ref()
                .is_some_and(|uplink| uplink.device.index == device)
        })?;
        Some((
            u8::try_from(position).ok()?,
            self.uplinks[position].as_ref()?,
        ))
    }

    /// How packets reach a peer that was asked about.
    pub fn hop(&self, peer: IpAddr) -> Result<PeerHop, NoHop> {
        let Some(Some(route)) = self.routes.get(&peer) else {
            return Err(NoHop::NoRoute(peer));
        };
        if !route.unicast {
            return Err(NoHop::NotRemote(peer));
        }
        let Some((position, uplink)) = self.uplink_of(route.device) else {
            let device = (self.devices.iter())
                .find(|device| device.index == route.device)
                .map_or_else(
                    || format!("device {}", route.device),
                    |device| device.name.clone(),
                );
            return Err(NoHop::OtherDevice {
                address: peer,
                device,
            });
        };
        let neighbour = self.neighbours.get(&(route.device, route.next_hop));
        Ok(PeerHop {
            uplink: position,
            source: route.source,
            next_hop: route.next_hop,
            source_mac: uplink.device.mac,
            next_hop_mac: neighbour.and_then(|neighbour| neighbour.mac),
            mtu: route.mtu.unwrap_or(u32::MAX).min(uplink.device.mtu),
        })
    }
}
