//! The packet path allocates nothing: counted by the allocator itself, while packets of known
//! flows go all the way through, are cut, or are answered with an error, and while connections
//! come and go.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use common::frames::{self, Kind, frame};
use common::naive;
use skein_dataplane::conntrack::{
    Connections, Direction, Limits, NewConnection, PortPool, Segment, Timeouts, Tuple,
};
use skein_dataplane::fixtures::{UPLINK, endpoint, node, peer, pod_v4, remote, shared};
use skein_dataplane::ids::{EndpointId, LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::snapshot::{Snapshot, SnapshotBuilder};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;

struct Counting;

thread_local! {
    /// Of this thread, so that tests beside each other count their own.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn calls() -> u64 {
    CALLS.get()
}

// SAFETY: every call goes to the system's allocator, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
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
        let before = calls();
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
        let calls = calls() - before;
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
    // Of what hits, four flows and one of the others are requests to connect, which are decided
    // anew each time: the ports may have been another connection's.
    let opening = 2 * 4 + 3;
    assert_eq!(stats.flow_hits.value(), 2 * 13 + 3 * 3 - opening);
    assert_eq!(stats.flow_stale.value(), opening);
}

/// A table at its limit and a pool of ports that is used up, under churn: with room made by
/// eviction, by removal and by sweeping.
#[test]
fn connections_come_and_go_without_an_allocation() {
    const LIMIT: u32 = 3 << 11;
    let ports = Arc::new(PortPool::new(61000..=61999));
    let table = Connections::new(Limits::new(LIMIT as usize), Timeouts::default());
    let table = table.with_ports(Arc::clone(&ports));
    let before = calls();
    let mut created = 0u32;
    for number in 0..20 * LIMIT {
        let now = Instant::from_nanos(u64::from(number) * 1_000_000);
        let original = Tuple {
            src: [1; 16],
            dst: [2; 16],
            src_port: number as u16,
            dst_port: (number >> 16) as u16 + number as u16 % 64,
            protocol: 17,
        };
        let lease = ports.lease(&original, true, |_| false, 0);
        let new = NewConnection {
            original,
            reply: Tuple {
                dst_port: lease.map_or(0, |lease| lease.port),
                ..original.reversed()
            },
            owner: EndpointId(number % 500),
            masquerade: lease,
            picked_up: false,
            service: 0,
        };
        let Ok(conn) = table.create(new, Segment::default(), now) else {
            continue;
        };
        created += 1;
        let found = table.find(&new.reply, now).expect("just put in");
        assert!(table.observe(conn, found.direction, Segment::default(), now));
        assert!(table.observe(conn, Direction::Original, Segment::default(), now));
        if number % 7 == 0 {
            assert!(table.remove(conn));
        }
        table.sweep(now, 4);
    }
    let end = Instant::default() + Duration::from_secs(86_400);
    table.sweep(end, LIMIT as usize);
    assert_eq!(
        calls() - before,
        0,
        "allocator calls of the connection table"
    );
    assert!(created > LIMIT, "{created} created");
    assert!(table.is_empty());
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
