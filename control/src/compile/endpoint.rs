//! Pods → this node's endpoints, and pods elsewhere.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::net::IpAddr;
use std::sync::Arc;

use skein_cni::agent::Attachment;
use skein_dataplane::ids::{EndpointId, IdentityId, PeerId, WorkerId};
use skein_dataplane::policy::EndpointPolicy;
use skein_dataplane::snapshot::{self, Peer, RemotePod, Snapshot, SnapshotBuilder};

use super::{HostPlaced, Inputs, describe};
use crate::state::{Endpoint, Phase};

pub(super) type Local = BTreeMap<EndpointId, (snapshot::Endpoint, WorkerId)>;

/// The node's own network stack behind the host link: a node's own addresses are its alone.
pub(super) fn host(placed: &HostPlaced, node: &snapshot::Node) -> (snapshot::Endpoint, WorkerId) {
    let host = snapshot::Endpoint {
        id: EndpointId::HOST,
        link: placed.link,
        mac: placed.mac,
        gateway_mac: placed.gateway_mac,
        addresses: node.addresses.clone(),
        identity: IdentityId::HOST,
        mtu: placed.mtu,
    };
    (host, placed.worker)
}

/// Endpoints whose links are open. One whose pod is not known (yet, or any more) keeps the
/// identity that it had.
pub(super) fn local(
    inputs: &Inputs<'_>,
    last: &Snapshot,
    faults: &mut Vec<String>,
) -> (Local, Vec<Attachment>) {
    let mut endpoints = Local::new();
    let mut complete = Vec::new();
    let mut taken = BTreeSet::new();
    for endpoint in inputs.state.endpoints() {
        let Some(&placed) = inputs.placed.get(&endpoint.attachment) else {
            continue;
        };
        let known = identity(inputs, endpoint);
        if known.is_some() {
            complete.push(endpoint.attachment.clone());
        }
        let before = last.endpoint(placed.id).map(|before| before.identity);
        let mut addresses = endpoint.ips.clone();
        addresses.retain(|ip| {
            let free = taken.insert(*ip);
            if !free {
                let who = describe(endpoint);
                faults.push(format!("{who}: another endpoint has address {ip} too"));
            }
            free
        });
        let entry = snapshot::Endpoint {
            id: placed.id,
            link: placed.link,
            mac: endpoint.pod_mac,
            gateway_mac: endpoint.host_mac,
            addresses,
            identity: known.or(before).unwrap_or(IdentityId::UNMANAGED),
            // Not the device's: what is delivered is what the pod's routes promise to its peers.
            mtu: endpoint.route_mtu,
        };
        endpoints.insert(placed.id, (entry, placed.worker));
    }
    (endpoints, complete)
}

/// Sets what endpoints allow, in the tables that first hold them. One whose pod is not known
/// keeps what it had; a new one allows nothing until its pod is known, since nothing yet says
/// that no policy is meant for it.
pub(super) fn policies(inputs: &Inputs<'_>, last: &Snapshot, builder: &mut SnapshotBuilder) {
    for (attachment, placed) in inputs.placed {
        let known = inputs.policies.get(attachment).cloned();
        let policy = match known {
            Some(policy) => policy,
            None if last.endpoint(placed.id).is_some() => continue,
            None => EndpointPolicy {
                own: Vec::new(),
                ingress: Some(Arc::default()),
                egress: Some(Arc::default()),
            },
        };
        // An endpoint that the tables refused has its fault already.
        if builder.tables().endpoint(placed.id).is_some() {
            let set = builder.set_policy(placed.id, policy);
            debug_assert!(set.is_ok(), "the endpoint is there");
        }
    }
}

/// The identity of the endpoint's very pod; an endpoint that never was a pod's has none to wait
/// for.
fn identity(inputs: &Inputs<'_>, endpoint: &Endpoint) -> Option<IdentityId> {
    match &endpoint.pod {
        None => Some(IdentityId::UNMANAGED),
        Some(reference) => {
            let pod = inputs.state.pod_of(reference)?;
            inputs.identities.get(&pod.key).copied()
        }
    }
}

/// Pods on peers, by address.
pub(super) fn remote(
    inputs: &Inputs<'_>,
    peers: &BTreeMap<PeerId, Peer>,
    local: &Local,
    faults: &mut Vec<String>,
) -> BTreeMap<IpAddr, RemotePod> {
    let own: BTreeSet<IpAddr> = (local.values())
        .flat_map(|(endpoint, _)| endpoint.addresses.iter().copied())
        .collect();
    let mut remote = BTreeMap::new();
    for pod in inputs.state.pods() {
        if pod.host_network || pod.phase == Phase::Ended || pod.node_name == inputs.node {
            continue;
        }
        let peer = (inputs.peers.get(&pod.node_name)).filter(|peer| peers.contains_key(peer));
        let (Some(&peer), Some(&identity)) = (peer, inputs.identities.get(&pod.key)) else {
            continue;
        };
        for &ip in &pod.ips {
            if own.contains(&ip) {
                faults.push(format!(
                    "pod {} on node {}: its address {ip} is a pod's on this node, who keeps it",
                    pod.key, pod.node_name
                ));
                continue;
            }
            match remote.entry(ip) {
                Entry::Occupied(_) => faults.push(format!(
                    "pod {}: its address {ip} is another pod's, who keeps it",
                    pod.key
                )),
                Entry::Vacant(free) => {
                    free.insert(RemotePod { peer, identity });
                }
            }
        }
    }
    remote
}
