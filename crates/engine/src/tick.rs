//! Result of one step of background work.

use std::time::Duration;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TickOutcome {
    /// Number of processed items.
    pub worked: u64,
    /// True if more is due right now.
    pub more: bool,
    /// Age of the oldest due item, where known; otherwise the delay of the tick counts.
    pub lag: Option<Duration>,
}

impl TickOutcome {
    /// Returns whether nothing was there to be done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.worked == 0 && !self.more && self.lag.is_none_or(|lag| lag.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_idle_if_nothing_was_done_left_or_late() {
        let idle = TickOutcome { lag: Some(Duration::ZERO), ..TickOutcome::default() };
        assert!(TickOutcome::default().is_idle() && idle.is_idle());
        assert!(!TickOutcome { worked: 1, ..idle }.is_idle());
        assert!(!TickOutcome { more: true, ..idle }.is_idle());
        assert!(!TickOutcome { lag: Some(Duration::from_millis(1)), ..idle }.is_idle());
    }
}
