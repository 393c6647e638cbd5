//! The whole pipeline: a frame comes in, from a pod and from the wire, and something right must
//! become of it.

use std::cell::RefCell;
use std::sync::Arc;

use skein_dataplane::fixtures::{UPLINK, endpoint, node, peer, remote};
use skein_dataplane::ids::{LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::parse::{parse, parse_vxlan};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::snapshot::{Snapshot, SnapshotBuilder};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;
use skein_dataplane::verdict::DropReason;

const CHUNKS: u32 = 64;

struct Node {
    tables: Snapshot,
    store: Arc<FrameStore>,
    pool: FramePool,
    pipeline: Pipeline,
    stats: Box<WorkerStats>,
}

thread_local! {
    static NODE: RefCell<Node> = RefCell::new(Node::new());
}

/// Panics unless the frame ends in exactly one way, a forwarded one is well formed, and no
/// frame of the packet memory is lost.
pub fn check(frame: &[u8]) {
    NODE.with_borrow_mut(|node| {
        for ingress in [LinkId(1), UPLINK] {
            node.check(frame, ingress);
        }
    });
}

impl Node {
    fn new() -> Self {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        builder
            .add_uplink_link(UPLINK, WorkerId(0), 0)
            .expect("fixtures fit");
        for pod in [1, 2] {
            builder
                .set_endpoint(endpoint(1, pod), WorkerId(0))
                .expect("fixtures fit");
        }
        builder.set_peer(peer(1, 2)).expect("fixtures fit");
        let (address, pod) = remote(2, 1);
        builder.set_remote_pod(address, pod).expect("fixtures fit");
        let store = FrameStore::new(CHUNKS).expect("256 KiB of packet memory");
        Self {
            tables: builder.finish(),
            pool: FramePool::new(store.clone()),
            store,
            pipeline: Pipeline::new(WorkerId(0), 64),
            stats: Box::new(WorkerStats::new().into_inner()),
        }
    }

    fn ends(&self) -> u64 {
        let drops = DropReason::ALL
            .iter()
            .map(|&reason| self.stats.drops(reason).value());
        drops.sum::<u64>()
    }

    fn check(&mut self, frame: &[u8], ingress: LinkId) {
        let Some(packet) = Packet::from_bytes(&mut self.pool, ingress, frame) else {
            return;
        };
        let (drops, answered) = (self.ends(), self.stats.answered.value());
        let mut forwarded = Vec::new();
        let context = Context {
            tables: &self.tables,
            umem: self.store.umem(),
            stats: &self.stats,
            now: Instant::default(),
        };
        self.pipeline.process(
            &mut vec![packet],
            ingress,
            context,
            &mut self.pool,
            |pool, link, packet| {
                forwarded.push((link, packet.to_vec(pool.umem())));
                pool.give_packet(packet);
            },
        );
        let dropped = self.ends() - drops;
        let answered = self.stats.answered.value() - answered;
        // A reply counts as answered and as forwarded, an announcement as answered alone.
        let ends = dropped + (forwarded.len() as u64).max(answered);
        assert_eq!(ends, 1, "a packet ends in exactly one way");
        for (link, bytes) in forwarded {
            check_forwarded(link, &bytes);
        }
        let frames = self.pool.held() + self.store.available();
        assert_eq!(frames, CHUNKS as usize, "frames balance");
    }
}

/// What leaves must be something that the next one in line takes.
fn check_forwarded(link: LinkId, bytes: &[u8]) {
    let outer = parse(bytes, bytes.len()).expect("a forwarded frame is well formed");
    if link == UPLINK {
        let tunnel = parse_vxlan(bytes, &outer).expect("only the overlay leaves by the uplink");
        let inner = &bytes[usize::from(tunnel.inner_offset)..];
        let inner = parse(inner, inner.len()).expect("its inner frame is well formed");
        assert!(inner.ttl >= 1, "an expired packet left");
    } else {
        let pod = endpoint(1, link.0 as u8);
        assert_eq!(outer.l2.dst, pod.mac, "addressed to the pod of its link");
    }
}
