//! The node's own processes and pods: every direction, both IP versions, true source addresses;
//! and what becomes of the host link when agents and nodes go.

mod common;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::{ARRIVES_WITH, Cluster};
use skein_perf::cmd::Cmd;
use skein_perf::lab::Lab;
use skein_perf::pod::Netns;
use skein_perf::{AgentOptions, LabOptions, Underlay, check};

/// One end of a conversation.
struct End {
    name: String,
    netns: Netns,
    addresses: Vec<IpAddr>,
}

impl End {
    fn host(cluster: &Cluster, number: usize) -> Self {
        let node = &cluster.lab.nodes()[number - 1];
        Self {
            name: node.name().to_owned(),
            netns: node.netns(),
            addresses: node.info().addresses.clone(),
        }
    }

    fn pod(cluster: &Cluster, index: usize) -> Self {
        let info = cluster.pods[index].info();
        Self {
            name: format!("pod {} on {}", info.name, info.node.name),
            netns: info.netns.clone(),
            addresses: info.ips.clone(),
        }
    }

    fn ip(&self, v6: bool) -> Option<IpAddr> {
        let mut addresses = self.addresses.iter();
        addresses.find(|ip| ip.is_ipv6() == v6).copied()
    }
}

/// Every direction between hosts and pods; pods 0 and 1 are on node 1, pod 2 on node 2.
fn directions(cluster: &Cluster) -> Vec<(End, End)> {
    let mut all = Vec::new();
    for (host, pod) in [(1, 0), (1, 2), (2, 1), (2, 2)] {
        let ends = || (End::host(cluster, host), End::pod(cluster, pod));
        all.push(ends());
        let (host, pod) = ends();
        all.push((pod, host));
    }
    all
}

fn speaks_everywhere(cluster: &Cluster) {
    // The kernels find each other's MACs meanwhile, which over IPv6 takes them seconds.
    let far = &cluster.pods[2];
    until("nodes reach each other", || {
        let ping = check::ping(cluster.pods[0].netns(), far.ip(false).unwrap(), 1);
        !ping.unwrap().ttls.is_empty()
    });
    let mut pairs = 0;
    for (from, to) in directions(cluster) {
        for v6 in [false, true] {
            let (Some(own), Some(ip)) = (from.ip(v6), to.ip(v6)) else {
                continue;
            };
            pairs += 1;
            let what = format!("{} ({own}) to {} ({ip})", from.name, to.name);
            let before = cluster.received();
            let ping = check::ping(&from.netns, ip, 3).unwrap();
            let dropped = all_drops(&cluster.lab);
            assert_eq!(ping.ttls, [ARRIVES_WITH; 3], "{what}: ping; {dropped:?}");
            assert!(cluster.received() >= before + 6, "{what}: not by AF_XDP");
            let seen = check::seen_source(&from.netns, &to.netns, ip)
                .unwrap_or_else(|error| panic!("{what}: {error:#}"));
            assert_eq!((seen.tcp, seen.udp), (own, own), "{what}");
            let sizes = [0, 1, 1000, 1372];
            let echoes = check::udp_echo(&from.netns, &to.netns, ip, &sizes, 2).unwrap();
            let right = (echoes.returned, echoes.altered);
            assert_eq!(right, (echoes.sent, 0), "{what}: UDP");
            check::tcp_transfer(&from.netns, &to.netns, ip, 4 << 20)
                .unwrap_or_else(|error| panic!("{what}: TCP: {error:#}"));
        }
    }
    assert!(pairs >= 8);
}

#[test]
fn hosts_and_pods_speak_in_every_direction_under_their_own_addresses() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    speaks_everywhere(&cluster);
    cluster.finish();
}

#[test]
fn the_same_over_an_ipv6_underlay_with_native_xdp() {
    let lab = LabOptions {
        underlay: Underlay::V6,
        ..LabOptions::default()
    };
    let agent = AgentOptions {
        pods_xdp_mode: "native".into(),
        ..AgentOptions::default()
    };
    let cluster = Cluster::new(&lab, &agent);
    speaks_everywhere(&cluster);
    cluster.finish();
}

