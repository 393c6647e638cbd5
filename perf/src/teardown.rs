//! Removing a lab by its name, and finding what is left of one.
//!
//! Nothing here needs the [`crate::Lab`] value: its owner may have been killed. Order matters:
//! first processes, politely and then not, since they hold mounts and devices; then network
//! namespaces, which take their links along; then files, the record last, so that an interrupted
//! removal is found and finished by the next [`collect_garbage`].

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cmd::{Cmd, LAB_ENV};
use crate::kubernetes::cgroup;
use crate::state::{self, NETNS, RECORDS};

/// How long processes may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// How long the kernel may take to let go of what was removed.
const SETTLE: Duration = Duration::from_secs(5);

/// Something that carries a lab's name and should not be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// `namespace`, `link`, `pin`, `mount`, `process`, `cgroup` or `file`.
    pub kind: &'static str,
    /// Its name, path or process id with command line.
    pub what: String,
}

impl std::fmt::Display for Leftover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, self.what)
    }
}

/// Removes everything that carries the lab's name; fails with the list of what would not go.
///
/// # Errors
/// Names each leftover that outlived several attempts.
pub fn teardown(lab: &str) -> Result<()> {
    let deadline = Instant::now() + GRACE + SETTLE;
    loop {
        end_processes(lab);
        cgroup::remove(lab);
        let mut faults = Vec::new();
        for name in namespaces(lab) {
            let removal = Cmd::new("ip")
                .args(["netns", "delete", &name])
                .even_if_interrupted()
                .run();
            faults.extend(removal.err());
        }
        for name in links(lab) {
            let removal = Cmd::new("ip")
                .args(["link", "delete", &name])
                .even_if_interrupted()
                .run();
            faults.extend(removal.err());
        }
        for path in files(lab) {
            // Whatever stays shows up among the leftovers.
            drop(std::fs::remove_dir_all(&path));
        }
        let left = leftovers(lab);
        if left.is_empty() {
            // Succeeds for the last lab alone.
            drop(std::fs::remove_dir(RECORDS));
            return Ok(());
        }
        if Instant::now() >= deadline {
            let left: Vec<String> = left.iter().map(ToString::to_string).collect();
            let faults: Vec<String> = faults.iter().map(|f| format!("{f:#}")).collect();
            bail!(
                "lab {lab} leaves behind: {}; {}",
                left.join(", "),
                faults.join("; ")
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Everything that carries the lab's name: namespaces, links in the machine's own namespace,
/// BPF pins, mounts, processes, control groups and files.
pub fn leftovers(lab: &str) -> Vec<Leftover> {
    let mut left = Vec::new();
    let mut add = |kind, what: Vec<String>| {
        left.extend(what.into_iter().map(|what| Leftover { kind, what }));
    };
    add("namespace", namespaces(lab));
    add("link", links(lab));
    add("pin", pins(Path::new("/sys/fs/bpf"), lab, 3));
    add("mount", mounts(lab));
    add("process", processes(lab).into_iter().map(show).collect());
    let shown = |paths: Vec<PathBuf>| paths.iter().map(|p| p.display().to_string()).collect();
    add("cgroup", shown(cgroup::of_lab(lab)));
    add("file", shown(files(lab)));
    left
}

/// Removes every lab whose owner no longer runs, and whatever has a lab's name without a record.
/// Returns the names of the labs removed.
///
/// # Errors
/// The first lab that could not be removed entirely.
pub fn collect_garbage() -> Result<Vec<String>> {
    let mut dead: Vec<String> = file_names(Path::new(NETNS))
        .into_iter()
        .filter_map(|name| name.split_once('-').map(|(lab, _)| lab.to_owned()))
        .chain(file_names(Path::new(RECORDS)))
        .filter(|name| state::is_lab_name(name))
        .collect();
    // Read after the names: a lab that was just being made has its record before anything else.
    let alive: Vec<String> = state::labs()
        .into_iter()
        .filter(|lab| lab.owner.is_alive())
        .map(|lab| lab.name)
        .collect();
    dead.retain(|name| !alive.contains(name));
    dead.sort();
    dead.dedup();
    for lab in &dead {
        teardown(lab)?;
    }
    Ok(dead)
}

/// Ends all processes of the lab: SIGTERM, and SIGKILL after a grace period.
fn end_processes(lab: &str) {
    let deadline = Instant::now() + GRACE;
    let mut told: Vec<u32> = Vec::new();
    loop {
        let left = processes(lab);
        if left.is_empty() {
            return;
        }
        let late = Instant::now() >= deadline;
        for pid in left {
            let signal = if late {
                Signal::SIGKILL
            } else {
                Signal::SIGTERM
            };
            if late || !told.contains(&pid) {
                told.push(pid);
                send(pid, signal);
            }
        }
        if late && Instant::now() >= deadline + GRACE {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal; a process that has ended meanwhile is no error.
pub fn send(pid: u32, signal: Signal) {
    if let Ok(pid) = i32::try_from(pid) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// Processes with the lab's mark in their environment, and those in its control groups: what a
/// container runtime starts has no mark. A dead process that waits for its parent has no
/// environment any more and does not count.
pub fn processes(lab: &str) -> Vec<u32> {
    let mut found = marked(lab);
    found.extend(cgroup::processes(lab));
    found.sort_unstable();
    found.dedup();
    found
}

fn marked(lab: &str) -> Vec<u32> {
    let mark = format!("{LAB_ENV}={lab}");
    file_names(Path::new("/proc"))
        .iter()
        .filter_map(|name| name.parse::<u32>().ok())
        .filter(|pid| *pid != std::process::id())
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| {
                environment.split(|b| *b == 0).any(|v| v == mark.as_bytes())
            })
        })
        .collect()
}

fn show(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    format!(
        "{pid} ({})",
        String::from_utf8_lossy(&line).replace('\0', " ")
    )
}

fn namespaces(lab: &str) -> Vec<String> {
    carrying(file_names(Path::new(NETNS)), lab)
}

fn links(lab: &str) -> Vec<String> {
    carrying(file_names(Path::new("/sys/class/net")), lab)
}

fn files(lab: &str) -> Vec<PathBuf> {
    let records = state::records(lab);
    let mut paths: Vec<PathBuf> = state::read_json::<state::LabRecord>(&records.join("lab.json"))
        .map(|record| record.directory)
        .into_iter()
        .collect();
    // Found also without the record, as long as TMPDIR is the same.
    paths.push(state::directory(lab));
    paths.push(Path::new(RECORDS).join(format!(".{lab}")));
    paths.push(records);
    paths.dedup();
    paths.retain(|path| path.exists());
    paths
}

fn mounts(lab: &str) -> Vec<String> {
    std::fs::read_to_string("/proc/self/mountinfo")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| point.contains(lab))
        .map(ToOwned::to_owned)
        .collect()
}

fn pins(folder: &Path, lab: &str, depth: u32) -> Vec<String> {
    let mut found = Vec::new();
    for name in file_names(folder) {
        let path = folder.join(&name);
        if name.contains(lab) {
            found.push(path.display().to_string());
        } else if depth > 0 && path.is_dir() {
            found.extend(pins(&path, lab, depth - 1));
        }
    }
    found
}

/// The names that are the lab's own or begin with it and a dash.
fn carrying(mut names: Vec<String>, lab: &str) -> Vec<String> {
    names.retain(|name| {
        name.strip_prefix(lab)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    });
    names.sort();
    names
}

fn file_names(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_carried_whole_or_before_a_dash() {
        let names = ["sk0", "sk0-node1", "sk01-node1", "x-sk0"].map(String::from);
        assert_eq!(carrying(names.to_vec(), "sk0"), ["sk0", "sk0-node1"]);
    }

    #[test]
    fn a_marked_process_is_found_and_ended() {
        let lab = state::unique_name();
        let mut child = Cmd::line("sleep 60")
            .of_lab(&lab)
            .spawn_detached(
                std::process::Stdio::null(),
                std::process::Stdio::null(),
                std::process::Stdio::null(),
            )
            .unwrap();
        assert_eq!(processes(&lab), [child.id()]);
        assert_eq!(leftovers(&lab)[0].kind, "process");
        end_processes(&lab);
        assert_eq!(processes(&lab), [0; 0]);
        child.wait().unwrap();
    }
}
