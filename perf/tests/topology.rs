//! Labs without agents: what is built works, and all of it goes again.
//!
//! Needs root, as a machine that runs labs has; fails without.

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use skein_perf::bench::kernel::KernelPods;
use skein_perf::check::{self, Placement};
use skein_perf::cmd::Cmd;
use skein_perf::lab::{Lab, LabOptions, Underlay};
use skein_perf::pod::Netns;
use skein_perf::{state, teardown, wire};

fn options(nodes: usize, underlay: Underlay) -> LabOptions {
    LabOptions {
        nodes,
        underlay,
        ..LabOptions::default()
    }
}

/// The node's network alone: where a probe can stand.
fn netns(lab: &Lab, node: usize) -> Netns {
    Netns {
        lab: lab.name().to_owned(),
        name: lab.nodes()[node - 1].info().netns.clone(),
    }
}

#[test]
fn nodes_reach_each_other_and_nothing_is_left() {
    for (nodes, underlay) in [
        (1, Underlay::Dual),
        (2, Underlay::V4),
        (2, Underlay::V6),
        (3, Underlay::Dual),
    ] {
        let lab = Lab::new(&options(nodes, underlay)).unwrap();
        let last = u8::try_from(nodes).unwrap();
        let first = netns(&lab, 1);
        if underlay != Underlay::V6 {
            let to = IpAddr::V4(wire::address_v4(last));
            assert_eq!(check::ping(&first, to, 2).unwrap().ttls, [64, 64]);
        }
        if underlay != Underlay::V4 {
            let to = IpAddr::V6(wire::address_v6(last));
            assert_eq!(check::ping(&first, to, 2).unwrap().ttls, [64, 64]);
        }
        lab.assert_no_kernel_datapath().unwrap();
        let name = lab.name().to_owned();
        assert!(!teardown::leftovers(&name).is_empty(), "a live lab shows");
        lab.close().unwrap();
        assert_eq!(teardown::leftovers(&name), []);
    }
}

#[test]
fn a_node_has_its_own_name_links_run_and_bpf_file_system() {
    let lab = Lab::new(&options(2, Underlay::Dual)).unwrap();
    let [one, two] = lab.nodes() else {
        panic!("two nodes");
    };
    assert_eq!(one.exec(&["uname", "-n"]).unwrap().stdout.trim(), "node1");
    assert_eq!(two.exec(&["uname", "-n"]).unwrap().stdout.trim(), "node2");
    let links = one.exec(&["ls", "/sys/class/net"]).unwrap().stdout;
    assert_eq!(links.split_whitespace().collect::<Vec<_>>(), ["eth0", "lo"]);
    one.exec(&["mkdir", "/sys/fs/bpf/pins", "/run/mine"])
        .unwrap();
    for path in ["/sys/fs/bpf/pins", "/run/mine"] {
        assert!(two.exec(&["ls", path]).is_err(), "{path} shows in node2");
        assert!(!std::path::Path::new(path).exists(), "{path} shows outside");
    }
    let manifests = lab.cluster_directory();
    let node2 = std::fs::read_to_string(manifests.join("node-node2.yaml")).unwrap();
    for text in [
        "kind: Node",
        "10.244.2.0/24",
        "fd00:10:244:2::/64",
        "192.168.77.2",
        "fd77::2",
    ] {
        assert!(node2.contains(text), "{text} missing:\n{node2}");
    }
    lab.close().unwrap();
}

#[test]
fn real_packets_stay_below_the_mtu() {
    for real_packets in [true, false] {
        let lab = Lab::new(&LabOptions {
            real_packets,
            ..options(2, Underlay::V4)
        })
        .unwrap();
        let (one, two) = (netns(&lab, 1), netns(&lab, 2));
        let before = received(&two);
        let ip = IpAddr::V4(wire::address_v4(2));
        check::tcp_transfer(&one, &two, ip, 8 << 20).unwrap();
        let after = received(&two);
        let mean = (after.0 - before.0) as f64 / (after.1 - before.1) as f64;
        // A veth counts a super-packet as one.
        assert_eq!(mean <= 1514.0, real_packets, "{mean} bytes a packet");
        lab.close().unwrap();
    }
}

/// Bytes and packets that the uplink has received.
fn received(netns: &Netns) -> (u64, u64) {
    let links = netns.cmd("ip").args(["-j", "-s", "link", "show", "eth0"]);
    let rx = links.json().unwrap()[0]["stats64"]["rx"].clone();
    (
        rx["bytes"].as_u64().unwrap(),
        rx["packets"].as_u64().unwrap(),
    )
}

