//! What the agent answers to `skeinctl`: documents whose field names are stable.
//!
//! | view | document |
//! | --- | --- |
//! | `status` | [`Status`] |
//! | `endpoints` | [`EndpointsView`] |
//! | `ipcache` | [`Ipcache`] |
//! | `identities` | [`Identities`] |
//! | `policies` | [`Policies`] |
//! | `services` | [`Services`] |
//! | `drops` | [`Drops`] |
//! | `workers` | [`Workers`] |
//! | `config` | [`Config`](crate::config::Config): `section`, `key` as in the file |
//! | `metrics` | [`Metrics`] |

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The node at a glance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The node's name.
    pub node: String,
    /// The agent's version.
    pub version: String,
    /// Whether nothing is wrong: `ready`, and no `faults`.
    pub healthy: bool,
    /// Whether an ADD can succeed now.
    pub ready: bool,
    /// What keeps the node from being ready.
    pub not_ready: Vec<String>,
    /// What is wrong besides.
    pub faults: Vec<String>,
    /// What may be meant otherwise, and is not wrong: policies that select nothing.
    pub notes: Vec<String>,
    /// Seconds since the agent started.
    pub uptime_seconds: u64,
    /// Where the cluster's objects come from: `directory` or `kubernetes`.
    pub source: String,
    /// Whether the source has sent all that there was.
    pub synced: bool,
    /// Number of the tables published last.
    pub generation: u64,
    /// Number of the tables that every worker has.
    pub acknowledged: u64,
    /// What the kernel offers.
    pub features: String,
    /// How many workers there are.
    pub workers: usize,
    /// How many endpoints there are.
    pub endpoints: usize,
    /// Other nodes.
    pub peers: Vec<PeerStatus>,
    /// Uplink devices.
    pub uplinks: Vec<UplinkStatus>,
    /// Pod addresses of this node, by family: `ipv4`, `ipv6`.
    pub addresses: BTreeMap<String, AddressUsage>,
    /// Frames of packet memory.
    pub frames: Frames,
}

/// Another node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name.
    pub node: String,
    /// The address that packets to it are sent to.
    pub address: Option<IpAddr>,
    /// Whether the way there is known to the next hop's MAC.
    pub reachable: bool,
    /// Why not.
    pub reason: String,
    /// The uplink device.
    pub uplink: String,
    /// MTU of the path outside, in bytes.
    pub mtu: u32,
}

/// An uplink device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UplinkStatus {
    /// Its name.
    pub name: String,
    /// `native`, `generic`, or `closed`.
    pub mode: String,
    /// Why it does not run in the mode wished for; empty where it does.
    pub fallback: String,
    /// Queues with a socket of ours.
    pub queues: usize,
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Its MAC.
    pub mac: String,
    /// Packets received for us.
    pub rx_packets: u64,
    /// Packets sent by us.
    pub tx_packets: u64,
    /// Received packets that the kernel dropped for want of a frame or of room.
    pub rx_dropped: u64,
    /// Those of them for which the device had no free frame.
    pub rx_fill_empty: u64,
    /// Packets for which the transmit ring had no room.
    pub tx_full: u64,
}

/// Use of addresses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AddressUsage {
    /// Handed out.
    pub used: usize,
    /// All that there are.
    pub total: u64,
}

/// Frames of packet memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Frames {
    /// All that there are.
    pub total: usize,
    /// In the common store; those of workers and links are not counted.
    pub free: usize,
}

/// View `endpoints`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EndpointsView {
    /// By container and interface.
    pub endpoints: Vec<EndpointView>,
}

/// An interface of a pod on this node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EndpointView {
    /// The runtime's container.
    pub container_id: String,
    /// The interface's name in the container.
    pub ifname: String,
    /// The pod's namespace; empty for a container without pod.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's uid.
    pub uid: String,
    /// `reserved` (between the halves of an ADD), `waiting` (for its pod's object or the
    /// workers), `ready`, or `lost` (its device is gone).
    pub state: String,
    /// Its identity.
    pub identity: u32,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// MAC of the pod's end.
    pub mac: String,
    /// Name of the host end.
    pub host_ifname: String,
    /// Index of the host end.
    pub ifindex: u32,
    /// The route MTU, in bytes.
    pub mtu: u32,
    /// The worker that owns its link.
    pub worker: Option<u16>,
    /// `native` or `generic`.
    pub mode: String,
    /// Packets that the pod sent.
    pub rx_packets: u64,
    /// Bytes that the pod sent.
    pub rx_bytes: u64,
    /// Packets sent to the pod.
    pub tx_packets: u64,
    /// Bytes sent to the pod.
    pub tx_bytes: u64,
    /// Received packets that the kernel dropped for want of a frame or of room.
    pub rx_dropped: u64,
    /// Those of them for which the device had no free frame.
    pub rx_fill_empty: u64,
    /// Packets for which the transmit ring had no room.
    pub tx_full: u64,
}

