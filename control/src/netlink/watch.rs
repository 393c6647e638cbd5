//! Notices of change in the kernel, from a thread of their own.

use std::io;

use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;

/// Multicast groups of rtnetlink (`enum rtnetlink_groups`).
const GROUPS_NEIGHBOURS: &[u32] = &[3];
const GROUPS_ROUTES: &[u32] = &[1, 5, 7, 9, 11];

/// What changed in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Neighbours alone.
    Neighbours,
    /// Devices, addresses or routes, and perhaps neighbours.
    Routes,
}

/// Starts to watch the network namespace of the calling thread. Ends when the receiver is gone.
pub fn watch(notices: mpsc::Sender<Notice>) -> io::Result<()> {
    let open = |groups: &[u32]| -> io::Result<Socket> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        for &group in groups {
            socket.add_membership(group)?;
        }
        Ok(socket)
    };
    let sockets = [
        (Notice::Routes, open(GROUPS_ROUTES)?),
        (Notice::Neighbours, open(GROUPS_NEIGHBOURS)?),
    ];
    std::thread::Builder::new()
        .name("skein-netlink".into())
        .spawn(move || {
            while !notices.is_closed() {
                for notice in heard(&sockets) {
                    // Full: notices wait already, and a notice only says to ask anew. But a
                    // question about neighbours alone must not stand for one about routes.
                    if notice == Notice::Routes {
                        if notices.blocking_send(notice).is_err() {
                            return;
                        }
                    } else {
                        let _ = notices.try_send(notice);
                    }
                }
            }
        })?;
    Ok(())
}

/// Waits up to a second; which sockets had something.
fn heard(sockets: &[(Notice, Socket); 2]) -> Vec<Notice> {
    let mut waiting: Vec<_> = (sockets.iter())
        .map(|(_, socket)| PollFd::new(socket, PollFlags::IN))
        .collect();
    let second = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    if !poll(&mut waiting, Some(&second)).is_ok_and(|ready| ready > 0) {
        return Vec::new();
    }
    let mut notices = Vec::new();
    for ((notice, socket), waiting) in sockets.iter().zip(&waiting) {
        if waiting.revents().is_empty() {
            continue;
        }
        notices.push(*notice);
        let mut buffer = Vec::with_capacity(64 << 10);
        loop {
            buffer.clear();
            match socket.recv(&mut buffer, 0) {
                Ok(_) => {}
                // ENOBUFS: some were lost, which the notice makes good.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(_) => break,
            }
        }
    }
    notices
}
