//! One packet of each size, one after the other: it comes back whole, or somebody says why not.
//!
//! Packets leave as they are: the socket neither cuts them nor heeds what the kernel has learnt
//! of the path, so that what answers is the network. (The device's own MTU still holds.)

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{AddressFamily, SockProtocol};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use serde::{Deserialize, Serialize};

use super::any_address;
use super::sweep::{ICMP_V4, ICMP_V6, raw_socket};
use super::tcp::Noise;

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// A pause after each error: a router sends so many a second and no more (RFC 1812 §4.3.2.8).
const AFTER_ERROR: Duration = Duration::from_micros(1200);

/// "Fragmentation needed" and "packet too big": RFC 1191 §4, RFC 4443 §3.2.
const TOO_BIG_V4: [u8; 2] = [3, 4];
const TOO_BIG_V6: [u8; 2] = [2, 0];

const PROTOCOL_UDP: u8 = 17;

/// Bytes of an ICMP echo header, and of a UDP header.
const HEADER: usize = 8;

/// What is sent.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Whom to send to.
    pub to: IpAddr,
    /// The port of a UDP echo; without one, ICMP echo.
    #[arg(long)]
    pub port: Option<u16>,
    /// The smallest payload, bytes.
    #[arg(long, default_value_t = 0)]
    pub first: usize,
    /// The largest payload, bytes.
    #[arg(long, default_value_t = 1500)]
    pub last: usize,
    /// Routers may cut the packets (IPv4 without DF; nobody cuts IPv6).
    #[arg(long)]
    pub may_be_cut: bool,
}

/// What became of packets whose sizes follow each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Payload sizes, bytes.
    pub sizes: RangeInclusive<usize>,
    /// What became of each.
    pub fate: Fate,
}

/// What became of a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// The same bytes came back.
    Returned,
    /// Other bytes came back.
    Altered,
    /// An ICMP error came: larger than a path takes.
    TooBig {
        /// What the path takes, as the error says.
        mtu: u32,
        /// Who says so.
        by: IpAddr,
    },
    /// The sender's own kernel refused it, for this reason.
    Refused(String),
    /// Nothing came.
    Silent,
}

/// Sends a packet of each size.
pub fn run(options: &Options) -> Result<Vec<Run>> {
    let prober = Prober::new(options)?;
    let mut runs: Vec<Run> = Vec::new();
    for size in options.first..=options.last {
        let fate = prober.probe(size)?;
        if matches!(fate, Fate::TooBig { .. }) {
            std::thread::sleep(AFTER_ERROR);
        }
        match runs.last_mut() {
            Some(run) if run.fate == fate => run.sizes = *run.sizes.start()..=size,
            _ => runs.push(Run {
                sizes: size..=size,
                fate,
            }),
        }
    }
    Ok(runs)
}

struct Prober {
    to: SocketAddr,
    id: u16,
    icmp: UdpSocket,
    /// For a UDP echo.
    datagrams: Option<UdpSocket>,
}

impl Prober {
    fn new(options: &Options) -> Result<Self> {
        let icmp = if options.to.is_ipv4() {
            raw_socket(AddressFamily::Inet, SockProtocol::Icmp)?
        } else {
            raw_socket(AddressFamily::Inet6, SockProtocol::IcmpV6)?
        };
        let datagrams = match options.port {
            None => None,
            Some(_) => {
                let mut any = any_address();
                if options.to.is_ipv4() {
                    any.set_ip(std::net::Ipv4Addr::UNSPECIFIED.into());
                }
                let socket = UdpSocket::bind(any)?;
                socket.set_nonblocking(true)?;
                Some(socket)
            }
        };
        let prober = Self {
            to: SocketAddr::new(options.to, options.port.unwrap_or(0)),
            id: (std::process::id() & 0xffff) as u16,
            icmp,
            datagrams,
        };
        let sender = prober.datagrams.as_ref().unwrap_or(&prober.icmp);
        if options.to.is_ipv4() {
            let discovery = if options.may_be_cut {
                Ipv4PathMtuDiscovery::OMIT
            } else {
                Ipv4PathMtuDiscovery::PROBE
            };
            set_ip_mtu_discover(sender, discovery)?;
        } else {
            set_ipv6_mtu_discover(sender, Ipv6PathMtuDiscovery::PROBE)?;
        }
        Ok(prober)
    }

