//! Offload features of a device, read and set by the names that `ethtool -k` shows the kernel
//! use (`tx-tcp-segmentation`, `rx-gro`, …).
//!
//! Through the `SIOCETHTOOL` ioctl (`linux/ethtool.h`): names come as the string set
//! `ETH_SS_FEATURES`, states as a bit set in blocks of 32. A device is named, not numbered,
//! in the calling thread's network namespace at the time of [`Ethtool::open`].
#![expect(unsafe_code, reason = "ioctl(2) has no safe wrapper in std")]

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
/// Length of one name, NUL included.
const ETH_GSTRING_LEN: usize = 32;
/// More features than any kernel has; a larger answer is refused.
const MAX_FEATURES: u32 = 1024;

/// One feature of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The kernel's name.
    pub name: String,
    /// In force now.
    pub is_on: bool,
    /// Cannot be changed (`[fixed]`).
    pub is_fixed: bool,
}

/// What turning features off or on did not achieve; empty if all is as wished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shortfall {
    /// Features that kept their old state: fixed, or held by others that depend on them.
    pub unchanged: Vec<String>,
    /// Names that this kernel does not have.
    pub unknown: Vec<String>,
}

/// Why a device's features could not be read or set.
#[derive(Debug, thiserror::Error)]
#[error("ethtool {action} of {ifname}: {source}")]
pub struct EthtoolError {
    action: &'static str,
    ifname: String,
    source: io::Error,
}

/// A handle on one device's features.
pub struct Ethtool {
    socket: OwnedFd,
    ifname: String,
}

/// `struct ifreq` as far as `SIOCETHTOOL` reads it.
#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    data: *mut libc::c_void,
    rest: [u8; 16],
}

const _: () = assert!(size_of::<IfReq>() == size_of::<libc::ifreq>());

