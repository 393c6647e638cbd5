//! Names, folders and records of labs.
//!
//! A lab is known by its name alone: `sk` and twelve hex digits. Everything it makes carries the
//! name, so that any process can remove a lab whose owner is gone:
//!
//! ```text
//! /run/netns/<lab>-node1              a node's network namespace
//! /run/netns/<lab>-node1-default-a    a pod's
//! /run/skein-lab/<lab>/               records: lab.json, node-1.json, pod-default-a.json
//! $TMPDIR/skein-lab-<lab>/cluster/    the folder of manifests that the nodes share
//! $TMPDIR/skein-lab-<lab>/node1/      the agent's configuration and log
//! ```
//!
//! and every process has `SKEIN_LAB=<lab>` in its environment.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Where the records of all labs are.
pub const RECORDS: &str = "/run/skein-lab";

/// Where `ip netns` keeps named network namespaces.
pub const NETNS: &str = "/run/netns";

const NAME_DIGITS: usize = 12;

/// A name that no other lab on this machine has.
pub fn unique_name() -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_micros());
    // Process ids are unique at a time, the clock tells apart those that a number had in turn.
    let pid = u64::from(std::process::id()) & 0x3f_ffff;
    let low = (u64::try_from(micros & 0x3ff_ffff).unwrap_or(0) + u64::from(count)) & 0x3ff_ffff;
    format!("sk{:012x}", (pid << 26) | low)
}

/// Whether `name` has the form of a lab's name.
pub fn is_lab_name(name: &str) -> bool {
    name.strip_prefix("sk").is_some_and(|rest| {
        rest.len() == NAME_DIGITS && rest.bytes().all(|b| b"0123456789abcdef".contains(&b))
    })
}

/// The folder with a lab's records.
pub fn records(lab: &str) -> PathBuf {
    Path::new(RECORDS).join(lab)
}

/// The folder with a lab's manifests, configurations and logs.
pub fn directory(lab: &str) -> PathBuf {
    std::env::temp_dir().join(format!("skein-lab-{lab}"))
}

/// A process by id and start time: an id alone is handed out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Process id.
    pub pid: u32,
    /// Start in clock ticks since boot: field 22 of `/proc/<pid>/stat`, proc(5).
    pub start: u64,
}

impl Owner {
    /// The process `pid` as it runs now; none if it does not.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The program's name, field 2, may hold spaces and brackets: count from its end.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let (state, start) = (fields.next()?, fields.nth(18)?);
        if matches!(state, "Z" | "X") {
            return None;
        }
        Some(Self {
            pid,
            start: start.parse().ok()?,
        })
    }

    /// Whether this very process still runs.
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

/// The record of a lab, `lab.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabRecord {
    /// The lab's name.
    pub name: String,
    /// The process without which the lab is garbage.
    pub owner: Owner,
    /// Made by `skein-lab up`: stays until `skein-lab down`.
    pub persistent: bool,
    /// Manifests, configurations and logs.
    pub directory: PathBuf,
}

/// Makes a lab's folders and its first record, which appears complete or not at all.
pub fn create(record: &LabRecord) -> Result<()> {
    std::fs::create_dir_all(record.directory.join("cluster"))
        .with_context(|| format!("cannot make {}", record.directory.display()))?;
    let unfinished = Path::new(RECORDS).join(format!(".{}", record.name));
    // The end of the last other lab may remove the empty parent under our hands.
    (0..10)
        .find_map(|_| std::fs::create_dir_all(&unfinished).ok())
        .map_or_else(|| std::fs::create_dir_all(&unfinished), Ok)
        .with_context(|| format!("cannot make {}; is this root?", unfinished.display()))?;
    write_json(&unfinished.join("lab.json"), record)?;
    std::fs::rename(&unfinished, records(&record.name))
        .with_context(|| format!("cannot make {}", records(&record.name).display()))
}

/// Writes `value` so that a reader sees the old file or the new one, never half of it.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    write_atomically(path, &text)
}

/// Writes a file by way of a hidden one beside it and rename(2).
pub fn write_atomically(path: &Path, text: &str) -> Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        bail!("{} is no path of a file", path.display());
    };
    let unfinished = folder.join(format!(".{}.unfinished", name.to_string_lossy()));
    std::fs::write(&unfinished, text)
        .and_then(|()| std::fs::rename(&unfinished, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Reads one record.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the record {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a record of this version", path.display()))
}

/// All records of a lab whose file name begins with `kind`, in the order of their names.
pub fn read_all<T: DeserializeOwned>(lab: &str, kind: &str) -> Result<Vec<T>> {
    let folder = records(lab);
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("no lab {lab} ({folder:?})"))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(kind))
    });
    paths.sort();
    paths.iter().map(|path| read_json(path)).collect()
}

/// Every lab with a readable record.
pub fn labs() -> Vec<LabRecord> {
    let Ok(entries) = std::fs::read_dir(RECORDS) else {
        return Vec::new();
    };
    let mut labs: Vec<LabRecord> = entries
        .flatten()
        .filter_map(|entry| read_json(&entry.path().join("lab.json")).ok())
        .collect();
    labs.sort_by(|a, b| a.name.cmp(&b.name));
    labs
}

/// The lab that a command means: the named one, else the only persistent one.
pub fn choose(name: Option<&str>) -> Result<LabRecord> {
    let mut labs = labs();
    if let Some(name) = name {
        return labs
            .into_iter()
            .find(|lab| lab.name == name)
            .with_context(|| format!("there is no lab {name}"));
    }
    labs.retain(|lab| lab.persistent);
    match labs.len() {
        0 => bail!("no lab is up; start one with `skein-lab up`"),
        1 => Ok(labs.remove(0)),
        _ => {
            let names: Vec<&str> = labs.iter().map(|lab| lab.name.as_str()).collect();
            bail!(
                "several labs are up: name one with --lab: {}",
                names.join(", ")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_recognised() {
        let names: std::collections::BTreeSet<String> = (0..100).map(|_| unique_name()).collect();
        assert_eq!(names.len(), 100);
        assert!(names.iter().all(|name| is_lab_name(name)));
        for other in ["sk", "sk12", "probe", "skzzzzzzzzzzzz", "sk0123456789abc"] {
            assert!(!is_lab_name(other), "{other}");
        }
    }

    #[test]
    fn an_owner_is_alive_until_it_ends() {
        assert!(Owner::of(std::process::id()).unwrap().is_alive());
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let owner = Owner::of(child.id()).unwrap();
        assert!(owner.is_alive());
        let other_start = Owner {
            start: owner.start + 1,
            ..owner
        };
        assert!(!other_start.is_alive(), "an id handed out again");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!owner.is_alive());
    }
}
