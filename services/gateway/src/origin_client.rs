//! Client that sends a request: [`OriginClient`] for the responses whose shape depends on it (docs/protocol/rest.md,
//! "Origin clients"), [`OriginHeaders`] for the attribution of new workspaces.

use std::convert::Infallible;

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderValue, request::Parts},
};
use relay_wire::workspaces::Origin;

use crate::error::ApiError;

/// Bound of each header that names the origin of a request.
const MAX_ORIGIN_BYTES: usize = 128;

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

/// Lowest major version that, of the published clients, the Rust client alone has reached.
const FIRST_RUST_MAJOR: u64 = 7;

impl OriginClient {
    /// Recognises the client by its name, or by its version if an app has put its own name in place of the client's.
    fn recognize(name: Option<&str>, version: Option<&str>) -> Self {
        match name {
            Some("@relaycast/python-sdk") => Self::Python,
            Some("@relaycast/sdk-rust") => Self::Rust,
            Some("agent-relay-broker") => Self::Broker,
            Some(name) if !name.starts_with('@') => {
                let major = version.and_then(|version| version.split('.').next()?.parse::<u64>().ok());
                if major.is_some_and(|major| major >= FIRST_RUST_MAJOR) { Self::Rust } else { Self::Other }
            }
            Some(_) | None => Self::Other,
        }
    }

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

    /// Returns whether the condition `mention` of a trigger must be a boolean or null; the name of an agent is `true`.
    pub const fn takes_mention_as_flag(self) -> bool {
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
        let read = |name| parts.headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        Ok(Self::recognize(read("x-relaycast-origin-client"), read("x-sdk-version")))
    }
}

/// Client and actor of a request, as its headers name them. Malformed headers are refused.
#[derive(Debug)]
pub struct OriginHeaders(pub Origin);

impl<S: Sync> FromRequestParts<S> for OriginHeaders {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let headers = &parts.headers;
        let is_graphic = |byte: u8| byte.is_ascii_graphic();
        let is_actor_byte = |byte: u8| byte.is_ascii_alphanumeric() || b" ._-/():=;,+@".contains(&byte);
        let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let version = match read_origin(headers, "x-relaycast-origin-version", is_graphic)? {
            Some(version) => Some(version),
            None => read_origin(headers, "x-sdk-version", is_graphic)?,
        };
        let actor = read_origin(headers, "x-relaycast-origin-actor", is_actor_byte)?;
        Ok(Self(Origin {
            client: read_origin(headers, "x-relaycast-origin-client", is_graphic)?,
            version,
            actor: actor.map(|actor| actor.to_ascii_lowercase()),
            distinct_id: read_origin(headers, "x-agent-relay-distinct-id", is_id_byte)?,
        }))
    }
}

/// Reads a header that names the origin of a request. An empty one counts as absent.
fn read_origin(
    headers: &HeaderMap,
    name: &'static str,
    is_allowed: impl Fn(u8) -> bool,
) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let value = value.as_bytes().trim_ascii();
    if value.is_empty() {
        return Ok(None);
    }
    let fits = value.len() <= MAX_ORIGIN_BYTES && value.iter().all(|byte| is_allowed(*byte));
    let text = std::str::from_utf8(value).ok().filter(|_| fits);
    let refused = || {
        ApiError::invalid_request(format!(
            "the header {name} must have at most {MAX_ORIGIN_BYTES} characters and only allowed ones, or be left out"
        ))
    };
    text.map(|text| Some(text.to_owned())).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    #[test]
    fn a_client_is_recognised_by_its_name_or_else_by_its_version() {
        for (name, version, expected) in [
            (Some("@relaycast/sdk-rust"), Some("12.0.0"), OriginClient::Rust),
            (Some("agent-relay-broker"), Some("12.0.0"), OriginClient::Broker),
            (Some("@relaycast/python-sdk"), Some("1.0.0"), OriginClient::Python),
            (Some("my-app"), Some("12.0.0"), OriginClient::Rust),
            (Some("my-app"), Some("6.0.2"), OriginClient::Other),
            (Some("my-app"), Some("next"), OriginClient::Other),
            (Some("@relaycast/sdk"), Some("6.0.2"), OriginClient::Other),
            (None, Some("12.0.0"), OriginClient::Other),
        ] {
            assert_eq!(OriginClient::recognize(name, version), expected, "{name:?} {version:?}");
        }
    }

    #[test]
    fn origin_headers_are_bounded_and_of_allowed_characters() {
        let read = |value: &str| {
            let headers = HeaderMap::from_iter([(
                HeaderName::from_static("x-relaycast-origin-actor"),
                HeaderValue::from_str(value).expect("a header"),
            )]);
            read_origin(&headers, "x-relaycast-origin-actor", |byte| byte.is_ascii_alphanumeric()).ok()
        };
        assert_eq!(read("claude"), Some(Some("claude".to_owned())));
        assert_eq!(read("  "), Some(None));
        assert_eq!(read("a\tb"), None);
        assert_eq!(read(&"a".repeat(MAX_ORIGIN_BYTES + 1)), None);
    }
}
