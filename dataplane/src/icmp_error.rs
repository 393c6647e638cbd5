//! What the gateway tells a pod about a packet that goes no further.
//!
//! Stands beside [`crate::pipeline`], off the straight line: a packet that was dropped for a
//! reason that its sender can act upon becomes the ICMP error about itself, in its own frame,
//! and goes back by the link that it came in by. So an error needs no memory and cannot fail
//! for want of it. When none may be sent (RFC 1122 section 3.2.2, RFC 4443 section 2.4(e)) the
//! drop is silent.
//!
//! Each endpoint has its share of errors, a token bucket: [`BURST`] at once, one more each
//! [`INTERVAL`], so that a pod cannot keep its worker busy with them. (Workers share nothing: a
//! pod with queues of several has a share of each.)
//!
//! Deliberately absent: errors to senders behind the overlay. They have the same path MTU as
//! the receiving node and were told by their own.

use std::time::Duration;

use crate::hairpin::{GATEWAY_V4, GATEWAY_V6};
use crate::ids::EndpointId;
use crate::io::packet::Packet;
use crate::io::pool::FramePool;
use crate::io::umem::Umem;
use crate::parse::{EthernetHeader, Headers};
use crate::reset;
use crate::snapshot::Endpoint;
use crate::time::Instant;
use crate::verdict::DropReason;
use crate::wire::icmp::{self, IcmpError};
use crate::wire::icmpv6::{self, Icmpv6Error};

/// Errors that an endpoint may be sent at once.
pub const BURST: u32 = 256;

/// How long it takes until an endpoint may be sent one more: a thousand a second.
pub const INTERVAL: Duration = Duration::from_millis(1);

/// Buckets of a worker. Endpoints whose numbers agree modulo this share one; control hands
/// numbers out from the lowest, and no node has this many.
const BUCKETS: usize = 1024;

/// What a sender can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Larger than the path's MTU, and not to be fragmented.
    TooBig {
        /// The largest IP packet that the path takes, in bytes.
        mtu: u32,
    },
    /// The TTL or hop limit ran out.
    Expired,
    /// Nobody has the destination address.
    NoRoute,
    /// The gateway has it, and serves nothing there.
    NoListener,
    /// It is a Service's, and nobody serves it now: a TCP client gets a reset.
    NobodyServes,
}

impl Trouble {
    /// What to tell about a packet that was dropped for this reason, where that says it all.
    #[must_use]
    pub fn of(reason: DropReason) -> Option<Self> {
        match reason {
            DropReason::TtlExceeded => Some(Self::Expired),
            DropReason::NoRoute => Some(Self::NoRoute),
            DropReason::GatewayRefused => Some(Self::NoListener),
            DropReason::NoEndpoints | DropReason::NoServicePort => Some(Self::NobodyServes),
            _ => None,
        }
    }

    /// Whether an error may be sent about a packet with these headers.
    #[must_use]
    pub fn may_be_told(self, headers: &Headers) -> bool {
        match self {
            Self::TooBig { .. } => headers.permits_too_big(),
            Self::Expired | Self::NoRoute | Self::NoListener | Self::NobodyServes => {
                headers.permits_icmp_error()
            }
        }
    }

    fn to_v4(self) -> IcmpError {
        let unreachable = |code| IcmpError::Unreachable { code };
        match self {
            Self::TooBig { mtu } => IcmpError::FragmentationNeeded {
                mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            },
            Self::Expired => IcmpError::TimeExceeded,
            Self::NoRoute => unreachable(icmp::CODE_HOST_UNREACHABLE),
            Self::NoListener | Self::NobodyServes => unreachable(icmp::CODE_PORT_UNREACHABLE),
        }
    }

    fn to_v6(self) -> Icmpv6Error {
        let unreachable = |code| Icmpv6Error::Unreachable { code };
        match self {
            Self::TooBig { mtu } => Icmpv6Error::PacketTooBig { mtu },
            Self::Expired => Icmpv6Error::TimeExceeded,
            Self::NoRoute => unreachable(icmpv6::CODE_NO_ROUTE),
            Self::NoListener | Self::NobodyServes => unreachable(icmpv6::CODE_PORT_UNREACHABLE),
        }
    }
}

