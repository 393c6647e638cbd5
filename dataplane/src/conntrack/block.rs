//! What is kept of a connection: fourteen words, all atomic.
//!
//! ```text
//!  0 life: generation 24 │ entering 1 │ state 7 │ deadline, ms 32
//!  1 owner 32 │ lease port 16 │ protocol 8 │ lease kind 4 │ – │ picked up │ leased
//!  2 created, ms 32 │ service 32
//!  3 SCTP tags: original 32 │ reply 32
//!  4 ports: original source │ destination │ reply source │ destination
//!  5 next free block
//!  6 original source    8 original destination    10 reply source    12 reply destination
//! ```
//!
//! Whether a connection is alive is in the life alone.
//!
//! Invariants:
//! - Only the life changes while a connection lives, and an SCTP association's tags.
//! - Whoever turns the life from live to [`DYING`] owns the block until it is free again;
//!   whoever takes a block off the free list owns it until it makes it live.
//! - The generation goes up when a block becomes free. A compare-and-swap of the life can thus
//!   only succeed on the connection that it was computed for, and state and deadline, being one
//!   word, always belong together. A generation comes round after sixteen million uses of one
//!   block, and a reference would have to sleep through exactly that many.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::ports::PortLease;
use super::state::{State, Tags, Tracked};
use super::tuple::{Tuple, address_of, address_words};
use crate::ids::EndpointId;

/// State number of a block on the free list, or in somebody's hand.
const FREE: u8 = 0;
/// State number of a block whose connection is being removed.
const DYING: u8 = 0x0f;
/// Beside a state: its tuples are still on their way into the map, it must not be removed.
const ENTERING: u8 = 0x80;

/// The first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life(u64);

impl Life {
    const GENERATION_BITS: u32 = 24;

    fn pack(generation: u32, state: u8, deadline_ms: u32) -> Self {
        Self(u64::from(generation) << 40 | u64::from(state) << 32 | u64::from(deadline_ms))
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> 40) as u32
    }

    pub(super) fn deadline_ms(self) -> u32 {
        self.0 as u32
    }

    fn state_number(self) -> u8 {
        (self.0 >> 32) as u8
    }

    pub(super) fn is_entering(self) -> bool {
        self.state_number() & ENTERING != 0
    }

    /// The state; `None` when the block is free or being freed.
    pub(super) fn state(self) -> Option<State> {
        match self.state_number() & !ENTERING {
            FREE | DYING => None,
            number => State::from_number(number),
        }
    }

    pub(super) fn is_expired(self, now_ms: u32) -> bool {
        now_ms.wrapping_sub(self.deadline_ms()) < 1 << 31
    }

    /// The same connection in another state.
    pub(super) fn with(self, state: State, deadline_ms: u32) -> Self {
        let entering = self.state_number() & ENTERING;
        Self::pack(self.generation(), state.number() | entering, deadline_ms)
    }
}

/// What is said of a connection when it is put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub original: Tuple,
    pub reply: Tuple,
    pub owner: EndpointId,
    pub lease: Option<PortLease>,
    pub picked_up: bool,
    pub service: u32,
    pub created_ms: u32,
    pub tags: Tags,
}

const OWNER_SHIFT: u32 = 32;
const LEASE_PORT_SHIFT: u32 = 16;
const PROTOCOL_SHIFT: u32 = 8;
const LEASE_KIND_SHIFT: u32 = 4;
const LEASED: u64 = 1;
const PICKED_UP: u64 = 2;

/// The fourteen words.
#[derive(Debug, Default)]
pub(super) struct Block {
    life: AtomicU64,
    meta: AtomicU64,
    created_service: AtomicU64,
    tags: AtomicU64,
    ports: AtomicU64,
    next: AtomicU64,
    addresses: [AtomicU64; 8],
}

const _: () = assert!(size_of::<Block>() == 112, "limits.rs counts on it");

impl Block {
    pub(super) fn life(&self) -> Life {
        Life(self.life.load(Ordering::Acquire))
    }

