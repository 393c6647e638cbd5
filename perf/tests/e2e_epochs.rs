//! A hundred changes a second to pods elsewhere: flows between others go on being known.

mod common;

use std::time::{Duration, Instant};

use common::Cluster;
use serde_json::{Value, json};
use skein_perf::{AgentOptions, LabOptions, check, cluster};

/// Pods that change, all on the second node.
const CHANGING: u32 = 40;

/// Time between two changes.
const EVERY: Duration = Duration::from_millis(10);

/// How long flows are watched, without changes and with.
const WATCHED: Duration = Duration::from_secs(4);

/// What a worker says of its flow table.
#[derive(Clone, Copy, Debug, Default)]
struct Flows {
    hits: u64,
    misses: u64,
    stale: u64,
    generation: u64,
}

impl Flows {
    /// All workers' of the first two nodes.
    fn now(cluster: &Cluster) -> Self {
        let mut sum = Self::default();
        for node in &cluster.lab.nodes()[..2] {
            let workers = node.view("workers").unwrap();
            for worker in workers["workers"].as_array().unwrap() {
                let field = |name: &str| worker[name].as_u64().unwrap();
                sum.hits += field("flow_hits");
                sum.misses += field("flow_misses");
                sum.stale += field("flow_stale");
            }
            sum.generation += node.view("status").unwrap()["generation"].as_u64().unwrap();
        }
        sum
    }

    fn since(self, before: Self) -> Self {
        Self {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            stale: self.stale - before.stale,
            generation: self.generation - before.generation,
        }
    }

    /// Packets whose flow was known and stood, in a thousand.
    fn known_per_mille(self) -> u64 {
        let all = self.hits + self.misses + self.stale;
        self.hits * 1000 / all.max(1)
    }
}

/// A pod of the second node in one of two shapes; `None`: it is gone.
fn shape(pod: u32, round: u32) -> Option<Value> {
    let app = ["one", "two"].get((round % 3) as usize)?;
    let name = format!("elsewhere{pod}");
    Some(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": cluster::uid(&name),
            "labels": {"app": app},
        },
        "spec": {
            "nodeName": "node2",
            "serviceAccountName": "default",
            "containers": [{"name": "main", "image": "none"}],
        },
        "status": {
            "phase": "Running",
            "podIPs": [{"ip": format!("10.244.2.{}", 200 + pod)}],
        },
    }))
}

/// Changes one pod after the other; returns how many changes there were.
fn change(folder: &std::path::Path) -> u32 {
    let start = Instant::now();
    let mut changes = 0;
    while start.elapsed() < WATCHED {
        let (pod, round) = (changes % CHANGING, changes / CHANGING);
        let file = format!("pod-elsewhere{pod}");
        match shape(pod, round) {
            Some(object) => cluster::write(folder, &file, &object).unwrap(),
            None => cluster::remove(folder, &file).unwrap(),
        }
        changes += 1;
        std::thread::sleep((EVERY * changes).saturating_sub(start.elapsed()));
    }
    changes
}

#[test]
fn flows_stay_known_while_pods_elsewhere_change() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let mut sessions = Vec::new();
    for (_, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let ip = to.ip(v6).unwrap();
            sessions.push(check::session(from.netns(), to.netns(), ip).unwrap());
        }
    }
    std::thread::sleep(Duration::from_secs(1));
    let start = Flows::now(&cluster);
    std::thread::sleep(WATCHED);
    let quiet = Flows::now(&cluster).since(start);
    let start = Flows::now(&cluster);
    let changes = change(&cluster.lab.cluster_directory());
    let busy = Flows::now(&cluster).since(start);
    println!("{changes} changes: {busy:?}; without: {quiet:?}");

    let least = (WATCHED.as_millis() / EVERY.as_millis()) as u32 / 2;
    assert!(changes >= least, "only {changes} changes");
    // Changes that come in quick succession are published together.
    assert!(busy.generation >= 4, "no tables were published: {busy:?}");
    assert!(busy.hits >= 400, "the sessions stood still: {busy:?}");
    // What is not known then are the neighbours' and multicast listeners' packets of the lab.
    assert!(quiet.known_per_mille() >= 990, "{quiet:?}");
    assert!(busy.known_per_mille() >= 990, "{busy:?}");
    for session in sessions {
        session.close().unwrap();
    }
    for pod in 0..CHANGING {
        drop(cluster.lab.withdraw(&format!("pod-elsewhere{pod}")));
    }
    cluster.finish();
}
