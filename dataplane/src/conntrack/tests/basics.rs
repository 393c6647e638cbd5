//! One or two connections, step by step.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::conntrack::{
    ConnRef, Connections, CreateError, Direction, Limits, PortPool, RestoreError, Timeouts,
};

fn table() -> Connections {
    Connections::new(Limits::new(48), Timeouts::default())
}

fn state_of(table: &Connections, conn: ConnRef) -> Option<&'static str> {
    let mut name = None;
    let original = table_original(table, conn)?;
    table.for_each(|entry| {
        if entry.original == original {
            name = Some(entry.state_name);
        }
    });
    name
}

fn table_original(table: &Connections, conn: ConnRef) -> Option<Tuple> {
    let mut found = None;
    table.for_each(|entry| {
        let same = table
            .find(&entry.original, at(0))
            .is_some_and(|found| found.conn == conn);
        if same {
            found = Some(entry.original);
        }
    });
    found
}

#[test]
fn both_tuples_lead_to_the_connection() {
    let table = table();
    let original = tuple(7, protocol::TCP);
    assert_eq!(table.find(&original, at(0)), None);
    let conn = table.create(new(original), syn(), at(0)).unwrap();
    let found = table.find(&original, at(0)).unwrap();
    assert_eq!((found.conn, found.direction), (conn, Direction::Original));
    let found = table.find(&original.reversed(), at(1)).unwrap();
    assert_eq!((found.conn, found.direction), (conn, Direction::Reply));
    assert_eq!(
        (found.original, found.reply),
        (original, original.reversed())
    );
    assert_eq!(state_of(&table, conn), Some("SYN_SENT"));

    assert_eq!(
        table.create(new(original), syn(), at(1)),
        Err(CreateError::Taken)
    );
    assert_eq!(
        table.create(new(original.reversed()), syn(), at(1)),
        Err(CreateError::Taken)
    );
    assert_eq!((table.len(), table.held_by(EndpointId(1))), (1, 1));

    assert!(table.remove(conn));
    assert!(!table.remove(conn));
    assert!(!table.alive(conn, at(1)));
    assert!(!table.observe(conn, Direction::Original, syn(), at(1)));
    assert_eq!(table.find(&original.reversed(), at(1)), None);
    assert_eq!((table.len(), table.held_by(EndpointId(1))), (0, 0));
}

#[test]
fn a_reference_does_not_outlive_its_connection_in_the_next() {
    let table = table();
    let first = table
        .create(new(tuple(1, protocol::UDP)), Segment::default(), at(0))
        .unwrap();
    assert!(table.remove(first));
    let second = table
        .create(new(tuple(2, protocol::UDP)), Segment::default(), at(0))
        .unwrap();
    assert_ne!(first, second);
    assert!(!table.alive(first, at(0)));
    assert!(table.alive(second, at(0)));
}

#[test]
fn a_host_that_talks_to_itself_on_one_port_has_one_tuple() {
    let table = table();
    let mut original = tuple(123, protocol::UDP);
    original.dst = original.src;
    original.dst_port = original.src_port;
    let conn = table
        .create(new(original), Segment::default(), at(0))
        .unwrap();
    assert_eq!(
        table.find(&original, at(0)).unwrap().direction,
        Direction::Original
    );
    assert!(table.remove(conn));
    assert_eq!(table.find(&original, at(0)), None);
    assert!(
        table
            .create(new(original), Segment::default(), at(0))
            .is_ok()
    );
}

#[test]
fn what_has_expired_is_not_found_and_not_in_the_way() {
    let table = table();
    let original = tuple(2, protocol::UDP);
    let conn = table
        .create(new(original), Segment::default(), at(0))
        .unwrap();
    assert!(table.alive(conn, at(29)));
    assert!(!table.alive(conn, at(30)));
    assert_eq!(table.find(&original, at(30)), None);
    assert!(!table.observe(conn, Direction::Reply, Segment::default(), at(30)));
    let again = table
        .create(new(original), Segment::default(), at(30))
        .unwrap();
    assert_ne!(conn, again);
    assert_eq!((table.len(), table.stats().expired), (1, 1));

    assert_eq!(table.sweep(at(59), 1000), 0);
    assert_eq!(table.sweep(at(60), 1000), 1);
    assert_eq!((table.len(), table.stats().udp), (0, 0));
}

