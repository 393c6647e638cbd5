//! Opens a device as links: sockets, program and pins, in the order that leaves no gap.
//!
//! Sockets first, then the program that knows them, then its attachment. The caller takes a
//! pod's or the host link's device up only afterwards.

use std::path::Path;
use std::sync::Arc;

use super::Link;
use super::claims::Claims;
use super::device::Device;
use super::link::{FillParameters, XskLink};
use super::pool::FramePool;
use super::program::{LinkKind, Program, ProgramError, ProgramHandle, XdpMode};
use super::xsk::{RingSizes, Xsk, XskError, XskFactory};
use crate::ids::{LinkId, QueueId};

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its sockets.
    #[error(transparent)]
    Socket(#[from] XskError),
    /// Its program.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

/// How to open a device.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions<'a> {
    /// What the device is to us.
    pub kind: LinkKind,
    /// Where the program shall run.
    pub mode: XdpMode,
    /// The bpffs to pin in.
    pub bpffs: &'a Path,
    /// Entries of each socket's rings.
    pub rings: RingSizes,
    /// Frames lent for receiving.
    pub fill: FillParameters,
    /// The ports of the node's that an uplink sends to the datapath.
    pub claims: Option<&'a Claims>,
}

impl<'a> OpenOptions<'a> {
    /// With the default rings and fill parameters.
    #[must_use]
    pub fn new(kind: LinkKind, mode: XdpMode, bpffs: &'a Path) -> Self {
        Self {
            kind,
            mode,
            bpffs,
            rings: RingSizes::default(),
            fill: FillParameters::default(),
            claims: None,
        }
    }
}

/// Opens the queues of a device in the calling thread's network namespace, each as a link of
/// that number. Frames to receive into come from `pool`, and go back to it on failure.
pub fn open_links(
    device: &Device,
    queues: &[(QueueId, LinkId)],
    options: &OpenOptions<'_>,
    factory: &Arc<XskFactory>,
    pool: &mut FramePool,
) -> Result<(Vec<XskLink>, ProgramHandle), OpenError> {
    let mut program = Program::open(device, options.kind, factory.features(), options.bpffs)?;
    if let Some(claims) = options.claims {
        program.share(claims)?;
    }
    let sockets: Vec<Xsk> = queues
        .iter()
        .map(|&(queue, _)| factory.open(device, queue, &options.rings))
        .collect::<Result<_, _>>()?;
    for ((queue, _), socket) in queues.iter().zip(&sockets) {
        program.insert(*queue, socket)?;
    }
    let links: Vec<XskLink> = queues
        .iter()
        .zip(sockets)
        .map(|(&(_, id), socket)| XskLink::new(id, socket, options.fill, pool))
        .collect();
    match program.attach(options.mode) {
        Ok(handle) => Ok((links, handle)),
        Err(error) => {
            for link in links {
                Box::new(link).close(pool);
            }
            Err(error.into())
        }
    }
}

/// Opens one queue of a device: [`open_links`] for a device with a single queue.
pub fn open_link(
    device: &Device,
    queue: QueueId,
    id: LinkId,
    options: &OpenOptions<'_>,
    factory: &Arc<XskFactory>,
    pool: &mut FramePool,
) -> Result<(XskLink, ProgramHandle), OpenError> {
    let (links, handle) = open_links(device, &[(queue, id)], options, factory, pool)?;
    let [link] = <[XskLink; 1]>::try_from(links).expect("one queue opens as one link");
    Ok((link, handle))
}
