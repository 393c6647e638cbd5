//! How the lab plays container runtime and kubelet, and that its demo cannot be fooled.
//!
//! The programs here are stand-ins: shell scripts that connect pods by kernel routing. They let
//! the lab's own side be tested by itself: what it calls the plugin with, that it tries again
//! when told to, that it notices an agent that dies; and a demo over a datapath that is not
//! AF_XDP has to fail.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::Value;
use skein_perf::cmd::{Cmd, Output};
use skein_perf::node::NodeInfo;
use skein_perf::pod::PodInfo;
use skein_perf::{state, teardown};

/// The variable that turns a test program into the stand-in for the agent.
const STAND_IN: &str = "SKEIN_STAND_IN_AGENT";

/// Routes to the other node's pods, and then the agent's health page.
const AGENT: &str = r#"#!/bin/sh
echo "stand-in for $(uname -n) with $*"
test -f "$2" || exit 1
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
n=$(uname -n | tr -d a-z); m=$((3 - n))
ip route replace 10.244.$m.0/24 via 192.168.77.$m
ip -6 route replace fd00:10:244:$m::/64 via fd77::$m 2>/dev/null
SKEIN_STAND_IN_AGENT=1 exec "$TEST_PROGRAM" --exact stand_in_agent --nocapture
"#;

/// Connects a pod by kernel routing; the first ADD of a node says "try again later".
const PLUGIN: &str = r#"#!/bin/sh
conf=$(cat)
echo "$(uname -n) $CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS $conf" >> "$CALLS"
count=$(cat /run/count 2>/dev/null || echo 0)
echo $((count + 1)) > /run/count
n=$(uname -n | tr -d a-z)
if test "$CNI_COMMAND" = DEL; then
    ip -n "$(basename "$CNI_NETNS")" link delete "$CNI_IFNAME" 2>/dev/null
    exit 0
fi
if test "$count" = 0; then
    echo '{"cniVersion": "1.1.0", "code": 11, "msg": "not yet"}'
    exit 1
fi
set -e
ns=$(basename "$CNI_NETNS"); host=pod$count; v4=10.244.$n.$count; v6=fd00:10:244:$n::$count
ip link add name "$host" type veth peer name "$CNI_IFNAME" netns "$ns"
ip link set "$host" up
ip address add 169.254.1.1/32 dev "$host"
ip address add fe80::1/64 dev "$host" nodad
ip -n "$ns" link set "$CNI_IFNAME" up
ip -n "$ns" address add $v4/32 dev "$CNI_IFNAME"
ip -n "$ns" address add $v6/128 dev "$CNI_IFNAME" nodad
ip -n "$ns" route add 169.254.1.1 dev "$CNI_IFNAME"
ip -n "$ns" route add default via 169.254.1.1
ip -n "$ns" -6 route add default via fe80::1 dev "$CNI_IFNAME"
ip route add $v4/32 dev "$host"
ip -6 route add $v6/128 dev "$host"
echo '{"cniVersion": "1.1.0", "ips": [{"address": "'$v4'/32"}, {"address": "'$v6'/128"}]}'
"#;

/// A node that reaches its one peer, and whose workers never see a packet.
const CONTROL: &str = r#"#!/bin/sh
echo '{"workers": [{"rx_packets": 0}], "peers": [{"reachable": true}]}'
"#;

/// A folder of programs, and the plugin's record of its calls.
struct Programs {
    folder: tempfile::TempDir,
}

impl Programs {
    fn new(agent: &str, plugin: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, script) in [
            ("skeind", agent),
            ("skein-cni", plugin),
            ("skeinctl", CONTROL),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, script).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let lab = env!("CARGO_BIN_EXE_skein-lab");
        symlink(lab, folder.path().join("skein-lab")).unwrap();
        Self { folder }
    }

    fn lab(&self, arguments: &str) -> Output {
        let test_program = std::env::current_exe().unwrap();
        let words = arguments.split_whitespace();
        Cmd::new(self.path("skein-lab"))
            .args(words)
            .env("SKEIN_BIN_DIR", &self.folder.path().display().to_string())
            .env("TEST_PROGRAM", &test_program.display().to_string())
            .env("CALLS", &self.path("calls").display().to_string())
            .timeout(std::time::Duration::from_secs(300))
            .try_run()
            .unwrap()
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn calls(&self, command: &str) -> Vec<String> {
        let calls = std::fs::read_to_string(self.path("calls")).unwrap();
        let lines = calls
            .lines()
            .filter(|line| line.split(' ').nth(1) == Some(command));
        lines.map(ToOwned::to_owned).collect()
    }
}

