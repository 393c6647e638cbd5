//! Packets that are out of the ordinary: fragments, spoofed sources, the gateway, strangers.

mod common;

use common::{ARRIVES_WITH, Cluster};
use skein_perf::cmd::Cmd;
use skein_perf::{AgentOptions, LabOptions, check, wire};

fn cluster() -> Cluster {
    Cluster::new(&LabOptions::default(), &AgentOptions::default())
}

fn ip(cluster: &Cluster, pod: usize, arguments: &str) {
    let netns = cluster.pods[pod].netns();
    netns
        .cmd("ip")
        .args(arguments.split_whitespace())
        .run()
        .unwrap();
}

#[test]
fn datagrams_above_the_mtu_arrive_as_fragments() {
    let cluster = cluster();
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let ip = to.ip(v6).unwrap();
            let echoes = check::udp_echo(from.netns(), to.netns(), ip, &[2000, 9000, 60_000], 3);
            let echoes = echoes.unwrap();
            assert_eq!(echoes.returned, echoes.sent, "{path}, {ip}");
        }
    }
    cluster.finish();
}

#[test]
fn a_source_that_is_not_the_pods_own_gets_nowhere() {
    let cluster = cluster();
    let drops = |node: usize| cluster.lab.nodes()[node].view("drops").unwrap();
    let before = drops(0);
    for (pod, spoofed, prefix) in [(0, "10.244.1.222", 32), (0, "fd00:10:244:1::222", 128)] {
        let nodad = if prefix == 128 { " nodad" } else { "" };
        ip(
            &cluster,
            pod,
            &format!("address add {spoofed}/{prefix} dev eth0{nodad}"),
        );
        let (_, _, to, _) = cluster.paths()[1];
        let to = to.ip(prefix == 128).unwrap();
        let ping = Cmd::line(&format!("ping -n -c 2 -i 0.2 -W 1 -I {spoofed} {to}"));
        let netns = format!("--net={}", cluster.pods[pod].netns().path());
        let output = ping
            .of_lab(cluster.lab.name())
            .prefix(["nsenter", netns.as_str()])
            .try_run()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", output.describe());
    }
    assert_ne!(before, drops(0), "the drops are counted");
    cluster.finish();
}

#[test]
fn a_foreign_mac_gets_nowhere() {
    let cluster = cluster();
    let (_, from, to, _) = cluster.paths()[0];
    ip(&cluster, 0, "link set eth0 address 02:00:00:00:00:99");
    let ping = check::ping(from.netns(), to.ip(false).unwrap(), 2).unwrap();
    assert_eq!(ping.ttls, [0; 0]);
    cluster.finish();
}

#[test]
fn a_pod_has_host_routes_a_link_local_gateway_and_no_bridge() {
    let cluster = cluster();
    let pod = &cluster.pods[0];
    for (family, gateway, length) in [("-4", "169.254.1.1", 32), ("-6", "fe80::1", 128)] {
        let routes = pod.exec(&["ip", family, "route"]).unwrap().stdout;
        let default = format!("default via {gateway} dev eth0");
        assert!(routes.contains(&default), "{routes}");
        let address = pod.ip(family == "-6").unwrap();
        let own = pod.exec(&["ip", family, "address", "show", "dev", "eth0"]);
        let own = own.unwrap().stdout;
        assert!(own.contains(&format!("{address}/{length}")), "{own}");
    }
    cluster.finish();
}

#[test]
fn an_address_of_the_pod_range_that_nobody_has_does_not_answer() {
    let cluster = cluster();
    let from = cluster.pods[0].netns();
    for address in ["10.244.1.250", "10.244.2.250", "fd00:10:244:2::fa"] {
        let output = from
            .cmd("ping")
            .args(["-n", "-c", "1", "-W", "1", address])
            .try_run()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", output.describe());
    }
    cluster.finish();
}

#[test]
fn a_frame_from_no_known_node_gets_nowhere() {
    // A third node that the cluster does not know of, with a kernel VXLAN device, plays the
    // stranger: it sends well-formed frames to a pod of node 1 from an address of node 2's pods.
    let lab = LabOptions {
        nodes: 3,
        ..LabOptions::default()
    };
    let cluster = Cluster::new(&lab, &AgentOptions::default());
    cluster.lab.withdraw("node-node3").unwrap();
    // An unhandled change of the folder would take a second; an agent reports none by itself.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let stranger = &cluster.lab.nodes()[2];
    let target = wire::address_v4(1);
    let to = cluster.pods[0].ip(false).unwrap();
    for command in [
        format!("ip link add vxlan0 type vxlan id 1 dev eth0 remote {target} dstport 8472"),
        "ip address add 10.244.2.77/32 dev vxlan0".to_owned(),
        "ip link set vxlan0 up".to_owned(),
        format!("ip route add {to}/32 dev vxlan0"),
        format!("ip neighbour add {to} lladdr 02:00:00:00:00:01 dev vxlan0"),
    ] {
        let words: Vec<&str> = command.split(' ').collect();
        stranger.exec(&words).unwrap();
    }
    let capture = cluster.pods[0]
        .spawn(&["tcpdump", "-n", "-l", "-i", "eth0", "src", "10.244.2.77"])
        .unwrap();
    let drops = || cluster.lab.nodes()[0].view("drops").unwrap();
    let before = drops();
    let ping = stranger.info().cmd("ping");
    let output = ping
        .args(["-n", "-c", "3", "-i", "0.2", "-W", "1", &to.to_string()])
        .try_run()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", output.describe());
    assert_ne!(before, drops(), "the drops are counted");
    skein_perf::teardown::send(capture.pid(), nix::sys::signal::Signal::SIGTERM);
    let seen = capture.finish(std::time::Duration::from_secs(10)).unwrap();
    assert_eq!(seen.stdout.trim(), "", "the pod saw a stranger's packets");
    stranger.exec(&["ip", "link", "delete", "vxlan0"]).unwrap();
    cluster.finish();
}

#[test]
fn a_ttl_that_ends_here_is_answered_by_the_gateway() {
    let cluster = cluster();
    for (path, from, to, _) in cluster.paths() {
        let to_ip = to.ip(false).unwrap().to_string();
        let output = from
            .netns()
            .cmd("ping")
            .args(["-n", "-c", "1", "-W", "2", "-t", "1", &to_ip])
            .try_run()
            .unwrap();
        assert_eq!(
            output.status.code(),
            Some(1),
            "{path}: {}",
            output.describe()
        );
        let answer = output.stdout.contains("Time to live exceeded");
        assert!(answer, "{path}: {}", output.stdout);
        // One more is enough to arrive, and then with one hop less.
        let ping = check::ping(from.netns(), to.ip(false).unwrap(), 1).unwrap();
        assert_eq!(ping.ttls, [ARRIVES_WITH], "{path}");
    }
    cluster.finish();
}
