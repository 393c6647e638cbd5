//! How many connections, and what they cost.
//!
//! A connection has one block of 112 bytes and two buckets in the index, of 12 bytes (hash 8,
//! place 4) and a control byte each. Buckets come in powers of two. Removed entries leave marks
//! that take up room until the map tidies up, which it does where it is, without more memory,
//! only while fewer than 7 of 16 buckets are taken; so no more than 3 of 8 are at the limit,
//! which leaves each part of the map six standard deviations for filling unevenly:
//!
//! ```text
//! 112 + 2 × 13 × (8/3 to 16/3) = 181.3 to 250.7 bytes a connection
//! ```
//!
//! the less, the nearer the limit lies below 3 × 2ⁿ. A part has 128 bytes more, for 4096
//! buckets. In tables of less than 1536 connections parts are smaller, chance is rougher, and
//! the map may grow.

use super::block::Block;
use super::index::BUCKET_BYTES;

/// Buckets in a part of the index, if it is large enough for more than two: few enough that
/// workers seldom meet in one and tidying one up is short, enough that chance does not overfill
/// one.
const PART_BUCKETS: usize = 4096;
/// The most parts.
const MAX_PARTS: usize = 4096;

/// The most bytes that a connection costs when the table is at its limit.
pub const BYTES_PER_CONNECTION: usize = size_of::<Block>() + (2 * BUCKET_BYTES * 16).div_ceil(3);

const _: () = assert!(BYTES_PER_CONNECTION <= 256, "a connection costs too much");

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    connections: usize,
}

impl Limits {
    /// The largest table, for which places have bits: 13 GB.
    pub const MOST: usize = 50_331_648;

    /// That many connections, at least one and at most [`MOST`](Self::MOST).
    #[must_use]
    pub fn new(connections: usize) -> Self {
        Self {
            connections: connections.clamp(1, Self::MOST),
        }
    }

    /// As many as certainly fit in that many bytes.
    #[must_use]
    pub fn within(bytes: usize) -> Self {
        Self::new(bytes / BYTES_PER_CONNECTION)
    }

    /// The number of connections.
    #[must_use]
    pub fn connections(self) -> usize {
        self.connections
    }

    /// Buckets of the index, and in how many parts.
    pub(super) fn index_shape(self) -> (usize, usize) {
        let buckets = (2 * self.connections * 8).div_ceil(3).next_power_of_two();
        let buckets = buckets.max(16);
        (buckets, (buckets / PART_BUCKETS).clamp(2, MAX_PARTS))
    }
}

impl Default for Limits {
    /// 262 144 connections, as many as the kernel takes on a machine with 8 GB or more; 56 MB.
    fn default() -> Self {
        Self::new(262_144)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_costs_at_most_what_is_said() {
        for limit in (1..=100_000).chain([1 << 20, (3 << 20) - 1, 3 << 20, (3 << 20) + 1]) {
            let (buckets, _) = Limits::new(limit).index_shape();
            assert!(2 * limit * 8 <= buckets * 3, "{limit}");
            let bytes = limit * size_of::<Block>() + buckets * BUCKET_BYTES;
            let smallest = limit < 6;
            assert!(smallest || bytes <= limit * BYTES_PER_CONNECTION, "{limit}");
        }
    }

    #[test]
    fn limits_stay_within_bounds() {
        for (asked, given) in [(0, 1), (3, 3), (98_305, 98_305), (usize::MAX, Limits::MOST)] {
            assert_eq!(Limits::new(asked).connections(), given, "{asked}");
        }
        let bytes = 100_000_000;
        assert_eq!(
            Limits::within(bytes).connections(),
            bytes / BYTES_PER_CONNECTION
        );
    }
}
