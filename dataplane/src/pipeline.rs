//! A packet's way, as one straight line.
//!
//! ```text
//!  parse ─▶ classify ─▶ flow table ──hit──▶ rewrite ─▶ cut, if too large ─▶ encap ─▶ egress link
//!                           └─miss─▶ slow path ─┘
//! ```
//!
//! Sans-IO: packets come in as values, with the tables and the time; each goes out as a packet
//! for a link, or as its fragments, or its frames go back to the pool and its reason to a
//! counter. A pod is told what became of its packet where it can act upon that.

use crate::classify::{self, Source};
use crate::encap;
use crate::flow::{Action, Delivery, FlowKey, FlowTable, Lookup};
use crate::fragment::{self, MAX_FRAGMENTS};
use crate::hairpin::{self, Answer};
use crate::icmp_error::{self, Limiter, Trouble};
use crate::ids::{LinkId, WorkerId};
use crate::io::packet::Packet;
use crate::io::pool::FramePool;
use crate::io::umem::Umem;
use crate::nested;
use crate::offload;
use crate::parse::{Headers, parse, parse_vxlan};
use crate::rewrite;
use crate::slow;
use crate::snapshot::{Endpoint, LinkRole, Snapshot};
use crate::stats::WorkerStats;
use crate::time::Instant;
use crate::verdict::DropReason;

