//! Connections on the slow path: the one that a packet belongs to, or a new one with its
//! translation.
//!
//! A translation is decided once, by a connection's first packet, and stands in its two tuples:
//! what the initiator sends, and what the responder sends back. A packet of the one becomes what
//! answers the other.

use std::net::IpAddr;

use super::party::{self, Party, Place};
use super::route::Speaker;
use super::{Ask, Depends, Way, judge, route};
use crate::classify::Source;
use crate::conntrack::{
    CreateError, Direction, Found, NewConnection, Phase, PortLease, Segment, State, Tuple,
};
use crate::flow::Action;
use crate::ids::{EndpointId, IdentityId};
use crate::service::{self, Backend, Choice, Client, Frontend, ServiceId};
use crate::verdict::DropReason;
use crate::wire::ipv6::{ip_of_mapped, ip_to_mapped};
use crate::wire::protocol;
use crate::wire::tcp::TcpFlags;

/// How many ports are tried for a source before the packet is dropped.
const ATTEMPTS: u32 = 32;

/// The connection that the packet belongs to. One over UDP whose backend its Service has no more,
/// or that began before its Service was known, is given up, so that its client gets a backend at
/// once; over TCP it goes on until an end closes it. A request to connect on the ports of one
/// that has ended is a new connection's.
pub(super) fn known(ask: &Ask<'_>, tuple: &Tuple, depends: &mut Depends<'_>) -> Option<Way> {
    let connections = &ask.shared.connections;
    let found = connections.find(tuple, ask.now)?;
    let asks = found.direction == Direction::Original;
    let service = ServiceId::new(connections.service(found.conn))
        .or_else(|| service_at(ask, &found.original));
    if let Some(slot) = service.and_then(|service| ask.tables.service_epoch(service)) {
        depends.on(slot);
    }
    let is_over = || {
        let opens = is_opening(ask.headers.tcp_flags) && tuple.protocol == protocol::TCP;
        let state = connections.state(found.conn, ask.now);
        let ended = |state: State| matches!(state.phase(), Phase::TimeWait | Phase::Close);
        opens && state.is_none_or(ended)
    };
    let is_unserved = || {
        let (backend, port) = (ip_of_mapped(found.reply.src), found.reply.src_port);
        let is_udp = tuple.protocol == protocol::UDP;
        is_udp && service.is_some_and(|service| !ask.tables.is_backend(service, backend, port))
    };
    if asks && (is_over() || is_unserved()) {
        connections.remove(found.conn);
        return None;
    }
    Some(way_of(&found))
}

/// The Service whose address a connection was begun to: its number is not known of one that came
/// back from a journal, or that was there first.
fn service_at(ask: &Ask<'_>, original: &Tuple) -> Option<ServiceId> {
    let frontend = Frontend {
        address: ip_of_mapped(original.dst),
        port: original.dst_port,
        protocol: original.protocol,
    };
    let tables = ask.tables;
    let own = || tables.node().addresses.contains(&frontend.address);
    tables.services().find(frontend, own).map(|(_, id, _)| id)
}

/// Whether a segment asks for a new connection.
pub(crate) fn is_opening(flags: TcpFlags) -> bool {
    flags.contains(TcpFlags::SYN) && !flags.contains(TcpFlags::ACK)
}

fn way_of(found: &Found) -> Way {
    Way {
        conn: found.conn,
        direction: found.direction,
        to: match found.direction {
            Direction::Original => found.reply.reversed(),
            Direction::Reply => found.original.reversed(),
        },
        through_here: found.reply.dst != found.original.src,
    }
}

/// Opens a connection for the packet, if there is a backend for it, policy allows it and it has
/// a way.
pub(super) fn open(
    ask: &Ask<'_>,
    sender: &Party<'_>,
    tuple: &Tuple,
    depends: &mut Depends<'_>,
) -> Result<(Way, Action), DropReason> {
    let backend = backend(ask, sender, tuple, depends)?;
    let mut forward = *tuple;
    if let Some(backend) = &backend {
        forward.dst = ip_to_mapped(backend.address);
        forward.dst_port = backend.port;
    }
    let receiver = party::at(ask.tables, ip_of_mapped(forward.dst), depends);
    judge(
        ask.tables,
        sender,
        &receiver,
        forward.dst_port,
        tuple.protocol,
    )?;
    let source = source(ask, sender, &receiver, backend.as_ref())?;
    let speaker = Speaker {
        identity: source.map_or(sender.identity, |_| IdentityId::HOST),
        through_here: source.is_some(),
        is_answer: false,
    };
    let action = route::to(ask, sender, speaker, &receiver, depends)?;
    let owner = match (sender.place, receiver.place) {
        (Place::Pod(pod), _) | (_, Place::Pod(pod)) => pod.id,
        _ => EndpointId::HOST,
    };
    let service = backend.map_or(0, |backend| backend.service.number());
    let way = keep(ask, *tuple, forward, source, owner, service)?;
    Ok((way, action))
}

