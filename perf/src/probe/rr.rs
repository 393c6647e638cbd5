//! Request and response: one byte there and back over TCP, one at a time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::{SILENCE, any_address, say_ready};

/// The longest answer that the histogram tells apart from longer ones.
const LONGEST_NS: u64 = 30_000_000_000;

/// Times of answers, microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Answers.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Answers the requests of one connection, until it is silent for so long.
pub fn serve(silence: Duration) -> Result<()> {
    let listener = TcpListener::bind(any_address()).context("cannot listen")?;
    say_ready(listener.local_addr()?);
    let (mut stream, peer) = listener.accept()?;
    println!("connected {peer}");
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// Sends requests for `time`, with `pause` between them, and measures each answer, which may
/// take as long as `silence`.
pub fn run(to: SocketAddr, time: Duration, pause: Duration, silence: Duration) -> Result<Latency> {
    let mut stream = TcpStream::connect_timeout(&to, SILENCE)
        .with_context(|| format!("cannot connect to {to}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(silence))?;
    let mut answers = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3)?;
    let mut byte = [7];
    let end = Instant::now() + time;
    while Instant::now() < end {
        let start = Instant::now();
        stream.write_all(&byte)?;
        stream
            .read_exact(&mut byte)
            .with_context(|| format!("no answer from {to} after {} answers", answers.len()))?;
        let elapsed = u64::try_from(start.elapsed().as_nanos()).unwrap_or(LONGEST_NS);
        answers.saturating_record(elapsed);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    let at = |quantile| answers.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(Latency {
        count: answers.len(),
        p50_us: at(0.5),
        p90_us: at(0.9),
        p99_us: at(0.99),
        p999_us: at(0.999),
        max_us: answers.max() as f64 / 1000.0,
    })
}
