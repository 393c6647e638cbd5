//! [`XskLink`]: packets over an AF_XDP socket.
//!
//! Receive: frames that were sent come back from the completion ring, descriptors of the
//! receive ring are put together to packets, and the fill ring is restocked. Send queues
//! descriptors, flush kicks the kernel until it has taken them. Nothing here allocates, logs
//! or blocks.
//!
//! Deliberately absent: the rings and who owns a chunk ([`queues`](super::queues)), sockets
//! ([`xsk`](super::xsk)), programs ([`program`](super::program)).

use std::os::fd::BorrowedFd;

use super::assembly::Assembler;
use super::packet::{Packet, Segment};
use super::pool::FramePool;
use super::queues::Taken;
use super::sys::{TX_METADATA_BYTES, XDP_PKT_CONTD, XDP_TX_METADATA, XDP_TXMD_FLAGS_CHECKSUM};
use super::xsk::{Kick, Xsk};
use super::{BATCH, Flush, Link, LinkCaps, LinkStatistics};
use crate::ids::LinkId;

/// The most kicks of one flush: a full batch in which the receiver drops every packet.
const MAX_KICKS: u32 = 2 * BATCH as u32;

/// Kicks in a row after which the kernel has taken nothing: it will not now.
const IDLE_KICKS: u32 = 2;

/// How many frames a link lends to its device for receiving.
///
/// Few while it is idle, since hundreds of idle links share the packet memory; doubled when one
/// receive used more than half of them; halved after `calm` receives in a row that brought
/// packets and used less than an eighth. A frame that was lent cannot be called back, so a
/// lower target takes effect as packets come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillParameters {
    /// The least. An idle link must take the largest frame, which has 18 segments.
    pub min: u32,
    /// At the start.
    pub start: u32,
    /// The most; bounded by the fill ring.
    pub max: u32,
    /// Receives in a row that lower the target.
    pub calm: u32,
}

impl Default for FillParameters {
    fn default() -> Self {
        Self {
            min: 18,
            start: 64,
            max: 1024,
            calm: 256,
        }
    }
}

/// The target that follows the traffic.
#[derive(Clone, Copy, Debug)]
struct FillTarget {
    parameters: FillParameters,
    target: u32,
    calm: u32,
}

impl FillTarget {
    fn new(parameters: FillParameters) -> Self {
        Self {
            parameters,
            target: parameters
                .start
                .clamp(parameters.min, parameters.max.max(parameters.min)),
            calm: 0,
        }
    }

    /// Adapts to a receive that used so many frames.
    fn observe(&mut self, used: u32) {
        if used > self.target / 2 {
            self.target = (self.target * 2).min(self.parameters.max);
            self.calm = 0;
        } else if used > 0 && used < self.target / 8 {
            self.calm += 1;
            if self.calm >= self.parameters.calm {
                self.target = (self.target / 2).max(self.parameters.min);
                self.calm = 0;
            }
        } else if used > 0 {
            self.calm = 0;
        }
    }
}

/// What a link counted itself, beside the kernel's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XskCounters {
    /// Descriptors from the kernel that named no chunk of ours.
    pub bad_descriptors: u64,
    /// Packets received in more segments than a packet has, or with a bad descriptor.
    pub rx_broken: u64,
    /// Packets given to `send` that the socket cannot take.
    pub tx_refused: u64,
    /// Times that the pool had no frame to lend.
    pub pool_empty: u64,
}

/// One queue of a device, over an AF_XDP socket.
///
/// Dropping it without [`close`](Link::close) loses the frames that the kernel has.
#[derive(Debug)]
pub struct XskLink {
    caps: LinkCaps,
    xsk: Xsk,
    fill: FillTarget,
    assembler: Assembler,
    counters: XskCounters,
}

