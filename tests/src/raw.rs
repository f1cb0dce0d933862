//! Raw HTTP requests: any method, headers and body, without normalisation.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::client::Reply;
use reqwest::Method;
use serde_json::Value;

/// Maximum number of attempts of a request that is shed under load.
const MAX_ATTEMPTS: u32 = 40;
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// HTTP request that is sent as given.
#[derive(Clone, Debug)]
pub struct Raw {
    method: Method,
    url: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Option<Vec<u8>>,
}

impl Raw {
    /// Creates a request; the method may be any token.
    #[must_use]
    pub fn new(method: &str, url: impl Into<String>) -> Self {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        Self { method, url: url.into(), headers: Vec::new(), body: None }
    }

    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Adds a bearer token unless it is empty.
    #[must_use]
    pub fn bearer(self, token: &str) -> Self {
        if token.is_empty() { self } else { self.header("authorization", format!("Bearer {token}")) }
    }

    /// Sets the body without a content type.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Sets the body with the content type `application/json`.
    #[must_use]
    pub fn json(self, body: impl Into<Vec<u8>>) -> Self {
        self.header("content-type", "application/json").body(body)
    }

    /// Adds the headers of a WebSocket upgrade.
    #[must_use]
    pub fn upgrade(self) -> Self {
        self.header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    }

    /// Sends the request and returns the answer of any status; retries while the server sheds load.
    pub async fn send(self) -> Result<Reply> {
        for _ in 0..MAX_ATTEMPTS {
            let reply = self.clone().send_once().await?;
            if !reply.was_shed() {
                return Ok(reply);
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
        self.send_once().await
    }

    async fn send_once(self) -> Result<Reply> {
        let what = format!("{} {}", self.method, self.url);
        let http = relay_testkit::http::client().timeout(Duration::from_secs(60)).build()?;
        let mut request = http.request(self.method, self.url);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        if let Some(body) = self.body {
            request = request.body(body);
        }
        let response = request.send().await.with_context(|| what.clone())?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        // After 101 the connection carries frames, not a body.
        let text = if status == 101 { String::new() } else { response.text().await.with_context(|| what)? };
        let body =
            if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap_or(Value::String(text)) };
        Ok(Reply { status, headers, body })
    }
}

/// Returns whether an answer is an error in the envelope: `ok` false, a code in lower snake case, a text.
#[must_use]
pub fn is_failure(reply: &Reply) -> bool {
    let code = reply.code();
    reply.body["ok"] == false
        && !code.is_empty()
        && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        && reply.body["error"]["message"].as_str().is_some_and(|message| !message.is_empty())
}
