//! The four rings of a socket, each the half that is ours: a [`Producer`] for fill and
//! transmit, a [`Consumer`] for receive and completion.
//!
//! ```text
//!            consumer        producer
//!               ▼               ▼
//!  ┌───┬───┬───┬───┬───┬───┬───┬───┬───┐   indices count up without bound and wrap at 2^32;
//!  │   │   │   │ x │ x │ x │ x │   │   │   entry = index & (size - 1)
//!  └───┴───┴───┴───┴───┴───┴───┴───┴───┘
//! ```
//!
//! A half reads the other side's index with acquire and publishes its own with release
//! (Documentation/networking/af_xdp.rst), and reads it only when its last reading is used up.
//! An index of the kernel's that makes no sense is taken as "nothing there": it can cost
//! packets, never touch memory outside the ring. Deliberately absent: what the entries mean.

#![expect(
    unsafe_code,
    reason = "reads and writes entries of memory that is shared with the kernel"
)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::sys::{Descriptor, RingOffsets};

/// What a ring holds: made of integers only, so that every bit pattern is a value.
pub trait Entry: Copy {}

impl Entry for u64 {}
impl Entry for Descriptor {}

/// The memory of one ring, mapped from its socket.
#[derive(Debug)]
pub struct RingMemory {
    base: NonNull<u8>,
    bytes: usize,
    #[cfg(test)]
    on_heap: bool,
}

// SAFETY: the memory is reached only through the one half made of it, which is `&mut` to use.
unsafe impl Send for RingMemory {}

