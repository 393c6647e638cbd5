//! A packet's way, as one straight line.
//!
//! ```text
//!  parse ─▶ classify ─▶ flow table ──hit──▶ rewrite ─▶ translate ─▶ cut, if too large ─▶ encap ─▶ egress link
//!                           └─miss─▶ slow path ─┘
//! ```
//!
//! Sans-IO: packets come in as values, with the tables and the time; each goes out as a packet
//! for a link, or as its fragments, or its frames go back to the pool and its reason to a
//! counter. A pod is told what became of its packet where it can act upon that. A later fragment
//! that comes before its first waits for it.

use std::sync::Arc;

use crate::classify::{self, Source};
use crate::conntrack::{Connections, Segment, Tuple};
use crate::encap;
use crate::events::{FlowEvent, Told};
use crate::first_fragment::{Answer as Whole, Fragments, Origin};
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
use crate::parse::{Headers, L3, parse, parse_vxlan};
use crate::related::Quote;
use crate::rewrite;
use crate::slow::{self, Ask, Shared};
use crate::snapshot::{Endpoint, LinkRole, Snapshot};
use crate::stats::WorkerStats;
use crate::time::Instant;
use crate::translate::Translation;
use crate::verdict::DropReason;

/// What a worker's pipeline keeps from batch to batch.
#[derive(Debug)]
pub struct Pipeline {
    worker: WorkerId,
    flows: FlowTable,
    shared: Arc<Shared>,
    errors: Limiter,
    told: Told,
    /// What first fragments said, and later ones that came too early.
    parts: Fragments,
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
#[derive(Clone, Copy)]
enum End {
    /// It goes out.
    Forward(LinkId),
    /// Its fragments go out in its place.
    Fragments(LinkId),
    /// It is dropped, and holds the error that tells its sender.
    Told(LinkId, DropReason),
    /// It was for the gateway, and is done with.
    Consumed,
    /// It is a later fragment that came before its first: held, with these headers.
    Early(Origin, Headers),
}

/// Why a packet goes no further, and what its sender can be told about that.
#[derive(Clone, Copy)]
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
    pub fn new(worker: WorkerId, flows: usize, shared: Arc<Shared>) -> Self {
        Self {
            worker,
            flows: FlowTable::new(flows),
            shared,
            errors: Limiter::default(),
            told: Told::default(),
            parts: Fragments::default(),
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
        let role = context.tables.link(ingress).map(|entry| entry.role);
        for mut packet in batch.drain(..) {
            let end = match role {
                Some(role @ (LinkRole::Pod(_) | LinkRole::Host)) => {
                    self.veth_packet(&mut packet, role, context, pool)
                }
                Some(LinkRole::Uplink(_)) => self.uplink_packet(&mut packet, context, pool),
                None => Err(DropReason::UnknownLink),
            };
            self.leave(packet, end, context, pool, &mut forward);
            while let Some((mut packet, headers, origin)) = self.parts.next_released() {
                let end = self.resume(&mut packet, &headers, origin, context, pool);
                self.leave(packet, end, context, pool, &mut forward);
            }
        }
    }

    /// Drops the fragments that have waited too long for the first of their packet: at each tick.
    pub fn tick(&mut self, stats: &WorkerStats, now: Instant, pool: &mut FramePool) {
        while let Some(packet) = self.parts.next_late(now) {
            stats.drops(DropReason::FragmentWithoutFirst).add(1);
            pool.give_packet(packet);
        }
    }

    /// Gives back what is held, before the worker ends; returns how many packets that were.
    pub fn clear(&mut self, pool: &mut FramePool) -> usize {
        self.parts.clear(pool)
    }

    /// The end of a packet's way through here.
    fn leave(
        &mut self,
        packet: Packet,
        end: Result<End, DropReason>,
        context: Context<'_>,
        pool: &mut FramePool,
        forward: &mut impl FnMut(&mut FramePool, LinkId, Packet),
    ) {
        let stats = context.stats;
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
            Ok(End::Early(origin, headers)) => {
                let frames = packet.segments().len();
                while let Some(older) = self.parts.give_way(frames) {
                    stats.drops(DropReason::FragmentWithoutFirst).add(1);
                    pool.give_packet(older);
                }
                self.parts.hold(packet, origin, &headers, context.now);
            }
            Err(reason) => {
                stats.drops(reason).add(1);
                pool.give_packet(packet);
            }
        }
    }

