//! A Service's address → one of its backends, for the first packet of a connection.
//!
//! Second stage of the slow path: connection tracking knows the packets of connections that were
//! chosen for already and translates both ways; here is the choice alone. Policy judges the
//! backend afterwards, since a virtual address has no identity.
//!
//! The choice follows what kube-proxy does: the internal policy at a ClusterIP, the external one
//! for clients from outside; a client of the cluster at an external address has any backend,
//! whatever the external policy. Only clients from outside lose their address, and only under
//! policy Cluster: answers to pods and to this host come by here anyway. (kube-proxy masquerades
//! those too; but then policy could not tell who asks.)
//!
//! Deliberately absent: translation, connections, answers to those who are refused.

mod affinity;

use std::net::IpAddr;

pub use affinity::Affinity;

pub use crate::snapshot::{Frontend, ServiceId};
use crate::snapshot::{FrontendKind, ServiceEntry, Snapshot, TrafficPolicy};
use crate::time::Instant;
use crate::verdict::DropReason;

/// From where a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum From {
    /// A pod on this node.
    Pod,
    /// This node itself.
    Host,
    /// Anybody whose answers would not come by here of themselves: from an uplink, or from
    /// another node through the overlay, to an address of this node.
    Outside,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// From where.
    pub from: From,
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Whose backend it is.
    pub service: ServiceId,
    /// Whether it is on this node.
    pub local: bool,
    /// Whether the source must become an address of this node, so that answers come by here:
    /// for clients from outside under policy Cluster, and for a backend that asks its own
    /// Service and is chosen itself.
    pub snat: bool,
}

/// What becomes of a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The address and port are no Service's.
    NotAService,
    /// It goes there.
    Backend(Backend),
    /// It goes nowhere.
    Refused(DropReason),
}

/// Chooses for a new connection. A client that shall stay with its backend does, and is seen
/// now; so this is asked once a connection. `hash` is of the connection as the client sees it;
/// for nodes to choose alike it must be the same on all of them.
pub fn choose(
    tables: &Snapshot,
    affinity: &Affinity,
    frontend: Frontend,
    client: Client,
    hash: u64,
    now: Instant,
) -> Choice {
    let own = || tables.node().addresses.contains(&frontend.address);
    let Some((kind, service, entry)) = tables.services().find(frontend, own) else {
        return if tables.is_service_address(frontend.address) {
            Choice::Refused(DropReason::NoServicePort)
        } else {
            Choice::NotAService
        };
    };
    if kind == FrontendKind::LoadBalancer && !admits(entry, client.address) {
        return Choice::Refused(DropReason::SourceRangeDenied);
    }
    let policy = policy(kind, client.from, entry);
    let fresh = || entry.pick(policy, hash);
    let chosen = match entry.affinity {
        None => fresh(),
        Some(timeout) => {
            let kept = |(address, port)| {
                entry
                    .candidate(address, port)
                    .filter(|candidate| candidate.takes_new(policy))
            };
            affinity.settle((service, client.address), timeout, now, kept, fresh)
        }
    };
    match chosen {
        Some(candidate) => Choice::Backend(Backend {
            address: candidate.address,
            port: candidate.port,
            service,
            local: candidate.local,
            snat: candidate.address == client.address
                || (client.from == From::Outside && policy == TrafficPolicy::Cluster),
        }),
        None => Choice::Refused(nobody(entry, policy)),
    }
}

/// Under which policy a client is served.
fn policy(kind: FrontendKind, from: From, entry: &ServiceEntry) -> TrafficPolicy {
    match (kind, from) {
        (FrontendKind::ClusterIp, _) => entry.internal,
        (_, From::Outside) => entry.external,
        (_, From::Pod | From::Host) => TrafficPolicy::Cluster,
    }
}

/// Whether the client lies in a source range, where there are any. A family of which none is
/// named is not admitted.
fn admits(entry: &ServiceEntry, client: IpAddr) -> bool {
    let ranges = &entry.source_ranges;
    ranges.is_empty() || ranges.iter().any(|range| range.contains(client))
}

/// Why nobody was chosen: where other nodes could serve, this one is not asked rightly.
fn nobody(entry: &ServiceEntry, policy: TrafficPolicy) -> DropReason {
    if policy == TrafficPolicy::Local && entry.pick(TrafficPolicy::Cluster, 0).is_some() {
        DropReason::NoLocalEndpoints
    } else {
        DropReason::NoEndpoints
    }
}

#[cfg(test)]
mod tests;
