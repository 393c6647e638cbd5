//! Random sequences against a naive model: a list of connections, searched from end to end.
//!
//! The machines' rules are held to tables in their own modules; here they are taken as they
//! are, and what is compared is everything around them: who is found, in which direction and
//! state, until when, what is refused, and that nothing is left at the end.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::conntrack::state::{self, Tracked};
use crate::conntrack::{
    ConnRef, Connections, CreateError, Direction, Limits, MAX_ATTEMPTS, PortPool, Timeouts,
};
use crate::parse::Chunk;

const PROTOCOLS: [u8; 5] = [
    protocol::TCP,
    protocol::UDP,
    protocol::SCTP,
    protocol::ICMP,
    99,
];
/// Fewer than masqueraded flows of one protocol can need.
const PORTS: usize = 3;

/// As long as an established TCP connection may be silent.
const DAYS_MS: u64 = 432_000_000;

#[derive(Clone, Debug)]
enum Op {
    Create {
        flow: u32,
        masquerade: bool,
        segment: Segment,
    },
    Observe {
        at: usize,
        direction: Direction,
        segment: Segment,
    },
    Find {
        flow: u32,
        reversed: bool,
    },
    Remove {
        at: usize,
    },
    Pass {
        ms: u64,
    },
    Sweep {
        budget: usize,
    },
}

fn segments() -> impl Strategy<Value = Segment> {
    let tcp = prop_oneof![
        Just(0x02u8),
        Just(0x12),
        Just(0x10),
        Just(0x11),
        Just(0x04),
        any::<u8>()
    ];
    let chunk =
        (0u32..3, 0u8..15, 0u8..2, 0u32..3).prop_map(|(tag, kind, flags, initiate_tag)| Chunk {
            tag,
            kind,
            flags,
            initiate_tag,
        });
    (tcp, prop::option::of(chunk)).prop_map(|(tcp, sctp)| Segment {
        tcp_flags: TcpFlags(tcp),
        sctp,
    })
}

fn ops() -> impl Strategy<Value = Op> {
    let direction = prop_oneof![Just(Direction::Original), Just(Direction::Reply)];
    prop_oneof![
        3 => (0u32..40, any::<bool>(), segments())
            .prop_map(|(flow, masquerade, segment)| Op::Create { flow, masquerade, segment }),
        6 => (0usize..50, direction, segments())
            .prop_map(|(at, direction, segment)| Op::Observe { at, direction, segment }),
        3 => (0u32..40, any::<bool>()).prop_map(|(flow, reversed)| Op::Find { flow, reversed }),
        1 => (0usize..50).prop_map(|at| Op::Remove { at }),
        2 => prop_oneof![0u64..3_000, 0u64..130_000, Just(DAYS_MS)]
            .prop_map(|ms| Op::Pass { ms }),
        1 => (0usize..600).prop_map(|budget| Op::Sweep { budget }),
    ]
}

/// Some flows are the reverse of others, and several have one source.
fn flow(number: u32) -> Tuple {
    let protocol = PROTOCOLS[number as usize % PROTOCOLS.len()];
    let mut tuple = tuple(number / 20 * 2, protocol);
    tuple.src_port = 7;
    tuple.dst_port = (number / 10 % 2) as u16;
    if (number / 5).is_multiple_of(2) {
        tuple
    } else {
        tuple.reversed()
    }
}

/// What the model knows of a connection.
struct Known {
    conn: ConnRef,
    new: NewConnection,
    tracked: Tracked,
    created: Instant,
    deadline: Instant,
    removed: bool,
}

impl Known {
    fn lives(&self, now: Instant) -> bool {
        !self.removed && now < self.deadline
    }
}

struct Model {
    table: Connections,
    ports: Arc<PortPool>,
    timeouts: Timeouts,
    known: Vec<Known>,
    now: Instant,
}

impl Model {
    fn new() -> Self {
        let ports = Arc::new(PortPool::new(61000..=61000 + (PORTS as u16 - 1)));
        let timeouts = Timeouts::default();
        let table = Connections::new(Limits::new(500), timeouts);
        Self {
            table: table.with_ports(Arc::clone(&ports)),
            ports,
            timeouts,
            known: Vec::new(),
            now: at(0),
        }
    }

    fn owner_of(&self, tuple: &Tuple) -> Option<&Known> {
        let has = |known: &&Known| {
            known.lives(self.now) && [known.new.original, known.new.reply].contains(tuple)
        };
        self.known.iter().find(has)
    }

    fn create(&mut self, original: Tuple, masquerade: bool, segment: Segment) {
        let plain = new(original);
        if !masquerade || original.protocol == 99 {
            self.create_one(plain, segment);
            return;
        }
        for attempt in 0..MAX_ATTEMPTS {
            let Some(lease) = self.ports.lease(&original, true, |_| false, attempt) else {
                break;
            };
            let mut reply = original.reversed();
            reply.dst_port = lease.port;
            let masqueraded = NewConnection {
                reply,
                masquerade: Some(lease),
                ..plain
            };
            if self.create_one(masqueraded, segment) || self.owner_of(&original).is_some() {
                break;
            }
        }
    }

