//! Datagrams: echoed and compared, or counted.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::tcp::Noise;
use super::{SILENCE, any_address, say_ready};

/// How long an answer may take; a datagram without one is lost, never sent again.
const ANSWER: Duration = Duration::from_secs(2);

/// How long a sink waits for the next datagram before it counts the flow as ended.
const END_OF_FLOW: Duration = Duration::from_millis(700);

/// The largest payload over IPv4; IPv6 takes 20 more.
const MAX_PAYLOAD: usize = 65_507;

/// What became of datagrams sent to an echo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Echoes {
    /// Sent.
    pub sent: u32,
    /// Came back with the same bytes.
    pub returned: u32,
    /// Came back otherwise.
    pub altered: u32,
}

/// What a sink or a blast counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Count {
    /// Datagrams.
    pub packets: u64,
    /// From the first to the last.
    pub seconds: f64,
}

impl Count {
    /// Datagrams a second.
    pub fn per_second(&self) -> f64 {
        self.packets as f64 / self.seconds.max(1e-9)
    }
}

/// Sends every datagram back, until it is killed.
pub fn echo() -> Result<()> {
    let socket = UdpSocket::bind(any_address()).context("cannot listen")?;
    say_ready(socket.local_addr()?);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        match socket.send_to(&buffer[..length], from) {
            // An ICMP error about an earlier answer: its client has gone.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            sent => drop(sent.with_context(|| format!("to {from}"))?),
        }
    }
}

/// Sends `count` datagrams of each size, one after the other, each answered before the next.
pub fn send(to: SocketAddr, sizes: &[usize], count: u32) -> Result<Echoes> {
    let socket = connected(to)?;
    socket.set_read_timeout(Some(ANSWER))?;
    let mut echoes = Echoes::default();
    let mut noise = Noise::new(u64::from(to.port()));
    let mut answer = vec![0; 1 << 16];
    for &size in sizes {
        ensure!(size <= MAX_PAYLOAD, "{size} bytes do not fit a datagram");
        let mut payload = vec![0; size];
        for _ in 0..count {
            noise.fill(&mut payload);
            socket
                .send(&payload)
                .with_context(|| format!("{size} bytes to {to}"))?;
            echoes.sent += 1;
            match socket.recv(&mut answer) {
                Ok(length) if answer[..length] == payload => echoes.returned += 1,
                Ok(_) => echoes.altered += 1,
                Err(error) if is_timeout(error.kind()) => {}
                Err(error) => return Err(error).with_context(|| format!("{size} bytes to {to}")),
            }
        }
    }
    Ok(echoes)
}

/// Counts datagrams from the first until none has come for a while.
pub fn sink() -> Result<Count> {
    let socket = UdpSocket::bind(any_address()).context("cannot listen")?;
    say_ready(socket.local_addr()?);
    let mut buffer = vec![0; 1 << 16];
    socket.set_read_timeout(Some(SILENCE))?;
    socket.recv(&mut buffer).context("no datagram came")?;
    socket.set_read_timeout(Some(END_OF_FLOW))?;
    let start = Instant::now();
    let (mut packets, mut last) = (1, start);
    loop {
        match socket.recv(&mut buffer) {
            Ok(_) => packets += 1,
            Err(error) if is_timeout(error.kind()) => break,
            Err(error) => return Err(error.into()),
        }
        // A clock reading costs a twentieth of a datagram.
        last = Instant::now();
    }
    Ok(Count {
        packets,
        seconds: (last - start).as_secs_f64(),
    })
}

/// Sends datagrams as fast as one thread can, one system call each.
pub fn blast(to: SocketAddr, size: usize, time: Duration) -> Result<Count> {
    ensure!(size <= MAX_PAYLOAD, "{size} bytes do not fit a datagram");
    let socket = connected(to)?;
    let payload = vec![0x55; size];
    let start = Instant::now();
    let mut packets = 0;
    while start.elapsed() < time {
        for _ in 0..32 {
            match socket.send(&payload) {
                Ok(_) => packets += 1,
                // The interface's queue is full: the datagram is lost, as it may be.
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => {}
                Err(error) => return Err(error).with_context(|| format!("to {to}")),
            }
        }
    }
    Ok(Count {
        packets,
        seconds: start.elapsed().as_secs_f64(),
    })
}

fn connected(to: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = if to.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket
        .connect(to)
        .with_context(|| format!("no way to {to}"))?;
    Ok(socket)
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
/// Sends a datagram to a port where nobody listens; fails unless an ICMP error comes back.
///
/// # Errors
/// The socket's, and [`SILENCE`] without an answer.
pub fn refused(to: SocketAddr) -> Result<()> {
    let socket = UdpSocket::bind(any_address())?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(SILENCE))?;
    socket.send(b"?")?;
    match socket.recv(&mut [0; 1]) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error).with_context(|| format!("no ICMP error from {to}")),
        Ok(_) => anyhow::bail!("{to} answers, where nobody should listen"),
    }
}

