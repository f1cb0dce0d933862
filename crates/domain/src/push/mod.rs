//! Rules for http_push: meaning of an endpoint's answer, retries, and the circuit breaker (docs/protocol/node.md, "HTTP
//! push"). Main types: [`AckMode`], [`RetryPolicy`] and [`PushOutcome`]; the worker's dispatcher applies them. Call
//! settings are in [`settings`], leased mailboxes in [`mailbox`], attempts in [`attempt`], the circuit breaker in
//! [`endpoint`].

pub mod attempt;
pub mod endpoint;
pub mod mailbox;
pub mod settings;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    files::is_token_byte,
    subscriptions::{MAX_HEADER_NAME_BYTES, MAX_HEADER_VALUE_BYTES},
};

/// Delivery adapters of http_push nodes, by authentication method.
pub const HTTP_ADAPTERS: [&str; 4] = ["http.basic.v1", "http.bearer.v1", "http.static_headers.v1", "http.hmac.v1"];
/// Delivery adapter of nodes whose agents claim deliveries over REST.
pub const POLL_ADAPTER: &str = "poll.v1";

/// Delay between attempts for nodes without a schedule (docs/protocol/node.md, "Push retries").
pub const DEFAULT_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Maximum number of retries in a node's own schedule.
pub const MAX_SCHEDULE_ENTRIES: usize = 32;
/// Maximum delay in a schedule, and maximum `Retry-After` of an endpoint.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(24 * 3600);
/// Delays of the example schedule of Standard Webhooks, in seconds.
pub const STANDARD_SCHEDULE: [u32; 9] = [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400];
// Without it, deliveries that failed together in an outage would all be attempted again at the same instants.
/// Random variation of a scheduled delay, in percent.
const JITTER_PERCENT: u64 = 20;

/// Consecutive failures after which the circuit breaker of an endpoint opens.
pub const BREAKER_FAILURES: i32 = 5;
/// Time for which the breaker stays open before it lets one attempt through.
pub const BREAKER_OPEN: Duration = Duration::from_secs(30);
/// Timeout of one attempt: connecting, sending, and reading the answer.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// Stored part of an endpoint's answer, in bytes.
pub const STORED_ANSWER_BYTES: usize = 1024;

/// Condition under which a delivery is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AckMode {
    /// The recipient acknowledges over REST; a 2xx means delivered.
    #[default]
    Manual,
    /// Any 2xx answer acknowledges.
    #[strum(serialize = "on_2xx")]
    #[serde(rename = "on_2xx")]
    On2xx,
    /// A 2xx answer acknowledges if its body declares it.
    Response,
}

crate::columns::stored_name!(AckMode);

/// Ordering of an agent's deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PushOrdering {
    /// One after the other by seq. A failing delivery blocks later ones until it succeeds or expires.
    #[default]
    Seq,
    /// Independent of each other.
    None,
}

crate::columns::stored_name!(PushOrdering);

/// Retry policy of failed deliveries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RetryPolicy {
    /// Retries every [`DEFAULT_RETRY_DELAY`] until the delivery expires.
    #[default]
    UntilExpiry,
    /// Retries after these delays with jitter, then gives the delivery up.
    Schedule(Vec<Duration>),
}

impl RetryPolicy {
    /// Returns the delay after the `failed`th failure (from 1 on), or `None` when there is no further attempt. `chance`
    /// is a uniformly distributed number.
    #[must_use]
    pub fn retry_delay(&self, failed: u32, chance: u64) -> Option<Duration> {
        match self {
            Self::UntilExpiry => Some(DEFAULT_RETRY_DELAY),
            Self::Schedule(pauses) => {
                let pause = pauses.get(usize::try_from(failed.max(1) - 1).unwrap_or(usize::MAX))?;
                let percent = 100 - JITTER_PERCENT + chance % (2 * JITTER_PERCENT + 1);
                // The conversion cannot fail: the percentage is 120 at most.
                Some(pause.mul_f64(f64::from(u32::try_from(percent).unwrap_or(100)) / 100.0))
            }
        }
    }
}

/// Returns the delay before a delivery that its consumer reported as temporarily failed is redelivered: 5 s, doubled
/// each time up to 10 min.
#[must_use]
pub fn consumer_backoff(failed: u32) -> Duration {
    // Seven doublings exceed the maximum. Without the clamp a large count would overflow the shift.
    Duration::from_secs(5 << failed.clamp(1, 8).saturating_sub(1)).min(Duration::from_secs(600))
}

/// Answer of an endpoint to one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointAnswer {
    /// HTTP status code.
    pub status: u16,
    /// Outcome that the JSON body declares, if any.
    pub declared: Option<DeclaredOutcome>,
}

/// Outcome that the body of an answer declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclaredOutcome {
    /// The delivery is acknowledged.
    Acked,
    /// The delivery is rejected permanently.
    Rejected,
}