impl XskLink {
    /// A link over that socket; it lends its first frames at once.
    pub fn new(id: LinkId, xsk: Xsk, fill: FillParameters, pool: &mut FramePool) -> Self {
        let features = xsk.features();
        let mut link = Self {
            caps: LinkCaps {
                multi_buffer: features.multi_buffer,
                partial_checksum: features.tx_metadata,
            },
            xsk,
            fill: FillTarget::new(fill),
            assembler: Assembler::new(id),
            counters: XskCounters::default(),
        };
        if !pool.plentiful() {
            link.fill.target = fill.min;
        }
        link.restock(pool);
        link
    }

    /// What the link counted itself.
    #[must_use]
    pub fn counters(&self) -> XskCounters {
        XskCounters {
            bad_descriptors: self.counters.bad_descriptors + self.assembler.bad_descriptors,
            rx_broken: self.assembler.broken,
            ..self.counters
        }
    }

    /// Frames that the kernel has now: for receiving, and for sending.
    #[must_use]
    pub fn lent(&self) -> (u32, u32) {
        (self.xsk.queues.receiving(), self.xsk.queues.sending())
    }

    /// Frames that the link wants to have lent for receiving.
    #[must_use]
    pub fn fill_target(&self) -> u32 {
        self.fill.target
    }

    /// Hands the frames of packets sent back to the pool.
    fn reap(&mut self, pool: &mut FramePool) {
        if self.xsk.queues.sending() == 0 {
            return;
        }
        while let Some(taken) = self.xsk.queues.complete() {
            match taken {
                Taken::Good(frame) | Taken::Empty(frame) => pool.give(frame),
                Taken::Bad => self.counters.bad_descriptors += 1,
            }
        }
        self.xsk.queues.release_completion();
    }

    /// Lends frames up to the target, or up to the least while frames are scarce: busy links
    /// must not take what the others need to receive at all.
    fn restock(&mut self, pool: &mut FramePool) {
        let queues = &mut self.xsk.queues;
        if queues.receiving() >= self.fill.target {
            return;
        }
        let target = if pool.scarce() {
            self.fill.parameters.min
        } else {
            self.fill.target
        };
        while queues.receiving() < target {
            let Some(frame) = pool.take() else {
                self.counters.pool_empty += 1;
                break;
            };
            if let Err(frame) = queues.lend(frame) {
                pool.give(frame);
                break;
            }
        }
        queues.publish_fill();
    }

    /// Whether the kernel will take the packet as it is.
    fn takes(&self, packet: &Packet) -> bool {
        let segments = packet.segments();
        let first = if self.caps.partial_checksum {
            TX_METADATA_BYTES
        } else {
            0
        };
        let head = segments.first().map_or(0, Segment::len);
        head > 0
            && (segments.len() == 1 || self.caps.multi_buffer)
            && segments.iter().all(|segment| segment.offset() >= first)
            && packet.partial_checksum.is_none_or(|checksum| {
                self.caps.partial_checksum
                    && usize::from(checksum.start) + usize::from(checksum.offset) + 2 <= head
            })
    }

    /// Writes the request for a checksum before the head; returns its descriptor option.
    fn write_metadata(&self, packet: &mut Packet) -> u32 {
        let Some(checksum) = packet.partial_checksum else {
            return 0;
        };
        let head = &mut packet.segments_mut()[0];
        let end = head.offset();
        let chunk = self.xsk.queues.umem().bytes_mut(head.frame_mut());
        let metadata = &mut chunk[end - TX_METADATA_BYTES..end];
        metadata.fill(0);
        metadata[..8].copy_from_slice(&XDP_TXMD_FLAGS_CHECKSUM.to_ne_bytes());
        metadata[8..10].copy_from_slice(&checksum.start.to_ne_bytes());
        metadata[10..12].copy_from_slice(&checksum.offset.to_ne_bytes());
        XDP_TX_METADATA
    }
}

