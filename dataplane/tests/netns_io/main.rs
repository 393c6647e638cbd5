//! AF_XDP links and XDP programs on real devices: veth pairs in private network namespaces.
//! Needs root, and fails without.

mod forwarder;
mod lab;
mod traffic;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forwarder::Forwarder;
use lab::{Lab, Pod, in_lab};
use skein_dataplane::ids::{LinkId, QueueId};
use skein_dataplane::io::features::Features;
use skein_dataplane::io::link::XskLink;
use skein_dataplane::io::open::{OpenError, OpenOptions, open_link};
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::io::program::{AttachedMode, LinkKind, ProgramHandle, XdpMode};
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

    fn open_pod(&self, lab: &Lab, pod: &Pod<'_>, mode: XdpMode) -> (XskLink, ProgramHandle) {
        let opened = self
            .open(lab, pod, LinkKind::Pod, mode)
            .expect("an open link");
        pod.up();
        opened
    }

    /// Every frame is back.
    fn assert_balanced(&self) {
        assert_eq!(
            self.store.available(),
            CHUNKS as usize,
            "frames are missing"
        );
    }
}

fn assert_clean(
    counts: &[(
        skein_dataplane::io::link::XskCounters,
        skein_dataplane::io::LinkStatistics,
    ); 2],
) {
    for (counters, statistics) in counts {
        assert_eq!(counters.bad_descriptors, 0);
        assert_eq!(counters.rx_broken, 0);
        assert_eq!(statistics.tx_invalid, 0, "{counters:?}");
    }
}

/// Two pods over a forwarder: ping, UDP and TCP pass, and every frame comes back.
fn two_pods(mode: XdpMode, disable: &[&str]) {
    in_lab(|lab| {
        let memory = Memory::new(disable);
        let (a, b) = (lab.pod("ha", 1, 1500), lab.pod("hb", 2, 1500));
        for pod in [&a, &b] {
            // A device MTU of 1500 takes no super-packets.
            pod.run("ethtool -K eth0 tso off gso off");
        }
        let (link_a, _a) = memory.open_pod(lab, &a, mode);
        let (link_b, handle) = memory.open_pod(lab, &b, mode);
        let expected = match mode {
            XdpMode::Native => AttachedMode::Native,
            _ => AttachedMode::Generic,
        };
        assert_eq!(handle.mode(), expected);
        let forwarder = Forwarder::start([link_a, link_b], &memory.store);
        traffic::ping(&a, "10.1.1.2", 56);
        traffic::ping(&b, "fd00::1", 1400);
        traffic::udp(&a, &b, 64);
        traffic::tcp(&a, &b, 8 << 20);
        traffic::tcp(&b, &a, 1 << 20);
        let partial = forwarder.seen.partial_checksums.load(Ordering::Relaxed);
        assert!(partial > 100, "TCP of a veth comes with partial checksums");
        assert_clean(&forwarder.stop());
        memory.assert_balanced();
    });
}

#[test]
fn generic() {
    two_pods(XdpMode::Generic, &[]);
}

#[test]
fn generic_without_multi_buffer() {
    two_pods(XdpMode::Generic, &["multi-buffer"]);
}

#[test]
fn generic_without_tx_metadata() {
    two_pods(XdpMode::Generic, &["tx-metadata"]);
}

#[test]
fn generic_without_both() {
    two_pods(XdpMode::Generic, &["multi-buffer", "tx-metadata"]);
}

#[test]
fn native() {
    two_pods(XdpMode::Native, &[]);
}

#[test]
fn native_without_multi_buffer() {
    two_pods(XdpMode::Native, &["multi-buffer"]);
}

#[test]
fn native_without_tx_metadata() {
    two_pods(XdpMode::Native, &["tx-metadata"]);
}

#[test]
fn native_without_both() {
    two_pods(XdpMode::Native, &["multi-buffer", "tx-metadata"]);
}