#[test]
fn the_same_over_an_ipv4_underlay_with_real_packets_and_several_workers() {
    let lab = LabOptions {
        underlay: Underlay::V4,
        real_packets: true,
        ..LabOptions::default()
    };
    let agent = AgentOptions {
        cpus: vec![0, 1],
        ..AgentOptions::default()
    };
    let cluster = Cluster::new(&lab, &agent);
    speaks_everywhere(&cluster);
    cluster.finish();
}

/// What each node has dropped.
fn all_drops(lab: &Lab) -> Vec<String> {
    let mut found = Vec::new();
    for node in lab.nodes() {
        let view = node.view("drops").unwrap();
        for drop in view["drops"].as_array().unwrap() {
            if drop["count"] != 0 {
                let (reason, count) = (&drop["reason"], &drop["count"]);
                found.push(format!("{}: {reason} {count}", node.name()));
            }
        }
    }
    found
}

fn drops(lab: &Lab, number: usize, reason: &str) -> u64 {
    let view = lab.nodes()[number - 1].view("drops").unwrap();
    let all = view["drops"].as_array().unwrap();
    let found = all.iter().find(|drop| drop["reason"] == reason);
    found.unwrap()["count"].as_u64().unwrap()
}

/// A neighbour of the node sends to a pod by the node's own forwarding, once under its own
/// address and once under a pod's.
#[test]
fn what_the_kernel_forwards_is_judged_by_its_address() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let node = &cluster.lab.nodes()[0];
    let outside = Netns::add(
        cluster.lab.name(),
        format!("{}-outside", cluster.lab.name()),
    );
    let outside = outside.unwrap();
    let here = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        node.exec(&words).unwrap();
    };
    let there = |line: &str| {
        let mut words = line.split_whitespace();
        let program = words.next().unwrap();
        outside.cmd(program).args(words).run().unwrap();
    };
    let pair = format!(
        "ip link add name out0 netns {} type veth peer name out0 netns {}",
        node.netns().name,
        outside.name
    );
    Cmd::line(&pair).run().unwrap();
    here("ip address add 203.0.113.1/24 dev out0");
    here("ip address add 2001:db8:113::1/64 dev out0 nodad");
    here("ip link set out0 up");
    for setting in [
        "net.ipv4.ip_forward=1",
        "net.ipv6.conf.all.forwarding=1",
        "net.ipv4.conf.all.rp_filter=0",
        "net.ipv4.conf.out0.rp_filter=0",
    ] {
        here(&format!("sysctl -q -w {setting}"));
    }
    there("ip address add 203.0.113.2/24 dev out0");
    there("ip address add 2001:db8:113::2/64 dev out0 nodad");
    there("ip link set out0 up");
    there("ip route add default via 203.0.113.1");
    there("ip route add default via 2001:db8:113::1");
    let (target, victim) = (&cluster.pods[0], &cluster.pods[1]);
    for v6 in [false, true] {
        let ip = target.ip(v6).unwrap();
        // Each way is two hops: Skein and the kernel.
        let ping = check::ping(&outside, ip, 2).unwrap();
        assert_eq!(ping.ttls, [ARRIVES_WITH - 1; 2], "{ip}");
        // As a pod of the same node.
        let reason = "forwarded_cluster_source";
        let before = drops(&cluster.lab, 1, reason);
        let forged = victim.ip(v6).unwrap();
        let rest = if v6 { "128 dev lo nodad" } else { "32 dev lo" };
        there(&format!("ip address add {forged}/{rest}"));
        let output = outside
            .cmd("ping")
            .args(["-n", "-c", "2", "-i", "0.1", "-W", "1", "-I"])
            .arg(forged.to_string())
            .arg(ip.to_string())
            .try_run()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", output.describe());
        assert_eq!(drops(&cluster.lab, 1, reason), before + 2, "{ip}");
    }
    here("ip link delete out0");
    outside.delete().unwrap();
    cluster.finish();
}

