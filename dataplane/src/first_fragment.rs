//! What the first fragment of a packet says for the later ones: ports, by which a Service, a
//! policy or a connection is told, stand in the first alone.
//!
//! Each worker keeps what first fragments said for as long as Linux waits for the rest of a
//! packet (`net.ipv4.ipfrag_time`), in a table of fixed size where the oldest gives way. A later
//! fragment that comes before its first is held, and goes on right behind it. What is held is
//! bounded by number, by frames and by time, and where there is no more room the oldest gives
//! way: whoever sends later fragments alone loses them, and holds up nobody else for long. All
//! fragments of a packet come by one link, hence to one worker: the overlay's outer source port
//! is one for all of a flow.
//!
//! Deliberately absent: reassembly. Fragments go on as they came.

use std::collections::VecDeque;
use std::time::Duration;

use crate::classify::Source;
use crate::ids::{IdentityId, PeerId};
use crate::io::packet::Packet;
use crate::io::pool::FramePool;
use crate::parse::{Fragment, Headers};
use crate::time::Instant;

/// How long the rest of a packet is waited for.
pub const KNOWN_FOR: Duration = Duration::from_secs(30);

/// How long a later fragment waits for its first: reordering takes no longer on any path.
pub const HELD_FOR: Duration = Duration::from_secs(1);

/// The most fragments that a worker holds.
pub const MOST_HELD: usize = 64;

/// The most frames that those have.
pub const MOST_FRAMES_HELD: usize = 256;

/// First fragments that a worker remembers: a power of two, four to a set.
const SETS: usize = 256;
const WAYS: usize = 4;

/// Where a held packet came from, without what its tables lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A pod's link, or the host's: the packet says which.
    Veth,
    /// Another node.
    Overlay {
        /// Which one.
        peer: PeerId,
        /// The outer source address, IPv4-mapped if IPv4.
        outer_src: [u8; 16],
        /// What the VNI says of the sender.
        identity: IdentityId,
    },
    /// Outside the cluster.
    Outside,
}

impl Origin {
    /// The origin of what comes from `source`.
    #[must_use]
    pub fn of(source: &Source<'_>) -> Self {
        match *source {
            Source::Pod(_) | Source::Host(_) => Self::Veth,
            Source::Overlay {
                peer,
                outer_src,
                identity,
            } => Self::Overlay {
                peer,
                outer_src,
                identity,
            },
            Source::Outside => Self::Outside,
        }
    }
}

/// What the fragments of a packet have in common (RFC 791 section 3.2, RFC 8200 section 4.5),
/// and that they came the same way, so that nobody speaks for another's packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    src: [u8; 16],
    dst: [u8; 16],
    id: u32,
    protocol: u8,
    link: u32,
    origin: Origin,
}

impl Key {
    fn new(packet: &Packet, origin: Origin, headers: &Headers) -> Self {
        Self {
            src: headers.src_bytes,
            dst: headers.dst_bytes,
            id: headers.fragment_id,
            protocol: headers.protocol,
            // By which queue of an uplink it came says nothing.
            link: if origin == Origin::Veth {
                packet.ingress.0
            } else {
                u32::MAX
            },
            origin,
        }
    }

    fn set(&self) -> usize {
        // Addresses are what an outsider chooses as easily as the rest: a set that overflows
        // costs its own packets only.
        let fold = |bytes: [u8; 16]| {
            let value = u128::from_ne_bytes(bytes);
            (value >> 64) as u64 ^ value as u64
        };
        let mixed = (fold(self.src) ^ fold(self.dst).rotate_left(17) ^ u64::from(self.id))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize % SETS
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    key: Key,
    src_port: u16,
    dst_port: u16,
    icmp: Option<(u8, u8)>,
    until: Instant,
}

/// A later fragment that waits for its first.
#[derive(Debug)]
struct Held {
    key: Key,
    packet: Packet,
    headers: Headers,
    until: Instant,
}

/// What became known about a fragment.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// Its ports stand in its headers, or it is no fragment.
    Known,
    /// Its first has not come yet: it is to be held.
    Early,
}

