//! What can go wrong with an XDP program, in words that say what to do.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use aya::programs::ProgramError as AyaProgramError;

use super::device::Device;
use super::program::AttachedMode;

/// What is behind an error of ours.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Why a program could not be loaded or attached.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// Loading.
    #[error("XDP program {program}: {}{}", chain(source.as_ref()), load_advice(source.as_ref()))]
    Load {
        /// The program's name.
        program: &'static str,
        /// What failed.
        source: Cause,
    },
    /// Attaching.
    #[error(
        "XDP program on {device} in {mode} mode: {}{}",
        chain(source.as_ref()),
        attach_advice(source.as_ref())
    )]
    Attach {
        /// The device's name.
        device: String,
        /// The mode.
        mode: &'static str,
        /// What failed.
        source: Cause,
    },
    /// Native mode is asked for, and turned off.
    #[error("XDP program on {device}: native mode is configured, and native-xdp is disabled")]
    NativeDisabled {
        /// The device's name.
        device: String,
    },
    /// A map of the program.
    #[error("map {map} of the XDP program: {}", chain(source.as_ref()))]
    Map {
        /// The map's name.
        map: &'static str,
        /// What failed.
        source: Cause,
    },
    /// Pins.
    #[error(
        "pin {}: {}; is a bpffs there? (mount -t bpf bpf /sys/fs/bpf)",
        path.display(),
        chain(source.as_ref())
    )]
    Pin {
        /// The file.
        path: PathBuf,
        /// What failed.
        source: Cause,
    },
    /// Taking a device down or up while its program's mode changes.
    #[error("taking {device} down and up while its XDP mode changes: {source}")]
    Flags {
        /// The device's name.
        device: String,
        /// What failed.
        source: io::Error,
    },
}

/// An error and its causes on one line, each once.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// The kernel's error number behind an error.
pub(super) fn errno(error: &(dyn Error + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(number) = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
        {
            return Some(number);
        }
        next = cause.source();
    }
    None
}

fn load_advice(error: &(dyn Error + 'static)) -> &'static str {
    match errno(error) {
        Some(libc::EPERM) => {
            "; run as root or with CAP_BPF and CAP_NET_ADMIN, and before Linux 5.11 with \
             RLIMIT_MEMLOCK unlimited"
        }
        _ => "",
    }
}

fn attach_advice(error: &(dyn Error + 'static)) -> &'static str {
    match errno(error) {
        Some(libc::EBUSY | libc::EEXIST) => {
            "; another XDP program is there: see `bpftool net`, end its owner or take it off \
             (`ip link set dev DEVICE xdp off`, `xdpgeneric off`)"
        }
        Some(libc::EOPNOTSUPP) => "; the driver has no XDP: use generic mode",
        Some(libc::ERANGE | libc::EINVAL) => {
            "; in native mode without multi-buffer the MTU of a veth's peer is limited to 3506: \
             use generic mode or a smaller MTU"
        }
        Some(libc::ENODEV) => "; the device is gone",
        Some(libc::EPERM) => "; run as root or with CAP_NET_ADMIN",
        _ => "",
    }
}

pub(super) fn attach_error(
    device: &Device,
    mode: AttachedMode,
    error: AyaProgramError,
) -> ProgramError {
    ProgramError::Attach {
        device: device.name.clone(),
        mode: mode.name(),
        source: error.into(),
    }
}

pub(super) fn pin_error<E: Into<Cause>>(path: &Path) -> impl FnOnce(E) -> ProgramError {
    let path = path.to_owned();
    move |source| ProgramError::Pin {
        path,
        source: source.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let device = Device {
            name: "eth9".into(),
            index: 9,
        };
        let busy = AyaProgramError::SyscallError(aya::sys::SyscallError {
            call: "bpf_link_create",
            io_error: io::Error::from_raw_os_error(libc::EBUSY),
        });
        let text = attach_error(&device, AttachedMode::Generic, busy).to_string();
        assert!(text.contains("eth9"), "{text}");
        assert!(text.contains("bpf_link_create"), "{text}");
        assert!(text.contains("another XDP program is there"), "{text}");
    }
}
