//! The packet memory: one region of equal chunks, and frames as tokens that own a chunk.
//!
//! ```text
//!  chunk 0            chunk 1            chunk 2
//! ├──────────────────┼──────────────────┼─ ─ ─
//! │ headroom │ data  │ headroom │ data  │
//! 0         256     4096
//! ```
//!
//! A [`Frame`] can be neither copied nor cloned: whoever holds it owns the bytes of its chunk,
//! so views of different frames never overlap and need no lock. Frames are made once, with the
//! region; the sum of those in pools, rings and packets stays what it was (in debug builds a
//! frame that is dropped instead of handed back panics). Deliberately absent: any knowledge of
//! sockets, so that the whole pipeline runs on the same memory in a unit test.

#![expect(
    unsafe_code,
    reason = "maps the region and hands out disjoint views of its chunks"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Size of a chunk, in bytes: the largest that AF_XDP takes.
pub const CHUNK_BYTES: usize = 4096;

/// Bytes that the kernel leaves free before received data (`XDP_PACKET_HEADROOM`): room to put
/// an encapsulation in front without a copy.
pub const HEADROOM_BYTES: usize = 256;

/// The most chunks that a region may have: a frame names its chunk in 16 bits.
pub const MAX_CHUNKS: u32 = 1 << 16;

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
pub enum UmemError {
    /// The number of chunks is zero or too large.
    #[error("packet memory of {0} chunks: it takes 1 to {MAX_CHUNKS}")]
    Size(u32),
    /// memfd, truncate or mmap failed.
    #[error("packet memory of {chunks} chunks of {CHUNK_BYTES} bytes: {call}: {source}")]
    Map {
        /// The system call.
        call: &'static str,
        /// How many chunks.
        chunks: u32,
        /// What it said.
        source: io::Error,
    },
    /// Every region has a number of its own for as long as the process lives.
    #[error("this process has made 65535 regions of packet memory; no number is left")]
    Exhausted,
}

/// Ownership of one chunk.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is dropped is a chunk lost; give it back to its pool"]
pub struct Frame(u32);

impl Frame {
    /// The chunk's index in its region.
    #[must_use]
    pub fn chunk(&self) -> u32 {
        self.0 & 0xffff
    }

    fn region(&self) -> u32 {
        self.0 >> 16
    }

    /// Gives the ownership up: to the kernel's side of a ring, or at the end of the region.
    pub(crate) fn into_chunk(self) -> u32 {
        let chunk = self.chunk();
        std::mem::forget(self);
        chunk
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            panic!(
                "frame of chunk {} was dropped instead of handed back",
                self.chunk()
            );
        }
    }
}

/// The region.
///
/// Invariant: for each chunk there is at most one [`Frame`] with this region's number.
#[derive(Debug)]
pub struct Umem {
    base: NonNull<u8>,
    chunks: u32,
    number: u32,
    memory: File,
}

// SAFETY: the region's bytes are reached only through frames, of which each chunk has one.
unsafe impl Send for Umem {}
// SAFETY: as above; the other fields are read-only after construction.
unsafe impl Sync for Umem {}

