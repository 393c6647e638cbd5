//! `skein-lab demo`: two nodes, two pods each, and proof that what they say to each other went
//! through AF_XDP.
//!
//! Every line of the table compares the packets that the workers of both nodes count before and
//! after with the least number that the exchange needs, so that a path around the datapath would
//! show. Pods on one node: each packet enters a worker once. Across nodes: twice, from the pod
//! and from the wire. Then a Service balances and a policy denies ([`crate::demo_cluster`]).

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::agent::AgentOptions;
use crate::lab::{Lab, LabOptions};
use crate::pod::Pod;
use crate::{check, demo_cluster, report, teardown};

const PINGS: u32 = 5;
const DATAGRAM_SIZES: [usize; 3] = [1, 64, 1400];
const DATAGRAMS: u32 = 10;
const IPERF_SECONDS: u32 = 2;

/// TTL of a packet as a pod sends it, less the one hop that Skein is.
const TTL_ON_ARRIVAL: u8 = 63;

/// The largest IP packet: TCP bytes come in frames of at most so many.
const LARGEST_FRAME: u64 = 65_535;

/// One line of the table.
struct Line {
    cells: Vec<String>,
    ok: bool,
}

/// Brings the lab up, runs the exchanges, prints the table, takes the lab down.
///
/// # Errors
/// If the lab cannot be built, or any line of the table failed, or something stays behind.
pub fn run(lab_options: &LabOptions, agent: &AgentOptions) -> Result<()> {
    let mut lab = Lab::new(lab_options)?;
    println!("lab {}: two nodes, two pods each", lab.name());
    let mut pods = Vec::new();
    for number in 1..=2 {
        let node = lab.node(number);
        node.start_agent(agent)?;
        for letter in ["a", "b"] {
            pods.push(node.add_pod("default", &format!("{letter}{number}"), &labels(letter))?);
        }
    }
    lab.wait_for_peers()?;
    let mut lines = Vec::new();
    for (path, to) in [("same node", &pods[1]), ("across nodes", &pods[2])] {
        let hops = if path == "same node" { 1 } else { 2 };
        for v6 in [false, true] {
            let exchange = Exchange {
                lab: &lab,
                from: &pods[0],
                to,
                v6,
                hops,
            };
            for (what, outcome) in [
                ("ping", exchange.measured(Exchange::ping)),
                ("TCP", exchange.measured(Exchange::tcp)),
                ("UDP", exchange.measured(Exchange::udp)),
            ] {
                lines.push(line(what, v6, path, outcome));
            }
        }
    }
    let [a1, b1, _, b2] = &pods[..] else {
        anyhow::bail!("the demo has four pods");
    };
    lines.push(shown("Service", demo_cluster::service(&lab, a1, [b1, b2])));
    lines.push(shown("policy", demo_cluster::policy(&lab, b2, a1, b1)));
    lines.push(match lab.assert_no_kernel_datapath() {
        Ok(()) => note(
            "kernel datapath",
            "no bridge, tunnel or filter rule in a node",
            true,
        ),
        Err(error) => note("kernel datapath", &format!("{error:#}"), false),
    });
    for pod in pods {
        let name = pod.full_name();
        pod.delete().with_context(|| format!("deleting {name}"))?;
    }
    for number in 1..=2 {
        lab.node(number).stop_agent()?;
    }
    let name = lab.name().to_owned();
    lines.push(match lab.close() {
        Ok(()) if teardown::leftovers(&name).is_empty() => note(
            "teardown",
            "no namespace, link, pin, mount, process or file",
            true,
        ),
        Ok(()) => note(
            "teardown",
            &format!("{:?}", teardown::leftovers(&name)),
            false,
        ),
        Err(error) => note("teardown", &format!("{error:#}"), false),
    });
    print(&lines)
}

/// Labels of the demo's pods.
pub fn labels(app: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("app".to_owned(), app.to_owned())])
}

/// What an exchange came to, and the least number of packets that it takes on one hop.
struct Outcome {
    text: String,
    packets: u64,
}

struct Exchange<'a> {
    lab: &'a Lab,
    from: &'a Pod,
    to: &'a Pod,
    v6: bool,
    hops: u64,
}

