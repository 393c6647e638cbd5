//! A program's code and its maps: loaded anew from the object built into this binary, or found
//! pinned where an earlier agent left it.
//!
//! A program that is already there and does the same is kept: loading one for each of hundreds
//! of pods costs a restarted agent seconds in which they are cut off (the verifier, the maps,
//! and a change of every device under the kernel's network lock), and brings nothing new.
//! Deliberately absent: which device it runs on ([`program`](super::program)).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use aya::maps::{Array, Map, MapData, MapInfo, XskMap};
use aya::programs::Xdp;
use aya::{Ebpf, EbpfLoader};
use aya_obj::programs::XdpAttachType;

use super::claims::Claims;
use super::pins::Pins;
use super::program::{LinkKind, Overlay};
use super::program_error::{Cause, ProgramError};
use super::xsk::Xsk;
use crate::ids::QueueId;

static POD: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod.bpf.o"));
static HOST: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/host.bpf.o"));
static UPLINK: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/uplink.bpf.o"));

/// One for all devices. A loader begins with parsing the kernel's types, which takes fifty
/// milliseconds; the programs touch no kernel structure, so nothing is looked up in them.
static LOADER: LazyLock<Mutex<EbpfLoader<'static>>> = LazyLock::new(|| {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    Mutex::new(loader)
});

/// The kernel's tag of each program that this process has loaded, by name. It is a hash over
/// the instructions, in which the numbers of maps count as zero.
static TAGS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// The longest name of a program that the kernel keeps (`BPF_OBJ_NAME_LEN`, less its end).
const KERNEL_NAME: usize = 15;

/// The sockets of a device's queues, in every program.
const XSKS: &str = "xsks";

/// What an uplink's program takes for ours.
const CONFIG: &str = "config";

/// The ports that the datapath has claimed of the node's; one map for all uplinks.
const CLAIMS: &str = "claims";

/// The pin of the program itself.
const PROGRAM: &str = "program";

/// Bytes of `struct uplink_config` of the uplink's program.
pub(super) const CONFIG_BYTES: usize = 24;

/// The maps of a program.
#[derive(Debug)]
pub(super) struct Maps {
    xsks: Map,
    config: Option<Map>,
    claims: Option<Map>,
}

impl Maps {
    /// The maps that such a device's program has, each found by its name.
    fn find(
        kind: LinkKind,
        mut map: impl FnMut(&'static str) -> Result<Map, Cause>,
    ) -> Result<Self, ProgramError> {
        let mut named = |name| map(name).map_err(map_error(name));
        let is_uplink = matches!(kind, LinkKind::Uplink(_));
        Ok(Self {
            xsks: named(XSKS)?,
            config: if is_uplink {
                Some(named(CONFIG)?)
            } else {
                None
            },
            claims: if is_uplink {
                Some(named(CLAIMS)?)
            } else {
                None
            },
        })
    }

    /// Those that are a device's own.
    fn named(&self) -> impl Iterator<Item = (&'static str, &Map)> {
        let config = self.config.iter().map(|map| (CONFIG, map));
        std::iter::once((XSKS, &self.xsks)).chain(config)
    }

    /// Has the program send that queue's packets to the socket.
    pub(super) fn insert(&mut self, queue: QueueId, socket: &Xsk) -> Result<(), ProgramError> {
        XskMap::try_from(&mut self.xsks)
            .and_then(|mut xsks| xsks.set(queue.0, socket.as_raw_fd(), 0))
            .map_err(map_error(XSKS))
    }

    /// Has claims reach the program from here on. The programs of other devices do not ask.
    pub(super) fn share(&self, claims: &Claims) -> Result<(), ProgramError> {
        let Some(Map::Array(map)) = &self.claims else {
            return Ok(());
        };
        claims.share(map.fd().as_fd()).map_err(map_error(CLAIMS))
    }

    /// Says what of an uplink's traffic is ours. The programs of other devices do not ask.
    pub(super) fn set_overlay(&mut self, overlay: Overlay) -> Result<(), ProgramError> {
        let Some(config) = &mut self.config else {
            return Ok(());
        };
        Array::<_, [u8; CONFIG_BYTES]>::try_from(config)
            .and_then(|mut config| config.set(0, overlay.to_bytes(), 0))
            .map_err(map_error(CONFIG))
    }
}

fn map_error<E: Into<Cause>>(map: &'static str) -> impl FnOnce(E) -> ProgramError {
    move |source| ProgramError::Map {
        map,
        source: source.into(),
    }
}

/// Where a program's code is from.
#[derive(Debug)]
enum Origin {
    /// The object: this process has just loaded it.
    Object(Box<Ebpf>),
    /// The pins of a device.
    Pins(Xdp),
}

/// A program in the kernel.
#[derive(Debug)]
pub(super) struct Code {
    origin: Origin,
    name: &'static str,
    pub(super) maps: Maps,
}

impl Code {
    /// Loads the program for that kind of device.
    pub(super) fn load(
        kind: LinkKind,
        multi_buffer: bool,
        pins: &Pins,
    ) -> Result<Self, ProgramError> {
        let name = kind.program(multi_buffer);
        let failed = |source| ProgramError::Load {
            program: name,
            source,
        };
        let object = match kind {
            LinkKind::Pod => POD,
            LinkKind::Host => HOST,
            LinkKind::Uplink(_) => UPLINK,
        };
        let mut loader = LOADER.lock().unwrap_or_else(PoisonError::into_inner);
        // Found there, or made and pinned there.
        let ebpf = loader.map_pin_path(CLAIMS, pins.claims()).load(object);
        drop(loader);
        let mut ebpf = ebpf.map_err(|e| failed(e.into()))?;
        let xdp = xdp_of(&mut ebpf, name)?;
        xdp.load().map_err(|e| failed(e.into()))?;
        let tag = xdp.info().map_err(|e| failed(e.into()))?.tag();
        lock_tags().insert(name, tag);
        let maps = Maps::find(kind, |map| {
            let map = ebpf.take_map(map);
            map.ok_or_else(|| "the object has no such map".into())
        })?;
        Ok(Self {
            origin: Origin::Object(Box::new(ebpf)),
            name,
            maps,
        })
    }

