//! Services: a choice among few and among many, all compiled anew, and one that changes.
#![expect(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::hint::black_box;
use std::net::IpAddr;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use skein_control::compile::service::Services;
use skein_control::config::PortRange;
use skein_control::state::service::{
    EndpointSlice, Service, ServiceKey, ServicePort, SliceEndpoint, SlicePort,
};
use skein_control::state::{Change, ClusterState, Object};
use skein_dataplane::fixtures::node;
use skein_dataplane::service::{Affinity, Client, From, choose};
use skein_dataplane::snapshot::{Frontend, Snapshot, SnapshotBuilder};
use skein_dataplane::time::Instant;

/// Services of the largest cluster that is planned for, and endpoints of each.
const MANY: u32 = 30_000;
const ENDPOINTS: u8 = 5;

fn key(number: u32) -> ServiceKey {
    ServiceKey {
        namespace: "bench".into(),
        name: format!("s{number}"),
    }
}

fn address(number: u32) -> IpAddr {
    let [.., high, low] = number.to_be_bytes();
    [10, 96, high, low].into()
}

fn service(number: u32) -> Object {
    Object::Service(Service {
        key: key(number),
        cluster_ips: vec![address(number)],
        ports: vec![ServicePort {
            port: 80,
            ..ServicePort::default()
        }],
        ..Service::default()
    })
}

fn slice(number: u32, endpoints: u8) -> Object {
    let [.., high, low] = number.to_be_bytes();
    let endpoint = |n: u8| SliceEndpoint {
        address: Some([n, high, low, 1].into()),
        ready: true,
        serving: true,
        ..SliceEndpoint::default()
    };
    Object::EndpointSlice(EndpointSlice {
        key: key(number),
        service: Some(key(number)),
        ipv4: Some(true),
        ports: vec![SlicePort {
            port: 8080,
            ..SlicePort::default()
        }],
        endpoints: (101..101 + endpoints).map(endpoint).collect(),
    })
}

fn change(state: &mut ClusterState, services: &mut Services, object: Object) {
    let key = object.key();
    state.apply(Change::Set(object));
    services.update(state, &[key].into());
}

fn none() -> Services {
    let node_ports = PortRange {
        first: 30_000,
        last: 32_767,
    };
    Services::new(true, "n1", node_ports)
}

/// A cluster of so many Services, compiled.
fn cluster(count: u32) -> (ClusterState, Services, Snapshot) {
    let (mut state, mut services) = (ClusterState::default(), none());
    for number in 0..count {
        change(&mut state, &mut services, service(number));
        change(&mut state, &mut services, slice(number, ENDPOINTS));
    }
    let (tables, faults) = services.apply(&state, Snapshot::empty(node(1)));
    assert!(faults.is_empty(), "{faults:?}");
    (state, services, tables)
}

fn lookup(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("service choice");
    for count in [10, 1_000, MANY] {
        let (_, _, tables) = cluster(count);
        let affinity = Affinity::default();
        let mut number = 0u32;
        group.bench_function(BenchmarkId::new("of", count), |bencher| {
            bencher.iter(|| {
                number = number.wrapping_add(7919);
                let frontend = Frontend {
                    address: address(number % count),
                    port: 80,
                    protocol: 6,
                };
                let client = Client {
                    address: [10, 244, 1, 1].into(),
                    port: 40_000,
                    from: From::Pod,
                };
                let hash = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let now = Instant::default();
                black_box(choose(&tables, &affinity, frontend, client, hash, now))
            });
        });
    }
    group.finish();
}

fn compile(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("service compile");
    group.sample_size(10);
    group.bench_function(BenchmarkId::new("all of", MANY), |bencher| {
        let (state, _, _) = cluster(MANY);
        let keys = (state.services().map(|one| one.key.clone()))
            .flat_map(|key| {
                let slice = skein_control::state::ObjectKey::EndpointSlice(key.clone());
                [skein_control::state::ObjectKey::Service(key), slice]
            })
            .collect();
        bencher.iter(|| {
            let mut services = none();
            services.update(&state, &keys);
            black_box(services.apply(&state, Snapshot::empty(node(1))))
        });
    });
    group.sample_size(100);
    group.bench_function(BenchmarkId::new("one of", MANY), |bencher| {
        let (mut state, mut services, mut tables) = cluster(MANY);
        let mut number = 0u32;
        bencher.iter(|| {
            number += 1;
            let endpoints = if number.is_multiple_of(2) { 5 } else { 4 };
            change(
                &mut state,
                &mut services,
                slice(number / 2 % MANY, endpoints),
            );
            let next = SnapshotBuilder::new(&tables).finish();
            tables = services.apply(&state, next).0;
        });
    });
    group.finish();
    let before = resident_kib();
    let (_state, _services, tables) = cluster(MANY);
    let taken = resident_kib().saturating_sub(before);
    println!("{MANY} services of {ENDPOINTS} endpoints: {taken} KiB more in memory");
    let entries = tables.services().iter();
    let bytes: usize = entries.map(|(_, entry)| entry.memory_bytes()).sum();
    println!("of those, {bytes} bytes of Maglev tables and endpoints");
}

/// What this process holds in memory, as the kernel counts it; 0 where it does not say.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or(0)
}

criterion_group!(benches, lookup, compile);
criterion_main!(benches);
