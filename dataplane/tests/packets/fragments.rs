//! Fragmentation, and fragments on their way.

use skein_dataplane::fixtures::{UPLINK, endpoint, node};
use skein_dataplane::ids::{LinkId, WorkerId};
use skein_dataplane::io::packet::Packet;
use skein_dataplane::io::pool::{FramePool, FrameStore};
use skein_dataplane::pipeline::{Context, Pipeline};
use skein_dataplane::snapshot::{Snapshot, SnapshotBuilder};
use skein_dataplane::stats::WorkerStats;
use skein_dataplane::time::Instant;
use skein_dataplane::verdict::DropReason;

use crate::common::frames::{self, Kind, frame};
use crate::common::{Cluster, naive};
use crate::{FAR, FROM, MTU, NEAR};

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) >> 3) as u8).collect()
}

#[test]
fn what_may_be_cut_arrives_in_fragments_in_order() {
    for mut cluster in [Cluster::new(1), Cluster::over_ipv6(2)] {
        for to in [NEAR, FAR] {
            for len in [1423, 1424, 3000, 9000, 65_507] {
                let whole = naive::may_be_cut(frame(Kind::UdpV4, FROM, to, 64, &bytes(len)), 9);
                let before = cluster.count(1, |stats| stats.fragments.value());
                let (arrived, back) = cluster.exchange(FROM, to, whole.clone());
                assert!(back.is_empty());
                assert!(arrived.iter().all(|sent| sent.partial_checksum.is_none()));
                let arrived: Vec<_> = arrived.into_iter().map(|sent| sent.bytes).collect();
                let starts: Vec<_> = arrived
                    .iter()
                    .map(|f| naive::placed(&f[naive::IP..]).start)
                    .collect();
                assert!(starts.is_sorted(), "{starts:?}");
                let expected = &naive::one_hop_later(whole)[naive::IP..];
                assert_eq!(
                    naive::reassemble(&arrived, MTU),
                    expected,
                    "{len} to {to:?}"
                );
                let made = cluster.count(1, |stats| stats.fragments.value()) - before;
                assert_eq!(made, arrived.len() as u64);
                assert_eq!(
                    arrived[0][..6],
                    skein_dataplane::fixtures::pod_mac(to.0, to.1).0
                );
            }
        }
        cluster.finish();
    }
}

#[test]
fn an_unfinished_checksum_is_completed_before_the_cut() {
    let mut cluster = Cluster::new(1);
    for to in [NEAR, FAR] {
        for kind in [Kind::UdpV4, Kind::TcpV4] {
            let whole = naive::may_be_cut(frame(kind, FROM, to, 64, &bytes(5001)), 3);
            let (arrived, _) = cluster.exchange(FROM, to, frames::unfinish(whole.clone()));
            let arrived: Vec<_> = arrived.into_iter().map(|sent| sent.bytes).collect();
            let expected = &naive::one_hop_later(whole)[naive::IP..];
            assert_eq!(naive::reassemble(&arrived, MTU), expected);
        }
    }
    cluster.finish();
}

#[test]
fn a_fragment_that_is_too_large_is_cut_again() {
    let mut cluster = Cluster::new(1);
    let whole = naive::ipv4(FROM, FAR, 253, &[], &bytes(8000));
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let large = naive::cut_v4(&whole, 3200);
        for number in order {
            cluster.send(FROM.0, FROM.1, naive::framed(FROM, &large[number]));
        }
        cluster.run();
        let arrived = cluster.received(FAR.0, FAR.1);
        assert_eq!(arrived.len(), 3 + 3 + 2);
        let expected = naive::one_hop_later(naive::framed(FROM, &whole));
        assert_eq!(naive::reassemble(&arrived, MTU), expected[naive::IP..]);
    }
    cluster.finish();
}

#[test]
fn options_go_where_they_say() {
    let mut cluster = Cluster::new(1);
    // No-operation, record route with room for one, router alert (copied), end.
    let options = [1, 7, 7, 4, 0, 0, 0, 0, 0x94, 4, 0, 0];
    let whole = naive::framed(FROM, &naive::ipv4(FROM, FAR, 253, &options, &bytes(4000)));
    let (arrived, _) = cluster.exchange(FROM, FAR, whole.clone());
    let arrived: Vec<_> = arrived.into_iter().map(|sent| sent.bytes).collect();
    assert_eq!(arrived[0][34..46], options);
    for later in &arrived[1..] {
        assert_eq!(naive::header_len(&later[naive::IP..]), 24);
        assert_eq!(later[34..38], [0x94, 4, 0, 0]);
    }
    let expected = &naive::one_hop_later(whole)[naive::IP..];
    assert_eq!(naive::reassemble(&arrived, MTU), expected);
    cluster.finish();
}

