//! A packet of every size over real sockets: each comes back whole, or the gateway says by how
//! much it was too large. Never silence.

mod common;

use std::net::IpAddr;
use std::ops::RangeInclusive;

use common::Cluster;
use skein_perf::check::{self, Cutting, Echo};
use skein_perf::probe::sizes::{Fate, Run};
use skein_perf::{AgentOptions, LabOptions, Pod};

/// What pods' routes say across a wire of 1500 bytes: less 50 for the overlay over IPv4.
const PATH_MTU: usize = 1450;

/// The largest echo.
const LARGEST: usize = 9000;

/// IP and ICMP echo, or UDP, before the payload.
const HEADERS_V4: usize = 28;
const HEADERS_V6: usize = 48;

fn returned(sizes: RangeInclusive<usize>) -> Run {
    Run {
        sizes,
        fate: Fate::Returned,
    }
}

/// What must become of packets that nobody may cut.
fn whole_or_told(sizes: RangeInclusive<usize>, v6: bool) -> [Run; 2] {
    let (headers, gateway) = if v6 {
        (HEADERS_V6, "fe80::1")
    } else {
        (HEADERS_V4, "169.254.1.1")
    };
    let limit = PATH_MTU - headers;
    let by: IpAddr = gateway.parse().unwrap();
    let mtu = PATH_MTU as u32;
    let fate = Fate::TooBig { mtu, by };
    let told = Run {
        sizes: limit + 1..=*sizes.end(),
        fate,
    };
    [returned(*sizes.start()..=limit), told]
}

fn sizes(
    (from, to): (&Pod, &Pod),
    v6: bool,
    sizes: RangeInclusive<usize>,
    echo: Echo,
    cutting: Cutting,
) -> Vec<Run> {
    let ip = to.ip(v6).unwrap();
    check::sizes(from.netns(), to.netns(), ip, sizes, echo, cutting).unwrap()
}

#[test]
fn an_echo_of_every_size_crosses_nodes_or_is_told_why_not() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    let [a, b, c] = &cluster.pods[..] else {
        unreachable!("three pods")
    };
    // Two senders, since each has its own share of the gateway's errors.
    std::thread::scope(|scope| {
        let v4 = scope.spawn(|| {
            let all = 0..=LARGEST;
            let cut = sizes((a, c), false, all.clone(), Echo::Icmp, Cutting::Allowed);
            let whole = sizes((a, c), false, all, Echo::Icmp, Cutting::Forbidden);
            (cut, whole)
        });
        let v6 = sizes((b, c), true, 0..=LARGEST, Echo::Icmp, Cutting::Forbidden);
        assert_eq!(v6, whole_or_told(0..=LARGEST, true), "IPv6");
        let (cut, whole) = v4.join().unwrap();
        assert_eq!(cut, [returned(0..=LARGEST)], "IPv4 without DF");
        assert_eq!(whole, whole_or_told(0..=LARGEST, false), "IPv4 with DF");
    });
    cluster.finish();
}

#[test]
fn datagrams_around_each_limit_arrive_or_are_told_why_not() {
    let cluster = Cluster::new(&LabOptions::default(), &AgentOptions::default());
    for (path, from, to, _) in cluster.paths() {
        for v6 in [false, true] {
            let range = 1380..=1470;
            let runs = sizes((from, to), v6, range.clone(), Echo::Udp, Cutting::Forbidden);
            assert_eq!(runs, whole_or_told(range, v6), "{path}, IPv6: {v6}");
        }
        // An idle link has few frames to receive into: the first bursts of fragments, which 64
        // KiB are cut into, may find too few (docs/adr/0001-umem.md).
        sizes(
            (from, to),
            false,
            65_400..=65_409,
            Echo::Udp,
            Cutting::Allowed,
        );
        // What the path takes; what a chunk of packet memory holds; what IPv4 can say.
        for range in [1380..=1470, 3780..=3860, 4020..=4100, 65_480..=65_507] {
            let runs = sizes(
                (from, to),
                false,
                range.clone(),
                Echo::Udp,
                Cutting::Allowed,
            );
            assert_eq!(runs, [returned(range)], "{path}, without DF");
        }
    }
    cluster.finish();
}
