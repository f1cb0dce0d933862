//! Handing deliveries to an HTTP endpoint: what an answer means, when to try again, when to leave an endpoint alone
//! (contract: node.md 13).

use std::time::Duration;

use crate::{
    file::is_token_byte,
    subscription::{MAX_HEADER_NAME_BYTES, MAX_HEADER_VALUE_BYTES},
};

/// The adapters of http_push nodes, by how calls are authenticated.
pub const HTTP_ADAPTERS: [&str; 4] = ["http.basic.v1", "http.bearer.v1", "http.static_headers.v1", "http.hmac.v1"];
/// The adapter of nodes whose agents ask for their deliveries.
pub const POLL_ADAPTER: &str = "poll.v1";

/// From a failure to the next try, unless the node has a schedule (contract: node.md 13.3).
pub const RETRY_AFTER: Duration = Duration::from_secs(30);
/// Tries that a schedule of a node's own may have besides the first.
pub const MAX_SCHEDULE: usize = 32;
/// The longest pause of a schedule, and the longest that an endpoint may ask for.
pub const MAX_PAUSE: Duration = Duration::from_secs(24 * 3600);
/// The pauses of the example of the Standard Webhooks, in seconds.
pub const STANDARD_SCHEDULE: [u32; 9] = [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400];
/// By how much a pause of a schedule is made longer or shorter by chance, in percent.
const JITTER_PERCENT: u64 = 20;

/// Failures in a row after which an endpoint is left alone.
pub const BREAKER_FAILURES: i32 = 5;
/// For how long, until one try is let through.
pub const BREAKER_OPEN: Duration = Duration::from_secs(30);
/// How long one try lasts at most: connecting, sending, and reading the answer.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// What is kept of an answer, in bytes.
pub const KEPT_ANSWER: usize = 1024;

/// What makes a delivery acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AckMode {
    /// Its recipient says so by REST; a 2xx means delivered.
    #[default]
    Manual,
    /// Any 2xx.
    On2xx,
    /// A 2xx whose body declares it.
    Response,
}

impl AckMode {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::On2xx => "on_2xx",
            Self::Response => "response",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Manual, Self::On2xx, Self::Response].into_iter().find(|mode| mode.as_str() == word)
    }
}

/// Whether an agent's deliveries wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ordering {
    /// One after the other by seq; one that fails holds up those behind it until it succeeds or expires.
    #[default]
    Seq,
    /// Each by itself.
    None,
}

impl Ordering {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Seq => "seq",
            Self::None => "none",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Seq, Self::None].into_iter().find(|ordering| ordering.as_str() == word)
    }
}

/// When a delivery that failed is tried again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RetryPolicy {
    /// Every [`RETRY_AFTER`] until the delivery expires.
    #[default]
    UntilExpiry,
    /// After these pauses, with chance added; then the delivery is given up.
    Schedule(Vec<Duration>),
}

impl RetryPolicy {
    /// The pause after the `failed`th failure (from 1 on), or `None` when there is no further try. `chance` is any
    /// number, equally likely to be each.
    #[must_use]
    pub fn pause(&self, failed: u32, chance: u64) -> Option<Duration> {
        match self {
            Self::UntilExpiry => Some(RETRY_AFTER),
            Self::Schedule(pauses) => {
                let pause = pauses.get(usize::try_from(failed.max(1) - 1).unwrap_or(usize::MAX))?;
                let percent = 100 - JITTER_PERCENT + chance % (2 * JITTER_PERCENT + 1);
                Some(pause.mul_f64(f64::from(u32::try_from(percent).unwrap_or(100)) / 100.0))
            }
        }
    }
}

/// The pause before a delivery comes back that its consumer reported as failed for a while: 5 s, doubled each time up
/// to 10 min.
#[must_use]
pub fn consumer_backoff(failed: u32) -> Duration {
    Duration::from_secs(5 << failed.clamp(1, 8).saturating_sub(1)).min(Duration::from_secs(600))
}

/// What an endpoint answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// What its body declares, if it is JSON that does.
    pub declared: Option<Declared>,
}

/// What the body of an answer says of the delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declared {
    /// It is acknowledged.
    Acked,
    /// It is refused for good.
    Rejected,
}

/// What a try has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Handed over; its recipient acknowledges it by itself.
    Delivered,
    /// Handed over and acknowledged.
    Acked,
    /// To be tried again.
    Failed {
        /// Whether this speaks against the endpoint as a whole.
        counts: bool,
        /// Whether the endpoint wants fewer calls.
        throttles: bool,
    },
    /// Refused for good: there is no further try.
    Rejected,
    /// The endpoint is no more.
    Gone,
}

