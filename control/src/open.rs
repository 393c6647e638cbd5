//! Opening and closing devices as the datapath's links.
//!
//! The one place where control touches AF_XDP and XDP programs; behind a trait, so that the
//! whole agent also runs over links in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::Link;
use skein_dataplane::io::claims::Claims;
use skein_dataplane::io::device::Device;
use skein_dataplane::io::features::{FEATURE_NAMES, Features};
use skein_dataplane::io::open::{OpenError, OpenOptions, open_links};
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::program::{LinkKind, Overlay, ProgramHandle, XdpMode};
use skein_dataplane::io::xsk::XskFactory;

use crate::config::{Config, PodXdpMode, UplinkXdpMode};
use crate::host::{HostDevice, OUR_END};
use crate::netlink::Netlink;
use crate::state::Endpoint;

/// Where XDP programs are pinned.
const BPFFS: &str = "/sys/fs/bpf";

/// The most queues of an uplink: as many as its program's map has places. The program drops
/// what comes in by a queue that has no socket, so none may be left out.
const MAX_QUEUES: u32 = 256;

/// A device, opened.
pub struct Opened {
    /// A link for each queue.
    pub links: Vec<(LinkId, Box<dyn Link>)>,
    /// What attaches the device to them.
    pub attachment: Box<dyn Attached>,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened")
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}

/// The program on a device.
pub trait Attached: Send {
    /// `native` or `generic`, or how else packets get there.
    fn mode(&self) -> &'static str;

    /// Why it is not in the mode that was wished for.
    fn fallback(&self) -> Option<String> {
        None
    }

    /// Changes what of an uplink's traffic is ours.
    fn set_overlay(&mut self, overlay: Overlay) -> Result<(), String>;

    /// Takes it off.
    fn detach(self: Box<Self>) -> Result<(), String>;
}

/// Opens devices.
pub trait Opener: Send {
    /// What the kernel offers, for status.
    fn features(&self) -> String;

