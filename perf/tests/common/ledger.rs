//! What a node holds on behalf of its pods, so that a test can say that nothing stayed behind;
//! and what that costs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use skein_perf::node::Node;

/// How long what is given back may take to show: the plugin does not wait for it.
const SETTLE: Duration = Duration::from_secs(20);

/// Everything that an ADD takes and a DEL must give back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    links: BTreeSet<String>,
    endpoints: BTreeSet<String>,
    addresses: Value,
    worker_links: Vec<Value>,
    /// File descriptors of the agent: AF_XDP sockets, maps, programs, connections.
    descriptors: usize,
    threads: usize,
    pins: BTreeSet<PathBuf>,
    state_files: BTreeSet<PathBuf>,
}

impl Ledger {
    /// What `node` holds now.
    pub fn of(node: &Node) -> Self {
        let links = node.exec(&["ip", "-j", "link"]).unwrap();
        let links: Value = serde_json::from_str(&links.stdout).unwrap();
        let links = links.as_array().unwrap().iter();
        let status = node.view("status").unwrap();
        let endpoints = node.view("endpoints").unwrap();
        let endpoints = endpoints["endpoints"].as_array().unwrap().iter();
        let workers = node.view("workers").unwrap();
        let workers = workers["workers"].as_array().unwrap().iter();
        let process = PathBuf::from(format!("/proc/{}", node.agent().unwrap().pid()));
        let root = PathBuf::from(format!("/proc/{}/root", node.info().holder));
        Self {
            links: links.map(|link| text(&link["ifname"])).collect(),
            endpoints: endpoints.map(|pod| text(&pod["container_id"])).collect(),
            addresses: status["addresses"].clone(),
            worker_links: workers.map(|worker| worker["links"].clone()).collect(),
            descriptors: entries(&process.join("fd")).len(),
            threads: entries(&process.join("task")).len(),
            pins: below(&root.join("sys/fs/bpf/skein")),
            state_files: below(&root.join("run/skein")),
        }
    }

    /// Waits until `node` holds what this says, no more and no less.
    pub fn assert_again(&self, node: &Node, what: &str) {
        let deadline = Instant::now() + SETTLE;
        loop {
            let now = Self::of(node);
            if now == *self {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{what}: {} holds {now:#?}, before {self:#?}",
                node.name()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Memory that the kernel holds for itself and cannot give back, on the whole machine: slab,
/// vmalloc. Bytes.
pub fn kernel_memory() -> i64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    field(&meminfo, "SUnreclaim:") + field(&meminfo, "VmallocUsed:")
}

/// Resident memory of the agent, its packet memory included. Bytes.
pub fn resident(node: &Node) -> i64 {
    let pid = node.agent().unwrap().pid();
    field(
        &std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap(),
        "VmRSS:",
    )
}

/// CPU time of the agent's control thread, which is its first.
pub fn control_cpu(node: &Node) -> Duration {
    let pid = node.agent().unwrap().pid();
    let schedstat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).unwrap();
    let nanoseconds = schedstat.split(' ').next().unwrap();
    Duration::from_nanos(nanoseconds.parse().unwrap())
}

/// A line `name 123 kB`, in bytes.
fn field(text: &str, name: &str) -> i64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse::<i64>().unwrap() * 1024
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn below(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for path in entries(folder) {
        if path.is_dir() {
            found.extend(below(&path));
        }
        found.insert(path);
    }
    found
}
