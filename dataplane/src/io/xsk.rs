//! AF_XDP sockets: making, binding, mapping, kicking and closing them.
//!
//! All sockets of a process share one packet memory. The kernel ties a registration to a bound
//! socket, so a socket on the loopback device's queue 0 registers and owns it
//! ([`XskFactory`]); it runs no program there and moves no packet. Every other socket binds
//! with `XDP_SHARED_UMEM` to it, has rings of its own, and may come and go with its device.
//! Since that socket takes its queue exclusively, a second agent in the same network namespace
//! is noticed here.
//!
//! Deliberately absent: zero-copy (a registration is all copy or all zero-copy, so it would
//! take a second packet memory) and the need-wakeup flag (in copy mode it tells nothing).

#![expect(unsafe_code, reason = "takes frames back from a socket that is closed")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::device::Device;
use super::features::Features;
use super::queues::{Queues, Rings};
use super::ring::{Consumer, Producer, RingMemory};
use super::socket::{self, bind_patiently, open_socket, option, set_option};
use super::sys::{self, Descriptor, MmapOffsets, SockaddrXdp, Statistics, UmemReg};
use super::umem::{CHUNK_BYTES, Umem};
use crate::ids::QueueId;

/// Packets that one `sendto` takes, where the kernel lets us say; else it is 32.
const TX_BUDGET: u32 = 256;

/// Bytes of packets sent that may wait in the device's queue (a copy each, in kernel memory).
const SEND_BUFFER_BYTES: i32 = 4 << 20;

/// Entries of a socket's rings, each a power of two.
///
/// The kernel adds a header to each and rounds up to pages: with the defaults 20 + 12 + 36 + 20
/// KiB = 88 KiB a socket, and 32 KiB for its own copy of transmit descriptors: 30 MiB for 250.
/// Frames that a link holds for receiving are bounded by `fill`; `rx` is as large, so that the
/// receive ring cannot overflow. A TCP super-packet takes 18 entries, so `tx` takes 113 of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSizes {
    /// Receive ring, 16 bytes an entry.
    pub rx: u32,
    /// Fill ring, 8 bytes an entry.
    pub fill: u32,
    /// Transmit ring, 16 bytes an entry.
    pub tx: u32,
    /// Completion ring, 8 bytes an entry.
    pub completion: u32,
}

impl Default for RingSizes {
    fn default() -> Self {
        Self {
            rx: 1024,
            fill: 1024,
            tx: 2048,
            completion: 2048,
        }
    }
}

impl RingSizes {
    /// What a socket needs that moves no packet.
    const LEAST: Self = Self {
        rx: 2,
        fill: 2,
        tx: 2,
        completion: 2,
    };
}

/// Why a socket could not be made.
#[derive(Debug, thiserror::Error)]
#[error("AF_XDP socket on {device} queue {queue}: {call}: {source}{advice}")]
pub struct XskError {
    /// The system call, with what it was to do.
    pub call: &'static str,
    /// The device's name.
    pub device: String,
    /// The device's queue.
    pub queue: u32,
    /// What the kernel said.
    pub source: io::Error,
    /// What to do about it, after "; ", or nothing.
    pub advice: &'static str,
}

/// Where a socket goes: for errors.
#[derive(Clone, Copy)]
struct Place<'a> {
    device: &'a Device,
    queue: QueueId,
}

impl Place<'_> {
    fn error(self, call: &'static str, source: io::Error) -> XskError {
        XskError {
            call,
            device: self.device.name.clone(),
            queue: self.queue.0,
            advice: advice(call, &source),
            source,
        }
    }
}

fn advice(call: &str, error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "; run as root or with CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF",
        Some(libc::EAFNOSUPPORT) => "; the kernel was built without CONFIG_XDP_SOCKETS",
        Some(libc::EBUSY) => {
            "; another process uses AF_XDP on this queue: is a second agent running in this \
             network namespace?"
        }
        Some(libc::ENOBUFS | libc::ENOMEM) if call.contains("XDP_UMEM_REG") => {
            "; packet memory is locked: raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=infinity) \
             or configure less"
        }
        Some(libc::ENOBUFS | libc::ENOMEM) => {
            "; the kernel is short of memory: each socket costs it about 128 bytes a chunk"
        }
        Some(libc::EOPNOTSUPP) => "; the device does not support AF_XDP",
        Some(libc::EINVAL) if call.contains("bind") => {
            "; does the device have this queue? (ethtool -l)"
        }
        Some(libc::ENODEV | libc::ENXIO | libc::ENETDOWN) => "; the device is gone",
        _ => "",
    }
}

