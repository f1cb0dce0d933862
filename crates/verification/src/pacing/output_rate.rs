//! [`OutputRate`]: how much an agent writes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Timestamp;

/// The rate is taken over this long.
pub(super) const RATE_PERIOD: Duration = Duration::from_secs(1);

/// Bytes of cleaned text over the last second, exact to the millisecond. At most 1000 entries.
#[derive(Debug, Clone, Default)]
pub struct OutputRate {
    /// Bytes by millisecond, oldest first.
    recent: VecDeque<(Timestamp, u64)>,
    /// Sum of `recent`.
    total: u64,
}

impl OutputRate {
    /// No output yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes output. Instants do not decrease; one that does counts as the latest.
    pub fn record(&mut self, at: Timestamp, bytes: u64) {
        let at = self.recent.back().map_or(at, |(latest, _)| at.max(*latest));
        self.forget(at);
        self.total = self.total.saturating_add(bytes);
        match self.recent.back_mut() {
            Some((latest, sum)) if *latest == at => *sum = sum.saturating_add(bytes),
            Some(_) | None => self.recent.push_back((at, bytes)),
        }
    }

    /// Returns the bytes in the second before `now`.
    pub fn bytes_per_second(&self, now: Timestamp) -> u64 {
        let expired = self.recent.iter().take_while(|(at, _)| *at + RATE_PERIOD <= now).map(|(_, bytes)| bytes);
        self.total.saturating_sub(expired.sum())
    }

    /// Returns the instant from which on the rate is below `rate`, if there is no more output.
    pub(super) fn falls_below(&self, rate: u64) -> Option<Timestamp> {
        let mut sum = 0;
        let decisive = self.recent.iter().rev().find(|(_, bytes)| {
            sum += bytes;
            sum >= rate
        });
        decisive.map(|(at, _)| *at + RATE_PERIOD)
    }

    fn forget(&mut self, now: Timestamp) {
        while let Some((_, bytes)) = self.recent.pop_front_if(|(at, _)| *at + RATE_PERIOD <= now) {
            self.total = self.total.saturating_sub(bytes);
        }
    }
}
