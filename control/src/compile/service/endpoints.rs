//! EndpointSlices of a Service's port → where it is served, and who of those may be chosen.
//!
//! As kube-proxy chooses: ready endpoints; where there are none, those that end and still serve;
//! both once among all and once among this node's. Hints of the slices narrow the choice among
//! all, if every ready endpoint has one and one is for this node or zone. Where nobody writes
//! hints, the Service's `trafficDistribution` is read as the slices' controller would read it.
//!
//! Beyond that, an endpoint within the cluster's pod ranges waits until its identity is known:
//! policy would judge it as nobody's.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;

use skein_dataplane::snapshot::{Candidate, Snapshot};

use crate::cidr::Cidr;
use crate::state::service::{
    Distribution, EndpointSlice, Protocol, Service, ServicePort, SliceEndpoint,
};

/// What a choice depends on besides Service and slices.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The tables, with the pods that are known.
    pub tables: &'a Snapshot,
    /// This node's name.
    pub node: &'a str,
    /// Its zone; empty where it has none.
    pub zone: &'a str,
    /// Its own pod ranges.
    pub ranges: &'a [Cidr],
}

/// Why an endpoint is not used, whatever its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The tables have no pod of this address (yet).
    Unknown,
    /// A node's overlay port: what is translated to it could forge identities.
    OverlayPort,
    /// An address that is no host's on the network.
    Special,
}

/// An endpoint of one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// The endpoint as its slice has it.
    pub endpoint: SliceEndpoint,
    /// Whether it is on this node.
    pub local: bool,
    /// Why it is not used.
    pub obstacle: Option<Obstacle>,
    /// Whether it is chosen among all.
    pub cluster: bool,
    /// Whether it is chosen among this node's.
    pub on_node: bool,
}

impl Served {
    /// The endpoint for the tables: one that is chosen, or that keeps what it has.
    pub(super) fn candidate(&self) -> Option<Candidate> {
        let stays = self.endpoint.ready || self.endpoint.serving;
        (self.obstacle.is_none() && (stays || self.cluster || self.on_node)).then_some(Candidate {
            address: self.address,
            port: self.port,
            local: self.local,
            cluster: self.cluster,
            node: self.on_node,
        })
    }

    /// Its condition, in a word.
    #[must_use]
    pub fn condition(&self) -> &'static str {
        let endpoint = &self.endpoint;
        match (endpoint.ready, endpoint.serving, endpoint.terminating) {
            (true, _, _) => "ready",
            (false, true, true) => "terminating",
            (false, false, true) => "ended",
            (false, _, false) => "not ready",
        }
    }

    /// Why it is not chosen among all; empty where it is.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match (self.obstacle, self.condition()) {
            _ if self.cluster => "",
            (Some(Obstacle::Unknown), _) => "no pod of this address is known yet",
            (Some(Obstacle::OverlayPort), _) => "a node's overlay port is never served",
            (Some(Obstacle::Special), _) => "no host has this address",
            (None, "ready") => "others are nearer",
            (None, "terminating") => "it ends, and others are ready",
            (None, "ended") => "it ends, and does not serve",
            (None, _) => "it is not ready",
        }
    }
}

/// All endpoints of a Service's port in a family, by address and port, with who is chosen.
#[must_use]
pub fn served<'a>(
    service: &Service,
    port: &ServicePort,
    ipv4: bool,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    place: &Place<'_>,
) -> Vec<Served> {
    let mut found: BTreeMap<(IpAddr, u16), Served> = BTreeMap::new();
    for slice in slices.filter(|slice| slice.ipv4 == Some(ipv4)) {
        let ports = slice.ports.iter();
        let ours =
            ports.filter(|other| (&other.name, other.protocol) == (&port.name, port.protocol));
        for number in ours.map(|port| port.port) {
            for endpoint in &slice.endpoints {
                let one = one(service, port.protocol, number, endpoint, place);
                let Some(one) = one else { continue };
                match found.entry((one.address, one.port)) {
                    Entry::Vacant(free) => {
                        free.insert(one);
                    }
                    // While it moves from one slice to another it stands in both.
                    Entry::Occupied(mut held) => {
                        let rank = |one: &Served| (one.endpoint.ready, one.endpoint.serving);
                        if rank(&one) > rank(held.get()) {
                            held.insert(one);
                        }
                    }
                }
            }
        }
    }
    let mut served: Vec<Served> = found.into_values().collect();
    choose(&mut served, service.distribution, place);
    served
}