    /// A fragment that was held, now that the first of its packet has come.
    fn resume(
        &mut self,
        packet: &mut Packet,
        headers: &Headers,
        origin: Origin,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, DropReason> {
        let tables = context.tables;
        let source = match origin {
            Origin::Overlay {
                peer,
                outer_src,
                identity,
            } => Source::Overlay {
                peer,
                outer_src,
                identity,
            },
            Origin::Outside => Source::Outside,
            Origin::Veth => match tables.link(packet.ingress).map(|entry| entry.role) {
                Some(LinkRole::Pod(id)) => tables.endpoint(id).map(|pod| Source::Pod(pod)),
                Some(LinkRole::Host) => tables.host().map(Source::Host),
                Some(LinkRole::Uplink(_)) | None => None,
            }
            .ok_or(DropReason::UnknownLink)?,
        };
        self.forward(packet, &source, headers, context, pool)
            .map_err(|refusal| self.shown(headers, refusal, context.now))
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
        let admitted = self.admit(packet, (role, endpoint), &headers, context, pool);
        admitted.or_else(|refusal| {
            self.show(&headers, refusal.reason, context.now);
            self.tell(packet, endpoint, &headers, &refusal, context, pool)
        })
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
        if !classify::is_overlay(context.tables, &outer) {
            return self.plain_packet(packet, &outer, context, pool);
        }
        let tunnel = parse_vxlan(head, &outer)?;
        let payload = &head[usize::from(outer.payload_offset)..];
        let source = classify::overlay(context.tables, &outer, payload)?;
        encap::pull(packet, tunnel.inner_offset.into())?;
        let inner = parse(packet.head(context.umem), packet.len())?;
        let judged = classify::inner(context.tables, &inner)
            .and_then(|()| encap::combine_ecn(outer.dscp_ecn, packet, context.umem, &inner))
            .map_err(Refusal::from);
        judged
            .and_then(|()| self.forward(packet, &source, &inner, context, pool))
            .map_err(|refusal| self.shown(&inner, refusal, context.now))
    }

    /// From an uplink, without a tunnel: an answer to what was translated here, or for a Service.
    fn plain_packet(
        &mut self,
        packet: &mut Packet,
        headers: &Headers,
        context: Context<'_>,
        pool: &mut FramePool,
    ) -> Result<End, DropReason> {
        let source = classify::outside(context.tables, headers)?;
        packet.partial_checksum = offload::unfinished(packet, context.umem, headers);
        self.forward(packet, &source, headers, context, pool)
            .map_err(|refusal| self.shown(headers, refusal, context.now))
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
            tables,
            umem,
            stats,
            now,
        } = context;
        trim_padding(packet, headers)?;
        let mut headers = *headers;
        if self.parts.resolve(packet, source, &mut headers, now) == Whole::Early {
            return Ok(End::Early(Origin::of(source), headers));
        }
        let headers = &headers;
        let key = FlowKey::new(source, headers);
        let hash = self.flows.hash(&key);
        let now_ms = now.millis_wrapping();
        let connections = &self.shared.connections;
        let fragments = &mut self.fragments;
        match self.flows.lookup(hash, &key, tables.epochs(), now_ms) {
            // A request to connect may begin anew what has ended under the same ports.
            Lookup::Hit(action)
                if !slow::is_opening(headers.tcp_flags)
                    && observe(action, connections, headers, now) =>
            {
                stats.flow_hits.add(1);
                return apply(action, packet, headers, umem, pool, fragments);
            }
            Lookup::Hit(_) | Lookup::Stale => stats.flow_stale.add(1),
            Lookup::Miss => stats.flow_misses.add(1),
        }
        let ask = Ask {
            source,
            headers,
            tables,
            shared: &self.shared,
            worker: self.worker,
            hash,
            now,
        };
        if headers.is_icmp_error() {
            return relate(&ask, packet, umem);
        }
        let action = slow::decide(&ask)?;
        observe(&action, connections, headers, now);
        if let Some(events) = self.shared.events.get(usize::from(self.worker.0)) {
            let to = action.translation.as_ref().map(Translation::result);
            let translated = to.copied().unwrap_or_else(|| Tuple::of(headers));
            let way = action.conn.map(|(_, way)| way);
            events.tell(FlowEvent::forwarded(headers, translated, way, now));
        }
        let (action, evicted) = self.flows.insert(hash, key, action, now_ms);
        stats.flow_evictions.add(evicted.into());
        apply(action, packet, headers, umem, pool, fragments)
    }

    /// Tells people of a drop, unless they have just been told.
    #[cold]
    fn show(&mut self, headers: &Headers, reason: DropReason, now: Instant) {
        if matches!(headers.kind, L3::Arp { .. }) {
            return;
        }
        let event = FlowEvent::dropped(headers, reason, now);
        if self
            .told
            .is_news(&event.tuple, reason, now.millis_wrapping())
            && let Some(events) = self.shared.events.get(usize::from(self.worker.0))
        {
            events.tell(event);
        }
    }

    /// The reason of a drop whose sender is not told, since it is not on this node.
    fn shown(&mut self, headers: &Headers, refusal: Refusal, now: Instant) -> DropReason {
        let reason = untold(refusal);
        self.show(headers, reason, now);
        reason
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

/// Why a packet is dropped whose sender is not told, since it is not on this node.
fn untold(refusal: Refusal) -> DropReason {
    match refusal.trouble {
        // Its sender keeps to the path's MTU, and this pod's is less.
        Some(Trouble::TooBig { .. }) => DropReason::TooBigForPod,
        _ => refusal.reason,
    }
}

/// Tells the packet's connection of it; false when that is no more, and the decision with it.
#[inline]
fn observe(action: &Action, connections: &Connections, headers: &Headers, now: Instant) -> bool {
    action
        .conn
        .is_none_or(|(conn, way)| connections.observe(conn, way, Segment::from(headers), now))
}

/// An ICMP error goes to whom the packet that it quotes came from. Nothing is kept: the next one
/// is about another packet.
#[cold]
fn relate(ask: &Ask<'_>, packet: &mut Packet, umem: &Umem) -> Result<End, Refusal> {
    let headers = ask.headers;
    let quote = Quote::read(packet.head(umem), headers).ok_or(DropReason::IcmpErrorUnrelated)?;
    let related = slow::relate(ask, &quote)?;
    let action = &related.action;
    if action.decrement_ttl {
        rewrite::decrement_ttl(packet, umem, headers)?;
    }
    quote.rewrite(packet, umem, headers, related.ends, &related.quoted)?;
    deliver(&action.delivery, packet, headers, umem)?;
    Ok(End::Forward(action.egress))
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
    if let Some(translation) = &action.translation {
        translation.apply(packet, umem, headers)?;
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
        Delivery::Wire(addresses) => {
            offload::finish(packet, umem)?;
            rewrite::set_addresses(packet, umem, *addresses)
        }
    }
}
