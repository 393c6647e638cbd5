//! The command line of `skein-lab`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use skein_perf::bench::{BenchOptions, WireKind};
use skein_perf::check::Placement;
use skein_perf::kubernetes::cli::ClusterArgs;
use skein_perf::probe::Probe;
use skein_perf::{AgentOptions, Poll, Underlay};

/// A small Skein cluster out of network namespaces on this machine. Needs root.
#[derive(Debug, Parser)]
#[command(name = "skein-lab", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build a lab and leave it up.
    Up(UpArgs),
    /// Run a command in a pod (name or namespace/name) or a node (node1).
    Exec {
        /// Which lab, where several are up.
        #[arg(long)]
        lab: Option<String>,
        /// The pod or node.
        place: String,
        /// The command.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        argv: Vec<String>,
    },
    /// List the pods of a lab.
    Pods {
        /// Which lab, where several are up.
        #[arg(long)]
        lab: Option<String>,
    },
    /// Remove a lab that `up` left.
    Down {
        /// Which lab, where several are up.
        #[arg(long, conflicts_with = "all")]
        lab: Option<String>,
        /// All of them.
        #[arg(long)]
        all: bool,
    },
    /// Remove what labs have left whose process died.
    Gc,
    /// Show pods talking on one node and across two, through AF_XDP, and take it all down.
    Demo {
        #[command(flatten)]
        lab: LabArgs,
        #[command(flatten)]
        agent: AgentArgs,
    },
    /// Measure Skein against kernel bridge and kernel VXLAN.
    Bench {
        #[command(flatten)]
        bench: BenchArgs,
        #[command(flatten)]
        agent: AgentArgs,
    },
    /// A real Kubernetes cluster out of the lab's nodes.
    Cluster(ClusterArgs),
    /// Remove a lab once standard input ends: what each lab starts beside itself.
    #[command(hide = true)]
    Reap {
        /// The lab's name.
        lab: String,
    },
    /// Traffic programs that run inside pods.
    #[command(hide = true)]
    Probe {
        #[command(subcommand)]
        probe: Probe,
    },
}

#[derive(Debug, Args)]
pub struct LabArgs {
    /// MTU of the wire between nodes, bytes.
    #[arg(long, default_value_t = 1500)]
    pub mtu: u32,
    /// Addresses that nodes reach each other by.
    #[arg(long, value_enum, default_value_t = Underlay::Dual)]
    pub underlay: Underlay,
    /// Segmentation off on the wire: nothing above the MTU crosses it in one piece.
    #[arg(long)]
    pub real_packets: bool,
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// How many nodes.
    #[arg(long, default_value_t = 2)]
    pub nodes: usize,
    /// How many pods on each.
    #[arg(long, default_value_t = 2)]
    pub pods_per_node: usize,
    /// Nodes and wire only: no agent, no pods.
    #[arg(long)]
    pub no_agent: bool,
    #[command(flatten)]
    pub lab: LabArgs,
    #[command(flatten)]
    pub agent: AgentArgs,
}

#[derive(Debug, Args)]
pub struct AgentArgs {
    /// CPUs of each node's workers, one worker an entry; empty: the agent's choice.
    #[arg(long, value_delimiter = ',')]
    pub worker_cpus: Vec<usize>,
    /// How workers wait for packets.
    #[arg(long, value_enum, default_value_t = Poll::Adaptive)]
    pub poll: Poll,
    /// Kernel features to do without.
    #[arg(long, value_delimiter = ',')]
    pub disable: Vec<String>,
    /// XDP mode of the uplink: auto, native or generic.
    #[arg(long, default_value = "auto")]
    pub uplink_xdp_mode: String,
    /// How the overlay goes over the uplink: xsk or udp.
    #[arg(long, default_value = "xsk")]
    pub uplink_io: String,
    /// XDP mode of the pods' links: generic or native.
    #[arg(long, default_value = "generic")]
    pub pods_xdp_mode: String,
    /// The agents' log level.
    #[arg(long, default_value = "info")]
    pub log_level: String,
}

impl AgentArgs {
    pub fn options(&self) -> AgentOptions {
        AgentOptions {
            cpus: self.worker_cpus.clone(),
            poll: self.poll,
            disable: self.disable.clone(),
            uplink_xdp_mode: self.uplink_xdp_mode.clone(),
            uplink_io: self.uplink_io.clone(),
            pods_xdp_mode: self.pods_xdp_mode.clone(),
            log_level: self.log_level.clone(),
            ..AgentOptions::default()
        }
    }
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Pairs of runs for each scenario.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Length of one run, seconds.
    #[arg(long, default_value_t = 3)]
    pub seconds: u64,
    /// The sender's CPU.
    #[arg(long, default_value_t = 0)]
    pub sender_cpu: usize,
    /// The receiver's CPU.
    #[arg(long, default_value_t = 1)]
    pub receiver_cpu: usize,
    /// Wires to measure across nodes.
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["real", "veth"])]
    pub wires: Vec<WireKind>,
    /// Only scenarios whose id contains this: `udp64`, `across`, `rr-same`.
    #[arg(long, default_value = "")]
    pub filter: String,
    /// MTU of the wire, bytes.
    #[arg(long, default_value_t = 1500)]
    pub mtu: u32,
    /// The folder for latest.json and latest.md.
    #[arg(long, default_value = "perf/results")]
    pub output: PathBuf,
}

impl BenchArgs {
    pub fn options(&self) -> BenchOptions {
        BenchOptions {
            rounds: self.rounds,
            time: Duration::from_secs(self.seconds),
            place: Placement {
                sender: Some(self.sender_cpu),
                receiver: Some(self.receiver_cpu),
            },
            wires: self.wires.clone(),
            filter: self.filter.clone(),
            mtu: self.mtu,
            output: self.output.clone(),
        }
    }
}
