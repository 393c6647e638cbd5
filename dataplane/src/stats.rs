//! Counters: one writer, many readers.
//!
//! A worker is the only writer of its block, so it adds with a plain load and store; readers
//! (metrics, `skeinctl`) may see counters of the same packet apart, never torn.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::CachePadded;

use crate::verdict::{DROP_REASONS, DropReason};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds; only the counter's one writer calls this.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(count),
            Ordering::Relaxed,
        );
    }

    /// Sets; only the counter's one writer calls this.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a worker counts.
#[derive(Debug)]
pub struct WorkerStats {
    /// Packets received.
    pub rx_packets: Counter,
    /// Bytes received, Ethernet header included.
    pub rx_bytes: Counter,
    /// Packets handed to a link of this worker.
    pub tx_packets: Counter,
    /// Bytes handed to a link of this worker.
    pub tx_bytes: Counter,
    /// Packets answered here: ARP, neighbour discovery, echo to the gateway.
    pub answered: Counter,
    /// ICMP errors sent to pods; each stands beside the drop that it tells of.
    pub icmp_errors: Counter,
    /// ICMP errors not sent, since the pod had been sent its share already.
    pub icmp_errors_limited: Counter,
    /// Fragments sent in place of packets that were too large for their path.
    pub fragments: Counter,
    /// Flow-table hits.
    pub flow_hits: Counter,
    /// Flow-table misses: no entry.
    pub flow_misses: Counter,
    /// Entries found whose epochs had passed, and which were decided anew.
    pub flow_stale: Counter,
    /// Entries that gave way to a new flow.
    pub flow_evictions: Counter,
    /// Packets handed to another worker, the owner of their egress link.
    pub handovers: Counter,
    /// Rounds of the loop that found work.
    pub busy_rounds: Counter,
    /// Times that the worker went to sleep.
    pub sleeps: Counter,
    /// Frames on the worker's stack of free frames: a gauge.
    pub free_frames: Counter,
    /// Flows in the flow table: a gauge.
    pub flows: Counter,
    drops: Box<[Counter]>,
}

impl WorkerStats {
    /// All zero, on cache lines of its own.
    #[must_use]
    pub fn new() -> CachePadded<Self> {
        CachePadded::new(Self {
            rx_packets: Counter::default(),
            rx_bytes: Counter::default(),
            tx_packets: Counter::default(),
            tx_bytes: Counter::default(),
            answered: Counter::default(),
            icmp_errors: Counter::default(),
            icmp_errors_limited: Counter::default(),
            fragments: Counter::default(),
            flow_hits: Counter::default(),
            flow_misses: Counter::default(),
            flow_stale: Counter::default(),
            flow_evictions: Counter::default(),
            handovers: Counter::default(),
            busy_rounds: Counter::default(),
            sleeps: Counter::default(),
            free_frames: Counter::default(),
            flows: Counter::default(),
            drops: (0..DROP_REASONS).map(|_| Counter::default()).collect(),
        })
    }

    /// The counter of one drop reason.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> &Counter {
        &self.drops[reason as usize]
    }
}

/// What is counted for each link, by the worker that owns it.
#[derive(Debug, Default)]
pub struct LinkStats {
    /// Packets received.
    pub rx_packets: Counter,
    /// Bytes received.
    pub rx_bytes: Counter,
    /// Packets queued for the device.
    pub tx_packets: Counter,
    /// Bytes queued for the device.
    pub tx_bytes: Counter,
    /// Packets for which the transmit ring had no room.
    pub tx_full: Counter,
    /// The kernel's count of packets dropped before the receive ring, refreshed at each tick.
    pub kernel_rx_dropped: Counter,
    /// The kernel's count of packets dropped since no free frame was there for them.
    pub kernel_rx_fill_empty: Counter,
    /// The kernel's count of transmit descriptors refused, refreshed at each tick.
    pub kernel_tx_invalid: Counter,
    /// One when the worker could not take the link.
    pub refused: Counter,
    /// Why, an error number.
    pub errno: Counter,
}
