//! Probes with typed results, run between two network namespaces of a lab.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::bins;
use crate::cmd::{Cmd, Running};
use crate::pod::Netns;
use crate::probe::SILENCE;
use crate::probe::name::Answers;
use crate::probe::peer::Seen;
use crate::probe::reach::{Reached, Target};
use crate::probe::rr::Latency;
use crate::probe::sizes::Run;
use crate::probe::sweep::Sweep;
use crate::probe::tcp::Transfer;
use crate::probe::udp::{Count, Echoes};

/// How long a server may take to listen.
const LISTEN: Duration = Duration::from_secs(10);

/// What a measurement may take beyond the time that it was given.
const SLACK: Duration = Duration::from_secs(60);

/// The answers to a ping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ping {
    /// Echo requests sent.
    pub sent: u32,
    /// TTL (IPv4) or hop limit (IPv6) that each answer arrived with.
    ///
    /// Answers leave with 64, so this shows what the path from the peer takes off. For the path
    /// towards the peer ping the other way.
    pub ttls: Vec<u8>,
}

/// The two CPUs that a measurement's ends run on; none: the scheduler's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The sending program's.
    pub sender: Option<usize>,
    /// The receiving program's.
    pub receiver: Option<usize>,
}

/// Pings `to` from `from` by iputils' ping.
///
/// # Errors
/// If ping cannot run; lost answers are no error but fewer [`Ping::ttls`].
pub fn ping(from: &Netns, to: IpAddr, count: u32) -> Result<Ping> {
    let output = from
        .cmd("ping")
        .args(["-n", "-i", "0.1", "-W", "2", "-c", &count.to_string()])
        .arg(to.to_string())
        .timeout(SLACK)
        .try_run()?;
    // 1: some answer is missing. 2: ping itself failed.
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "ping {to}: {}",
        output.describe()
    );
    Ok(Ping {
        sent: count,
        ttls: ttls(&output.stdout),
    })
}

fn ttls(output: &str) -> Vec<u8> {
    output
        .lines()
        .filter(|line| line.contains("bytes from") && !line.contains("DUP!"))
        .filter_map(|line| line.split("ttl=").nth(1))
        .filter_map(|rest| rest.split(' ').next()?.parse().ok())
        .collect()
}

/// Sends `bytes` over TCP and compares the hashes of both ends.
///
/// # Errors
/// If the connection fails, or a byte is missing or wrong.
pub fn tcp_transfer(from: &Netns, to: &Netns, ip: IpAddr, bytes: u64) -> Result<Transfer> {
    // Half a megabyte a second is slow enough for any debug build on a busy machine.
    let time = SLACK + Duration::from_secs(bytes >> 19);
    let (server, port) = serve(to, None, &["tcp-serve"])?;
    let sent: Transfer = probe(from, None)?
        .args([
            "tcp-send",
            &address(ip, port),
            "--bytes",
            &bytes.to_string(),
        ])
        .timeout(time)
        .run()
        .and_then(|output| result(&output.stdout))?;
    let received: Transfer = result(&server.finish(SLACK)?.stdout)?;
    ensure!(
        sent.bytes == bytes && received.bytes == bytes,
        "sent {} of {bytes} bytes, {} arrived",
        sent.bytes,
        received.bytes
    );
    ensure!(
        sent.sha256 == received.sha256,
        "{bytes} bytes arrived changed: SHA-256 {} instead of {}",
        received.sha256,
        sent.sha256
    );
    Ok(received)
}

/// Sends `count` datagrams of each size to an echo in `to`.
///
/// # Errors
/// If a probe cannot run; what was lost or altered is in the result.
pub fn udp_echo(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    sizes: &[usize],
    count: u32,
) -> Result<Echoes> {
    let (_echo, port) = serve(to, None, &["udp-echo"])?;
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    probe(from, None)?
        .args([
            "udp-send",
            &address(ip, port),
            "--count",
            &count.to_string(),
        ])
        .args(["--sizes", &sizes.join(",")])
        .timeout(SLACK + Duration::from_secs(u64::from(count) * 2 * sizes.len() as u64))
        .run()
        .and_then(|output| result(&output.stdout))
}

