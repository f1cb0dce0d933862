//! Event subscriptions: what they may ask for.

use crate::{event::SUBSCRIBABLE, file::is_token_byte};

/// Kinds of events that one subscription may name.
pub const MAX_EVENTS: usize = 64;
/// An address, in bytes.
pub const MAX_URL_BYTES: usize = 2048;
/// Headers of a subscription's own.
pub const MAX_HEADERS: usize = 32;
/// A header's name, in bytes.
pub const MAX_HEADER_NAME_BYTES: usize = 128;
/// A header's value, in bytes.
pub const MAX_HEADER_VALUE_BYTES: usize = 4096;
/// A secret, in bytes.
pub const MAX_SECRET_BYTES: usize = 512;
/// Event subscriptions of a workspace, and as many inbound webhooks.
pub const MAX_PER_WORKSPACE: i64 = 1000;

/// How the body of a call is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureScheme {
    /// `X-Relay-Signature: sha256=<hex>` over the body.
    Relay,
    /// `webhook-id`, `webhook-timestamp` and `webhook-signature` as the Standard Webhooks say.
    StandardWebhooks,
}

impl SignatureScheme {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::StandardWebhooks => "standard-webhooks",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Relay, Self::StandardWebhooks].into_iter().find(|scheme| scheme.as_str() == word)
    }
}

/// Whether a subscription may name this: a kind of event, or `*` for all of them.
#[must_use]
pub fn is_subscribable(kind: &str) -> bool {
    kind == "*" || SUBSCRIBABLE.contains(&kind)
}

/// What is wrong with a header of a subscription's own, if anything.
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

/// Headers that say what the call is, or that belong to the connection.
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
    fn headers_that_are_the_engines_own_are_refused() {
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
    fn kinds_are_those_of_the_contract() {
        for kind in ["*", "message.created", "agent.status.idle", "delivery.deferred", "file.uploaded"] {
            assert!(is_subscribable(kind), "{kind}");
        }
        for kind in ["", "message.*", "message", "node.online", "harness.log", "MESSAGE.CREATED"] {
            assert!(!is_subscribable(kind), "{kind}");
        }
    }
}