impl Link for XskLink {
    fn caps(&self) -> LinkCaps {
        self.caps
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.xsk.as_fd())
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        self.reap(pool);
        let before = batch.len();
        let mut used = 0;
        while batch.len() < BATCH {
            let Some(received) = self.xsk.queues.receive() else {
                break;
            };
            used += 1;
            batch.extend(self.assembler.add(received, pool));
        }
        if used > 0 {
            self.xsk.queues.release_rx();
        }
        self.fill.observe(used);
        self.restock(pool);
        batch.len().saturating_sub(before)
    }

    fn send(&mut self, pool: &mut FramePool, mut packet: Packet) -> Result<(), Packet> {
        if !self.takes(&packet) {
            self.counters.tx_refused += 1;
            pool.give_packet(packet);
            return Ok(());
        }
        let wanted = packet.segments().len() as u32;
        if self.xsk.queues.tx_room(wanted) < wanted {
            return Err(packet);
        }
        let mut options = self.write_metadata(&mut packet);
        // The kernel refuses descriptors of no bytes; the head has some.
        let mut left = packet.segments().iter().filter(|s| s.len() > 0).count();
        for segment in packet.into_segments() {
            if segment.len() == 0 {
                pool.give(segment.into_frame());
                continue;
            }
            left -= 1;
            let more = if left > 0 { XDP_PKT_CONTD } else { 0 };
            if let Err(segment) = self.xsk.queues.transmit(segment, options | more) {
                // Room was checked; were it wrong, the frame at least comes back.
                pool.give(segment.into_frame());
            }
            options = 0;
        }
        Ok(())
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        // A device that was left without a frame when the pool was empty receives nothing, so
        // nobody would come to receive from it and restock it.
        if self.xsk.queues.receiving() < self.fill.parameters.min {
            self.restock(pool);
        }
        self.xsk.queues.publish_tx();
        let mut pending = self.xsk.queues.tx_pending();
        let mut idle = 0;
        for _ in 0..MAX_KICKS {
            if pending == 0 {
                break;
            }
            if self.xsk.kick() == Kick::Dead {
                self.reap(pool);
                return Flush::Dead;
            }
            // Completions make room without which the kernel takes nothing more.
            self.reap(pool);
            let left = self.xsk.queues.tx_pending();
            idle = if left == pending { idle + 1 } else { 0 };
            pending = left;
            if idle >= IDLE_KICKS {
                break;
            }
        }
        if pending == 0 {
            Flush::Done
        } else {
            Flush::Pending
        }
    }

    fn statistics(&self) -> LinkStatistics {
        // Fails only on a descriptor that is no AF_XDP socket.
        let kernel = self.xsk.statistics().unwrap_or_default();
        LinkStatistics {
            rx_dropped: kernel.rx_dropped
                + kernel.rx_ring_full
                + kernel.rx_invalid_descs
                + self.assembler.broken,
            rx_fill_empty: kernel.rx_fill_ring_empty_descs,
            tx_invalid: kernel.tx_invalid_descs + self.counters.tx_refused,
        }
    }

    fn close(self: Box<Self>, pool: &mut FramePool) {
        let Self { xsk, assembler, .. } = *self;
        assembler.close(pool);
        for frame in xsk.close() {
            pool.give(frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_doubles_under_load_and_halves_when_calm() {
        let mut fill = FillTarget::new(FillParameters {
            min: 32,
            start: 64,
            max: 200,
            calm: 3,
        });
        fill.observe(32);
        assert_eq!(fill.target, 64);
        fill.observe(33);
        assert_eq!(fill.target, 128);
        fill.observe(128);
        assert_eq!(fill.target, 200);
        for _ in 0..2 {
            fill.observe(1);
        }
        fill.observe(100);
        assert_eq!(fill.target, 200, "a larger receive starts the count again");
        for _ in 0..30 {
            fill.observe(0);
            fill.observe(1);
        }
        assert_eq!(fill.target, 32);
    }
}
