//! AF_XDP links and XDP programs on real devices: veth pairs in private network namespaces.
//! Needs root, and fails without.

mod faults;
mod forwarder;
mod lab;
mod pods;
mod programs;
mod traffic;

use std::sync::Arc;

use lab::{Lab, Pod};
use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::features::Features;
use skein_dataplane::io::link::XskLink;
use skein_dataplane::io::open::{OpenError, OpenOptions, open_link};
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::program::{LinkKind, ProgramHandle, XdpMode};
use skein_dataplane::io::xsk::XskFactory;

const CHUNKS: u32 = 4096;

/// Packet memory, its registration, and what the kernel has of the features asked for.
struct Memory {
    store: Arc<FrameStore>,
    factory: Arc<XskFactory>,
    features: Features,
}

impl Memory {
    fn new(disable: &[&str]) -> Self {
        let disable: Vec<String> = disable.iter().map(|&name| name.into()).collect();
        let features = Features::probe(&disable).expect("the features");
        let store = FrameStore::new(CHUNKS).expect("packet memory");
        let factory = XskFactory::new(Arc::clone(store.umem()), features).expect("registration");
        Self {
            store,
            factory,
            features,
        }
    }

    fn pool(&self) -> FramePool {
        FramePool::new(Arc::clone(&self.store))
    }

    fn open(
        &self,
        lab: &Lab,
        pod: &Pod<'_>,
        kind: LinkKind,
        mode: XdpMode,
    ) -> Result<(XskLink, ProgramHandle), OpenError> {
        open_link(
            &pod.device,
            QueueId(0),
            LinkId(pod.device.index),
            &OpenOptions::new(kind, mode, &lab.bpffs()),
            &self.factory,
            &mut self.pool(),
        )
    }

    /// Opens the pod's link, then takes the device up, as an agent does.
    fn open_pod(&self, lab: &Lab, pod: &Pod<'_>, mode: XdpMode) -> (XskLink, ProgramHandle) {
        let opened = self
            .open(lab, pod, LinkKind::Pod, mode)
            .expect("an open link");
        pod.up();
        opened
    }

    /// Every frame is back.
    fn assert_balanced(&self) {
        let available = self.store.available();
        assert_eq!(available, CHUNKS as usize, "frames are missing");
    }
}
