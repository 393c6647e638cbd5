//! Several workers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::conntrack::{
    Connections, CreateError, Direction, Limits, MAX_ATTEMPTS, PortPool, Timeouts,
};

const FLOWS: u32 = 100_000;
const PROTOCOLS: [u8; 5] = [
    protocol::TCP,
    protocol::UDP,
    protocol::SCTP,
    protocol::ICMP,
    protocol::ICMPV6,
];

fn flow(number: u32) -> Tuple {
    tuple(number, PROTOCOLS[number as usize % PROTOCOLS.len()])
}

/// Four workers meet every flow, two in each direction, in orders of their own.
#[test]
fn both_directions_on_different_workers_make_one_connection() {
    let table = Connections::new(Limits::new(2 * FLOWS as usize), Timeouts::default());
    let made: Vec<AtomicU32> = (0..FLOWS).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (table, made) = (&table, &made);
            scope.spawn(move || {
                for step in 0..FLOWS {
                    // The first two go hand in hand, so that they often meet.
                    let number = (step + worker / 2 * 31_337) % FLOWS;
                    let packet = match worker % 2 {
                        0 => flow(number),
                        _ => flow(number).reversed(),
                    };
                    if let Some(found) = table.find(&packet, at(0)) {
                        let observed = table.observe(found.conn, found.direction, syn(), at(0));
                        assert!(observed, "{number}");
                        continue;
                    }
                    match table.create(new(packet), syn(), at(0)) {
                        Ok(_) => made[number as usize].fetch_add(1, Ordering::Relaxed),
                        Err(CreateError::Taken) => {
                            assert!(table.find(&packet, at(0)).is_some(), "{number}");
                            continue;
                        }
                        Err(error) => panic!("{number}: {error}"),
                    };
                }
            });
        }
    });
    assert_eq!(
        (table.len(), table.index_len()),
        (FLOWS as usize, 2 * FLOWS as usize)
    );
    for number in 0..FLOWS {
        assert_eq!(made[number as usize].load(Ordering::Relaxed), 1, "{number}");
        let forth = table.find(&flow(number), at(0)).unwrap();
        let back = table.find(&flow(number).reversed(), at(0)).unwrap();
        assert_eq!(forth.conn, back.conn);
        assert_ne!(forth.direction, back.direction);
    }

    let removed = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let (table, removed) = (&table, &removed);
            scope.spawn(move || {
                for number in 0..FLOWS {
                    let packet = match worker {
                        0 => flow(number),
                        _ => flow(number).reversed(),
                    };
                    let found = table.find(&packet, at(0));
                    if found.is_some_and(|found| table.remove(found.conn)) {
                        removed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert_eq!(removed.into_inner(), FLOWS);
    assert_eq!((table.len(), table.index_len()), (0, 0));
    assert_eq!(table.held_by(EndpointId(1)), 0);
}

/// Masqueraded flows in a table that is too small, created, moved, removed, swept and evicted
/// by all workers at once: whatever happens, nothing is left over.
#[test]
fn nothing_leaks_under_churn() {
    let ports = Arc::new(PortPool::new(61000..=61099));
    let table = Connections::new(Limits::new(300), Timeouts::default());
    let table = table.with_ports(Arc::clone(&ports));
    std::thread::scope(|scope| {
        for worker in 0..4u32 {
            let (table, ports) = (&table, &ports);
            scope.spawn(move || {
                let mut random = u64::from(worker) + 1;
                for step in 0..40_000u64 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(99);
                    let draw = (random >> 33) as u32;
                    one_step(table, ports, draw, at(step / 500));
                }
            });
        }
    });
    let stats = table.stats();
    assert!(stats.created > 1_000 && stats.evicted > 0, "{stats:?}");
    let mut shown = 0;
    table.for_each(|_| shown += 1);
    assert!(shown <= table.len());
    table.sweep(at(1_000), usize::MAX);
    assert_eq!((table.len(), table.index_len()), (0, 0));
    assert_eq!(ports.in_use(true, protocol::UDP), 0);
    for owner in 0..20 {
        assert_eq!(table.held_by(EndpointId(owner)), 0, "{owner}");
    }
    let stats = table.stats();
    assert_eq!(stats.created, stats.expired + stats.evicted + stats.removed);
    assert_eq!(stats.udp, 0);
}

fn one_step(table: &Connections, ports: &PortPool, draw: u32, now: Instant) {
    let original = Tuple {
        dst_port: (draw % 10) as u16,
        ..tuple(draw % 1_000 * 2, protocol::UDP)
    };
    let Some(found) = table.find(&original, now) else {
        for attempt in 0..MAX_ATTEMPTS {
            let Some(lease) = ports.lease(&original, true, |_| false, attempt) else {
                return;
            };
            let mut reply = original.reversed();
            reply.dst_port = lease.port;
            let new = NewConnection {
                reply,
                masquerade: Some(lease),
                owner: EndpointId(draw % 20),
                ..new(original)
            };
            let created = table.create(new, Segment::default(), now);
            if created != Err(CreateError::Taken) || table.find(&original, now).is_some() {
                return;
            }
        }
        return;
    };
    assert_eq!(found.original, original);
    match draw >> 16 & 7 {
        0 => _ = table.remove(found.conn),
        1 => _ = table.sweep(now, 50),
        2 => _ = table.find(&found.reply, now),
        _ => _ = table.observe(found.conn, Direction::Reply, Segment::default(), now),
    }
}
