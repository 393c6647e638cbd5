//! Pods and a host outside the cluster: masquerade both ways of routing, both IP versions, errors
//! that come back to the right pod, and the node's own connections left alone.

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use common::Cluster;
use serde_json::{Value, json};
use skein_perf::pod::Netns;
use skein_perf::{AgentOptions, LabOptions, Pod, check, wire};

/// Datagrams of the sizes that a pod's route takes, echoed.
const SIZES: [usize; 4] = [0, 1, 1000, 1372];

fn lab() -> LabOptions {
    LabOptions {
        outside: true,
        ..LabOptions::default()
    }
}

/// The outside host's addresses: on the nodes' own wire, and behind the default gateway.
fn targets() -> Vec<IpAddr> {
    let mut all = wire::outside_on_wire().to_vec();
    all.extend(wire::outside_beyond());
    all
}

fn node_address(pod: &Pod, of: IpAddr) -> IpAddr {
    let addresses = pod.info().node.addresses.iter().copied();
    let mut same = addresses.filter(|address| address.is_ipv4() == of.is_ipv4());
    same.next().expect("a node has both")
}

/// The first packets to a host on the wire itself may be dropped while the node looks for it.
fn warm_up(pod: &Pod, target: IpAddr) {
    for _ in 0..50 {
        if !check::ping(pod.netns(), target, 1).unwrap().ttls.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{} does not reach {target}", pod.full_name());
}

#[test]
fn pods_reach_the_outside_by_their_nodes_address() {
    let cluster = Cluster::new(&lab(), &AgentOptions::default());
    let outside = cluster.lab.outside().unwrap();
    for pod in [&cluster.pods[0], &cluster.pods[2]] {
        for target in targets() {
            let what = format!("{} to {target}", pod.full_name());
            warm_up(pod, target);
            let before = cluster.received();
            let ping = check::ping(pod.netns(), target, 3).unwrap();
            assert_eq!(ping.ttls.len(), 3, "{what}: ping");
            assert!(cluster.received() >= before + 6, "{what}: not by AF_XDP");
            if wire::outside_on_wire().contains(&target) {
                udp(pod, &outside, target);
            }
            check::tcp_transfer(pod.netns(), &outside, target, 4 << 20)
                .unwrap_or_else(|error| panic!("{what}: TCP: {error:#}"));
        }
    }
    the_node_is_left_alone(&cluster, &outside);
    cluster.finish();
}

/// Datagrams; a server that is bound to no address answers from the one on the wire, so they are
/// for that one alone.
fn udp(pod: &Pod, outside: &Netns, target: IpAddr) {
    let what = format!("{} to {target}", pod.full_name());
    let seen = check::seen_source(pod.netns(), outside, target)
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let node = node_address(pod, target);
    assert_eq!((seen.tcp, seen.udp), (node, node), "{what}");
    let echoes = check::udp_echo(pod.netns(), outside, target, &SIZES, 3).unwrap();
    let right = (echoes.returned, echoes.altered);
    assert_eq!(right, (echoes.sent, 0), "{what}: UDP");
}

/// What the node itself says to the outside passes as if Skein were not there.
fn the_node_is_left_alone(cluster: &Cluster, outside: &Netns) {
    let node = cluster.lab.nodes()[0].netns();
    for target in wire::outside_on_wire() {
        let seen = check::seen_source(&node, outside, target).unwrap();
        let own = node_address(&cluster.pods[0], target);
        assert_eq!((seen.tcp, seen.udp), (own, own), "{target}");
        check::tcp_transfer(&node, outside, target, 1 << 20).unwrap();
    }
}

#[test]
fn errors_about_translated_packets_reach_the_pod_that_sent_them() {
    let cluster = Cluster::new(&lab(), &AgentOptions::default());
    let pod = &cluster.pods[0];
    for target in wire::outside_beyond() {
        warm_up(pod, target);
        // Nobody listens there: the outside host says so, by an ICMP error that quotes the
        // packet under the node's address.
        check::udp_refused(pod.netns(), (target, 9).into())
            .unwrap_or_else(|error| panic!("{target}: {error:#}"));
    }
    cluster.finish();
}

/// A NodePort answers the outside at every node's address, whichever node the backend is on.
#[test]
fn the_outside_reaches_a_service_by_any_nodes_port() {
    const NODE_PORT: u16 = 30_080;
    const TARGET: u16 = 8080;
    let cluster = Cluster::new(&lab(), &AgentOptions::default());
    let outside = cluster.lab.outside().unwrap();
    let backend = &cluster.pods[2];
    let _server = check::name_server(backend.netns(), "c", TARGET).unwrap();
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "type": "NodePort",
            "clusterIP": "10.96.0.30",
            "clusterIPs": ["10.96.0.30", "fd96::30"],
            "ports": [
                {"name": "t", "port": 80, "nodePort": NODE_PORT, "protocol": "TCP"},
                {"name": "u", "port": 80, "nodePort": NODE_PORT, "protocol": "UDP"},
            ],
        },
    });
    cluster.lab.apply("service", &service).unwrap();
    for v6 in [false, true] {
        let version = if v6 { 6 } else { 4 };
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("web-{version}"),
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "addressType": format!("IPv{version}"),
            "ports": [
                {"name": "t", "port": TARGET, "protocol": "TCP"},
                {"name": "u", "port": TARGET, "protocol": "UDP"},
            ],
            "endpoints": [{"addresses": [backend.ip(v6).unwrap()], "nodeName": "node2"}],
        });
        cluster
            .lab
            .apply(&format!("slice-{version}"), &slice)
            .unwrap();
    }
    for node in cluster.lab.nodes() {
        until("the Service has its backend", || {
            let view = node.view("services").unwrap();
            let ports = view["services"].as_array().unwrap();
            let ready = |port: &Value| port["backends"][0]["selected"] == true;
            ports.len() == 4 && ports.iter().all(ready)
        });
        for address in &node.info().addresses {
            let to = SocketAddr::new(*address, NODE_PORT);
            for udp in [false, true] {
                // The first may be lost while the node looks for the outside host's MAC.
                check::ask_names(&outside, to, 1, udp).unwrap();
                let answers = check::ask_names(&outside, to, 10, udp).unwrap();
                assert_eq!(
                    answers.by_name.get("c"),
                    Some(&10),
                    "{to}, UDP {udp}: {answers:?}"
                );
            }
        }
    }
    cluster.finish();
}