/// Not a test of its own: the process that stands in for the agent's health page, ended by
/// SIGTERM with 0 as the agent is.
#[test]
fn stand_in_agent() {
    use std::io::{Read, Write};
    if std::env::var_os(STAND_IN).is_none() {
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:9962").unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            drop(stream.read(&mut [0; 1024]));
            drop(stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nready\n"));
        }
    });
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM]).unwrap();
    signals.forever().next();
    std::process::exit(0);
}

#[test]
fn the_plugin_is_called_as_a_runtime_does_and_addresses_are_reported_as_a_kubelet_does() {
    let programs = Programs::new(AGENT, PLUGIN);
    let up = programs.lab("up --pods-per-node 1 --worker-cpus 0,1 --poll busy");
    assert!(up.status.success(), "{}", up.describe());
    let lab = up.stdout.split_whitespace().nth(1).unwrap().to_owned();
    let _guard = Down(&lab);

    let pods: Vec<PodInfo> = state::read_all(&lab, "pod-").unwrap();
    let nodes: Vec<NodeInfo> = state::read_all(&lab, "node-").unwrap();
    assert_eq!((pods.len(), nodes.len()), (2, 2));
    let adds = programs.calls("ADD");
    assert_eq!(adds.len(), 4, "each node said once to try again: {adds:?}");
    for (pod, number) in pods.iter().zip(1..) {
        let expected = format!(
            "node{number} ADD {id} /run/netns/{netns} eth0 IgnoreUnknown=1;\
             K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod{number}-1;\
             K8S_POD_INFRA_CONTAINER_ID={id};K8S_POD_UID={uid} ",
            id = pod.container_id,
            netns = pod.netns.name,
            uid = pod.uid,
        );
        let calls: Vec<&String> = adds.iter().filter(|c| c.starts_with(&expected)).collect();
        assert_eq!(calls.len(), 2, "{expected} in {adds:?}");
        let conf: Value = serde_json::from_str(&calls[0][expected.len()..]).unwrap();
        assert_eq!(conf["type"], "skein-cni");
        assert_eq!(pod.container_id.len(), 64);
        assert_eq!(pod.ips[0].to_string(), format!("10.244.{number}.1"));
        assert_eq!(pod.ips[1].to_string(), format!("fd00:10:244:{number}::1"));

        let file = format!("pod-default-pod{number}-1.yaml");
        let manifest = std::fs::read_to_string(nodes[0].cluster_directory().join(file)).unwrap();
        for line in [
            format!("nodeName: node{number}"),
            format!("uid: {}", pod.uid),
            format!("- ip: 10.244.{number}.1"),
            "phase: Running".to_owned(),
        ] {
            assert!(manifest.contains(&line), "{line} missing:\n{manifest}");
        }
    }
    let config = nodes[1].node_directory().join("skeind.toml");
    let config = std::fs::read_to_string(config).unwrap();
    assert!(
        config.contains("cpus = [0, 1]\npoll = \"busy\""),
        "{config}"
    );
    let list = programs.lab(&format!("pods --lab {lab}"));
    assert!(list.stdout.contains("default/pod2-1"), "{}", list.stdout);
    let ping = programs.lab(&format!(
        "exec --lab {lab} pod1-1 ping -c 1 -W 2 10.244.2.1"
    ));
    assert!(ping.status.success(), "{}", ping.describe());
    let view = programs.lab(&format!("exec --lab {lab} node1 skeinctl workers"));
    assert!(view.stdout.contains("rx_packets"), "{}", view.describe());
}

/// Takes a persistent lab down, also when an assertion fails.
struct Down<'a>(&'a str);

impl Drop for Down<'_> {
    fn drop(&mut self) {
        teardown::teardown(self.0).unwrap();
    }
}

