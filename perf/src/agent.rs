//! `skeind` on a node: its configuration, start, end and log.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::cmd::tail;
use crate::node::NodeInfo;
use crate::{bins, state, teardown, wire};

/// How long a start may take: the first one compiles and loads XDP programs on a busy machine.
const READY: Duration = Duration::from_secs(60);

/// How long a clean end may take.
const STOP: Duration = Duration::from_secs(20);

/// Where the agent serves metrics and health, inside the node.
pub const METRICS: &str = "127.0.0.1:9962";

/// How workers wait for packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Poll {
    /// Spin while there is work, then sleep.
    #[default]
    Adaptive,
    /// Spin always.
    Busy,
    /// Sleep always.
    Interrupt,
}

/// Where the agent learns of pods, services and policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The lab's folder of manifests.
    #[default]
    Directory,
    /// A real API server.
    Kubernetes {
        /// Its address and the agent's credentials.
        kubeconfig: PathBuf,
        /// Its `host:port`, which must be reachable without the agent's own services.
        api_server: String,
    },
}

/// What the lab sets in the agent's configuration; all else stays at its default.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// One worker an entry; empty: the agent's own choice.
    pub cpus: Vec<usize>,
    /// How workers wait.
    pub poll: Poll,
    /// Kernel features to do without.
    pub disable: Vec<String>,
    /// `auto`, `native` or `generic`.
    pub uplink_xdp_mode: String,
    /// `xsk` or `udp`.
    pub uplink_io: String,
    /// `generic` or `native`.
    pub pods_xdp_mode: String,
    /// `info`, `debug` and so on.
    pub log_level: String,
    /// Where the cluster's state comes from.
    pub source: Source,
    /// Further lines of TOML, whole tables that the lab does not set itself.
    pub more: String,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            cpus: Vec::new(),
            poll: Poll::Adaptive,
            disable: Vec::new(),
            uplink_xdp_mode: "auto".into(),
            uplink_io: "xsk".into(),
            pods_xdp_mode: "generic".into(),
            log_level: "info".into(),
            source: Source::Directory,
            more: String::new(),
        }
    }
}

impl AgentOptions {
    /// The agent's configuration for `node`.
    pub fn to_toml(&self, node: &NodeInfo) -> String {
        let poll = match self.poll {
            Poll::Adaptive => "adaptive",
            Poll::Busy => "busy",
            Poll::Interrupt => "interrupt",
        };
        // A TOML basic string and a Rust debug string agree on everything that occurs here.
        format!(
            "[node]\nname = {name:?}\n\n\
             [uplink]\ninterfaces = [{uplink:?}]\nxdp_mode = {uplink_mode:?}\nio = {io:?}\n\n\
             [cluster]\n{cluster}\n\
             [pods]\nxdp_mode = {pods_mode:?}\n\n\
             [workers]\ncpus = {cpus:?}\npoll = {poll:?}\n\n\
             [api]\nmetrics = {METRICS:?}\n\n\
             [log]\nlevel = {level:?}\n\n\
             [debug]\ndisable = {disable:?}\n\n{more}",
            name = node.name,
            uplink = wire::UPLINK,
            uplink_mode = self.uplink_xdp_mode,
            io = self.uplink_io,
            cluster = self.source.to_toml(node),
            pods_mode = self.pods_xdp_mode,
            cpus = self.cpus,
            level = self.log_level,
            disable = self.disable,
            more = self.more,
        )
    }
}

impl Source {
    /// The lines of the section `[cluster]`.
    fn to_toml(&self, node: &NodeInfo) -> String {
        match self {
            Self::Directory => format!(
                "source = \"directory\"\ndirectory = {:?}\n",
                node.cluster_directory()
            ),
            Self::Kubernetes {
                kubeconfig,
                api_server,
            } => format!(
                "source = \"kubernetes\"\nkubeconfig = {kubeconfig:?}\n\
                 api_servers = [{api_server:?}]\n"
            ),
        }
    }
}

/// A running `skeind`; dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    node: NodeInfo,
    child: Option<Child>,
}

