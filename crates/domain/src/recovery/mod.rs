//! Rules for recovering from a database that was restored to an older state. Main types:
//! [`LogCoverage`] and [`LogMarks`]. Used by the engine's recovery.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Tolerance when comparing the last sign of life with the restored state: clocks differ, and signs of life are written
/// every few seconds.
pub const CLOCK_SLACK_MS: i64 = 60_000;

/// Time span that the log covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogCoverage {
    /// Creation time of the log, in unix milliseconds.
    pub created_at_ms: i64,
    /// `true` if the log still holds its first entry.
    pub is_complete: bool,
    /// Time of the oldest entry, in unix milliseconds.
    pub oldest_at_ms: i64,
}

/// Returns whether the log holds every entry that was written after the restored state.
#[must_use]
pub fn covers_restore(log: Option<LogCoverage>, restored_to_ms: i64) -> bool {
    log.is_some_and(|log| {
        // A log created after the restored state may have replaced an earlier one, whose entries since that state are
        // lost.
        log.created_at_ms <= restored_to_ms && (log.is_complete || log.oldest_at_ms <= restored_to_ms - CLOCK_SLACK_MS)
    })
}

/// End of a log, as a running process found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogMark {
    /// Creation time of the log, in unix milliseconds.
    pub created_at_ms: i64,
    /// Position of its newest entry; 0 if it was empty.
    pub position: u64,
    /// Time at which that entry was stored, in unix milliseconds.
    pub stored_at_ms: i64,
}

/// Ends of both logs at one time; `None` if the log did not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogMarks {
    /// End of the delivery log.
    pub deliveries: Option<LogMark>,
    /// End of the event log.
    pub events: Option<LogMark>,
}

/// Time after a recovery during which brokers may report positions above a mailbox's head; a day longer than the
/// maximum TTL of a delivery ([`TTL_BOUNDS`](crate::mailboxes::dead_letter::TTL_BOUNDS)).
pub const REPORT_WINDOW: Duration = Duration::from_secs(7 * 24 * 3600);

/// Returns whether a broker's `reported` position may raise a mailbox whose head is `head` after a recovery. All
/// brokers together may raise it by `margin`, of which `raised` is used up, so that a faulty broker does bounded
/// damage.
#[must_use]
pub const fn may_raise_head(head: i64, reported: i64, raised: i64, margin: i64) -> bool {
    reported > head && (reported - head).saturating_add(raised) <= margin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reported_position_raises_a_head_by_the_margin_at_most() {
        for (head, reported, raised, margin, expected) in [
            (5, 5, 0, 10, false),
            (5, 4, 0, 10, false),
            (5, 6, 0, 10, true),
            (5, 15, 0, 10, true),
            (5, 16, 0, 10, false),
            (5, 12, 3, 10, true),
            (5, 12, 4, 10, false),
            (0, i64::MAX, 1, i64::MAX, true),
            (0, i64::MAX, 0, 10, false),
        ] {
            assert_eq!(
                may_raise_head(head, reported, raised, margin),
                expected,
                "{reported} above {head}, {raised} of {margin}"
            );
        }
    }

    #[test]
    fn a_log_covers_a_restore_when_it_misses_nothing_newer() {
        let check = |log, expected| assert_eq!(covers_restore(log, 1_000_000), expected, "{log:?}");
        let whole = LogCoverage { created_at_ms: 5, is_complete: true, oldest_at_ms: 999_999 };
        check(None, false);
        check(Some(whole), true);
        check(Some(LogCoverage { created_at_ms: 1_000_001, ..whole }), false);
        check(Some(LogCoverage { is_complete: false, ..whole }), false);
        check(Some(LogCoverage { is_complete: false, oldest_at_ms: 940_000, ..whole }), true);
    }
}