    /// Puts `to` in the place of `from`, or says what stands there instead.
    pub(super) fn swap_life(&self, from: Life, to: Life) -> Result<(), Life> {
        self.life
            .compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(Life)
    }

    /// Claims the block for removal; only for exactly the life that was judged.
    pub(super) fn condemn(&self, from: Life) -> Result<(), Life> {
        debug_assert!(!from.is_entering(), "its maker still works on it");
        let to = Life::pack(from.generation(), DYING, from.deadline_ms());
        self.life
            .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(Life)
    }

    /// Writes a connection into a free block that the caller holds, and makes it live but
    /// entering. Returns its generation.
    pub(super) fn fill(&self, record: &Record, state: State, deadline_ms: u32) -> u32 {
        let life = Life(self.life.load(Ordering::Relaxed));
        debug_assert_eq!(life.state_number(), FREE, "the block is in use");
        // A reader that sees any of the words below also sees that the block was freed.
        fence(Ordering::Release);
        let lease = record.lease.map_or(0, |lease| {
            u64::from(lease.port) << LEASE_PORT_SHIFT
                | u64::from(lease.kind()) << LEASE_KIND_SHIFT
                | LEASED
        });
        let picked_up = if record.picked_up { PICKED_UP } else { 0 };
        let meta = u64::from(record.owner.0) << OWNER_SHIFT
            | u64::from(record.original.protocol) << PROTOCOL_SHIFT
            | lease
            | picked_up;
        let put = |word: &AtomicU64, value| word.store(value, Ordering::Relaxed);
        put(&self.meta, meta);
        put(
            &self.created_service,
            u64::from(record.created_ms) << 32 | u64::from(record.service),
        );
        put(&self.tags, pack_tags(record.tags));
        put(&self.ports, pack_ports(&record.original, &record.reply));
        let addresses = [
            record.original.src,
            record.original.dst,
            record.reply.src,
            record.reply.dst,
        ];
        for (words, address) in self.addresses.chunks_exact(2).zip(addresses) {
            let [high, low] = address_words(address);
            put(&words[0], high);
            put(&words[1], low);
        }
        let live = Life::pack(life.generation(), state.number() | ENTERING, deadline_ms);
        self.life.store(live.0, Ordering::Release);
        live.generation()
    }

    /// The maker has both tuples in the map.
    pub(super) fn entered(&self) {
        self.life
            .fetch_and(!(u64::from(ENTERING) << 32), Ordering::AcqRel);
    }

    /// Makes the block free under the next generation. For its remover, or a maker that gives
    /// up.
    pub(super) fn free(&self) {
        let life = Life(self.life.load(Ordering::Relaxed));
        let next = (life.generation() + 1) & ((1 << Life::GENERATION_BITS) - 1);
        self.life
            .store(Life::pack(next, FREE, 0).0, Ordering::Release);
    }

    /// All that was put in. What the words say belongs to one connection only if the life has
    /// the same generation before and after, or if the caller holds the block.
    pub(super) fn record(&self) -> Record {
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let meta = get(&self.meta);
        let created_service = get(&self.created_service);
        let (original, reply) = self.tuples();
        Record {
            original,
            reply,
            owner: EndpointId((meta >> OWNER_SHIFT) as u32),
            lease: (meta & LEASED != 0).then(|| {
                let kind = (meta >> LEASE_KIND_SHIFT) as u8 & 0xf;
                PortLease::from_kind((meta >> LEASE_PORT_SHIFT) as u16, kind)
            }),
            picked_up: meta & PICKED_UP != 0,
            service: created_service as u32,
            created_ms: (created_service >> 32) as u32,
            tags: unpack_tags(get(&self.tags)),
        }
    }

    /// The Service that the connection is for; good if the block [is still](Self::is_still) the
    /// connection's afterwards.
    pub(super) fn service(&self) -> u32 {
        self.created_service.load(Ordering::Relaxed) as u32
    }

