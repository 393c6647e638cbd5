//! Tunnels that pods make themselves. Their kernels leave the inner checksums to a device that
//! knows where those are, which a veth into user space is not.

mod common;

use std::collections::BTreeMap;

use common::Cluster;
use skein_perf::{AgentOptions, LabOptions, Pod, check};

/// IANA's port of VXLAN, which the lab's overlay does not use.
const VXLAN: u16 = 4789;

/// A port that nobody knows for VXLAN's.
const UNKNOWN: u16 = 9472;

/// Fits into the pods' path with VXLAN's headers before it, also over IPv6.
const MTU: u32 = 1380;

const BYTES: u64 = 4 << 20;

fn ip(pod: &Pod, arguments: &str) {
    let netns = pod.netns();
    let words = arguments.split_whitespace();
    netns.cmd("ip").args(words).run().unwrap();
}

/// A VXLAN between two pods; the address of the second end.
fn tunnel(ends: [&Pod; 2], v6: bool, port: u16) -> std::net::IpAddr {
    let [near, far] = ends.map(|pod| pod.ip(v6).unwrap());
    for (pod, host, remote) in [(ends[0], 1, far), (ends[1], 2, near)] {
        ip(
            pod,
            &format!("link add inner type vxlan id 7 dev eth0 remote {remote} dstport {port}"),
        );
        ip(pod, &format!("link set inner mtu {MTU} up"));
        ip(pod, &format!("address add 192.168.99.{host}/24 dev inner"));
    }
    "192.168.99.2".parse().unwrap()
}

fn carries_tcp(what: &str, ends: [&Pod; 2], v6: bool, port: u16) {
    let to = tunnel(ends, v6, port);
    for [from, at] in [ends, ends] {
        check::tcp_transfer(from.netns(), at.netns(), to, BYTES)
            .unwrap_or_else(|error| panic!("{what}, outer IPv6: {v6}: {error:#}"));
    }
    for pod in ends {
        ip(pod, "link delete inner");
    }
}

#[test]
fn a_vxlan_made_inside_a_pod_carries_tcp() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let before = cluster.received();
            carries_tcp(path, [from, to], v6, VXLAN);
            let seen = cluster.received() - before;
            assert!(
                seen > BYTES / 1500,
                "{path}: the workers saw {seen} packets"
            );
        }
    }
    cluster.finish();
}

#[test]
fn a_pod_that_computes_its_checksums_may_tunnel_by_any_port() {
    let mut cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let annotations = BTreeMap::from([("skein.io/tx-checksum".into(), "full".into())]);
    let mut ends = Vec::new();
    for (node, name) in [(0, "near"), (1, "far")] {
        let info = cluster.lab.nodes()[node].info();
        let labels = BTreeMap::new();
        let mut pod = Pod::prepare(info, "default", name, &labels, &annotations).unwrap();
        pod.connect().unwrap();
        pod.cni("CHECK").unwrap().run().unwrap();
        ends.push(pod);
    }
    carries_tcp("across nodes", [&ends[0], &ends[1]], false, UNKNOWN);
    cluster.pods.append(&mut ends);
    cluster.finish();
}
