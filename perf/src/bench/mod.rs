//! `skein-lab bench`: Skein against the kernel's own means, in the same run.
//!
//! Two labs stand side by side: one with Skein, one whose pods hang on a kernel bridge, joined
//! across nodes by kernel VXLAN ([`kernel`]). Rounds alternate, Skein then kernel then Skein, so
//! that whatever the machine does meanwhile hits both; agents are paused (SIGSTOP) while the
//! kernel is measured, so that a spinning worker does not slow the baseline. A round is a pair,
//! and the ratio that counts is the median over the pairs' ratios.
//!
//! The sender runs on one CPU and the receiver on another; the workers' CPUs are given. Both
//! labs use the same probes, the same wire and the same IP version.
//!
//! `cni.add` is of another kind: the time of an ADD, beside a reference plugin's ([`cni`]).
//!
//! Deliberately absent: plots, and scenarios beyond two pods.

pub mod cni;
pub mod kernel;
pub mod result;
pub mod scenario;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use crate::agent::AgentOptions;
use crate::check::{self, Placement};
use crate::demo;
use crate::lab::{Lab, LabOptions, Underlay};
use crate::pod::Netns;
use crate::teardown;

use kernel::KernelPods;
use result::{Host, Report, Row};
use scenario::{Measure, Path, Scenario};

/// What a wire lets through in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WireKind {
    /// A veth as it is: super-packets cross whole, which flatters whoever sends them.
    Veth,
    /// Segmentation off on both ends: nothing above the MTU crosses, as on a cable.
    Real,
}

impl WireKind {
    fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Real => "real",
        }
    }
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Pairs of runs for each scenario.
    pub rounds: usize,
    /// Length of one run.
    pub time: Duration,
    /// CPUs of the two ends.
    pub place: Placement,
    /// The wires to measure across; scenarios on one node run with the first.
    pub wires: Vec<WireKind>,
    /// Only scenarios whose id contains this.
    pub filter: String,
    /// MTU of the wire.
    pub mtu: u32,
    /// The folder of `latest.json` and `latest.md`.
    pub output: PathBuf,
}

/// The two ends of a path, in Skein's lab or the kernel's.
struct Ends<'a> {
    from: &'a Netns,
    to: &'a Netns,
    ip: std::net::IpAddr,
}

/// Runs all scenarios, writes the results, prints the table.
///
/// # Errors
/// If a lab cannot be built or nothing can be written; if a scenario could not run, after the
/// others have and the results are written.
pub fn run(options: &BenchOptions, agent: &AgentOptions) -> Result<()> {
    ensure!(options.rounds > 0, "nothing to measure in 0 rounds");
    let mut rows = Vec::new();
    for (index, wire) in options.wires.iter().enumerate() {
        let scenarios: Vec<Scenario> = scenario::all(wire.name())
            .into_iter()
            .filter(|s| index == 0 || s.path == Path::Across)
            .filter(|s| s.id.contains(&options.filter))
            .collect();
        if !scenarios.is_empty() {
            rows.extend(on_wire(options, agent, *wire, &scenarios)?);
        }
    }
    ensure!(
        !rows.is_empty(),
        "no scenario's id contains {:?}",
        options.filter
    );
    let report = Report {
        host: Host::here(&placement(options, agent))?,
        rows,
    };
    report.write(&options.output)?;
    println!("\n{}", report.table());
    let failed = report.rows.iter().filter(|row| row.failed()).count();
    ensure!(
        failed == 0,
        "{failed} of {} rows have no result",
        report.rows.len()
    );
    Ok(())
}

fn placement(options: &BenchOptions, agent: &AgentOptions) -> String {
    let cpu = |cpu: Option<usize>| cpu.map_or("any".to_owned(), |cpu| cpu.to_string());
    let workers = if agent.cpus.is_empty() {
        "the agent's choice".to_owned()
    } else {
        format!("{:?} on each node", agent.cpus)
    };
    format!(
        "sender CPU {}, receiver CPU {}, workers {workers}, poll {:?}",
        cpu(options.place.sender),
        cpu(options.place.receiver),
        agent.poll
    )
}

