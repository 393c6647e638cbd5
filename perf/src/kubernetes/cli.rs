//! `skein-lab cluster`: its command line and what each command does.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use serde_json::Value;

use super::cni::Cni;
use super::e2e::{self, Selection};
use super::{Cluster, ClusterOptions, ClusterRecord};
use crate::cmd::Cmd;
use crate::report;

/// A real Kubernetes cluster out of network namespaces on this machine.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Which cluster, where several are up: the name of its lab.
    #[arg(long, global = true)]
    lab: Option<String>,
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Build a cluster and leave it up.
    Up(UpArgs),
    /// Remove the cluster.
    Down,
    /// Show the cluster's programs, nodes and pods; fails unless all run and are ready.
    Status,
    /// Run kubectl as the cluster's administrator.
    Kubectl {
        /// kubectl's arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run a command in a node: its network, mounts and host name.
    In {
        /// The node: node1 and so on, or `control`.
        node: String,
        /// The command.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        argv: Vec<String>,
    },
    /// Run the Kubernetes project's end-to-end tests whose names match.
    E2e(E2eArgs),
}

#[derive(Debug, Args)]
struct UpArgs {
    /// How many nodes, beside the one with the control plane.
    #[arg(long, default_value_t = 2)]
    nodes: usize,
    /// The network plugin.
    #[arg(long, value_enum, default_value_t = Cni::Reference)]
    cni: Cni,
    /// IPv4 and IPv6.
    #[arg(long)]
    dual_stack: bool,
    /// Whether kube-proxy serves services; by default where Skein does not.
    #[arg(long)]
    kube_proxy: Option<bool>,
}

#[derive(Debug, Args)]
struct E2eArgs {
    /// A regular expression for the specs' names.
    focus: String,
    /// A regular expression for names that do not run.
    #[arg(long, default_value = "")]
    skip: String,
    /// Write the results to this file as well, as Markdown.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

/// Runs one command of `skein-lab cluster`.
///
/// # Errors
/// What failed; a spec that fails is an exit code, not an error.
pub fn run(arguments: &ClusterArgs) -> Result<ExitCode> {
    let choose = || ClusterRecord::choose(arguments.lab.as_deref());
    match &arguments.command {
        ClusterCommand::Up(options) => up(options),
        ClusterCommand::Down => {
            let record = choose()?;
            super::down(&record)?;
            println!("cluster {} is gone", record.lab);
            Ok(ExitCode::SUCCESS)
        }
        ClusterCommand::Status => status(&choose()?),
        ClusterCommand::Kubectl { arguments } => {
            let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
            foreground(choose()?.kubectl(&words)?)
        }
        ClusterCommand::In { node, argv } => {
            let (program, arguments) = argv.split_first().context("no command given")?;
            foreground(choose()?.in_node(node, program)?.args(arguments))
        }
        ClusterCommand::E2e(options) => e2e(&choose()?, options),
    }
}

fn up(arguments: &UpArgs) -> Result<ExitCode> {
    let begin = Instant::now();
    let cluster = Cluster::up(&ClusterOptions {
        nodes: arguments.nodes,
        cni: arguments.cni,
        dual_stack: arguments.dual_stack,
        kube_proxy: arguments
            .kube_proxy
            .unwrap_or(arguments.cni == Cni::Reference),
    })?;
    let record = cluster.record().clone();
    cluster.persist()?;
    println!(
        "cluster {} is up after {:.0} s; try: skein-lab cluster kubectl get nodes; end it with: \
         skein-lab cluster down",
        record.lab,
        begin.elapsed().as_secs_f64()
    );
    Ok(ExitCode::SUCCESS)
}

fn status(record: &ClusterRecord) -> Result<ExitCode> {
    println!(
        "cluster {}, network plugin {}, control plane on {}, logs in {}\n",
        record.lab,
        record.cni_name(),
        record.control_plane,
        record.directory.display()
    );
    let mut well = true;
    let mut rows = Vec::new();
    for daemon in &record.daemons {
        let runs = daemon.process.is_alive();
        well &= runs;
        let state = if runs { "runs" } else { "has ended" };
        let pid = daemon.process.pid.to_string();
        rows.push(vec![
            daemon.node.clone(),
            daemon.name.clone(),
            pid,
            state.to_owned(),
        ]);
    }
    println!(
        "{}",
        report::table(&["node", "program", "pid", "state"], &rows)
    );
    let nodes = record.get(&["nodes"])?;
    well &= nodes["items"]
        .as_array()
        .is_some_and(|items| items.iter().all(is_ready));
    for what in ["nodes", "pods"] {
        let words = ["get", what, "--all-namespaces", "--output=wide"];
        record.kubectl(&words)?.run_in_foreground()?;
        println!();
    }
    Ok(if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether a node's condition `Ready` holds.
pub fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

fn e2e(record: &ClusterRecord, arguments: &E2eArgs) -> Result<ExitCode> {
    let selection = Selection {
        focus: arguments.focus.clone(),
        skip: arguments.skip.clone(),
    };
    let report = record.directory.join("e2e.json");
    drop(std::fs::remove_file(&report));
    e2e::command(record, &selection, &report)?.run_in_foreground()?;
    let specs = e2e::read(&report)?;
    print!("\n{}", e2e::table(&specs));
    if let Some(path) = &arguments.markdown {
        ensure!(
            specs.iter().all(|spec| spec.state != "interrupted"),
            "the tests were interrupted: {} stays as it was",
            path.display()
        );
        std::fs::write(path, e2e::markdown(record, &selection, &specs))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let well = specs.iter().all(e2e::Spec::passed);
    Ok(if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs a command in the terminal, with its exit code.
fn foreground(command: Cmd) -> Result<ExitCode> {
    let status = command.run_in_foreground()?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}
