//! What this kernel can do, found by trying, and what the configuration does without.
//!
//! Nothing is bound and no device touched: a kernel checks the flags of a registration and of a
//! bind before it looks for the device. Whether a *device* runs XDP in native mode shows only
//! when a program is attached to it, so `native_xdp` says no more than "may be tried".

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use super::pool::{FramePool, FrameStore};
use super::socket::{bind, open_socket};
use super::sys::{self, SockaddrXdp};
use super::umem::UmemError;
use super::xsk::register_umem;

/// A device index that no device has.
const NO_DEVICE: u32 = i32::MAX as u32;

/// Names of the features, as the configuration's `debug.disable` takes them.
pub const FEATURE_NAMES: [&str; 3] = ["multi-buffer", "tx-metadata", "native-xdp"];

/// Why the features could not be found out.
#[derive(Debug, thiserror::Error)]
pub enum FeatureError {
    /// A name in the list of features to do without.
    #[error("no kernel feature is called {0:?}; there are {FEATURE_NAMES:?}")]
    Unknown(String),
    /// AF_XDP itself is missing or refused.
    #[error("AF_XDP: {call}: {source}; Skein needs CONFIG_XDP_SOCKETS and root (CAP_NET_RAW)")]
    NoXdpSockets {
        /// The system call.
        call: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Packet memory to try with.
    #[error(transparent)]
    Umem(#[from] UmemError),
}

/// Features of the kernel that the datapath uses where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Packets of several descriptors: AF_XDP multi-buffer (Linux 6.6).
    pub multi_buffer: bool,
    /// Partial checksums handed to the kernel: transmit metadata (Linux 6.11).
    pub tx_metadata: bool,
    /// XDP in the driver may be tried.
    pub native_xdp: bool,
}

impl Features {
    /// None of them: what the oldest kernel offers.
    pub const NONE: Self = Self {
        multi_buffer: false,
        tx_metadata: false,
        native_xdp: false,
    };

    /// Tries each feature, except for those in `disable` ([`FEATURE_NAMES`]).
    pub fn probe(disable: &[String]) -> Result<Self, FeatureError> {
        if let Some(unknown) = disable
            .iter()
            .find(|name| !FEATURE_NAMES.contains(&name.as_str()))
        {
            return Err(FeatureError::Unknown(unknown.clone()));
        }
        let wanted = |name: &str| !disable.iter().any(|disabled| disabled == name);
        // Without a plain registration nothing works, whatever is disabled.
        let plain = try_registration(false)?;
        plain.map_err(|source| FeatureError::NoXdpSockets {
            call: "setsockopt XDP_UMEM_REG",
            source,
        })?;
        Ok(Self {
            multi_buffer: wanted("multi-buffer") && try_multi_buffer()?,
            tx_metadata: wanted("tx-metadata") && try_registration(true)?.is_ok(),
            native_xdp: wanted("native-xdp"),
        })
    }
}

fn try_registration(tx_metadata: bool) -> Result<io::Result<()>, FeatureError> {
    let store = FrameStore::new(1)?;
    let pool = FramePool::new(store);
    let socket = open_socket().map_err(|source| FeatureError::NoXdpSockets {
        call: "socket",
        source,
    })?;
    Ok(register_umem(socket.as_fd(), pool.umem(), tx_metadata))
}

fn try_multi_buffer() -> Result<bool, FeatureError> {
    let failed = |call| move |source| FeatureError::NoXdpSockets { call, source };
    let socket = open_socket().map_err(failed("socket"))?;
    let address = SockaddrXdp {
        family: libc::AF_XDP as u16,
        flags: sys::XDP_COPY | sys::XDP_USE_SG,
        ifindex: NO_DEVICE,
        queue_id: 0,
        shared_umem_fd: 0,
    };
    match bind(socket.as_fd(), &address) {
        // The flag was taken, the device is missing.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(failed("bind")(error)),
        Ok(()) => Ok(true),
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = [self.multi_buffer, self.tx_metadata, self.native_xdp];
        for (index, (name, value)) in FEATURE_NAMES.iter().zip(values).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{name}: {}", if value { "yes" } else { "no" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_refused_before_anything_is_tried() {
        let error = Features::probe(&["tx-metdata".into()]).unwrap_err();
        assert!(error.to_string().contains("\"tx-metdata\""), "{error}");
        assert!(error.to_string().contains("multi-buffer"), "{error}");
    }

    #[test]
    fn what_is_found_can_be_read() {
        let features = Features {
            multi_buffer: true,
            ..Features::NONE
        };
        assert_eq!(
            features.to_string(),
            "multi-buffer: yes, tx-metadata: no, native-xdp: no"
        );
    }
}
