//! [`Timestamp`]: the instants that callers pass in.

use std::ops::Add;
use std::time::Duration;

/// Milliseconds on a monotonic clock whose origin the caller chooses. Only differences matter; a recorded session
/// may use negative values for output before the injection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The instant `millis` milliseconds after the origin of the caller's clock.
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the origin of the caller's clock.
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// Time that passed since `earlier`; `None` if this instant is before it.
    pub fn checked_duration_since(self, earlier: Self) -> Option<Duration> {
        u64::try_from(self.0.checked_sub(earlier.0)?).ok().map(Duration::from_millis)
    }

    /// Time that passed since `earlier`; zero if this instant is before it.
    pub fn duration_since(self, earlier: Self) -> Duration {
        self.checked_duration_since(earlier).unwrap_or_default()
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates at the largest instant.
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_signed_only_where_asked() {
        let (early, late) = (Timestamp::from_millis(-5), Timestamp::from_millis(10));
        assert_eq!(late.checked_duration_since(early), Some(Duration::from_millis(15)));
        assert_eq!(early.checked_duration_since(late), None);
        assert_eq!(early.duration_since(late), Duration::ZERO);
        assert_eq!(late + Duration::MAX, Timestamp::from_millis(i64::MAX));
    }
}
