//! The XDP programs: which packets of a device reach the datapath.
//!
//! [`Program::open`], [`Program::insert`] a socket for each queue, then [`Program::attach`]:
//! in this order a device never begins to run a program that knows no socket. What is attached
//! is a BPF link, pinned with its program and maps in a folder of a bpffs, so that it outlives
//! the process: while no agent runs, what is ours is dropped and all else passes.
//!
//! ```text
//! <bpffs>/skein/<device>/link-<mode>-<ifindex>   the attachment
//!                        program, xsks, config   for bpftool, and for who comes next
//! ```
//!
//! The next agent finds the pinned link. Where its program is the same as ours, only sockets
//! are put into its map; else the kernel swaps the program under the link, so the device is at
//! no moment without one. Deliberately absent: taking a device up (the caller's step, after the
//! program is there), and where code and maps come from ([`code`](super::code)).

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::{Duration, Instant};

use aya::programs::XdpMode as AyaMode;
use aya::programs::links::{FdLink, LinkError, PinnedLink};
use aya::programs::xdp::XdpLink;

use super::claims::Claims;
use super::code::{CONFIG_BYTES, Code, Maps};
use super::device::Device;
use super::features::Features;
use super::pins::Pins;
pub use super::program_error::ProgramError;
use super::program_error::{attach_error, errno, pin_error};
use super::xsk::Xsk;
use crate::ids::QueueId;

