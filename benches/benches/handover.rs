//! What it costs to hand a packet to the worker that owns its egress link: one ring of
//! crossbeam's, pushed and popped by the batch, in one thread and between two.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::sync::Arc;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;

/// As large as a packet with its link.
type Item = [u64; 21];

fn handover(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("handover");
    group.throughput(Throughput::Elements(64));
    let ring: ArrayQueue<Item> = ArrayQueue::new(1024);
    group.bench_function("one thread, batches of 64", |bencher| {
        bencher.iter(|| {
            for number in 0..64 {
                assert!(ring.push([number; 21]).is_ok());
            }
            (0..64)
                .filter_map(|_| ring.pop())
                .map(|item| item[0])
                .sum::<u64>()
        });
    });
    group.bench_function("two threads", |bencher| {
        bencher.iter_custom(|rounds| {
            let ring: Arc<ArrayQueue<Item>> = Arc::new(ArrayQueue::new(1024));
            let count = rounds * 64;
            let sender = ring.clone();
            let start = Instant::now();
            let thread = std::thread::spawn(move || {
                for number in 0..count {
                    let mut item = [number; 21];
                    while let Err(back) = sender.push(item) {
                        item = back;
                        std::hint::spin_loop();
                    }
                }
            });
            let mut received = 0;
            while received < count {
                if ring.pop().is_some() {
                    received += 1;
                }
            }
            let elapsed = start.elapsed();
            assert!(thread.join().is_ok(), "the sender panicked");
            elapsed
        });
    });
    group.finish();
}

criterion_group!(benches, handover);
criterion_main!(benches);
