//! The part of the kernel's `linux/if_xdp.h` that the sockets need.
//!
//! Distributions ship headers older than the kernels that run on them, so the constants stand
//! here, each with the kernel that brought it where that is later than 5.10. Only numbers and
//! layouts; what they are good for is in [`xsk`](super::xsk) and [`ring`](super::ring).

use std::mem::{offset_of, size_of};

/// Socket option level.
pub const SOL_XDP: i32 = 283;

/// `getsockopt`: where the rings' indices and entries lie in their mappings.
pub const XDP_MMAP_OFFSETS: i32 = 1;
/// `setsockopt`: makes the receive ring, with that many entries.
pub const XDP_RX_RING: i32 = 2;
/// `setsockopt`: makes the transmit ring.
pub const XDP_TX_RING: i32 = 3;
/// `setsockopt`: registers the packet memory ([`UmemReg`]).
pub const XDP_UMEM_REG: i32 = 4;
/// `setsockopt`: makes the fill ring.
pub const XDP_UMEM_FILL_RING: i32 = 5;
/// `setsockopt`: makes the completion ring.
pub const XDP_UMEM_COMPLETION_RING: i32 = 6;
/// `getsockopt`: [`Statistics`].
pub const XDP_STATISTICS: i32 = 7;
/// `setsockopt`: packets that one `sendto` takes in copy mode instead of 32 (Linux 6.17).
pub const XDP_MAX_TX_SKB_BUDGET: i32 = 9;

/// Bind flag: use the packet memory that the socket in `sxdp_shared_umem_fd` registered.
pub const XDP_SHARED_UMEM: u16 = 1 << 0;
/// Bind flag: copy mode.
pub const XDP_COPY: u16 = 1 << 1;
/// Bind flag: packets of several descriptors (Linux 6.6).
pub const XDP_USE_SG: u16 = 1 << 4;

/// Registration flag: `tx_metadata_len` counts (Linux 6.11).
pub const XDP_UMEM_TX_METADATA_LEN: u32 = 1 << 2;

/// Descriptor option: the packet goes on in the next descriptor (Linux 6.6).
pub const XDP_PKT_CONTD: u32 = 1 << 0;
/// Descriptor option: transmit metadata lies before the data (Linux 6.8).
pub const XDP_TX_METADATA: u32 = 1 << 1;

/// Metadata flag: complete the checksum of `csum_start`, `csum_offset` (Linux 6.8).
pub const XDP_TXMD_FLAGS_CHECKSUM: u64 = 1 << 1;

/// Page offsets that name the rings to `mmap`.
pub const XDP_PGOFF_RX_RING: i64 = 0;
/// See [`XDP_PGOFF_RX_RING`].
pub const XDP_PGOFF_TX_RING: i64 = 0x8000_0000;
/// See [`XDP_PGOFF_RX_RING`].
pub const XDP_UMEM_PGOFF_FILL_RING: i64 = 0x1_0000_0000;
/// See [`XDP_PGOFF_RX_RING`].
pub const XDP_UMEM_PGOFF_COMPLETION_RING: i64 = 0x1_8000_0000;

/// `struct sockaddr_xdp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SockaddrXdp {
    /// `AF_XDP`.
    pub family: u16,
    /// Bind flags.
    pub flags: u16,
    /// The device.
    pub ifindex: u32,
    /// Its queue.
    pub queue_id: u32,
    /// The socket that registered the packet memory, with [`XDP_SHARED_UMEM`].
    pub shared_umem_fd: u32,
}

/// `struct xdp_umem_reg`; kernels before 6.8 know it without `tx_metadata_len` and read less.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UmemReg {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Bytes a chunk.
    pub chunk_size: u32,
    /// Bytes to leave free in front, beside `XDP_PACKET_HEADROOM`.
    pub headroom: u32,
    /// Registration flags.
    pub flags: u32,
    /// Bytes of metadata before the data of each packet sent.
    pub tx_metadata_len: u32,
}

/// `struct xdp_desc`: an entry of the receive and transmit rings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Offset of the data in the packet memory.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Descriptor options.
    pub options: u32,
}

/// `struct xdp_ring_offset`: places in a ring's mapping, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RingOffsets {
    /// The producer's index.
    pub producer: u64,
    /// The consumer's index.
    pub consumer: u64,
    /// The first entry.
    pub entries: u64,
    /// Flags (need-wakeup; in copy mode they tell nothing).
    pub flags: u64,
}

/// `struct xdp_mmap_offsets`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MmapOffsets {
    /// Receive ring.
    pub rx: RingOffsets,
    /// Transmit ring.
    pub tx: RingOffsets,
    /// Fill ring.
    pub fill: RingOffsets,
    /// Completion ring.
    pub completion: RingOffsets,
}

/// `struct xdp_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// Dropped for other reasons.
    pub rx_dropped: u64,
    /// Fill ring entries that name no chunk.
    pub rx_invalid_descs: u64,
    /// Transmit descriptors refused.
    pub tx_invalid_descs: u64,
    /// Dropped since the receive ring was full.
    pub rx_ring_full: u64,
    /// Times that the fill ring was empty.
    pub rx_fill_ring_empty_descs: u64,
    /// Times that the transmit ring was empty.
    pub tx_ring_empty_descs: u64,
}

/// Transmit metadata, in the bytes before the data of a packet's first descriptor
/// (`struct xsk_tx_metadata`, the request without launch time):
///
/// ```text
///  0       8            10            12      16
/// │ flags │ csum_start │ csum_offset │ unused │ data …
/// ```
pub const TX_METADATA_BYTES: usize = 16;

const _: () = {
    assert!(size_of::<SockaddrXdp>() == 16);
    assert!(size_of::<UmemReg>() == 32);
    assert!(offset_of!(UmemReg, tx_metadata_len) == 28);
    assert!(size_of::<Descriptor>() == 16);
    assert!(offset_of!(Descriptor, options) == 12);
    assert!(size_of::<MmapOffsets>() == 128);
    assert!(size_of::<Statistics>() == 48);
    // A chunk's place stays aligned as the kernel wants metadata: to eight bytes.
    assert!(TX_METADATA_BYTES.is_multiple_of(8));
};
