//! The packet path allocates nothing: counted by the allocator itself, while packets of known
//! flows go all the way through.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use common::frames::{Kind, frame};
use skein_dataplane::fixtures::{UPLINK, endpoint, node, peer, pod_v4, remote};
use skein_dataplane::ids::{LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::snapshot::{Snapshot, SnapshotBuilder};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn known_flows_pass_without_an_allocation() {
    let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
    builder.add_uplink_link(UPLINK, WorkerId(0), 0).unwrap();
    builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
    builder.set_endpoint(endpoint(1, 2), WorkerId(0)).unwrap();
    builder.set_peer(peer(1, 2)).unwrap();
    let (address, pod) = remote(2, 1);
    builder.set_remote_pod(address, pod).unwrap();
    let tables = builder.finish();
    let store = FrameStore::new(256).unwrap();
    let mut pool = FramePool::new(store.clone());
    let mut pipeline = Pipeline::new(WorkerId(0), 64);
    let stats = WorkerStats::new();
    assert_eq!(
        pod_v4(2, 1),
        address.to_string().parse::<std::net::Ipv4Addr>().unwrap()
    );
    for round in 0..3 {
        let mut batch: Vec<Packet> = Kind::ALL
            .iter()
            .flat_map(|&kind| [(kind, (1, 2)), (kind, (2, 1))])
            .map(|(kind, to)| {
                let bytes = frame(kind, (1, 1), to, 64, b"payload");
                Packet::from_bytes(&mut pool, LinkId(1), &bytes).unwrap()
            })
            .collect();
        let context = Context {
            tables: &tables,
            umem: store.umem(),
            stats: &stats,
            now: Instant::default(),
        };
        let mut sent = 0;
        let before = CALLS.load(Ordering::Relaxed);
        pipeline.process(
            &mut batch,
            LinkId(1),
            context,
            &mut pool,
            |pool, _, packet| {
                sent += 1;
                pool.give_packet(packet);
            },
        );
        let calls = CALLS.load(Ordering::Relaxed) - before;
        assert_eq!(sent, 12);
        if round > 0 {
            assert_eq!(calls, 0, "allocator calls for 12 packets of known flows");
        }
    }
    // Six kinds, two targets each, decided once.
    assert_eq!(stats.flow_misses.value(), 12);
    assert_eq!(stats.flow_hits.value(), 24);
}
