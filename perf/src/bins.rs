//! Where the programs under test are.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use crate::cmd::SYSTEM_FOLDERS;

/// The folder that is searched first.
pub const BIN_DIR_ENV: &str = "SKEIN_BIN_DIR";

/// The path of one of the project's programs (`skeind`, `skein-cni`, `skeinctl`, `skein-lab`).
///
/// Searched in `SKEIN_BIN_DIR` if that is set, else beside the running program, and one folder
/// above it, since test programs lie in `target/debug/deps`.
pub fn find(name: &str) -> Result<PathBuf> {
    let folders = match std::env::var_os(BIN_DIR_ENV) {
        Some(folder) => vec![PathBuf::from(folder)],
        None => {
            let exe = std::env::current_exe().context("cannot tell the running program's path")?;
            exe.ancestors().skip(1).take(2).map(PathBuf::from).collect()
        }
    };
    for folder in &folders {
        let path = folder.join(name);
        if path.is_file() {
            return std::path::absolute(&path)
                .with_context(|| format!("no absolute path for {}", path.display()));
        }
    }
    bail!(
        "{name} is not in {folders:?}; build it (cargo build -p skein-control -p skein-cni \
         -p skein-perf) or set {BIN_DIR_ENV} to the folder that holds it"
    )
}

/// What a lab runs beside the project's own programs, with the package of Debian and Ubuntu.
const TOOLS: [(&str, &str); 9] = [
    ("ip", "iproute2"),
    ("ethtool", "ethtool"),
    ("nft", "nftables"),
    ("ping", "iputils-ping"),
    ("iperf3", "iperf3"),
    ("mount", "mount"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("taskset", "util-linux"),
];

/// Fails with one message that names every missing tool and how to install it.
///
/// # Errors
/// If any of the tools is neither in `PATH` nor in the system's usual folders.
pub fn require_tools() -> Result<()> {
    let path = std::env::var("PATH").unwrap_or_default();
    let missing = missing_tools(&format!("{path}:{SYSTEM_FOLDERS}"));
    let names: Vec<&str> = missing.iter().map(|(tool, _)| *tool).collect();
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    ensure!(
        missing.is_empty(),
        "missing: {}; install them, on Debian or Ubuntu: apt-get install {}",
        names.join(", "),
        packages.join(" ")
    );
    Ok(())
}

fn missing_tools(path: &str) -> Vec<(&'static str, &'static str)> {
    let folders: Vec<PathBuf> = std::env::split_paths(path).collect();
    TOOLS
        .into_iter()
        .filter(|(tool, _)| !folders.iter().any(|folder| folder.join(tool).is_file()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tools_are_found_out() {
        assert_eq!(missing_tools("/nonexistent").len(), TOOLS.len());
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("nft"), "").unwrap();
        let missing = missing_tools(&folder.path().display().to_string());
        assert_eq!(missing.len(), TOOLS.len() - 1);
        assert!(!missing.contains(&("nft", "nftables")));
    }

    #[test]
    fn a_program_that_is_not_built_is_named_with_what_to_do() {
        let error = find("skein-nothing").unwrap_err().to_string();
        for words in ["skein-nothing", "cargo build", BIN_DIR_ENV] {
            assert!(error.contains(words), "{error}");
        }
    }
}
