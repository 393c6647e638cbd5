//! What the connection table counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::wire::protocol;

/// Counters and gauges of the table at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionStats {
    /// Connections put in, restored ones included.
    pub created: u64,
    /// Connections that were silent for too long.
    pub expired: u64,
    /// Connections that gave way to others when room was short.
    pub evicted: u64,
    /// Connections taken out on request.
    pub removed: u64,
    /// Changes of a connection's state.
    pub state_changes: u64,
    /// Connections refused since one of their tuples was taken.
    pub refused_taken: u64,
    /// Connections refused since their owner's share was used.
    pub refused_share: u64,
    /// Connections refused since there was no room, and none could be made.
    pub refused_full: u64,
    /// TCP connections now.
    pub tcp: u64,
    /// UDP connections now.
    pub udp: u64,
    /// SCTP associations now.
    pub sctp: u64,
    /// ICMP and ICMPv6 connections now.
    pub icmp: u64,
    /// Connections of other protocols now.
    pub other: u64,
}

/// Why a connection left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Departure {
    Expired,
    Evicted,
    Removed,
}

/// Written by all workers, but only when a connection comes or goes.
#[derive(Debug, Default)]
pub(super) struct Counts {
    created: AtomicU64,
    expired: AtomicU64,
    evicted: AtomicU64,
    removed: AtomicU64,
    pub state_changes: AtomicU64,
    pub refused_taken: AtomicU64,
    pub refused_share: AtomicU64,
    pub refused_full: AtomicU64,
    protocols: [AtomicU64; 5],
}

fn row(protocol: u8) -> usize {
    match protocol {
        protocol::TCP => 0,
        protocol::UDP => 1,
        protocol::SCTP => 2,
        protocol::ICMP | protocol::ICMPV6 => 3,
        _ => 4,
    }
}

impl Counts {
    pub(super) fn came(&self, protocol: u8) {
        self.created.fetch_add(1, Ordering::Relaxed);
        self.protocols[row(protocol)].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn left(&self, protocol: u8, departure: Departure) {
        let counter = match departure {
            Departure::Expired => &self.expired,
            Departure::Evicted => &self.evicted,
            Departure::Removed => &self.removed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.protocols[row(protocol)].fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> ConnectionStats {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ConnectionStats {
            created: value(&self.created),
            expired: value(&self.expired),
            evicted: value(&self.evicted),
            removed: value(&self.removed),
            state_changes: value(&self.state_changes),
            refused_taken: value(&self.refused_taken),
            refused_share: value(&self.refused_share),
            refused_full: value(&self.refused_full),
            tcp: value(&self.protocols[0]),
            udp: value(&self.protocols[1]),
            sctp: value(&self.protocols[2]),
            icmp: value(&self.protocols[3]),
            other: value(&self.protocols[4]),
        }
    }
}