    /// Both tuples, under the same condition as [`record`](Self::record).
    pub(super) fn tuples(&self) -> (Tuple, Tuple) {
        let address = |at: usize| {
            address_of([
                self.addresses[at].load(Ordering::Relaxed),
                self.addresses[at + 1].load(Ordering::Relaxed),
            ])
        };
        let ports = self.ports.load(Ordering::Relaxed);
        let protocol = self.protocol();
        let original = Tuple {
            src: address(0),
            dst: address(2),
            src_port: (ports >> 48) as u16,
            dst_port: (ports >> 32) as u16,
            protocol,
        };
        let reply = Tuple {
            src: address(4),
            dst: address(6),
            src_port: (ports >> 16) as u16,
            dst_port: ports as u16,
            protocol,
        };
        (original, reply)
    }

    pub(super) fn protocol(&self) -> u8 {
        (self.meta.load(Ordering::Relaxed) >> PROTOCOL_SHIFT) as u8
    }

    pub(super) fn owner(&self) -> EndpointId {
        EndpointId((self.meta.load(Ordering::Relaxed) >> OWNER_SHIFT) as u32)
    }

    pub(super) fn created_ms(&self) -> u32 {
        (self.created_service.load(Ordering::Relaxed) >> 32) as u32
    }

    /// State and tags of a life that was just read.
    pub(super) fn tracked(&self, state: State) -> Tracked {
        Tracked {
            state,
            tags: unpack_tags(self.tags.load(Ordering::Relaxed)),
        }
    }

    /// Replaces tags that are still those that the caller went by.
    pub(super) fn swap_tags(&self, from: Tags, to: Tags) -> bool {
        self.tags
            .compare_exchange(
                pack_tags(from),
                pack_tags(to),
                Ordering::Relaxed,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// Whether the block still has that generation, for words read before.
    pub(super) fn is_still(&self, generation: u32) -> bool {
        fence(Ordering::Acquire);
        Life(self.life.load(Ordering::Relaxed)).generation() == generation
    }
}

fn pack_tags(tags: Tags) -> u64 {
    u64::from(tags.original) << 32 | u64::from(tags.reply)
}

fn unpack_tags(word: u64) -> Tags {
    Tags {
        original: (word >> 32) as u32,
        reply: word as u32,
    }
}

fn pack_ports(original: &Tuple, reply: &Tuple) -> u64 {
    u64::from(original.src_port) << 48
        | u64::from(original.dst_port) << 32
        | u64::from(reply.src_port) << 16
        | u64::from(reply.dst_port)
}

/// All blocks, and the list of those that are free: a stack, so that a block used a moment ago
/// and still in some cache is the next to be used.
#[derive(Debug)]
pub(super) struct Slab {
    blocks: Box<[Block]>,
    /// Index of the topmost free block in the low half, [`NONE`] when there is none; in the
    /// high half a count of changes, without which a stack that changed and changed back would
    /// pass for unchanged.
    top: AtomicU64,
}

const NONE: u32 = u32::MAX;

impl Slab {
    pub(super) fn new(blocks: u32) -> Self {
        let slab = Self {
            blocks: (0..blocks).map(|_| Block::default()).collect(),
            top: AtomicU64::new(u64::from(NONE)),
        };
        for index in (0..blocks).rev() {
            slab.push(index);
        }
        slab
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn block(&self, index: u32) -> &Block {
        &self.blocks[index as usize]
    }

    pub(super) fn push(&self, index: u32) {
        let next = &self.block(index).next;
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            next.store(u64::from(top as u32), Ordering::Relaxed);
            match self.top.compare_exchange_weak(
                top,
                changed(top, index),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(other) => top = other,
            }
        }
    }

    pub(super) fn pop(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let index = top as u32;
            if index == NONE {
                return None;
            }
            let next = self.block(index).next.load(Ordering::Relaxed) as u32;
            match self.top.compare_exchange_weak(
                top,
                changed(top, next),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(index),
                Err(other) => top = other,
            }
        }
    }
}

fn changed(top: u64, index: u32) -> u64 {
    ((top >> 32).wrapping_add(1)) << 32 | u64::from(index)
}
