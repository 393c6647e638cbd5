//! The XDP programs: which packets of a device reach the datapath.
//!
//! [`Program::load`], [`Program::insert`] a socket for each queue, then [`Program::attach`]:
//! in this order a device never runs a program that knows no socket. What is attached is a BPF
//! link, pinned with its program and maps in a folder of a bpffs, so that it outlives the
//! process: while no agent runs, what is ours is dropped and all else passes.
//!
//! ```text
//! <bpffs>/skein/<device>/link-<mode>-<ifindex>   the attachment
//!                        program, xsks, config   for bpftool, and for who comes next
//! ```
//!
//! The next agent finds the pinned link and has the kernel swap the program under it, so the
//! device is at no moment without one. Deliberately absent: taking a device up (the caller's
//! step, after the program is there).

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use aya::maps::{Array, MapError, XskMap};
use aya::pin::PinError;
use aya::programs::links::{FdLink, LinkError, PinnedLink};
use aya::programs::{ProgramError as AyaProgramError, Xdp, XdpMode as AyaMode};
use aya::{Ebpf, EbpfError};

use super::features::Features;
use super::xsk::{Device, Xsk};
use crate::ids::QueueId;

static POD: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod.bpf.o"));
static HOST: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/host.bpf.o"));
static UPLINK: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/uplink.bpf.o"));

/// Bytes of `struct uplink_config` of the uplink's program.
const CONFIG_BYTES: usize = 24;

/// What of an uplink's traffic is the datapath's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// UDP port of the overlay.
    pub port: u16,
    /// This node's address that peers send to.
    pub ipv4: Option<Ipv4Addr>,
    /// The same for IPv6.
    pub ipv6: Option<Ipv6Addr>,
}

impl Overlay {
    /// As the program reads it: network byte order, zeros for an address that is none.
    fn to_bytes(self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        bytes[..2].copy_from_slice(&self.port.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.ipv4.unwrap_or(Ipv4Addr::UNSPECIFIED).octets());
        bytes[8..].copy_from_slice(&self.ipv6.unwrap_or(Ipv6Addr::UNSPECIFIED).octets());
        bytes
    }
}

/// What a device is to us, and so which of its packets are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The host end of a pod's veth: everything.
    Pod,
    /// Our end of the host link: everything.
    Host,
    /// A device that stays the host's: the overlay's packets to our addresses.
    Uplink(Overlay),
}

impl LinkKind {
    fn object(self) -> &'static [u8] {
        match self {
            Self::Pod => POD,
            Self::Host => HOST,
            Self::Uplink(_) => UPLINK,
        }
    }

    fn program(self, frags: bool) -> &'static str {
        match (self, frags) {
            (Self::Pod, false) => "skein_pod",
            (Self::Pod, true) => "skein_pod_frags",
            (Self::Host, false) => "skein_host",
            (Self::Host, true) => "skein_host_frags",
            (Self::Uplink(_), false) => "skein_uplink",
            (Self::Uplink(_), true) => "skein_uplink_frags",
        }
    }
}

/// Where in the kernel the program shall run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver; where that is refused, in the network stack.
    Auto,
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

/// Where in the kernel the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachedMode {
    /// In the driver.
    Native,
    /// In the network stack.
    Generic,
}

impl AttachedMode {
    const ALL: [Self; 2] = [Self::Native, Self::Generic];

    /// The mode's name, as in configuration and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }

    fn to_aya(self) -> AyaMode {
        match self {
            Self::Native => AyaMode::Driver,
            Self::Generic => AyaMode::Skb,
        }
    }
}

