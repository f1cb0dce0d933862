//! REST calls with one base URL and one bearer token.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use reqwest::header::HeaderMap;
use reqwest::{Client, Method};
use serde_json::Value;

/// How long a request that storage had no room for is sent again.
const PATIENCE: Duration = Duration::from_secs(30);
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// A REST client of one gateway, speaking with one token (or none).
///
/// Like every published client it comes back after a 503 that says "nothing was done, try again"; a machine that is
/// busy with other tests gives some. [`Api::impatient`] takes every answer as it comes.
#[derive(Clone, Debug)]
pub struct Api {
    http: Client,
    base: String,
    token: Option<String>,
    patient: bool,
}

/// An answer, of whatever status.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Response headers.
    pub headers: HeaderMap,
    /// The JSON body; null if there was none, a string if it was not JSON.
    pub body: Value,
}

impl Reply {
    /// `data` of the envelope; null if there is none.
    pub fn data(&self) -> &Value {
        &self.body["data"]
    }

    /// `error.code` of the envelope; empty if there is none.
    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    /// Whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Whether nothing was done because storage was away or had no room: the same request may be sent again.
    pub fn was_shed(&self) -> bool {
        self.status == 503 && is_shed(self.code())
    }

    /// `data` of a 2xx answer, else an error with status and body.
    pub fn success(self) -> Result<Value> {
        ensure!(self.is_success(), "answered {}: {}", self.status, self.body);
        Ok(self.body.get("data").cloned().unwrap_or(Value::Null))
    }

    /// The answer itself if it has this status and error code, else an error that shows it.
    pub fn refused(self, status: u16, code: &str) -> Result<Self> {
        ensure!(
            self.status == status && self.code() == code,
            "expected {status} {code}, was answered {}: {}",
            self.status,
            self.body
        );
        Ok(self)
    }
}

/// Whether a refusal with this code means that nothing was done, for now.
pub(crate) fn is_shed(code: &str) -> bool {
    matches!(code, "database_overloaded" | "workspace_busy")
}

impl Api {
    /// A client without a token.
    pub fn anonymous(base: &str) -> Self {
        let http = crate::http::client().timeout(Duration::from_secs(60)).build().unwrap_or_default();
        Self { http, base: base.trim_end_matches('/').to_owned(), token: None, patient: true }
    }

    /// The same, but the first answer counts, whatever it is: for tests of outages.
    #[must_use]
    pub fn impatient(&self) -> Self {
        Self { patient: false, ..self.clone() }
    }

    /// A client with a bearer token.
    pub fn new(base: &str, token: &str) -> Self {
        Self::anonymous(base).with_token(token)
    }

    /// The same gateway and connections, with another token.
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// The same token and connections pool, at another gateway.
    pub fn at(&self, base: &str) -> Self {
        Self { base: base.trim_end_matches('/').to_owned(), ..self.clone() }
    }

    /// The gateway's URL.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The `ws://` form of the gateway's URL.
    pub fn ws_base(&self) -> String {
        self.base.replacen("http", "ws", 1)
    }

    /// The token, empty if there is none.
    pub fn token(&self) -> &str {
        self.token.as_deref().unwrap_or_default()
    }

    /// `GET path`.
    pub async fn get(&self, path: &str) -> Result<Reply> {
        self.call(Method::GET, path, None, &[]).await
    }

    /// `POST path` with a JSON body.
    pub async fn post(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::POST, path, Some(body), &[]).await
    }

    /// `POST path` without a body and without a `Content-Type`, as the SDKs do for join, leave, read, mute, ack.
    pub async fn post_empty(&self, path: &str) -> Result<Reply> {
        self.call(Method::POST, path, None, &[]).await
    }

    /// `PATCH path`.
    pub async fn patch(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::PATCH, path, Some(body), &[]).await
    }

    /// `PUT path`.
    pub async fn put(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::PUT, path, Some(body), &[]).await
    }

    /// `DELETE path`.
    pub async fn delete(&self, path: &str) -> Result<Reply> {
        self.call(Method::DELETE, path, None, &[]).await
    }

    /// Any method, with extra headers. An error means that no answer came; every status is an `Ok`.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        headers: &[(&str, &str)],
    ) -> Result<Reply> {
        let until = Instant::now() + PATIENCE;
        loop {
            let reply = self.call_once(method.clone(), path, body.as_ref(), headers).await?;
            if !self.patient || !reply.was_shed() || Instant::now() >= until {
                return Ok(reply);
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    async fn call_once(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(&str, &str)],
    ) -> Result<Reply> {
        let what = format!("{method} {}{path}", self.base);
        let mut request = self.http.request(method, format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.with_context(|| what.clone())?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.text().await.with_context(|| format!("read the answer to {what}"))?;
        let body =
            if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap_or(Value::String(text)) };
        Ok(Reply { status, headers, body })
    }
}