impl Exchange<'_> {
    /// Runs `exchange` and sees what the workers counted meanwhile.
    fn measured(&self, exchange: fn(&Self) -> Result<Outcome>) -> Result<(Outcome, u64)> {
        let before = self.counted()?;
        let outcome = exchange(self)?;
        let counted = self.counted()?.saturating_sub(before);
        let least = outcome.packets * self.hops;
        ensure!(
            counted >= least,
            "{}, but the workers saw {counted} packets of at least {least}",
            outcome.text
        );
        Ok((outcome, counted))
    }

    fn counted(&self) -> Result<u64> {
        let mut packets = 0;
        for node in self.lab.nodes() {
            packets += received_packets(&node.view("workers")?)?;
        }
        Ok(packets)
    }

    fn ping(&self) -> Result<Outcome> {
        // Both ways: each direction shows the TTL that the other's answers arrive with.
        let mut packets = 0;
        for (from, to) in [(self.from, self.to), (self.to, self.from)] {
            let ping = check::ping(from.netns(), to.ip(self.v6)?, PINGS)?;
            let (from, to) = (from.full_name(), to.full_name());
            ensure!(
                ping.ttls.len() == PINGS as usize,
                "{from} to {to}: {} of {PINGS} answers",
                ping.ttls.len()
            );
            ensure!(
                ping.ttls.iter().all(|ttl| *ttl == TTL_ON_ARRIVAL),
                "{from} to {to}: TTL 64 arrives as {:?}",
                ping.ttls
            );
            packets += 2 * u64::from(PINGS);
        }
        Ok(Outcome {
            text: format!("{PINGS} of {PINGS} both ways, TTL 64 arrives as {TTL_ON_ARRIVAL}"),
            packets,
        })
    }

    fn tcp(&self) -> Result<Outcome> {
        let ip = self.to.ip(self.v6)?;
        let stream = check::iperf3(self.from.netns(), self.to.netns(), ip, IPERF_SECONDS)?;
        ensure!(stream.bytes > 0, "iperf3: no byte arrived");
        Ok(Outcome {
            text: format!("{:.2} Gbit/s (iperf3)", stream.gbit_per_second),
            packets: stream.bytes / LARGEST_FRAME,
        })
    }

    fn udp(&self) -> Result<Outcome> {
        let ip = self.to.ip(self.v6)?;
        let (from, to) = (self.from.netns(), self.to.netns());
        let echoes = check::udp_echo(from, to, ip, &DATAGRAM_SIZES, DATAGRAMS)?;
        ensure!(
            echoes.returned == echoes.sent,
            "{} of {} echoes returned, {} altered",
            echoes.returned,
            echoes.sent,
            echoes.altered
        );
        Ok(Outcome {
            text: format!("{0} of {0} echoes of 1 to 1400 B", echoes.sent),
            packets: 2 * u64::from(echoes.sent),
        })
    }
}

/// Packets that all workers of a node have received from AF_XDP sockets, from the view `workers`.
///
/// # Errors
/// If the view has no list `workers`, or an entry without `rx_packets`.
pub fn received_packets(view: &Value) -> Result<u64> {
    let workers = view["workers"].as_array();
    let workers = workers.with_context(|| format!("the view has no list `workers`: {view}"))?;
    workers
        .iter()
        .map(|worker| {
            let packets = worker["rx_packets"].as_u64();
            packets.with_context(|| format!("a worker without `rx_packets`: {worker}"))
        })
        .sum()
}

fn line(what: &str, v6: bool, path: &str, outcome: Result<(Outcome, u64)>) -> Line {
    let (result, counted, ok) = match outcome {
        Ok((outcome, counted)) => (outcome.text, counted.to_string(), true),
        Err(error) => (format!("{error:#}"), "-".to_owned(), false),
    };
    let ip = if v6 { "IPv6" } else { "IPv4" };
    Line {
        cells: vec![
            verdict(ok),
            what.to_owned(),
            ip.to_owned(),
            path.to_owned(),
            result,
            counted,
        ],
        ok,
    }
}

fn note(what: &str, result: &str, ok: bool) -> Line {
    let dash = || "-".to_owned();
    Line {
        cells: vec![
            verdict(ok),
            what.to_owned(),
            dash(),
            dash(),
            result.to_owned(),
            dash(),
        ],
        ok,
    }
}

fn shown(what: &str, outcome: Result<String>) -> Line {
    match outcome {
        Ok(text) => note(what, &text, true),
        Err(error) => note(what, &format!("{error:#}"), false),
    }
}

fn verdict(ok: bool) -> String {
    if ok { "ok" } else { "FAILED" }.to_owned()
}

fn print(lines: &[Line]) -> Result<()> {
    let header = ["", "what", "IP", "path", "result", "AF_XDP packets"];
    let cells: Vec<Vec<String>> = lines.iter().map(|line| line.cells.clone()).collect();
    println!("\n{}", report::table(&header, &cells));
    let failed = lines.iter().filter(|line| !line.ok).count();
    ensure!(failed == 0, "{failed} of {} checks failed", lines.len());
    println!("all {} checks passed", lines.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packets_are_summed_over_workers_and_a_missing_counter_is_an_error() {
        let view = json!({"workers": [{"rx_packets": 3}, {"rx_packets": 4}]});
        assert_eq!(received_packets(&view).unwrap(), 7);
        assert!(received_packets(&json!({"workers": [{}]})).is_err());
        assert!(received_packets(&json!({})).is_err());
    }
}