fn on_wire(
    options: &BenchOptions,
    agent: &AgentOptions,
    wire: WireKind,
    scenarios: &[Scenario],
) -> Result<Vec<Row>> {
    let lab_options = LabOptions {
        mtu: options.mtu,
        underlay: Underlay::V4,
        real_packets: wire == WireKind::Real,
        ..LabOptions::default()
    };
    let mut skein = Lab::new(&lab_options).context("Skein's lab")?;
    let mut pods = Vec::new();
    for (number, names) in [(1, ["a", "b"].as_slice()), (2, ["c"].as_slice())] {
        skein.node(number).start_agent(agent)?;
        for name in names {
            pods.push(
                skein
                    .node(number)
                    .add_pod("default", name, &demo::labels(name))?,
            );
        }
    }
    let baseline = Lab::new(&lab_options).context("the kernel's lab")?;
    let kernel = KernelPods::build(&baseline, options.mtu)?;
    let mut rows = Vec::new();
    for scenario in scenarios {
        if scenario.measure == Measure::CniAdd {
            let ours = || cni::skein(skein.nodes()[0].info());
            let theirs = || cni::reference(baseline.nodes()[0].info());
            rows.extend(pairs(options, &skein, scenario, ours, theirs));
            continue;
        }
        let to = scenario.path.peer();
        let ours = Ends {
            from: pods[0].netns(),
            to: pods[to].netns(),
            ip: pods[to].ip(false)?,
        };
        let theirs = kernel.ends(to);
        let ours = || measure(options, scenario.measure, &ours);
        let theirs = || measure(options, scenario.measure, &theirs);
        rows.extend(pairs(options, &skein, scenario, ours, theirs));
    }
    baseline.close()?;
    skein.close()?;
    Ok(rows)
}

/// All rounds of one scenario: a row for each of its metrics.
fn pairs(
    options: &BenchOptions,
    skein: &Lab,
    scenario: &Scenario,
    ours: impl Fn() -> Result<Vec<f64>>,
    theirs: impl Fn() -> Result<Vec<f64>>,
) -> Vec<Row> {
    let mut runs = Vec::new();
    for round in 1..=options.rounds {
        let pair = ours().and_then(|ours| {
            pause(skein, true);
            let theirs = theirs();
            pause(skein, false);
            Ok((ours, theirs.context("baseline")?))
        });
        match pair {
            Ok(pair) => {
                eprintln!(
                    "{} round {round}: {:.3?} against {:.3?}",
                    scenario.id, pair.0, pair.1
                );
                runs.push(pair);
            }
            Err(error) => {
                eprintln!("{} round {round}: {error:#}", scenario.id);
                return Row::errors(scenario, &error);
            }
        }
    }
    Row::of(scenario, &runs)
}

/// Stops or continues the agents of a lab.
fn pause(lab: &Lab, stop: bool) {
    let signal = if stop {
        Signal::SIGSTOP
    } else {
        Signal::SIGCONT
    };
    for agent in lab.nodes().iter().filter_map(crate::Node::agent) {
        teardown::send(agent.pid(), signal);
    }
}

/// One run: a value for each metric of the measurement.
fn measure(options: &BenchOptions, measure: Measure, ends: &Ends<'_>) -> Result<Vec<f64>> {
    let Ends { from, to, ip } = *ends;
    let (time, place) = (options.time, options.place);
    // Neighbours resolved and flows known before the clock runs.
    let ping = check::ping(from, ip, 3)?;
    ensure!(!ping.ttls.is_empty(), "{ip} does not answer a ping");
    Ok(match measure {
        Measure::UdpRate { size } => {
            let count = check::udp_rate(from, to, ip, size, time, place)?;
            vec![count.per_second() / 1000.0]
        }
        Measure::TcpRate => vec![check::tcp_rate(from, to, ip, time, place)?.gbit_per_second()],
        Measure::TcpRr => {
            let latency = check::tcp_rr(from, to, ip, time, place)?;
            vec![latency.p50_us, latency.p99_us]
        }
        Measure::CniAdd => bail!("an ADD has no two ends"),
    })
}