#[test]
fn a_demo_that_does_not_go_through_af_xdp_fails() {
    let programs = Programs::new(AGENT, PLUGIN);
    let demo = programs.lab("demo");
    let table = &demo.stdout;
    assert_eq!(demo.status.code(), Some(1), "{}", demo.describe());
    let lines = |words: &[&str]| -> usize {
        let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
        table.lines().filter(has_all).count()
    };
    // Everything between pods works by kernel routing, and all of it counts as failed; and so do
    // the Service and the policy, which nobody serves and keeps.
    assert_eq!(lines(&["FAILED"]), 12 + 2, "{table}");
    assert_eq!(
        lines(&["FAILED", "same node", "the workers saw 0"]),
        6,
        "{table}"
    );
    assert_eq!(
        lines(&["FAILED", "across", "ping", "arrives as [62"]),
        2,
        "{table}"
    );
    assert_eq!(lines(&["ok", "kernel datapath"]), 1, "{table}");
    assert_eq!(lines(&["ok", "teardown"]), 1, "{table}");
    let deletions = programs.calls("DEL");
    assert_eq!(deletions.len(), 4);
    for call in deletions {
        assert!(call.contains("\"prevResult\":{"), "{call}");
    }
    let name = table
        .split_whitespace()
        .nth(1)
        .unwrap()
        .trim_end_matches(':');
    assert!(state::is_lab_name(name), "{table}");
    assert_eq!(teardown::leftovers(name), []);
}

#[test]
fn an_agent_that_ends_and_a_plugin_that_fails_are_shown_with_their_words() {
    let broken = "#!/bin/sh\necho the uplink is missing >&2\nexit 3\n";
    let up = Programs::new(broken, PLUGIN).lab("up");
    assert!(!up.status.success());
    for words in ["skeind on node1", "3", "the uplink is missing"] {
        assert!(up.stderr.contains(words), "{words}: {}", up.describe());
    }
    let refusing = "#!/bin/sh\necho '{\"code\": 7, \"msg\": \"no such key\"}'\nexit 1\n";
    let up = Programs::new(AGENT, refusing).lab("up");
    assert!(!up.status.success());
    for words in ["default/pod1-1 on node1", "no such key"] {
        assert!(up.stderr.contains(words), "{words}: {}", up.describe());
    }
}

#[test]
fn a_benchmark_writes_its_results_in_the_documented_form() {
    let programs = Programs::new(AGENT, PLUGIN);
    let output = programs.path("results");
    // The time of an ADD, `cni.add`, is left out: not every machine has the reference plugins.
    let bench = programs.lab(&format!(
        "bench --rounds 1 --seconds 1 --wires real --sender-cpu 0 --receiver-cpu 0 --filter=- \
         --output {}",
        output.display()
    ));
    assert!(bench.status.success(), "{}", bench.describe());
    let results = read(&output.join("latest.json"));
    for key in ["kernel", "cpu", "cpus", "date", "commit", "command"] {
        assert!(!results["host"][key].is_null(), "{key}: {results}");
    }
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    for row in rows {
        for key in ["id", "scenario", "metric", "unit", "baseline_name"] {
            assert!(!row[key].as_str().unwrap().is_empty(), "{key}: {row}");
        }
        for key in ["skein", "baseline", "ratio"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key}: {row}");
        }
        assert_eq!(row["runs"], 1);
        assert_eq!(row["spread"][0], row["ratio"]);
    }
    let table = std::fs::read_to_string(output.join("latest.md")).unwrap();
    assert!(
        table.contains("| UDP 64 B, one sender, same node |"),
        "{table}"
    );
}

#[test]
fn a_benchmark_without_a_result_says_so_in_the_row_and_fails() {
    // Pods whose addresses lead nowhere.
    let nowhere = "#!/bin/sh\ntest $CNI_COMMAND = DEL || \
        echo '{\"ips\": [{\"address\": \"10.244.1.9/32\"}]}'\n";
    let programs = Programs::new(AGENT, nowhere);
    let output = programs.path("results");
    let bench = programs.lab(&format!(
        "bench --rounds 1 --seconds 1 --filter udp64-same --output {}",
        output.display()
    ));
    assert_eq!(bench.status.code(), Some(1), "{}", bench.describe());
    let results = read(&output.join("latest.json"));
    assert!(results["rows"][0]["error"].is_string(), "{results}");
    assert!(results["rows"][0].get("skein").is_none(), "{results}");
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}
