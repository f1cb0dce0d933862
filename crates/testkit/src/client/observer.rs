//! Observers: the socket and its server-sent twin.

use std::{collections::VecDeque, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, connect_async,
    tungstenite::{Message, protocol::CloseFrame},
};

use super::Api;

/// A socket of `/v1/ws`.
pub struct ObserverSocket {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
}

impl ObserverSocket {
    /// Observes with a token at a gateway, given by its `http://` URL.
    ///
    /// # Errors
    /// When the upgrade is refused.
    pub async fn open(gateway: &str, token: &str) -> Result<Self> {
        let url = format!("{}/v1/ws?token={token}", gateway.replacen("http", "ws", 1));
        let (socket, _) = connect_async(url).await.context("open an observer socket")?;
        Ok(Self { socket })
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// When the socket is gone.
    pub async fn send(&mut self, frame: Value) -> Result<()> {
        Ok(self.socket.send(Message::text(frame.to_string())).await?)
    }

    /// The next frame.
    ///
    /// # Errors
    /// When none comes within `wait`, or the socket closes; the error then shows code and reason.
    pub async fn next(&mut self, wait: Duration) -> Result<Value> {
        let read = async {
            loop {
                match self.socket.next().await.context("the socket ended")?? {
                    Message::Text(text) => return Ok(serde_json::from_str(&text)?),
                    Message::Close(frame) => match frame {
                        Some(frame) => bail!("closed {} {}", u16::from(frame.code), frame.reason),
                        None => bail!("closed"),
                    },
                    _ => {}
                }
            }
        };
        tokio::time::timeout(wait, read).await.context("no frame in time")?
    }

    /// The next frame of this type; others before it are skipped.
    ///
    /// # Errors
    /// As for [`Self::next`].
    pub async fn next_of(&mut self, kind: &str, wait: Duration) -> Result<Value> {
        loop {
            let frame = self.next(wait).await?;
            if frame["type"] == kind {
                return Ok(frame);
            }
        }
    }

    /// Closes with this code; the answer is for [`Self::closed`].
    ///
    /// # Errors
    /// When the socket is gone.
    pub async fn close(&mut self, code: u16) -> Result<()> {
        let frame = CloseFrame { code: code.into(), reason: "done".into() };
        Ok(self.socket.close(Some(frame)).await?)
    }

    /// Waits for the close frame: its code and reason.
    ///
    /// # Errors
    /// When the socket is still open after `wait`.
    pub async fn closed(&mut self, wait: Duration) -> Result<(u16, String)> {
        let read = async {
            loop {
                if let Message::Close(frame) = self.socket.next().await.context("ended without a close frame")?? {
                    let frame = frame.context("closed without a reason")?;
                    return Ok((u16::from(frame.code), frame.reason.to_string()));
                }
            }
        };
        tokio::time::timeout(wait, read).await.context("still open")?
    }

    /// Everything up to the answer to a ping sent now.
    ///
    /// # Errors
    /// As for [`Self::next`].
    pub async fn drain(&mut self, wait: Duration) -> Result<Vec<Value>> {
        self.send(json!({ "type": "ping" })).await?;
        let mut frames = Vec::new();
        loop {
            let frame = self.next(wait).await?;
            if frame["type"] == "pong" {
                return Ok(frames);
            }
            frames.push(frame);
        }
    }
}

/// A server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerEvent {
    /// Its name; `message` when it has none.
    pub event: String,
    /// Its id, if it has one.
    pub id: Option<String>,
    /// Its data; null without.
    pub data: Value,
}

/// A stream of server-sent events.
pub struct EventSource {
    response: reqwest::Response,
    buffer: Vec<u8>,
    ready: VecDeque<ServerEvent>,
    /// Comments seen so far: keepalives.
    pub comments: usize,
}

impl EventSource {
    /// Opens the event stream with the API's token, resuming behind an id if one is given.
    ///
    /// # Errors
    /// When it is refused; the error shows the answer.
    pub async fn open(api: &Api, last_event_id: Option<i64>) -> Result<Self> {
        let client = crate::http::client().build()?;
        let mut request = client.get(format!("{}/v1/workspace/events/stream", api.base())).bearer_auth(api.token());
        if let Some(id) = last_event_id {
            request = request.header("Last-Event-ID", id.to_string());
        }
        let response = request.send().await?;
        let status = response.status();
        if !status.is_success() {
            bail!("answered {status}: {}", response.text().await?);
        }
        let kind = response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        ensure!(kind.starts_with("text/event-stream"), "content type {kind}");
        Ok(Self { response, buffer: Vec::new(), ready: VecDeque::new(), comments: 0 })
    }

    /// The next event, those without data included.
    ///
    /// # Errors
    /// When none comes within `wait`, or the stream ends.
    pub async fn next(&mut self, wait: Duration) -> Result<ServerEvent> {
        let read = async {
            loop {
                if let Some(event) = self.ready.pop_front() {
                    return Ok(event);
                }
                let chunk = self.response.chunk().await?.context("the stream ended")?;
                self.buffer.extend_from_slice(&chunk);
                self.parse()?;
            }
        };
        tokio::time::timeout(wait, read).await.context("no event in time")?
    }

    fn parse(&mut self) -> Result<()> {
        while let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
            let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
            let mut event = ServerEvent { event: "message".to_owned(), id: None, data: Value::Null };
            let mut seen = false;
            for line in std::str::from_utf8(&block)?.lines() {
                let (field, value) = line.split_once(':').unwrap_or((line, ""));
                let value = value.strip_prefix(' ').unwrap_or(value);
                match field {
                    "" if line.starts_with(':') => self.comments += 1,
                    "event" => event.event = value.to_owned(),
                    "id" => event.id = Some(value.to_owned()),
                    "data" => event.data = serde_json::from_str(value)?,
                    _ => continue,
                }
                seen |= !field.is_empty();
            }
            if seen {
                self.ready.push_back(event);
            }
        }
        Ok(())
    }
}
