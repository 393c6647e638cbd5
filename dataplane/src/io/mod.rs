//! Where frames come in and go out, and the memory that holds them: the only folder with
//! unsafe code.
//!
//! A [`Link`] is one queue of one device. The pipeline knows nothing else of the outside, so it
//! runs the same over AF_XDP sockets, in memory, from a capture file, and with faults injected.

mod assembly;
pub mod claims;
mod code;
pub mod device;
pub mod fault;
pub mod features;
pub mod link;
pub mod memory;
pub mod open;
pub mod packet;
pub mod pcap;
mod pins;
pub mod poll;
pub mod pool;
pub mod program;
mod program_error;
mod queues;
mod ring;
mod socket;
mod sys;
pub mod umem;
pub mod xsk;

use std::os::fd::BorrowedFd;

use packet::Packet;
use pool::FramePool;

/// The most packets that one call of [`Link::receive`] adds, and that a batch holds.
pub const BATCH: usize = 64;

/// What a link can do beyond moving whole packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCaps {
    /// Packets of more than one segment (`XDP_USE_SG`, Linux 6.6).
    pub multi_buffer: bool,
    /// Takes a partial checksum as such (transmit metadata, Linux 6.8); without it the
    /// datapath completes checksums itself.
    pub partial_checksum: bool,
}

/// What became of a [`Link::flush`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// The kernel has taken all that was queued.
    Done,
    /// Some packets still wait: flush again in the next round.
    Pending,
    /// The device is gone or down; what was queued is lost and its frames will come back.
    Dead,
}

/// Counters that the kernel keeps for a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStatistics {
    /// Received packets dropped for want of a free frame or of room in the receive ring.
    pub rx_dropped: u64,
    /// Received packets dropped since the fill ring was empty (counted by the kernel apart).
    pub rx_fill_empty: u64,
    /// Transmit descriptors that the kernel refused.
    pub tx_invalid: u64,
}

/// One queue of one device.
///
/// Frames balance: those that a link takes from a pool come back as packets received or, by
/// [`close`](Link::close), to the pool; those of packets sent come back to the pool once the
/// device has let go of them (at a later `send`, `flush` or `receive`).
pub trait Link: Send {
    /// What this link can do.
    fn caps(&self) -> LinkCaps;

    /// A descriptor that epoll reports readable when packets wait; `None`: poll by receiving.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Adds received packets to `batch`, up to [`BATCH`] in all, and restocks the device with
    /// free frames. Never blocks. Returns how many were added.
    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize;

    /// Queues a packet; handed back when there is no room. Never blocks, makes no system call.
    fn send(&mut self, pool: &mut FramePool, packet: Packet) -> Result<(), Packet>;

    /// Has the device take what was queued: one system call for a batch.
    fn flush(&mut self, pool: &mut FramePool) -> Flush;

    /// The kernel's counters: for status, not for the packet path.
    fn statistics(&self) -> LinkStatistics;

    /// Closes the link and hands every frame back, those in flight included.
    fn close(self: Box<Self>, pool: &mut FramePool);
}

/// So that a wrapper can stand around any link.
impl<L: Link + ?Sized> Link for Box<L> {
    fn caps(&self) -> LinkCaps {
        (**self).caps()
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).poll_fd()
    }

    fn receive(&mut self, pool: &mut FramePool, batch: &mut Vec<Packet>) -> usize {
        (**self).receive(pool, batch)
    }

    fn send(&mut self, pool: &mut FramePool, packet: Packet) -> Result<(), Packet> {
        (**self).send(pool, packet)
    }

    fn flush(&mut self, pool: &mut FramePool) -> Flush {
        (**self).flush(pool)
    }

    fn statistics(&self) -> LinkStatistics {
        (**self).statistics()
    }

    fn close(self: Box<Self>, pool: &mut FramePool) {
        (*self).close(pool);
    }
}
