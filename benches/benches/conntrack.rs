//! The connection table at three sizes: a hit and a miss of the slow path, what a hit in the
//! flow table asks, a packet that moves a state, a connection put in and taken out, and what a
//! sweep costs for each connection that expires.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::hint::black_box;
use std::time::{Duration, Instant as Clock};

use criterion::measurement::WallTime;
use criterion::{
    BatchSize, BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main,
};
use skein_dataplane::conntrack::{
    Connections, Direction, Limits, NewConnection, Segment, Timeouts, Tuple,
};
use skein_dataplane::ids::EndpointId;
use skein_dataplane::time::Instant;
use skein_dataplane::wire::protocol;

const SIZES: [u32; 3] = [1_000, 100_000, 1_000_000];
/// Owners, each within its share.
const OWNERS: u32 = 100;

fn now() -> Instant {
    Instant::from_nanos(1_000_000_000)
}

/// UDP connections that only their number tells from others.
fn tuple(number: u32) -> Tuple {
    let address = |net: u8, host: u32| {
        let [a, b, c, d] = host.to_be_bytes();
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, net | a, b, c, d]
    };
    Tuple {
        src: address(10, number >> 16),
        dst: address(20, 1),
        src_port: number as u16,
        dst_port: 53,
        protocol: protocol::UDP,
    }
}

fn connection(number: u32) -> NewConnection {
    let original = tuple(number);
    NewConnection {
        original,
        reply: original.reversed(),
        owner: EndpointId(number % OWNERS),
        masquerade: None,
        picked_up: false,
        service: 0,
    }
}

/// A table with that many connections, and room for as many again.
fn filled(connections: u32) -> Connections {
    let table = Connections::new(Limits::new(2 * connections as usize), Timeouts::default());
    for number in 0..connections {
        table
            .create(connection(number), Segment::default(), now())
            .expect("there is room");
    }
    table
}

/// Strides through the numbers, so that neighbours in time are none in memory.
fn next(number: &mut u32, connections: u32) -> u32 {
    *number = number.wrapping_add(0x9e37_79b1);
    *number % connections
}

fn looks(group: &mut BenchmarkGroup<'_, WallTime>, table: &Connections, connections: u32) {
    let mut number = 0;
    group.bench_function(BenchmarkId::new("hit", connections), |bencher| {
        bencher.iter(|| {
            let tuple = tuple(next(&mut number, connections)).reversed();
            table.find(black_box(&tuple), now())
        });
    });
    group.bench_function(BenchmarkId::new("miss", connections), |bencher| {
        bencher.iter(|| {
            let tuple = tuple(next(&mut number, connections) + connections);
            table.find(black_box(&tuple), now())
        });
    });
    let references: Vec<_> = (0..connections)
        .filter_map(|number| table.find(&tuple(number), now()))
        .map(|found| found.conn)
        .collect();
    assert_eq!(references.len(), connections as usize);
    group.bench_function(BenchmarkId::new("alive", connections), |bencher| {
        bencher.iter(|| {
            let at = next(&mut number, connections) as usize;
            table.alive(black_box(references[at]), now())
        });
    });
    group.bench_function(BenchmarkId::new("observe", connections), |bencher| {
        bencher.iter(|| {
            let at = next(&mut number, connections) as usize;
            table.observe(references[at], Direction::Reply, Segment::default(), now())
        });
    });
}

fn conntrack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("conntrack");
    for connections in SIZES {
        let table = filled(connections);
        looks(&mut group, &table, connections);
        let mut number = connections;
        group.bench_function(BenchmarkId::new("insert", connections), |bencher| {
            // Timed by itself: the removal that keeps the table at its size is not part of it.
            bencher.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    number = connections + (number + 1) % connections;
                    let new = connection(number);
                    let start = Clock::now();
                    let created = table.create(black_box(new), Segment::default(), now());
                    spent += start.elapsed();
                    assert!(table.remove(created.expect("there is room")));
                }
                spent
            });
        });
        group.bench_function(
            BenchmarkId::new("insert and remove", connections),
            |bencher| {
                bencher.iter(|| {
                    number = connections + (number + 1) % connections;
                    let created = table.create(connection(number), Segment::default(), now());
                    table.remove(created.expect("there is room"))
                });
            },
        );
        let after = now() + Duration::from_secs(3600);
        group.sample_size(10);
        group.bench_function(BenchmarkId::new("expire all", connections), |bencher| {
            bencher.iter_batched_ref(
                || filled(connections),
                |table| assert_eq!(table.sweep(after, usize::MAX), connections as usize),
                BatchSize::PerIteration,
            );
        });
        group.sample_size(100);
    }
    group.finish();
}

criterion_group!(benches, conntrack);
criterion_main!(benches);
