//! A wire between two links: what comes in by one goes out by the other.
//!
//! It does with checksums what the datapath does: a partial one is announced to the link, or
//! completed where the link cannot take it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use skein_dataplane::io::link::{XskCounters, XskLink};
use skein_dataplane::io::packet::{Packet, PartialChecksum};
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::umem::Umem;
use skein_dataplane::io::{Flush, Link, LinkStatistics};

#[derive(Debug, Default)]
pub struct Seen {
    pub packets: AtomicU64,
    pub several_segments: AtomicU64,
    pub partial_checksums: AtomicU64,
    pub largest: AtomicU64,
    pub dead: AtomicBool,
}

pub struct Forwarder {
    stop: Arc<AtomicBool>,
    pub seen: Arc<Seen>,
    thread: JoinHandle<[(XskCounters, LinkStatistics); 2]>,
}

impl Forwarder {
    /// Forwards between the two until [`stop`](Self::stop), which closes them.
    pub fn start(links: [XskLink; 2], store: &Arc<FrameStore>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Seen::default());
        let pool = FramePool::new(Arc::clone(store));
        let thread = thread::spawn({
            let (stop, seen) = (Arc::clone(&stop), Arc::clone(&seen));
            move || forward(links, pool, &stop, &seen)
        });
        Self { stop, seen, thread }
    }

    /// Stops, closes both links and returns what they counted.
    pub fn stop(self) -> [(XskCounters, LinkStatistics); 2] {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the forwarder")
    }
}

fn forward(
    mut links: [XskLink; 2],
    mut pool: FramePool,
    stop: &AtomicBool,
    seen: &Seen,
) -> [(XskCounters, LinkStatistics); 2] {
    let mut batch = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut work = 0;
        for from in [0, 1] {
            work += links[from].receive(&mut pool, &mut batch);
            let to = &mut links[1 - from];
            for mut packet in batch.drain(..) {
                seen.note(&packet);
                if checksum(pool.umem(), &mut packet, to.caps().partial_checksum) {
                    seen.partial_checksums.fetch_add(1, Ordering::Relaxed);
                }
                if let Err(packet) = to.send(&mut pool, packet) {
                    pool.give_packet(packet);
                }
            }
            if to.flush(&mut pool) == Flush::Dead {
                seen.dead.store(true, Ordering::Relaxed);
            }
        }
        if work == 0 {
            thread::sleep(Duration::from_micros(50));
        }
    }
    let counts = links
        .each_ref()
        .map(|link| (link.counters(), link.statistics()));
    for link in links {
        Box::new(link).close(&mut pool);
    }
    counts
}

impl Seen {
    fn note(&self, packet: &Packet) {
        self.packets.fetch_add(1, Ordering::Relaxed);
        self.largest
            .fetch_max(packet.len() as u64, Ordering::Relaxed);
        if packet.segments().len() > 1 {
            self.several_segments.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Announces or completes a partial checksum; false when the checksum was complete.
fn checksum(umem: &Umem, packet: &mut Packet, announce: bool) -> bool {
    let Some((partial, pseudo)) = transport(packet.head(umem), packet.len()) else {
        return false;
    };
    let start = usize::from(partial.start);
    let field = start + usize::from(partial.offset);
    let Some(now) = packet.head(umem).get(field..field + 2) else {
        return false;
    };
    if u16::from_be_bytes([now[0], now[1]]) != fold(pseudo) {
        return false;
    }
    if announce {
        packet.partial_checksum = Some(partial);
    } else {
        let bytes = packet.to_vec(umem);
        let complete = !fold(sum(&bytes[start..]));
        packet.head_mut(umem)[field..field + 2].copy_from_slice(&complete.to_be_bytes());
    }
    true
}

/// Place of the TCP or UDP checksum, and the pseudo-header's sum (RFC 9293 section 3.1).
fn transport(head: &[u8], len: usize) -> Option<(PartialChecksum, u32)> {
    let (protocol, start, addresses) = match head.get(12..14)? {
        [0x08, 0x00] => (
            *head.get(23)?,
            14 + usize::from(head[14] & 15) * 4,
            head.get(26..34)?,
        ),
        [0x86, 0xdd] => (*head.get(20)?, 54, head.get(22..54)?),
        _ => return None,
    };
    let offset = match protocol {
        6 => 16,
        17 => 6,
        _ => return None,
    };
    // A short frame is padded; a checksum of that is complete anyway.
    let pseudo = sum(addresses) + u32::from(protocol) + (len - start) as u32;
    let partial = PartialChecksum {
        start: start as u16,
        offset,
    };
    Some((partial, pseudo))
}

fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