/// Judges an answer by the node's ack mode (contract: node.md 13.3).
#[must_use]
pub const fn judge(mode: AckMode, answer: Answer) -> Verdict {
    match (answer.status, mode) {
        (200..=299, AckMode::Manual) => Verdict::Delivered,
        (200..=299, AckMode::On2xx) => Verdict::Acked,
        (200..=299, AckMode::Response) => match answer.declared {
            Some(Declared::Acked) => Verdict::Acked,
            Some(Declared::Rejected) => Verdict::Rejected,
            // The endpoint works; this message does not get through.
            None => Verdict::Failed { counts: false, throttles: false },
        },
        (410, _) => Verdict::Gone,
        (429, _) => Verdict::Failed { counts: false, throttles: true },
        (502 | 504, _) => Verdict::Failed { counts: true, throttles: true },
        (500..=599, _) => Verdict::Failed { counts: true, throttles: false },
        _ => Verdict::Failed { counts: false, throttles: false },
    }
}

/// What is wrong with a header of a node's own, if anything.
#[must_use]
pub fn header_problem(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > MAX_HEADER_NAME_BYTES || !name.bytes().all(is_token_byte) {
        return Some("is no header name");
    }
    let lower = name.to_ascii_lowercase();
    let own = ["content-type", "x-relaycast-event", "x-relaycast-delivery", "x-forward-to", "x-proxy-auth"];
    let of_the_connection =
        ["content-length", "transfer-encoding", "content-encoding", "host", "connection", "upgrade", "te", "trailer"];
    if own.contains(&&*lower) || lower.starts_with("webhook-") || of_the_connection.contains(&&*lower) {
        return Some("is set by the engine");
    }
    if value.len() > MAX_HEADER_VALUE_BYTES {
        return Some("has a value of more than 4096 bytes");
    }
    if value.bytes().any(|byte| byte != b'\t' && byte != b' ' && !byte.is_ascii_graphic()) {
        return Some("has a value that is not one line of ASCII");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_mean_what_the_contract_says() {
        use AckMode::{Manual, On2xx, Response};
        let plain = Verdict::Failed { counts: false, throttles: false };
        let server = Verdict::Failed { counts: true, throttles: false };
        let (acked, rejected) = (Some(Declared::Acked), Some(Declared::Rejected));
        for (mode, status, declared, expected) in [
            (Manual, 200, acked, Verdict::Delivered),
            (Manual, 204, None, Verdict::Delivered),
            (On2xx, 299, None, Verdict::Acked),
            (Response, 200, acked, Verdict::Acked),
            (Response, 200, None, plain),
            (Response, 200, rejected, Verdict::Rejected),
            (Response, 404, rejected, plain),
            (Manual, 200, rejected, Verdict::Delivered),
            (On2xx, 200, rejected, Verdict::Acked),
            (On2xx, 301, acked, plain),
            (On2xx, 400, acked, plain),
            (On2xx, 410, acked, Verdict::Gone),
            (On2xx, 429, acked, Verdict::Failed { counts: false, throttles: true }),
            (On2xx, 500, acked, server),
            (Manual, 503, acked, server),
            (On2xx, 502, None, Verdict::Failed { counts: true, throttles: true }),
            (On2xx, 504, None, Verdict::Failed { counts: true, throttles: true }),
        ] {
            assert_eq!(judge(mode, Answer { status, declared }), expected, "{mode:?} {status} {declared:?}");
        }
    }

    #[test]
    fn a_schedule_ends_and_the_default_does_not() {
        assert_eq!(RetryPolicy::default().pause(1, 7), Some(RETRY_AFTER));
        assert_eq!(RetryPolicy::default().pause(1_000_000, 7), Some(RETRY_AFTER));
        let schedule = RetryPolicy::Schedule(vec![Duration::from_secs(10), Duration::from_secs(100)]);
        for chance in 0..100 {
            let (first, second) = (schedule.pause(1, chance).unwrap(), schedule.pause(2, chance).unwrap());
            assert!((8_000..=12_000).contains(&first.as_millis()), "{first:?}");
            assert!((80_000..=120_000).contains(&second.as_millis()), "{second:?}");
        }
        assert_ne!(schedule.pause(1, 0), schedule.pause(1, 1), "chance counts");
        assert_eq!(schedule.pause(3, 0), None);
    }

    #[test]
    fn a_consumers_failures_back_off_to_ten_minutes() {
        let pauses: Vec<u64> = (1..=10).map(|n| consumer_backoff(n).as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]);
    }

    #[test]
    fn headers_of_the_engine_and_the_connection_are_refused() {
        for (name, value) in [("Authorization", "Bearer x"), ("x-api-key", "a b"), ("X-Relay-Anything", "1")] {
            assert_eq!(header_problem(name, value), None, "{name}");
        }
        for (name, value) in [
            ("", "x"),
            ("a b", "x"),
            ("Content-Type", "text/plain"),
            ("X-Relaycast-Event", "x"),
            ("X-RELAYCAST-DELIVERY", "x"),
            ("Webhook-Anything", "x"),
            ("X-Forward-To", "x"),
            ("x-proxy-auth", "x"),
            ("Host", "x"),
            ("ok", "a\r\nb: c"),
        ] {
            assert!(header_problem(name, value).is_some(), "{name}");
        }
    }
}
