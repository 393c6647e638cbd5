//! Services and EndpointSlices → the Services of the tables.
//!
//! Unlike the rest of the tables these are compiled piece by piece: [`Services`] remembers what
//! it made of each Service, hears which objects changed and which pods the tables have gained or
//! lost, and compiles the Services that this touches and no others. With 30 000 of them a change
//! costs its own.
//!
//! Frontends that two Services claim are the first's by name; the other's loss is a fault, and
//! it gets them when the first lets go. Numbers of Services are never used again.
//!
//! Deliberately absent: names in the tables, and everything that a packet decides.

pub mod endpoints;
mod spec;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use skein_dataplane::snapshot::{self, Reach, ServiceId, Snapshot, SnapshotBuilder};

use self::endpoints::{Place, Served, served};
pub use self::spec::not_served;
use crate::cidr::Cidr;
use crate::config::PortRange;
use crate::state::service::{Protocol, Service, ServiceKey, ServicePort};
use crate::state::{ClusterState, ObjectKey};

/// One port of one Service in one family: what has a number in the tables.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortKey {
    /// The Service.
    pub service: Arc<ServiceKey>,
    /// The port's name.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// Whether the family is IPv4.
    pub ipv4: bool,
}

/// What only one Service may have: protocol, family, address (none: the node's), port.
type Claim = (Protocol, bool, Option<IpAddr>, u16);

/// What is known of a Service. Most have little of each, so these are vectors: a tree of one
/// takes the room of eleven.
#[derive(Debug, Default)]
struct Record {
    /// Its slices, in order.
    slices: Vec<ServiceKey>,
    /// Addresses of its endpoints, in order.
    addresses: Vec<IpAddr>,
    /// What of it has a number.
    ports: Vec<Numbered>,
    /// What is wrong with it.
    faults: Vec<String>,
}

/// A port with its number, and what it would have.
#[derive(Debug)]
struct Numbered {
    key: PortKey,
    id: ServiceId,
    claims: Vec<Claim>,
}

impl Record {
    fn number(&self, key: &PortKey) -> Option<ServiceId> {
        let port = self.ports.iter().find(|port| port.key == *key);
        port.map(|port| port.id)
    }
}

/// What of a node matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct NodeFacts {
    addresses: Vec<IpAddr>,
    ranges: Vec<Cidr>,
    zone: String,
}

/// What one port shall be.
struct Desired {
    key: PortKey,
    service: snapshot::Service,
}

/// All Services as they were compiled last.
#[derive(Debug)]
pub struct Services {
    enabled: bool,
    node: String,
    node_ports: PortRange,
    records: BTreeMap<Arc<ServiceKey>, Record>,
    /// Whose each slice is.
    owners: BTreeMap<ServiceKey, Arc<ServiceKey>>,
    /// Whose endpoints have an address.
    users: BTreeSet<(IpAddr, Arc<ServiceKey>)>,
    /// Who would have a frontend, the first by name before the others.
    claims: BTreeMap<Claim, Vec<(PortKey, ServiceId)>>,
    nodes: BTreeMap<String, NodeFacts>,
    dirty: BTreeSet<Arc<ServiceKey>>,
    last_number: u32,
}

impl Services {
    /// None yet. Those of a node that serves none stay none.
    #[must_use]
    pub fn new(enabled: bool, node: &str, node_ports: PortRange) -> Self {
        Self {
            enabled,
            node: node.to_owned(),
            node_ports,
            records: BTreeMap::new(),
            owners: BTreeMap::new(),
            users: BTreeSet::new(),
            claims: BTreeMap::new(),
            nodes: BTreeMap::new(),
            dirty: BTreeSet::new(),
            last_number: 0,
        }
    }

    /// Hears which objects of the cluster have changed.
    pub fn update(&mut self, state: &ClusterState, keys: &BTreeSet<ObjectKey>) {
        if !self.enabled {
            return;
        }
        for key in keys {
            match key {
                ObjectKey::Service(key) => {
                    let key = self.known(key);
                    self.dirty.insert(key);
                }
                ObjectKey::EndpointSlice(key) => self.slice_changed(state, key),
                ObjectKey::Node(name) => self.node_changed(state, name),
                ObjectKey::Namespace(_)
                | ObjectKey::Pod(_)
                | ObjectKey::NetworkPolicy(_)
                | ObjectKey::ServiceCidr(_) => {}
            }
        }
    }

    /// The one copy of a Service's name, with a record under it.
    fn known(&mut self, key: &ServiceKey) -> Arc<ServiceKey> {
        if let Some((known, _)) = self.records.get_key_value(key) {
            return known.clone();
        }
        let known = Arc::new(key.clone());
        self.records.insert(known.clone(), Record::default());
        known
    }

