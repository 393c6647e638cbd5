//! Work inside another network namespace.
//!
//! A namespace belongs to a thread, so the work runs on a thread of its own that enters the
//! namespace and ends with the work. The caller's thread never moves: there is nothing to
//! restore, and nothing to get wrong on an early return or a panic. Sockets and files that
//! the work opens keep the namespace they were opened in.
#![expect(unsafe_code, reason = "setns(2) has no safe wrapper in std")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

/// An open network namespace; it lives at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

/// Why a namespace could not be used.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// Nothing there, or it may not be opened.
    #[error("cannot open the network namespace {path}: {source}", path = path.display())]
    Open {
        /// What was opened.
        path: PathBuf,
        /// What open(2) said.
        source: io::Error,
    },
    /// The path is no network namespace, or the caller lacks `CAP_SYS_ADMIN`.
    #[error("cannot enter the network namespace {path}: {source}", path = path.display())]
    Enter {
        /// What was entered.
        path: PathBuf,
        /// What setns(2) said.
        source: io::Error,
    },
    /// No thread to enter it with.
    #[error("cannot start a thread for the network namespace {path}: {source}", path = path.display())]
    Thread {
        /// What was to be entered.
        path: PathBuf,
        /// What clone(2) said.
        source: io::Error,
    },
}

impl NetnsError {
    /// Whether the namespace is gone: no such path, or the bare mount point that is left
    /// after a namespace's bind mount was removed (setns: `EINVAL`).
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Open { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::ENOENT | libc::ENOTDIR | libc::ESRCH)
            ),
            Self::Enter { source, .. } => source.raw_os_error() == Some(libc::EINVAL),
            Self::Thread { .. } => false,
        }
    }
}

impl Netns {
    /// Opens the namespace at `path`: `/run/netns/NAME`, `/proc/PID/ns/net`, …
    pub fn open(path: &Path) -> Result<Self, NetnsError> {
        let file = File::open(path).map_err(|source| NetnsError::Open {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    /// The namespace that the calling thread is in.
    pub fn current() -> Result<Self, NetnsError> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are one namespace.
    pub fn is_same(&self, other: &Self) -> io::Result<bool> {
        let (a, b) = (self.file.metadata()?, other.file.metadata()?);
        Ok((a.dev(), a.ino()) == (b.dev(), b.ino()))
    }

    /// Runs `work` inside the namespace and returns what it returned; a panic goes on in the
    /// caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        thread::scope(|scope| {
            let worker = thread::Builder::new()
                .name("netns".to_owned())
                .spawn_scoped(scope, || self.enter().map(|()| work()))
                .map_err(|source| NetnsError::Thread {
                    path: self.path.clone(),
                    source,
                })?;
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread for good.
    fn enter(&self) -> Result<(), NetnsError> {
        // SAFETY: setns takes any descriptor number and reads no memory of ours; the
        // descriptor is open for as long as `self` lives.
        let result = unsafe { libc::setns(self.file.as_raw_fd(), libc::CLONE_NEWNET) };
        if result == 0 {
            return Ok(());
        }
        Err(NetnsError::Enter {
            path: self.path.clone(),
            source: io::Error::last_os_error(),
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