/// What a worker's pipeline keeps from batch to batch.
#[derive(Debug)]
pub struct Pipeline {
    worker: WorkerId,
    flows: FlowTable,
    errors: Limiter,
    /// The fragments of the packet under way.
    fragments: Vec<Packet>,
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

/// How a packet's way ends without silence.
enum End {
    /// It goes out.
    Forward(LinkId),
    /// Its fragments go out in its place.
    Fragments(LinkId),
    /// It is dropped, and holds the error that tells its sender.
    Told(LinkId, DropReason),
    /// It was for the gateway, and is done with.
    Consumed,
}

/// Why a packet goes no further, and what its sender can be told about that.
struct Refusal {
    reason: DropReason,
    trouble: Option<Trouble>,
}

impl<R: Into<DropReason>> From<R> for Refusal {
    fn from(reason: R) -> Self {
        let reason = reason.into();
        Self {
            reason,
            trouble: Trouble::of(reason),
        }
    }
}

impl Pipeline {
    /// The pipeline of a worker, with room for that many flows.
    #[must_use]
    pub fn new(worker: WorkerId, flows: usize) -> Self {
        Self {
            worker,
            flows: FlowTable::new(flows),
            errors: Limiter::default(),
            fragments: Vec::with_capacity(MAX_FRAGMENTS),
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
                Some(role @ (LinkRole::Pod(_) | LinkRole::Host)) => {
                    self.veth_packet(&mut packet, role, context, pool)
                }
                Some(LinkRole::Uplink(_)) => self.uplink_packet(&mut packet, context, pool),
                None => Err(DropReason::UnknownLink),
            };
            match end {
                Ok(End::Forward(link)) => forward(pool, link, packet),
                Ok(End::Fragments(link)) => {
                    stats.fragments.add(self.fragments.len() as u64);
                    pool.give_packet(packet);
                    for fragment in self.fragments.drain(..) {
                        forward(pool, link, fragment);
                    }
                }
                Ok(End::Told(link, reason)) => {
                    stats.drops(reason).add(1);
                    stats.icmp_errors.add(1);
                    forward(pool, link, packet);
                }
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

    /// From a pod, or from the node's own network stack.
    fn veth_packet(
        &mut self,
        packet: &mut Packet,
        role: LinkRole,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, DropReason> {
        let endpoint: &Endpoint = match role {
            LinkRole::Pod(id) => context.tables.endpoint(id).map(|endpoint| &***endpoint),
            LinkRole::Host => context.tables.host(),
            LinkRole::Uplink(_) => None,
        }
        .ok_or(DropReason::UnknownLink)?;
        let headers = parse(packet.head(context.umem), packet.len())?;
        self.admit(packet, (role, endpoint), &headers, context, pool)
            .or_else(|refusal| self.tell(packet, endpoint, &headers, &refusal, context, pool))
    }

    fn admit(
        &mut self,
        packet: &mut Packet,
        (role, endpoint): (LinkRole, &Endpoint),
        headers: &Headers,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, Refusal> {
        match hairpin::answer(packet, context.umem, headers, endpoint)? {
            Answer::Reply => {
                context.stats.answered.add(1);
                return Ok(End::Forward(endpoint.link));
            }
            Answer::Heard => return Ok(End::Consumed),
            Answer::NotForUs => {}
        }
        let source = match role {
            LinkRole::Host => classify::host(context.tables, endpoint, headers)?,
            _ => classify::pod(context.tables, endpoint, headers)?,
        };
        packet.partial_checksum = offload::unfinished(packet, context.umem, headers);
        self.forward(packet, &source, headers, context, pool)
    }

    fn uplink_packet(
        &mut self,
        packet: &mut Packet,
        context: Context<'_>,
        pool: &mut FramePool,
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
        self.forward(packet, &source, &inner, context, pool)
            .map_err(|refusal| match refusal.trouble {
                // Its sender keeps to the path's MTU, and this pod's is less.
                Some(Trouble::TooBig { .. }) => DropReason::TooBigForPod,
                _ => refusal.reason,
            })
    }

    /// From here on every packet goes the same way, whatever it came in by.
    fn forward(
        &mut self,
        packet: &mut Packet,
        source: &Source<'_>,
        headers: &Headers,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, Refusal> {
        let Context {
            tables, stats, now, ..
        } = context;
        trim_padding(packet, headers)?;
        let key = FlowKey::new(source, headers);
        let hash = self.flows.hash(&key);
        let now_ms = now.millis_wrapping();
        let fragments = &mut self.fragments;
        match self.flows.lookup(hash, &key, tables.epochs(), now_ms) {
            Lookup::Hit(action) => {
                stats.flow_hits.add(1);
                return apply(action, packet, headers, context.umem, pool, fragments);
            }
            Lookup::Stale => stats.flow_stale.add(1),
            Lookup::Miss => stats.flow_misses.add(1),
        }
        let action = slow::decide(source, headers, tables, self.worker, hash)?;
        let (action, evicted) = self.flows.insert(hash, key, action, now_ms);
        stats.flow_evictions.add(evicted.into());
        apply(action, packet, headers, context.umem, pool, fragments)
    }

    /// Makes a pod's packet the error about itself, where the pod may be told.
    #[cold]
    fn tell(
        &mut self,
        packet: &mut Packet,
        endpoint: &Endpoint,
        headers: &Headers,
        &Refusal { reason, trouble }: &Refusal,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, DropReason> {
        let trouble = trouble
            .filter(|trouble| trouble.may_be_told(headers))
            .ok_or(reason)?;
        if !self.errors.take(endpoint.id, context.now) {
            context.stats.icmp_errors_limited.add(1);
            return Err(reason);
        }
        if icmp_error::write(packet, context.umem, pool, headers, endpoint, trouble) {
            Ok(End::Told(endpoint.link, reason))
        } else {
            Err(reason)
        }
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

/// Changes the packet as its flow's action says and names its egress link. What is too large and
/// may be cut ends up in `fragments`, which are empty before.
fn apply(
    action: &Action,
    packet: &mut Packet,
    headers: &Headers,
    umem: &Umem,
    pool: &mut FramePool,
    fragments: &mut Vec<Packet>,
) -> Result<End, Refusal> {
    let too_big = headers.ip_total_len > action.mtu;
    if too_big && headers.dont_fragment {
        return Err(Refusal {
            reason: DropReason::TooBig,
            trouble: Some(Trouble::TooBig { mtu: action.mtu }),
        });
    }
    if action.decrement_ttl {
        rewrite::decrement_ttl(packet, umem, headers)?;
    }
    if action.nested {
        nested::finish(packet, umem, headers)?;
    }
    if !too_big {
        deliver(&action.delivery, packet, headers, umem)?;
        return Ok(End::Forward(action.egress));
    }
    offload::finish(packet, umem)?;
    fragment::cut(packet, umem, headers, action.mtu, pool, fragments)?;
    let delivered = fragments
        .iter_mut()
        .try_for_each(|fragment| deliver(&action.delivery, fragment, headers, umem));
    if let Err(reason) = delivered {
        fragments.drain(..).for_each(|done| pool.give_packet(done));
        return Err(reason.into());
    }
    Ok(End::Fragments(action.egress))
}

/// Addresses the frame to its next receiver.
fn deliver(
    delivery: &Delivery,
    packet: &mut Packet,
    headers: &Headers,
    umem: &Umem,
) -> Result<(), DropReason> {
    match delivery {
        Delivery::Local(addresses) => rewrite::set_addresses(packet, umem, *addresses),
        Delivery::Tunnel(tunnel) => {
            offload::finish(packet, umem)?;
            tunnel.push(packet, umem, headers)
        }
    }
}
