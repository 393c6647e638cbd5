//! Tunnels inside pods whose inner checksums are left to the device.

use proptest::prelude::*;
use skein_dataplane::ids::LinkId;
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::{nested, parse};

use crate::common::frames::{self, Kind, frame, sum};
use crate::common::{Cluster, naive};
use crate::{FAR, FROM, NEAR};

/// A tunnel that a pod can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tunnel {
    Vxlan,
    VxlanLinux,
    Geneve,
    GeneveIp,
    Gre,
    GreKeyed,
    GreChecked,
    GreBridged,
    Ipip,
    Gtpu,
    GtpuLong,
}

use Tunnel::*;

const ALL: [Tunnel; 11] = [
    Vxlan, VxlanLinux, Geneve, GeneveIp, Gre, GreKeyed, GreChecked, GreBridged, Ipip, Gtpu,
    GtpuLong,
];

impl Tunnel {
    fn port(self) -> Option<u16> {
        match self {
            Vxlan => Some(4789),
            VxlanLinux => Some(8472),
            Geneve | GeneveIp => Some(6081),
            Gtpu | GtpuLong => Some(2152),
            _ => None,
        }
    }

    fn bridged(self) -> bool {
        matches!(self, Vxlan | VxlanLinux | Geneve | GreBridged)
    }

    /// The header, as kernels write it, before that inner packet.
    fn header(self, inner_v4: bool) -> Vec<u8> {
        let [high, low] = if self.bridged() {
            [0x65, 0x58]
        } else if inner_v4 {
            [0x08, 0x00]
        } else {
            [0x86, 0xdd]
        };
        match self {
            Vxlan | VxlanLinux => vec![0x08, 0, 0, 0, 0, 0, 0x2a, 0],
            // With one option of four bytes.
            Geneve => vec![2, 0, high, low, 0, 0, 0x2a, 0, 1, 4, 0x80, 1, 9, 9, 9, 9],
            GeneveIp => vec![0, 0, high, low, 0, 0, 0x2a, 0],
            Gre | GreBridged => vec![0, 0, high, low],
            GreKeyed => vec![0x30, 0, high, low, 0, 0, 0, 7, 0, 0, 0, 1],
            GreChecked => vec![0x80, 0, high, low, 0, 0, 0, 0],
            Ipip => vec![],
            Gtpu => vec![0x30, 0xff, 0, 20, 0, 0, 0, 1],
            GtpuLong => vec![0x34, 0xff, 0, 28, 0, 0, 0, 1, 0, 0, 0, 0x85, 1, 0, 9, 0],
        }
    }

    /// That inner frame, Ethernet header and all, in this tunnel in an IP packet from pod to
    /// pod. A checksum of UDP or GRE is as `outer` says.
    fn wrap(self, inner: &[u8], v4: bool, to: (u8, u8), outer: Outer) -> Vec<u8> {
        let inner_v4 = inner[12] == 8;
        let carried = if self.bridged() { inner } else { &inner[14..] };
        let mut payload = [&self.header(inner_v4), carried].concat();
        let mut protocol = 47;
        if let Some(port) = self.port() {
            let [high, low] = port.to_be_bytes();
            let [long, short] = (8 + payload.len() as u16).to_be_bytes();
            payload.splice(..0, [0xc0, 1, high, low, long, short, 0, 0]);
            protocol = 17;
        } else if self == Ipip {
            protocol = if inner_v4 { 4 } else { 41 };
        }
        let packet = if v4 {
            naive::ipv4(FROM, to, protocol, &[], &payload)
        } else {
            naive::ipv6(FROM, to, protocol, &payload)
        };
        let mut frame = naive::framed(FROM, &packet);
        let l4 = if v4 { 34 } else { 54 };
        if self == GreChecked && outer == Outer::Finished {
            let checksum = !sum(&frame[l4..]);
            frame[l4 + 4..l4 + 6].copy_from_slice(&checksum.to_be_bytes());
        } else if protocol == 17 && outer != Outer::None {
            // The pseudo-header's sum, and over it that of the rest.
            frame = frames::unfinish(frame);
            if outer == Outer::Finished {
                let checksum = !sum(&frame[l4..]);
                let checksum = if checksum == 0 { 0xffff } else { checksum };
                frame[l4 + 6..l4 + 8].copy_from_slice(&checksum.to_be_bytes());
            }
        }
        frame
    }
}

/// What the outer checksum is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outer {
    None,
    Partial,
    Finished,
}

const INNER: [Kind; 4] = [Kind::TcpV4, Kind::UdpV4, Kind::TcpV6, Kind::UdpV6];

/// The inner frame, unfinished and finished.
fn inner(kind: Kind, payload: &[u8]) -> [Vec<u8>; 2] {
    let whole = frame(kind, (7, 7), (8, 8), 64, payload);
    [frames::unfinish(whole.clone()), whole]
}

/// Puts the unfinished inner frame in the place of the finished one, which the outer checksum
/// was computed over: what local checksum offload sends.
fn swap(mut outer: Vec<u8>, whole: &[u8], unfinished: &[u8]) -> Vec<u8> {
    let at = outer.len() - (whole.len() - 14);
    outer[at..].copy_from_slice(&unfinished[14..]);
    outer
}

