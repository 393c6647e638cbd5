//! Where the programs under test are.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

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
