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
