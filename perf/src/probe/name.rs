//! Who answers? Servers that say their name, and a client that counts who answered it.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::say_ready;

/// How long one question may go without an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Who answered a client's questions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// How many answers came from whom.
    pub by_name: BTreeMap<String, u32>,
    /// How many questions were refused: by a reset, or an ICMP error.
    pub refused: u32,
    /// How many got no answer at all.
    pub silent: u32,
}

/// Tells its name to each TCP client and each sender of a datagram, on one port, until killed.
pub fn serve(name: &str, port: u16) -> Result<()> {
    let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let listener = TcpListener::bind(address).context("cannot listen")?;
    let address = listener.local_addr()?;
    let socket = UdpSocket::bind(address).context("cannot listen")?;
    let datagrams = name.to_owned();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
            // Whoever does not take its answer counts it as missing.
            let _ = socket.send_to(datagrams.as_bytes(), peer);
        }
    });
    say_ready(address);
    loop {
        let (mut stream, _) = listener.accept()?;
        let _ = stream.write_all(name.as_bytes());
    }
}

/// Asks so many times, each from a port of its own.
pub fn ask(to: SocketAddr, count: u32, udp: bool) -> Answers {
    let mut answers = Answers::default();
    for _ in 0..count {
        let answer = if udp { datagram(to) } else { connection(to) };
        match answer {
            Ok(name) => *answers.by_name.entry(name).or_insert(0) += 1,
            Err(error) => match error.kind() {
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => answers.refused += 1,
                _ => answers.silent += 1,
            },
        }
    }
    answers
}

fn connection(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut name = String::new();
    stream.read_to_string(&mut name)?;
    Ok(name)
}

fn datagram(to: SocketAddr) -> std::io::Result<String> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.send(b"?")?;
    let mut buffer = [0; 64];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