impl RingMemory {
    /// Maps the ring of `size` entries at `page_offset` of that socket.
    pub fn map<T: Entry>(
        socket: BorrowedFd<'_>,
        page_offset: i64,
        offsets: &RingOffsets,
        size: u32,
    ) -> io::Result<Self> {
        let bytes = offsets.entries as usize + size as usize * size_of::<T>();
        // SAFETY: a fresh shared mapping at an address that the kernel picks.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                socket.as_raw_fd(),
                page_offset,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            base,
            bytes,
            #[cfg(test)]
            on_heap: false,
        })
    }

    /// A ring in the test's own memory, which must outlive it.
    #[cfg(test)]
    pub(super) fn on_heap(words: &mut [u64]) -> Self {
        let bytes = size_of_val(words);
        let base = NonNull::new(words.as_mut_ptr().cast()).expect("a slice's address");
        Self {
            base,
            bytes,
            on_heap: true,
        }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        #[cfg(test)]
        if self.on_heap {
            return;
        }
        // SAFETY: the mapping was made in `map` with this size; the half that used it is gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Index cells and entries of a ring.
///
/// Invariant: both cells and `size` entries of `T` lie, aligned, inside `memory`.
#[derive(Debug)]
struct Ring<T> {
    memory: RingMemory,
    producer: usize,
    consumer: usize,
    entries: usize,
    size: u32,
    entry: PhantomData<T>,
}

impl<T: Entry> Ring<T> {
    fn new(memory: RingMemory, offsets: &RingOffsets, size: u32) -> Self {
        let (producer, consumer, entries) = (
            offsets.producer as usize,
            offsets.consumer as usize,
            offsets.entries as usize,
        );
        assert!(size.is_power_of_two(), "a ring of {size} entries");
        for (start, len, align) in [
            (producer, 4, 4),
            (consumer, 4, 4),
            (entries, size as usize * size_of::<T>(), align_of::<T>()),
        ] {
            let address = memory.base.as_ptr() as usize + start;
            assert!(start + len <= memory.bytes && address.is_multiple_of(align));
        }
        Self {
            memory,
            producer,
            consumer,
            entries,
            size,
            entry: PhantomData,
        }
    }

    fn index(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the offset was checked in `new` to lie inside the mapping.
        let cell = unsafe { self.memory.base.as_ptr().add(offset) };
        // SAFETY: aligned, mapped for as long as `self`, and both sides use it atomically.
        unsafe { AtomicU32::from_ptr(cell.cast()) }
    }

    fn entry(&self, index: u32) -> *mut T {
        let place = self.entries + (index & (self.size - 1)) as usize * size_of::<T>();
        // SAFETY: the mask keeps the entry below `size`, all of which `new` checked.
        unsafe { self.memory.base.as_ptr().add(place) }.cast()
    }
}

/// The half that adds entries.
#[derive(Debug)]
pub struct Producer<T> {
    ring: Ring<T>,
    /// Our index, entries written but not published yet included.
    next: u32,
    /// The consumer's index when last read.
    consumed: u32,
}

impl<T: Entry> Producer<T> {
    /// Takes the half up where the shared indices stand, be it a new ring or a predecessor's.
    pub fn new(memory: RingMemory, offsets: &RingOffsets, size: u32) -> Self {
        let ring = Ring::new(memory, offsets, size);
        let next = ring.index(ring.producer).load(Ordering::Relaxed);
        let consumed = ring.index(ring.consumer).load(Ordering::Acquire);
        Self {
            ring,
            next,
            consumed,
        }
    }

    /// How many entries fit now, counted from the consumer's index when last read; it is read
    /// again when fewer than `wanted` do.
    pub fn free(&mut self, wanted: u32) -> u32 {
        let free = |next: u32, consumed| self.ring.size.saturating_sub(next.wrapping_sub(consumed));
        let known = free(self.next, self.consumed);
        if known >= wanted {
            return known;
        }
        self.consumed = self.ring.index(self.ring.consumer).load(Ordering::Acquire);
        free(self.next, self.consumed)
    }

    /// Writes an entry; false when the ring is full. Published by [`publish`](Self::publish).
    #[must_use]
    pub fn push(&mut self, entry: T) -> bool {
        if self.free(1) == 0 {
            return false;
        }
        let place = self.ring.entry(self.next);
        // SAFETY: the place is inside the ring, and between consumer and producer index plus
        // size, so the kernel does not read it until it is published.
        unsafe { place.write(entry) };
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Shows the kernel all entries written.
    pub fn publish(&mut self) {
        self.ring
            .index(self.ring.producer)
            .store(self.next, Ordering::Release);
    }

    /// Entries that the kernel has not taken yet.
    pub fn pending(&mut self) -> u32 {
        self.consumed = self.ring.index(self.ring.consumer).load(Ordering::Acquire);
        self.next.wrapping_sub(self.consumed).min(self.ring.size)
    }
}

/// The half that takes entries.
#[derive(Debug)]
pub struct Consumer<T> {
    ring: Ring<T>,
    /// Our index, entries read but not released yet included.
    next: u32,
    /// The producer's index when last read.
    produced: u32,
}

impl<T: Entry> Consumer<T> {
    /// Takes the half up where the shared indices stand, be it a new ring or a predecessor's.
    pub fn new(memory: RingMemory, offsets: &RingOffsets, size: u32) -> Self {
        let ring = Ring::new(memory, offsets, size);
        let next = ring.index(ring.consumer).load(Ordering::Relaxed);
        Self {
            ring,
            next,
            produced: next,
        }
    }

    /// The next entry. Its place goes back to the kernel by [`release`](Self::release).
    pub fn pop(&mut self) -> Option<T> {
        if self.produced == self.next {
            let produced = self.ring.index(self.ring.producer).load(Ordering::Acquire);
            let count = produced.wrapping_sub(self.next);
            if count == 0 || count > self.ring.size {
                return None;
            }
            self.produced = produced;
        }
        let place = self.ring.entry(self.next);
        // SAFETY: the place is inside the ring and published by the producer; every bit pattern
        // is an `Entry`.
        let entry = unsafe { place.read() };
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Gives the places of all entries taken back to the kernel.
    pub fn release(&mut self) {
        self.ring
            .index(self.ring.consumer)
            .store(self.next, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const OFFSETS: RingOffsets = RingOffsets {
        producer: 0,
        consumer: 64,
        entries: 128,
        flags: 8,
    };

    /// Both halves over the same memory of 64-bit words, the indices starting at `start`.
    fn halves(words: &mut [u64], size: u32, start: u32) -> (Producer<u64>, Consumer<u64>) {
        words[0] = u64::from(start);
        words[8] = u64::from(start);
        let memory = RingMemory::on_heap(words);
        let again = RingMemory { ..memory };
        (
            Producer::new(memory, &OFFSETS, size),
            Consumer::new(again, &OFFSETS, size),
        )
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push(u64),
        Publish,
        Pop,
        Release,
        Pending,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => any::<u64>().prop_map(Step::Push),
            1 => Just(Step::Publish),
            3 => Just(Step::Pop),
            1 => Just(Step::Release),
            1 => Just(Step::Pending),
        ]
    }

    proptest! {
        /// A queue with two borders: published for the consumer, released for the producer.
        #[test]
        fn a_ring_is_a_bounded_queue_also_where_indices_wrap(
            steps in prop::collection::vec(step(), 1..300),
            start in prop_oneof![Just(0), Just(u32::MAX - 3), any::<u32>()],
            order in 0..5u32,
        ) {
            let size = 1 << order;
            let mut words = vec![0u64; 16 + size as usize];
            let (mut producer, mut consumer) = halves(&mut words, size, start);
            let mut written = VecDeque::new();
            let mut published = VecDeque::new();
            let (mut popped, mut held) = (0u32, 0u32);
            for step in steps {
                match step {
                    Step::Push(value) => {
                        let fits = held < size;
                        prop_assert_eq!(producer.push(value), fits);
                        if fits {
                            written.push_back(value);
                            held += 1;
                        }
                    }
                    Step::Publish => {
                        producer.publish();
                        published.append(&mut written);
                    }
                    Step::Pop => {
                        let expected = published.pop_front();
                        prop_assert_eq!(consumer.pop(), expected);
                        popped += u32::from(expected.is_some());
                    }
                    Step::Release => {
                        consumer.release();
                        held -= popped;
                        popped = 0;
                    }
                    Step::Pending => prop_assert_eq!(producer.pending(), held),
                }
            }
        }

        #[test]
        fn a_senseless_index_yields_nothing_and_writes_nothing(
            producer_index: u32, consumer_index: u32,
        ) {
            let mut words = vec![0u64; 16 + 4];
            let (mut producer, mut consumer) = halves(&mut words, 4, 100);
            producer.ring.index(64).store(consumer_index, Ordering::Relaxed);
            let mut written = 0;
            while written < 10 && producer.push(7) {
                written += 1;
            }
            prop_assert!(written <= 8);
            consumer.ring.index(0).store(producer_index, Ordering::Relaxed);
            let mut read = 0;
            while read < 10 && consumer.pop().is_some() {
                read += 1;
            }
            prop_assert!(read <= 4);
        }
    }

    #[test]
    fn a_half_taken_up_again_goes_on_where_the_first_stopped() {
        let mut words = vec![0u64; 16 + 8];
        let (mut producer, mut consumer) = halves(&mut words, 8, 41);
        assert!(producer.push(1) && producer.push(2) && producer.push(3));
        producer.publish();
        assert_eq!(consumer.pop(), Some(1));
        consumer.release();
        let base = producer.ring.memory.base;
        let memory = || RingMemory {
            base,
            bytes: 24 * 8,
            on_heap: true,
        };
        let mut successor = Consumer::<u64>::new(memory(), &OFFSETS, 8);
        assert_eq!(successor.pop(), Some(2));
        let mut filler = Producer::<u64>::new(memory(), &OFFSETS, 8);
        assert_eq!(filler.pending(), 2);
        assert!(filler.push(4));
        filler.publish();
        assert_eq!(successor.pop(), Some(3));
        assert_eq!(successor.pop(), Some(4));
    }
}