impl Ethtool {
    /// Opens the device of that name in the calling thread's network namespace.
    pub fn open(ifname: &str) -> Result<Self, EthtoolError> {
        let error = |source| EthtoolError {
            action: "open",
            ifname: ifname.to_owned(),
            source,
        };
        if ifname.is_empty() || ifname.len() >= libc::IFNAMSIZ || ifname.contains('\0') {
            return Err(error(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: socket(2) takes three numbers and touches no memory of ours.
        let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if raw < 0 {
            return Err(error(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new, valid (checked above) and owned by nobody else.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self {
            socket,
            ifname: ifname.to_owned(),
        })
    }

    /// Every feature that the kernel knows, in its own order.
    pub fn features(&self) -> Result<Vec<Feature>, EthtoolError> {
        let names = self.names()?;
        let blocks = names.len().div_ceil(32);
        // struct ethtool_gfeatures: cmd, size, then {available, requested, active,
        // never_changed} for each block.
        let mut request = vec![0; 2 + 4 * blocks];
        request[0] = ETHTOOL_GFEATURES;
        request[1] = self.word("read features", blocks)?;
        self.ioctl("read features", &mut request)?;
        let bit = |index: usize, word: usize| {
            let block = request.get(2 + 4 * (index / 32) + word).copied();
            block.unwrap_or(0) >> (index % 32) & 1 == 1
        };
        Ok(names
            .into_iter()
            .enumerate()
            .filter(|(_, name)| !name.is_empty())
            .map(|(index, name)| Feature {
                name,
                is_on: bit(index, 2),
                is_fixed: !bit(index, 0) || bit(index, 3),
            })
            .collect())
    }

    /// Turns the named features on or off and reads back what came of it.
    pub fn set_features<S: AsRef<str>>(
        &self,
        wanted: &[S],
        on: bool,
    ) -> Result<Shortfall, EthtoolError> {
        let names = self.names()?;
        let wanted: BTreeSet<&str> = wanted.iter().map(AsRef::as_ref).collect();
        let blocks = names.len().div_ceil(32);
        // struct ethtool_sfeatures: cmd, size, then {valid, requested} for each block. A bit
        // that cannot be changed makes the kernel say so in the return value alone.
        let mut request = vec![0_u32; 2 + 2 * blocks];
        request[0] = ETHTOOL_SFEATURES;
        request[1] = self.word("set features", blocks)?;
        for (index, name) in names.iter().enumerate() {
            if wanted.contains(name.as_str()) {
                let bit = 1 << (index % 32);
                request[2 + 2 * (index / 32)] |= bit;
                request[3 + 2 * (index / 32)] |= if on { bit } else { 0 };
            }
        }
        self.ioctl("set features", &mut request)?;
        let unchanged = self
            .features()?
            .into_iter()
            .filter(|feature| wanted.contains(feature.name.as_str()) && feature.is_on != on)
            .map(|feature| feature.name)
            .collect();
        let unknown = wanted
            .into_iter()
            .filter(|wanted| !names.iter().any(|name| name == wanted))
            .map(str::to_owned)
            .collect();
        Ok(Shortfall { unchanged, unknown })
    }

    /// Feature names by bit number.
    fn names(&self) -> Result<Vec<String>, EthtoolError> {
        let action = "read feature names";
        // struct ethtool_sset_info: cmd, reserved, u64 mask, then a length for each set bit.
        let mut info = [ETHTOOL_GSSET_INFO, 0, 1 << ETH_SS_FEATURES, 0, 0];
        if cfg!(target_endian = "big") {
            info.swap(2, 3);
        }
        self.ioctl(action, &mut info)?;
        let count = info[4];
        if count == 0 || count > MAX_FEATURES {
            return Err(self.error(action, io::Error::from_raw_os_error(libc::EOPNOTSUPP)));
        }
        // struct ethtool_gstrings: cmd, string set, length, then 32 bytes a name.
        let words = count as usize * ETH_GSTRING_LEN / size_of::<u32>();
        let mut request = vec![0; 3 + words];
        request[0] = ETHTOOL_GSTRINGS;
        request[1] = ETH_SS_FEATURES;
        request[2] = count;
        self.ioctl(action, &mut request)?;
        let bytes: Vec<u8> = request[3..].iter().flat_map(|w| w.to_ne_bytes()).collect();
        Ok(bytes
            .chunks_exact(ETH_GSTRING_LEN)
            .map(|name| {
                let text = name.split(|byte| *byte == 0).next().unwrap_or_default();
                String::from_utf8_lossy(text).into_owned()
            })
            .collect())
    }

    /// One ethtool command: the kernel reads and writes `request` in place. How much of it
    /// follows from the counts inside, so callers size it by them.
    fn ioctl(&self, action: &'static str, request: &mut [u32]) -> Result<(), EthtoolError> {
        let mut ifreq = IfReq {
            name: [0; libc::IFNAMSIZ],
            data: request.as_mut_ptr().cast(),
            rest: [0; 16],
        };
        ifreq.name[..self.ifname.len()].copy_from_slice(self.ifname.as_bytes());
        // SAFETY: the descriptor is open; `ifreq` is as large as the kernel's struct (asserted
        // above), its name is NUL-terminated (`open` checks the length), and `data` points to
        // `request`, which lives through the call and is as long as the counts in it say:
        // 5 words for one string set; 3 words and 32 bytes a name; 2 words and 4 (get) or
        // 2 (set) words a block.
        let result =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut ifreq) };
        if result < 0 {
            return Err(self.error(action, io::Error::last_os_error()));
        }
        Ok(())
    }

    fn word(&self, action: &'static str, count: usize) -> Result<u32, EthtoolError> {
        u32::try_from(count)
            .map_err(|_| self.error(action, io::Error::from_raw_os_error(libc::EOVERFLOW)))
    }

    fn error(&self, action: &'static str, source: io::Error) -> EthtoolError {
        EthtoolError {
            action,
            ifname: self.ifname.clone(),
            source,
        }
    }
}
