//! A worker's links, and the rings to the workers that own the others.

use std::sync::Arc;

use crossbeam::utils::CachePadded;

use super::HandoverRing;
use crate::ids::LinkId;
use crate::io::packet::Packet;
use crate::io::poll::Waker;
use crate::io::pool::FramePool;
use crate::io::{Flush, Link};
use crate::offload;
use crate::snapshot::Snapshot;
use crate::stats::{LinkStats, WorkerStats};
use crate::verdict::DropReason;

/// A link of this worker.
struct Port {
    link: Box<dyn Link>,
    stats: Arc<LinkStats>,
    /// Whether packets wait for a flush.
    queued: bool,
}

/// Another worker.
struct Neighbour {
    ring: HandoverRing,
    waker: Waker,
    /// Whether it has been handed something that it was not woken for yet.
    waiting: bool,
}

pub(super) struct Egress {
    /// By link number; dense, since control hands numbers out from the lowest.
    ports: Vec<Option<Port>>,
    /// By worker number; the worker's own place is never used.
    neighbours: Vec<Neighbour>,
    /// Links with queued packets.
    queued: Vec<LinkId>,
    stats: Arc<CachePadded<WorkerStats>>,
}

impl Egress {
    pub fn new(stats: Arc<CachePadded<WorkerStats>>) -> Self {
        Self {
            ports: Vec::new(),
            neighbours: Vec::new(),
            queued: Vec::new(),
            stats,
        }
    }

    pub fn connect(&mut self, outbound: Vec<(HandoverRing, Waker)>) {
        self.neighbours = outbound
            .into_iter()
            .map(|(ring, waker)| Neighbour {
                ring,
                waker,
                waiting: false,
            })
            .collect();
    }

    pub fn links(&self) -> impl Iterator<Item = LinkId> + '_ {
        (0..)
            .zip(&self.ports)
            .filter(|(_, port)| port.is_some())
            .map(|(id, _)| LinkId(id))
    }

    /// Takes a link; its first receive stocks the device with frames. What it already holds
    /// goes to `batch` only if that is empty, which it is between turns.
    pub fn add(
        &mut self,
        id: LinkId,
        link: Box<dyn Link>,
        stats: Arc<LinkStats>,
        pool: &mut FramePool,
        batch: &mut Vec<Packet>,
    ) {
        let index = id.0 as usize;
        if self.ports.len() <= index {
            self.ports.resize_with(index + 1, || None);
        }
        // Room for every link's mark, so that the packet path never allocates.
        self.queued.reserve(self.ports.len());
        assert!(self.ports[index].is_none(), "link {index} was added twice");
        self.ports[index] = Some(Port {
            link,
            stats,
            queued: false,
        });
        self.receive(id, pool, batch);
        // Received before the worker knew the link: too early to be judged.
        for packet in batch.drain(..) {
            self.stats.drops(DropReason::UnknownLink).add(1);
            pool.give_packet(packet);
        }
    }

    pub fn remove(&mut self, id: LinkId) -> Option<Box<dyn Link>> {
        self.queued.retain(|&link| link != id);
        self.ports
            .get_mut(id.0 as usize)?
            .take()
            .map(|port| port.link)
    }

    pub fn receive(&mut self, id: LinkId, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        // Epoll may report a link that was removed a moment ago.
        let Some(Some(port)) = self.ports.get_mut(id.0 as usize) else {
            return 0;
        };
        let received = port.link.receive(pool, batch);
        if received > 0 {
            let bytes = batch.iter().map(|packet| packet.len() as u64).sum();
            for (packets_counter, bytes_counter) in [
                (&port.stats.rx_packets, &port.stats.rx_bytes),
                (&self.stats.rx_packets, &self.stats.rx_bytes),
            ] {
                packets_counter.add(received as u64);
                bytes_counter.add(bytes);
            }
        }
        received
    }

    /// Queues a packet for a link of this worker, or hands it to the one that owns the link.
    pub fn send(&mut self, id: LinkId, packet: Packet, pool: &mut FramePool, tables: &Snapshot) {
        if matches!(self.ports.get(id.0 as usize), Some(Some(_))) {
            return self.send_own(id, packet, pool);
        }
        let owner = tables.link(id).map(|entry| usize::from(entry.worker.0));
        let Some(neighbour) = owner.and_then(|owner| self.neighbours.get_mut(owner)) else {
            return self.drop_packet(packet, DropReason::LinkClosed, pool);
        };
        match neighbour.ring.push((id, packet)) {
            Ok(()) => {
                neighbour.waiting = true;
                self.stats.handovers.add(1);
            }
            Err((_, packet)) => self.drop_packet(packet, DropReason::HandoverFull, pool),
        }
    }

    /// Queues a packet for a link of this worker.
    pub fn send_own(&mut self, id: LinkId, mut packet: Packet, pool: &mut FramePool) {
        let Some(Some(port)) = self.ports.get_mut(id.0 as usize) else {
            return self.drop_packet(packet, DropReason::LinkClosed, pool);
        };
        if !port.link.caps().partial_checksum
            && let Err(reason) = offload::finish(&mut packet, pool.umem())
        {
            return self.drop_packet(packet, reason, pool);
        }
        let bytes = packet.len() as u64;
        if let Err(packet) = port.link.send(pool, packet) {
            port.stats.tx_full.add(1);
            return self.drop_packet(packet, DropReason::TransmitFull, pool);
        }
        if !port.queued {
            port.queued = true;
            self.queued.push(id);
        }
        port.stats.tx_packets.add(1);
        port.stats.tx_bytes.add(bytes);
        self.stats.tx_packets.add(1);
        self.stats.tx_bytes.add(bytes);
    }

    /// Has each device take what was queued, and wakes the workers that were handed something.
    pub fn flush(&mut self, pool: &mut FramePool) {
        let ports = &mut self.ports;
        self.queued.retain(|id| {
            let Some(Some(port)) = ports.get_mut(id.0 as usize) else {
                return false;
            };
            port.queued = port.link.flush(pool) == Flush::Pending;
            port.queued
        });
        for neighbour in &mut self.neighbours {
            if std::mem::take(&mut neighbour.waiting) {
                neighbour.waker.wake();
            }
        }
    }

    /// Whether packets wait that a device could not take in the last flush.
    pub fn pending(&self) -> bool {
        !self.queued.is_empty()
    }

    pub fn tick(&mut self, pool: &mut FramePool) {
        for port in self.ports.iter_mut().flatten() {
            // Frames of packets sent come back also where nothing is sent any more.
            port.link.flush(pool);
            let kernel = port.link.statistics();
            port.stats.kernel_rx_dropped.set(kernel.rx_dropped);
            port.stats.kernel_rx_fill_empty.set(kernel.rx_fill_empty);
            port.stats.kernel_tx_invalid.set(kernel.tx_invalid);
        }
    }

    fn drop_packet(&self, packet: Packet, reason: DropReason, pool: &mut FramePool) {
        self.stats.drops(reason).add(1);
        pool.give_packet(packet);
    }
}