/// A worker's fragments.
#[derive(Debug)]
pub struct Fragments {
    known: Box<[[Option<Known>; WAYS]]>,
    held: VecDeque<Held>,
    frames_held: usize,
    /// The packet whose first fragment came last, while some of it is held.
    released: Option<Key>,
}

impl Default for Fragments {
    fn default() -> Self {
        Self {
            known: vec![[None; WAYS]; SETS].into_boxed_slice(),
            held: VecDeque::with_capacity(MOST_HELD),
            frames_held: 0,
            released: None,
        }
    }
}

impl Fragments {
    /// Fills in what the headers of a fragment lack, or remembers what they have.
    #[inline]
    pub fn resolve(
        &mut self,
        packet: &Packet,
        source: &Source<'_>,
        headers: &mut Headers,
        now: Instant,
    ) -> Answer {
        match headers.fragment {
            Fragment::None => Answer::Known,
            Fragment::First => {
                self.remember(Key::new(packet, Origin::of(source), headers), headers, now);
                Answer::Known
            }
            Fragment::Later { .. } => {
                self.recall(&Key::new(packet, Origin::of(source), headers), headers, now)
            }
        }
    }

    #[cold]
    fn remember(&mut self, key: Key, headers: &Headers, now: Instant) {
        let set = &mut self.known[key.set()];
        let same = set
            .iter()
            .position(|known| known.is_some_and(|known| known.key == key));
        let oldest = || {
            let age = |way: &usize| set[*way].map_or(Instant::default(), |known| known.until);
            (0..WAYS).min_by_key(age)
        };
        let Some(way) = same.or_else(oldest) else {
            return;
        };
        set[way] = Some(Known {
            key,
            src_port: headers.src_port,
            dst_port: headers.dst_port,
            icmp: headers.icmp,
            until: now + KNOWN_FOR,
        });
        if self.held.iter().any(|held| held.key == key) {
            self.released = Some(key);
        }
    }

    #[cold]
    fn recall(&mut self, key: &Key, headers: &mut Headers, now: Instant) -> Answer {
        let known = self.known[key.set()]
            .iter()
            .flatten()
            .find(|known| known.key == *key && known.until > now);
        let Some(known) = known else {
            return Answer::Early;
        };
        headers.src_port = known.src_port;
        headers.dst_port = known.dst_port;
        headers.icmp = known.icmp;
        Answer::Known
    }

    /// The next packet that gives way to one of so many frames, which is to be held.
    pub fn give_way(&mut self, frames: usize) -> Option<Packet> {
        let full = self.held.len() == MOST_HELD || self.frames_held + frames > MOST_FRAMES_HELD;
        if full { self.pop_front() } else { None }
    }

    /// Holds a packet that was [`Answer::Early`], once nothing [gives way](Self::give_way) to it
    /// any more.
    pub fn hold(&mut self, packet: Packet, origin: Origin, headers: &Headers, now: Instant) {
        self.frames_held += packet.segments().len();
        self.held.push_back(Held {
            key: Key::new(&packet, origin, headers),
            packet,
            headers: *headers,
            until: now + HELD_FOR,
        });
    }

    /// The next packet that the first fragment which came last has set free, as it was held.
    pub fn next_released(&mut self) -> Option<(Packet, Headers, Origin)> {
        let key = self.released?;
        let Some(place) = self.held.iter().position(|held| held.key == key) else {
            self.released = None;
            return None;
        };
        let held = self.held.remove(place)?;
        self.frames_held -= held.packet.segments().len();
        Some((held.packet, held.headers, held.key.origin))
    }

    /// The next packet that has waited too long.
    pub fn next_late(&mut self, now: Instant) -> Option<Packet> {
        if self.held.front()?.until > now {
            return None;
        }
        self.pop_front()
    }

    fn pop_front(&mut self) -> Option<Packet> {
        let held = self.held.pop_front()?;
        self.frames_held -= held.packet.segments().len();
        Some(held.packet)
    }

    /// Gives all that is held back; returns how many packets that were.
    pub fn clear(&mut self, pool: &mut FramePool) -> usize {
        let held = self.held.len();
        while let Some(packet) = self.pop_front() {
            pool.give_packet(packet);
        }
        held
    }
}
