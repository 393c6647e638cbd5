//! Pods and a host outside the cluster: masquerade both ways of routing, both IP versions, errors
//! that come back to the right pod, and the node's own connections left alone.

mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::Cluster;
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
            let seen = check::seen_source(pod.netns(), &outside, target)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
            let node = node_address(pod, target);
            assert_eq!((seen.tcp, seen.udp), (node, node), "{what}");
            let echoes = check::udp_echo(pod.netns(), &outside, target, &SIZES, 3).unwrap();
            let right = (echoes.returned, echoes.altered);
            assert_eq!(right, (echoes.sent, 0), "{what}: UDP");
            check::tcp_transfer(pod.netns(), &outside, target, 4 << 20)
                .unwrap_or_else(|error| panic!("{what}: TCP: {error:#}"));
        }
    }
    the_node_is_left_alone(&cluster, &outside);
    cluster.finish();
}

/// What the node itself says to the outside passes as if Skein were not there.
fn the_node_is_left_alone(cluster: &Cluster, outside: &Netns) {
    let node = cluster.lab.nodes()[0].netns();
    for target in targets() {
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