/// View `ipcache`: what each address is known as.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ipcache {
    /// By address.
    pub entries: Vec<IpcacheEntry>,
}

/// An address or range in the tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IpcacheEntry {
    /// `10.1.0.5/32`, or the range.
    pub prefix: String,
    /// `local`, `remote`, or `range` (a peer's, without a pod that is known).
    pub kind: String,
    /// The identity; zero for a range.
    pub identity: u32,
    /// The node.
    pub node: String,
    /// Where the tunnel leads; absent for `local` and where there is no way.
    pub tunnel: Option<IpAddr>,
}

/// View `identities`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Identities {
    /// By number.
    pub identities: Vec<IdentityView>,
}

/// An identity.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IdentityView {
    /// Its number.
    pub identity: u32,
    /// Its name, for a reserved one.
    pub name: String,
    /// What it stands for.
    pub labels: BTreeMap<String, String>,
    /// How many pods have it.
    pub pods: usize,
}

/// View `policies`: what network policies let the pods of this node do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Policies {
    /// The pods of this node, by namespace and name.
    pub pods: Vec<PodPolicies>,
    /// Policies that do less than their authors may think.
    pub notes: Vec<PolicyNote>,
}

/// What applies to a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodPolicies {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// The policies that say what it takes; none: it takes everything.
    pub ingress: Vec<AppliedPolicy>,
    /// The policies that say what it may send; none: it may send everything.
    pub egress: Vec<AppliedPolicy>,
}

/// A policy that applies to a pod in a direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AppliedPolicy {
    /// Its namespace and name.
    pub policy: String,
    /// What each of its rules allows, in words; without rules it allows nothing.
    pub allows: Vec<String>,
}

/// A policy that does nothing, or cannot do all that it says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyNote {
    /// Its namespace and name.
    pub policy: String,
    /// What about it.
    pub note: String,
}

/// View `trace`: what would become of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceView {
    /// The pod that would send it.
    pub from: String,
    /// For whom it would be, behind a Service.
    pub to: String,
    /// The address that it would be sent to.
    pub address: IpAddr,
    /// Its destination port.
    pub port: u16,
    /// `forwarded` or `dropped`.
    pub verdict: String,
    /// Why it would be dropped: a name of `skeinctl drops`.
    pub reason: String,
    /// The same in words.
    pub explanation: String,
    /// What each stage decides, in their order.
    pub stages: Vec<TraceStage>,
}

/// What a stage decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStage {
    /// `classify`, `conntrack`, `service`, `policy-egress`, `route`, `policy-ingress`.
    pub stage: String,
    /// In words, with the policy and rule that it follows from.
    pub decision: String,
}

/// View `services`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServicesView {
    /// Ports of Services, each in each address family; Services that are not served, once.
    pub services: Vec<ServiceView>,
}

/// A port of a Service in an address family.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServiceView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// Why the Service is not served; empty where it is, and the rest then says how.
    pub not_served: String,
    /// Its number in the tables; 0: it has none.
    pub id: u32,
    /// The port's name; empty for one without.
    pub port_name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// `ipv4` or `ipv6`.
    pub family: String,
    /// Where it is reached.
    pub frontends: Vec<FrontendView>,
    /// `Cluster` or `Local`, for clients within the cluster.
    pub internal_policy: String,
    /// `Cluster` or `Local`, for clients from outside.
    pub external_policy: String,
    /// How long a client stays with its backend, in seconds; 0: it does not.
    pub affinity_seconds: u32,
    /// Who may use the load balancer's addresses; empty: everybody.
    pub source_ranges: Vec<String>,
    /// Where it is served.
    pub backends: Vec<BackendView>,
    /// What is wrong with the Service.
    pub faults: Vec<String>,
}

/// Where a Service is reached.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FrontendView {
    /// `cluster_ip`, `node_port`, `load_balancer` or `external_ip`.
    pub kind: String,
    /// The address; none for a port of each of the node's own.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: u16,
}

/// Where a Service is served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendView {
    /// The address.
    pub address: IpAddr,
    /// The port.
    pub port: u16,
    /// The pod as `namespace/name`; empty where the endpoint names none.
    pub pod: String,
    /// Its node; empty where the endpoint names none.
    pub node: String,
    /// Its zone; empty where the endpoint names none.
    pub zone: String,
    /// Whether it is on this node.
    pub local: bool,
    /// `ready`, `not ready`, `terminating` (and serving), or `ended`.
    pub state: String,
    /// Whether new connections may go there under policy Cluster.
    pub selected: bool,
    /// Whether new connections may go there under policy Local.
    pub selected_local: bool,
    /// Why it is not selected under policy Cluster; empty where it is.
    pub reason: String,
}