#[test]
fn every_probe_works_between_nodes() {
    let lab = Lab::new(&options(2, Underlay::Dual)).unwrap();
    let (one, two) = (netns(&lab, 1), netns(&lab, 2));
    let time = Duration::from_millis(300);
    for ip in [
        IpAddr::V4(wire::address_v4(2)),
        IpAddr::V6(wire::address_v6(2)),
    ] {
        let place = Placement::default();
        let transfer = check::tcp_transfer(&one, &two, ip, (1 << 20) + 7).unwrap();
        assert_eq!(transfer.bytes, (1 << 20) + 7);
        assert_eq!(transfer.sha256.len(), 64);
        let echoes = check::udp_echo(&one, &two, ip, &[0, 1, 1472, 9000, 65_000], 2).unwrap();
        assert_eq!((echoes.sent, echoes.returned, echoes.altered), (10, 10, 0));
        assert!(
            check::udp_rate(&one, &two, ip, 64, time, place)
                .unwrap()
                .packets
                > 1
        );
        assert!(check::tcp_rate(&one, &two, ip, time, place).unwrap().bytes > 1);
        let latency = check::tcp_rr(&one, &two, ip, time, place).unwrap();
        assert!(latency.count > 1 && latency.p50_us <= latency.p99_us);
        assert!(check::iperf3(&one, &two, ip, 1).unwrap().bytes > 1);
    }
    lab.close().unwrap();
}

#[test]
fn a_lost_path_is_an_error_or_a_missing_answer() {
    let lab = Lab::new(&options(2, Underlay::V4)).unwrap();
    let (one, two) = (netns(&lab, 1), netns(&lab, 2));
    two.cmd("ip")
        .args(["link", "set", "eth0", "down"])
        .run()
        .unwrap();
    let ip = IpAddr::V4(wire::address_v4(2));
    assert_eq!(check::ping(&one, ip, 1).unwrap().ttls, [0; 0]);
    assert!(check::udp_echo(&one, &two, ip, &[64], 1).map_or(true, |e| e.returned == 0));
    lab.close().unwrap();
}

#[test]
fn the_baseline_passes_traffic_and_is_seen_as_a_kernel_datapath() {
    let lab = Lab::new(&options(2, Underlay::V4)).unwrap();
    let kernel = KernelPods::build(&lab, 1500).unwrap();
    let [(from, _), others @ ..] = kernel.pods() else {
        panic!("no pods");
    };
    assert_eq!(others.len(), 2);
    for (to, ip) in others {
        assert_eq!(check::ping(from, *ip, 2).unwrap().ttls, [64, 64]);
        check::tcp_transfer(from, to, *ip, 1 << 20).unwrap();
    }
    let error = lab.assert_no_kernel_datapath().unwrap_err().to_string();
    for kind in ["node1", "node2", "bridge", "vxlan"] {
        assert!(error.contains(kind), "{kind} missing from: {error}");
    }
    lab.close().unwrap();
}

#[test]
fn a_filter_rule_is_seen_as_a_kernel_datapath() {
    let lab = Lab::new(&options(2, Underlay::V4)).unwrap();
    let node = &lab.nodes()[1];
    node.exec(&["nft", "add", "table", "inet", "rules"])
        .unwrap();
    let error = lab.assert_no_kernel_datapath().unwrap_err().to_string();
    assert!(error.contains("node2: nftables"), "{error}");
    lab.close().unwrap();
}

#[test]
fn every_kind_of_leftover_is_detected() {
    let name = state::unique_name();
    let kinds = |name: &str| -> Vec<&str> {
        let left = teardown::leftovers(name);
        left.iter().map(|leftover| leftover.kind).collect()
    };
    assert_eq!(kinds(&name), [""; 0]);
    // No lab has this name: garbage collection of other labs would take the namespace away, so
    // a record of a live owner stands guard.
    let record = state::LabRecord {
        name: name.clone(),
        owner: state::Owner::of(std::process::id()).unwrap(),
        persistent: false,
        directory: state::directory(&name),
    };
    state::create(&record).unwrap();
    let sleeper = Cmd::line("sleep 60").of_lab(&name).spawn().unwrap();
    // A link of the machine's own namespace, down and without addresses.
    Cmd::line(&format!("ip link add {name} type bridge"))
        .run()
        .unwrap();
    Netns::add(&name, format!("{name}-node1")).unwrap();
    assert_eq!(
        kinds(&name),
        ["namespace", "link", "mount", "process", "file", "file"]
    );
    // Labs make no such mount, so teardown does not know how to remove it, but must say so.
    let mount = record.directory.join("mount");
    std::fs::create_dir(&mount).unwrap();
    let mount = mount.display().to_string();
    Cmd::line(&format!("mount -t tmpfs tmpfs {mount}"))
        .run()
        .unwrap();
    let error = teardown::teardown(&name).unwrap_err().to_string();
    Cmd::line(&format!("umount {mount}")).run().unwrap();
    assert!(error.contains(&format!("mount {mount}")), "{error}");
    for gone in ["namespace", "link", "process"] {
        assert!(!error.contains(gone), "{error}");
    }
    teardown::teardown(&name).unwrap();
    assert_eq!(kinds(&name), [""; 0]);
    drop(sleeper);
}