    /// The program that is pinned for a device, where it is the same that [`load`](Self::load)
    /// would bring and its maps are pinned beside it.
    ///
    /// `None` also where pins cannot be read: they will be replaced, and what is the matter
    /// shows then.
    pub(super) fn pinned(
        kind: LinkKind,
        multi_buffer: bool,
        pins: &Pins,
    ) -> Result<Option<Self>, ProgramError> {
        let name = kind.program(multi_buffer);
        let path = pins.path(PROGRAM);
        let Ok(xdp) = Xdp::from_pin(&path, XdpAttachType::Interface) else {
            return Ok(None);
        };
        let known = lock_tags().get(name).copied();
        let tag = match known {
            Some(tag) => tag,
            None => {
                drop(Self::load(kind, multi_buffer, pins)?);
                lock_tags()[name]
            }
        };
        let same = xdp.info().is_ok_and(|info| {
            // The two forms of a program have the same instructions: their names differ.
            let kernel_name = &name.as_bytes()[..name.len().min(KERNEL_NAME)];
            info.tag() == tag && info.name() == kernel_name
        });
        let maps = Maps::find(kind, |map| {
            let map = MapData::from_pin(path_of(pins, map)).and_then(Map::from_map_data);
            map.map_err(Cause::from)
        });
        // An agent that died between its pins left maps beside a program of before.
        let maps = maps.ok().filter(|maps| uses(&xdp, maps, pins));
        Ok(maps.filter(|_| same).map(|maps| Self {
            origin: Origin::Pins(xdp),
            name,
            maps,
        }))
    }

    /// The program, to attach it.
    pub(super) fn xdp(&mut self) -> Result<&mut Xdp, ProgramError> {
        match &mut self.origin {
            Origin::Object(ebpf) => xdp_of(ebpf, self.name),
            Origin::Pins(xdp) => Ok(xdp),
        }
    }

    /// Pins program and maps in the place of an earlier agent's, where they are others. The
    /// program comes last: who finds it finds its maps.
    pub(super) fn pin(&mut self, pins: &Pins) -> Result<(), ProgramError> {
        let Origin::Object(ebpf) = &mut self.origin else {
            return Ok(());
        };
        for (name, map) in self.maps.named() {
            pins.replace(name, |path| map.pin(path))?;
        }
        let xdp = xdp_of(ebpf, self.name)?;
        pins.replace(PROGRAM, |path| xdp.pin(path))
    }
}

/// Where a map is pinned.
fn path_of(pins: &Pins, map: &str) -> PathBuf {
    if map == CLAIMS {
        pins.claims()
    } else {
        pins.path(map)
    }
}

/// The program of that name in an object.
fn xdp_of<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut Xdp, ProgramError> {
    ebpf.program_mut(name)
        .ok_or_else(|| format!("the object has no program {name}").into())
        .and_then(|program| program.try_into().map_err(Cause::from))
        .map_err(|source| ProgramError::Load {
            program: name,
            source,
        })
}

/// Whether the program uses these maps, which are pinned.
fn uses(xdp: &Xdp, maps: &Maps, pins: &Pins) -> bool {
    let Ok(Some(used)) = xdp.info().and_then(|info| info.map_ids()) else {
        return false;
    };
    let claims = maps.claims.iter().map(|map| (CLAIMS, map));
    maps.named().chain(claims).all(|(name, _)| {
        MapInfo::from_pin(path_of(pins, name)).is_ok_and(|map| used.contains(&map.id()))
    })
}

fn lock_tags() -> MutexGuard<'static, BTreeMap<&'static str, u64>> {
    TAGS.lock().unwrap_or_else(PoisonError::into_inner)
}