/// Connections to the outside go on after their agent was killed, under the same ports.
#[test]
fn translated_connections_outlive_a_killed_agent() {
    let mut cluster = Cluster::new(&lab(), &AgentOptions::default());
    let outside = cluster.lab.outside().unwrap();
    let target = wire::outside_on_wire()[0];
    warm_up(&cluster.pods[0], target);
    let session = check::session(cluster.pods[0].netns(), &outside, target).unwrap();
    let counted = |cluster: &Cluster| {
        let node = &cluster.lab.nodes()[0];
        let view = node.view("conntrack").unwrap();
        let all = view["connections"].as_array().unwrap().clone();
        let mut ports: Vec<u64> = (all.iter())
            .filter(|one| one["masqueraded"] == true && one["protocol"] == "tcp")
            .map(|one| one["reply_destination_port"].as_u64().unwrap())
            .collect();
        ports.sort_unstable();
        ports
    };
    // The journal is written once a second.
    std::thread::sleep(Duration::from_secs(3));
    let before = counted(&cluster);
    assert!(!before.is_empty(), "no translated connection");
    cluster.lab.node(1).kill_agent().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    cluster.start_agent(1, &AgentOptions::default());
    std::thread::sleep(Duration::from_secs(2));
    let after = counted(&cluster);
    assert!(
        before.iter().all(|port| after.contains(port)),
        "before {before:?}, after {after:?}"
    );
    session.close().unwrap();
    cluster.finish();
}

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < Duration::from_secs(15), "not so: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