/// View `drops`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Drops {
    /// Every reason, in the order of a packet's way.
    pub drops: Vec<DropView>,
}

/// A reason to drop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DropView {
    /// Its stable name.
    pub reason: String,
    /// How often, over all workers.
    pub count: u64,
    /// What it means.
    pub explanation: String,
}

/// View `workers`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workers {
    /// By number.
    pub workers: Vec<WorkerView>,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerView {
    /// Its number.
    pub worker: usize,
    /// The CPU that it is pinned to.
    pub cpu: usize,
    /// Links that it owns.
    pub links: usize,
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets answered by the datapath itself.
    pub answered: u64,
    /// Packets dropped, for any reason.
    pub drops: u64,
    /// Packets whose flow was known.
    pub flow_hits: u64,
    /// Packets whose flow was not.
    pub flow_misses: u64,
    /// Known flows decided anew.
    pub flow_stale: u64,
    /// Flows that gave way to others.
    pub flow_evictions: u64,
    /// Flows known now.
    pub flows: u64,
    /// Packets handed to another worker.
    pub handovers: u64,
    /// Rounds that found work.
    pub busy_rounds: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Free frames on its own stack.
    pub free_frames: u64,
}

/// View `metrics`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// The page of `/metrics`.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys<T: Serialize + Default>() -> String {
        keys_of(&T::default())
    }

    fn keys_of<T: Serialize>(view: &T) -> String {
        let serde_json::Value::Object(map) = serde_json::to_value(view).unwrap() else {
            panic!("a view is an object");
        };
        let keys: Vec<_> = map.keys().map(String::as_str).collect();
        keys.join(" ")
    }

    #[test]
    fn field_names_are_stable() {
        let golden = [
            (
                keys::<Status>(),
                "acknowledged addresses endpoints faults features frames generation healthy node \
                 not_ready notes peers ready source synced uplinks uptime_seconds version workers",
            ),
            (
                keys::<PeerStatus>(),
                "address mtu node reachable reason uplink",
            ),
            (
                keys::<UplinkStatus>(),
                "fallback mac mode mtu name queues rx_dropped rx_fill_empty rx_packets tx_full tx_packets",
            ),
            (keys::<AddressUsage>(), "total used"),
            (keys::<Frames>(), "free total"),
            (
                keys::<EndpointView>(),
                "container_id host_ifname identity ifindex ifname ips mac mode mtu namespace pod \
                 rx_bytes rx_dropped rx_fill_empty rx_packets state tx_bytes tx_full tx_packets \
                 uid worker",
            ),
            (keys::<IpcacheEntry>(), "identity kind node prefix tunnel"),
            (keys::<IdentityView>(), "identity labels name pods"),
            (keys::<ServicesView>(), "services"),
            (
                keys::<ServiceView>(),
                "affinity_seconds backends external_policy family faults frontends id \
                 internal_policy name namespace not_served port_name protocol source_ranges",
            ),
            (keys::<FrontendView>(), "address kind port"),
            (
                keys_of(&BackendView {
                    address: IpAddr::from([10, 0, 0, 1]),
                    port: 0,
                    pod: String::new(),
                    node: String::new(),
                    zone: String::new(),
                    local: false,
                    state: String::new(),
                    selected: false,
                    selected_local: false,
                    reason: String::new(),
                }),
                "address local node pod port reason selected selected_local state zone",
            ),
            (keys::<DropView>(), "count explanation reason"),
            (
                keys::<WorkerView>(),
                "answered busy_rounds cpu drops flow_evictions flow_hits flow_misses flow_stale \
                 flows free_frames handovers links rx_bytes rx_packets sleeps tx_bytes tx_packets \
                 worker",
            ),
            (keys::<EndpointsView>(), "endpoints"),
            (keys::<Ipcache>(), "entries"),
            (keys::<Identities>(), "identities"),
            (keys::<Policies>(), "notes pods"),
            (keys::<PodPolicies>(), "egress ingress namespace pod"),
            (keys::<AppliedPolicy>(), "allows policy"),
            (keys::<PolicyNote>(), "note policy"),
            (keys::<Drops>(), "drops"),
            (keys::<Workers>(), "workers"),
            (keys::<Metrics>(), "text"),
        ];
        for (found, expected) in golden {
            let mut found: Vec<_> = found.split(' ').collect();
            found.sort_unstable();
            assert_eq!(found.join(" "), expected);
        }
    }
}