#[test]
fn inner_checksums_are_completed_for_the_wire_and_for_neighbours() {
    let mut cluster = Cluster::new(1);
    for tunnel in ALL {
        for (v4, kind) in [true, false]
            .into_iter()
            .flat_map(|v4| INNER.map(|k| (v4, k)))
        {
            for outer in [Outer::None, Outer::Partial, Outer::Finished] {
                let [unfinished, whole] = inner(kind, b"some payload, odd");
                for to in [NEAR, FAR] {
                    let sent = tunnel.wrap(&whole, v4, to, outer);
                    let sent = swap(sent, &whole, &unfinished);
                    let (arrived, _) = cluster.exchange(FROM, to, sent);
                    let [arrived] = &arrived[..] else {
                        panic!("{tunnel:?} to {to:?}: {} arrived", arrived.len())
                    };
                    let announced = arrived.partial_checksum.is_some();
                    let udp = tunnel.port().is_some();
                    let as_it_came = outer == Outer::Partial && udp && to == NEAR;
                    assert_eq!(announced, as_it_came, "{tunnel:?} {outer:?} to {to:?}");
                    let outer = match outer {
                        Outer::Partial if !as_it_came => Outer::Finished,
                        // Zero in GRE is a checksum that is left to the device.
                        Outer::None if tunnel == GreChecked => Outer::Finished,
                        outer => outer,
                    };
                    let expected = naive::one_hop_later(tunnel.wrap(&whole, v4, to, outer));
                    let case = format!("{tunnel:?} v4={v4} {kind:?} {outer:?} to {to:?}");
                    assert_eq!(arrived.bytes[12..], expected[12..], "{case}");
                }
            }
        }
    }
    cluster.finish();
}

#[test]
fn a_tunnel_that_is_cut_is_completed_first() {
    let mut cluster = Cluster::new(1);
    let [unfinished, whole] = inner(Kind::TcpV4, &[0x5a; 3001]);
    for tunnel in ALL {
        let finished = tunnel.wrap(&whole, true, FAR, Outer::Finished);
        let sent = swap(finished.clone(), &whole, &unfinished);
        let (arrived, _) = cluster.exchange(FROM, FAR, sent);
        let arrived: Vec<_> = arrived.into_iter().map(|sent| sent.bytes).collect();
        assert_eq!(arrived.len(), 3, "{tunnel:?}");
        let expected = naive::one_hop_later(finished);
        assert_eq!(
            naive::reassemble(&arrived, 1450),
            expected[naive::IP..],
            "{tunnel:?}"
        );
    }
    cluster.finish();
}

#[test]
fn on_other_ports_and_after_the_senders_node_nothing_is_touched() {
    let mut cluster = Cluster::new(1);
    let [unfinished, whole] = inner(Kind::TcpV4, b"x");
    let sent = Vxlan.wrap(&whole, true, FAR, Outer::None);
    let mut sent = swap(sent, &whole, &unfinished);
    sent[36..38].copy_from_slice(&4790_u16.to_be_bytes());
    let (arrived, _) = cluster.exchange(FROM, FAR, sent.clone());
    assert_eq!(arrived[0].bytes[12..], naive::one_hop_later(sent)[12..]);
    cluster.finish();
}

fn finished(frame: &[u8]) -> Vec<u8> {
    let mut pool = FramePool::new(FrameStore::new(32).unwrap());
    let store = pool.store().clone();
    let mut packet = Packet::from_bytes(&mut pool, LinkId(1), frame).unwrap();
    let headers = parse::parse(packet.head(store.umem()), packet.len()).unwrap();
    if nested::may_carry(&headers) {
        nested::finish(&mut packet, store.umem(), &headers).unwrap();
    }
    let bytes = packet.to_vec(store.umem());
    pool.give_packet(packet);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Tunnels in tunnels, three deep at most, over several segments: the innermost checksum is
    /// completed, and what stands around it is what it was for the completed one.
    #[test]
    fn nested_tunnels_are_completed_as_naively(
        kind in prop::sample::select(&INNER[..]),
        tunnels in prop::collection::vec((prop::sample::select(&ALL[..]), any::<bool>()), 1..=3),
        payload in prop::collection::vec(any::<u8>(), 0..6000),
        padding in 0_usize..3,
    ) {
        let [mut unfinished, mut whole] = inner(kind, &payload);
        let mut ends = Vec::new();
        for (tunnel, v4) in tunnels {
            let finished = tunnel.wrap(&whole, v4, FAR, Outer::Finished);
            unfinished = swap(finished.clone(), &whole, &unfinished);
            whole = finished;
            ends.push(whole.len());
        }
        // What stands behind the packet is not summed.
        unfinished.extend(vec![0xee; padding]);
        whole.extend(vec![0xee; padding]);
        prop_assert_eq!(finished(&unfinished), whole);
    }

    /// What is no tunnel, though it looks like one, stays as it is: nothing panics, and no more
    /// than checksum fields can change.
    #[test]
    fn anything_on_a_tunnels_port_is_survived(
        tunnel in prop::sample::select(&ALL[..]),
        payload in prop::collection::vec(any::<u8>(), 0..200),
        v4: bool,
        cut in 0_usize..60,
        flips in prop::collection::vec((0_usize..120, any::<u8>()), 0..6),
    ) {
        let [unfinished, _] = inner(Kind::UdpV4, &payload);
        let mut inner = unfinished[..unfinished.len().saturating_sub(cut).max(14)].to_vec();
        for (at, value) in flips {
            if let Some(byte) = inner.get_mut(at) {
                *byte = value;
            }
        }
        let sent = tunnel.wrap(&inner, v4, FAR, Outer::None);
        let after = finished(&sent);
        let changed = sent.iter().zip(&after).filter(|(a, b)| a != b).count();
        prop_assert!(changed <= 4, "{} bytes changed", changed);
    }
}
