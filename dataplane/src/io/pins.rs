//! The pins of a device's program in a bpffs.

use std::io;
use std::path::{Path, PathBuf};

use aya::pin::PinError;

use super::device::Device;
use super::program::AttachedMode;
use super::program_error::{ProgramError, pin_error};

/// A device's folder of pins.
#[derive(Debug)]
pub(super) struct Pins {
    folder: PathBuf,
    index: u32,
}

impl Pins {
    pub(super) fn open(bpffs: &Path, device: &Device) -> Result<Self, ProgramError> {
        // A bpffs takes no dots in names, and a device no colons.
        let folder = bpffs.join("skein").join(device.name.replace('.', ":"));
        std::fs::create_dir_all(&folder).map_err(pin_error(&folder))?;
        Ok(Self {
            folder,
            index: device.index,
        })
    }

    /// Where the map that all uplinks share is pinned: beside the devices' folders, under a name
    /// that no device can have.
    pub(super) fn claims(&self) -> PathBuf {
        self.folder.with_file_name(":claims")
    }

    /// Where a map or the program is pinned.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub(super) fn link(&self, mode: AttachedMode) -> PathBuf {
        self.folder
            .join(format!("link-{}-{}", mode.name(), self.index))
    }

    pub(super) fn has_link(&self, mode: AttachedMode) -> bool {
        self.link(mode).exists()
    }

    fn remove(&self, keep: impl Fn(&str) -> bool) -> Result<(), ProgramError> {
        for entry in std::fs::read_dir(&self.folder).map_err(pin_error(&self.folder))? {
            let entry = entry.map_err(pin_error(&self.folder))?;
            if !keep(&entry.file_name().to_string_lossy()) {
                let path = entry.path();
                std::fs::remove_file(&path).map_err(pin_error(&path))?;
            }
        }
        Ok(())
    }

    /// Removes the links of devices that had this name, and of modes left.
    pub(super) fn remove_links_except(
        &self,
        mode: Option<AttachedMode>,
    ) -> Result<(), ProgramError> {
        let keep = mode.map(|mode| self.link(mode));
        let keep = keep.as_deref().and_then(Path::file_name);
        self.remove(|name| !name.starts_with("link-") || Some(name.as_ref()) == keep)
    }

    pub(super) fn remove_all(&self) -> Result<(), ProgramError> {
        self.remove(|_| false)?;
        std::fs::remove_dir(&self.folder).map_err(pin_error(&self.folder))
    }

    pub(super) fn replace(
        &self,
        name: &str,
        pin: impl FnOnce(&Path) -> Result<(), PinError>,
    ) -> Result<(), ProgramError> {
        let fresh = self.folder.join(format!("{name}-new"));
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(pin_error(&fresh)(error));
            }
            _ => {}
        }
        pin(&fresh).map_err(pin_error(&fresh))?;
        std::fs::rename(&fresh, self.folder.join(name)).map_err(pin_error(&fresh))
    }
}