    /// Opens the host end of a pod's veth, and takes it up once its program is there.
    fn open_pod(
        &mut self,
        endpoint: &Endpoint,
        link: LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String>;

    /// Opens the datapath's end of the host link, and takes it up once its program is there.
    fn open_host(
        &mut self,
        device: &HostDevice,
        link: LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String>;

    /// Removes the host end of a pod's veth, whose links are closed.
    fn remove_pod(&mut self, endpoint: &Endpoint) -> Result<(), String>;

    /// Opens an uplink, asking `number` for each queue's link. `claims` are the ports of the
    /// node's that it sends to the datapath beside the overlay's.
    fn open_uplink(
        &mut self,
        device: &str,
        overlay: Overlay,
        claims: &Claims,
        number: &mut dyn FnMut() -> LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String>;
}

/// Opens real devices.
pub struct XdpOpener {
    factory: Arc<XskFactory>,
    netlink: Netlink,
    bpffs: PathBuf,
    pods: XdpMode,
    uplink: XdpMode,
}

impl XdpOpener {
    /// Registers the packet memory; one line of error that says what to do.
    pub fn new(config: &Config, store: &Arc<FrameStore>) -> Result<Self, String> {
        // The others are control's own.
        let mut disable = config.debug.disable.clone();
        disable.retain(|name| FEATURE_NAMES.contains(&name.as_str()));
        let features = Features::probe(&disable).map_err(|e| e.to_string())?;
        let factory = XskFactory::new(store.umem().clone(), features).map_err(|e| e.to_string())?;
        Ok(Self {
            factory,
            netlink: Netlink::new().map_err(|e| format!("netlink: {e}"))?,
            bpffs: BPFFS.into(),
            pods: match config.pods.xdp_mode {
                PodXdpMode::Generic => XdpMode::Generic,
                PodXdpMode::Native => XdpMode::Native,
            },
            uplink: match config.uplink.xdp_mode {
                UplinkXdpMode::Auto => XdpMode::Auto,
                UplinkXdpMode::Native => XdpMode::Native,
                UplinkXdpMode::Generic => XdpMode::Generic,
            },
        })
    }

    fn open(
        &self,
        device: &Device,
        queues: &[(QueueId, LinkId)],
        (kind, claims): (LinkKind, Option<&Claims>),
        mode: XdpMode,
        pool: &mut FramePool,
    ) -> Result<Opened, OpenError> {
        let options = OpenOptions {
            claims,
            ..OpenOptions::new(kind, mode, &self.bpffs)
        };
        let (links, handle) = open_links(device, queues, &options, &self.factory, pool)?;
        let ids = queues.iter().map(|&(_, id)| id);
        let boxed = links
            .into_iter()
            .map(|link| Box::new(link) as Box<dyn Link>);
        Ok(Opened {
            links: ids.zip(boxed).collect(),
            attachment: Box::new(Handle(handle)),
        })
    }

    /// Opens our end of a veth, and takes it up once its program is there.
    fn open_veth(
        &mut self,
        device: &Device,
        kind: LinkKind,
        link: LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String> {
        let queues = [(QueueId(0), link)];
        let opened = self
            .open(device, &queues, (kind, None), self.pods, pool)
            .map_err(|e| e.to_string())?;
        if let Err(error) = self.netlink.set_up(device.index) {
            for (_, link) in opened.links {
                link.close(pool);
            }
            // The device goes with the failed ADD, and the program with it.
            let _ = opened.attachment.detach();
            return Err(format!("taking {} up: {error}", device.name));
        }
        Ok(opened)
    }

    /// How many queues the device has; some of them may be switched off.
    fn queues(&mut self, device: &Device) -> Result<u32, String> {
        let devices = self
            .netlink
            .devices()
            .map_err(|e| format!("netlink: {e}"))?;
        let found = devices.iter().find(|found| found.index == device.index);
        Ok(found.map_or(1, |found| found.queues).clamp(1, MAX_QUEUES))
    }
}

struct Handle(ProgramHandle);

impl Attached for Handle {
    fn mode(&self) -> &'static str {
        self.0.mode().name()
    }

    fn fallback(&self) -> Option<String> {
        self.0.fallback().map(str::to_owned)
    }

    fn set_overlay(&mut self, overlay: Overlay) -> Result<(), String> {
        self.0.set_overlay(overlay).map_err(|e| e.to_string())
    }

    fn detach(self: Box<Self>) -> Result<(), String> {
        self.0.detach().map_err(|e| e.to_string())
    }
}

impl Opener for XdpOpener {
    fn features(&self) -> String {
        self.factory.features().to_string()
    }

    fn open_pod(
        &mut self,
        endpoint: &Endpoint,
        link: LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String> {
        let name = &endpoint.host_ifname;
        let device = Device::named(name).map_err(|e| format!("device {name}: {e}"))?;
        if Some(device.index) != endpoint.ifindex {
            return Err(format!(
                "device {name} has index {}, not {} as at its ADD",
                device.index,
                endpoint.ifindex.unwrap_or_default()
            ));
        }
        self.open_veth(&device, LinkKind::Pod, link, pool)
    }

    fn open_host(
        &mut self,
        device: &HostDevice,
        link: LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String> {
        let found = Device::named(OUR_END).map_err(|e| format!("device {OUR_END}: {e}"))?;
        if found.index != device.our_index {
            return Err(format!("device {OUR_END} is another by now"));
        }
        self.open_veth(&found, LinkKind::Host, link, pool)
    }

    fn remove_pod(&mut self, endpoint: &Endpoint) -> Result<(), String> {
        let name = &endpoint.host_ifname;
        // By name and index: an index alone may be another device's by now.
        let Ok(device) = Device::named(name) else {
            return Ok(());
        };
        if Some(device.index) != endpoint.ifindex {
            return Ok(());
        }
        self.netlink
            .delete(device.index)
            .map_err(|e| format!("removing device {name}: {e}"))
    }

    fn open_uplink(
        &mut self,
        device: &str,
        overlay: Overlay,
        claims: &Claims,
        number: &mut dyn FnMut() -> LinkId,
        pool: &mut FramePool,
    ) -> Result<Opened, String> {
        let device = Device::named(device)
            .map_err(|e| format!("uplink {device}: {e}; see uplink.interfaces"))?;
        let mut queues: Vec<_> = (0..self.queues(&device)?)
            .map(|queue| (QueueId(queue), number()))
            .collect();
        loop {
            let kind = LinkKind::Uplink(overlay);
            match self.open(&device, &queues, (kind, Some(claims)), self.uplink, pool) {
                Ok(opened) => return Ok(opened),
                // A device may have more queues than are switched on: the first that is not
                // tells how many are.
                Err(OpenError::Socket(error))
                    if error.queue > 0
                        && error.source.raw_os_error()
                            == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    queues.truncate(error.queue as usize);
                }
                Err(error) => return Err(format!("uplink {}: {error}", device.name)),
            }
        }
    }
}

/// Removes what an earlier agent pinned for a device that is gone.
pub fn remove_stale_pins(device: &str) {
    let folder = Path::new(BPFFS).join("skein").join(device);
    if let Err(error) = std::fs::remove_dir_all(&folder)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(folder = %folder.display(), %error, "stale pins stay");
    }
}
