//! Rules for calling the addresses of event subscriptions: which events, what an answer means, when to try again,
//! when to give up (contract: rest.md 3.13).

use std::time::Duration;

use crate::event::SUBSCRIBABLE;

/// Tries of one event.
pub const TRIES: i32 = 3;
/// Failed tries in a row from which a subscription is only probed.
pub const PROBED_FROM: i32 = 5;
/// Between two probes.
pub const PROBE_EVERY: Duration = Duration::from_secs(30);
/// The longest `Retry-After` that is honoured.
pub const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);
/// Failed tries in a row without which a subscription stays active, however long ago the first one was.
pub const DISABLED_FROM: i32 = 20;
/// How long a subscription may fail.
pub const DISABLED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The event was taken.
    Delivered,
    /// It may be taken later.
    Retry,
    /// It will not be taken.
    Final,
    /// Nothing will be taken any more.
    Gone,
}

/// What a status means: 4xx is final, 408 and 429 aside; redirects are not followed, and may be mended.
#[must_use]
pub const fn verdict(status: u16) -> Verdict {
    match status {
        200..=299 => Verdict::Delivered,
        410 => Verdict::Gone,
        408 | 429 => Verdict::Retry,
        400..=499 => Verdict::Final,
        _ => Verdict::Retry,
    }
}

/// How long to wait after this many tries of an event: 1 s, 2 s. `None` after the last one.
#[must_use]
pub fn pause_after(tries: i32, retry_after: Option<Duration>) -> Option<Duration> {
    let pause = match tries {
        ..=1 => Duration::from_secs(1),
        2 => Duration::from_secs(2),
        _ => return None,
    };
    Some(retry_after.map_or(pause, |asked| asked.min(LONGEST_RETRY_AFTER).max(pause)))
}

/// How long a subscription that has failed this often in a row is left alone.
#[must_use]
pub const fn probe_pause(failures: i32) -> Option<Duration> {
    if failures >= PROBED_FROM { Some(PROBE_EVERY) } else { None }
}

/// Whether a subscription that has failed this often in a row, for so long, is switched off.
#[must_use]
pub fn is_given_up(failures: i32, failing_for: Duration) -> bool {
    failures >= DISABLED_FROM && failing_for >= DISABLED_AFTER
}

/// Whether a subscription to `events` wants this kind. `*` is every kind that can be subscribed to.
#[must_use]
pub fn wants(events: &[String], kind: &str) -> bool {
    events.iter().any(|wanted| wanted == kind || wanted == "*" && SUBSCRIBABLE.contains(&kind))
}

/// Whether `@name` stands in the text as a word of its own.
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
    fn statuses_mean_what_the_contract_says() {
        for (status, meaning) in [
            (200, Verdict::Delivered),
            (204, Verdict::Delivered),
            (301, Verdict::Retry),
            (400, Verdict::Final),
            (404, Verdict::Final),
            (408, Verdict::Retry),
            (410, Verdict::Gone),
            (429, Verdict::Retry),
            (500, Verdict::Retry),
            (503, Verdict::Retry),
        ] {
            assert_eq!(verdict(status), meaning, "{status}");
        }
    }

    #[test]
    fn an_event_is_tried_three_times() {
        let seconds = Duration::from_secs;
        for (tries, asked, pause) in [
            (1, None, Some(1)),
            (2, None, Some(2)),
            (3, None, None),
            (1, Some(7), Some(7)),
            (2, Some(0), Some(2)),
            (1, Some(9999), Some(60)),
            (3, Some(7), None),
        ] {
            assert_eq!(pause_after(tries, asked.map(seconds)), pause.map(seconds), "{tries} {asked:?}");
        }
    }

    #[test]
    fn only_lasting_and_repeated_failure_switches_off() {
        let day = DISABLED_AFTER;
        assert!(is_given_up(20, day));
        assert!(!is_given_up(19, day * 30), "too few tries");
        assert!(!is_given_up(100_000, day / 2), "too short a time");
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
    fn a_star_is_every_kind_that_can_be_subscribed_to() {
        let star = ["*".to_owned()];
        assert!(wants(&star, "message.created") && !wants(&star, "node.status.online"));
        assert!(wants(&["dm.received".to_owned()], "dm.received") && !wants(&["dm.received".to_owned()], "dm"));
    }
}