impl Umem {
    /// Maps a region of that many chunks, backed by a memfd, with a frame for each chunk.
    pub fn new(chunks: u32) -> Result<(Arc<Self>, Vec<Frame>), UmemError> {
        static NEXT_NUMBER: AtomicU32 = AtomicU32::new(0);
        if chunks == 0 || chunks > MAX_CHUNKS {
            return Err(UmemError::Size(chunks));
        }
        let number = NEXT_NUMBER
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < 0xffff).then_some(n + 1)
            })
            .map_err(|_| UmemError::Exhausted)?;
        let failed = |call| {
            let source = io::Error::last_os_error();
            move || UmemError::Map {
                call,
                chunks,
                source,
            }
        };
        // SAFETY: the name is a C string; the call touches no memory of ours.
        let fd = unsafe { libc::memfd_create(c"skein-umem".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(failed("memfd_create")());
        }
        // SAFETY: memfd_create just returned this descriptor; nobody else owns it.
        let memory = unsafe { File::from_raw_fd(fd) };
        let bytes = chunks as usize * CHUNK_BYTES;
        memory
            .set_len(bytes as u64)
            .map_err(|source| UmemError::Map {
                call: "ftruncate",
                chunks,
                source,
            })?;
        // SAFETY: a fresh shared mapping of a file that we own, at an address the kernel picks.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                memory.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(failed("mmap")());
        }
        let base = NonNull::new(base.cast()).ok_or_else(failed("mmap"))?;
        let frames = (0..chunks)
            .map(|chunk| Frame(number << 16 | chunk))
            .collect();
        Ok((
            Arc::new(Self {
                base,
                chunks,
                number,
                memory,
            }),
            frames,
        ))
    }

    /// How many chunks the region has.
    #[must_use]
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Address of the region, to register it with the kernel.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The memfd behind the region, to hand it to a successor process.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Takes back a chunk whose ownership was given up.
    ///
    /// # Safety
    /// The chunk's frame was given up with [`Frame::into_chunk`], has not been claimed since,
    /// and the kernel no longer reads or writes it.
    pub(super) unsafe fn claim(&self, chunk: u32) -> Frame {
        assert!(chunk < self.chunks, "chunk {chunk} of {}", self.chunks);
        Frame(self.number << 16 | chunk)
    }

    /// The chunk's bytes.
    #[must_use]
    pub fn bytes<'a>(&'a self, frame: &'a Frame) -> &'a [u8] {
        let start = self.start(frame);
        // SAFETY: the chunk lies inside the mapping; the frame is its only owner and is
        // borrowed for as long as the view lives, so nobody writes to it.
        unsafe { std::slice::from_raw_parts(start, CHUNK_BYTES) }
    }

    /// The chunk's bytes, to write.
    #[must_use]
    pub fn bytes_mut<'a>(&'a self, frame: &'a mut Frame) -> &'a mut [u8] {
        let start = self.start(frame);
        // SAFETY: the chunk lies inside the mapping; the frame is its only owner and is
        // borrowed exclusively for as long as the view lives.
        unsafe { std::slice::from_raw_parts_mut(start, CHUNK_BYTES) }
    }

    fn start(&self, frame: &Frame) -> *mut u8 {
        assert!(frame.region() == self.number, "a frame of another region");
        debug_assert!(frame.chunk() < self.chunks);
        // SAFETY: every frame of this region names a chunk below `chunks`, so the offset stays
        // inside the mapping.
        unsafe { self.base.as_ptr().add(frame.chunk() as usize * CHUNK_BYTES) }
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this size; all views borrow `self`.
        unsafe {
            libc::munmap(
                self.base.as_ptr().cast(),
                self.chunks as usize * CHUNK_BYTES,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_own_disjoint_bytes() {
        let (umem, mut frames) = Umem::new(2).unwrap();
        umem.bytes_mut(&mut frames[0]).fill(1);
        umem.bytes_mut(&mut frames[1]).fill(2);
        assert!(umem.bytes(&frames[0]).iter().all(|&b| b == 1));
        assert!(umem.bytes(&frames[1]).iter().all(|&b| b == 2));
        frames.drain(..).for_each(|frame| {
            frame.into_chunk();
        });
    }

    #[test]
    #[should_panic(expected = "another region")]
    fn a_frame_is_good_for_its_own_region_only() {
        let (_first, mut frames) = Umem::new(1).unwrap();
        let (second, others) = Umem::new(1).unwrap();
        others.into_iter().for_each(|frame| {
            frame.into_chunk();
        });
        second.bytes_mut(&mut frames[0]).fill(0);
    }

    #[test]
    #[should_panic(expected = "dropped instead of handed back")]
    #[cfg(debug_assertions)]
    fn a_lost_frame_is_noticed() {
        let (_umem, frames) = Umem::new(1).unwrap();
        drop(frames);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(Umem::new(0), Err(UmemError::Size(0))));
        assert!(matches!(Umem::new(MAX_CHUNKS + 1), Err(UmemError::Size(_))));
    }
}
