//! The whole pipeline: a frame comes in, from a pod and from the wire, and something right must
//! become of it.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;

use skein_dataplane::fixtures::{
    UPLINK, endpoint, node, node_v6, peer, pod_v4, remote, underlay, uplink_mac,
};
use skein_dataplane::hairpin::{GATEWAY_V4, GATEWAY_V6};
use skein_dataplane::icmp_error::INTERVAL;
use skein_dataplane::ids::{LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::parse::{TcpFlags, parse, parse_vxlan};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::service::ServiceId;
use skein_dataplane::snapshot::{
    Candidate, Exit, FrontendKind, Masquerade, Reach, Service, Snapshot, SnapshotBuilder,
    TrafficPolicy,
};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;
use skein_dataplane::verdict::DropReason;
use skein_dataplane::wire::ethernet::MacAddr;

const CHUNKS: u32 = 64;

struct Node {
    tables: Snapshot,
    store: Arc<FrameStore>,
    pool: FramePool,
    pipeline: Pipeline,
    stats: Box<WorkerStats>,
    now: Instant,
}

/// What a worker has counted of the ways in which a packet ends.
#[derive(Clone, Copy)]
struct Counts {
    dropped: u64,
    answered: u64,
    errors: u64,
    fragments: u64,
}

impl std::ops::Sub for Counts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            dropped: self.dropped - earlier.dropped,
            answered: self.answered - earlier.answered,
            errors: self.errors - earlier.errors,
            fragments: self.fragments - earlier.fragments,
        }
    }
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
        connect(&mut builder);
        let store = FrameStore::new(CHUNKS).expect("256 KiB of packet memory");
        Self {
            tables: builder.finish(),
            pool: FramePool::new(store.clone()),
            store,
            pipeline: Pipeline::new(WorkerId(0), 64, skein_dataplane::fixtures::shared()),
            stats: Box::new(WorkerStats::new().into_inner()),
            now: Instant::default(),
        }
    }

    fn counts(&self) -> Counts {
        let drops = DropReason::ALL
            .iter()
            .map(|&reason| self.stats.drops(reason).value());
        Counts {
            dropped: drops.sum(),
            answered: self.stats.answered.value(),
            errors: self.stats.icmp_errors.value(),
            fragments: self.stats.fragments.value(),
        }
    }

    fn check(&mut self, frame: &[u8], ingress: LinkId) {
        let Some(packet) = Packet::from_bytes(&mut self.pool, ingress, frame) else {
            return;
        };
        let before = self.counts();
        // Time enough for the next error.
        self.now = self.now + INTERVAL;
        let mut forwarded = Vec::new();
        let context = Context {
            tables: &self.tables,
            umem: self.store.umem(),
            stats: &self.stats,
            now: self.now,
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
        // A fragment that waits for its first ends too, and only so.
        if self.pipeline.clear(&mut self.pool) == 0 {
            check_ends(self.counts() - before, &forwarded, ingress);
        } else {
            assert!(forwarded.is_empty(), "a packet is held and sent");
        }
        for (link, bytes) in &forwarded {
            check_forwarded(*link, bytes);
        }
        let frames = self.pool.held() + self.store.available();
        assert_eq!(frames, CHUNKS as usize, "frames balance");
    }
}

/// The next hop outside.
const ROUTER: MacAddr = MacAddr([2, 0x99, 0, 0, 0, 1]);

