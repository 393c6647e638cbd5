//! Source `directory`: a folder of ordinary manifests, watched.
//!
//! Each file is taken as a whole: when one of its documents is refused, the file's last good
//! version stays in force and the fault is reported. Where two files hold the same object, the
//! first by name wins and the other is a fault. Hidden files and folders below are not read;
//! `skein.io/` is one of those, where the agents keep what is theirs.
//!
//! inotify says when to look. Since it says nothing on network file systems, the folder is also
//! looked at by itself, about once a second. Files are read on a thread of their own, since a
//! read may take its time.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::sync::mpsc;

use super::manifest;
use super::{DocumentFault, Event};
use crate::state::{Change, Object, ObjectKey};

/// A change is looked at once the folder has been quiet for this long…
const QUIET: Duration = Duration::from_millis(50);

/// …or has been busy for this long.
const BUSY_AT_MOST: Duration = Duration::from_millis(400);

/// How often the folder is looked at without being told.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Why the folder cannot be a source.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The folder cannot be listed.
    #[error(
        "the manifest folder {folder} cannot be read: {source}; \
         create it, or set cluster.directory"
    )]
    Folder {
        /// Which.
        folder: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// inotify is not to be had.
    #[error("the manifest folder {folder} cannot be watched: {source}")]
    Watch {
        /// Which.
        folder: PathBuf,
        /// What the system said (EMFILE: raise fs.inotify.max_user_instances).
        source: io::Error,
    },
}

/// What tells that a file is another than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signature {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Debug, Default)]
struct File {
    /// Of the version that was read last, good or not.
    signature: Option<Signature>,
    /// Objects of the last good version.
    objects: Vec<(u64, Object)>,
    /// Faults of the version that was read last.
    faults: Vec<DocumentFault>,
}

/// The folder, as it was looked at last.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    files: BTreeMap<PathBuf, File>,
    in_force: BTreeMap<ObjectKey, Object>,
    faults: Vec<DocumentFault>,
}

/// What a look at the folder found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Changes of objects.
    pub changes: Vec<Change>,
    /// All faults, where they are others than at the look before.
    pub faults: Option<Vec<DocumentFault>>,
}

impl Folder {
    /// A folder not looked at yet.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            files: BTreeMap::new(),
            in_force: BTreeMap::new(),
            faults: Vec::new(),
        }
    }

    /// Reads what changed since the last look.
    pub fn look(&mut self) -> Result<Look, DirectoryError> {
        let fault = |source| DirectoryError::Folder {
            folder: self.path.clone(),
            source,
        };
        let mut present = BTreeSet::new();
        for entry in std::fs::read_dir(&self.path).map_err(fault)? {
            let path = entry.map_err(fault)?.path();
            if is_manifest(&path) {
                present.insert(path);
            }
        }
        let before = self.files.len();
        self.files.retain(|path, _| present.contains(path));
        let mut changed = self.files.len() != before;
        for path in present {
            changed |= self.files.entry(path.clone()).or_default().read(&path);
        }
        Ok(if changed {
            self.merge()
        } else {
            Look::default()
        })
    }

    /// Puts the files together and compares with what was in force.
    fn merge(&mut self) -> Look {
        let mut merged: BTreeMap<ObjectKey, (&Object, &Path, u64)> = BTreeMap::new();
        let mut faults = Vec::new();
        for (path, file) in &self.files {
            faults.extend(file.faults.iter().cloned());
            for (line, object) in &file.objects {
                let key = object.key();
                if let Some((_, first, first_line)) = merged.get(&key) {
                    faults.push(DocumentFault {
                        file: path.clone(),
                        line: *line,
                        reason: format!(
                            "{key} stands in {}:{first_line} already, which is in force",
                            first.display()
                        ),
                    });
                } else {
                    merged.insert(key, (object, path, *line));
                }
            }
        }
        let mut changes = Vec::new();
        self.in_force.retain(|key, _| {
            let stays = merged.contains_key(key);
            if !stays {
                changes.push(Change::Remove(key.clone()));
            }
            stays
        });
        for (key, (object, _, _)) in merged {
            if self.in_force.get(&key) != Some(object) {
                self.in_force.insert(key, object.clone());
                changes.push(Change::Set(object.clone()));
            }
        }
        let news = (faults != self.faults).then(|| faults.clone());
        self.faults = faults;
        Look {
            changes,
            faults: news,
        }
    }
}

fn is_manifest(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(|extension| extension.to_str());
    !hidden && matches!(extension, Some("yaml" | "yml" | "json")) && !path.is_dir()
}

