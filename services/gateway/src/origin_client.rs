//! Which client asks, for the three answers that no single shape serves (contract: rest.md 6).

use std::convert::Infallible;

use axum::{extract::FromRequestParts, http::request::Parts};

/// What `X-Relaycast-Origin-Client` names. Any other name, and none, is [`Self::Other`]: those take the natural shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginClient {
    /// `@relaycast/python-sdk`.
    Python,
    /// `@relaycast/sdk-rust`.
    Rust,
    /// `agent-relay-broker`, which reads answers with the Rust client.
    Broker,
    /// Everything else.
    Other,
}

impl OriginClient {
    /// Conversations with participants and the newest message as strings.
    pub const fn takes_conversations_as_names(self) -> bool {
        matches!(self, Self::Python)
    }

    /// The newest unread message of a conversation as its text.
    pub const fn takes_last_unread_as_text(self) -> bool {
        matches!(self, Self::Rust)
    }

    /// An action's `handler_agent` as a string always.
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
