//! A lab as a value: nodes and a wire, made together and removed together.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::cluster;
use crate::cmd::{self, Cmd};
use crate::node::Node;
use crate::pod::Netns;
use crate::state::{self, LabRecord, Owner};
use crate::teardown;
use crate::{bins, wire};

/// The labs that this process must remove when a signal ends it.
static LIVE: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The addresses that nodes reach each other by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Underlay {
    /// IPv4 alone.
    V4,
    /// IPv6 alone.
    V6,
    /// Both.
    Dual,
}

/// What kind of lab to build.
#[derive(Clone, Debug)]
pub struct LabOptions {
    /// How many nodes, 1 to 200.
    pub nodes: usize,
    /// MTU of the wire, bytes.
    pub mtu: u32,
    /// Addresses of the nodes.
    pub underlay: Underlay,
    /// Segmentation offloads off on the wire, so that nothing above the MTU crosses it in one
    /// piece, as on a real one.
    pub real_packets: bool,
    /// A host outside the cluster, the nodes' default gateway.
    pub outside: bool,
}

impl Default for LabOptions {
    fn default() -> Self {
        Self {
            nodes: 2,
            mtu: 1500,
            underlay: Underlay::Dual,
            real_packets: false,
            outside: false,
        }
    }
}

/// Nodes joined by a wire; dropping it removes everything, also when a test panics.
#[derive(Debug)]
pub struct Lab {
    name: String,
    directory: PathBuf,
    nodes: Vec<Node>,
    /// Removes the lab if this process is killed: it waits for the end of its standard input.
    reaper: Option<Child>,
    persistent: bool,
    has_outside: bool,
}

impl Lab {
    /// Builds nodes and wire; no agent runs yet. Labs whose owner died are removed first.
    ///
    /// # Errors
    /// Without root, without the `ip`, `ethtool`, `unshare` and `nsenter` commands, and whatever
    /// those say. Nothing stays behind then.
    pub fn new(options: &LabOptions) -> Result<Self> {
        ensure!(
            nix::unistd::geteuid().is_root(),
            "a lab makes network namespaces and mounts: run it as root (sudo)"
        );
        ensure!(
            (1..=200).contains(&options.nodes),
            "{} nodes: a lab has 1 to 200",
            options.nodes
        );
        bins::require_tools()?;
        teardown::collect_garbage().context("cannot remove the remains of an earlier lab")?;
        let name = state::unique_name();
        let directory = state::directory(&name);
        let me = Owner::of(std::process::id()).context("cannot read /proc/self/stat")?;
        live().push(name.clone());
        // From here on an error drops `lab`, which removes whatever was made.
        let mut lab = Self {
            name: name.clone(),
            directory: directory.clone(),
            nodes: Vec::new(),
            reaper: None,
            persistent: false,
            has_outside: options.outside,
        };
        let record = LabRecord {
            name,
            owner: me,
            persistent: false,
            directory,
        };
        state::create(&record)?;
        lab.reaper = Some(start_reaper(&lab.name)?);
        lab.build(options)?;
        Ok(lab)
    }

    fn build(&mut self, options: &LabOptions) -> Result<()> {
        let mut names = Vec::new();
        for number in 1..=options.nodes {
            let namespace = format!("{}-node{number}", self.name);
            wire::ip(&format!("netns add {namespace}"))?;
            names.push(namespace);
        }
        wire::build(&self.name, &names, options)?;
        for (number, namespace) in (1u8..).zip(names) {
            let node = Node::start(&self.name, &self.directory, number, namespace, options)?;
            self.nodes.push(node);
        }
        let folder = self.cluster_directory();
        cluster::write(&folder, "namespace-default", &cluster::namespace("default"))?;
        for node in &self.nodes {
            let name = format!("node-{}", node.name());
            cluster::write(&folder, &name, &cluster::node(node.info()))?;
        }
        Ok(())
    }

    /// Leaves the lab up when this process ends, until [`teardown::teardown`]: it lives as long as
    /// its first node does.
    ///
    /// # Errors
    /// If that node has ended or the record cannot be written; the lab is removed then.
    pub fn persist(mut self) -> Result<()> {
        let holder = self.nodes[0].info().holder;
        let record = LabRecord {
            name: self.name.clone(),
            owner: Owner::of(holder).context("the first node has ended")?,
            persistent: true,
            directory: self.directory.clone(),
        };
        state::write_json(&state::records(&self.name).join("lab.json"), &record)?;
        self.persistent = true;
        Ok(())
    }

    /// The lab's name, which everything that it made carries.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Manifests, configurations and logs.
    pub fn directory(&self) -> &std::path::Path {
        &self.directory
    }

    /// The folder of manifests that all nodes share.
    pub fn cluster_directory(&self) -> PathBuf {
        self.directory.join("cluster")
    }

    /// Writes a manifest, any object, as `<file>.yaml`: a NetworkPolicy, a Service.
    ///
    /// # Errors
    /// The file's.
    pub fn apply(&self, file: &str, object: &serde_json::Value) -> Result<()> {
        cluster::write(&self.cluster_directory(), file, object)
    }

