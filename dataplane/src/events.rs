//! What became of flows, for people: each new decision, and each drop, once a second at most for
//! one flow and reason.
//!
//! A worker puts events into a ring of its own, which control empties; when it is full, events
//! are lost and counted, never waited for. An event is what the packet says and what was decided.
//! Names of pods, identities and policies are control's to add.
//!
//! Deliberately absent: packets of known flows, which would be every packet.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;

use crate::conntrack::{Direction, Tuple};
use crate::parse::{Headers, TcpFlags};
use crate::time::Instant;
use crate::verdict::DropReason;

/// Events that wait for control at most, of one worker.
const WAITING: usize = 4096;

/// Drops that a worker remembers to have told of: a power of two.
const REMEMBERED: usize = 1024;

/// A drop is told of again after this many milliseconds.
const AGAIN_MS: u32 = 1000;

/// What became of a packet, and of those like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEvent {
    /// When, on the workers' clock.
    pub at: Instant,
    /// Who to whom, as the packet came.
    pub tuple: Tuple,
    /// Who to whom, as it left; the same where nothing was translated.
    pub translated: Tuple,
    /// Which way it goes in its connection.
    pub direction: Option<Direction>,
    /// TCP's flags.
    pub tcp_flags: TcpFlags,
    /// Type and code of ICMP.
    pub icmp: Option<(u8, u8)>,
    /// Bytes of the IP packet.
    pub len: u32,
    /// `None`: forwarded.
    pub dropped: Option<DropReason>,
}

impl FlowEvent {
    /// A packet with these headers was dropped.
    #[must_use]
    pub fn dropped(headers: &Headers, reason: DropReason, at: Instant) -> Self {
        let tuple = Tuple::of(headers);
        Self {
            at,
            tuple,
            translated: tuple,
            direction: None,
            tcp_flags: headers.tcp_flags,
            icmp: headers.icmp,
            len: headers.ip_total_len,
            dropped: Some(reason),
        }
    }

    /// A packet with these headers goes on, and those of its flow after it.
    #[must_use]
    pub fn forwarded(
        headers: &Headers,
        translated: Tuple,
        direction: Option<Direction>,
        at: Instant,
    ) -> Self {
        Self {
            translated,
            direction,
            dropped: None,
            ..Self::dropped(headers, DropReason::NoRoute, at)
        }
    }
}

/// The ring of one worker.
#[derive(Debug)]
pub struct FlowEvents {
    ring: ArrayQueue<FlowEvent>,
    lost: AtomicU64,
}

impl Default for FlowEvents {
    fn default() -> Self {
        Self {
            ring: ArrayQueue::new(WAITING),
            lost: AtomicU64::new(0),
        }
    }
}

impl FlowEvents {
    /// Tells of an event, if there is room.
    pub fn tell(&self, event: FlowEvent) {
        if self.ring.push(event).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The oldest event: for control.
    #[must_use]
    pub fn take(&self) -> Option<FlowEvent> {
        self.ring.pop()
    }

    /// Events for which there was no room.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Which drops a worker has told of lately.
#[derive(Debug)]
pub struct Told {
    /// A mark of flow and reason, and when.
    marks: Box<[(u32, u32)]>,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            marks: vec![(0, 0); REMEMBERED].into_boxed_slice(),
        }
    }
}

impl Told {
    /// Whether this drop is worth an event: not told of within the last second.
    pub fn is_news(&mut self, tuple: &Tuple, reason: DropReason, now_ms: u32) -> bool {
        let mark = mark(tuple, reason);
        let place = &mut self.marks[mark as usize % REMEMBERED];
        // Zero marks a free place; a mark is never zero.
        if place.0 == mark && now_ms.wrapping_sub(place.1) < AGAIN_MS {
            return false;
        }
        *place = (mark, now_ms);
        true
    }
}

/// An outsider who makes marks collide hides events of other drops for a second, no more.
fn mark(tuple: &Tuple, reason: DropReason) -> u32 {
    let fold = |bytes: [u8; 16]| {
        let value = u128::from_ne_bytes(bytes);
        (value >> 64) as u64 ^ value as u64
    };
    let ports = u64::from(tuple.src_port) << 32
        | u64::from(tuple.dst_port) << 16
        | u64::from(tuple.protocol) << 8
        | reason as u64;
    let mixed = (fold(tuple.src) ^ fold(tuple.dst).rotate_left(29) ^ ports.rotate_left(7))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as u32 | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(port: u16) -> Tuple {
        Tuple {
            src: [1; 16],
            dst: [2; 16],
            src_port: port,
            dst_port: 80,
            protocol: 6,
        }
    }

    #[test]
    fn a_drop_is_told_of_once_a_second() {
        let mut told = Told::default();
        let denied = DropReason::PolicyDeniedIngress;
        assert!(told.is_news(&tuple(1), denied, u32::MAX - 10));
        assert!(!told.is_news(&tuple(1), denied, 100), "the clock wraps");
        assert!(told.is_news(&tuple(1), DropReason::NoRoute, 100));
        assert!(told.is_news(&tuple(1), denied, 1000));
    }

    #[test]
    fn a_full_ring_counts_what_it_loses() {
        let events = FlowEvents::default();
        let event = FlowEvent {
            at: Instant::default(),
            tuple: tuple(1),
            translated: tuple(1),
            direction: None,
            tcp_flags: TcpFlags::default(),
            icmp: None,
            len: 60,
            dropped: None,
        };
        for _ in 0..WAITING + 3 {
            events.tell(event);
        }
        assert_eq!(events.lost(), 3);
        assert_eq!(std::iter::from_fn(|| events.take()).count(), WAITING);
    }
}
