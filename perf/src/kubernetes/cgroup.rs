//! The control groups of a cluster's nodes.
//!
//! Control groups know no namespaces here: all nodes see the machine's hierarchies, and each has
//! a group of its own in every one of them, `/<lab>/<node>`, below which its kubelet and runc make
//! theirs. So a container's process, which has nothing of the lab in its environment, is still
//! found by the lab's name. Works with the separate hierarchies of version 1 and with version 2
//! (cgroups(7)).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Version 2: the one with all controllers, or, beside those of version 1, with none.
    pub unified: bool,
    /// What mounts the same hierarchy once more, mount(8)'s `-o`; empty for version 2.
    pub options: String,
}

/// The machine's hierarchies below `/sys/fs/cgroup`.
pub fn hierarchies() -> Vec<Hierarchy> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().filter_map(parse).collect()
}

/// Whether version 1 rules: then the directory above the hierarchies is a plain tmpfs.
pub fn is_version_1() -> bool {
    hierarchies().iter().any(|h| !h.unified)
}

/// One line of mountinfo, proc(5): `36 35 98:0 / /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpu`.
fn parse(line: &str) -> Option<Hierarchy> {
    let (left, right) = line.split_once(" - ")?;
    let mount = left.split(' ').nth(4)?;
    let mut right = right.split(' ');
    let unified = match right.next()? {
        "cgroup" => false,
        "cgroup2" => true,
        _ => return None,
    };
    if !mount.starts_with("/sys/fs/cgroup") {
        return None;
    }
    let words: Vec<&str> = right
        .nth(1)?
        .split(',')
        .filter(|word| !matches!(*word, "rw" | "ro" | "xattr" | "clone_children"))
        .filter(|word| !word.starts_with("release_agent="))
        .collect();
    let mut options = words.join(",");
    if unified {
        options.clear();
    } else if words.iter().all(|word| word.starts_with("name=")) {
        // A hierarchy without a controller has to say so.
        options = format!("none,{options}");
    }
    Some(Hierarchy {
        mount: mount.into(),
        unified,
        options,
    })
}

/// Makes a node's group in every hierarchy.
///
/// # Errors
/// The group that the kernel refuses.
pub fn make(lab: &str, node: &str) -> Result<()> {
    for hierarchy in hierarchies() {
        let of_lab = hierarchy.mount.join(lab);
        hand_down(&hierarchy.mount, &of_lab)?;
        hand_down(&of_lab, &of_lab.join(node))?;
    }
    Ok(())
}

/// Makes `child` with all that `parent` has to give.
fn hand_down(parent: &Path, child: &Path) -> Result<()> {
    let fault = || format!("cannot set up the control group {}", child.display());
    std::fs::create_dir_all(child).with_context(fault)?;
    // Version 1: a new cpuset holds no CPU and takes no process until it does.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if let Ok(value) = std::fs::read_to_string(parent.join(file))
            && !parent.join("cgroup.controllers").exists()
        {
            std::fs::write(child.join(file), value.trim()).with_context(fault)?;
        }
    }
    // Version 2: a controller works in a group only if the parent says so.
    if let Ok(controllers) = std::fs::read_to_string(parent.join("cgroup.controllers")) {
        for controller in controllers.split_whitespace() {
            let switch = parent.join("cgroup.subtree_control");
            std::fs::write(switch, format!("+{controller}")).with_context(fault)?;
        }
    }
    Ok(())
}

/// All of the lab's groups, the innermost first.
pub fn of_lab(lab: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for hierarchy in hierarchies() {
        let top = hierarchy.mount.join(lab);
        if top.is_dir() {
            collect(&top, &mut found);
        }
    }
    found
}

fn collect(group: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), found);
        }
    }
    found.push(group.to_owned());
}

/// The processes in the lab's groups.
pub fn processes(lab: &str) -> Vec<u32> {
    of_lab(lab)
        .iter()
        .flat_map(|group| {
            let text = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            text.lines()
                .filter_map(|line| line.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect()
}

/// Removes the lab's groups, as far as no process is left in them.
pub fn remove(lab: &str) {
    for group in of_lab(lab) {
        // Whatever stays shows up among the leftovers.
        drop(std::fs::remove_dir(group));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_both_versions_are_read() {
        let line = |point: &str, rest: &str| format!("36 35 0:9 / {point} rw,relatime - {rest}");
        let cpu = parse(&line("/sys/fs/cgroup/cpu", "cgroup cgroup rw,cpu,cpuacct")).unwrap();
        assert_eq!((cpu.unified, cpu.options.as_str()), (false, "cpu,cpuacct"));
        let named = line(
            "/sys/fs/cgroup/systemd",
            "cgroup none rw,xattr,name=systemd",
        );
        assert_eq!(parse(&named).unwrap().options, "none,name=systemd");
        let unified = parse(&line("/sys/fs/cgroup", "cgroup2 none rw,nsdelegate")).unwrap();
        assert_eq!((unified.unified, unified.options.as_str()), (true, ""));
        assert_eq!(parse(&line("/mnt", "cgroup2 none rw")), None);
        assert_eq!(parse(&line("/sys/fs/cgroup", "tmpfs none rw")), None);
    }

    #[test]
    fn a_process_in_a_nodes_group_is_found_and_the_group_goes() {
        let lab = crate::state::unique_name();
        make(&lab, "node1").unwrap();
        let groups = of_lab(&lab);
        assert_eq!(groups.len(), 2 * hierarchies().len());
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let inner = groups.iter().find(|g| g.ends_with("node1")).unwrap();
        std::fs::write(inner.join("cgroup.procs"), child.id().to_string()).unwrap();
        assert_eq!(processes(&lab), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        remove(&lab);
        assert!(of_lab(&lab).is_empty());
    }
}
