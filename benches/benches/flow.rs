//! The flow table: a hit with its four epochs held against the tables, beside the same look-up
//! held against a single number, which is what one generation for everything would cost.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use skein_dataplane::fixtures::{endpoint, flow_key, gateway_mac, node, pod_mac};
use skein_dataplane::flow::{Action, Delivery, FlowTable, Lookup};
use skein_dataplane::ids::{EndpointId, LinkId, WorkerId};
use skein_dataplane::snapshot::{EpochSlot, Snapshot, SnapshotBuilder};
use skein_dataplane::wire::ethernet::EthernetHeader;

fn tables(endpoints: u8) -> Snapshot {
    let mut builder = SnapshotBuilder::new(&Snapshot::empty(node(1)));
    for pod in 1..=endpoints {
        builder
            .set_endpoint(endpoint(1, pod), WorkerId(0))
            .expect("fixtures fit together");
    }
    builder.finish()
}

fn flow(criterion: &mut Criterion) {
    let tables = tables(200);
    let mut group = criterion.benchmark_group("flow table");
    for flows in [1u16, 1_000, 60_000] {
        let mut table = FlowTable::new(2 * usize::from(flows));
        for number in 0..flows {
            let slot = |number: u16| {
                let id = EndpointId(u32::from(number) % 200 + 1);
                tables.endpoint(id).expect("one of 200").epoch()
            };
            let stamp = |slot| tables.epochs().stamp(slot);
            let action = Action {
                egress: LinkId(1),
                mtu: 1500,
                decrement_ttl: true,
                nested: false,
                delivery: Delivery::Local(EthernetHeader {
                    dst: pod_mac(1, 1),
                    src: gateway_mac(1, 1),
                }),
                translation: None,
                conn: None,
                depends: std::array::from_fn(|place| match place {
                    1 => stamp(slot(number)),
                    2 => stamp(slot(number.wrapping_mul(31))),
                    3 => stamp(slot(number.wrapping_mul(7))),
                    _ => stamp(EpochSlot::NODE),
                }),
            };
            let key = flow_key(number);
            table.insert(table.hash(&key), key, action, 0);
        }
        let mut number = 0u16;
        group.bench_function(BenchmarkId::new("hit", flows), |bencher| {
            bencher.iter(|| {
                number = if number + 1 >= flows { 0 } else { number + 1 };
                let key = black_box(flow_key(number));
                let hash = table.hash(&key);
                matches!(table.lookup(hash, &key, tables.epochs(), 1), Lookup::Hit(_))
            });
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("epochs");
    let stamps: Vec<_> = (1..=200)
        .map(|id| {
            let endpoint = tables.endpoint(EndpointId(id)).expect("one of 200");
            tables.epochs().stamp(endpoint.epoch())
        })
        .collect();
    let mut at = 0;
    group.bench_function("four slots", |bencher| {
        bencher.iter(|| {
            at = (at + 4) % 196;
            stamps[at..at + 4]
                .iter()
                .all(|&stamp| black_box(tables.epochs()).holds(stamp))
        });
    });
    group.bench_function("one generation", |bencher| {
        let stamped = tables.generation();
        bencher.iter(|| black_box(tables.generation()) == black_box(stamped));
    });
    group.finish();
}

criterion_group!(benches, flow);
criterion_main!(benches);
