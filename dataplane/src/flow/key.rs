//! What makes two packets the same flow.
//!
//! ```text
//!  0        16       32             48        52    56       58       60      61    62    64
//!  ├ source ┼  dest. ┼ outer source ┼ ingress ┼ VNI ┼ sport  ┼ dport  ┼ proto ┼ icmp┼ zero ┤
//! ```
//!
//! One cache line. Addresses are IPv4-mapped where they are IPv4. For a packet from a pod or
//! the host the outer source is zero and the ingress is its link; for one from the overlay the ingress is
//! [`OVERLAY`] and the VNI and outer source are the tunnel's, so that what was checked of a
//! tunnel's origin when the flow was decided holds for every packet that hits.
//!
//! Fragments have the key of the packet that they are of: whoever asks has filled in the ports,
//! which only the first of them carries.

use std::hash::{BuildHasher, Hasher};

use crate::classify::Source;
use crate::ids::IdentityId;
use crate::parse::Headers;

/// The ingress of whatever comes from the overlay, by any queue of any uplink.
const OVERLAY: u32 = u32::MAX;
/// The ingress of what an uplink takes in without a tunnel.
const OUTSIDE: u32 = u32::MAX - 1;

/// The key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowKey([u64; 8]);

const _: () = assert!(size_of::<FlowKey>() == 64, "a key is one cache line");

impl FlowKey {
    /// The key of a packet that comes from `source` with these (inner) headers.
    #[must_use]
    pub fn new(source: &Source<'_>, headers: &Headers) -> Self {
        let (outer, ingress, vni) = match source {
            Source::Pod(endpoint) | Source::Host(endpoint) => ([0; 16], endpoint.link.0, 0),
            Source::Overlay {
                outer_src,
                identity,
                ..
            } => (*outer_src, OVERLAY, IdentityId::number(*identity)),
            Source::Outside => ([0; 16], OUTSIDE, 0),
        };
        // A request and a reply with one identifier are packets of two connections.
        let icmp = headers.icmp.map_or(0, |(kind, _)| kind);
        let [src_high, src_low] = halves(headers.src_bytes);
        let [dst_high, dst_low] = halves(headers.dst_bytes);
        let [outer_high, outer_low] = halves(outer);
        let ports = u64::from(headers.src_port) << 48
            | u64::from(headers.dst_port) << 32
            | u64::from(headers.protocol) << 24
            | u64::from(icmp) << 16;
        let origin = u64::from(ingress) << 32 | u64::from(vni);
        Self([
            src_high, src_low, dst_high, dst_low, outer_high, outer_low, origin, ports,
        ])
    }

    /// The key's hash under a seeded hasher: an outsider cannot choose keys that collide.
    #[inline]
    #[must_use]
    pub fn hash(&self, hasher: &impl BuildHasher) -> u64 {
        let mut state = hasher.build_hasher();
        for word in self.0 {
            state.write_u64(word);
        }
        state.finish()
    }
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let value = u128::from_ne_bytes(bytes);
    [(value >> 64) as u64, value as u64]
}