    fn slice_changed(&mut self, state: &ClusterState, key: &ServiceKey) {
        if let Some(owner) = self.owners.remove(key) {
            if let Some(record) = self.records.get_mut(&owner) {
                record.slices.retain(|slice| slice != key);
            }
            self.dirty.insert(owner);
        }
        if let Some(owner) = state.slice(key).and_then(|slice| slice.service.as_ref()) {
            let owner = self.known(owner);
            if let Some(record) = self.records.get_mut(&owner) {
                let at = record.slices.partition_point(|slice| slice < key);
                record.slices.insert(at, key.clone());
            }
            self.owners.insert(key.clone(), owner.clone());
            self.dirty.insert(owner);
        }
    }

    fn node_changed(&mut self, state: &ClusterState, name: &str) {
        let now = state.node(name).map(|node| NodeFacts {
            addresses: node.internal_ips.clone(),
            ranges: node.pod_cidrs.clone(),
            zone: node.zone.clone(),
        });
        let now = now.unwrap_or_default();
        let before = self.nodes.insert(name.to_owned(), now.clone());
        let before = before.unwrap_or_default();
        if now == NodeFacts::default() {
            self.nodes.remove(name);
        }
        if name == self.node && now.zone != before.zone {
            self.dirty.extend(self.records.keys().cloned());
            return;
        }
        for facts in [&before, &now] {
            let other = if std::ptr::eq(facts, &before) {
                &now
            } else {
                &before
            };
            for &address in facts
                .addresses
                .iter()
                .filter(|ip| !other.addresses.contains(ip))
            {
                self.touch(address);
            }
            for range in facts
                .ranges
                .iter()
                .filter(|range| !other.ranges.contains(range))
            {
                let users = self.users.range((range.address(), Arc::default())..);
                let within = users.take_while(|(address, _)| range.contains(*address));
                self.dirty.extend(within.map(|(_, key)| key.clone()));
            }
        }
    }

    /// Services with an endpoint of that address are to be looked at.
    fn touch(&mut self, address: IpAddr) {
        let users = self.users.range((address, Arc::default())..);
        let same = users.take_while(|(other, _)| *other == address);
        self.dirty.extend(same.map(|(_, key)| key.clone()));
    }

    /// Hears which pods' addresses the tables have gained or lost.
    pub fn moved(&mut self, addresses: &[IpAddr]) {
        for &address in addresses {
            self.touch(address);
        }
    }

    /// Whether there is something to apply.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Moves the Services of complete tables, which no worker has yet, to all that was heard of.
    /// Says what is newly wrong.
    pub fn apply(&mut self, state: &ClusterState, tables: Snapshot) -> (Snapshot, Vec<String>) {
        if self.dirty.is_empty() {
            return (tables, Vec::new());
        }
        let mut builder = SnapshotBuilder::continuing(tables);
        let mut wanted = BTreeMap::new();
        let mut gone = Vec::new();
        let mut before = BTreeMap::new();
        // Who lets go of a frontend, or takes it, touches whoever else claims it.
        while let Some(key) = self.dirty.pop_first() {
            let record = self.records.get_mut(&key).map(|record| &mut record.faults);
            before.insert(key.clone(), record.map(std::mem::take).unwrap_or_default());
            let desired = self.desired(state, &key, builder.tables());
            self.claim(&key, &desired, &mut gone, &wanted);
            wanted.insert(key, desired);
        }
        for id in gone {
            builder.remove_service(id);
        }
        self.write(wanted, &mut builder);
        let mut news = Vec::new();
        for (key, old) in before {
            if let Some(record) = self.records.get(&key) {
                let new = record.faults.iter().filter(|fault| !old.contains(fault));
                news.extend(new.cloned());
            }
            self.forget_if_gone(state, &key);
        }
        (builder.finish(), news)
    }

    /// What a Service shall be in the tables, as if nobody else claimed its frontends.
    fn desired(
        &mut self,
        state: &ClusterState,
        key: &Arc<ServiceKey>,
        tables: &Snapshot,
    ) -> Vec<Desired> {
        let Some(record) = self.records.get_mut(key) else {
            return Vec::new();
        };
        let slices: Vec<_> = (record.slices.iter())
            .filter_map(|slice| state.slice(slice))
            .collect();
        let mut addresses: Vec<IpAddr> = (slices.iter())
            .flat_map(|slice| &slice.endpoints)
            .filter_map(|endpoint| endpoint.address)
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        for &address in without(&record.addresses, &addresses) {
            self.users.remove(&(address, key.clone()));
        }
        for &address in without(&addresses, &record.addresses) {
            self.users.insert((address, key.clone()));
        }
        addresses.shrink_to_fit();
        record.addresses = addresses;
        let Some(service) = state
            .service(key)
            .filter(|service| not_served(service).is_none())
        else {
            return Vec::new();
        };
        let place = place(&self.node, state, tables);
        record.faults = spec::faults(service, self.node_ports);
        let mut desired = Vec::new();
        for cluster_ip in &service.cluster_ips {
            for port in &service.ports {
                let ipv4 = cluster_ip.is_ipv4();
                let served = served(service, port, ipv4, slices.iter().copied(), &place);
                desired.push(Desired {
                    key: PortKey {
                        service: key.clone(),
                        name: port.name.clone(),
                        protocol: port.protocol,
                        ipv4,
                    },
                    service: spec::compile(service, port, *cluster_ip, &served, self.node_ports),
                });
            }
        }
        desired
    }

