//! ICMP echo to many addresses at once, each until it answers: who can be reached, and since when.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde::{Deserialize, Serialize};

/// An address without an answer is asked again after this long.
const AGAIN: Duration = Duration::from_millis(100);

/// So many requests leave at once, so that a probe does not overrun its own interface.
const BURST: usize = 32;

/// A pause between bursts, and between looks for answers.
const PAUSE: Duration = Duration::from_millis(1);

/// Message types of request and answer: RFC 792, RFC 4443 §4.
pub(super) const ICMP_V4: (u8, u8) = (8, 0);
pub(super) const ICMP_V6: (u8, u8) = (128, 129);

/// Who answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// How many addresses answered.
    pub answered: usize,
    /// Those that did not.
    pub missing: Vec<IpAddr>,
    /// From the start to the last first answer.
    pub seconds: f64,
}

/// Pings all `targets`, each until it answers, for at most `within`.
pub fn run(targets: &[IpAddr], within: Duration) -> Result<Sweep> {
    let v4 = raw_socket(AddressFamily::Inet, SockProtocol::Icmp)?;
    let v6 = raw_socket(AddressFamily::Inet6, SockProtocol::IcmpV6)?;
    let id = (std::process::id() & 0xffff) as u16;
    let mut waiting: BTreeSet<IpAddr> = targets.iter().copied().collect();
    let mut sweep = Sweep::default();
    let start = Instant::now();
    let mut round = start;
    let mut due: Vec<IpAddr> = waiting.iter().copied().collect();
    while !waiting.is_empty() && start.elapsed() < within {
        for ip in due.drain(..due.len().min(BURST)) {
            let socket = if ip.is_ipv4() { &v4 } else { &v6 };
            // No route or no room for the moment: asked again like one that does not answer.
            drop(socket.send_to(&request(ip.is_ipv4(), id), SocketAddr::new(ip, 0)));
        }
        std::thread::sleep(PAUSE);
        for (socket, is_v4) in [(&v4, true), (&v6, false)] {
            while let Some((from, message)) = receive(socket)? {
                if is_answer(&message, is_v4, id) && waiting.remove(&from) {
                    sweep.answered += 1;
                    sweep.seconds = start.elapsed().as_secs_f64();
                }
            }
        }
        if round.elapsed() >= AGAIN {
            round = Instant::now();
            due = waiting.iter().copied().collect();
        }
    }
    sweep.missing = waiting.into_iter().collect();
    Ok(sweep)
}

/// A raw ICMP socket; the standard library's datagram calls fit it, ports being 0.
pub(super) fn raw_socket(family: AddressFamily, protocol: SockProtocol) -> Result<UdpSocket> {
    let fd = socket(
        family,
        SockType::Raw,
        SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC,
        protocol,
    )
    .context("a raw socket needs root")?;
    Ok(fd.into())
}

fn receive(socket: &UdpSocket) -> Result<Option<(IpAddr, Vec<u8>)>> {
    let mut buffer = [0; 256];
    match socket.recv_from(&mut buffer) {
        Ok((length, from)) => Ok(Some((from.ip(), buffer[..length].to_vec()))),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error).context("a raw socket"),
    }
}

/// An echo request without payload; the kernel writes the checksum of ICMPv6 (RFC 3542 §3.1).
fn request(is_v4: bool, id: u16) -> [u8; 8] {
    let kind = if is_v4 { ICMP_V4.0 } else { ICMP_V6.0 };
    let mut message = [kind, 0, 0, 0, 0, 0, 0, 1];
    message[4..6].copy_from_slice(&id.to_be_bytes());
    if is_v4 {
        // RFC 1071 over three words that are not zero; no sum of them carries twice.
        let sum = (u32::from(kind) << 8) + u32::from(id) + 1;
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

fn is_answer(message: &[u8], is_v4: bool, id: u16) -> bool {
    // A raw IPv4 socket hands over the IP header too.
    let offset = match (is_v4, message.first()) {
        (true, Some(first)) => usize::from(first & 0xf) * 4,
        _ => 0,
    };
    let kind = if is_v4 { ICMP_V4.1 } else { ICMP_V6.1 };
    let Some(echo) = message.get(offset..offset + 8) else {
        return false;
    };
    echo[0] == kind && echo[4..6] == id.to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_right_checksum() {
        for id in [0, 1, 0x0fff, 0xf7fe, 0xf7ff, 0xffff] {
            let sum: u32 = request(true, id)
                .chunks(2)
                .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
                .sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{id}");
        }
    }

    #[test]
    fn an_answer_is_told_from_other_messages() {
        let mut v4 = vec![0x45; 20];
        v4.extend([0, 0, 9, 9, 0x12, 0x34, 0, 1]);
        assert!(is_answer(&v4, true, 0x1234));
        assert!(!is_answer(&v4, true, 0x1235));
        assert!(!is_answer(&v4[..24], true, 0x1234));
        assert!(is_answer(&[129, 0, 0, 0, 0, 7, 0, 1], false, 7));
        assert!(!is_answer(&request(false, 7), false, 7));
    }

    #[test]
    fn this_machine_reaches_itself() {
        let reachable = ["127.0.0.1", "::1"].map(|ip| ip.parse().unwrap());
        let sweep = run(&reachable, Duration::from_secs(10)).unwrap();
        assert_eq!((sweep.answered, sweep.missing), (2, vec![]));
    }
}
