//! The table as a whole: against a naive model, from several threads, and short of room.

mod basics;
mod concurrent;
mod model;
mod room;

use std::time::Duration;

use super::{NewConnection, Segment, Tuple};
use crate::fixtures::{pod_v4, pod_v6};
use crate::ids::EndpointId;
use crate::parse::TcpFlags;
use crate::time::Instant;
use crate::wire::ipv6::v4_mapped;
use crate::wire::protocol;

fn at(seconds: u64) -> Instant {
    // An origin near the wrap of the 32-bit clock, so that every test crosses it.
    Instant::from_nanos((u64::from(u32::MAX) - 5_000) * 1_000_000) + Duration::from_secs(seconds)
}

fn flags(flags: &[TcpFlags]) -> Segment {
    Segment {
        tcp_flags: flags
            .iter()
            .fold(TcpFlags::default(), |all, &flag| all.union(flag)),
        sctp: None,
    }
}

fn syn() -> Segment {
    flags(&[TcpFlags::SYN])
}

/// A tuple from pod 1 that only its number tells from others of that protocol.
fn tuple(number: u32, protocol: u8) -> Tuple {
    let v6 = protocol == protocol::ICMPV6 || number & 1 == 1 && protocol != protocol::ICMP;
    let address = |pod: u8| {
        if v6 {
            pod_v6(1, pod).octets()
        } else {
            v4_mapped(pod_v4(1, pod).octets())
        }
    };
    let mut dst = address(2);
    dst[13] = (number >> 16) as u8;
    let has_ports = !matches!(protocol, protocol::ICMP | protocol::ICMPV6);
    Tuple {
        src: address(1),
        dst,
        src_port: number as u16,
        dst_port: if has_ports { 443 } else { 0 },
        protocol,
    }
}

fn new(original: Tuple) -> NewConnection {
    NewConnection {
        original,
        reply: original.reversed(),
        owner: EndpointId(1),
        masquerade: None,
        picked_up: false,
        service: 0,
    }
}