#[test]
fn a_panic_removes_the_lab() {
    let mut name = String::new();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let lab = Lab::new(&options(2, Underlay::V4)).unwrap();
        lab.name().clone_into(&mut name);
        panic!("as a failing test does");
    }));
    assert!(result.is_err());
    assert_eq!(teardown::leftovers(&name), []);
}

/// `skein-lab up` in a process of its own, without agents; returns the lab's name.
fn up() -> String {
    let output = Cmd::new(env!("CARGO_BIN_EXE_skein-lab"))
        .args(["up", "--no-agent"])
        .run()
        .unwrap();
    let name = output.stdout.split_whitespace().nth(1).unwrap().to_owned();
    assert!(state::is_lab_name(&name), "{}", output.stdout);
    name
}

#[test]
fn a_persistent_lab_stays_until_down() {
    let lab = env!("CARGO_BIN_EXE_skein-lab");
    let name = up();
    Cmd::new(lab).arg("gc").run().unwrap();
    let exec = Cmd::new(lab)
        .args(["exec", "--lab", &name, "node2", "uname", "-n"])
        .run()
        .unwrap();
    assert_eq!(exec.stdout.trim(), "node2");
    let failing = Cmd::new(lab)
        .args(["exec", "--lab", &name, "node2", "sh", "-c", "exit 7"])
        .try_run()
        .unwrap();
    assert_eq!(failing.status.code(), Some(7));
    Cmd::new(lab).args(["down", "--lab", &name]).run().unwrap();
    assert_eq!(teardown::leftovers(&name), []);
}

#[test]
fn garbage_of_a_dead_owner_is_collected() {
    let name = up();
    let record: state::LabRecord =
        state::read_json(&state::records(&name).join("lab.json")).unwrap();
    // Without its first node's holder a lab is garbage.
    teardown::send(record.owner.pid, nix::sys::signal::Signal::SIGKILL);
    let removed = wait_until(|| {
        teardown::collect_garbage().unwrap();
        teardown::leftovers(&name).is_empty()
    });
    assert!(removed, "{:?}", teardown::leftovers(&name));
}

#[test]
fn a_killed_or_interrupted_process_leaves_nothing() {
    use nix::sys::signal::Signal;
    for signal in [Signal::SIGKILL, Signal::SIGINT, Signal::SIGTERM] {
        let programs = agent_that_never_gets_ready();
        let mut child = Command::new(env!("CARGO_BIN_EXE_skein-lab"))
            .args(["bench", "--filter", "udp64-same", "--wires", "veth"])
            .env("SKEIN_BIN_DIR", programs.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let mut name = String::new();
        let found = wait_until(|| {
            let lab = state::labs().into_iter().find(|lab| lab.owner.pid == pid);
            name = lab.map(|lab| lab.name).unwrap_or_default();
            !name.is_empty() && std::path::Path::new(&format!("/run/netns/{name}-node2")).exists()
        });
        assert!(found, "no lab of process {pid}");
        teardown::send(pid, signal);
        child.wait().unwrap();
        let gone = wait_until(|| teardown::leftovers(&name).is_empty());
        assert!(gone, "{signal}: {:?}", teardown::leftovers(&name));
    }
}

/// Programs for a lab that stays forever where it waits for its first agent.
fn agent_that_never_gets_ready() -> tempfile::TempDir {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let agent = folder.path().join("skeind");
    std::fs::write(&agent, "#!/bin/sh\nexec sleep 600\n").unwrap();
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755)).unwrap();
    let lab = env!("CARGO_BIN_EXE_skein-lab");
    symlink(lab, folder.path().join("skein-lab")).unwrap();
    folder
}

fn wait_until(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}