/// The address that `to` sees `from` by.
///
/// # Errors
/// If either protocol fails.
pub fn seen_source(from: &Netns, to: &Netns, ip: IpAddr) -> Result<Seen> {
    let (_server, port) = serve(to, None, &["tell-peer"])?;
    probe(from, None)?
        .args(["ask-peer", &address(ip, port)])
        .timeout(SLACK * 2)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// A server that tells its name on a port, over TCP and UDP; it ends with the value.
///
/// # Errors
/// If it cannot listen.
pub fn name_server(on: &Netns, name: &str, port: u16) -> Result<Running> {
    let port = port.to_string();
    let (server, _) = serve(on, None, &["name-serve", name, "--port", &port])?;
    Ok(server)
}

/// Asks so many times who serves at an address.
///
/// # Errors
/// If the probe cannot run; questions without an answer are counted.
pub fn ask_names(from: &Netns, to: SocketAddr, count: u32, udp: bool) -> Result<Answers> {
    let count_ = count.to_string();
    let mut arguments = vec![
        "name-ask".to_owned(),
        to.to_string(),
        "--count".into(),
        count_,
    ];
    arguments.extend(udp.then(|| "--udp".to_owned()));
    probe(from, None)?
        .args(arguments)
        .timeout(SLACK + Duration::from_secs(3) * count)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// Sends a datagram to a port where nobody listens.
///
/// # Errors
/// If no ICMP error says so.
pub fn udp_refused(from: &Netns, to: SocketAddr) -> Result<()> {
    probe(from, None)?
        .args(["udp-refused", &to.to_string()])
        .timeout(SLACK)
        .run()
        .map(drop)
}

/// Datagrams as fast as one sender can; the receiver's count.
///
/// # Errors
/// If a probe cannot run, or no datagram arrives.
pub fn udp_rate(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    size: usize,
    time: Duration,
    place: Placement,
) -> Result<Count> {
    let (sink, port) = serve(to, place.receiver, &["udp-sink"])?;
    probe(from, place.sender)?
        .args(["udp-blast", &address(ip, port), "--size", &size.to_string()])
        .args(["--seconds", &time.as_secs_f64().to_string()])
        .timeout(time + SLACK)
        .run()?;
    result(&sink.finish(SLACK)?.stdout)
}

/// One TCP stream for a time; the receiver's count.
///
/// # Errors
/// If the connection fails.
pub fn tcp_rate(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    time: Duration,
    place: Placement,
) -> Result<Transfer> {
    let (server, port) = serve(to, place.receiver, &["tcp-serve", "--no-hash"])?;
    probe(from, place.sender)?
        .args(["tcp-send", &address(ip, port)])
        .args(["--seconds", &time.as_secs_f64().to_string()])
        .timeout(time + SLACK)
        .run()?;
    result(&server.finish(SLACK)?.stdout)
}

/// One-byte requests and answers over TCP, one at a time.
///
/// # Errors
/// If the connection fails.
pub fn tcp_rr(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    time: Duration,
    place: Placement,
) -> Result<Latency> {
    let (_server, port) = serve(to, place.receiver, &["tcp-rr-serve"])?;
    probe(from, place.sender)?
        .args(["tcp-rr", &address(ip, port)])
        .args(["--seconds", &time.as_secs_f64().to_string()])
        .timeout(time + SLACK)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// A TCP connection that carries a request every ten milliseconds until it is dropped.
#[derive(Debug)]
pub struct Session {
    client: Running,
    _server: Running,
}

/// Opens a connection that lasts.
///
/// # Errors
/// If a probe cannot start.
pub fn session(from: &Netns, to: &Netns, ip: IpAddr) -> Result<Session> {
    session_over_gaps(from, to, ip, SILENCE)
}

/// Opens a connection that lasts, also while nothing comes through for as long as `silence`.
///
/// # Errors
/// If a probe cannot start.
pub fn session_over_gaps(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    silence: Duration,
) -> Result<Session> {
    let silence = ["--silence".to_owned(), silence.as_secs_f64().to_string()];
    let serving = ["tcp-rr-serve", &silence[0], &silence[1]];
    let (mut server, port) = serve(to, None, &serving)?;
    let client = probe(from, None)?
        .args(["tcp-rr", &address(ip, port)])
        .args(["--seconds", "1000000", "--pause", "0.01"])
        .args(&silence)
        .spawn()?;
    server.expect_line("connected", LISTEN)?;
    Ok(Session {
        client,
        _server: server,
    })
}

impl Session {
    /// Closes the connection.
    ///
    /// # Errors
    /// If it had ended before: what its client said of it.
    pub fn close(mut self) -> Result<()> {
        if self.client.is_alive()? {
            return Ok(());
        }
        let output = self.client.finish(SLACK)?;
        bail!("the connection had ended: {}", output.describe())
    }
}

/// Pings every target from `from`, each until it answers, for at most `within`.
///
/// # Errors
/// If the probe cannot run; who did not answer is in the result.
pub fn sweep(from: &Netns, targets: &[IpAddr], within: Duration) -> Result<Sweep> {
    probe(from, None)?
        .args(["sweep", "--seconds", &within.as_secs_f64().to_string()])
        .args(targets.iter().map(ToString::to_string))
        .timeout(within + SLACK)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// Answers on these ports over TCP and UDP until it is dropped.
///
/// # Errors
/// If a port is taken.
pub fn answer(netns: &Netns, ports: &[u16]) -> Result<Running> {
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    let mut arguments = vec!["answer"];
    arguments.extend(ports.iter().map(String::as_str));
    serve(netns, None, &arguments).map(|(server, _)| server)
}

/// Which of the targets answer `from` within that time; all are asked at once.
///
/// # Errors
/// If the probe cannot run, or is refused.
pub fn reach(from: &Netns, targets: &[Target], within: Duration) -> Result<Reached> {
    probe(from, None)?
        .args(["reach", "--seconds", &within.as_secs_f64().to_string()])
        .args(targets.iter().map(ToString::to_string))
        .timeout(within + SLACK)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// How [`sizes`] sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Echo {
    /// ICMP.
    Icmp,
    /// UDP.
    Udp,
}

/// Whether a packet may be cut on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cutting {
    /// IPv4 with DF; IPv6.
    Forbidden,
    /// IPv4 without DF.
    Allowed,
}

/// Sends a packet of each payload size from `from` to `ip`, which is in `to`.
///
/// # Errors
/// If a probe cannot run; what became of each size is in the result.
pub fn sizes(
    from: &Netns,
    to: &Netns,
    ip: IpAddr,
    sizes: RangeInclusive<usize>,
    echo: Echo,
    cutting: Cutting,
) -> Result<Vec<Run>> {
    let echo = match echo {
        Echo::Icmp => None,
        Echo::Udp => Some(serve(to, None, &["udp-echo"])?),
    };
    let port = echo
        .iter()
        .flat_map(|(_, port)| ["--port".to_owned(), port.to_string()]);
    probe(from, None)?
        .args(["sizes", &ip.to_string()])
        .args(["--first", &sizes.start().to_string()])
        .args(["--last", &sizes.end().to_string()])
        .args(port)
        .args((cutting == Cutting::Allowed).then_some("--may-be-cut"))
        .timeout(SLACK * 5)
        .run()
        .and_then(|output| result(&output.stdout))
}

/// One TCP stream by iperf3, as its receiver counts it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stream {
    /// Payload.
    pub bytes: u64,
    /// Mean over the run.
    pub gbit_per_second: f64,
}

/// One TCP stream by iperf3.
///
/// # Errors
/// iperf3's.
pub fn iperf3(from: &Netns, to: &Netns, ip: IpAddr, seconds: u32) -> Result<Stream> {
    let mut server = to
        .cmd("iperf3")
        .args(["--server", "--one-off", "--forceflush"])
        .spawn()?;
    server.expect_line("Server listening", LISTEN)?;
    let report = from
        .cmd("iperf3")
        .args(["--json", "--client", &ip.to_string()])
        .args(["--time", &seconds.to_string()])
        .timeout(SLACK + Duration::from_secs(u64::from(seconds)))
        .json()?;
    server.finish(SLACK)?;
    let sum = &report["end"]["sum_received"];
    match (sum["bytes"].as_u64(), sum["bits_per_second"].as_f64()) {
        (Some(bytes), Some(bits)) => Ok(Stream {
            bytes,
            gbit_per_second: bits / 1e9,
        }),
        _ => bail!("iperf3 to {ip} reports no sum: {}", report["error"]),
    }
}

fn probe(netns: &Netns, cpu: Option<usize>) -> Result<Cmd> {
    Ok(netns_cmd(netns, cpu)?.arg("probe"))
}

fn netns_cmd(netns: &Netns, cpu: Option<usize>) -> Result<Cmd> {
    Ok(netns.cmd(bins::find("skein-lab")?).on_cpu(cpu))
}

fn serve(netns: &Netns, cpu: Option<usize>, arguments: &[&str]) -> Result<(Running, u16)> {
    let mut server = probe(netns, cpu)?.args(arguments).spawn()?;
    let port = server.expect_line("ready", LISTEN)?;
    let port = port.parse().with_context(|| format!("no port: {port}"))?;
    Ok((server, port))
}

fn address(ip: IpAddr, port: u16) -> String {
    SocketAddr::new(ip, port).to_string()
}

/// The last line of a probe's output.
fn result<T: DeserializeOwned>(stdout: &str) -> Result<T> {
    let line = stdout.lines().last().unwrap_or_default();
    let value: Value =
        serde_json::from_str(line).with_context(|| format!("a probe wrote no result: {stdout}"))?;
    Ok(serde_json::from_value(value)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttls_are_read_from_ping() {
        let output = "PING 10.0.0.1 (10.0.0.1) 56(84) bytes of data.\n\
            64 bytes from 10.0.0.1: icmp_seq=1 ttl=63 time=0.035 ms\n\
            64 bytes from 10.0.0.1: icmp_seq=1 ttl=63 time=0.040 ms (DUP!)\n\
            From 10.0.0.9 icmp_seq=2 Destination Host Unreachable\n\
            64 bytes from 10.0.0.1: icmp_seq=3 ttl=64 time=0.035 ms\n";
        assert_eq!(ttls(output), [63, 64]);
    }
}
