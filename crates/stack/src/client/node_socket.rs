//! Client of the node socket, `/v1/node/ws`. Main type: [`NodeSocket`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::{net::TcpStream, time::Instant};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Message, client::IntoClientRequest, http};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use super::{api::is_shed, frames};

type Stream = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Maximum number of buffered frames, above which the socket is not read.
const INBOX_FRAMES: usize = 65_536;
const REPLY_WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of attempts of a frame that is shed under load.
const MAX_ATTEMPTS: u32 = 40;
const RETRY_DELAY: Duration = Duration::from_millis(250);

/// Capabilities of a broker that negotiates the delivery cursor.
const BROKER_CAPABILITIES: [&str; 3] = ["spawn:testkit", "release", "relay:delivery-cursor-v1"];

/// Reason for a failed connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The upgrade was answered with a plain HTTP status.
    Refused {
        /// HTTP status of the answer.
        status: u16,
        /// Body of the answer as text.
        body: String,
    },
    /// No answer came.
    Unreachable(tungstenite::Error),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused { status, body } => {
                write!(f, "the upgrade was refused with {status}: {body}")
            }
            Self::Unreachable(error) => write!(f, "the socket could not be opened: {error}"),
        }
    }
}

impl std::error::Error for ConnectError {}

/// Open node socket. A separate task reads it (and answers pings) unless reading is paused.
#[derive(Debug)]
pub struct NodeSocket {
    outbox: mpsc::Sender<Message>,
    inbox: mpsc::Receiver<Inbound>,
    kept: VecDeque<Value>,
    auto_ack: bool,
    closed: Option<Option<u16>>,
    next_id: u64,
    reading: watch::Sender<bool>,
    drops_presence: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

/// Part of the frames about presence.
const PRESENCE: &str = r#""topic":"presence""#;

#[derive(Debug)]
enum Inbound {
    Frame(Value),
    /// The close code, if the peer sent one.
    Closed(Option<u16>),
}

impl NodeSocket {
    /// Opens `{ws_base}/v1/node/ws` with the token in the query, as the SDKs do.
    pub async fn connect(ws_base: &str, token: &str) -> Result<Self, ConnectError> {
        Self::open(&format!("{ws_base}/v1/node/ws?token={token}"), None).await
    }

    /// Opens the socket with the token in the `Authorization` header, as the broker does.
    pub async fn connect_with_header(ws_base: &str, token: &str) -> Result<Self, ConnectError> {
        Self::open(&format!("{ws_base}/v1/node/ws"), Some(token)).await
    }

    /// Opens any WebSocket URL, optionally with a bearer token.
    pub async fn open(url: &str, bearer: Option<&str>) -> Result<Self, ConnectError> {
        let mut request = url.into_client_request().map_err(ConnectError::Unreachable)?;
        if let Some(token) = bearer {
            let value = http::HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|error| ConnectError::Unreachable(http::Error::from(error).into()))?;
            request.headers_mut().insert(http::header::AUTHORIZATION, value);
        }
        // Small buffers: tests hold thousands of sockets. The engine sends at most 1 MiB per frame.
        let config = WebSocketConfig::default()
            .read_buffer_size(8 * 1024)
            .write_buffer_size(0)
            .max_message_size(Some(1 << 20))
            .max_frame_size(Some(1 << 20));
        match tokio_tungstenite::connect_async_with_config(request, Some(config), true).await {
            Ok((stream, _)) => Ok(Self::from_stream(stream)),
            Err(tungstenite::Error::Http(response)) => {
                let body = response.body().clone().unwrap_or_default();
                Err(ConnectError::Refused {
                    status: response.status().as_u16(),
                    body: String::from_utf8_lossy(&body).into_owned(),
                })
            }
            Err(error) => Err(ConnectError::Unreachable(error)),
        }
    }

    fn from_stream(stream: Stream) -> Self {
        let (outbox, to_send) = mpsc::channel(1024);
        let (received, inbox) = mpsc::channel(INBOX_FRAMES);
        let (reading, may_read) = watch::channel(true);
        let drops_presence = Arc::default();
        let task = tokio::spawn(run(stream, to_send, received, may_read, Arc::clone(&drops_presence)));
        let kept = VecDeque::new();
        Self { outbox, inbox, kept, auto_ack: false, closed: None, next_id: 1, reading, drops_presence, task }
    }

