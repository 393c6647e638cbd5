//! Who can reach whom? A server that answers on several ports, and a client that asks many of
//! them at the same time and says which answered.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::say_ready;

/// How often a datagram without an answer is sent again.
const AGAIN: Duration = Duration::from_millis(300);

/// Over what a target is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Protocol {
    /// A connection, whose server writes one byte.
    Tcp,
    /// A datagram, sent back.
    Udp,
}

/// Whom to ask, written `tcp/10.0.0.1:80` or `udp/[fd00::1]:80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Over what.
    pub protocol: Protocol,
    /// Where.
    pub address: SocketAddr,
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (protocol, address) = text.split_once('/').unwrap_or_default();
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => bail!("'{text}' begins with neither tcp/ nor udp/"),
        };
        let address = (address.parse()).with_context(|| format!("'{text}' has no address"))?;
        Ok(Self { protocol, address })
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(f, "{protocol}/{}", self.address)
    }
}

/// Which targets answered, by how they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached(pub BTreeMap<String, bool>);

/// Answers on these ports over TCP and UDP, IPv4 and IPv6, until it is killed.
pub fn answer(ports: &[u16]) -> Result<()> {
    let any = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let mut servers = Vec::new();
    let mut first = None;
    for &port in ports {
        let address = SocketAddr::new(any, port);
        let listener = TcpListener::bind(address).with_context(|| format!("TCP port {port}"))?;
        let socket = UdpSocket::bind(address).with_context(|| format!("UDP port {port}"))?;
        first.get_or_insert(address);
        servers.push(thread::spawn(move || answer_tcp(&listener)));
        servers.push(thread::spawn(move || answer_udp(&socket)));
    }
    say_ready(first.context("no port to answer on")?);
    for server in servers {
        match server.join() {
            Ok(result) => result?,
            Err(_) => bail!("a server panicked"),
        }
    }
    Ok(())
}

fn answer_tcp(listener: &TcpListener) -> Result<()> {
    loop {
        let (mut stream, _) = listener.accept()?;
        // A client that is gone already has asked for nothing more.
        drop(stream.write_all(b"."));
    }
}

fn answer_udp(socket: &UdpSocket) -> Result<()> {
    let mut buffer = [0; 64];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        // Likewise.
        drop(socket.send_to(&buffer[..length], from));
    }
}

/// Asks all targets at once and waits that long for their answers.
pub fn ask(targets: &[Target], patience: Duration) -> Result<Reached> {
    let deadline = Instant::now() + patience;
    let asked: Vec<_> = (targets.iter())
        .map(|&target| (target, thread::spawn(move || is_reached(target, deadline))))
        .collect();
    let mut reached = Reached::default();
    for (target, asking) in asked {
        let Ok(answer) = asking.join() else {
            bail!("asking {target} panicked");
        };
        let answer = answer.with_context(|| target.to_string())?;
        reached.0.insert(target.to_string(), answer);
    }
    Ok(reached)
}

fn is_reached(target: Target, deadline: Instant) -> Result<bool> {
    match target.protocol {
        Protocol::Tcp => tcp_reached(target.address, deadline),
        Protocol::Udp => udp_reached(target.address, deadline),
    }
}

fn left(deadline: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (left > Duration::from_millis(1)).then_some(left)
}

fn is_silence(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn tcp_reached(to: SocketAddr, deadline: Instant) -> Result<bool> {
    let Some(time) = left(deadline) else {
        return Ok(false);
    };
    let mut stream = match TcpStream::connect_timeout(&to, time) {
        Ok(stream) => stream,
        Err(error) if is_silence(error.kind()) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let Some(time) = left(deadline) else {
        return Ok(false);
    };
    stream.set_read_timeout(Some(time))?;
    match stream.read(&mut [0]) {
        Ok(length) => Ok(length == 1),
        Err(error) if is_silence(error.kind()) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn udp_reached(to: SocketAddr, deadline: Instant) -> Result<bool> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    while let Some(time) = left(deadline) {
        socket.set_read_timeout(Some(time.min(AGAIN)))?;
        socket.send(b"?")?;
        match socket.recv(&mut [0; 64]) {
            Ok(_) => return Ok(true),
            Err(error) if is_silence(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_read_as_they_are_written() {
        for text in ["tcp/10.0.0.1:80", "udp/[fd00::1]:81"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        for text in ["", "10.0.0.1:80", "sctp/10.0.0.1:80", "tcp/10.0.0.1"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_who_answers_is_reached() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let target = |protocol, address| Target { protocol, address };
        let targets = [
            target(Protocol::Tcp, listener.local_addr().unwrap()),
            target(Protocol::Udp, socket.local_addr().unwrap()),
            target(Protocol::Udp, silent.local_addr().unwrap()),
        ];
        thread::spawn(move || answer_tcp(&listener));
        thread::spawn(move || answer_udp(&socket));
        let reached = ask(&targets, Duration::from_secs(2)).unwrap();
        let answers: Vec<_> = (targets.iter())
            .map(|target| reached.0[&target.to_string()])
            .collect();
        assert_eq!(answers, [true, true, false]);
    }
}
