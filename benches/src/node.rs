//! A node with two pods and a peer, and its pipeline, without links: packets are made in place
//! and given back where a link would send them.

use skein_dataplane::fixtures::{UPLINK, endpoint, node, peer, remote};
use skein_dataplane::ids::{LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::snapshot::{Snapshot, SnapshotBuilder};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;

/// The node.
pub struct Bench {
    tables: Snapshot,
    pool: FramePool,
    pipeline: Pipeline,
    stats: Box<WorkerStats>,
}

impl Bench {
    /// A node whose flow table has room for that many flows.
    #[must_use]
    pub fn new(flows: usize) -> Self {
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
        let built = (|| {
            builder.add_uplink_link(UPLINK, WorkerId(0), 0)?;
            builder.set_endpoint(endpoint(1, 1), WorkerId(0))?;
            builder.set_endpoint(endpoint(1, 2), WorkerId(0))?;
            builder.set_peer(peer(1, 2))?;
            let (address, pod) = remote(2, 1);
            builder.set_remote_pod(address, pod)
        })();
        assert_eq!(built, Ok(()), "the fixtures fit together");
        let store = FrameStore::new(1024).expect("4 MiB of packet memory");
        Self {
            tables: builder.finish(),
            pool: FramePool::new(store),
            pipeline: Pipeline::new(WorkerId(0), flows, skein_dataplane::fixtures::shared()),
            stats: Box::new(WorkerStats::new().into_inner()),
        }
    }

    /// Frames as packets that came in by pod 1's link.
    #[must_use]
    pub fn receive<'a>(&mut self, frames: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<Packet> {
        frames
            .into_iter()
            .map(|frame| {
                Packet::from_bytes(&mut self.pool, LinkId(1), frame).expect("frames are free")
            })
            .collect()
    }

    /// Processes a batch; what would be sent goes back to the pool. Returns how many were sent.
    pub fn process(&mut self, batch: &mut Vec<Packet>) -> usize {
        let umem = self.pool.store().umem().clone();
        let context = Context {
            tables: &self.tables,
            umem: &umem,
            stats: &self.stats,
            now: Instant::default(),
        };
        let mut sent = 0;
        self.pipeline.process(
            batch,
            LinkId(1),
            context,
            &mut self.pool,
            |pool, _, packet| {
                sent += 1;
                pool.give_packet(packet);
            },
        );
        sent
    }
}
