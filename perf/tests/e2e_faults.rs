//! What happens to a node beneath its agent: the uplink goes down, its MTU shrinks, the node
//! gets another address, another network plugin was here before.

mod common;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::{Cluster, ping_both_ways};
use skein_perf::check::{self, Cutting, Echo};
use skein_perf::node::Node;
use skein_perf::probe::sizes::{Fate, Run};
use skein_perf::{AgentOptions, LabOptions, Underlay, cluster, wire};

/// How long a change may take to be known: a generous deadline, not a promise.
const PATIENCE: Duration = Duration::from_secs(60);

/// IPv4 alone: the kernel takes IPv6 addresses off a device that goes down.
fn new_cluster() -> Cluster {
    let lab = LabOptions {
        underlay: Underlay::V4,
        ..LabOptions::default()
    };
    Cluster::new(&lab, &AgentOptions::default())
}

fn ip(node: &Node, arguments: &str) {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    node.exec(&[&["ip"], &words[..]].concat()).unwrap();
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Pods of both nodes reach each other, at once or soon.
fn connected(cluster: &Cluster, what: &str) {
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let (there, back) = (to.ip(v6).unwrap(), from.ip(v6).unwrap());
            for (from, to) in [(from, there), (to, back)] {
                until(&format!("{what}, {path}: {to} answers"), || {
                    !check::ping(from.netns(), to, 1).unwrap().ttls.is_empty()
                });
            }
            ping_both_ways(what, from, to, v6);
        }
    }
}

#[test]
fn an_uplink_that_was_down_carries_again() {
    let cluster = new_cluster();
    let node = &cluster.lab.nodes()[0];
    ip(node, "link set eth0 down");
    let (path, from, to, _) = cluster.paths()[0];
    ping_both_ways(path, from, to, false);
    let (_, from, to, _) = cluster.paths()[1];
    let far = to.ip(false).unwrap();
    let lost = check::ping(from.netns(), far, 1).unwrap();
    assert_eq!(lost.ttls, [0; 0], "the uplink is down");
    ip(node, "link set eth0 up");
    connected(&cluster, "up again");
    cluster.finish();
}

#[test]
fn a_path_that_narrows_is_told_to_pods_that_are_there() {
    let cluster = new_cluster();
    for mtu in [1400, 1500] {
        for node in &cluster.lab.nodes()[..2] {
            ip(node, &format!("link set eth0 mtu {mtu}"));
            until("the path's MTU is known", || {
                node.view("status").unwrap()["peers"][0]["mtu"] == mtu
            });
        }
        let limit = mtu - 50;
        let (_, from, to, _) = cluster.paths()[1];
        let far = to.ip(false).unwrap();
        let sizes = 1280..=1440;
        let cutting = Cutting::Forbidden;
        let runs = check::sizes(from.netns(), to.netns(), far, sizes, Echo::Udp, cutting).unwrap();
        let whole = limit as usize - 28;
        let fate = Fate::TooBig {
            mtu: limit,
            by: "169.254.1.1".parse().unwrap(),
        };
        let expected = [
            Run {
                sizes: 1280..=whole,
                fate: Fate::Returned,
            },
            Run {
                sizes: whole + 1..=1440,
                fate,
            },
        ];
        assert_eq!(runs, expected, "uplinks of {mtu}");
    }
    cluster.finish();
}

#[test]
fn a_node_that_gets_another_address_is_reached_there() {
    let cluster = new_cluster();
    let node = &cluster.lab.nodes()[1];
    let [old, new] = [2, 102].map(wire::address_v4);
    ip(node, &format!("address add {new}/24 dev eth0"));
    let mut info = node.info().clone();
    info.addresses = vec![IpAddr::V4(new)];
    let object = cluster::node(&info);
    cluster.lab.apply("node-node2", &object).unwrap();
    until("the peer has its new address", || {
        let status = cluster.lab.nodes()[0].view("status").unwrap();
        status["peers"][0]["address"] == serde_json::json!(new)
    });
    ip(node, &format!("address delete {old}/24 dev eth0"));
    // The first address's removal takes others of its network along, where the kernel is told
    // nothing else; routes too.
    ip(node, &format!("address replace {new}/24 dev eth0"));
    connected(&cluster, "the new address");
    cluster.finish();
}

#[test]
fn what_another_plugin_left_is_named_until_it_is_gone() {
    let cluster = new_cluster();
    let node = &cluster.lab.nodes()[0];
    let faults = || node.view("status").unwrap()["faults"].to_string();
    assert!(!faults().contains("flannel"), "{}", faults());
    ip(node, "link add flannel.1 type bridge");
    until("flannel.1 is named", || faults().contains("flannel.1"));
    ip(node, "link delete flannel.1");
    until("flannel.1 is forgotten", || !faults().contains("flannel"));
    cluster.finish();
}