/// The backend that the packet is for, where it is for a Service. What comes from the overlay
/// has been through this on its sender's node.
pub(super) fn backend(
    ask: &Ask<'_>,
    sender: &Party<'_>,
    tuple: &Tuple,
    depends: &mut Depends<'_>,
) -> Result<Option<Backend>, DropReason> {
    let from = match ask.source {
        Source::Pod(_) => service::From::Pod,
        Source::Host(_) => service::From::Host,
        Source::Outside => service::From::Outside,
        // Another node's pod asks at this node's own address.
        Source::Overlay { .. } if ask.tables.node().addresses.contains(&ask.headers.dst()) => {
            service::From::Outside
        }
        Source::Overlay { .. } => return Ok(None),
    };
    let frontend = Frontend {
        address: ip_of_mapped(tuple.dst),
        port: tuple.dst_port,
        protocol: tuple.protocol,
    };
    let client = Client {
        address: sender.address,
        port: tuple.src_port,
        from,
    };
    let affinity = &ask.shared.affinity;
    match service::choose(ask.tables, affinity, frontend, client, ask.hash, ask.now) {
        Choice::NotAService if matches!(ask.source, Source::Outside) => Err(DropReason::NotForUs),
        Choice::NotAService => Ok(None),
        Choice::Refused(reason) => Err(reason),
        Choice::Backend(backend) => {
            if ask
                .tables
                .is_overlay_port(backend.address, backend.port, tuple.protocol)
            {
                return Err(DropReason::OverlayPort);
            }
            if let Some(slot) = ask.tables.service_epoch(backend.service) {
                depends.on(slot);
            }
            Ok(Some(backend))
        }
    }
}

/// The address that the packet is to come from, where it cannot keep its own: its receiver would
/// answer past this node.
pub(super) fn source(
    ask: &Ask<'_>,
    sender: &Party<'_>,
    receiver: &Party<'_>,
    backend: Option<&Backend>,
) -> Result<Option<IpAddr>, DropReason> {
    let to_itself = backend.is_some_and(|backend| backend.address == sender.address);
    let asked_for = backend.is_some_and(|backend| backend.snat);
    let to_outside =
        matches!(receiver.place, Place::Outside) && ask.tables.masquerades(receiver.address);
    // Another node's answers to this one's own address and port would not come by here.
    let node_to_node = backend.is_some()
        && matches!(sender.place, Place::Host)
        && matches!(receiver.place, Place::PeerNode(_));
    if !(to_itself || asked_for || to_outside || node_to_node) {
        return Ok(None);
    }
    let is_v4 = receiver.address.is_ipv4();
    let own = ask.tables.node().addresses.iter().copied();
    own.into_iter()
        .find(|address| address.is_ipv4() == is_v4)
        .map(Some)
        .ok_or(DropReason::NoNodeAddress)
}

/// Enters the connection. Where its packets get another source, a port of the node's is leased;
/// where another connection has the very same answers, another source port is tried.
fn keep(
    ask: &Ask<'_>,
    original: Tuple,
    forward: Tuple,
    source: Option<IpAddr>,
    owner: EndpointId,
    service: u32,
) -> Result<Way, DropReason> {
    let shared = ask.shared;
    for attempt in 0..ATTEMPTS {
        let mut translated = forward;
        let mut masquerade: Option<PortLease> = None;
        if let Some(address) = source {
            translated.src = ip_to_mapped(address);
            masquerade = shared.ports.lease(
                &forward,
                address.is_ipv4(),
                |port| shared.taken.has(port),
                attempt,
            );
            match &masquerade {
                Some(lease) => translated.src_port = lease.port,
                None if has_ports(&original) => return Err(DropReason::NoFreePort),
                None => {}
            }
        } else if attempt > 0 {
            if !has_ports(&original) {
                break;
            }
            // The client has this port towards the backend itself already.
            translated.src_port = spread(original.src_port, attempt);
        }
        let new = NewConnection {
            original,
            reply: translated.reversed(),
            owner,
            masquerade,
            picked_up: is_midway(ask),
            service,
        };
        match shared
            .connections
            .create(new, Segment::from(ask.headers), ask.now)
        {
            Ok(conn) => {
                return Ok(Way {
                    conn,
                    direction: Direction::Original,
                    to: translated,
                    through_here: source.is_some(),
                });
            }
            Err(CreateError::Full) => return Err(DropReason::ConnectionsFull),
            Err(CreateError::ShareUsed) => return Err(DropReason::ConnectionShareUsed),
            Err(CreateError::Taken) => {
                if let Some(found) = shared.connections.find(&original, ask.now) {
                    // Another worker was faster, by a packet of the other direction.
                    return Ok(way_of(&found));
                }
            }
        }
    }
    Err(DropReason::NoFreePort)
}

fn has_ports(tuple: &Tuple) -> bool {
    tuple.src_port != 0
}

/// Another unprivileged port.
fn spread(port: u16, attempt: u32) -> u16 {
    const FIRST: u32 = 1024;
    let ports = u32::from(u16::MAX) + 1 - FIRST;
    (FIRST + (u32::from(port) + attempt * 7919) % ports) as u16
}

/// Whether the packet is of a TCP connection that began before anybody here looked.
fn is_midway(ask: &Ask<'_>) -> bool {
    ask.headers.protocol == protocol::TCP && !is_opening(ask.headers.tcp_flags)
}