/// Registers the packet memory with a socket.
pub(super) fn register_umem(fd: BorrowedFd<'_>, umem: &Umem, tx_metadata: bool) -> io::Result<()> {
    let registration = UmemReg {
        addr: umem.base().as_ptr() as u64,
        len: u64::from(umem.chunks()) * CHUNK_BYTES as u64,
        chunk_size: CHUNK_BYTES as u32,
        headroom: 0,
        flags: if tx_metadata {
            sys::XDP_UMEM_TX_METADATA_LEN
        } else {
            0
        },
        tx_metadata_len: if tx_metadata {
            sys::TX_METADATA_BYTES as u32
        } else {
            0
        },
    };
    set_option(fd, sys::SOL_XDP, sys::XDP_UMEM_REG, &registration)
}

fn make_rings(fd: BorrowedFd<'_>, sizes: &RingSizes) -> io::Result<()> {
    for (option, size) in [
        (sys::XDP_RX_RING, sizes.rx),
        (sys::XDP_TX_RING, sizes.tx),
        (sys::XDP_UMEM_FILL_RING, sizes.fill),
        (sys::XDP_UMEM_COMPLETION_RING, sizes.completion),
    ] {
        set_option(fd, sys::SOL_XDP, option, &size)?;
    }
    Ok(())
}

/// Maps a socket's rings from its descriptor, be it new or a predecessor's.
fn map_rings(fd: BorrowedFd<'_>, sizes: &RingSizes) -> io::Result<Rings> {
    let offsets: MmapOffsets = option(fd, sys::XDP_MMAP_OFFSETS)?;
    let rx = RingMemory::map::<Descriptor>(fd, sys::XDP_PGOFF_RX_RING, &offsets.rx, sizes.rx)?;
    let tx = RingMemory::map::<Descriptor>(fd, sys::XDP_PGOFF_TX_RING, &offsets.tx, sizes.tx)?;
    let fill =
        RingMemory::map::<u64>(fd, sys::XDP_UMEM_PGOFF_FILL_RING, &offsets.fill, sizes.fill)?;
    let completion = RingMemory::map::<u64>(
        fd,
        sys::XDP_UMEM_PGOFF_COMPLETION_RING,
        &offsets.completion,
        sizes.completion,
    )?;
    Ok(Rings {
        rx: Consumer::new(rx, &offsets.rx, sizes.rx),
        tx: Producer::new(tx, &offsets.tx, sizes.tx),
        fill: Producer::new(fill, &offsets.fill, sizes.fill),
        completion: Consumer::new(completion, &offsets.completion, sizes.completion),
    })
}

/// The socket that registered the packet memory, and what all others are opened by.
///
/// Held by control for as long as any link lives; shared by threads.
#[derive(Debug)]
pub struct XskFactory {
    umem: Arc<Umem>,
    features: Features,
    owner: OwnedFd,
}

impl XskFactory {
    /// Registers the packet memory in the calling thread's network namespace.
    pub fn new(umem: Arc<Umem>, features: Features) -> Result<Arc<Self>, XskError> {
        let loopback = Device {
            name: "lo".into(),
            index: 1, // LOOPBACK_IFINDEX
        };
        let place = Place {
            device: &loopback,
            queue: QueueId(0),
        };
        let owner = open_socket().map_err(|e| place.error("socket", e))?;
        let fd = owner.as_fd();
        register_umem(fd, &umem, features.tx_metadata)
            .map_err(|e| place.error("setsockopt XDP_UMEM_REG", e))?;
        make_rings(fd, &RingSizes::LEAST)
            .map_err(|e| place.error("setsockopt of a ring's size", e))?;
        let sg = if features.multi_buffer {
            sys::XDP_USE_SG
        } else {
            0
        };
        let address = SockaddrXdp {
            family: libc::AF_XDP as u16,
            flags: sys::XDP_COPY | sg,
            ifindex: loopback.index,
            queue_id: 0,
            shared_umem_fd: 0,
        };
        bind_patiently(fd, &address).map_err(|e| place.error("bind", e))?;
        Ok(Arc::new(Self {
            umem,
            features,
            owner,
        }))
    }

    /// The packet memory.
    #[must_use]
    pub fn umem(&self) -> &Arc<Umem> {
        &self.umem
    }

    /// What the packet memory was registered for.
    #[must_use]
    pub fn features(&self) -> Features {
        self.features
    }