    /// Removes the manifest `<file>.yaml`.
    ///
    /// # Errors
    /// The file's.
    pub fn withdraw(&self, file: &str) -> Result<()> {
        cluster::remove(&self.cluster_directory(), file)
    }

    /// A node by its number, from 1.
    ///
    /// # Panics
    /// If the lab has no such node.
    pub fn node(&mut self, number: usize) -> &mut Node {
        &mut self.nodes[number - 1]
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The host outside the cluster.
    ///
    /// # Errors
    /// If the lab was made without one.
    pub fn outside(&self) -> Result<Netns> {
        ensure!(self.has_outside, "the lab has no outside host");
        Ok(Netns {
            lab: self.name.clone(),
            name: wire::outside_namespace(&self.name),
        })
    }

    /// Waits until each agent knows the way to every other node, to the next hop's MAC: a fresh
    /// wire takes a moment, IPv6 above all, and packets are not held meanwhile.
    ///
    /// # Errors
    /// If a node stays unreachable for half a minute: which, and why.
    pub fn wait_for_peers(&self) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(30);
        let deadline = Instant::now() + LIMIT;
        for node in self.nodes.iter().filter(|node| node.agent().is_some()) {
            loop {
                let status = node.view("status")?;
                let peers = status["peers"].as_array().context("status without peers")?;
                let others = self.nodes.len() - 1;
                let missing = peers.iter().find(|peer| peer["reachable"] != true);
                if peers.len() >= others && missing.is_none() {
                    break;
                }
                ensure!(
                    Instant::now() < deadline,
                    "{} knows {} of {others} nodes; unreachable: {missing:?}",
                    node.name(),
                    peers.len()
                );
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// Fails where a node's kernel could forward packets by itself: a bridge, a tunnel device, a
    /// packet filter rule.
    ///
    /// # Errors
    /// Names the node and what was found in it.
    pub fn assert_no_kernel_datapath(&self) -> Result<()> {
        let mut found = Vec::new();
        for node in &self.nodes {
            for what in node.kernel_datapath()? {
                found.push(format!("{}: {what}", node.name()));
            }
        }
        ensure!(
            found.is_empty(),
            "the kernel could forward packets: {}",
            found.join("; ")
        );
        Ok(())
    }

    /// Removes everything now and says what would not go; dropping the lab does the same, but can
    /// only print it.
    ///
    /// # Errors
    /// What is left over.
    pub fn close(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        if !live().contains(&self.name) {
            return Ok(());
        }
        keep_logs(&self.directory, &self.name);
        let result = teardown::teardown(&self.name);
        // Takes the nodes' own children off the process table.
        self.nodes.clear();
        self.stop_reaper();
        live().retain(|name| *name != self.name);
        result
    }

    /// Closes the reaper's input: it looks for the lab, finds none, or a persistent one, and ends.
    fn stop_reaper(&mut self) {
        if let Some(mut reaper) = self.reaper.take() {
            drop(reaper.stdin.take());
            drop(reaper.wait());
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.persistent {
            for node in &mut self.nodes {
                node.let_go();
            }
            self.stop_reaper();
            live().retain(|name| *name != self.name);
            return;
        }
        if let Err(error) = self.remove() {
            eprintln!("skein-lab: {error:#}");
        }
    }
}

/// Takes down every lab of this process: what a signal handler calls before it exits.
///
/// # Errors
/// The first that left something behind.
pub fn remove_all_live() -> Result<()> {
    cmd::interrupt();
    let names = live().clone();
    let mut faults = Vec::new();
    for name in names {
        faults.extend(teardown::teardown(&name).err().map(|e| format!("{e:#}")));
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    Ok(())
}

/// The folder to which the logs of labs are copied before removal, if set.
pub const KEEP_LOGS_ENV: &str = "SKEIN_LAB_KEEP_LOGS";

fn keep_logs(directory: &std::path::Path, name: &str) {
    let Some(folder) = std::env::var_os(KEEP_LOGS_ENV) else {
        return;
    };
    let target = PathBuf::from(folder).join(name);
    let copied = std::fs::create_dir_all(&target)
        .map_err(anyhow::Error::from)
        .and_then(|()| {
            Cmd::new("cp")
                .arg("-r")
                .arg(directory.join("."))
                .arg(&target)
                .even_if_interrupted()
                .run()
        });
    if let Err(error) = copied {
        eprintln!("skein-lab: cannot keep the logs of {name}: {error:#}");
    }
}

fn start_reaper(name: &str) -> Result<Child> {
    // Without the lab's mark: it must outlive the removal that it does itself.
    Cmd::new(bins::find("skein-lab")?)
        .args(["reap", name])
        .spawn_detached(Stdio::piped(), Stdio::null(), Stdio::inherit())
}

fn live() -> std::sync::MutexGuard<'static, Vec<String>> {
    // The list stays whole whatever a panicking thread did: pushes and removals are single steps.
    LIVE.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
