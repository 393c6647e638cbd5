//! What the end-to-end tests share: a lab of two nodes with real agents and pods, and the core
//! suite that every combination of settings has to pass.

// Each test program uses a part of this.
#![allow(dead_code)]

pub mod ledger;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use skein_perf::check;
use skein_perf::demo::received_packets;
use skein_perf::lab::{Lab, LabOptions};
use skein_perf::{AgentOptions, Pod, teardown};

/// TTL and hop limit of a packet that left with 64 and crossed Skein, which is one hop.
pub const ARRIVES_WITH: u8 = 63;

/// The nodes that run an agent.
const AGENTS: [usize; 2] = [1, 2];

/// One lab with agents at a time: workers that share two CPUs with another lab's say nothing
/// about either.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Two nodes with agents; `pods[0]` and `pods[1]` are on the first, `pods[2]` on the second.
/// Further nodes of the lab run no agent.
pub struct Cluster {
    pub lab: Lab,
    pub pods: Vec<Pod>,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    pub fn new(lab: &LabOptions, agent: &AgentOptions) -> Self {
        let mut cluster = Self::bare(lab);
        for number in AGENTS {
            cluster.start_agent(number, agent);
        }
        cluster
            .lab
            .wait_for_peers()
            .expect("nodes that know each other");
        for (number, name) in [(1, "a"), (1, "b"), (2, "c")] {
            let pod = add(&mut cluster.lab, number, name);
            cluster.pods.push(pod);
        }
        cluster
    }

    /// The lab alone: no agent, no pod.
    pub fn bare(lab: &LabOptions) -> Self {
        let turn = ONE_AT_A_TIME.lock();
        // A failed test poisons the turn, not the next one's lab.
        let turn = turn.unwrap_or_else(PoisonError::into_inner);
        Self {
            lab: Lab::new(lab).expect("a lab needs root and its programs"),
            pods: Vec::new(),
            _turn: turn,
        }
    }

    pub fn start_agent(&mut self, number: usize, agent: &AgentOptions) {
        let node = self.lab.node(number);
        node.start_agent(agent).expect("the agent");
    }

    /// Packets that the workers of all nodes have taken from AF_XDP sockets.
    pub fn received(&self) -> u64 {
        let nodes = self.lab.nodes().iter();
        nodes
            .filter(|node| node.agent().is_some())
            .map(|node| received_packets(&node.view("workers").unwrap()).unwrap())
            .sum()
    }

    /// The two paths: a name, the ends, and how many workers' links a packet passes.
    pub fn paths(&self) -> [(&'static str, &Pod, &Pod, u64); 2] {
        let pods = &self.pods;
        [
            ("one node", &pods[0], &pods[1], 1),
            ("across nodes", &pods[0], &pods[2], 2),
        ]
    }

    /// Runs the checks that hold at the end of every test, and takes everything down by the
    /// ordinary way: DEL for each pod, SIGTERM for each agent.
    pub fn finish(mut self) {
        self.lab.assert_no_kernel_datapath().unwrap();
        for pod in std::mem::take(&mut self.pods) {
            pod.delete().unwrap();
        }
        for number in AGENTS {
            let log = self.lab.node(number).agent().unwrap().log().unwrap();
            assert!(!log.contains("panicked"), "node{number}: {log}");
            self.lab.node(number).stop_agent().unwrap();
        }
        let name = self.lab.name().to_owned();
        self.lab.close().unwrap();
        assert_eq!(teardown::leftovers(&name), []);
    }
}

pub fn add(lab: &mut Lab, node: usize, name: &str) -> Pod {
    let labels = BTreeMap::from([("app".to_owned(), name.to_owned())]);
    lab.node(node)
        .add_pod("default", name, &labels)
        .expect("CNI ADD")
}

/// Every protocol on both paths and both IP versions, with proof that AF_XDP carried it.
pub fn core_suite(lab: &LabOptions, agent: &AgentOptions) {
    let cluster = Cluster::new(lab, agent);
    for (path, from, to, hops) in cluster.paths() {
        for v6 in [false, true] {
            let ip = to.ip(v6).unwrap();
            let what = format!("{path}, {ip}");
            let before = cluster.received();
            let mut packets = ping_both_ways(&what, from, to, v6);
            packets += echo(&what, from, to, ip);
            let bytes = 16 << 20;
            check::tcp_transfer(from.netns(), to.netns(), ip, bytes)
                .unwrap_or_else(|error| panic!("{what}: TCP: {error:#}"));
            // A frame is at most 64 KiB.
            packets += bytes >> 16;
            let seen = cluster.received() - before;
            assert!(
                seen >= packets * hops,
                "{what}: at least {packets} packets over {hops} hops, the workers saw {seen}"
            );
        }
    }
    cluster.finish();
}

/// Pings each end from the other; returns the number of packets.
pub fn ping_both_ways(what: &str, from: &Pod, to: &Pod, v6: bool) -> u64 {
    for (from, to) in [(from, to), (to, from)] {
        let ping = check::ping(from.netns(), to.ip(v6).unwrap(), 3).unwrap();
        assert_eq!(ping.ttls, [ARRIVES_WITH; 3], "{what}: ping");
    }
    2 * 2 * 3
}

fn echo(what: &str, from: &Pod, to: &Pod, ip: IpAddr) -> u64 {
    let sizes = [0, 1, 64, 1000, 1372];
    let echoes = check::udp_echo(from.netns(), to.netns(), ip, &sizes, 4).unwrap();
    assert_eq!(
        (echoes.returned, echoes.altered),
        (echoes.sent, 0),
        "{what}: UDP"
    );
    2 * u64::from(echoes.sent)
}