    fn create_one(&mut self, new: NewConnection, segment: Segment) -> bool {
        let taken = [new.original, new.reply]
            .iter()
            .any(|tuple| self.owner_of(tuple).is_some());
        match self.table.create(new, segment, self.now) {
            Ok(conn) => {
                assert!(!taken, "{new:?} is a second connection");
                let tracked = state::open(new.original.protocol, segment);
                let timeout = self.timeouts.of(new.original.protocol, tracked.state);
                self.known.push(Known {
                    conn,
                    new,
                    tracked,
                    created: self.now,
                    deadline: self.now + timeout,
                    removed: false,
                });
                true
            }
            Err(error) => {
                assert_eq!(error, CreateError::Taken);
                assert!(taken, "{new:?} was refused for nothing");
                false
            }
        }
    }

    fn observe(&mut self, at: usize, direction: Direction, segment: Segment) {
        let Some(known) = self.known.get_mut(at) else {
            return;
        };
        let lives = known.lives(self.now);
        let observed = self.table.observe(known.conn, direction, segment, self.now);
        assert_eq!(observed, lives);
        if lives {
            let protocol = known.new.original.protocol;
            let old = self.now.since(known.created) >= self.timeouts.udp_stream_after;
            let next = state::advance(protocol, known.tracked, direction, segment, old);
            if let Some(next) = next {
                known.tracked = next;
                known.deadline = self.now + self.timeouts.of(protocol, next.state);
            }
        }
    }

    fn find(&self, tuple: &Tuple) {
        let found = self.table.find(tuple, self.now);
        let Some(known) = self.owner_of(tuple) else {
            assert_eq!(found, None);
            return;
        };
        let found = found.expect("the model has it");
        assert_eq!(found.conn, known.conn);
        assert_eq!(
            (found.original, found.reply),
            (known.new.original, known.new.reply)
        );
        let is_original = found.direction == Direction::Original;
        assert_eq!(is_original, *tuple == known.new.original);
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Create {
                flow: number,
                masquerade,
                segment,
            } => {
                self.create(flow(number), masquerade, segment);
            }
            Op::Observe {
                at,
                direction,
                segment,
            } => self.observe(at, direction, segment),
            Op::Find {
                flow: number,
                reversed,
            } => {
                let tuple = flow(number);
                self.find(&if reversed { tuple.reversed() } else { tuple });
            }
            Op::Remove { at } => {
                if let Some(known) = self.known.get_mut(at) {
                    let removed = self.table.remove(known.conn);
                    // One that has expired may have been swept, or not.
                    assert!(removed == known.lives(self.now) || now_past(known, self.now));
                    known.removed = true;
                }
            }
            Op::Pass { ms } => {
                self.now = self.now + Duration::from_millis(ms);
                // Weeks must not go by without a sweep: the clock of 32 bits would wrap.
                if ms == DAYS_MS {
                    self.table.sweep(self.now, usize::MAX);
                }
            }
            Op::Sweep { budget } => _ = self.table.sweep(self.now, budget),
        }
    }

    /// Everything that the model knows, held against the table.
    fn compare(&self) {
        let mut shown = Vec::new();
        self.table.sweep(self.now, 0);
        self.table.for_each(|entry| shown.push(*entry));
        let living: Vec<_> = self
            .known
            .iter()
            .filter(|known| known.lives(self.now))
            .collect();
        assert_eq!(shown.len(), living.len());
        for known in &self.known {
            assert_eq!(
                self.table.alive(known.conn, self.now),
                known.lives(self.now)
            );
        }
        for known in living {
            self.find(&known.new.original);
            self.find(&known.new.reply);
            assert_eq!(
                self.table.state(known.conn, self.now),
                Some(known.tracked.state)
            );
            let entry = shown
                .iter()
                .find(|entry| entry.original == known.new.original)
                .expect("a living connection is shown");
            assert_eq!(entry.remaining, known.deadline.since(self.now));
            assert_eq!(entry.age, self.now.since(known.created));
            assert_eq!(entry.tags, known.tracked.tags);
            assert_eq!(entry.masquerade, known.new.masquerade);
        }
    }

    fn end(mut self) {
        for _ in 0..2 {
            self.now = self.now + Duration::from_secs(432_000);
            self.table.sweep(self.now, usize::MAX);
        }
        assert_eq!((self.table.len(), self.table.index_len()), (0, 0));
        assert_eq!(self.table.held_by(EndpointId(1)), 0);
        for protocol in PROTOCOLS {
            assert_eq!(self.ports.in_use(true, protocol), 0, "{protocol}");
        }
    }
}

fn now_past(known: &Known, now: Instant) -> bool {
    !known.removed && known.deadline <= now
}

proptest! {
    #[test]
    fn the_table_does_as_the_model(ops in prop::collection::vec(ops(), 1..150)) {
        let mut model = Model::new();
        for op in ops {
            model.step(&op);
            model.compare();
        }
        model.end();
    }
}