/// How many errors each endpoint may still be sent.
#[derive(Debug)]
pub struct Limiter {
    /// By endpoint number: when the bucket will be full again, in nanoseconds (the "theoretical
    /// arrival time" of ATM's generic cell rate algorithm, which keeps a bucket in one number).
    full_at: Box<[u64]>,
}

impl Default for Limiter {
    fn default() -> Self {
        Self {
            full_at: vec![0; BUCKETS].into_boxed_slice(),
        }
    }
}

impl Limiter {
    /// Takes a token from the endpoint's bucket; false when it is empty.
    pub fn take(&mut self, endpoint: EndpointId, now: Instant) -> bool {
        const INTERVAL_NS: u64 = INTERVAL.as_nanos() as u64;
        const TOLERANCE_NS: u64 = INTERVAL_NS * (BURST as u64 - 1);
        let full_at = &mut self.full_at[endpoint.0 as usize % BUCKETS];
        let now = now.nanos();
        if full_at.saturating_sub(now) > TOLERANCE_NS {
            return false;
        }
        *full_at = (*full_at).max(now).saturating_add(INTERVAL_NS);
        true
    }
}

/// Turns a pod's packet, as it was received and parsed, into the error about itself; false when
/// that cannot be, and then the packet is only good to be given back.
pub fn write(
    packet: &mut Packet,
    umem: &Umem,
    pool: &mut FramePool,
    headers: &Headers,
    endpoint: &Endpoint,
    trouble: Trouble,
) -> bool {
    const LONGEST: usize = icmpv6::ERROR_FRAME_MAX_LEN;
    const _: () = assert!(LONGEST > icmp::ERROR_FRAME_MAX_LEN, "room for either");
    let l2 = EthernetHeader {
        dst: endpoint.mac,
        src: endpoint.gateway_mac,
    };
    if trouble == Trouble::NobodyServes && reset::answers(headers) {
        let mut segment = [0; reset::FRAME_MAX_LEN];
        let built = reset::build(&mut segment, l2, headers, packet.head(umem));
        return built.is_some_and(|len| replace(packet, umem, pool, &segment[..len]));
    }
    let mut error = [0; LONGEST];
    let offending = &packet.head(umem)[usize::from(headers.l3_offset)..];
    let built = if headers.is_v4() {
        let source = GATEWAY_V4.octets();
        icmp::build_error(&mut error, l2, source, trouble.to_v4(), offending)
    } else {
        let source = GATEWAY_V6.octets();
        icmpv6::build_error(&mut error, l2, source, trouble.to_v6(), offending)
    };
    built.is_some_and(|len| replace(packet, umem, pool, &error[..len]))
}

/// Makes the packet one of these bytes.
fn replace(packet: &mut Packet, umem: &Umem, pool: &mut FramePool, bytes: &[u8]) -> bool {
    // Only the head stays: it alone was quoted from, and its frame has room for any error.
    packet.truncate(packet.segments()[0].len(), pool);
    if !packet.resize_head(bytes.len()) {
        return false;
    }
    packet.head_mut(umem).copy_from_slice(bytes);
    packet.partial_checksum = None;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_one_each_interval_for_each_endpoint_alone() {
        let mut limiter = Limiter::default();
        let start = Instant::from_nanos(5_000_000_000);
        let burst = (0..2 * BURST).filter(|_| limiter.take(EndpointId(1), start));
        assert_eq!(burst.count() as u32, BURST);
        assert!(limiter.take(EndpointId(2), start), "another's share");
        let almost = start + (INTERVAL - Duration::from_nanos(1));
        assert!(!limiter.take(EndpointId(1), almost));
        assert!(limiter.take(EndpointId(1), start + INTERVAL));
        assert!(!limiter.take(EndpointId(1), start + INTERVAL));
        // A long silence fills the bucket, and no more than that.
        let later = start + Duration::from_secs(3600);
        let burst = (0..2 * BURST).filter(|_| limiter.take(EndpointId(1), later));
        assert_eq!(burst.count() as u32, BURST);
    }
}
