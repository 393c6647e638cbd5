//! The whole pipeline in memory: packets of 64 bytes from a pod to its neighbour and to the
//! wire, by batch size and by number of flows that take turns.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use skein_benches::node::Bench;
use skein_benches::packets;
use skein_dataplane::fixtures::pod_v4;

fn run(criterion: &mut Criterion, name: &str, to: std::net::Ipv4Addr) {
    let mut group = criterion.benchmark_group(name);
    for (flows, batch) in [
        (1, 1),
        (1, 8),
        (1, 64),
        (1_000, 64),
        (100_000, 64),
        (1_000_000, 64),
    ] {
        // Twice the room, so that sets rarely overflow and hits stay hits.
        let mut bench = Bench::new(2 * flows);
        let frames: Vec<_> = (0..flows as u32)
            .map(|flow| packets::udp(to, flow, 64))
            .collect();
        for chunk in frames.chunks(64) {
            let mut batch = bench.receive(chunk);
            assert_eq!(bench.process(&mut batch), chunk.len());
        }
        let mut next = 0;
        group.throughput(Throughput::Elements(batch as u64));
        let id = BenchmarkId::from_parameter(format!("{flows} flows, batches of {batch}"));
        let bench = std::cell::RefCell::new(&mut bench);
        group.bench_function(id, |bencher| {
            bencher.iter_batched(
                || {
                    let turn = (0..batch).map(|i| &frames[(next + i) % flows]);
                    let packets = bench.borrow_mut().receive(turn);
                    next = (next + batch) % flows;
                    packets
                },
                |mut packets| bench.borrow_mut().process(&mut packets),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

fn pipeline(criterion: &mut Criterion) {
    run(criterion, "pipeline/to a pod on this node", pod_v4(1, 2));
    run(criterion, "pipeline/to the wire", pod_v4(2, 1));
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
