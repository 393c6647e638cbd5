//! Who is speaking? A server that tells each client the address that it sees it by.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{SILENCE, any_address, say_ready};

/// The address that a client was seen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Over TCP.
    pub tcp: IpAddr,
    /// Over UDP.
    pub udp: IpAddr,
}

/// Tells the client of one connection, then every sender of a datagram, until it is killed.
pub fn tell() -> Result<()> {
    let listener = TcpListener::bind(any_address()).context("cannot listen")?;
    let address = listener.local_addr()?;
    let socket = UdpSocket::bind(address).context("cannot listen")?;
    say_ready(address);
    let (mut stream, peer) = listener.accept()?;
    stream.write_all(text(peer).as_bytes())?;
    drop(stream);
    let mut buffer = [0; 64];
    loop {
        let (_, peer) = socket.recv_from(&mut buffer)?;
        socket.send_to(text(peer).as_bytes(), peer)?;
    }
}

/// Asks, first over TCP, then over UDP.
pub fn ask(to: SocketAddr) -> Result<Seen> {
    let mut stream = TcpStream::connect_timeout(&to, SILENCE)
        .with_context(|| format!("cannot connect to {to}"))?;
    stream.set_read_timeout(Some(SILENCE))?;
    let mut tcp = String::new();
    stream.read_to_string(&mut tcp)?;
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket
        .connect(to)
        .with_context(|| format!("no way to {to}"))?;
    socket.set_read_timeout(Some(SILENCE))?;
    socket.send(b"?")?;
    let mut buffer = [0; 64];
    let length = socket
        .recv(&mut buffer)
        .with_context(|| format!("{to} does not answer"))?;
    let udp = std::str::from_utf8(&buffer[..length])?;
    Ok(Seen {
        tcp: tcp.parse()?,
        udp: udp.parse()?,
    })
}

fn text(peer: SocketAddr) -> String {
    peer.ip().to_canonical().to_string()
}
