//! Rules for calling the URLs of event subscriptions: matching events, meaning of an answer, retries and disabling
//! (docs/protocol/rest.md, "Subscription calls").

use std::time::Duration;

use crate::events::kind::SUBSCRIBABLE;

/// Maximum number of attempts for one event.
pub const MAX_ATTEMPTS: i32 = 3;
/// Consecutive failures after which a subscription is only probed.
pub const PROBE_FAILURES: i32 = 5;
/// Interval between two probes.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum `Retry-After` that is honoured.
pub const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// Consecutive failures required to disable a subscription, however long ago the first one was.
pub const DISABLE_FAILURES: i32 = 20;
/// Time of continuous failure after which a subscription is disabled.
pub const DISABLE_PERIOD: Duration = Duration::from_secs(24 * 3600);

/// Meaning of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerClass {
    /// The event was accepted.
    Delivered,
    /// Temporary failure.
    Retry,
    /// Permanent failure of this event.
    Final,
    /// The URL no longer exists: no further events.
    Gone,
}

/// Classifies a status: 4xx is permanent except 408 and 429. Redirects are not followed; they count as temporary
/// because the owner may fix them.
#[must_use]
pub const fn classify_status(status: u16) -> AnswerClass {
    match status {
        200..=299 => AnswerClass::Delivered,
        410 => AnswerClass::Gone,
        408 | 429 => AnswerClass::Retry,
        400..=499 => AnswerClass::Final,
        _ => AnswerClass::Retry,
    }
}

/// Returns the delay after this many attempts: 1 s, 2 s, then `None`.
#[must_use]
pub fn retry_delay(attempts: i32, retry_after: Option<Duration>) -> Option<Duration> {
    let pause = match attempts {
        ..=1 => Duration::from_secs(1),
        2 => Duration::from_secs(2),
        _ => return None,
    };
    // The URL may ask for more time than the schedule gives, not for less.
    Some(retry_after.map_or(pause, |asked| asked.min(MAX_RETRY_AFTER).max(pause)))
}

/// Returns the delay before the next probe of a subscription with this many consecutive failures.
#[must_use]
pub const fn probe_delay(failures: i32) -> Option<Duration> {
    if failures >= PROBE_FAILURES { Some(PROBE_INTERVAL) } else { None }
}

/// Returns whether a subscription with this many consecutive failures over this time is to be disabled.
#[must_use]
pub fn should_disable(failures: i32, failing_for: Duration) -> bool {
    failures >= DISABLE_FAILURES && failing_for >= DISABLE_PERIOD
}

/// Returns whether a subscription to `events` includes this kind. `*` includes every subscribable kind.
#[must_use]
pub fn includes_kind(events: &[String], kind: &str) -> bool {
    events.iter().any(|wanted| wanted == kind || wanted == "*" && SUBSCRIBABLE.contains(&kind))
}

/// Returns whether the text contains `@name` as a separate word.
#[must_use]
pub fn mentions_name(text: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    text.match_indices('@').any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].strip_prefix(name).map(|rest| rest.chars().next());
        !before.is_some_and(is_word) && after.is_some_and(|next| !next.is_some_and(is_word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_classified_as_documented() {
        for (status, meaning) in [
            (200, AnswerClass::Delivered),
            (204, AnswerClass::Delivered),
            (301, AnswerClass::Retry),
            (400, AnswerClass::Final),
            (404, AnswerClass::Final),
            (408, AnswerClass::Retry),
            (410, AnswerClass::Gone),
            (429, AnswerClass::Retry),
            (500, AnswerClass::Retry),
            (503, AnswerClass::Retry),
        ] {
            assert_eq!(classify_status(status), meaning, "{status}");
        }
    }

    #[test]
    fn an_event_is_attempted_three_times() {
        let seconds = Duration::from_secs;
        for (attempts, asked, pause) in [
            (1, None, Some(1)),
            (2, None, Some(2)),
            (3, None, None),
            (1, Some(7), Some(7)),
            (2, Some(0), Some(2)),
            (1, Some(9999), Some(60)),
            (3, Some(7), None),
        ] {
            assert_eq!(retry_delay(attempts, asked.map(seconds)), pause.map(seconds), "{attempts} {asked:?}");
        }
    }

    #[test]
    fn only_lasting_and_repeated_failure_disables() {
        let day = DISABLE_PERIOD;
        assert!(should_disable(20, day));
        assert!(!should_disable(19, day * 30), "too few attempts");
        assert!(!should_disable(100_000, day / 2), "too short a time");
    }

    #[test]
    fn a_mention_is_a_word() {
        for (text, found) in [
            ("@bob", true),
            ("hi @bob, how", true),
            ("(@bob)", true),
            ("@bobby", false),
            ("@bob-2", false),
            ("mail@bob", false),
            ("bob", false),
            ("@bobby @bob", true),
            ("é@bob", false),
            ("", false),
        ] {
            assert_eq!(mentions_name(text, "bob"), found, "{text:?}");
        }
    }

    #[test]
    fn a_star_matches_every_subscribable_kind() {
        let star = ["*".to_owned()];
        assert!(includes_kind(&star, "message.created") && !includes_kind(&star, "node.status.online"));
        assert!(
            includes_kind(&["dm.received".to_owned()], "dm.received")
                && !includes_kind(&["dm.received".to_owned()], "dm")
        );
    }
}