    fn probe(&self, size: usize) -> Result<Fate> {
        let mut message = vec![0; HEADER + size];
        Noise::new(size as u64).fill(&mut message[HEADER..]);
        self.write_header(&mut message);
        let sent = match &self.datagrams {
            Some(socket) => socket.send_to(&message[HEADER..], self.to),
            None => self.icmp.send_to(&message, self.to),
        };
        if let Err(error) = sent {
            return Ok(Fate::Refused(error.to_string()));
        }
        let deadline = Instant::now() + ANSWER;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Fate::Silent);
            }
            self.wait(left)?;
            while let Some((from, answer)) = receive(&self.icmp)? {
                if let Some(fate) = self.judge(&message, from, &answer) {
                    return Ok(fate);
                }
            }
            if let Some(socket) = &self.datagrams
                && let Some((_, answer)) = receive(socket)?
            {
                return Ok(same(&answer, &message[HEADER..]));
            }
        }
    }

    /// The header of an ICMP echo request. The kernel writes ICMPv6's checksum (RFC 3542 §3.1).
    fn write_header(&self, message: &mut [u8]) {
        let size = (message.len() - HEADER) as u16;
        message[4..6].copy_from_slice(&self.id.to_be_bytes());
        message[6..8].copy_from_slice(&size.to_be_bytes());
        if self.to.is_ipv4() {
            message[0] = ICMP_V4.0;
            let sum = checksum(message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
        } else {
            message[0] = ICMP_V6.0;
        }
    }

    fn wait(&self, time: Duration) -> Result<()> {
        let sockets = std::iter::once(&self.icmp).chain(&self.datagrams);
        let mut waiting: Vec<_> = sockets
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        let time = Timespec::try_from(time)?;
        poll(&mut waiting, Some(&time)).context("poll")?;
        Ok(())
    }

    /// What an ICMP message says of the packet that was sent; nothing, if it is about another.
    fn judge(&self, message: &[u8], from: IpAddr, answer: &[u8]) -> Option<Fate> {
        let is_v4 = self.to.is_ipv4();
        // A raw IPv4 socket hands over the IP header too.
        let answer = match is_v4 {
            true => answer.get(usize::from(answer.first()? & 0xf) * 4..)?,
            false => answer,
        };
        let (reply, too_big) = match is_v4 {
            true => (ICMP_V4.1, TOO_BIG_V4),
            false => (ICMP_V6.1, TOO_BIG_V6),
        };
        if answer.get(..2)? == too_big && self.is_quoted(message.len(), answer.get(HEADER..)?) {
            let mtu = u32::from_be_bytes(answer[4..8].try_into().ok()?);
            return Some(Fate::TooBig {
                // RFC 1191 leaves the first half of the word unused.
                mtu: if is_v4 { mtu & 0xffff } else { mtu },
                by: from,
            });
        }
        let echo = self.datagrams.is_none() && answer[0] == reply;
        let mine = echo && answer.get(4..HEADER)? == &message[4..HEADER];
        mine.then(|| same(&answer[HEADER..], &message[HEADER..]))
    }

    /// Whether an error's quote is of the packet that was sent, whose size no other had.
    fn is_quoted(&self, length: usize, quote: &[u8]) -> bool {
        let word = |offset: usize| -> Option<usize> {
            let bytes = quote.get(offset..offset + 2)?;
            Some(usize::from(u16::from_be_bytes([bytes[0], bytes[1]])))
        };
        let (found, protocol, wanted) = match self.to.is_ipv4() {
            true => (word(2), quote.get(9), 20 + length),
            false => (word(4), quote.get(6), length),
        };
        let is_udp = protocol == Some(&PROTOCOL_UDP);
        found == Some(wanted) && is_udp == self.datagrams.is_some()
    }
}

fn same(answer: &[u8], sent: &[u8]) -> Fate {
    if answer == sent {
        Fate::Returned
    } else {
        Fate::Altered
    }
}

fn receive(socket: &UdpSocket) -> Result<Option<(IpAddr, Vec<u8>)>> {
    let mut buffer = vec![0; 1 << 16];
    match socket.recv_from(&mut buffer) {
        Ok((length, from)) => {
            buffer.truncate(length);
            Ok(Some((from.ip(), buffer)))
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error).context("a socket"),
    }
}

/// RFC 1071, over a message whose checksum is zero.
fn checksum(message: &[u8]) -> u16 {
    let words = message.chunks(2).map(|word| match *word {
        [high, low] => u32::from(u16::from_be_bytes([high, low])),
        [high] => u32::from(high) << 8,
        _ => 0,
    });
    // At most 2^15 words of 16 bits: the sum fits.
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(to: &str, last: usize) -> Options {
        Options {
            to: to.parse().unwrap(),
            port: None,
            first: 0,
            last,
            may_be_cut: false,
        }
    }

    #[test]
    fn every_size_returns_from_this_machine() {
        for to in ["127.0.0.1", "::1"] {
            let runs = run(&options(to, 300)).unwrap();
            let whole = Run {
                sizes: 0..=300,
                fate: Fate::Returned,
            };
            assert_eq!(runs, [whole], "{to}");
        }
    }

    #[test]
    fn an_error_is_of_the_packet_that_it_quotes() {
        let prober = Prober::new(&options("127.0.0.1", 0)).unwrap();
        let mut message = vec![0; HEADER + 1000];
        prober.write_header(&mut message);
        let by: IpAddr = "192.0.2.1".parse().unwrap();
        let mut error = vec![0x45; 20];
        error.extend([3, 4, 0, 0, 0, 0, 5, 170, 0x45, 0]);
        error.extend(1028u16.to_be_bytes());
        error.extend([0, 0, 0x40, 0, 64, 1]);
        let told = prober.judge(&message, by, &error);
        assert_eq!(told, Some(Fate::TooBig { mtu: 1450, by }));
        message.push(0);
        assert_eq!(prober.judge(&message, by, &error), None, "another size");
        for end in 0..error.len() {
            prober.judge(&message, by, &error[..end]);
        }
    }

    #[test]
    fn the_checksum_makes_the_sum_all_ones() {
        for length in [8, 9, 1000, 65_515] {
            let mut message = vec![0xff; length];
            message[2..4].fill(0);
            let sum = checksum(&message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            assert_eq!(checksum(&message), 0, "{length}");
        }
    }
}