    /// Opens a socket on a queue of a device in the calling thread's network namespace. It
    /// receives nothing before it stands in the XDP program's map.
    pub fn open(
        self: &Arc<Self>,
        device: &Device,
        queue: QueueId,
        sizes: &RingSizes,
    ) -> Result<Xsk, XskError> {
        let place = Place { device, queue };
        let socket = open_socket().map_err(|e| place.error("socket", e))?;
        let fd = socket.as_fd();
        make_rings(fd, sizes).map_err(|e| place.error("setsockopt of a ring's size", e))?;
        let rings = map_rings(fd, sizes).map_err(|e| place.error("mmap of the rings", e))?;
        // Neither is in every kernel or permitted everywhere; without them all works, slower.
        let _ = set_option(
            fd,
            libc::SOL_SOCKET,
            libc::SO_SNDBUFFORCE,
            &SEND_BUFFER_BYTES,
        );
        let _ = set_option(fd, sys::SOL_XDP, sys::XDP_MAX_TX_SKB_BUDGET, &TX_BUDGET);
        let address = SockaddrXdp {
            family: libc::AF_XDP as u16,
            flags: sys::XDP_SHARED_UMEM,
            ifindex: device.index,
            queue_id: queue.0,
            shared_umem_fd: self.owner.as_raw_fd() as u32,
        };
        bind_patiently(fd, &address).map_err(|e| place.error("bind", e))?;
        Ok(Xsk {
            queues: Queues::new(rings, Arc::clone(&self.umem)),
            socket,
            factory: Arc::clone(self),
        })
    }
}

/// What a kick of the transmit ring said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// Went well, or stopped at a budget or a packet that was dropped: look at the ring.
    Again,
    /// The device is down or gone.
    Dead,
}

/// A bound socket.
#[derive(Debug)]
pub struct Xsk {
    /// Frames in and out. Before `socket`, so that the rings are unmapped first.
    pub(super) queues: Queues,
    socket: OwnedFd,
    factory: Arc<XskFactory>,
}

impl Xsk {
    /// What the packet memory was registered for.
    #[must_use]
    pub fn features(&self) -> Features {
        self.factory.features
    }

    /// The descriptor, to poll.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Has the kernel take packets from the transmit ring.
    pub fn kick(&self) -> Kick {
        let Err(error) = socket::kick(self.socket.as_fd()) else {
            return Kick::Again;
        };
        match error.raw_os_error() {
            Some(libc::ENXIO | libc::ENETDOWN | libc::ENODEV | libc::EBADF) => Kick::Dead,
            // EAGAIN: the budget is spent or the device's queue full; EBUSY, ENOBUFS: a packet
            // was dropped; others say the same of a packet in their own way.
            _ => Kick::Again,
        }
    }

    /// The kernel's counters.
    pub fn statistics(&self) -> io::Result<Statistics> {
        option(self.socket.as_fd(), sys::XDP_STATISTICS)
    }

    /// Closes the socket and then takes every frame back that the kernel still had.
    ///
    /// The kernel waits for receives in progress before `close` returns. A descriptor that was
    /// duplicated (passed to a successor, or inherited by a child between fork and exec) would
    /// keep the socket alive: such a socket must not be closed here.
    pub fn close(self) -> impl Iterator<Item = super::umem::Frame> {
        let Self {
            queues,
            socket,
            factory: _factory,
        } = self;
        let lent = queues.unmap();
        drop(socket);
        // SAFETY: the rings are unmapped and the only descriptor is closed, so the socket is
        // gone; what it had taken for sending was copied.
        unsafe { lent.reclaim() }
    }
}

impl AsFd for Xsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Xsk {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_call_device_and_queue_and_what_to_do() {
        let device = Device {
            name: "eth7".into(),
            index: 7,
        };
        let place = Place {
            device: &device,
            queue: QueueId(3),
        };
        let message = |call, errno| {
            let error = place.error(call, io::Error::from_raw_os_error(errno));
            error.to_string()
        };
        for (call, errno, advice) in [
            ("socket", libc::EPERM, "CAP_NET_RAW"),
            ("socket", libc::EAFNOSUPPORT, "CONFIG_XDP_SOCKETS"),
            ("bind", libc::EBUSY, "second agent"),
            ("bind", libc::EOPNOTSUPP, "does not support AF_XDP"),
            ("bind", libc::ENOMEM, "short of memory"),
            ("setsockopt XDP_UMEM_REG", libc::ENOBUFS, "RLIMIT_MEMLOCK"),
        ] {
            let text = message(call, errno);
            let start = format!("AF_XDP socket on eth7 queue 3: {call}: ");
            assert!(text.starts_with(&start), "{text}");
            assert!(text.contains(advice), "{text}");
        }
    }
}
