//! Requests exactly as a test spells them: any body, any headers, no help.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::client::Reply;
use reqwest::Method;
use serde_json::Value;

/// How often a request that storage had no room for is sent again.
const TRIES: u32 = 40;
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// A request that nothing is added to.
#[derive(Clone, Debug)]
pub struct Raw {
    method: Method,
    url: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Option<Vec<u8>>,
}

impl Raw {
    /// `method url`, where the method may be any word.
    ///
    /// # Panics
    /// If the method is no token.
    #[must_use]
    pub fn new(method: &str, url: impl Into<String>) -> Self {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        Self { method, url: url.into(), headers: Vec::new(), body: None }
    }

    /// Adds a header, of any bytes.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Adds a bearer token; an empty one adds nothing.
    #[must_use]
    pub fn bearer(self, token: &str) -> Self {
        if token.is_empty() { self } else { self.header("authorization", format!("Bearer {token}")) }
    }

    /// Sends these bytes, with no content type of their own.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// Sends these bytes as `application/json`.
    #[must_use]
    pub fn json(self, body: impl Into<Vec<u8>>) -> Self {
        self.header("content-type", "application/json").body(body)
    }

    /// The upgrade that a WebSocket client asks for.
    #[must_use]
    pub fn upgrade(self) -> Self {
        self.header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    }

    /// The answer, whatever its status; but one that says that storage had no room is followed by the next try.
    ///
    /// # Errors
    /// When none came.
    pub async fn send(self) -> Result<Reply> {
        for _ in 0..TRIES {
            let reply = self.clone().send_once().await?;
            if !reply.was_shed() {
                return Ok(reply);
            }
            tokio::time::sleep(TRY_AGAIN_AFTER).await;
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
        // After 101 the rest of the connection is no body.
        let text = if status == 101 { String::new() } else { response.text().await.with_context(|| what)? };
        let body =
            if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap_or(Value::String(text)) };
        Ok(Reply { status, headers, body })
    }
}

/// Whether an answer is a failure in the envelope: `ok` false, a code in lower snake case, a text.
#[must_use]
pub fn is_failure(reply: &Reply) -> bool {
    let code = reply.code();
    reply.body["ok"] == false
        && !code.is_empty()
        && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        && reply.body["error"]["message"].as_str().is_some_and(|message| !message.is_empty())
}
