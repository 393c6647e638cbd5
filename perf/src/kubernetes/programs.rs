//! Where the cluster's programs come from.
//!
//! Kubernetes' own are built by `deploy/cluster/build.sh` into a cache outside the tree, whose
//! folder this module asks the script for; containerd, runc, etcd and the reference plugins are
//! the distribution's.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::cmd::SYSTEM_FOLDERS;

/// The folder with the built programs; the script is not run where it is set.
pub const PROGRAMS_ENV: &str = "SKEIN_CLUSTER_PROGRAMS";

/// Where Debian and Ubuntu keep the reference plugins.
pub const REFERENCE_PLUGINS: &str = "/usr/lib/cni";

/// Where the script is, from the root of the source tree.
const SCRIPT: &str = "deploy/cluster/build.sh";

const BUILT: [&str; 11] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
    "kube-proxy",
    "agnhost",
    "pause",
    "e2e.test",
    "localhost.crt",
    "localhost.key",
];

/// The distribution's programs, each with its package.
const TOOLS: [(&str, &str); 15] = [
    ("containerd", "containerd"),
    ("containerd-shim-runc-v2", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("etcd", "etcd-server"),
    ("openssl", "openssl"),
    ("tar", "tar"),
    ("iptables", "iptables"),
    ("conntrack", "conntrack"),
    ("sysctl", "procps"),
    // What goes into the image of the tests' pods.
    ("ldd", "libc-bin"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("nc.openbsd", "netcat-openbsd"),
    ("curl", "curl"),
];

/// The folder of built programs.
#[derive(Clone, Debug)]
pub struct Programs(PathBuf);

impl Programs {
    /// Finds the programs, and builds them first where they are not built yet.
    ///
    /// # Errors
    /// Without Go, with the build's own errors, and if a program is missing.
    pub fn find() -> Result<Self> {
        let folder = match std::env::var_os(PROGRAMS_ENV) {
            Some(folder) => PathBuf::from(folder),
            None => build()?,
        };
        for name in BUILT {
            ensure!(
                folder.join(name).is_file(),
                "{name} is not in {}: {SCRIPT} builds it",
                folder.display()
            );
        }
        Ok(Self(folder))
    }

    /// The programs of a cluster that is up.
    pub fn in_folder(folder: PathBuf) -> Self {
        Self(folder)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// A program's path.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Runs the script in the terminal's own process group, so that ^C ends it too.
fn build() -> Result<PathBuf> {
    let script = find_script()?;
    let output = Command::new(&script)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", script.display()))?;
    ensure!(
        output.status.success(),
        "{} failed with {}",
        script.display(),
        output.status
    );
    Ok(PathBuf::from(String::from_utf8(output.stdout)?.trim()))
}

/// The script, above this program (which lies in `target/debug`) or above the working directory.
fn find_script() -> Result<PathBuf> {
    let places = [std::env::current_exe(), std::env::current_dir()];
    for place in places.into_iter().flatten() {
        if let Some(root) = place.ancestors().find(|root| root.join(SCRIPT).is_file()) {
            return Ok(root.join(SCRIPT));
        }
    }
    bail!("cannot find {SCRIPT}: run this in Skein's source tree, or set {PROGRAMS_ENV}")
}

/// Fails with one message that names every missing program and how to install it.
///
/// # Errors
/// If any is missing.
pub fn require_tools() -> Result<()> {
    let mut packages: Vec<&str> = TOOLS
        .into_iter()
        .filter(|(tool, _)| which(tool).is_none())
        .map(|(_, package)| package)
        .collect();
    if !Path::new(REFERENCE_PLUGINS).join("bridge").is_file() {
        packages.push("containernetworking-plugins");
    }
    packages.dedup();
    ensure!(
        packages.is_empty(),
        "the cluster needs packages that are not installed: {}; deploy/cluster/setup.sh installs \
         them on Debian or Ubuntu",
        packages.join(" ")
    );
    Ok(())
}

/// The path of an installed program.
pub fn which(tool: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    std::env::split_paths(&format!("{path}:{SYSTEM_FOLDERS}"))
        .map(|folder| folder.join(tool))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_is_found_from_a_test_program() {
        assert!(find_script().unwrap().ends_with(SCRIPT));
    }

    #[test]
    fn an_installed_program_is_found_and_another_is_not() {
        assert!(which("tar").unwrap().is_absolute());
        assert_eq!(which("no-such-program-here"), None);
    }
}
