//! Clients of the observer socket and of the server-sent event stream.

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

/// Client of the observer socket, `/v1/ws`.
pub struct ObserverSocket {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
}

impl ObserverSocket {
    /// Connects with a token to a gateway, given by its `http://` URL.
    ///
    /// # Errors
    /// If the upgrade is refused.
    pub async fn open(gateway: &str, token: &str) -> Result<Self> {
        let url = format!("{}/v1/ws?token={token}", gateway.replacen("http", "ws", 1));
        let (socket, _) = connect_async(url).await.context("open an observer socket")?;
        Ok(Self { socket })
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// If the socket is closed.
    pub async fn send(&mut self, frame: Value) -> Result<()> {
        Ok(self.socket.send(Message::text(frame.to_string())).await?)
    }

    /// Returns the next frame.
    ///
    /// # Errors
    /// If none arrives within `wait`, or the socket closes; the error then contains code and reason.
    pub async fn next(&mut self, wait: Duration) -> Result<Value> {
        let read = async {
            loop {
                match self.socket.next().await.context("the socket ended")?? {
                    Message::Text(text) => return Ok(serde_json::from_str(&text)?),
                    Message::Close(frame) => match frame {
                        Some(frame) => bail!("closed {} {}", u16::from(frame.code), frame.reason),
                        None => bail!("closed"),
                    },
                    Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
                }
            }
        };
        tokio::time::timeout(wait, read).await.context("no frame in time")?
    }

    /// Returns the next frame of this type, skipping others.
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

    /// Sends a close frame with this code; [`Self::closed`] returns the answer.
    ///
    /// # Errors
    /// If the socket is closed.
    pub async fn close(&mut self, code: u16) -> Result<()> {
        let frame = CloseFrame { code: code.into(), reason: "done".into() };
        Ok(self.socket.close(Some(frame)).await?)
    }

    /// Waits for the close frame; returns its code and reason.
    ///
    /// # Errors
    /// If the socket is still open after `wait`.
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

    /// Returns every frame up to the answer to a ping sent now.
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

/// Server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerEvent {
    /// Name of the event; `message` by default.
    pub event: String,
    /// Id of the event, if it has one.
    pub id: Option<String>,
    /// Data of the event; null without data.
    pub data: Value,
}

/// Client of a stream of server-sent events.
pub struct EventSource {
    response: reqwest::Response,
    buffer: Vec<u8>,
    ready: VecDeque<ServerEvent>,
    /// Number of comments (keep-alives) received.
    pub comments: usize,
}

impl EventSource {
    /// Opens the event stream with the API's token, resuming after an id if one is given.
    ///
    /// # Errors
    /// If it is refused; the error contains the answer.
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

    /// Returns the next event, including events without data.
    ///
    /// # Errors
    /// If none arrives within `wait`, or the stream ends.
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
                    // Unknown fields, such as `retry`, do not make an event by themselves.
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
