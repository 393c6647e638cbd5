//! Tells the host's own network managers that our devices are not theirs.
//!
//! systemd-networkd and NetworkManager may be configured to manage every device they see; on a
//! pod's veth or the host link they would ask for leases, accept router advertisements, or take
//! foreign routes away. A drop-in in `/run` says otherwise: both read it when they start or are
//! told to reload, and it is gone with the next boot, as our devices are. Where such a manager
//! has no folder there, it does not run, and nothing is written. Deliberately absent: telling
//! them to reload, which is a matter of the host.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::host::{HOST_END, OUR_END};

/// The host ends of pods' veths: `sk` and thirteen digits of a hash.
const POD_DEVICES: &str = "sk?????????????";

/// Writes the drop-ins below `run`, which is `/run`. Returns those that are new or have changed.
pub fn mark(run: &Path) -> io::Result<Vec<PathBuf>> {
    let networkd = format!(
        "[Match]\nName={POD_DEVICES} {HOST_END} {OUR_END}\n\n[Link]\nUnmanaged=yes\n\
         RequiredForOnline=no\n"
    );
    let network_manager = format!(
        "[keyfile]\nunmanaged-devices=interface-name:{POD_DEVICES};interface-name:{HOST_END};\
         interface-name:{OUR_END}\n"
    );
    let drop_ins = [
        // Networkd takes the first file that matches, in the order of their names.
        ("systemd", "network/00-skein.network", networkd),
        ("NetworkManager", "conf.d/99-skein.conf", network_manager),
    ];
    let mut written = Vec::new();
    for (manager, file, text) in drop_ins {
        let folder = run.join(manager);
        if !folder.is_dir() {
            continue;
        }
        let path = folder.join(file);
        if fs::read_to_string(&path).is_ok_and(|found| found == text) {
            continue;
        }
        fs::create_dir_all(path.parent().unwrap_or(&folder))?;
        fs::write(&path, text)?;
        written.push(path);
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_managers_that_are_there_are_told_and_only_once() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(mark(run.path()).unwrap(), [] as [PathBuf; 0]);
        fs::create_dir(run.path().join("systemd")).unwrap();
        let networkd = run.path().join("systemd/network/00-skein.network");
        assert_eq!(mark(run.path()).unwrap(), std::slice::from_ref(&networkd));
        let text = fs::read_to_string(&networkd).unwrap();
        assert!(
            text.contains("Name=sk????????????? skein0 skein0-dp\n"),
            "{text}"
        );
        fs::create_dir(run.path().join("NetworkManager")).unwrap();
        let network_manager = run.path().join("NetworkManager/conf.d/99-skein.conf");
        assert_eq!(mark(run.path()).unwrap(), [network_manager]);
        assert_eq!(mark(run.path()).unwrap(), [] as [PathBuf; 0]);
        fs::write(&networkd, "").unwrap();
        assert_eq!(mark(run.path()).unwrap(), [networkd]);
    }
}
