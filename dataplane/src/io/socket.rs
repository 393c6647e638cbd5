//! The bare system calls of AF_XDP sockets; [`xsk`](super::xsk) says in which order.

#![expect(unsafe_code, reason = "the system calls of AF_XDP sockets")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::sys::{self, SockaddrXdp};

/// After a process exits the kernel frees its queues a few milliseconds later.
const BUSY_FOR: Duration = Duration::from_secs(1);
const BUSY_STEP: Duration = Duration::from_millis(5);

/// A new AF_XDP socket.
pub(super) fn open_socket() -> io::Result<OwnedFd> {
    // SAFETY: no memory of ours is involved.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets an option from a struct of integers.
pub(super) fn set_option<T>(
    fd: BorrowedFd<'_>,
    level: i32,
    option: i32,
    value: &T,
) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes of a value that lives across the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            bytes,
        )
    };
    (result == 0)
        .then_some(())
        .ok_or_else(io::Error::last_os_error)
}

/// Reads an option into a struct of integers. A kernel that knows less of it leaves the rest
/// zero.
pub(super) fn option<T: Copy + Default>(fd: BorrowedFd<'_>, option: i32) -> io::Result<T> {
    let mut value = T::default();
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, and only integers.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            sys::SOL_XDP,
            option,
            std::ptr::from_mut(&mut value).cast(),
            &raw mut bytes,
        )
    };
    (result == 0)
        .then_some(value)
        .ok_or_else(io::Error::last_os_error)
}

/// Binds a socket to a device's queue.
pub(super) fn bind(fd: BorrowedFd<'_>, address: &SockaddrXdp) -> io::Result<()> {
    // SAFETY: the kernel reads a `sockaddr_xdp` that lives across the call.
    let result = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            std::ptr::from_ref(address).cast(),
            size_of::<SockaddrXdp>() as libc::socklen_t,
        )
    };
    (result == 0)
        .then_some(())
        .ok_or_else(io::Error::last_os_error)
}

/// Binds, waiting a while for the queue of a process that has just exited.
pub(super) fn bind_patiently(fd: BorrowedFd<'_>, address: &SockaddrXdp) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match bind(fd, address) {
            Err(error)
                if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < BUSY_FOR =>
            {
                std::thread::sleep(BUSY_STEP);
            }
            result => return result,
        }
    }
}

/// Has the kernel look at the transmit ring.
pub(super) fn kick(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: an empty message to the bound device; no memory of ours is involved.
    let sent = unsafe {
        libc::sendto(
            fd.as_raw_fd(),
            std::ptr::null(),
            0,
            libc::MSG_DONTWAIT,
            std::ptr::null(),
            0,
        )
    };
    (sent >= 0)
        .then_some(())
        .ok_or_else(io::Error::last_os_error)
}
