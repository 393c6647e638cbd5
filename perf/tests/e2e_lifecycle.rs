//! Pods come and go, agents stop, crash and start again, and refuse what they must refuse.

mod common;

use std::time::{Duration, Instant};

use common::{Cluster, add, ping_both_ways};
use serde_json::Value;
use skein_perf::cmd::Cmd;
use skein_perf::{AgentOptions, LabOptions, bins, check, state};

fn cluster() -> Cluster {
    Cluster::new(&LabOptions::default(), &AgentOptions::default())
}

fn ping_all(cluster: &Cluster) {
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            ping_both_ways(path, from, to, v6);
        }
    }
}

/// Waits until every pair of pods answers again: how long is nobody's promise.
fn wait_until_connected(cluster: &Cluster) {
    let deadline = Instant::now() + Duration::from_secs(60);
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let ip = to.ip(v6).unwrap();
            while check::ping(from.netns(), ip, 1).unwrap().ttls.is_empty() {
                assert!(Instant::now() < deadline, "{path}: {ip} stays unreachable");
            }
        }
    }
}

#[test]
fn a_new_pod_answers_at_once_and_a_deleted_one_leaves_nothing() {
    let mut cluster = cluster();
    let links = |cluster: &Cluster| {
        let output = cluster.lab.nodes()[1].exec(&["ip", "-j", "link"]).unwrap();
        let links: Value = serde_json::from_str(&output.stdout).unwrap();
        links.as_array().unwrap().len()
    };
    let before = links(&cluster);
    for round in 0..3 {
        let pod = add(&mut cluster.lab, 2, "late");
        // ADD returns when every worker of its node knows the pod: no retries here.
        for v6 in [false, true] {
            ping_both_ways("across nodes", &pod, &cluster.pods[2], v6);
        }
        let ips = pod.info().ips.clone();
        pod.delete().unwrap();
        let endpoints = cluster.lab.nodes()[1]
            .view("endpoints")
            .unwrap()
            .to_string();
        for ip in ips {
            let shown = endpoints.contains(&format!("\"{ip}\""));
            assert!(!shown, "round {round}: {ip} stays: {endpoints}");
        }
        assert_eq!(links(&cluster), before, "round {round}");
    }
    cluster.finish();
}

#[test]
fn add_and_del_may_be_repeated() {
    let cluster = cluster();
    let pod = &cluster.pods[1];
    let again: Value = pod.cni("ADD").unwrap().json().unwrap();
    let first = again["ips"][0]["address"].as_str().unwrap();
    let address = first.split('/').next().unwrap();
    assert_eq!(address, pod.info().ips[0].to_string());
    ping_all(&cluster);
    for _ in 0..2 {
        let output = pod.cni("DEL").unwrap().run().unwrap();
        assert_eq!(output.stdout.trim(), "");
    }
    let gone = check::ping(cluster.pods[0].netns(), pod.ip(false).unwrap(), 1);
    assert_eq!(gone.unwrap().ttls, [0; 0]);
    cluster.finish();
}

#[test]
fn pods_are_connected_again_after_a_stop_and_after_a_crash() {
    let mut cluster = cluster();
    ping_all(&cluster);
    for crash in [false, true] {
        for number in [1, 2] {
            let node = cluster.lab.node(number);
            if crash {
                node.kill_agent().unwrap();
            } else {
                node.stop_agent().unwrap();
            }
        }
        for number in [1, 2] {
            let node = cluster.lab.node(number);
            node.start_agent(&AgentOptions::default()).unwrap();
        }
        wait_until_connected(&cluster);
        ping_all(&cluster);
    }
    cluster.finish();
}

#[test]
fn without_its_agent_a_pod_is_cut_off_and_never_forwarded_by_the_kernel() {
    let mut cluster = cluster();
    cluster.lab.node(1).kill_agent().unwrap();
    for (path, from, to, _) in cluster.paths() {
        let ip = to.ip(false).unwrap();
        let ping = check::ping(from.netns(), ip, 2).unwrap();
        assert_eq!(ping.ttls, [0; 0], "{path}");
    }
    let node = cluster.lab.node(1);
    node.start_agent(&AgentOptions::default()).unwrap();
    wait_until_connected(&cluster);
    cluster.finish();
}

#[test]
fn a_second_agent_on_a_node_is_refused_and_the_first_goes_on() {
    let cluster = cluster();
    let node = cluster.lab.nodes()[0].info();
    let output = node
        .cmd(bins::find("skeind").unwrap())
        .arg("--config")
        .arg(node.node_directory().join("skeind.toml"))
        .timeout(Duration::from_secs(60))
        .try_run()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", output.describe());
    ping_all(&cluster);
    cluster.finish();
}

#[test]
fn a_bad_configuration_is_refused_with_a_line_for_each_fault() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("skeind.toml");
    let text = "[workers]\npoll = \"sometimes\"\n[overlay]\nmode = \"pigeon\"\n";
    state::write_atomically(&config, text).unwrap();
    let output = Cmd::new(bins::find("skeind").unwrap())
        .args(["--check-config", "--config"])
        .arg(&config)
        .try_run()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", output.describe());
    for fault in ["sometimes", "pigeon"] {
        let lines = output.stderr.lines().filter(|line| line.contains(fault));
        assert_eq!(lines.count(), 1, "{fault}: {}", output.stderr);
    }
}

#[test]
fn a_manifest_that_does_not_parse_harms_nobody() {
    let cluster = cluster();
    let broken = cluster.lab.cluster_directory().join("broken.yaml");
    state::write_atomically(&broken, "kind: [Pod\n  ]: {\n").unwrap();
    ping_all(&cluster);
    let deadline = Instant::now() + Duration::from_secs(30);
    for node in cluster.lab.nodes() {
        // Reported with the file's name.
        while !node.agent().unwrap().log().unwrap().contains("broken.yaml") {
            assert!(Instant::now() < deadline, "{} says nothing", node.name());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    cluster.finish();
}
