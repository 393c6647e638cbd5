//! Two nodes on a wire in memory: node N has the pods 1 and 2 of the fixtures, and knows the
//! other node and its pods.

// Each test binary uses its own part of this.
#![allow(dead_code)]

pub mod frames;
pub mod naive;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use frames::Pod;
use skein_dataplane::fixtures::{
    HOST_LINK, UPLINK, endpoint, host, identity, node, peer, pod_v4, pod_v6, shared, underlay,
};
use skein_dataplane::ids::{EndpointId, LinkId, PeerId, WorkerId};
use skein_dataplane::io::LinkCaps;
use skein_dataplane::io::memory::{MemoryLink, MemoryWire, Sent};
use skein_dataplane::io::pool::FrameStore;
use skein_dataplane::snapshot::{Publisher, RemotePod, Snapshot, SnapshotBuilder, router_mac};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;
use skein_dataplane::verdict::DropReason;
use skein_dataplane::worker::{Manual, PollMode, WorkerOptions};

const CHUNKS: u32 = 1024;

pub fn remote_pod(node: u8, pod: u8) -> RemotePod {
    RemotePod {
        peer: PeerId(node.into()),
        identity: identity(node, pod),
    }
}

struct Node {
    publisher: Publisher,
    workers: Manual,
    count: u16,
    wires: HashMap<LinkId, MemoryWire>,
}

pub struct Cluster {
    nodes: Vec<Node>,
    now: Instant,
}

impl Cluster {
    /// Two nodes with that many workers each, over IPv4.
    pub fn new(workers: u16) -> Self {
        Self::build(workers, underlay)
    }

    /// The same over IPv6.
    pub fn over_ipv6(workers: u16) -> Self {
        Self::build(workers, |node| {
            IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, node.into()))
        })
    }

    fn build(workers: u16, underlay: fn(u8) -> IpAddr) -> Self {
        let nodes = [1, 2].map(|near| Node::new(near, workers, underlay)).into();
        Self {
            nodes,
            now: Instant::default(),
        }
    }

    fn node(&mut self, node: u8) -> &mut Node {
        &mut self.nodes[usize::from(node) - 1]
    }

    fn wire(&mut self, node: u8, pod: u8) -> MemoryWire {
        self.node(node).wires[&LinkId(pod.into())].clone()
    }

    /// A pod sends a frame; [`Cluster::run`] moves it.
    pub fn send(&mut self, node: u8, pod: u8, frame: Vec<u8>) {
        self.wire(node, pod).push(frame);
    }

    /// Lets everything go where it goes.
    pub fn run(&mut self) {
        for _ in 0..100 {
            self.now = self.now + Duration::from_millis(1);
            let now = self.now;
            let moved: usize = self
                .nodes
                .iter_mut()
                .map(|node| node.workers.turn(now))
                .sum();
            let uplinks: Vec<_> = self
                .nodes
                .iter()
                .map(|node| node.wires[&UPLINK].clone())
                .collect();
            let carried = uplinks[0].carry_to(&uplinks[1]) + uplinks[1].carry_to(&uplinks[0]);
            if moved + carried == 0 {
                return;
            }
        }
        panic!("packets went round and round");
    }

    /// Lets time pass.
    pub fn advance(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Sends a frame and returns what became of it: what the target received, and what the
    /// sender got back.
    pub fn exchange(&mut self, from: Pod, to: Pod, frame: Vec<u8>) -> (Vec<Sent>, Vec<Vec<u8>>) {
        self.send(from.0, from.1, frame);
        self.run();
        (self.sent(to.0, to.1), self.received(from.0, from.1))
    }

    /// What a pod received since it was last asked.
    pub fn received(&mut self, node: u8, pod: u8) -> Vec<Vec<u8>> {
        self.sent(node, pod)
            .into_iter()
            .map(|sent| sent.bytes)
            .collect()
    }

    /// The same, with what was announced about it.
    pub fn sent(&mut self, node: u8, pod: u8) -> Vec<Sent> {
        self.wire(node, pod).drain()
    }

    /// Turns one node and takes what it put on the wire, so that it does not arrive.
    pub fn take_from_wire(&mut self, node: u8) -> Vec<Vec<u8>> {
        let now = self.now;
        for _ in 0..4 {
            self.node(node).workers.turn(now);
        }
        let uplink = self.node(node).wires[&UPLINK].clone();
        uplink.drain().into_iter().map(|sent| sent.bytes).collect()
    }

    /// Puts a frame on the wire to a node.
    pub fn send_from_wire(&mut self, node: u8, frame: Vec<u8>) {
        self.node(node).wires[&UPLINK].push(frame);
    }

    /// The sum of a counter over a node's workers.
    pub fn count(&mut self, node: u8, counter: impl Fn(&WorkerStats) -> u64) -> u64 {
        let node = self.node(node);
        (0..node.count)
            .map(|worker| counter(node.workers.stats(WorkerId(worker))))
            .sum()
    }

    pub fn drops(&mut self, node: u8, reason: DropReason) -> u64 {
        self.count(node, |stats| stats.drops(reason).value())
    }

    /// All drops of a node.
    pub fn all_drops(&mut self, node: u8) -> u64 {
        DropReason::ALL
            .iter()
            .map(|&reason| self.drops(node, reason))
            .sum()
    }

    /// A pod's frame is dropped, for this reason and no other.
    pub fn expect_drop(&mut self, node: u8, pod: u8, frame: Vec<u8>, reason: DropReason) {
        let (before, all) = (self.drops(node, reason), self.all_drops(node));
        self.send(node, pod, frame);
        self.run();
        assert_eq!(self.drops(node, reason), before + 1, "{}", reason.name());
        assert_eq!(self.all_drops(node), all + 1, "beside {}", reason.name());
    }

    /// A frame from the wire is dropped, for this reason and no other.
    pub fn expect_drop_from_wire(&mut self, node: u8, frame: Vec<u8>, reason: DropReason) {
        let (before, all) = (self.drops(node, reason), self.all_drops(node));
        self.send_from_wire(node, frame);
        self.run();
        assert_eq!(self.drops(node, reason), before + 1, "{}", reason.name());
        assert_eq!(self.all_drops(node), all + 1, "beside {}", reason.name());
    }

    /// Publishes a change of a node's tables.
    pub fn change(&mut self, node: u8, change: impl FnOnce(&mut SnapshotBuilder)) {
        let publisher = &mut self.node(node).publisher;
        let mut builder = SnapshotBuilder::new(publisher.current());
        change(&mut builder);
        publisher.publish(builder.finish());
    }

    /// Takes a pod away, tables first.
    pub fn remove_pod(&mut self, node: u8, pod: u8) {
        self.change(node, |builder| {
            builder.remove_endpoint(EndpointId(pod.into()));
        });
        let count = self.node(node).count;
        let owner = WorkerId(u16::from(pod) % count);
        self.node(node)
            .workers
            .remove_link(owner, LinkId(pod.into()));
    }

    /// Stops all workers; every frame must be back.
    pub fn finish(self) {
        for node in self.nodes {
            let (back, all) = node.workers.stop();
            assert_eq!(back, all, "frames balance");
        }
    }
}