/// Ways out, Services with backends near, far and nowhere, and node ports: so that frames meet
/// translations too. Their ports are those of the seeds.
fn connect(builder: &mut SnapshotBuilder) {
    let routers: [IpAddr; 2] = [[192, 168, 77, 254].into(), [0xfd77; 8].into()];
    let ranges = ["0.0.0.0/0", "::/0"];
    let exits = ranges.iter().zip(routers).map(|(range, router)| {
        let exit = Exit {
            uplink: 0,
            gateway: Some(router),
            src_mac: uplink_mac(1),
            mtu: 1500,
        };
        (range.parse().expect("a range"), Some(exit))
    });
    builder.set_exits(exits);
    builder.set_neighbours(routers.map(|router| ((0, router), ROUTER)));
    builder.set_masquerade(&Masquerade {
        enabled: true,
        exclude: vec![],
    });
    let mut id = 0;
    for protocol in [6, 17, 132] {
        for (last, backends) in [(1, &[(1, 1), (1, 2), (2, 1)][..]), (2, &[])] {
            id += 1;
            let candidate = |&(node, pod): &(u8, u8)| Candidate {
                address: pod_v4(node, pod).into(),
                port: 53,
                local: node == 1,
                cluster: true,
                node: node == 1,
            };
            let address = [10, 96, 0, last].into();
            let service = Service {
                protocol,
                ipv4: true,
                reach: vec![
                    Reach::Address(FrontendKind::ClusterIp, address, 53),
                    Reach::NodePort(30_000 + u16::from(last)),
                ],
                candidates: backends.iter().map(candidate).collect(),
                internal: TrafficPolicy::Cluster,
                external: TrafficPolicy::Cluster,
                affinity: None,
                source_ranges: vec![],
            };
            let id = ServiceId::new(id).expect("not zero");
            builder.set_service(id, service).expect("fixtures fit");
        }
    }
}

/// A packet ends in exactly one way: it is dropped, with an error to its sender or without; it
/// is answered, or heard; it is forwarded, or its fragments are.
fn check_ends(counts: Counts, forwarded: &[(LinkId, Vec<u8>)], ingress: LinkId) {
    let Counts {
        dropped,
        answered,
        errors,
        fragments,
    } = counts;
    let ways = (dropped, answered, errors, fragments, forwarded.len());
    match ways {
        (1, 0, 0, 0, 0) | (0, 1, 0, 0, 0) | (0, 0, 0, 0, 1) => {}
        (0, 1, 0, 0, 1) => assert_eq!(forwarded[0].0, ingress, "an answer went elsewhere"),
        (1, 0, 1, 0, 1) => {
            let (link, bytes) = &forwarded[0];
            assert_eq!(*link, ingress, "an error went elsewhere");
            assert_ne!(ingress, UPLINK, "an error went to the wire");
            let error = parse(bytes, bytes.len()).expect("an error is well formed");
            let is_reset = error.tcp_flags.contains(TcpFlags::RST);
            assert!(error.is_icmp_error() || is_reset);
        }
        (0, 0, 0, 2.., count) => {
            assert_eq!(fragments, count as u64, "each fragment is counted");
            assert!(forwarded.iter().all(|(link, _)| *link == forwarded[0].0));
        }
        _ => panic!(
            "a packet ends in exactly one way: dropped {dropped}, answered {answered}, told \
             {errors}, cut {fragments}, forwarded {}",
            forwarded.len()
        ),
    }
}

/// What leaves must be something that the next one in line takes.
fn check_forwarded(link: LinkId, bytes: &[u8]) {
    let outer = parse(bytes, bytes.len()).expect("a forwarded frame is well formed");
    if link == UPLINK && outer.l2.dst == ROUTER {
        let own = [underlay(1), node_v6(1)];
        assert!(
            own.contains(&outer.src()),
            "outside under an address of its own"
        );
        assert!(outer.ttl >= 1, "an expired packet left");
    } else if link == UPLINK {
        let tunnel = parse_vxlan(bytes, &outer).expect("the overlay's, or for outside");
        let inner = &bytes[usize::from(tunnel.inner_offset)..];
        let inner = parse(inner, inner.len()).expect("its inner frame is well formed");
        assert!(inner.ttl >= 1, "an expired packet left");
        assert!(
            inner.ip_total_len <= 1450,
            "a packet left that the path cannot take"
        );
    } else {
        let pod = endpoint(1, link.0 as u8);
        assert_eq!(outer.l2.dst, pod.mac, "addressed to the pod of its link");
        // An echo reply of the gateway is as long as what was asked.
        let own = outer.src() == GATEWAY_V4 || outer.src() == GATEWAY_V6;
        assert!(
            own || outer.ip_total_len <= pod.mtu,
            "more than the pod takes"
        );
    }
}