#[test]
fn udp_is_assured_when_it_has_been_answered_for_a_while() {
    let table = table();
    let conn = table
        .create(new(tuple(2, protocol::UDP)), Segment::default(), at(0))
        .unwrap();
    let observe =
        |direction, seconds| table.observe(conn, direction, Segment::default(), at(seconds));
    assert!(observe(Direction::Original, 1));
    assert_eq!(state_of(&table, conn), Some("UNREPLIED"));
    assert!(observe(Direction::Reply, 1));
    assert_eq!(state_of(&table, conn), Some("REPLIED"));
    assert!(observe(Direction::Original, 2));
    assert_eq!(state_of(&table, conn), Some("ASSURED"));
    assert!(table.alive(conn, at(121)));
    assert!(!table.alive(conn, at(122)));
}

#[test]
fn a_journal_brings_connections_back() {
    let ports = Arc::new(PortPool::new(61000..=61009));
    let before = table().with_ports(Arc::clone(&ports));
    let original = tuple(4, protocol::TCP);
    let lease = ports.lease(&original, true, |_| false, 0).unwrap();
    let mut reply = original.reversed();
    reply.dst_port = lease.port;
    let masqueraded = NewConnection {
        reply,
        masquerade: Some(lease),
        picked_up: true,
        service: 9,
        ..new(original)
    };
    let ack = flags(&[TcpFlags::ACK]);
    let conn = before.create(masqueraded, ack, at(0)).unwrap();
    assert!(before.observe(conn, Direction::Reply, ack, at(10)));
    before.sweep(at(100), 0);
    let mut entries = Vec::new();
    before.for_each(|entry| entries.push(*entry));
    let [entry] = entries[..] else {
        panic!("one connection, not {entries:?}");
    };
    assert_eq!(entry.idle, Duration::from_secs(90));
    assert_eq!(entry.remaining, Duration::from_secs(432_000 - 90));
    assert_eq!(entry.age, Duration::from_secs(100));

    let ports = Arc::new(PortPool::new(61000..=61009));
    let after = table().with_ports(Arc::clone(&ports));
    let lease = ports.lease_again(&original, true, lease.port);
    let restored = super::super::Entry {
        masquerade: lease,
        ..entry
    };
    // Another process, another origin of time.
    let now = Instant::from_nanos(77_000_000_000);
    let conn = after.restore(&restored, now).unwrap();
    let mut shown = Vec::new();
    after.for_each(|entry| shown.push(*entry));
    assert_eq!(shown, [restored]);
    assert_eq!(
        after.restore(&restored, now),
        Err(CreateError::Taken.into())
    );
    assert_eq!(
        after.restore(
            &super::super::Entry {
                state: 0x0f,
                masquerade: None,
                ..entry
            },
            now
        ),
        Err(RestoreError::NoSuchState(0x0f))
    );
    assert!(after.alive(conn, now + Duration::from_secs(431_909)));
    assert!(!after.alive(conn, now + Duration::from_secs(431_910)));
}

#[test]
fn what_is_selected_is_removed() {
    let table = table();
    for number in 0..10 {
        let selected = NewConnection {
            service: number % 2,
            ..new(tuple(number, protocol::UDP))
        };
        table.create(selected, Segment::default(), at(0)).unwrap();
    }
    assert_eq!(table.remove_where(|entry| entry.service == 1), 5);
    assert_eq!((table.len(), table.stats().removed), (5, 5));
    table.for_each(|entry| assert_eq!(entry.service, 0));
}
