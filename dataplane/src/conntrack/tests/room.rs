//! Short of room: shares, eviction, memory.

use super::*;
use crate::conntrack::{
    BYTES_PER_CONNECTION, Connections, CreateError, Direction, Limits, Timeouts,
};

fn owned_by(owner: u32, number: u32) -> NewConnection {
    NewConnection {
        owner: EndpointId(owner),
        ..new(tuple(number, protocol::TCP))
    }
}

/// From a SYN to data both ways.
fn establish(table: &Connections, new: NewConnection) {
    let ack = flags(&[TcpFlags::ACK]);
    let conn = table.create(new, syn(), at(0)).unwrap();
    let syn_ack = flags(&[TcpFlags::SYN, TcpFlags::ACK]);
    assert!(table.observe(conn, Direction::Reply, syn_ack, at(0)));
    assert!(table.observe(conn, Direction::Original, ack, at(0)));
}

/// One pod floods; another's connections, and those that were there, are none the worse.
#[test]
fn a_flood_leaves_room_for_others() {
    let table = Connections::new(Limits::new(3 << 10), Timeouts::default());
    for number in 0..100 {
        establish(&table, owned_by(2, number));
    }
    let mut refused = 0;
    for number in 1_000..21_000 {
        match table.create(owned_by(1, number), syn(), at(1)) {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error, CreateError::ShareUsed);
                refused += 1;
            }
        }
    }
    let flooder = table.held_by(EndpointId(1));
    assert_eq!(flooder + refused, 20_000);
    let free = table.capacity() - table.len();
    assert!(
        flooder.abs_diff(2 * free) <= 3,
        "{flooder} held, {free} free"
    );
    for number in 100..600 {
        establish(&table, owned_by(2, number));
    }
    for number in 0..600 {
        let original = tuple(number, protocol::TCP);
        assert!(table.find(&original, at(1)).is_some(), "{number} is gone");
    }
    assert_eq!(table.stats().refused_share, refused as u64);
}

/// Many owners fill the table together: unanswered ones give way, established ones stay.
#[test]
fn the_least_valuable_give_way_before_it_is_full() {
    let table = Connections::new(Limits::new(3 << 10), Timeouts::default());
    for number in 0..1_500 {
        establish(&table, owned_by(number % 50, number));
    }
    for number in 2_000..12_000 {
        table
            .create(owned_by(100 + number % 200, number), syn(), at(1))
            .unwrap();
    }
    let stats = table.stats();
    assert!(table.len() <= table.capacity() - table.capacity() / 32);
    assert_eq!(stats.evicted as usize, 11_500 - table.len());
    for number in 0..1_500 {
        let original = tuple(number, protocol::TCP);
        assert!(table.find(&original, at(1)).is_some(), "{number} is gone");
    }
}

/// Nothing but established connections, and owners within their shares: even then a new one
/// comes in, and one of the old leaves.
#[test]
fn a_full_table_lets_a_newcomer_in() {
    let table = Connections::new(Limits::new(48), Timeouts::default());
    for number in 0..48 {
        establish(&table, owned_by(number, number));
    }
    assert_eq!(table.len(), table.capacity());
    table.create(owned_by(99, 99), syn(), at(0)).unwrap();
    assert_eq!(table.len(), table.capacity());
    assert_eq!(table.stats().evicted, 1);
}

#[test]
fn churn_at_the_limit_takes_no_more_memory() {
    let table = Connections::new(Limits::new(3 << 12), Timeouts::default());
    let capacity = table.index_capacity();
    let bucket_bytes = capacity / 7 * 8 * 13;
    let bytes = table.capacity() * 112 + bucket_bytes;
    assert!(bytes / table.capacity() <= BYTES_PER_CONNECTION);
    let mut references = std::collections::VecDeque::new();
    for number in 0..400_000 {
        if table.len() == table.capacity() {
            let oldest = references.pop_front().unwrap();
            assert!(table.remove(oldest));
        }
        let udp = NewConnection {
            owner: EndpointId(number % 4_096),
            ..new(tuple(number, protocol::UDP))
        };
        // The last sixteenth evicts, and then a reference may be one of the departed.
        table.sweep(at(0), 0);
        references.push_back(table.create(udp, Segment::default(), at(0)).unwrap());
    }
    assert_eq!(table.stats().refused_full, 0);
    assert!(
        table.index_capacity() <= capacity,
        "the index grew from {capacity} to {}",
        table.index_capacity()
    );
}
