//! Maglev tables (Eisenbud and others, NSDI 2016, section 3.4): a hash → a backend, evenly, and
//! nearly the same when a backend comes or goes.
//!
//! A table follows from the set of its backends alone, not from their order, the tables before,
//! or the node: two nodes that are asked the same choose the same.
//!
//! The size is the least prime ≥ 256 × the backends, *their number rounded up to a power of
//! two*. Without that rounding every backend more or less would be another modulus, which sends
//! nearly every hash elsewhere; with it the modulus stays except where the number passes a power
//! of two. Even shares cost some constancy: when one of N goes, the part of the others' entries
//! that moves falls with the root of the entries that each has. At 100 for each it is 2.8 % for
//! ten backends, at 256 about 1.3 % (measured over many sets of addresses).
//!
//! It ends at 65 537, so that the many small Services of a large cluster stay small: an entry is
//! one byte up to 256 backends and two above. Five backends take 2053 bytes, 30 000 Services of
//! five 62 MB, a Service of a thousand 131 kB.

use std::net::IpAddr;

/// The largest table.
pub const MAX_SIZE: usize = 65_537;

/// The most backends of a table: an entry's two bytes tell apart no more.
pub const MAX_BACKENDS: usize = 65_536;

/// Entries for each backend, at least, below the bound.
const ENTRIES_EACH: usize = 256;

/// Hash → position of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maglev(Slots);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Slots {
    Narrow(Box<[u8]>),
    Wide(Box<[u16]>),
}

impl Maglev {
    /// The table of these backends, told apart by address and port; an entry is a position in
    /// `backends`. `None` for none, for one (which needs no table), and above [`MAX_BACKENDS`].
    #[must_use]
    pub fn new(backends: &[(IpAddr, u16)]) -> Option<Self> {
        if backends.len() < 2 || backends.len() > MAX_BACKENDS {
            return None;
        }
        let filled = fill(backends, size(backends.len()));
        // The positions are below the number of backends, so each narrows without loss.
        let slots = if backends.len() <= 256 {
            Slots::Narrow(filled.iter().map(|&at| at as u8).collect())
        } else {
            Slots::Wide(filled.iter().map(|&at| at as u16).collect())
        };
        Some(Self(slots))
    }

    /// The position of the backend for a hash.
    #[inline]
    #[must_use]
    pub fn pick(&self, hash: u64) -> usize {
        match &self.0 {
            Slots::Narrow(slots) => slots[(hash % slots.len() as u64) as usize].into(),
            Slots::Wide(slots) => slots[(hash % slots.len() as u64) as usize].into(),
        }
    }

    /// The number of entries, a prime.
    #[must_use]
    pub fn size(&self) -> usize {
        match &self.0 {
            Slots::Narrow(slots) => slots.len(),
            Slots::Wide(slots) => slots.len(),
        }
    }

    /// What the entries take, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        match &self.0 {
            Slots::Narrow(slots) => size_of_val::<[u8]>(slots),
            Slots::Wide(slots) => size_of_val::<[u16]>(slots),
        }
    }
}

/// The table's size for a number of backends.
fn size(backends: usize) -> usize {
    let least = backends.next_power_of_two().saturating_mul(ENTRIES_EACH);
    (least..MAX_SIZE)
        .find(|&candidate| is_prime(candidate))
        .unwrap_or(MAX_SIZE)
}

fn is_prime(number: usize) -> bool {
    number >= 2
        && (2..)
            .take_while(|factor| factor * factor <= number)
            .all(|factor| !number.is_multiple_of(factor))
}

/// Backends take turns, each the next free entry of its own permutation of them all. A backend's
/// turn comes in the order of address and port, so that the caller's order does not matter.
fn fill(backends: &[(IpAddr, u16)], size: usize) -> Vec<u32> {
    const FREE: u32 = u32::MAX;
    let mut order: Vec<u32> = (0..backends.len() as u32).collect();
    order.sort_by_key(|&at| backends[at as usize]);
    let mut walks: Vec<Walk> = order
        .iter()
        .map(|&at| Walk::new(backends[at as usize], size))
        .collect();
    let mut entries = vec![FREE; size];
    for filled in 0..size {
        let turn = filled % walks.len();
        let walk = &mut walks[turn];
        // The step is prime to the size, so the walk meets a free entry while there is one.
        while entries[walk.next] != FREE {
            walk.advance(size);
        }
        entries[walk.next] = order[turn];
    }
    entries
}

/// A backend's permutation of the entries: from an offset by a step, both of its hash.
struct Walk {
    next: usize,
    step: usize,
}

impl Walk {
    fn new(backend: (IpAddr, u16), size: usize) -> Self {
        let hash = hash(backend);
        Self {
            next: (mix(hash) % size as u64) as usize,
            step: (mix(!hash) % (size as u64 - 1)) as usize + 1,
        }
    }

    fn advance(&mut self, size: usize) {
        self.next += self.step;
        if self.next >= size {
            self.next -= size;
        }
    }
}