impl Agent {
    pub(crate) fn start(node: &NodeInfo, options: &AgentOptions) -> Result<Self> {
        let folder = node.node_directory();
        let config = folder.join("skeind.toml");
        state::write_atomically(&config, &options.to_toml(node))?;
        let mut log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(log_path(node))?;
        writeln!(log, "--- skeind starts on {}", node.name)?;
        let child = node
            .cmd(bins::find("skeind")?)
            .arg("--config")
            .arg(config)
            .spawn_detached(Stdio::null(), log.try_clone()?.into(), log.into())?;
        let mut agent = Self {
            node: node.clone(),
            child: Some(child),
        };
        agent.wait_ready()?;
        Ok(agent)
    }

    /// The agent's process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// What the agent has logged on this node, earlier runs included.
    ///
    /// # Errors
    /// The file's.
    pub fn log(&self) -> Result<String> {
        std::fs::read_to_string(log_path(&self.node)).context("cannot read the agent's log")
    }

    fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY;
        loop {
            if let Some(status) = self.ended()? {
                bail!(
                    "skeind on {} ended with {status}; {}",
                    self.node.name,
                    self.log_tail()
                );
            }
            match page(&self.node, "/readyz") {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() >= deadline => bail!(
                    "skeind on {} is not ready after {READY:?}: {error:#}; {}",
                    self.node.name,
                    self.log_tail()
                ),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        teardown::send(self.pid(), Signal::SIGTERM);
        let deadline = Instant::now() + STOP;
        loop {
            if let Some(status) = self.ended()? {
                if status.success() {
                    return Ok(());
                }
                let name = &self.node.name;
                bail!(
                    "skeind on {name} ended with {status} on SIGTERM; {}",
                    self.log_tail()
                );
            }
            if Instant::now() >= deadline {
                let name = &self.node.name;
                bail!(
                    "skeind on {name} ignores SIGTERM for {STOP:?}; {}",
                    self.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn kill(mut self) -> Result<()> {
        let mut child = self.child.take().context("the agent was let go")?;
        child.kill()?;
        let status = child.wait()?;
        if status.signal() != Some(Signal::SIGKILL as i32) {
            let name = &self.node.name;
            bail!(
                "skeind on {name} had ended with {status}; {}",
                self.log_tail()
            );
        }
        Ok(())
    }

    pub(crate) fn let_go(mut self) {
        self.child = None;
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let child = self.child.as_mut().context("the agent was let go")?;
        Ok(child.try_wait()?)
    }

    fn log_tail(&self) -> String {
        let path = log_path(&self.node);
        let log = std::fs::read_to_string(&path).unwrap_or_default();
        format!("its log ends: {}", tail(&log))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only where it has ended already.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The file with the agent's output.
pub fn log_path(node: &NodeInfo) -> PathBuf {
    node.node_directory().join("skeind.log")
}

/// Asks the agent for one of its HTTP pages from inside the node; fails unless it says 200.
pub(crate) fn page(node: &NodeInfo, path: &str) -> Result<String> {
    let output = node
        .cmd(bins::find("skein-lab")?)
        .args(["probe", "http-get", METRICS, path])
        .timeout(Duration::from_secs(10))
        .run()?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_keys_that_the_lab_decides() {
        let node = NodeInfo {
            lab: "sk000000000000".into(),
            name: "node2".into(),
            number: 2,
            netns: "sk000000000000-node2".into(),
            holder: 1,
            addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            directory: "/tmp/x".into(),
        };
        let options = AgentOptions {
            cpus: vec![0, 0],
            poll: Poll::Busy,
            disable: vec!["multi-buffer".into()],
            ..AgentOptions::default()
        };
        let toml = options.to_toml(&node);
        for line in [
            "name = \"node2\"",
            "interfaces = [\"eth0\"]",
            "directory = \"/tmp/x/cluster\"",
            "cpus = [0, 0]",
            "poll = \"busy\"",
            "disable = [\"multi-buffer\"]",
            "metrics = \"127.0.0.1:9962\"",
        ] {
            assert!(toml.lines().any(|l| l == line), "{line} missing:\n{toml}");
        }
    }
}