#[test]
fn fragments_pass_in_any_order_with_and_without_their_first() {
    let mut cluster = Cluster::new(2);
    for to in [NEAR, FAR] {
        let udp = [&[4, 210, 0, 53, 2, 88, 0, 0][..], &bytes(592)].concat();
        let v4 = naive::cut_v4(&naive::ipv4(FROM, to, 17, &[], &udp), 200);
        let v6 = naive::cut_v6(&naive::ipv6(FROM, to, 17, &udp), 200);
        for fragments in [v4, v6] {
            let fragments: Vec<_> = fragments.iter().map(|f| naive::framed(FROM, f)).collect();
            for order in [&[0, 1, 2][..], &[2, 1, 0], &[1, 0, 2], &[1], &[2, 1]] {
                for &number in order {
                    cluster.send(FROM.0, FROM.1, fragments[number].clone());
                }
                cluster.run();
                let arrived = cluster.received(to.0, to.1);
                assert_eq!(arrived.len(), order.len());
                for (arrived, &number) in arrived.iter().zip(order) {
                    let expected = naive::one_hop_later(fragments[number].clone());
                    assert_eq!(arrived[12..], expected[12..], "{order:?} to {to:?}");
                }
            }
        }
    }
    assert_eq!(cluster.all_drops(1) + cluster.all_drops(2), 0);
    cluster.finish();
}

/// A worker of one pod on a path of `mtu` bytes, with a few frames; what it forwards, and what
/// reason it counts, for one packet.
fn alone(mtu: u32, chunks: u32, sent: &[u8]) -> (Vec<Vec<u8>>, Option<DropReason>) {
    let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
    builder.add_uplink_link(UPLINK, WorkerId(0), 0).unwrap();
    builder.set_endpoint(endpoint(1, 1), WorkerId(0)).unwrap();
    let mut neighbour = endpoint(1, 2);
    neighbour.mtu = mtu;
    builder.set_endpoint(neighbour, WorkerId(0)).unwrap();
    let store = FrameStore::new(chunks).unwrap();
    let mut pool = FramePool::new(store.clone());
    let stats = WorkerStats::new();
    let tables = builder.finish();
    let context = Context {
        tables: &tables,
        umem: store.umem(),
        stats: &stats,
        now: Instant::default(),
    };
    let packet = Packet::from_bytes(&mut pool, LinkId(1), sent).unwrap();
    let mut out = Vec::new();
    // Held until all are there, as a device would.
    let mut held = Vec::new();
    Pipeline::new(WorkerId(0), 8, skein_dataplane::fixtures::shared()).process(
        &mut vec![packet],
        LinkId(1),
        context,
        &mut pool,
        |pool, link, packet| {
            assert_eq!(link, LinkId(2));
            out.push(packet.to_vec(pool.umem()));
            held.push(packet);
        },
    );
    held.into_iter().for_each(|packet| pool.give_packet(packet));
    assert_eq!(
        pool.held() + store.available(),
        chunks as usize,
        "frames balance"
    );
    let mut reasons = DropReason::ALL.iter().copied();
    let reason = reasons.find(|&reason| stats.drops(reason).value() > 0);
    (out, reason)
}

#[test]
fn without_frames_for_all_there_are_none() {
    let whole = naive::framed(FROM, &naive::ipv4(FROM, NEAR, 253, &[], &bytes(6000)));
    // Two frames hold the packet, five fragments need one each.
    for chunks in 2..7 {
        let (out, reason) = alone(1450, chunks, &whole);
        assert_eq!(reason, Some(DropReason::NoFrameForFragment), "{chunks}");
        assert!(out.is_empty());
    }
    let (out, reason) = alone(1450, 7, &whole);
    assert_eq!((out.len(), reason), (5, None));
}

#[test]
fn paths_of_any_mtu() {
    for (mtu, len) in [
        (68, 4000),
        (69, 500),
        (76, 48),
        (576, 65_515),
        (5001, 65_515),
    ] {
        let whole = naive::framed(FROM, &naive::ipv4(FROM, NEAR, 253, &[], &bytes(len)));
        let (out, reason) = alone(mtu, 512, &whole);
        assert_eq!(reason, None, "{len} bytes at {mtu}");
        let expected = naive::one_hop_later(whole);
        assert_eq!(naive::reassemble(&out, mtu as usize), expected[naive::IP..]);
    }
    let large = naive::framed(FROM, &naive::ipv4(FROM, NEAR, 253, &[], &bytes(9000)));
    let options = naive::framed(FROM, &naive::ipv4(FROM, NEAR, 253, &[1; 40], &bytes(900)));
    for (mtu, whole) in [(68, &large), (67, &options), (0, &options)] {
        let (out, reason) = alone(mtu, 512, whole);
        assert_eq!(reason, Some(DropReason::TooManyFragments), "{mtu}");
        assert!(out.is_empty());
    }
}