/// Outcome of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushOutcome {
    /// Delivered; the recipient acknowledges it separately.
    Delivered,
    /// Delivered and acknowledged.
    Acked,
    /// Failed; to be retried.
    Failed {
        /// `true` if the failure counts towards opening the circuit breaker.
        is_endpoint_fault: bool,
        /// `true` if the endpoint asks for fewer requests.
        throttles: bool,
    },
    /// Rejected permanently: there is no further attempt.
    Rejected,
    /// The endpoint no longer exists.
    Gone,
}

/// Classifies an answer by the node's ack mode (docs/protocol/node.md, "Push outcomes").
#[must_use]
pub const fn classify_answer(mode: AckMode, answer: EndpointAnswer) -> PushOutcome {
    match (answer.status, mode) {
        (200..=299, AckMode::Manual) => PushOutcome::Delivered,
        (200..=299, AckMode::On2xx) => PushOutcome::Acked,
        (200..=299, AckMode::Response) => match answer.declared {
            Some(DeclaredOutcome::Acked) => PushOutcome::Acked,
            Some(DeclaredOutcome::Rejected) => PushOutcome::Rejected,
            // The endpoint works and did not declare an outcome for this message.
            None => PushOutcome::Failed { is_endpoint_fault: false, throttles: false },
        },
        (410, _) => PushOutcome::Gone,
        (429, _) => PushOutcome::Failed { is_endpoint_fault: false, throttles: true },
        (502 | 504, _) => PushOutcome::Failed { is_endpoint_fault: true, throttles: true },
        (500..=599, _) => PushOutcome::Failed { is_endpoint_fault: true, throttles: false },
        _ => PushOutcome::Failed { is_endpoint_fault: false, throttles: false },
    }
}

/// Returns the problem of a custom header of a node, or `None` if the header is valid.
#[must_use]
pub fn header_problem(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > MAX_HEADER_NAME_BYTES || !name.bytes().all(is_token_byte) {
        return Some("is no header name");
    }
    let lower = name.to_ascii_lowercase();
    let own = ["content-type", "x-relaycast-event", "x-relaycast-delivery", "x-forward-to", "x-proxy-auth"];
    // Reserved for the client: with them a tenant could change the framing, the routing or the encoding of a request.
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
    fn answers_are_classified_as_documented() {
        use AckMode::{Manual, On2xx, Response};
        let plain = PushOutcome::Failed { is_endpoint_fault: false, throttles: false };
        let server = PushOutcome::Failed { is_endpoint_fault: true, throttles: false };
        let (acked, rejected) = (Some(DeclaredOutcome::Acked), Some(DeclaredOutcome::Rejected));
        for (mode, status, declared, expected) in [
            (Manual, 200, acked, PushOutcome::Delivered),
            (Manual, 204, None, PushOutcome::Delivered),
            (On2xx, 299, None, PushOutcome::Acked),
            (Response, 200, acked, PushOutcome::Acked),
            (Response, 200, None, plain),
            (Response, 200, rejected, PushOutcome::Rejected),
            (Response, 404, rejected, plain),
            (Manual, 200, rejected, PushOutcome::Delivered),
            (On2xx, 200, rejected, PushOutcome::Acked),
            (On2xx, 301, acked, plain),
            (On2xx, 400, acked, plain),
            (On2xx, 410, acked, PushOutcome::Gone),
            (On2xx, 429, acked, PushOutcome::Failed { is_endpoint_fault: false, throttles: true }),
            (On2xx, 500, acked, server),
            (Manual, 503, acked, server),
            (On2xx, 502, None, PushOutcome::Failed { is_endpoint_fault: true, throttles: true }),
            (On2xx, 504, None, PushOutcome::Failed { is_endpoint_fault: true, throttles: true }),
        ] {
            assert_eq!(
                classify_answer(mode, EndpointAnswer { status, declared }),
                expected,
                "{mode:?} {status} {declared:?}"
            );
        }
    }

    #[test]
    fn a_schedule_ends_and_the_default_does_not() {
        assert_eq!(RetryPolicy::default().retry_delay(1, 7), Some(DEFAULT_RETRY_DELAY));
        assert_eq!(RetryPolicy::default().retry_delay(1_000_000, 7), Some(DEFAULT_RETRY_DELAY));
        let schedule = RetryPolicy::Schedule(vec![Duration::from_secs(10), Duration::from_secs(100)]);
        for chance in 0..100 {
            let (first, second) = (schedule.retry_delay(1, chance).unwrap(), schedule.retry_delay(2, chance).unwrap());
            assert!((8_000..=12_000).contains(&first.as_millis()), "{first:?}");
            assert!((80_000..=120_000).contains(&second.as_millis()), "{second:?}");
        }
        assert_ne!(schedule.retry_delay(1, 0), schedule.retry_delay(1, 1), "chance counts");
        assert_eq!(schedule.retry_delay(3, 0), None);
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