    /// Acks every later `deliver` frame with a seq above 0 as it is returned.
    pub fn auto_ack(&mut self, on: bool) {
        self.auto_ack = on;
    }

    /// Pauses or resumes reading: a paused socket answers no ping and fills its buffers.
    pub fn set_reading(&self, on: bool) {
        // Fails only after the task has ended, when nothing is read anyway.
        let _ = self.reading.send(on);
    }

    /// Drops later frames about presence without parsing them: their number grows with the square of the agents of a
    /// workspace.
    pub fn drop_presence(&self) {
        self.drops_presence.store(true, Ordering::Relaxed);
    }

    /// Sends a JSON frame.
    pub async fn send_json(&self, frame: &Value) -> Result<()> {
        self.send_message(Message::text(frame.to_string())).await
    }

    /// Sends any message, well-formed or not.
    pub async fn send_message(&self, message: Message) -> Result<()> {
        self.outbox.send(message).await.map_err(|_| anyhow!("the socket is closed"))
    }

    /// Returns the next frame, oldest first; an error if none arrives within `timeout` or the socket closes.
    pub async fn next_frame(&mut self, timeout: Duration) -> Result<Value> {
        let frame = match self.kept.pop_front() {
            Some(frame) => frame,
            None => self.receive(Instant::now() + timeout).await?,
        };
        self.ack_if_automatic(&frame).await?;
        Ok(frame)
    }

    /// Returns the next frame of this `type` within 30 s; earlier frames stay for later calls.
    pub async fn expect(&mut self, kind: &str) -> Result<Value> {
        self.expect_where(kind, REPLY_WITHIN, |frame| frame["type"] == kind).await
    }

    /// Returns the next frame that `wanted` accepts; others stay for later calls. `what` names it in the error.
    pub async fn expect_where(
        &mut self,
        what: &str,
        timeout: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + timeout;
        let frame = match self.kept.iter().position(&wanted) {
            Some(index) => self.kept.remove(index).context("a kept frame")?,
            None => loop {
                let frame = self.receive(deadline).await.with_context(|| {
                    let seen: Vec<&str> = self.kept.iter().filter_map(|f| f["type"].as_str()).collect();
                    format!("waiting for {what}; other frames so far: {seen:?}")
                })?;
                if wanted(&frame) {
                    break frame;
                }
                self.kept.push_back(frame);
            },
        };
        self.ack_if_automatic(&frame).await?;
        Ok(frame)
    }

