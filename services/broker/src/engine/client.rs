//! [`Engine`]: HTTP calls with a token, unwrapped from the engine's envelope.

use std::time::Duration;

use anyhow::{Context as _, Result};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Method;
use serde_json::Value;

use super::{EngineError, error::NO_CODE};

/// Time for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Characters of a path's part that are not written as they are.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Parts of a path, each encoded by itself.
pub(crate) type PathSegments<'a> = &'a [&'a str];

/// Client of one engine. Clones share its connections.
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    http: reqwest::Client,
    base_url: String,
}

#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) method: Method,
    /// Below `/v1`.
    pub(crate) path: PathSegments<'a>,
    pub(crate) token: &'a str,
    pub(crate) body: Option<Value>,
    pub(crate) idempotency_key: Option<String>,
}

impl<'a> Request<'a> {
    pub(crate) fn get(path: PathSegments<'a>, token: &'a str) -> Self {
        Self { method: Method::GET, path, token, body: None, idempotency_key: None }
    }

    pub(crate) fn post(path: PathSegments<'a>, token: &'a str, body: Value) -> Self {
        Self { method: Method::POST, path, token, body: Some(body), idempotency_key: None }
    }

    pub(crate) fn keyed(self, key: String) -> Self {
        Self { idempotency_key: Some(key), ..self }
    }
}

impl Engine {
    /// Client of the engine at this base URL.
    pub(crate) fn new(base_url: &str) -> Result<Self> {
        let http = reqwest::Client::builder().timeout(CALL_TIMEOUT).connect_timeout(CONNECT_TIMEOUT);
        let http = http.build().context("set up the HTTP client")?;
        Ok(Self { http, base_url: base_url.trim_end_matches('/').to_owned() })
    }

    /// Base URL of the engine.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Calls the engine and returns `data` of its answer; null without one.
    pub(crate) async fn call(&self, request: Request<'_>) -> Result<Value, EngineError> {
        let mut url = format!("{}/v1", self.base_url);
        for segment in request.path {
            url.push('/');
            url.extend(utf8_percent_encode(segment, SEGMENT));
        }
        let mut call = self.http.request(request.method, &url);
        // The creation of a workspace has no token yet.
        if !request.token.is_empty() {
            call = call.bearer_auth(request.token);
        }
        if let Some(key) = request.idempotency_key {
            call = call.header("Idempotency-Key", key);
        }
        if let Some(body) = &request.body {
            call = call.json(body);
        }
        let transport = |error: reqwest::Error| EngineError::from_transport(&self.base_url, &error);
        let answer = call.send().await.map_err(transport)?;
        let status = answer.status();
        let bytes = answer.bytes().await.map_err(transport)?;
        if bytes.is_empty() && status.is_success() {
            return Ok(Value::Null);
        }
        let mut body: Value = match serde_json::from_slice(&bytes) {
            Ok(body) => body,
            Err(error) if status.is_success() => return Err(EngineError::Unreadable(error.to_string())),
            // A proxy answers with a page of its own: its status is kept, and the code `NO_CODE` makes it transient.
            Err(_) => Value::Null,
        };
        if status.is_success() {
            return Ok(body["data"].take());
        }
        let text = |key: &str, default: &str| body["error"][key].as_str().unwrap_or(default).to_owned();
        Err(EngineError::Refused {
            status: status.as_u16(),
            code: text("code", NO_CODE),
            message: text("message", status.canonical_reason().unwrap_or("no reason given")),
        })
    }
}
