//! Frames by name: what the fixture pods send, written by hand so that a benchmark does not
//! depend on the code that it measures.

use std::net::Ipv4Addr;

use skein_dataplane::fixtures::{gateway_mac, pod_mac, pod_v4};
use skein_dataplane::wire::checksum::Sum;

/// Bytes of Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 42;

/// A UDP packet from pod 1 of node 1, `len` bytes of frame in all (at least 42), of the flow
/// with that number. Its UDP checksum is finished (absent).
#[must_use]
pub fn udp(to: Ipv4Addr, flow: u32, len: usize) -> Vec<u8> {
    assert!(len >= HEADERS, "a frame has at least {HEADERS} bytes");
    let mut frame = vec![0; len];
    frame[..6].copy_from_slice(&gateway_mac(1, 1).0);
    frame[6..12].copy_from_slice(&pod_mac(1, 1).0);
    frame[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut frame[14..34];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&((len - 14) as u16).to_be_bytes());
    ip[8] = 64;
    ip[9] = 17;
    ip[12..16].copy_from_slice(&pod_v4(1, 1).octets());
    ip[16..20].copy_from_slice(&to.octets());
    let checksum = Sum::new().with(ip).checksum();
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let [a, b, c, d] = flow.to_be_bytes();
    // Two 16-bit ports hold more flows than any benchmark asks for.
    frame[34..38].copy_from_slice(&[c, d, a, b | 1]);
    frame[38..40].copy_from_slice(&((len - 34) as u16).to_be_bytes());
    frame
}