    /// Sends a frame with a new `id` and returns the `data` of its reply; an `error` frame is an error. A shed frame is
    /// sent again, as clients do.
    pub async fn request(&mut self, mut frame: Value) -> Result<Value> {
        let id = frame["id"].as_str().map_or_else(|| self.fresh_id(), str::to_owned);
        frame["id"] = Value::String(id.clone());
        let what = format!("the reply to {}", frame["type"]);
        let mut attempts = 0;
        loop {
            attempts += 1;
            self.send_json(&frame).await?;
            let reply = self.expect_where(&what, REPLY_WITHIN, |answer| answer["id"] == id.as_str()).await?;
            if reply["ok"] == true {
                return Ok(reply["data"].clone());
            }
            if attempts == MAX_ATTEMPTS || !is_shed(reply["code"].as_str().unwrap_or_default()) {
                bail!("{} was refused: {reply}", frame["type"]);
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    /// Registers as a direct node and returns the reply's data.
    pub async fn register_direct(&mut self, node_id: &str, name: &str) -> Result<Value> {
        let id = self.fresh_id();
        self.request(frames::register_direct(&id, node_id, name)).await
    }

    /// Registers as a broker's provider that negotiates the delivery cursor, and returns the reply's data.
    pub async fn register_broker(&mut self, node_id: &str, name: &str, instance_id: &str) -> Result<Value> {
        self.register_broker_with(node_id, name, instance_id, &BROKER_CAPABILITIES).await
    }

    /// Registers as [`Self::register_broker`] does, with the given capabilities.
    pub async fn register_broker_with(
        &mut self,
        node_id: &str,
        name: &str,
        instance_id: &str,
        capabilities: &[&str],
    ) -> Result<Value> {
        let id = self.fresh_id();
        self.request(frames::register_broker(&id, node_id, name, instance_id, capabilities)).await
    }

    /// Sends `agent.register`; the reply's data has `agent_id`, `token` and perhaps `delivery_ack_seq`.
    pub async fn register_agent(&mut self, name: &str) -> Result<Value> {
        self.request(serde_json::json!({ "v": 1, "type": "agent.register", "name": name })).await
    }

    /// Sends `inventory.sync` with the complete live set as (id, name).
    pub async fn inventory(&mut self, agents: &[(&str, &str)]) -> Result<Value> {
        let id = self.fresh_id();
        self.request(frames::inventory(&id, agents)).await
    }

    /// Sends `delivery.ack` up to a seq.
    pub async fn ack(&self, agent: &str, up_to_seq: u64) -> Result<()> {
        self.send_json(&frames::ack(agent, up_to_seq)).await
    }

    /// Sends `node.heartbeat` with a load.
    pub async fn heartbeat(&self, node_id: &str) -> Result<()> {
        self.send_json(&frames::heartbeat(node_id)).await
    }

    /// Waits until the engine closes the socket; returns its close code, if any. Earlier frames are kept.
    pub async fn closed(&mut self, timeout: Duration) -> Result<Option<u16>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(code) = self.closed {
                return Ok(code);
            }
            match self.receive(deadline).await {
                Ok(frame) => self.kept.push_back(frame),
                // The error is the close itself; the next round returns its code.
                Err(_) if self.closed.is_some() => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes with code 1000 and waits for the end.
    pub async fn close(mut self) -> Result<()> {
        // Fails if the engine has closed already, which the next line notices.
        let _ = self.outbox.send(Message::Close(None)).await;
        self.closed(REPLY_WITHIN).await?;
        Ok(())
    }

    /// Drops the connection without a close frame.
    pub fn abort(self) {
        self.task.abort();
    }

    fn fresh_id(&mut self) -> String {
        self.next_id += 1;
        format!("testkit-{}", self.next_id)
    }

    async fn receive(&mut self, deadline: Instant) -> Result<Value> {
        if let Some(code) = self.closed {
            bail!("the socket is closed (code {code:?})");
        }
        match tokio::time::timeout_at(deadline, self.inbox.recv()).await {
            Ok(Some(Inbound::Frame(frame))) => Ok(frame),
            Ok(Some(Inbound::Closed(code))) => {
                self.closed = Some(code);
                bail!("the socket was closed (code {code:?})")
            }
            Ok(None) => {
                self.closed = Some(None);
                bail!("the task of the socket has ended")
            }
            Err(_) => bail!("no frame in time"),
        }
    }

    async fn ack_if_automatic(&mut self, frame: &Value) -> Result<()> {
        if self.auto_ack && frame["type"] == "deliver" {
            let seq = frame["seq"].as_u64().unwrap_or(0);
            if let (Some(agent), true) = (frame["agent"].as_str(), seq > 0) {
                // The frame counts as received even if its ack can no longer be sent.
                let _ = self.send_json(&frames::ack(agent, seq)).await;
            }
        }
        Ok(())
    }
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    mut stream: Stream,
    mut to_send: mpsc::Receiver<Message>,
    received: mpsc::Sender<Inbound>,
    mut may_read: watch::Receiver<bool>,
    drops_presence: Arc<AtomicBool>,
) {
    let code = loop {
        let reading = *may_read.borrow_and_update();
        tokio::select! {
            message = to_send.recv() => {
                let Some(message) = message else { break None };
                if stream.send(message).await.is_err() {
                    break None;
                }
            }
            changed = may_read.changed() => {
                if changed.is_err() {
                    break None;
                }
            }
            message = stream.next(), if reading => match message {
                Some(Ok(Message::Text(text)))
                    if drops_presence.load(Ordering::Relaxed) && text.contains(PRESENCE) => {}
                Some(Ok(Message::Text(text))) => {
                    let frame = serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.to_string()));
                    if received.send(Inbound::Frame(frame)).await.is_err() {
                        break None;
                    }
                }
                Some(Ok(Message::Close(frame))) => {
                    // tungstenite answers the close while the stream is read.
                    while let Some(Ok(_)) = stream.next().await {}
                    break frame.map(|frame| frame.code.into());
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => break None,
            },
        }
    };
    let _ = received.send(Inbound::Closed(code)).await;
}
