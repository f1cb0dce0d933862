//! What to make of a database that may have been restored to an older state.

use std::time::Duration;

/// How much older than its last sign of life a restored state may be taken to be: clocks differ, and signs of life
/// come each few seconds.
pub const SLACK_MS: i64 = 60_000;

/// How far back the log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// When the log was made, in unix milliseconds.
    pub created_at_ms: i64,
    /// Whether it still holds the first thing that was put into it.
    pub is_whole: bool,
    /// When the oldest thing that it holds was put into it, in unix milliseconds.
    pub oldest_at_ms: i64,
}

/// Whether the log holds everything that was put into a log after the restored state.
#[must_use]
pub fn reaches(log: Option<Reach>, restored_to_ms: i64) -> bool {
    log.is_some_and(|log| {
        log.created_at_ms <= restored_to_ms && (log.is_whole || log.oldest_at_ms <= restored_to_ms - SLACK_MS)
    })
}

/// How long after a recovery a broker may tell a position above a mailbox's head: as long as something can wait for it.
pub const TOLD_WITHIN: Duration = Duration::from_secs(7 * 24 * 3600);

/// Whether a broker that says it has had everything up to `told` may raise a mailbox that reaches to `head` after a recovery.
/// All brokers together may raise it by `margin` numbers, of which `raised` are used up: one that is broken or lies costs no more.
#[must_use]
pub const fn may_raise(head: i64, told: i64, raised: i64, margin: i64) -> bool {
    told > head && (told - head).saturating_add(raised) <= margin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_told_position_raises_a_head_by_the_margin_at_most() {
        for (head, told, raised, margin, expected) in [
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
            assert_eq!(may_raise(head, told, raised, margin), expected, "{told} above {head}, {raised} of {margin}");
        }
    }

    #[test]
    fn a_log_reaches_back_when_nothing_newer_than_the_state_can_be_missing_in_it() {
        let check = |log, expected| assert_eq!(reaches(log, 1_000_000), expected, "{log:?}");
        let whole = Reach { created_at_ms: 5, is_whole: true, oldest_at_ms: 999_999 };
        check(None, false);
        check(Some(whole), true);
        check(Some(Reach { created_at_ms: 1_000_001, ..whole }), false);
        check(Some(Reach { is_whole: false, ..whole }), false);
        check(Some(Reach { is_whole: false, oldest_at_ms: 940_000, ..whole }), true);
    }
}
