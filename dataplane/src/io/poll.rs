//! Waiting for packets: one epoll for a worker's links and an eventfd by which others wake it.
//!
//! poll(2) costs a quarter of a microsecond for each socket, epoll the same for any number.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::Timespec;

use crate::ids::LinkId;

/// The event data of the eventfd; links have theirs below.
const WAKE: u64 = u64::MAX;

/// Events taken in one call; more wait for the next.
const EVENTS: usize = 64;

/// Wakes a worker that sleeps; costs a fence and a load while it does not.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Bell>);

#[derive(Debug)]
struct Bell {
    eventfd: OwnedFd,
    sleeping: AtomicBool,
}

impl Waker {
    /// Wakes the worker, if it sleeps: called after whatever it shall see was stored.
    pub fn wake(&self) {
        // Pairs with the fence in `Poller::sleep`: either the worker sees what was stored
        // before it sleeps, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.0.sleeping.load(Ordering::Relaxed) && self.0.sleeping.swap(false, Ordering::Relaxed)
        {
            // The counter is far from full, and a worker that is gone needs no waking.
            let _ = rustix::io::write(&self.0.eventfd, &1u64.to_ne_bytes());
        }
    }
}

/// A worker's epoll.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    bell: Arc<Bell>,
}

impl Poller {
    /// An epoll with nothing but the wake-up in it.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(
            &epoll,
            &eventfd,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN,
        )?;
        Ok(Self {
            epoll,
            bell: Arc::new(Bell {
                eventfd,
                sleeping: AtomicBool::new(false),
            }),
        })
    }

    /// Wakes this poller from other threads.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(self.bell.clone())
    }

    /// Reports the link from now on whenever its descriptor is readable.
    pub fn add(&self, link: LinkId, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(link.0.into());
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// Stops reporting it.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Adds the links that are readable now to `ready`; does not wait.
    pub fn ready(&self, ready: &mut Vec<LinkId>) {
        self.collect(ready, Duration::ZERO);
    }

    /// Sleeps until a link is readable, somebody wakes this worker, or `limit` is over. When
    /// `idle`, asked once the sleep is announced, says that there is work, it only looks: one
    /// device that takes nothing must not keep the worker from all others.
    pub fn sleep(&self, ready: &mut Vec<LinkId>, limit: Duration, idle: impl FnOnce() -> bool) {
        self.bell.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let limit = if idle() { limit } else { Duration::ZERO };
        self.collect(ready, limit);
        self.bell.sleeping.store(false, Ordering::Relaxed);
    }

    fn collect(&self, ready: &mut Vec<LinkId>, limit: Duration) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: WAKE_DATA,
        }; EVENTS];
        let limit = Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // A signal (EINTR) counts as nothing ready: the caller comes again.
        let count = epoll::wait(&self.epoll, &mut events[..], Some(&limit)).unwrap_or(0);
        for event in &events[..count] {
            let data = event.data.u64();
            match u32::try_from(data) {
                Ok(link) => ready.push(LinkId(link)),
                Err(_) => {
                    let mut count = [0; 8];
                    // Nothing to read means that somebody else's wake-up was read already.
                    let _ = rustix::io::read(self.bell.eventfd.as_fd(), &mut count);
                }
            }
        }
    }
}

const WAKE_DATA: epoll::EventData = epoll::EventData::new_u64(WAKE);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_looked_at_also_while_other_work_waits() {
        let poller = Poller::new().unwrap();
        let link = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        poller.add(LinkId(7), link.as_fd()).unwrap();
        let mut ready = Vec::new();
        poller.sleep(&mut ready, Duration::from_hours(1), || false);
        assert_eq!(ready, [LinkId(7)]);
    }

    #[test]
    fn a_wake_up_ends_the_sleep_and_what_was_stored_before_it_prevents_it() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        let mut ready = Vec::new();
        // It comes between the question and the sleep.
        poller.sleep(&mut ready, Duration::from_hours(1), || {
            waker.wake();
            true
        });
        // Nobody sleeps: nothing is left for the next time.
        waker.wake();
        poller.sleep(&mut ready, Duration::ZERO, || true);
        assert_eq!(ready, []);
    }
}
