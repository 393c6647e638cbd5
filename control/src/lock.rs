//! One agent on a node: a lock on a file of the state directory, held as long as it lives.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// The lock; let go of when dropped, and by the kernel when the process ends in any way.
#[derive(Debug)]
pub struct AgentLock {
    _file: File,
}

/// Why the lock was not had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent runs.
    #[error(
        "another skeind (process {process}) runs on this node with {file}; \
         stop it first, or give this one a state.directory, api.socket and uplink of its own"
    )]
    Held {
        /// The lock file.
        file: PathBuf,
        /// The other's process number, as it wrote it.
        process: String,
    },
    /// The file or its folder cannot be made.
    #[error("lock file {file}: {source}; is state.directory writable?")]
    Io {
        /// The lock file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl AgentLock {
    /// Makes the state directory where it is missing, and takes its lock.
    pub fn take(state_directory: &Path) -> Result<Self, LockError> {
        let path = state_directory.join("skeind.lock");
        let fault = |source| LockError::Io {
            file: path.clone(),
            source,
        };
        fs::create_dir_all(state_directory).map_err(fault)?;
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(fault)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut process = String::new();
                // What cannot be read is no reason to hide that it is held.
                let _ = file.read_to_string(&mut process);
                return Err(LockError::Held {
                    file: path,
                    process: process.trim().to_owned(),
                });
            }
            Err(TryLockError::Error(source)) => return Err(fault(source)),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(fault)?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("deep/state");
        let first = AgentLock::take(&state).unwrap();
        let error = AgentLock::take(&state).unwrap_err();
        let process = format!("(process {})", std::process::id());
        assert!(error.to_string().contains(&process), "{error}");
        drop(first);
        AgentLock::take(&state).unwrap();
    }
}
