//! A node: a network namespace with mounts and a host name of its own.
//!
//! A process that only sleeps, the *holder*, keeps the node's mount namespace alive:
//!
//! ```text
//! /sys            this network namespace's links
//! /sys/fs/bpf     a BPF file system of its own: pins of one node are invisible to another
//! /sys/fs/cgroup  cgroup2, where the kernel has it
//! /run            an empty tmpfs: the agent's socket and state, /run/netns for pods
//! ```
//!
//! There is no container image and no process namespace: programs and libraries are the machine's.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::agent::{self, Agent, AgentOptions};
use crate::cmd::{Cmd, Output};
use crate::lab::{LabOptions, Underlay};
use crate::pod::{Netns, Pod};
use crate::{bins, state, wire};

/// What the holder does before it sleeps; `$1` is the node's name.
const HOLDER: &str = r#"
echo "$1" > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/netns
echo ready
exec sleep infinity
"#;

/// Everything about a node that another process can use: its record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The lab's name.
    pub lab: String,
    /// The node's name, as Kubernetes has it: `node1`.
    pub name: String,
    /// Its number, from 1.
    pub number: u8,
    /// Its network namespace, by name.
    pub netns: String,
    /// The process that keeps its mount namespace.
    pub holder: u32,
    /// Its addresses on the wire.
    pub addresses: Vec<IpAddr>,
    /// The ranges of its pods, IPv4 first.
    pub pod_cidrs: Vec<String>,
    /// The lab's folder.
    pub directory: PathBuf,
}

impl NodeInfo {
    /// A command inside the node: its network, mounts and host name.
    pub fn cmd(&self, program: impl AsRef<Path>) -> Cmd {
        self.cmd_in_mounts(program)
            .prefix(["nsenter".to_owned(), format!("--net={}", self.netns_path())])
    }

    /// A command with the node's mounts and host name, in whatever network the caller is in.
    pub(crate) fn cmd_in_mounts(&self, program: impl AsRef<Path>) -> Cmd {
        let ns = |kind: &str| format!("/proc/{}/ns/{kind}", self.holder);
        Cmd::new(program.as_ref()).of_lab(&self.lab).prefix([
            "nsenter".to_owned(),
            format!("--mount={}", ns("mnt")),
            format!("--uts={}", ns("uts")),
            "--".to_owned(),
        ])
    }

    /// The node's network namespace as a path on the machine.
    pub fn netns_path(&self) -> String {
        format!("{}/{}", state::NETNS, self.netns)
    }

    /// The node's configuration and log are here.
    pub fn node_directory(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// The folder of manifests.
    pub fn cluster_directory(&self) -> PathBuf {
        self.directory.join("cluster")
    }

    fn record_path(&self) -> PathBuf {
        state::records(&self.lab).join(format!("node-{}.json", self.number))
    }
}

/// A node of a running lab, with its agent if one was started.
#[derive(Debug)]
pub struct Node {
    info: NodeInfo,
    holder: Option<Child>,
    agent: Option<Agent>,
}

impl Node {
    pub(crate) fn start(
        lab: &str,
        directory: &Path,
        number: u8,
        netns: String,
        options: &LabOptions,
    ) -> Result<Self> {
        let name = format!("node{number}");
        std::fs::create_dir_all(directory.join(&name))?;
        let holder = start_holder(lab, &name, &netns)?;
        let mut addresses = Vec::new();
        if options.underlay != Underlay::V6 {
            addresses.push(IpAddr::V4(wire::address_v4(number)));
        }
        if options.underlay != Underlay::V4 {
            addresses.push(IpAddr::V6(wire::address_v6(number)));
        }
        let info = NodeInfo {
            lab: lab.to_owned(),
            name,
            number,
            netns,
            holder: holder.id(),
            addresses,
            pod_cidrs: vec![
                format!("10.244.{number}.0/24"),
                format!("fd00:10:244:{number:x}::/64"),
            ],
            directory: directory.to_owned(),
        };
        state::write_json(&info.record_path(), &info)?;
        Ok(Self {
            info,
            holder: Some(holder),
            agent: None,
        })
    }

    /// The node's record.
    pub fn info(&self) -> &NodeInfo {
        &self.info
    }

    /// Its network namespace, for checks.
    pub fn netns(&self) -> Netns {
        Netns {
            lab: self.info.lab.clone(),
            name: self.info.netns.clone(),
        }
    }

    /// Its name, `node1` and so on.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Runs a program in the node; fails unless it exits with 0.
    ///
    /// # Errors
    /// The command line with its exit status and output.
    pub fn exec(&self, argv: &[&str]) -> Result<Output> {
        let [program, arguments @ ..] = argv else {
            bail!("no command given");
        };
        self.info.cmd(program).args(arguments).run()
    }

