//! `skeinctl`, the operator's command.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use skein_control::ctl::{Output, View, ask, is_healthy, render, wait_healthy};

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
    /// Services: where they are reached, who serves them, who is not selected and why.
    Services,
    /// Why packets were dropped.
    Drops,
    /// The threads that move packets.
    Workers,
    /// The configuration in force.
    Config,
    /// The page of /metrics.
    Metrics,
}

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
    let view = match arguments.command {
        Command::Status { wait, timeout } => {
            let status = if wait {
                wait_healthy(socket, Duration::from_secs(timeout))?
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
        Command::Services => View::Services,
        Command::Drops => View::Drops,
        Command::Workers => View::Workers,
        Command::Config => View::Config,
        Command::Metrics => View::Metrics,
    };
    print(&render(view, &ask(socket, view)?, *output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints; a reader that has seen enough (`| head`) is no fault.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}
