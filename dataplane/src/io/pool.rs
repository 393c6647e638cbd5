//! Where free frames wait: a stack for each worker, and a common store behind them.
//!
//! A frame received by one worker may be sent, and so freed, by another. Each worker takes from
//! and gives to its own stack; only when that runs empty or over does it exchange a load of
//! [`LOAD`] frames with the common store (a lock-free queue).

use std::sync::Arc;

use crossbeam::queue::ArrayQueue;

use super::packet::Packet;
use super::umem::{Frame, Umem, UmemError};

/// Frames exchanged with the common store at a time.
const LOAD: usize = 128;

/// The most frames that a worker's stack keeps.
const KEEP: usize = 4 * LOAD;

/// The common store.
#[derive(Debug)]
pub struct FrameStore {
    umem: Arc<Umem>,
    free: ArrayQueue<Frame>,
}

impl FrameStore {
    /// Maps a region of that many chunks and stores all its frames.
    pub fn new(chunks: u32) -> Result<Arc<Self>, UmemError> {
        let (umem, frames) = Umem::new(chunks)?;
        let free = ArrayQueue::new(frames.len());
        for frame in frames {
            free.push(frame)
                .expect("the store holds every frame of its region");
        }
        Ok(Arc::new(Self { umem, free }))
    }

    /// The region.
    #[must_use]
    pub fn umem(&self) -> &Arc<Umem> {
        &self.umem
    }

    /// Frames in the store now, those on workers' stacks not counted.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len()
    }
}

impl Drop for FrameStore {
    fn drop(&mut self) {
        while let Some(frame) = self.free.pop() {
            frame.into_chunk();
        }
    }
}

/// A worker's stack of free frames.
#[derive(Debug)]
pub struct FramePool {
    store: Arc<FrameStore>,
    local: Vec<Frame>,
}

impl FramePool {
    /// An empty stack before that store.
    #[must_use]
    pub fn new(store: Arc<FrameStore>) -> Self {
        Self {
            store,
            local: Vec::with_capacity(KEEP + 1),
        }
    }

    /// The region that the frames are of.
    #[must_use]
    pub fn umem(&self) -> &Umem {
        &self.store.umem
    }

    /// The store behind this stack.
    #[must_use]
    pub fn store(&self) -> &Arc<FrameStore> {
        &self.store
    }

    /// Whether three quarters of all frames are in the store: new links then start with more
    /// than the least.
    #[must_use]
    pub fn plentiful(&self) -> bool {
        4 * self.store.available() >= 3 * self.store.umem.chunks() as usize
    }

    /// Whether less than an eighth of all frames are in the store: links then lend their
    /// devices no more than the least.
    #[must_use]
    pub fn scarce(&self) -> bool {
        8 * self.store.available() < self.store.umem.chunks() as usize
    }

    /// A free frame; `None` when the store is empty too.
    pub fn take(&mut self) -> Option<Frame> {
        if self.local.is_empty() {
            self.local
                .extend(std::iter::from_fn(|| self.store.free.pop()).take(LOAD));
        }
        self.local.pop()
    }

    /// Hands a frame back.
    pub fn give(&mut self, frame: Frame) {
        self.local.push(frame);
        if self.local.len() > KEEP {
            for frame in self.local.drain(KEEP - LOAD..) {
                self.store
                    .free
                    .push(frame)
                    .expect("the store holds every frame of its region");
            }
        }
    }

    /// Hands all frames of a packet back.
    pub fn give_packet(&mut self, packet: Packet) {
        for frame in packet.into_frames() {
            self.give(frame);
        }
    }

    /// Frames on this stack now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.local.len()
    }
}

impl Drop for FramePool {
    fn drop(&mut self) {
        for frame in self.local.drain(..) {
            self.store
                .free
                .push(frame)
                .expect("the store holds every frame of its region");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_comes_back_through_two_stacks() {
        let store = FrameStore::new(2000).unwrap();
        let mut first = FramePool::new(store.clone());
        let mut second = FramePool::new(store.clone());
        let mut taken = Vec::new();
        while let Some(frame) = first.take() {
            taken.push(frame);
        }
        assert_eq!(taken.len(), 2000);
        for frame in taken {
            second.give(frame);
        }
        assert!(second.held() <= KEEP);
        drop((first, second));
        assert_eq!(store.available(), 2000);
    }
}