impl Node {
    fn new(near: u8, count: u16, underlay: fn(u8) -> IpAddr) -> Self {
        let far = 3 - near;
        let store = FrameStore::new(CHUNKS).unwrap();
        let mut me = node(near);
        me.router_mac = router_mac(underlay(near));
        let mut builder = SnapshotBuilder::new(&Snapshot::empty(me));
        builder.add_uplink_link(UPLINK, WorkerId(0), 0).unwrap();
        let host_worker = count - 1;
        builder
            .set_host(Some((host(near), WorkerId(host_worker))))
            .unwrap();
        for pod in [1, 2] {
            builder
                .set_endpoint(endpoint(near, pod), WorkerId(u16::from(pod) % count))
                .unwrap();
        }
        let mut other = peer(near, far);
        other.router_mac = router_mac(underlay(far));
        if let Some(hop) = &mut other.hop {
            (hop.outer_src, hop.outer_dst) = (underlay(near), underlay(far));
        }
        builder.set_peer(other).unwrap();
        for pod in [1, 2] {
            for address in [IpAddr::V4(pod_v4(far, pod)), IpAddr::V6(pod_v6(far, pod))] {
                builder
                    .set_remote_pod(address, remote_pod(far, pod))
                    .unwrap();
            }
        }
        let mut publisher = Publisher::new(builder.finish());
        let options = WorkerOptions {
            cpus: vec![0; count.into()],
            poll: PollMode::Busy,
            flows: 1024,
            shared: shared(),
        };
        let mut workers = Manual::new(&options, &store, &mut publisher).unwrap();
        let mut wires = HashMap::new();
        let caps = LinkCaps {
            multi_buffer: true,
            partial_checksum: true,
        };
        let uplink_caps = LinkCaps {
            partial_checksum: false,
            ..caps
        };
        let links = [
            (UPLINK, 0, uplink_caps),
            (LinkId(1), 1 % count, caps),
            (LinkId(2), 2 % count, caps),
            (HOST_LINK, host_worker, caps),
        ];
        for (id, worker, caps) in links {
            let (link, wire) = MemoryLink::new(caps);
            workers.add_link(WorkerId(worker), id, Box::new(link.with_id(id)));
            wires.insert(id, wire);
        }
        workers.turn(Instant::default());
        Self {
            publisher,
            workers,
            count,
            wires,
        }
    }
}