type Cause = Box<dyn Error + Send + Sync>;

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
fn errno(error: &(dyn Error + 'static)) -> Option<i32> {
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

/// A loaded program that runs nowhere yet.
#[derive(Debug)]
pub struct Program {
    ebpf: Ebpf,
    kind: LinkKind,
    name: &'static str,
    features: Features,
}

impl Program {
    /// Loads the program for that kind of device.
    pub fn load(kind: LinkKind, features: Features) -> Result<Self, ProgramError> {
        let name = kind.program(features.multi_buffer);
        let failed = |source| ProgramError::Load {
            program: name,
            source,
        };
        let ebpf = Ebpf::load(kind.object()).map_err(|e: EbpfError| failed(e.into()))?;
        let mut program = Self {
            ebpf,
            kind,
            name,
            features,
        };
        program.xdp()?.load().map_err(|e| failed(e.into()))?;
        if let LinkKind::Uplink(overlay) = kind {
            set_overlay(&mut program.ebpf, overlay)?;
        }
        Ok(program)
    }

    fn xdp(&mut self) -> Result<&mut Xdp, ProgramError> {
        let name = self.name;
        self.ebpf
            .program_mut(name)
            .ok_or_else(|| format!("the object has no program {name}").into())
            .and_then(|program| program.try_into().map_err(Cause::from))
            .map_err(|source| ProgramError::Load {
                program: name,
                source,
            })
    }

    /// Has the program send that queue's packets to the socket.
    pub fn insert(&mut self, queue: QueueId, socket: &Xsk) -> Result<(), ProgramError> {
        insert(&mut self.ebpf, queue, socket)
    }

    /// Attaches the program to the device and pins it under `bpffs`, or puts it in the place of
    /// the one that an earlier agent pinned there.
    pub fn attach(
        mut self,
        device: &Device,
        mode: XdpMode,
        bpffs: &Path,
    ) -> Result<ProgramHandle, ProgramError> {
        let pins = Pins::open(bpffs, device)?;
        let wanted: &[AttachedMode] = match mode {
            XdpMode::Native if !self.features.native_xdp => {
                return Err(ProgramError::NativeDisabled {
                    device: device.name.clone(),
                });
            }
            XdpMode::Auto if self.features.native_xdp => &AttachedMode::ALL,
            XdpMode::Native => &[AttachedMode::Native],
            XdpMode::Auto | XdpMode::Generic => &[AttachedMode::Generic],
        };
        let taken_over = self.take_over(device, &pins, wanted)?;
        let (mode, fallback) = match taken_over {
            Some(mode) => (mode, None),
            None => self.attach_new(device, &pins, wanted)?,
        };
        pins.pin_rest(&mut self)?;
        Ok(ProgramHandle {
            ebpf: self.ebpf,
            mode,
            fallback,
            taken_over: taken_over.is_some(),
            pins,
        })
    }

    /// Swaps the program under a pinned link of this device, where there is one in a mode that
    /// is wanted; a pinned link that is none of these is taken away.
    fn take_over(
        &mut self,
        device: &Device,
        pins: &Pins,
        wanted: &[AttachedMode],
    ) -> Result<Option<AttachedMode>, ProgramError> {
        for mode in AttachedMode::ALL {
            if !wanted.contains(&mode) || !pins.has_link(mode) {
                continue;
            }
            let path = pins.link(mode);
            let link = PinnedLink::from_pin(&path).map_err(pin_error(&path))?;
            let link = FdLink::from(link).try_into();
            let link = link.map_err(|e: LinkError| ProgramError::Pin {
                path: path.clone(),
                source: e.into(),
            })?;
            let xdp = self.xdp()?;
            match xdp.attach_to_link(link) {
                // The link lives on by its pin.
                Ok(id) => {
                    drop(xdp.take_link(id));
                    pins.remove_links_except(Some(mode))?;
                    return Ok(Some(mode));
                }
                // The device of that link is gone; this one has only its name.
                Err(error) if errno(&error) == Some(libc::ENOLINK) => {}
                Err(error) => return Err(attach_error(device, mode, error)),
            }
        }
        Ok(None)
    }

    /// Attaches in the first mode that works, without a moment in which a device that is ours
    /// is up without a program.
    fn attach_new(
        &mut self,
        device: &Device,
        pins: &Pins,
        wanted: &[AttachedMode],
    ) -> Result<(AttachedMode, Option<String>), ProgramError> {
        let stale = AttachedMode::ALL.iter().any(|&mode| pins.has_link(mode));
        // Two modes cannot be active at once, so to change it the old link goes first. An
        // uplink must stay up: its overlay packets reach the kernel meanwhile.
        let down = stale && !matches!(self.kind, LinkKind::Uplink(_));
        let flags = |source| ProgramError::Flags {
            device: device.name.clone(),
            source,
        };
        let was_up = down && device.set_up(false).map_err(flags)?;
        pins.remove_links_except(None)?;
        let mut refused = None;
        for &mode in wanted {
            let xdp = self.xdp()?;
            let attached = xdp
                .attach_to_if_index(device.index, mode.to_aya())
                .and_then(|id| xdp.take_link(id));
            match attached {
                Ok(link) => {
                    let path = pins.link(mode);
                    let link: FdLink = link
                        .try_into()
                        .map_err(|e: LinkError| pin_error(&path)(e))?;
                    link.pin(&path).map_err(pin_error(&path))?;
                    if was_up {
                        device.set_up(true).map_err(flags)?;
                    }
                    return Ok((mode, refused.map(|e: ProgramError| e.to_string())));
                }
                // Another program there is refused in every mode: the first says it best.
                Err(error) if refused.is_none() => {
                    refused = Some(attach_error(device, mode, error));
                }
                Err(_) => {}
            }
        }
        Err(refused.unwrap_or_else(|| ProgramError::NativeDisabled {
            device: device.name.clone(),
        }))
    }
}

fn attach_error(device: &Device, mode: AttachedMode, error: AyaProgramError) -> ProgramError {
    ProgramError::Attach {
        device: device.name.clone(),
        mode: mode.name(),
        source: error.into(),
    }
}

fn map<'a, M>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<M, ProgramError>
where
    M: TryFrom<&'a mut aya::maps::Map, Error = MapError>,
{
    ebpf.map_mut(name)
        .ok_or_else(|| "the object has no such map".into())
        .and_then(|map| M::try_from(map).map_err(Cause::from))
        .map_err(|source| ProgramError::Map { map: name, source })
}

fn insert(ebpf: &mut Ebpf, queue: QueueId, socket: &Xsk) -> Result<(), ProgramError> {
    let mut xsks: XskMap<_> = map(ebpf, "xsks")?;
    xsks.set(queue.0, socket.as_raw_fd(), 0)
        .map_err(|e| ProgramError::Map {
            map: "xsks",
            source: e.into(),
        })
}

fn set_overlay(ebpf: &mut Ebpf, overlay: Overlay) -> Result<(), ProgramError> {
    let mut config: Array<_, [u8; CONFIG_BYTES]> = map(ebpf, "config")?;
    config
        .set(0, overlay.to_bytes(), 0)
        .map_err(|e| ProgramError::Map {
            map: "config",
            source: e.into(),
        })
}

/// A program that runs on a device.
///
/// Dropping the handle leaves the program there, by its pin; [`detach`](Self::detach) takes it
/// away.
#[derive(Debug)]
pub struct ProgramHandle {
    ebpf: Ebpf,
    mode: AttachedMode,
    fallback: Option<String>,
    taken_over: bool,
    pins: Pins,
}

impl ProgramHandle {
    /// The mode that it runs in.
    #[must_use]
    pub fn mode(&self) -> AttachedMode {
        self.mode
    }

    /// Why it does not run in native mode although that was tried.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Whether it took the place of an earlier agent's program.
    #[must_use]
    pub fn taken_over(&self) -> bool {
        self.taken_over
    }

    /// Has the program send that queue's packets to another socket.
    pub fn insert(&mut self, queue: QueueId, socket: &Xsk) -> Result<(), ProgramError> {
        insert(&mut self.ebpf, queue, socket)
    }

    /// Changes what of an uplink's traffic is ours.
    pub fn set_overlay(&mut self, overlay: Overlay) -> Result<(), ProgramError> {
        set_overlay(&mut self.ebpf, overlay)
    }

    /// Takes the program off the device and removes the pins. Take a device that is ours down
    /// before: without a program the kernel forwards what comes in.
    pub fn detach(self) -> Result<(), ProgramError> {
        self.pins.remove_all()
    }
}

fn pin_error<E: Into<Cause>>(path: &Path) -> impl FnOnce(E) -> ProgramError {
    let path = path.to_owned();
    move |source| ProgramError::Pin {
        path,
        source: source.into(),
    }
}

/// A device's folder of pins.
#[derive(Debug)]
struct Pins {
    folder: PathBuf,
    index: u32,
}

impl Pins {
    fn open(bpffs: &Path, device: &Device) -> Result<Self, ProgramError> {
        // A bpffs takes no dots in names, and a device no colons.
        let folder = bpffs.join("skein").join(device.name.replace('.', ":"));
        std::fs::create_dir_all(&folder).map_err(pin_error(&folder))?;
        Ok(Self {
            folder,
            index: device.index,
        })
    }

    fn link(&self, mode: AttachedMode) -> PathBuf {
        self.folder
            .join(format!("link-{}-{}", mode.name(), self.index))
    }

    fn has_link(&self, mode: AttachedMode) -> bool {
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
    fn remove_links_except(&self, mode: Option<AttachedMode>) -> Result<(), ProgramError> {
        let keep = mode.map(|mode| self.link(mode));
        let keep = keep.as_deref().and_then(Path::file_name);
        self.remove(|name| !name.starts_with("link-") || Some(name.as_ref()) == keep)
    }

    fn remove_all(&self) -> Result<(), ProgramError> {
        self.remove(|_| false)?;
        std::fs::remove_dir(&self.folder).map_err(pin_error(&self.folder))
    }

    /// Pins program and maps in the place of an earlier agent's.
    fn pin_rest(&self, program: &mut Program) -> Result<(), ProgramError> {
        for name in ["xsks", "config"] {
            if let Some(map) = program.ebpf.map(name) {
                self.replace(name, |path| map.pin(path))?;
            }
        }
        let xdp = program.xdp()?;
        self.replace("program", |path| xdp.pin(path))
    }

    fn replace(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overlay_lies_as_the_program_reads_it() {
        let bytes = Overlay {
            port: 8472,
            ipv4: Some([192, 0, 2, 1].into()),
            ipv6: None,
        }
        .to_bytes();
        assert_eq!(bytes[..8], [0x21, 0x18, 0, 0, 192, 0, 2, 1]);
        assert_eq!(bytes[8..], [0; 16]);
    }

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
