//! Event subscriptions: HTTP endpoints for events of a workspace. Main types: [`Subscription`] and
//! [`SubscriptionDelivery`]; the rules for calling their URLs are in [`call`].

pub mod call;
pub mod dispatch;
pub mod secrets;
pub mod view;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{AgentId, SubscriptionDeliveryId, SubscriptionId, events::kind::SUBSCRIBABLE, files::is_token_byte};

/// Maximum number of event kinds in one subscription.
pub const MAX_EVENTS: usize = 64;
/// Maximum length of a URL, in bytes.
pub const MAX_URL_BYTES: usize = 2048;
/// Maximum number of custom headers.
pub const MAX_HEADERS: usize = 32;
/// Maximum length of a header name, in bytes.
pub const MAX_HEADER_NAME_BYTES: usize = 128;
/// Maximum length of a header value, in bytes.
pub const MAX_HEADER_VALUE_BYTES: usize = 4096;
/// Maximum length of a secret, in bytes.
pub const MAX_SECRET_BYTES: usize = 512;
/// Maximum number of event subscriptions in a workspace; the same limit applies to inbound webhooks.
pub const MAX_PER_WORKSPACE: i64 = 1000;

/// Event subscription without its secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subscription {
    pub id: SubscriptionId,
    /// Event kinds; `*` includes every subscribable kind.
    pub events: Vec<String>,
    /// Further conditions on events.
    pub filter: Option<EventFilter>,
    /// URL to call.
    pub url: String,
    /// Names of the custom headers; their values are secret.
    pub header_names: Vec<String>,
    /// `None` for a subscription without a signing secret.
    pub signature_scheme: Option<SignatureScheme>,
    /// Time of creation.
    pub created_at: DateTime<Utc>,
    /// Agent that created it and whose view limits it; `None` for the workspace key, which sees everything.
    pub created_by: Option<AgentId>,
    /// `None` for an active subscription.
    pub disabled: Option<Disabled>,
}

/// Conditions on the events of a subscription. All of them must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventFilter {
    /// Name of the channel of the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// Name of an agent that the text mentions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mentions: Option<String>,
}

/// End of a subscription by the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disabled {
    /// Reason for disabling it.
    pub reason: DisabledReason,
    /// Time of disabling.
    pub at: DateTime<Utc>,
}

/// Reason for disabling a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DisabledReason {
    /// The URL answered that it no longer exists.
    Gone,
    /// Calls failed for a long time.
    Failing,
}

crate::columns::stored_name!(DisabledReason);

/// Delivery of one event to the URL of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubscriptionDelivery {
    pub id: SubscriptionDeliveryId,
    pub event_kind: String,
    /// State of the delivery.
    pub status: DeliveryStatus,
    /// Number of attempts so far.
    pub attempts: i32,
    /// HTTP status of the last attempt, if the URL answered.
    pub last_status: Option<i16>,
    /// Error of the last attempt.
    pub last_error: Option<String>,
    /// Time of the next attempt.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// Time of the event.
    pub created_at: DateTime<Utc>,
    /// Time of the last attempt or replay.
    pub updated_at: Option<DateTime<Utc>>,
}

/// State of the delivery of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DeliveryStatus {
    /// To be attempted.
    Pending,
    /// Accepted by the URL.
    Delivered,
    /// No further attempt, unless it is replayed.
    DeadLetter,
}

crate::columns::stored_name!(DeliveryStatus);

/// Signature scheme of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum SignatureScheme {
    /// `X-Relay-Signature: sha256=<hex>` over the body.
    Relay,
    /// `webhook-id`, `webhook-timestamp` and `webhook-signature` as in Standard Webhooks.
    StandardWebhooks,
}

crate::columns::stored_name!(SignatureScheme);

/// Returns whether a subscription may name this: an event kind, or `*` for all of them.
#[must_use]
pub fn is_subscribable(kind: &str) -> bool {
    kind == "*" || SUBSCRIBABLE.contains(&kind)
}

/// Returns the problem of a custom header of a subscription, or `None` if the header is valid.
#[must_use]
pub fn header_problem(name: &str, value: &str) -> Option<&'static str> {
    if name.is_empty() || name.len() > MAX_HEADER_NAME_BYTES || !name.bytes().all(is_token_byte) {
        return Some("is no header name");
    }
    if is_reserved_header(name) {
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

/// Returns whether a header is set by the engine or belongs to the connection.
fn is_reserved_header(name: &str) -> bool {
    const RESERVED: [&str; 12] = [
        "content-type",
        "content-length",
        "content-encoding",
        "transfer-encoding",
        "host",
        "connection",
        "upgrade",
        "te",
        "trailer",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
    ];
    let name = name.to_ascii_lowercase();
    RESERVED.contains(&name.as_str()) || name.starts_with("x-relay-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_set_by_the_engine_are_refused() {
        for (name, value) in [("Authorization", "Bearer x"), ("x-api-key", "a b"), ("X-Empty", "")] {
            assert_eq!(header_problem(name, value), None, "{name}");
        }
        for (name, value) in [
            ("", "x"),
            ("a b", "x"),
            ("a:", "x"),
            ("ä", "x"),
            ("Content-Type", "text/plain"),
            ("X-Relay-Event", "x"),
            ("x-relay-anything", "x"),
            ("Host", "x"),
            ("webhook-signature", "v1,x"),
            ("x-a", "a\r\nb: c"),
            ("x-a", "a\0"),
            ("x-a", "ä"),
        ] {
            assert!(header_problem(name, value).is_some(), "{name}: {value:?}");
        }
        assert!(header_problem("x-a", &"x".repeat(MAX_HEADER_VALUE_BYTES + 1)).is_some());
    }

    #[test]
    fn only_documented_kinds_are_subscribable() {
        for kind in ["*", "message.created", "agent.status.idle", "delivery.deferred", "file.uploaded"] {
            assert!(is_subscribable(kind), "{kind}");
        }
        for kind in ["", "message.*", "message", "node.online", "harness.log", "MESSAGE.CREATED"] {
            assert!(!is_subscribable(kind), "{kind}");
        }
    }
}