/// The same on every node and in every release, since nodes shall agree: 64-bit FNV-1a
/// (draft-eastlake-fnv) over address and port.
fn hash((address, port): (IpAddr, u16)) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let seed = 0xcbf2_9ce4_8422_2325;
    let hash = match address {
        IpAddr::V4(v4) => v4.octets().into_iter().fold(seed, step),
        IpAddr::V6(v6) => v6.octets().into_iter().fold(seed, step),
    };
    port.to_be_bytes().into_iter().fold(hash, step)
}

/// Spreads a hash over all its bits: FNV-1a leaves neighbouring addresses alike in the high ones.
/// (The finalizer of MurmurHash3.)
fn mix(mut hash: u64) -> u64 {
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn backends(count: u32) -> Vec<(IpAddr, u16)> {
        backends_from(0x0af4_0001, count)
    }

    fn backends_from(first: u32, count: u32) -> Vec<(IpAddr, u16)> {
        (first..first + count)
            .map(|bits| (Ipv4Addr::from_bits(bits).into(), 8080))
            .collect()
    }

    /// How many entries each backend has.
    fn shares(table: &Maglev, backends: usize) -> Vec<usize> {
        let mut shares = vec![0; backends];
        for entry in 0..table.size() {
            shares[table.pick(entry as u64)] += 1;
        }
        shares
    }

    #[test]
    fn sizes_are_the_least_primes_and_end_at_the_bound() {
        let expected = [
            (2, 521),
            (3, 1031),
            (5, 2053),
            (10, 4099),
            (100, 32_771),
            (256, MAX_SIZE),
            (257, MAX_SIZE),
            (5000, MAX_SIZE),
        ];
        for (backends, size) in expected {
            assert_eq!(super::size(backends), size, "{backends} backends");
            assert!(is_prime(size));
        }
        let five = Maglev::new(&backends(5)).unwrap();
        assert_eq!(five.memory_bytes(), 2053);
        let thousand = Maglev::new(&backends(1000)).unwrap();
        assert_eq!(thousand.memory_bytes(), 2 * MAX_SIZE);
    }

    #[test]
    fn one_backend_needs_no_table() {
        assert_eq!(Maglev::new(&[]), None);
        assert_eq!(Maglev::new(&backends(1)), None);
    }

    #[test]
    fn shares_differ_by_one_entry_at_most() {
        for count in [2, 3, 7, 10, 100, 255, 256, 257, 1000] {
            let table = Maglev::new(&backends(count)).unwrap();
            let shares = shares(&table, count as usize);
            let even = table.size() / count as usize;
            let more = table.size() % count as usize;
            assert_eq!(shares.iter().filter(|&&n| n == even + 1).count(), more);
            let rest = count as usize - more;
            assert_eq!(shares.iter().filter(|&&n| n == even).count(), rest);
        }
    }

    /// Which part of the surviving backends' entries moves when one goes, for each that may.
    fn disruptions(all: &[(IpAddr, u16)]) -> Vec<f64> {
        let before = Maglev::new(all).unwrap();
        let part = |gone: usize| {
            let mut left = all.to_vec();
            left.remove(gone);
            let after = Maglev::new(&left).unwrap();
            assert_eq!(before.size(), after.size(), "the modulus stays");
            let mut others = 0;
            let mut moved = 0;
            for entry in 0..before.size() as u64 {
                let owner = before.pick(entry);
                others += usize::from(owner != gone);
                moved += usize::from(owner != gone && all[owner] != left[after.pick(entry)]);
            }
            moved as f64 / f64::from(u32::try_from(others).unwrap())
        };
        (0..all.len()).map(part).collect()
    }

    #[test]
    fn when_one_of_ten_or_a_hundred_goes_the_others_keep_98_percent() {
        for first in [0x0af4_0001, 0x0af4_1105, 0xc0a8_4d02] {
            for count in [10, 100] {
                let parts = disruptions(&backends_from(first, count));
                let mean = parts.iter().sum::<f64>() / f64::from(count);
                let worst = parts.iter().copied().fold(0.0, f64::max);
                assert!(
                    mean <= 0.015,
                    "{first:x}, {count}: {mean} (at worst {worst})"
                );
                assert!(worst <= 0.02, "{first:x}, {count}: at worst {worst}");
            }
        }
    }

    #[test]
    fn the_order_in_which_backends_are_named_does_not_matter() {
        let all = backends(37);
        let mut turned = all.clone();
        turned.reverse();
        let (one, other) = (Maglev::new(&all).unwrap(), Maglev::new(&turned).unwrap());
        for hash in 0..one.size() as u64 {
            assert_eq!(all[one.pick(hash)], turned[other.pick(hash)]);
        }
    }

    #[test]
    fn ten_thousand_hashes_spread_as_chance_would() {
        let table = Maglev::new(&backends(10)).unwrap();
        let mut counts = [0f64; 10];
        for number in 0..10_000u64 {
            counts[table.pick(mix(number))] += 1.0;
        }
        let chi: f64 = counts.iter().map(|n| (n - 1000.0).powi(2) / 1000.0).sum();
        // 9 degrees of freedom: 27.88 is passed once in a thousand; the hashes are fixed.
        assert!(chi < 27.88, "{chi}: {counts:?}");
    }
}