/// How long the kernel may take to let go of a link whose pin was removed: it does so behind a
/// grace period, a few milliseconds on a quiet machine.
const RELEASE: Duration = Duration::from_secs(2);

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
    pub(super) fn to_bytes(self) -> [u8; CONFIG_BYTES] {
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
    pub(super) fn program(self, frags: bool) -> &'static str {
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
    pub(super) const ALL: [Self; 2] = [Self::Native, Self::Generic];

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

/// A program for a device, and the pins of that device.
#[derive(Debug)]
pub struct Program {
    code: Code,
    pins: Pins,
    device: Device,
    kind: LinkKind,
    features: Features,
}

impl Program {
    /// The program for a device of that kind: the one that is pinned for it under `bpffs`,
    /// where that is the same, else loaded anew.
    pub fn open(
        device: &Device,
        kind: LinkKind,
        features: Features,
        bpffs: &Path,
    ) -> Result<Self, ProgramError> {
        let pins = Pins::open(bpffs, device)?;
        let mut code = match Code::pinned(kind, features.multi_buffer, &pins)? {
            Some(pinned) => pinned,
            None => Code::load(kind, features.multi_buffer, &pins)?,
        };
        if let LinkKind::Uplink(overlay) = kind {
            code.maps.set_overlay(overlay)?;
        }
        Ok(Self {
            code,
            pins,
            device: device.clone(),
            kind,
            features,
        })
    }

    /// Has the program send that queue's packets to the socket: at once, where it already runs
    /// on the device.
    pub fn insert(&mut self, queue: QueueId, socket: &Xsk) -> Result<(), ProgramError> {
        self.code.maps.insert(queue, socket)
    }

    /// Has claims of ports reach an uplink's program from here on.
    pub fn share(&self, claims: &Claims) -> Result<(), ProgramError> {
        self.code.maps.share(claims)
    }

    /// Attaches the program to the device and pins it under `bpffs`, or puts it in the place of
    /// the one that an earlier agent pinned there.
    pub fn attach(mut self, mode: XdpMode) -> Result<ProgramHandle, ProgramError> {
        let wanted: &[AttachedMode] = match mode {
            XdpMode::Native if !self.features.native_xdp => {
                return Err(ProgramError::NativeDisabled {
                    device: self.device.name,
                });
            }
            XdpMode::Auto if self.features.native_xdp => &AttachedMode::ALL,
            XdpMode::Native => &[AttachedMode::Native],
            XdpMode::Auto | XdpMode::Generic => &[AttachedMode::Generic],
        };
        let taken_over = self.take_over(wanted)?;
        let (mode, fallback) = match taken_over {
            Some(mode) => (mode, None),
            None => self.attach_new(wanted)?,
        };
        self.code.pin(&self.pins)?;
        Ok(ProgramHandle {
            maps: self.code.maps,
            mode,
            fallback,
            taken_over: taken_over.is_some(),
            pins: self.pins,
        })
    }

    /// Swaps the program under a pinned link of this device, where there is one in a mode that
    /// is wanted; a pinned link that is none of these is taken away.
    fn take_over(&mut self, wanted: &[AttachedMode]) -> Result<Option<AttachedMode>, ProgramError> {
        let pins = &self.pins;
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
            let xdp = self.code.xdp()?;
            // With the program that runs there already this changes nothing, and only asks
            // whether the link still has its device.
            match xdp.attach_to_link(link) {
                // The link lives on by its pin.
                Ok(id) => {
                    drop(xdp.take_link(id));
                    pins.remove_links_except(Some(mode))?;
                    return Ok(Some(mode));
                }
                // The device of that link is gone; this one has only its name.
                Err(error) if errno(&error) == Some(libc::ENOLINK) => {}
                Err(error) => return Err(attach_error(&self.device, mode, error)),
            }
        }
        Ok(None)
    }

    /// Attaches in one mode; while the device is busy it tries again for as long as `patience`.
    fn attach_in(
        &mut self,
        mode: AttachedMode,
        patience: Duration,
    ) -> Result<Result<XdpLink, aya::programs::ProgramError>, ProgramError> {
        let start = Instant::now();
        let xdp = self.code.xdp()?;
        loop {
            let attached = xdp
                .attach_to_if_index(self.device.index, mode.to_aya())
                .and_then(|id| xdp.take_link(id));
            let busy = |error: &aya::programs::ProgramError| {
                matches!(errno(error), Some(libc::EBUSY | libc::EEXIST))
            };
            if attached.as_ref().is_err_and(busy) && start.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            return Ok(attached);
        }
    }

    /// Attaches in the first mode that works, without a moment in which a device that is ours
    /// is up without a program.
    fn attach_new(
        &mut self,
        wanted: &[AttachedMode],
    ) -> Result<(AttachedMode, Option<String>), ProgramError> {
        let stale = AttachedMode::ALL
            .iter()
            .any(|&mode| self.pins.has_link(mode));
        // Two modes cannot be active at once, so to change it the old link goes first. An
        // uplink must stay up: its overlay packets reach the kernel meanwhile.
        let down = stale && !matches!(self.kind, LinkKind::Uplink(_));
        let name = self.device.name.clone();
        let flags = |source| ProgramError::Flags {
            device: name.clone(),
            source,
        };
        let was_up = down && self.device.set_up(false).map_err(flags)?;
        self.pins.remove_links_except(None)?;
        let mut refused = None;
        // The kernel lets go of an unpinned link a little later.
        let patience = if stale { RELEASE } else { Duration::ZERO };
        for &mode in wanted {
            match self.attach_in(mode, patience)? {
                Ok(link) => {
                    let path = self.pins.link(mode);
                    let link: FdLink = link
                        .try_into()
                        .map_err(|e: LinkError| pin_error(&path)(e))?;
                    link.pin(&path).map_err(pin_error(&path))?;
                    if was_up {
                        self.device.set_up(true).map_err(flags)?;
                    }
                    return Ok((mode, refused.map(|e: ProgramError| e.to_string())));
                }
                // Another program there is refused in every mode: the first says it best.
                Err(error) if refused.is_none() => {
                    refused = Some(attach_error(&self.device, mode, error));
                }
                Err(_) => {}
            }
        }
        Err(refused.unwrap_or_else(|| ProgramError::NativeDisabled {
            device: self.device.name.clone(),
        }))
    }
}

/// A program that runs on a device.
///
/// Dropping the handle leaves the program there, by its pin; [`detach`](Self::detach) takes it
/// away.
#[derive(Debug)]
pub struct ProgramHandle {
    maps: Maps,
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
        self.maps.insert(queue, socket)
    }

    /// Changes what of an uplink's traffic is ours.
    pub fn set_overlay(&mut self, overlay: Overlay) -> Result<(), ProgramError> {
        self.maps.set_overlay(overlay)
    }

    /// Takes the program off the device and removes the pins. Take a device that is ours down
    /// before: without a program the kernel forwards what comes in.
    pub fn detach(self) -> Result<(), ProgramError> {
        self.pins.remove_all()
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
}
