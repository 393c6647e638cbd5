//! A packet's way, as one straight line.
//!
//! ```text
//!  parse ─▶ classify ─▶ flow table ──hit──▶ rewrite ─▶ encap ─▶ egress link
//!                           └─miss─▶ slow path ─┘
//! ```
//!
//! Sans-IO: packets come in as values, with the tables and the time; each goes out as a packet
//! for a link, or its frames go back to the pool and its reason to a counter.

use crate::classify::{self, Source};
use crate::encap;
use crate::flow::{Action, Delivery, FlowKey, FlowTable, Lookup};
use crate::hairpin::{self, Answer};
use crate::ids::{EndpointId, LinkId, WorkerId};
use crate::io::packet::Packet;
use crate::io::pool::FramePool;
use crate::io::umem::Umem;
use crate::offload;
use crate::parse::{Headers, parse, parse_vxlan};
use crate::rewrite;
use crate::slow;
use crate::snapshot::{LinkRole, Snapshot};
use crate::stats::WorkerStats;
use crate::time::Instant;
use crate::verdict::DropReason;

/// What a worker's pipeline keeps from batch to batch.
#[derive(Debug)]
pub struct Pipeline {
    worker: WorkerId,
    flows: FlowTable,
}

/// What a batch is processed with.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The tables of this batch.
    pub tables: &'a Snapshot,
    /// The memory that holds the packets.
    pub umem: &'a Umem,
    /// The worker's counters.
    pub stats: &'a WorkerStats,
    /// The time of this batch.
    pub now: Instant,
}

/// How a packet's way ends without a drop.
enum End {
    Forward(LinkId),
    Consumed,
}

impl Pipeline {
    /// The pipeline of a worker, with room for that many flows.
    #[must_use]
    pub fn new(worker: WorkerId, flows: usize) -> Self {
        Self {
            worker,
            flows: FlowTable::new(flows),
        }
    }

    /// The flow table: for views.
    #[must_use]
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// Processes a batch that came in by one link. Packets to send are handed to `forward` in
    /// the order in which they came; the batch is empty afterwards.
    pub fn process(
        &mut self,
        batch: &mut Vec<Packet>,
        ingress: LinkId,
        context: Context<'_>,
        pool: &mut FramePool,
        mut forward: impl FnMut(&mut FramePool, LinkId, Packet),
    ) {
        let Context { tables, stats, .. } = context;
        let role = tables.link(ingress).map(|entry| entry.role);
        for mut packet in batch.drain(..) {
            let end = match role {
                Some(LinkRole::Pod(id)) => self.pod_packet(&mut packet, id, context),
                Some(LinkRole::Uplink(_)) => self.uplink_packet(&mut packet, context),
                None => Err(DropReason::UnknownLink),
            };
            match end {
                Ok(End::Forward(link)) => forward(pool, link, packet),
                Ok(End::Consumed) => {
                    stats.answered.add(1);
                    pool.give_packet(packet);
                }
                Err(reason) => {
                    stats.drops(reason).add(1);
                    pool.give_packet(packet);
                }
            }
        }
    }

    fn pod_packet(
        &mut self,
        packet: &mut Packet,
        id: EndpointId,
        context: Context<'_>,
    ) -> Result<End, DropReason> {
        let endpoint = context.tables.endpoint(id).ok_or(DropReason::UnknownLink)?;
        let headers = parse(packet.head(context.umem), packet.len())?;
        match hairpin::answer(packet, context.umem, &headers, endpoint)? {
            Answer::Reply => {
                context.stats.answered.add(1);
                return Ok(End::Forward(endpoint.link));
            }
            Answer::Heard => return Ok(End::Consumed),
            Answer::NotForUs => {}
        }
        let source = classify::pod(endpoint, &headers)?;
        packet.partial_checksum = offload::unfinished(packet, context.umem, &headers);
        self.forward(packet, &source, &headers, context)
    }

    fn uplink_packet(
        &mut self,
        packet: &mut Packet,
        context: Context<'_>,
    ) -> Result<End, DropReason> {
        let head = packet.head(context.umem);
        let outer = parse(head, packet.len())?;
        let tunnel = parse_vxlan(head, &outer)?;
        let payload = &head[usize::from(outer.payload_offset)..];
        let source = classify::overlay(context.tables, &outer, payload)?;
        encap::pull(packet, tunnel.inner_offset.into())?;
        let inner = parse(packet.head(context.umem), packet.len())?;
        classify::inner(context.tables, &inner)?;
        encap::combine_ecn(outer.dscp_ecn, packet, context.umem, &inner)?;
        self.forward(packet, &source, &inner, context)
    }

    /// From here on every packet goes the same way, whatever it came in by.
    fn forward(
        &mut self,
        packet: &mut Packet,
        source: &Source<'_>,
        headers: &Headers,
        context: Context<'_>,
    ) -> Result<End, DropReason> {
        let Context {
            tables, stats, now, ..
        } = context;
        trim_padding(packet, headers)?;
        let key = FlowKey::new(source, headers);
        let hash = self.flows.hash(&key);
        let now_ms = now.millis_wrapping();
        match self.flows.lookup(hash, &key, tables.epochs(), now_ms) {
            Lookup::Hit(action) => {
                stats.flow_hits.add(1);
                return apply(action, packet, headers, context);
            }
            Lookup::Stale => stats.flow_stale.add(1),
            Lookup::Miss => stats.flow_misses.add(1),
        }
        let action = slow::decide(source, headers, tables, self.worker, hash)?;
        let (action, evicted) = self.flows.insert(hash, key, action, now_ms);
        stats.flow_evictions.add(evicted.into());
        apply(action, packet, headers, context)
    }
}

/// Cuts off what stands behind the IP packet. Short frames are padded to the least length of
/// Ethernet; no sender pads one that is longer than a segment.
fn trim_padding(packet: &mut Packet, headers: &Headers) -> Result<(), DropReason> {
    let len = headers.l3_end();
    if packet.len() == len || (packet.segments().len() == 1 && packet.resize_head(len)) {
        return Ok(());
    }
    Err(DropReason::TrailingBytes)
}

/// Changes the packet as its flow's action says and names its egress link.
fn apply(
    action: &Action,
    packet: &mut Packet,
    headers: &Headers,
    context: Context<'_>,
) -> Result<End, DropReason> {
    if headers.ip_total_len > action.mtu {
        return Err(DropReason::TooBig);
    }
    if action.decrement_ttl {
        rewrite::decrement_ttl(packet, context.umem, headers)?;
    }
    match &action.delivery {
        Delivery::Local(addresses) => {
            rewrite::set_addresses(packet, context.umem, *addresses)?;
        }
        Delivery::Tunnel(tunnel) => {
            offload::finish(packet, context.umem)?;
            tunnel.push(packet, context.umem, headers)?;
        }
    }
    Ok(End::Forward(action.egress))
}