fn one(
    service: &Service,
    protocol: Protocol,
    port: u16,
    endpoint: &SliceEndpoint,
    place: &Place<'_>,
) -> Option<Served> {
    let address = endpoint.address?;
    let tables = place.tables;
    let mut endpoint = endpoint.clone();
    endpoint.ready |= service.publish_not_ready;
    let local = match &endpoint.node {
        Some(node) => node == place.node,
        None => tables.local(address).is_some() || tables.node().addresses.contains(&address),
    };
    Some(Served {
        address,
        port,
        endpoint,
        local,
        obstacle: obstacle(address, port, protocol, place),
        cluster: false,
        on_node: false,
    })
}

fn obstacle(address: IpAddr, port: u16, protocol: Protocol, place: &Place<'_>) -> Option<Obstacle> {
    let tables = place.tables;
    if is_special(address) {
        return Some(Obstacle::Special);
    }
    if tables.is_node(address) {
        let overlay = protocol == Protocol::Udp && port == tables.node().overlay_port;
        return overlay.then_some(Obstacle::OverlayPort);
    }
    if tables.local(address).is_some() || tables.remote_pod(address).is_some() {
        return None;
    }
    let in_cluster = tables.peer_of(address).is_some()
        || place.ranges.iter().any(|range| range.contains(address));
    in_cluster.then_some(Obstacle::Unknown)
}

/// What the API refuses as an endpoint.
fn is_special(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    link_local || address.is_unspecified() || address.is_loopback() || address.is_multicast()
}

fn choose(served: &mut [Served], distribution: Distribution, place: &Place<'_>) {
    let ready = |one: &Served| one.obstacle.is_none() && one.endpoint.ready;
    let ends =
        |one: &Served| one.obstacle.is_none() && one.endpoint.serving && one.endpoint.terminating;
    let near = nearness(served.iter().filter(|one| ready(one)), distribution, place);
    let any_ready = served.iter().any(ready);
    let any_ready_here = served.iter().any(|one| one.local && ready(one));
    for one in served {
        one.cluster = if any_ready {
            ready(one) && near.takes(&one.endpoint, place)
        } else {
            ends(one)
        };
        one.on_node = one.local
            && if any_ready_here {
                ready(one)
            } else {
                ends(one)
            };
    }
}

/// Which of the ready endpoints are meant for this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Near {
    All,
    Node { hinted: bool },
    Zone { hinted: bool },
}

impl Near {
    fn takes(self, endpoint: &SliceEndpoint, place: &Place<'_>) -> bool {
        let names = |hints: &[String], name: &str| hints.iter().any(|hint| hint == name);
        match self {
            Self::All => true,
            Self::Node { hinted: true } => names(&endpoint.node_hints, place.node),
            Self::Node { hinted: false } => endpoint.node.as_deref() == Some(place.node),
            Self::Zone { hinted: true } => names(&endpoint.zone_hints, place.zone),
            Self::Zone { hinted: false } => endpoint.zone.as_deref() == Some(place.zone),
        }
    }
}

/// Hints count only if all have one, since a slice that is being written has them in part; and
/// only if they leave somebody.
fn nearness<'a>(
    ready: impl Iterator<Item = &'a Served>,
    distribution: Distribution,
    place: &Place<'_>,
) -> Near {
    let ready: Vec<&SliceEndpoint> = ready.map(|one| &one.endpoint).collect();
    let hinted =
        (ready.iter()).any(|one| !(one.zone_hints.is_empty() && one.node_hints.is_empty()));
    let (by_node, by_zone) = if hinted {
        (
            ready.iter().all(|one| !one.node_hints.is_empty()),
            ready.iter().all(|one| !one.zone_hints.is_empty()),
        )
    } else {
        (
            distribution == Distribution::SameNode && ready.iter().all(|one| one.node.is_some()),
            distribution != Distribution::Even && ready.iter().all(|one| one.zone.is_some()),
        )
    };
    let node = Near::Node { hinted };
    let zone = Near::Zone { hinted };
    let leaves_some = |near: Near| ready.iter().any(|one| near.takes(one, place));
    if by_node && leaves_some(node) {
        node
    } else if by_zone && !place.zone.is_empty() && leaves_some(zone) {
        zone
    } else {
        Near::All
    }
}