impl File {
    /// Reads the file if it is another than before; true when something came of it.
    fn read(&mut self, path: &Path) -> bool {
        let fault = |reason: String| DocumentFault {
            file: path.to_owned(),
            line: 1,
            reason,
        };
        let (signature, text) = match read_text(path, self.signature) {
            Ok(None) => return false,
            Ok(Some(read)) => read,
            Err(error) => {
                // Gone between listing and reading: the next look will not list it.
                if error.kind() == io::ErrorKind::NotFound {
                    return false;
                }
                let faults = vec![fault(format!("cannot be read: {error}"))];
                let news = self.faults != faults;
                self.faults = faults;
                self.signature = None;
                return news;
            }
        };
        self.signature = Some(signature);
        match manifest::parse(&text) {
            Ok(objects) => {
                self.objects = objects;
                self.faults.clear();
            }
            Err(faults) => {
                self.faults = (faults.into_iter())
                    .map(|manifest::Fault { line, reason }| DocumentFault {
                        line,
                        ..fault(reason)
                    })
                    .collect();
            }
        }
        true
    }
}

/// The file's text and signature; `None` when it has that signature already.
fn read_text(path: &Path, known: Option<Signature>) -> io::Result<Option<(Signature, String)>> {
    let metadata = std::fs::metadata(path)?;
    let signature = Signature {
        inode: (metadata.dev(), metadata.ino()),
        size: metadata.len(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    };
    if known == Some(signature) {
        return Ok(None);
    }
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if metadata.len() > MAX_FILE_BYTES {
        let message = format!("{} bytes; the most is {MAX_FILE_BYTES}", metadata.len());
        return Err(io::Error::other(message));
    }
    Ok(Some((signature, std::fs::read_to_string(path)?)))
}

/// Watches a folder.
#[derive(Debug)]
pub struct DirectorySource {
    folder: Folder,
    notices: OwnedFd,
}

impl DirectorySource {
    /// Opens a folder, which must be there.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        std::fs::read_dir(path).map_err(|source| DirectoryError::Folder {
            folder: path.to_owned(),
            source,
        })?;
        let notices =
            inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(|error| {
                DirectoryError::Watch {
                    folder: path.to_owned(),
                    source: error.into(),
                }
            })?;
        Ok(Self {
            folder: Folder::new(path),
            notices,
        })
    }

    /// Sends everything, then [`Event::Synced`], then changes, until the receiver is gone. For a
    /// thread of its own: it blocks.
    #[expect(clippy::needless_pass_by_value, reason = "it is this thread's sender")]
    pub fn run(mut self, events: mpsc::Sender<Event>) {
        let mut synced = false;
        let mut unreadable = false;
        while !events.is_closed() {
            // Before looking, so that nothing is missed; and again each time, since the folder
            // may have been made anew. Watching twice is watching once.
            self.watch();
            let began = Instant::now();
            let mut to_send = Vec::new();
            match self.folder.look() {
                Ok(look) => {
                    if !look.changes.is_empty() {
                        to_send.push(Event::Changes(look.changes));
                    }
                    let faults = look
                        .faults
                        .or_else(|| unreadable.then(|| self.folder.faults.clone()));
                    to_send.extend(faults.map(Event::Faults));
                    unreadable = false;
                    if !synced {
                        to_send.push(Event::Synced);
                        synced = true;
                    }
                }
                Err(error) if !unreadable => {
                    unreadable = true;
                    let mut faults = self.folder.faults.clone();
                    faults.push(DocumentFault {
                        file: self.folder.path.clone(),
                        line: 0,
                        reason: format!("{error}; what was read last stays in force"),
                    });
                    to_send.push(Event::Faults(faults));
                }
                Err(_) => {}
            }
            for event in to_send {
                if events.blocking_send(event).is_err() {
                    return;
                }
            }
            // A look at a very large folder must not fill the day.
            self.wait(LOOK_EVERY.max(began.elapsed() * 20));
        }
    }

    fn watch(&self) {
        let interest = WatchFlags::CLOSE_WRITE
            | WatchFlags::MODIFY
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        // Without a watch (the folder is gone, the file system has none) the regular look finds
        // the change.
        let _ = inotify::add_watch(&self.notices, &self.folder.path, interest);
    }

    /// Until something changed and went quiet, or that long.
    fn wait(&self, at_most: Duration) {
        if !self.notice(at_most) {
            return;
        }
        let busy_since = Instant::now();
        while busy_since.elapsed() < BUSY_AT_MOST && self.notice(QUIET) {}
    }

    /// Whether there was a notice within that time; takes all that wait.
    fn notice(&self, within: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: i64::try_from(within.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: within.subsec_nanos().into(),
        };
        let mut waiting = [PollFd::new(&self.notices, PollFlags::IN)];
        if !poll(&mut waiting, Some(&timeout)).is_ok_and(|ready| ready > 0) {
            return false;
        }
        let mut buffer = [0; 4096];
        while rustix::io::read(&self.notices, &mut buffer).is_ok_and(|bytes| bytes > 0) {}
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn pod(name: &str, app: &str) -> String {
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {app}}}}}\n"
        )
    }

    /// Replaces a file at once, as careful writers do.
    fn put(folder: &Path, name: &str, text: &str) {
        let temporary = folder.join(".new");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, folder.join(name)).unwrap();
    }

    fn names(look: &Look) -> Vec<String> {
        look.changes
            .iter()
            .map(|change| match change {
                Change::Set(object) => format!("+{}", object.key()),
                Change::Remove(key) => format!("-{key}"),
            })
            .collect()
    }

    #[test]
    fn a_bad_version_leaves_the_last_good_one_in_force() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let mut watched = Folder::new(path);
        put(path, "a.yaml", &(pod("one", "x") + &pod("two", "x")));
        let look = watched.look().unwrap();
        assert_eq!(names(&look), ["+Pod default/one", "+Pod default/two"]);
        assert_eq!(look.faults, None);

        put(
            path,
            "a.yaml",
            &(pod("one", "y") + "---\napiVersion: v9\nkind: Pod\n"),
        );
        let look = watched.look().unwrap();
        assert_eq!(look.changes, []);
        let faults = look.faults.unwrap();
        assert_eq!((faults[0].line, faults.len()), (5, 1));
        assert!(
            faults[0]
                .to_string()
                .contains("a.yaml:5: unknown apiVersion 'v9'")
        );
        assert_eq!(watched.look().unwrap(), Look::default());

        put(path, "a.yaml", &pod("one", "y"));
        let look = watched.look().unwrap();
        assert_eq!(names(&look), ["-Pod default/two", "+Pod default/one"]);
        assert_eq!(look.faults, Some(vec![]));

        fs::remove_file(path.join("a.yaml")).unwrap();
        assert_eq!(names(&watched.look().unwrap()), ["-Pod default/one"]);
    }

    #[test]
    fn the_same_object_twice_is_a_fault_and_the_first_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let mut watched = Folder::new(path);
        put(path, "b.yaml", &pod("one", "second"));
        watched.look().unwrap();
        put(path, "a.yaml", &pod("one", "first"));
        let look = watched.look().unwrap();
        assert_eq!(names(&look), ["+Pod default/one"]);
        let fault = look.faults.unwrap().pop().unwrap();
        assert!(
            fault
                .to_string()
                .contains("b.yaml:1: Pod default/one stands in"),
            "{fault}"
        );
        // With the first gone, the second comes into force.
        fs::remove_file(path.join("a.yaml")).unwrap();
        let look = watched.look().unwrap();
        assert_eq!(names(&look), ["+Pod default/one"]);
        assert_eq!(look.faults, Some(vec![]));
    }

    #[test]
    fn other_files_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        fs::create_dir_all(path.join("skein.io/identities")).unwrap();
        fs::write(path.join("skein.io/identities/300.yaml"), "kind: Identity").unwrap();
        fs::create_dir(path.join("folder.yaml")).unwrap();
        fs::write(path.join(".hidden.yaml"), "{").unwrap();
        fs::write(path.join("notes.txt"), "{").unwrap();
        put(
            path,
            "x.json",
            r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "j"}}"#,
        );
        let look = Folder::new(path).look().unwrap();
        assert_eq!(names(&look), ["+Pod default/j"]);
        assert_eq!(look.faults, None);
    }

    #[test]
    fn a_missing_folder_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let error = Folder::new(&folder.path().join("none")).look().unwrap_err();
        assert!(
            error.to_string().contains("set cluster.directory"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn changes_arrive_by_themselves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster");
        fs::create_dir(&path).unwrap();
        put(&path, "a.yaml", &pod("one", "x"));
        let (sender, mut events) = mpsc::channel(16);
        let source = DirectorySource::open(&path).unwrap();
        let thread = std::thread::spawn(move || source.run(sender));
        assert!(matches!(events.recv().await, Some(Event::Changes(changes)) if changes.len() == 1));
        assert_eq!(events.recv().await, Some(Event::Synced));

        put(&path, "b.yaml", &pod("two", "x"));
        assert!(matches!(events.recv().await, Some(Event::Changes(changes)) if changes.len() == 1));
        put(&path, "b.yaml", "{");
        assert!(matches!(events.recv().await, Some(Event::Faults(faults)) if faults.len() == 1));

        // The folder goes and comes back: what was read stays in force meanwhile.
        fs::rename(&path, folder.path().join("away")).unwrap();
        let Some(Event::Faults(faults)) = events.recv().await else {
            panic!("no faults")
        };
        assert!(faults[1].reason.contains("stays in force"));
        fs::rename(folder.path().join("away"), &path).unwrap();
        assert!(matches!(events.recv().await, Some(Event::Faults(faults)) if faults.len() == 1));
        put(&path, "b.yaml", "");
        let Some(Event::Changes(changes)) = events.recv().await else {
            panic!("no changes")
        };
        assert_eq!(changes.len(), 1);
        drop(events);
        thread.join().unwrap();
    }
}
