//! A TCP transfer whose both ends hash what they saw.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{SILENCE, any_address, say_ready};

/// Bytes of one read or write.
const BLOCK: usize = 128 << 10;

/// What one end of a transfer saw.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Bytes.
    pub bytes: u64,
    /// SHA-256 of them in hex; empty where it was not asked for.
    pub sha256: String,
    /// From the first byte to the end.
    pub seconds: f64,
}

impl Transfer {
    /// Gigabits a second.
    pub fn gbit_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / 1e9 / self.seconds.max(1e-9)
    }
}

/// How much to send.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    /// So many bytes, hashed.
    Bytes(u64),
    /// For so long, not hashed.
    Time(Duration),
}

/// Accepts one connection, reads it to its end, and confirms that with one byte.
pub fn serve(hash: bool) -> Result<Transfer> {
    let listener = TcpListener::bind(any_address()).context("cannot listen")?;
    say_ready(listener.local_addr()?);
    let (mut stream, peer) = listener.accept()?;
    stream.set_read_timeout(Some(SILENCE))?;
    let mut block = vec![0; BLOCK];
    let (mut bytes, mut sha) = (0, Sha256::new());
    let mut start = None;
    loop {
        let read = stream
            .read(&mut block)
            .with_context(|| format!("after {bytes} bytes from {peer}"))?;
        start.get_or_insert_with(Instant::now);
        if read == 0 {
            break;
        }
        bytes += read as u64;
        if hash {
            sha.update(&block[..read]);
        }
    }
    let seconds = start.map_or(0.0, |start| start.elapsed().as_secs_f64());
    stream.write_all(b".")?;
    let sha256 = if hash {
        hex(&sha.finalize())
    } else {
        String::new()
    };
    Ok(Transfer {
        bytes,
        sha256,
        seconds,
    })
}

/// Sends, and waits until the other end has confirmed the last byte.
pub fn send(to: SocketAddr, amount: Amount) -> Result<Transfer> {
    let mut stream = TcpStream::connect_timeout(&to, SILENCE)
        .with_context(|| format!("cannot connect to {to}"))?;
    stream.set_write_timeout(Some(SILENCE))?;
    stream.set_read_timeout(Some(SILENCE))?;
    let mut block = vec![0; BLOCK];
    let (mut bytes, mut sha) = (0, Sha256::new());
    let mut noise = Noise::new(u64::from(to.port()) + 1);
    noise.fill(&mut block);
    let start = Instant::now();
    loop {
        let length = match amount {
            Amount::Bytes(total) => usize::try_from(total - bytes).unwrap_or(BLOCK).min(BLOCK),
            Amount::Time(time) if start.elapsed() < time => BLOCK,
            Amount::Time(_) => 0,
        };
        if length == 0 {
            break;
        }
        if let Amount::Bytes(_) = amount {
            noise.fill(&mut block[..length]);
            sha.update(&block[..length]);
        }
        stream
            .write_all(&block[..length])
            .with_context(|| format!("after {bytes} bytes to {to}"))?;
        bytes += length as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut confirmed = [0];
    stream
        .read_exact(&mut confirmed)
        .with_context(|| format!("{to} did not confirm {bytes} bytes"))?;
    let sha256 = match amount {
        Amount::Bytes(_) => hex(&sha.finalize()),
        Amount::Time(_) => String::new(),
    };
    Ok(Transfer {
        bytes,
        sha256,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// A stream of bytes that never repeats within a transfer: xorshift64*, Vigna 2016.
#[derive(Debug)]
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1 << 63)
    }

    pub(super) fn fill(&mut self, block: &mut [u8]) {
        for bytes in block.chunks_mut(8) {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let word = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