    /// Starts the agent and waits until it is ready.
    ///
    /// # Errors
    /// If one runs already, and with the end of its log if it ends or is not ready in time.
    pub fn start_agent(&mut self, options: &AgentOptions) -> Result<()> {
        if self.agent.is_some() {
            bail!("{}: the agent runs already", self.name());
        }
        self.agent = Some(Agent::start(&self.info, options)?);
        Ok(())
    }

    /// Ends the agent with SIGTERM.
    ///
    /// # Errors
    /// If none runs, or it does not exit with 0 in time; with the end of its log.
    pub fn stop_agent(&mut self) -> Result<()> {
        let agent = self.agent.take().context("no agent runs")?;
        agent.stop()
    }

    /// Kills the agent as a crash would.
    ///
    /// # Errors
    /// If none runs.
    pub fn kill_agent(&mut self) -> Result<()> {
        let agent = self.agent.take().context("no agent runs")?;
        agent.kill()
    }

    /// The running agent.
    pub fn agent(&self) -> Option<&Agent> {
        self.agent.as_ref()
    }

    /// A pod on this node, connected by the real plugin.
    ///
    /// # Errors
    /// See [`Pod::add`].
    pub fn add_pod(
        &self,
        namespace: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
    ) -> Result<Pod> {
        Pod::add(&self.info, namespace, name, labels, &BTreeMap::new())
    }

    /// One of the agent's views, as `skeinctl <name> -o json` prints it.
    ///
    /// # Errors
    /// skeinctl's.
    pub fn view(&self, name: &str) -> Result<serde_json::Value> {
        view(&self.info, name)
    }

    /// One of the agent's pages over HTTP: `/metrics`, `/healthz`, `/readyz`.
    ///
    /// # Errors
    /// If the agent does not answer, or not with 200.
    pub fn page(&self, path: &str) -> Result<String> {
        agent::page(&self.info, path)
    }

    /// Whatever in the node could forward packets without Skein; empty if nothing.
    ///
    /// # Errors
    /// If `ip` or `nft` cannot be run.
    pub fn kernel_datapath(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let links = self.info.cmd("ip").args(["-j", "-d", "link"]).json()?;
        for link in links.as_array().context("`ip -j -d link` wrote no list")? {
            let kind = link["linkinfo"]["info_kind"].as_str().unwrap_or("");
            // The uplink, pods and the host's own link are veth; lo has no kind.
            if !matches!(kind, "" | "veth") {
                found.push(format!("link {} of kind {kind}", link["ifname"]));
            }
        }
        let rules = self.info.cmd("nft").args(["list", "ruleset"]).run()?;
        if !rules.stdout.trim().is_empty() {
            found.push(format!("nftables rules: {}", rules.stdout.trim()));
        }
        // The legacy tables of iptables; the nftables variant showed above.
        for file in ["ip_tables_names", "ip6_tables_names", "arp_tables_names"] {
            let path = format!("/proc/net/{file}");
            let tables = self.info.cmd("cat").arg(path).try_run()?;
            if !tables.stdout.trim().is_empty() {
                found.push(format!("{file}: {}", tables.stdout.trim()));
            }
        }
        Ok(found)
    }

    /// Forgets holder and agent without ending them: a persistent lab outlives this value.
    pub(crate) fn let_go(&mut self) {
        self.holder = None;
        if let Some(agent) = self.agent.take() {
            agent.let_go();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.agent.take());
        if let Some(mut holder) = self.holder.take() {
            // Fails only where teardown has ended it already.
            drop(holder.kill());
            drop(holder.wait());
        }
    }
}

/// One of the agent's views of a node that only its record is known of.
///
/// # Errors
/// skeinctl's.
pub fn view(node: &NodeInfo, name: &str) -> Result<serde_json::Value> {
    let output = node
        .cmd(bins::find("skeinctl")?)
        .args([name, "-o", "json"])
        .try_run()?;
    // `status` of a node that is not healthy is a document too, with exit code 1.
    serde_json::from_str(&output.stdout).with_context(|| output.describe())
}

fn start_holder(lab: &str, name: &str, netns: &str) -> Result<Child> {
    let mut holder = Cmd::line("unshare --mount --uts --propagation private")
        .args(["sh", "-ec", HOLDER, "sh", name])
        .of_lab(lab)
        .prefix([
            "nsenter".to_owned(),
            format!("--net={}/{netns}", state::NETNS),
            "--".to_owned(),
        ])
        .spawn_detached(Stdio::null(), Stdio::piped(), Stdio::piped())?;
    let stdout = holder.stdout.take().context("no pipe from the holder")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line.trim() != "ready" {
        let mut stderr = String::new();
        if let Some(mut pipe) = holder.stderr.take() {
            drop(pipe.read_to_string(&mut stderr));
        }
        drop(holder.wait());
        bail!("{name}: cannot make its mounts: {}", stderr.trim());
    }
    Ok(holder)
}
