//! One page over HTTP/1.1, for health checks from inside a node.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// How long a server may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// The largest page that is read, bytes.
const LIMIT: u64 = 16 << 20;

/// Fetches `page`; fails unless the status is 200.
pub fn get(to: SocketAddr, page: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)
        .with_context(|| format!("cannot connect to {to}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "GET {page} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n"
    )?;
    let mut reply = Vec::new();
    stream.take(LIMIT).read_to_end(&mut reply)?;
    let reply = String::from_utf8_lossy(&reply);
    let (head, body) = reply
        .split_once("\r\n\r\n")
        .with_context(|| format!("{to}{page}: no HTTP reply"))?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(
        status.split(' ').nth(1) == Some("200"),
        "{to}{page}: {status}: {}",
        body.trim()
    );
    Ok(body.to_owned())
}
