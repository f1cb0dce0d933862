//! Client that sends a request, for the responses whose shape depends on it (docs/protocol/rest.md, "Origin
//! clients").

use std::convert::Infallible;

use axum::{extract::FromRequestParts, http::request::Parts};

/// Client named by `X-Relaycast-Origin-Client`. Any other name, and a missing header, is [`Self::Other`] and gets the
/// regular shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginClient {
    /// `@relaycast/python-sdk`.
    Python,
    /// `@relaycast/sdk-rust`.
    Rust,
    /// `agent-relay-broker`, which uses the Rust client.
    Broker,
    Other,
}

impl OriginClient {
    /// Returns whether conversations contain participants and the newest message as strings.
    pub const fn takes_conversations_as_names(self) -> bool {
        matches!(self, Self::Python)
    }

    /// Returns whether the newest unread message of a conversation is its text.
    pub const fn takes_last_unread_as_text(self) -> bool {
        matches!(self, Self::Rust)
    }

    /// Returns whether the output of an invocation must be an object or null; other values are wrapped.
    pub const fn takes_output_as_object(self) -> bool {
        matches!(self, Self::Rust | Self::Broker)
    }

    /// Returns whether `handler_agent` of an action must be a string, never null.
    pub const fn takes_no_null_handler(self) -> bool {
        matches!(self, Self::Rust | Self::Broker)
    }
}

impl<S: Sync> FromRequestParts<S> for OriginClient {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let named = parts.headers.get("x-relaycast-origin-client").and_then(|name| name.to_str().ok());
        Ok(match named {
            Some("@relaycast/python-sdk") => Self::Python,
            Some("@relaycast/sdk-rust") => Self::Rust,
            Some("agent-relay-broker") => Self::Broker,
            _ => Self::Other,
        })
    }
}
