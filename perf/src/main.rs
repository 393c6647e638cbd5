//! `skein-lab`: builds a small cluster out of network namespaces, plays and measures with it.

mod cli;

use std::io::Read;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use skein_perf::cmd::Cmd;
use skein_perf::node::NodeInfo;
use skein_perf::pod::PodInfo;
use skein_perf::{
    Lab, LabOptions, bench, bins, demo, kubernetes, lab, probe, report, state, teardown,
};

use cli::{Cli, Command, LabArgs, UpArgs};

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(error) = remove_labs_on_signals() {
        eprintln!("skein-lab: {error:#}");
        return ExitCode::FAILURE;
    }
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("skein-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Up(arguments) => up(&arguments)?,
        Command::Exec { lab, place, argv } => return exec(lab.as_deref(), &place, &argv),
        Command::Pods { lab } => pods(lab.as_deref())?,
        Command::Down { lab, all } => down(lab.as_deref(), all)?,
        Command::Gc => {
            for name in teardown::collect_garbage()? {
                println!("removed {name}");
            }
        }
        Command::Demo { lab, agent } => {
            let lab = LabOptions {
                nodes: 2,
                ..lab.options()
            };
            demo::run(&lab, &agent.options())?;
        }
        Command::Bench { bench, agent } => bench::run(&bench.options(), &agent.options())?,
        Command::Cluster(arguments) => return kubernetes::cli::run(&arguments),
        Command::Reap { lab } => reap(&lab)?,
        Command::Probe { probe } => probe::run(probe)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// ^C and SIGTERM remove the labs of this process before it ends, with the usual exit code of
/// 128 and the signal's number.
fn remove_labs_on_signals() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])
        .context("cannot listen for signals")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            if let Err(error) = lab::remove_all_live() {
                eprintln!("skein-lab: {error:#}");
            }
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

fn up(arguments: &UpArgs) -> Result<()> {
    // Persistent only once all is well: until then an error or ^C removes it.
    let options = LabOptions {
        nodes: arguments.nodes,
        ..arguments.lab.options()
    };
    let mut lab = Lab::new(&options)?;
    for number in 1..=arguments.nodes {
        if arguments.no_agent {
            continue;
        }
        let node = lab.node(number);
        node.start_agent(&arguments.agent.options())?;
        for index in 1..=arguments.pods_per_node {
            let name = format!("pod{number}-{index}");
            node.add_pod("default", &name, &demo::labels(&name))?;
        }
    }
    let name = lab.name().to_owned();
    println!(
        "lab {name} is up; manifests in {}",
        lab.cluster_directory().display()
    );
    lab.persist()?;
    if !arguments.no_agent {
        pods(Some(&name))?;
        println!("\ntry: skein-lab exec pod1-1 ping -c 3 <address>; end it with: skein-lab down");
    }
    Ok(())
}

fn pods(lab: Option<&str>) -> Result<()> {
    let lab = state::choose(lab)?;
    let mut rows = Vec::new();
    for pod in state::read_all::<PodInfo>(&lab.name, "pod-")? {
        let ips: Vec<String> = pod.ips.iter().map(ToString::to_string).collect();
        rows.push(vec![
            format!("{}/{}", pod.namespace, pod.name),
            pod.node.name,
            ips.join(", "),
            pod.netns.name,
        ]);
    }
    print!(
        "{}",
        report::table(&["pod", "node", "addresses", "namespace"], &rows)
    );
    Ok(())
}

/// Runs a command in a pod (`name` or `namespace/name`) or a node (`node1`), with its exit code.
fn exec(lab: Option<&str>, place: &str, argv: &[String]) -> Result<ExitCode> {
    let lab = state::choose(lab)?;
    let (program, arguments) = argv.split_first().context("no command given")?;
    // `skeinctl` without its path means the one beside this program.
    let program = &bins::find(program).unwrap_or_else(|_| program.into());
    let pod = state::read_all::<PodInfo>(&lab.name, "pod-")?
        .into_iter()
        .find(|pod| pod.name == place || format!("{}/{}", pod.namespace, pod.name) == place);
    let command: Cmd = if let Some(pod) = pod {
        pod.netns.cmd(program)
    } else {
        state::read_all::<NodeInfo>(&lab.name, "node-")?
            .into_iter()
            .find(|node| node.name == place)
            .with_context(|| format!("lab {} has no pod or node {place}", lab.name))?
            .cmd(program)
    };
    let status = command.args(arguments).run_in_foreground()?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

fn down(lab: Option<&str>, all: bool) -> Result<()> {
    let names: Vec<String> = if all {
        let labs = state::labs().into_iter().filter(|lab| lab.persistent);
        labs.map(|lab| lab.name).collect()
    } else {
        let lab = state::choose(lab)?;
        ensure!(
            lab.persistent,
            "lab {} belongs to process {}, which ends it",
            lab.name,
            lab.owner.pid
        );
        vec![lab.name]
    };
    for name in names {
        teardown::teardown(&name)?;
        println!("lab {name} is gone");
    }
    Ok(())
}

/// Waits until the lab's process has ended or closed the pipe, then removes what it left.
fn reap(lab: &str) -> Result<()> {
    ensure!(state::is_lab_name(lab), "{lab} is no lab's name");
    drop(std::io::stdin().read_to_end(&mut Vec::new()));
    let record = state::labs().into_iter().find(|record| record.name == lab);
    if record.is_some_and(|record| record.persistent) {
        return Ok(());
    }
    teardown::teardown(lab)
}

impl LabArgs {
    fn options(&self) -> LabOptions {
        LabOptions {
            mtu: self.mtu,
            underlay: self.underlay,
            real_packets: self.real_packets,
            ..LabOptions::default()
        }
    }
}