    /// Notes what a Service's ports claim now, and gives each its number. Whoever else claims
    /// what changes hands is dirty, unless it is the Service's own.
    fn claim(
        &mut self,
        key: &Arc<ServiceKey>,
        desired: &[Desired],
        gone: &mut Vec<ServiceId>,
        done: &BTreeMap<Arc<ServiceKey>, Vec<Desired>>,
    ) {
        let Some(record) = self.records.get_mut(key) else {
            return;
        };
        let mut before = std::mem::take(&mut record.ports);
        let mut changed: BTreeSet<Claim> = BTreeSet::new();
        for Desired { key, service } in desired {
            let known = before.iter().position(|port| port.key == *key);
            let old = known.map(|at| before.swap_remove(at));
            let id = old.as_ref().map_or_else(
                || {
                    self.last_number += 1;
                    ServiceId::new(self.last_number).expect("counted from one")
                },
                |old| old.id,
            );
            let old = old.map(|old| old.claims).unwrap_or_default();
            let claims: Vec<Claim> = (service.reach.iter())
                .map(|reach| claim_of(key, *reach))
                .collect();
            for claim in old.iter().filter(|claim| !claims.contains(claim)) {
                release(&mut self.claims, claim, id);
                changed.insert(*claim);
            }
            for claim in claims.iter().filter(|claim| !old.contains(claim)) {
                let claimants = self
                    .claims
                    .entry(*claim)
                    .or_insert_with(|| Vec::with_capacity(1));
                let at = claimants.partition_point(|(other, _)| other < key);
                claimants.insert(at, (key.clone(), id));
                changed.insert(*claim);
            }
            let key = key.clone();
            record.ports.push(Numbered { key, id, claims });
        }
        for port in before {
            gone.push(port.id);
            for claim in port.claims {
                release(&mut self.claims, &claim, port.id);
                changed.insert(claim);
            }
        }
        let others = (changed.iter())
            .filter_map(|claim| self.claims.get(claim))
            .flatten()
            .map(|(port, _)| &port.service)
            .filter(|other| *other != key && !done.contains_key(*other));
        self.dirty.extend(others.cloned().collect::<Vec<_>>());
    }

    /// Writes the Services: first each that loses a frontend without it, then all.
    fn write(
        &mut self,
        wanted: BTreeMap<Arc<ServiceKey>, Vec<Desired>>,
        builder: &mut SnapshotBuilder,
    ) {
        let mut steps = Vec::new();
        for (name, desired) in wanted {
            let Some(record) = self.records.get_mut(&name) else {
                continue;
            };
            for Desired { key, mut service } in desired {
                let Some(id) = record.number(&key) else {
                    continue;
                };
                service.reach.retain(|reach| {
                    let claim = claim_of(&key, *reach);
                    let first = self.claims.get(&claim).and_then(|all| all.first());
                    let Some((owner, _)) = first.filter(|(_, owner)| *owner != id) else {
                        return true;
                    };
                    let at = describe(*reach, key.protocol);
                    record.faults.push(format!(
                        "Service {name}: {at} is Service {}'s too, who keeps it",
                        owner.service
                    ));
                    false
                });
                if let Some(held) = builder.tables().services().get(id) {
                    let mut less = (***held).clone();
                    less.reach.retain(|reach| service.reach.contains(reach));
                    if less.reach.len() < held.reach.len() {
                        steps.push((name.clone(), id, less, true));
                    }
                }
                steps.push((name.clone(), id, service, false));
            }
        }
        steps.sort_by_key(|(_, _, _, less)| !less);
        for (name, id, service, _) in steps {
            if let Err(error) = builder.set_service(id, service)
                && let Some(record) = self.records.get_mut(&name)
            {
                record.faults.push(format!("Service {name}: {error}"));
            }
        }
    }