/// The kernel's routes that the agent made, as `prefix mtu`.
fn routes(lab: &Lab, number: usize) -> Vec<String> {
    let mut found = Vec::new();
    for family in ["-4", "-6"] {
        let output = lab.nodes()[number - 1]
            .exec(&["ip", "-j", family, "route", "show", "proto", "83"])
            .unwrap();
        let all: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
        for route in all.as_array().unwrap() {
            assert_eq!(route["dev"], "skein0", "{route}");
            let mtu = &route["metrics"][0]["mtu"];
            let to = route["dst"].as_str().unwrap();
            found.push(format!("{to} {mtu}"));
        }
    }
    found
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn link_index(lab: &Lab) -> String {
    let path = "/sys/class/net/skein0/ifindex";
    lab.nodes()[0].exec(&["cat", path]).unwrap().stdout
}

#[test]
fn routes_follow_the_nodes_and_outlive_the_agent() {
    let options = LabOptions {
        nodes: 3,
        ..LabOptions::default()
    };
    let mut cluster = Cluster::new(&options, &AgentOptions::default());
    let all = [
        "10.244.1.0/24 1450",
        "10.244.2.0/24 1450",
        "10.244.3.0/24 1450",
        "169.254.1.1 null",
        "fd00:10:244:1::/64 1450",
        "fd00:10:244:2::/64 1450",
        "fd00:10:244:3::/64 1450",
    ];
    until("routes to all", || routes(&cluster.lab, 1) == all);
    let index = link_index(&cluster.lab);

    // Without an agent they stand, and nothing leaks: what is sent there is dropped.
    cluster.lab.node(1).kill_agent().unwrap();
    assert_eq!(routes(&cluster.lab, 1), all);
    let host = End::host(&cluster, 1);
    let pod = cluster.pods[2].ip(false).unwrap();
    assert_eq!(check::ping(&host.netns, pod, 1).unwrap().ttls, [0; 0]);

    // A node goes meanwhile, and somebody takes a route away: the next agent notices both.
    cluster.lab.withdraw("node-node3").unwrap();
    let gone = ["ip", "route", "delete", "10.244.2.0/24"];
    cluster.lab.nodes()[0].exec(&gone).unwrap();
    let agent = AgentOptions::default();
    cluster.lab.node(1).start_agent(&agent).unwrap();
    let rest: Vec<_> = (all.iter().copied())
        .filter(|route| !route.contains(".3.0") && !route.contains(":3::"))
        .collect();
    until("routes without node3", || routes(&cluster.lab, 1) == rest);
    assert_eq!(link_index(&cluster.lab), index, "the link is the same");
    until("the pod answers its host", || {
        !check::ping(&host.netns, pod, 1).unwrap().ttls.is_empty()
    });

    // While an agent runs it sees to them at once, and to the link itself.
    cluster.lab.nodes()[0].exec(&gone).unwrap();
    until("the route is back", || routes(&cluster.lab, 1) == rest);
    let delete = ["ip", "link", "delete", "skein0"];
    cluster.lab.nodes()[0].exec(&delete).unwrap();
    until("the link is back", || routes(&cluster.lab, 1) == rest);
    until("the pod answers again", || {
        !check::ping(&host.netns, pod, 1).unwrap().ttls.is_empty()
    });
    cluster.finish();
}

#[test]
fn a_session_over_the_uplink_does_not_notice_agents() {
    let mut cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let (from, to) = (End::host(&cluster, 1), End::host(&cluster, 2));
    let ip = to.ip(false).unwrap();
    let session = std::thread::spawn(move || {
        let time = Duration::from_secs(12);
        check::tcp_rr(
            &from.netns,
            &to.netns,
            ip,
            time,
            check::Placement::default(),
        )
    });
    for crash in [true, false] {
        for number in [1, 2] {
            let node = cluster.lab.node(number);
            if crash {
                node.kill_agent().unwrap();
            } else {
                node.stop_agent().unwrap();
            }
            node.start_agent(&AgentOptions::default()).unwrap();
        }
    }
    // One connection, every request answered.
    let answers = session.join().unwrap().unwrap();
    assert!(answers.count > 0);
    println!(
        "{} answers, the slowest {} µs",
        answers.count, answers.max_us
    );
    cluster.finish();
}
