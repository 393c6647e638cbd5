//! `skeinctl`, the operator's command.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use skein_control::ctl::{Output, View, ask, ask_with, is_healthy, render, wait_healthy};

/// Shows what the Skein agent of this node knows and does.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct Common {
    /// How to print it.
    #[arg(short, long, value_enum, default_value = "table", global = true)]
    output: Output,
    /// The agent's socket.
    #[arg(long, default_value = skein_cni::agent::DEFAULT_SOCKET, global = true)]
    socket: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// The node at a glance; ends with 0 only when everything is healthy.
    Status {
        /// Wait until it is.
        #[arg(long)]
        wait: bool,
        /// How long to wait, in seconds.
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Interfaces of pods on this node.
    Endpoints,
    /// What each pod address and range is known as.
    Ipcache,
    /// Security identities and the labels that they stand for.
    Identities,
    /// What network policies let the pods of this node do.
    Policies,
    /// Services: where they are reached, who serves them, who is not selected and why.
    Services,
    /// Why packets were dropped.
    Drops,
    /// The threads that move packets.
    Workers,
    /// The configuration in force.
    Config,
    /// Connections that the datapath follows.
    Conntrack {
        /// What to do with those that the filters choose.
        #[arg(value_parser = ["list", "count", "flush"], default_value = "list")]
        what: String,
        /// Only a pod's: namespace/name.
        #[arg(long)]
        pod: Option<String>,
        /// Only with this address, at either end.
        #[arg(long)]
        address: Option<String>,
        /// Only with this port, at either end.
        #[arg(long)]
        port: Option<u16>,
        /// Only of this protocol: tcp, udp, sctp, icmp, icmpv6 or a number.
        #[arg(long)]
        protocol: Option<String>,
        /// Only in this state, such as ESTABLISHED.
        #[arg(long)]
        state: Option<String>,
        /// Only with a translated source (true), or without (false).
        #[arg(long)]
        masqueraded: Option<bool>,
    },
    /// New flows and drops, with what became of them.
    Flows(Flows),
    /// What would become of a pod's packet, stage by stage; nothing is sent.
    Trace {
        /// The pod that would send it: namespace/name, on this node.
        #[arg(long)]
        from: String,
        /// For whom: namespace/name, or an address.
        #[arg(long)]
        to: String,
        /// The destination port.
        #[arg(long)]
        port: Option<u16>,
        /// tcp, udp, sctp or icmp.
        #[arg(long, default_value = "tcp")]
        protocol: String,
    },
    /// The page of /metrics.
    Metrics,
}

#[derive(Args)]
struct Flows {
    /// Go on with what comes.
    #[arg(long)]
    follow: bool,
    /// Only to or from a pod: namespace/name.
    #[arg(long)]
    pod: Option<String>,
    /// Only from a pod.
    #[arg(long)]
    from_pod: Option<String>,
    /// Only to a pod.
    #[arg(long)]
    to_pod: Option<String>,
    /// Only what was forwarded, or dropped.
    #[arg(long, value_parser = ["forwarded", "dropped"])]
    verdict: Option<String>,
    /// Only of this protocol: tcp, udp, sctp, icmp, icmpv6 or a number.
    #[arg(long)]
    protocol: Option<String>,
    /// Only with this port, at either end.
    #[arg(long)]
    port: Option<u16>,
    /// At most so many of those that are known.
    #[arg(long)]
    last: Option<usize>,
}

impl Flows {
    fn arguments(&self) -> BTreeMap<String, String> {
        named([
            ("pod", self.pod.clone()),
            ("from-pod", self.from_pod.clone()),
            ("to-pod", self.to_pod.clone()),
            ("verdict", self.verdict.clone()),
            ("protocol", self.protocol.clone()),
            ("port", self.port.map(|port| port.to_string())),
            ("last", self.last.map(|last| last.to_string())),
        ])
    }
}

/// How often `flows --follow` asks.
const FOLLOW_EVERY: Duration = Duration::from_millis(300);

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            // The errors tell their causes themselves.
            eprintln!("skeinctl: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Common { output, socket } = &arguments.common;
    let view = match &arguments.command {
        Command::Status { wait, timeout } => {
            let status = if *wait {
                wait_healthy(socket, Duration::from_secs(*timeout))?
            } else {
                ask(socket, View::Status)?
            };
            print(&render(View::Status, &status, *output)?)?;
            return Ok(if is_healthy(&status) {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Command::Endpoints => View::Endpoints,
        Command::Ipcache => View::Ipcache,
        Command::Identities => View::Identities,
        Command::Policies => View::Policies,
        Command::Services => View::Services,
        Command::Drops => View::Drops,
        Command::Workers => View::Workers,
        Command::Config => View::Config,
        Command::Metrics => View::Metrics,
        Command::Trace {
            from,
            to,
            port,
            protocol,
        } => {
            let arguments = named([
                ("from", Some(from.clone())),
                ("to", Some(to.clone())),
                ("port", port.map(|port| port.to_string())),
                ("protocol", Some(protocol.clone())),
            ]);
            let answer = ask_with(socket, View::Trace, arguments)?;
            print(&render(View::Trace, &answer, *output)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Flows(flows) => return follow(socket, flows, *output),
        Command::Conntrack { .. } => {
            let answer = ask_with(socket, View::Conntrack, filters(&arguments.command))?;
            print(&render(View::Conntrack, &answer, *output)?)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    print(&render(view, &ask(socket, view)?, *output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// The filters of `conntrack` that are set, by name.
fn filters(command: &Command) -> BTreeMap<String, String> {
    let Command::Conntrack {
        what,
        pod,
        address,
        port,
        protocol,
        state,
        masqueraded,
    } = command
    else {
        return BTreeMap::new();
    };
    let all = [
        ("do", Some(what.clone())),
        ("pod", pod.clone()),
        ("address", address.clone()),
        ("port", port.map(|port| port.to_string())),
        ("protocol", protocol.clone()),
        ("state", state.clone()),
        ("masqueraded", masqueraded.map(|which| which.to_string())),
    ];
    named(all)
}

/// The arguments that are set, by name.
fn named(
    all: impl IntoIterator<Item = (&'static str, Option<String>)>,
) -> BTreeMap<String, String> {
    all.into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect()
}

/// Prints events that are known, and with `--follow` those that come.
fn follow(socket: &Path, flows: &Flows, output: Output) -> Result<ExitCode> {
    let mut arguments = flows.arguments();
    loop {
        let answer = ask_with(socket, View::Flows, arguments.clone())?;
        let is_empty = answer["flows"].as_array().is_none_or(Vec::is_empty);
        if !(flows.follow && is_empty) {
            print(&render(View::Flows, &answer, output)?)?;
        }
        if !flows.follow {
            return Ok(ExitCode::SUCCESS);
        }
        arguments.remove("last");
        arguments.insert("since".into(), answer["next"].to_string());
        std::thread::sleep(FOLLOW_EVERY);
    }
}

/// Prints; a reader that has seen enough (`| head`) is no fault.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}