    fn forget_if_gone(&mut self, state: &ClusterState, key: &Arc<ServiceKey>) {
        let empty = (self.records.get(key)).is_some_and(|record| record.slices.is_empty());
        if empty && state.service(key).is_none() {
            self.records.remove(key);
        }
    }

    /// The node ports that are served, by protocol: packets to them are taken off the uplinks.
    #[must_use]
    pub fn node_ports(&self, state: &ClusterState) -> BTreeSet<(u8, u16)> {
        if !self.enabled {
            return BTreeSet::new();
        }
        (self.records.keys())
            .filter(|key| self.ports_of(key).next().is_some())
            .filter_map(|key| state.service(key))
            .flat_map(|service| &service.ports)
            .filter_map(|port| Some((port.protocol.number(), port.node_port?)))
            // One beyond the range may be a port of the node's own.
            .filter(|&(_, port)| self.node_ports.contains(port))
            .collect()
    }

    /// What is wrong with Services.
    pub fn faults(&self) -> impl Iterator<Item = &String> {
        self.records.values().flat_map(|record| &record.faults)
    }

    /// What is wrong with one.
    #[must_use]
    pub fn faults_of(&self, key: &ServiceKey) -> &[String] {
        self.records.get(key).map_or(&[], |record| &record.faults)
    }

    /// The ports of a Service that have a number in the tables.
    pub fn ports_of(&self, key: &ServiceKey) -> impl Iterator<Item = (&PortKey, ServiceId)> {
        let ports = self.records.get(key).map(|record| &record.ports);
        (ports.into_iter().flatten()).map(|port| (&port.key, port.id))
    }

    /// Where a port of a Service is served, chosen or not.
    #[must_use]
    pub fn served(
        &self,
        state: &ClusterState,
        tables: &Snapshot,
        service: &Service,
        port: &PortKey,
    ) -> Vec<Served> {
        let named =
            |other: &&ServicePort| (&other.name, other.protocol) == (&port.name, port.protocol);
        let (Some(number), Some(record)) = (
            service.ports.iter().find(named),
            self.records.get(&service.key),
        ) else {
            return Vec::new();
        };
        let place = place(&self.node, state, tables);
        let slices = (record.slices.iter()).filter_map(|slice| state.slice(slice));
        served(service, number, port.ipv4, slices, &place)
    }

    /// Ranges that the host routes to the datapath: those of the configuration, else those of
    /// the cluster's ServiceCIDRs, else each ClusterIP by itself.
    #[must_use]
    pub fn ranges(&self, state: &ClusterState, configured: &[Cidr]) -> Vec<Cidr> {
        if !self.enabled {
            return Vec::new();
        }
        let mut ranges: Vec<Cidr> = configured.to_vec();
        if ranges.is_empty() {
            let objects = state.service_cidrs();
            ranges.extend(objects.flat_map(|object| &object.cidrs));
        }
        if ranges.is_empty() {
            let services = state.services().filter(|one| not_served(one).is_none());
            let ips = services.flat_map(|service| &service.cluster_ips);
            ranges.extend(
                ips.filter_map(|&ip| Cidr::containing(ip, if ip.is_ipv4() { 32 } else { 128 })),
            );
        }
        ranges.sort_unstable();
        ranges.dedup();
        ranges
    }
}

/// Those of one ordered list that another does not have.
fn without<'a>(these: &'a [IpAddr], those: &'a [IpAddr]) -> impl Iterator<Item = &'a IpAddr> {
    (these.iter()).filter(|address| those.binary_search(address).is_err())
}

fn claim_of(key: &PortKey, reach: Reach) -> Claim {
    match reach {
        Reach::Address(_, ip, port) => (key.protocol, key.ipv4, Some(ip), port),
        Reach::NodePort(port) => (key.protocol, key.ipv4, None, port),
    }
}

fn release(claims: &mut BTreeMap<Claim, Vec<(PortKey, ServiceId)>>, claim: &Claim, id: ServiceId) {
    if let Some(claimants) = claims.get_mut(claim) {
        claimants.retain(|(_, other)| *other != id);
        if claimants.is_empty() {
            claims.remove(claim);
        }
    }
}

fn describe(reach: Reach, protocol: Protocol) -> String {
    match reach {
        Reach::Address(_, ip, port) => format!("{ip} port {port} ({protocol})"),
        Reach::NodePort(port) => format!("nodePort {port} ({protocol})"),
    }
}

/// Where endpoints are looked at from: this node.
fn place<'a>(node: &'a str, state: &'a ClusterState, tables: &'a Snapshot) -> Place<'a> {
    let own = state.node(node);
    Place {
        tables,
        node,
        zone: own.map_or("", |own| &own.zone),
        ranges: own.map_or(&[], |own| &own.pod_cidrs),
    }
}

#[cfg(test)]
mod tests;
