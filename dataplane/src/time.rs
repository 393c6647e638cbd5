//! Time as the packet path sees it: a value handed in once a batch. There is no clock here, so
//! a test decides what time it is.

use std::time::Duration;

/// A point in time: nanoseconds since an origin that the caller chose once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// That many nanoseconds after the origin.
    #[must_use]
    pub fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub fn nanos(self) -> u64 {
        self.0
    }

    /// Milliseconds since the origin, in 32 bits: wraps after 49 days.
    #[must_use]
    pub fn millis_wrapping(self) -> u32 {
        (self.0 / 1_000_000) as u32
    }

    /// How long `self` is after `earlier`; zero when it is before.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}
