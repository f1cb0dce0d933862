//! What to make of a database that may have been restored to an older state.

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

#[cfg(test)]
mod tests {
    use super::*;

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
