//! Extractors for path, query and body, whose errors use the response envelope.

use std::time::Duration;

use axum::{
    body::{Body as RequestBody, Bytes, HttpBody as _},
    extract::{
        FromRequest, FromRequestParts, Request,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderMap, HeaderValue, header::CONTENT_TYPE},
};
use futures::StreamExt as _;
use relay_domain::names;
use relay_engine::access::idempotency::ClientKey;
use relay_wire::messages::batch::BatchBody;
use serde::de::DeserializeOwned;

use crate::{connections::ConnectionPermits, error::ApiError};

/// Maximum size of a request body, in bytes.
pub const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Time for the rest of a body that is not kept.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// Decoded path parameter, or several.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(ApiError))]
pub struct Path<T>(pub T);

/// Query parameters.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub struct Query<T>(pub T);

impl From<PathRejection> for ApiError {
    fn from(_: PathRejection) -> Self {
        Self::invalid_request("Invalid path")
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::invalid_request(format!("Invalid query: {}", rejection.body_text()))
    }
}

/// JSON body. A missing body counts as `{}`.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let (headers, bytes) = read_body(request).await?;
        parse(&headers, &bytes).map(Self)
    }
}

/// JSON body with its idempotency key, if the client sent one.
#[derive(Debug)]
pub struct KeyedBody<T> {
    pub body: T,
    pub key: Option<ClientKey>,
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for KeyedBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let (headers, bytes) = read_body(request).await?;
        let body = parse(&headers, &bytes)?;
        // A value that is no text counts as an empty key, which is invalid.
        let key = find_key(&headers)
            .map(|value| ClientKey::read(value.to_str().unwrap_or_default(), &bytes, &[]))
            .transpose()?;
        Ok(Self { body, key })
    }
}

/// Body of a batch, with the headers: its posts are checked one by one.
#[derive(Debug)]
pub struct BatchRequest {
    pub body: BatchBody,
    pub has_key: bool,
}

impl<S: Send + Sync> FromRequest<S> for BatchRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let (headers, bytes) = read_body(request).await?;
        check_media_type(&headers, &bytes)?;
        let bytes = or_empty(&bytes);
        check_is_object(bytes)?;
        // U+0000 and depth are checked for each post, so that one at fault is refused alone.
        let body = decode_object(bytes)?;
        Ok(Self { body, has_key: find_key(&headers).is_some() })
    }
}

fn find_key(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get("idempotency-key").or_else(|| headers.get("x-idempotency-key"))
}

async fn read_body(request: Request) -> Result<(HeaderMap, Bytes), ApiError> {
    let (parts, body) = request.into_parts();
    let declared = body.size_hint().upper().and_then(|bytes| usize::try_from(bytes).ok());
    // A body in chunks declares no size and reserves the largest one; `keep` returns the rest.
    let wanted = declared.unwrap_or(MAX_BODY_BYTES).min(MAX_BODY_BYTES);
    let memory = match ConnectionPermits::reserve_body(&parts, wanted).await {
        Ok(memory) => memory,
        Err(refusal) => {
            discard(body).await;
            return Err(refusal);
        }
    };
    let bytes = axum::body::to_bytes(body, MAX_BODY_BYTES).await.map_err(|error| {
        if is_length_limit(&error) {
            ApiError::payload_too_large()
        } else {
            ApiError::invalid_request("The body broke off")
        }
    })?;
    memory.keep(bytes.len());
    Ok((parts.headers, bytes))
}

/// Reads a body to its end without keeping it: an answer before that may be lost with the connection.
async fn discard(body: RequestBody) {
    let mut pieces = body.into_data_stream();
    let read = async { while let Some(Ok(_)) = pieces.next().await {} };
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, read).await;
}

fn is_length_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        if error.to_string().contains("length limit exceeded") {
            return true;
        }
        cause = error.source();
    }
    false
}

fn parse<T: DeserializeOwned>(headers: &HeaderMap, bytes: &[u8]) -> Result<T, ApiError> {
    check_media_type(headers, bytes)?;
    parse_object(or_empty(bytes))
}

fn or_empty(bytes: &[u8]) -> &[u8] {
    if bytes.is_empty() { b"{}" } else { bytes }
}

fn check_media_type(headers: &HeaderMap, bytes: &[u8]) -> Result<(), ApiError> {
    // Without content the type says nothing.
    if or_empty(bytes) == b"{}" || may_be_json(headers) {
        return Ok(());
    }
    Err(ApiError::unsupported_media_type())
}

/// Parses a JSON object whose contents can be stored.
pub fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    check_is_object(bytes)?;
    if names::contains_nul_escape(bytes) {
        return Err(ApiError::invalid_request("The character U+0000 cannot be stored"));
    }
    if names::exceeds_max_depth(bytes) {
        return Err(ApiError::invalid_request(format!("The body has more than {} levels", names::MAX_JSON_DEPTH)));
    }
    decode_object(bytes)
}

fn check_is_object(bytes: &[u8]) -> Result<(), ApiError> {
    // The parser checks the text only of fields that are read.
    if std::str::from_utf8(bytes).is_err() {
        return Err(ApiError::invalid_json());
    }
    // serde also reads a struct from an array of its fields.
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(match serde_json::from_slice::<serde::de::IgnoredAny>(bytes) {
            Ok(_) => ApiError::invalid_request("The body must be a JSON object"),
            Err(_) => ApiError::invalid_json(),
        });
    }
    Ok(())
}

/// Decodes a JSON object whose text was checked.
///
/// # Errors
/// When a field has the wrong type.
pub(crate) fn decode_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| {
        // A wrong type may precede broken syntax; broken syntax is the more fundamental fault and is reported.
        if error.is_data() && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok() {
            ApiError::invalid_request(format!("Invalid request: {error}"))
        } else {
            ApiError::invalid_json()
        }
    })
}

/// Returns whether the content type is JSON. Clients may omit it.
fn may_be_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE) else { return true };
    let essence = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Named {
        #[serde(rename = "name")]
        _name: String,
    }

    #[derive(Debug, Deserialize)]
    struct Nothing {}

    #[test]
    fn invalid_bodies_get_the_documented_codes() {
        let table: [(&str, &str, Result<(), (u16, &str)>); 11] = [
            ("application/json", r#"{"name":"a"}"#, Ok(())),
            ("application/json; charset=utf-8", r#"{"name":"a","else":1}"#, Ok(())),
            ("", r#" {"name":"a"}"#, Ok(())),
            ("text/plain", r#"{"name":"a"}"#, Err((415, "unsupported_media_type"))),
            ("application/x-www-form-urlencoded", "name=a", Err((415, "unsupported_media_type"))),
            ("application/json", "", Err((400, "invalid_request"))),
            ("application/json", r#"{"name":1}"#, Err((400, "invalid_request"))),
            ("application/json", r#"["a"]"#, Err((400, "invalid_request"))),
            ("application/json", r#"{"name":"\u0000"}"#, Err((400, "invalid_request"))),
            ("application/json", r#"{"name":"#, Err((400, "invalid_json"))),
            ("application/json", "nonsense", Err((400, "invalid_json"))),
        ];
        for (content_type, body, expected) in table {
            let mut headers = HeaderMap::new();
            if !content_type.is_empty() {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            }
            let outcome = parse::<Named>(&headers, body.as_bytes()).map(|_| ());
            match (outcome, expected) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err((status, code))) => assert_eq!(error.status_and_code(), (status, code), "{body}"),
                (outcome, _) => panic!("{content_type} {body}: {outcome:?}"),
            }
        }
        assert!(parse::<Nothing>(&HeaderMap::new(), b"").is_ok());
    }
}
