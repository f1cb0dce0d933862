//! REST client with one base URL and one bearer token. Main types: [`Api`] and [`Reply`].

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use reqwest::header::HeaderMap;
use reqwest::{Client, Method};
use serde_json::Value;

/// Time for which a shed request is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// REST client of one gateway, with one token or none.
///
/// Like every published client it retries after a 503 that reports "nothing was done, try again", which occurs on a
/// loaded machine. [`Api::without_retries`] returns every answer as it comes.
#[derive(Clone, Debug)]
pub struct Api {
    http: Client,
    base: String,
    token: Option<String>,
    retries: bool,
}

/// Answer of any status.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status of the answer.
    pub status: u16,
    /// HTTP headers of the answer.
    pub headers: HeaderMap,
    /// JSON body; null without a body, a string if it is not JSON.
    pub body: Value,
}

impl Reply {
    /// Returns `data` of the envelope; null without it.
    pub fn data(&self) -> &Value {
        &self.body["data"]
    }

    /// Returns `error.code` of the envelope; empty without it.
    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    /// Returns whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns whether the request was shed because storage was unavailable or overloaded: it can be repeated.
    pub fn was_shed(&self) -> bool {
        self.status == 503 && is_shed(self.code())
    }

    /// Returns `data` of a 2xx answer, or an error with status and body.
    pub fn success(self) -> Result<Value> {
        ensure!(self.is_success(), "answered {}: {}", self.status, self.body);
        Ok(self.body.get("data").cloned().unwrap_or(Value::Null))
    }

    /// Returns the answer if it has this status and error code, or an error that shows it.
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

/// Returns whether an error code means that the request was shed.
pub(crate) fn is_shed(code: &str) -> bool {
    matches!(code, "database_overloaded" | "workspace_busy")
}

impl Api {
    /// Creates a client without a token.
    pub fn anonymous(base: &str) -> Self {
        let http = crate::http::client().timeout(Duration::from_secs(60)).build().unwrap_or_default();
        Self { http, base: base.trim_end_matches('/').to_owned(), token: None, retries: true }
    }

    /// Returns a client that never retries, for tests of outages.
    #[must_use]
    pub fn without_retries(&self) -> Self {
        Self { retries: false, ..self.clone() }
    }

    /// Creates a client with a bearer token.
    pub fn new(base: &str, token: &str) -> Self {
        Self::anonymous(base).with_token(token)
    }

    /// Returns a client of the same gateway and connections with another token.
    pub fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    /// Returns a client of another gateway with the same token and connection pool.
    pub fn at(&self, base: &str) -> Self {
        Self { base: base.trim_end_matches('/').to_owned(), ..self.clone() }
    }

    /// Returns the gateway's URL.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Returns the `ws://` form of the gateway's URL.
    pub fn ws_base(&self) -> String {
        self.base.replacen("http", "ws", 1)
    }

    /// Returns the token, empty if there is none.
    pub fn token(&self) -> &str {
        self.token.as_deref().unwrap_or_default()
    }

    /// Sends `GET path`.
    pub async fn get(&self, path: &str) -> Result<Reply> {
        self.call(Method::GET, path, None, &[]).await
    }

    /// Sends `POST path` with a JSON body.
    pub async fn post(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::POST, path, Some(body), &[]).await
    }

    /// Sends `POST path` without a body and without a `Content-Type`, as the SDKs do for join, leave, read, mute, ack.
    pub async fn post_empty(&self, path: &str) -> Result<Reply> {
        self.call(Method::POST, path, None, &[]).await
    }

    /// Sends `PATCH path` with a JSON body.
    pub async fn patch(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::PATCH, path, Some(body), &[]).await
    }

    /// Sends `PUT path` with a JSON body.
    pub async fn put(&self, path: &str, body: Value) -> Result<Reply> {
        self.call(Method::PUT, path, Some(body), &[]).await
    }

    /// Sends `DELETE path` without a body.
    pub async fn delete(&self, path: &str) -> Result<Reply> {
        self.call(Method::DELETE, path, None, &[]).await
    }

    /// Sends a request with any method and extra headers. Every status is an `Ok`; an error means that no answer came.
    pub async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        headers: &[(&str, &str)],
    ) -> Result<Reply> {
        let until = Instant::now() + RETRY_TIMEOUT;
        loop {
            let reply = self.call_once(method.clone(), path, body.as_ref(), headers).await?;
            if !self.retries || !reply.was_shed() || Instant::now() >= until {
                return Ok(reply);
            }
            tokio::time::sleep(RETRY_DELAY).await;
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
