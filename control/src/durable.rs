//! Files that a crash leaves whole: the old version or the new one, never half of either.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes a file whole: a finished, synced file of another name takes its place at once.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = write_temporary(path, bytes)?;
    fs::rename(&temporary, path)
        .and_then(|()| sync_folder(path))
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
}

/// Makes a file whole unless there is one; false when there is.
pub fn create(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let temporary = write_temporary(path, bytes)?;
    let linked = fs::hard_link(&temporary, path);
    let removed = fs::remove_file(&temporary);
    match linked {
        Ok(()) => {
            removed?;
            sync_folder(path)?;
            Ok(true)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a file; a file that is not there is no fault.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// A synced file beside `path`, hidden, of a name that no other process or thread takes: the
/// folder may be shared by nodes, whose process numbers may be the same.
fn write_temporary(path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    loop {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let stamp = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        let process = std::process::id();
        let temporary = path.with_file_name(format!(".{name}.{process}-{count}-{stamp}"));
        let mut file = match File::create_new(&temporary) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(error),
        };
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        return Ok(temporary);
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_created_and_removed_without_a_trace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write(&path, b"1").unwrap();
        write(&path, b"2").unwrap();
        assert!(!create(&path, b"3").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"2");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert!(create(&path, b"3").unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write(&folder.path().join("none/a"), b"1").is_err());
    }
}
