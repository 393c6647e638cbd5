//! The packet path allocates nothing: counted by the allocator itself, while packets of known
//! flows go all the way through, are cut, or are answered with an error.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use common::frames::{self, Kind, frame};
use common::naive;
use skein_dataplane::fixtures::{UPLINK, endpoint, node, peer, pod_v4, remote, shared};
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
    let mut pipeline = Pipeline::new(WorkerId(0), 64, shared());
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
        for bytes in uncommon() {
            batch.push(Packet::from_bytes(&mut pool, LinkId(1), &bytes).unwrap());
        }
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
        // Twelve packets as they are; of the others seven fragments, an echo reply, three
        // errors, and a tunnel's packet.
        assert_eq!(sent, 12 + 7 + 1 + 3 + 1);
        if round > 0 {
            assert_eq!(calls, 0, "allocator calls for packets of known flows");
        }
    }
    assert_eq!(stats.fragments.value(), 3 * 7);
    assert_eq!(stats.icmp_errors.value(), 3 * 3);
    // Six kinds, two targets each, and the tunnel, decided once. What is too big or expired is
    // of the same flows; what has no route is decided each time.
    assert_eq!(stats.flow_misses.value(), 13 + 3);
    assert_eq!(stats.flow_hits.value(), 2 * 13 + 3 * 3);
}

/// What is cut, what is told, an echo request to the gateway, and a tunnel of the pod's own.
fn uncommon() -> [Vec<u8>; 6] {
    let (from, to) = ((1, 1), (2, 1));
    let cut = naive::may_be_cut(frame(Kind::UdpV4, from, to, 64, &[7; 9000]), 1);
    let too_big = frame(Kind::UdpV6, from, to, 64, &[7; 9000]);
    let expired = frame(Kind::TcpV4, from, to, 1, b"x");
    let lost = frame(Kind::TcpV6, from, (99, 1), 64, b"x");
    let mut echo = frame(Kind::EchoV4, from, to, 64, b"x");
    echo[30..34].copy_from_slice(&[169, 254, 1, 1]);
    frames::fix_ipv4_checksum(&mut echo[14..]);
    let inner = frames::unfinish(frame(Kind::TcpV4, (7, 7), (8, 8), 64, b"payload"));
    let header = [
        0xc0,
        0,
        0x12,
        0xb5,
        0,
        16 + inner.len() as u8,
        0,
        0,
        8,
        0,
        0,
        0,
        0,
        0,
        1,
        0,
    ];
    let vxlan = [&header[..], &inner].concat();
    let tunnel = naive::framed(from, &naive::ipv4(from, to, 17, &[], &vxlan));
    [cut, too_big, expired, lost, echo, tunnel]
}
