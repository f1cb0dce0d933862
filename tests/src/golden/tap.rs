//! A proxy that changes nothing and records what passes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::http::{Frames, Head, Message, Messages};
use super::recording::Entry;
use super::{Recording, compare};

/// A loopback port that leads to one upstream. It ends with this value.
#[derive(Debug)]
pub struct Tap {
    url: String,
    accepting: AbortHandle,
}

impl Tap {
    pub(super) async fn start(upstream: &str, recording: Recording) -> Result<Self> {
        let upstream = upstream.strip_prefix("http://").context("an http:// URL")?.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let accepting = tokio::spawn(async move {
            // Dropped with this task, which ends every connection.
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let (upstream, recording) = (upstream.clone(), recording.clone());
                connections.spawn(async move {
                    if let Ok(server) = TcpStream::connect(upstream).await {
                        pass(client, server, recording).await;
                    }
                });
            }
        });
        Ok(Self { url, accepting: accepting.abort_handle() })
    }

    /// `http://host:port`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Addresses of one engine behind taps of one recording.
#[derive(Debug)]
pub struct Tapped<const N: usize> {
    recording: Recording,
    taps: [Tap; N],
}

impl<const N: usize> Tapped<N> {
    /// In front of these URLs.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn new(upstreams: [&str; N]) -> Result<Self> {
        let recording = Recording::new();
        let taps = try_join_all(upstreams.map(|upstream| recording.tap(upstream))).await?;
        let taps = taps.try_into().ok().context("a tap for each URL")?;
        Ok(Self { recording, taps })
    }

    /// The URLs of the taps.
    #[must_use]
    pub fn urls(&self) -> [&str; N] {
        self.taps.each_ref().map(Tap::url)
    }

    /// The traffic so far.
    #[must_use]
    pub const fn recording(&self) -> &Recording {
        &self.recording
    }

    /// Compares the shapes of what the engine sent with `tests/golden/clients/<name>.txt`.
    ///
    /// # Errors
    /// When they differ.
    pub fn compare(&self, name: &str) -> Result<()> {
        compare(&format!("clients/{name}"), &self.recording.shapes())
    }
}

impl Tapped<2> {
    /// In front of two gateways of the shared engine.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn shared() -> Result<Self> {
        let gateways = &relay_testkit::shared().await.gateways;
        Self::new([&gateways[0], &gateways[1]]).await
    }
}

async fn pass(client: TcpStream, server: TcpStream, recording: Recording) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let conversation = Mutex::new(Conversation::new(recording));
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let to_engine = async {
        let end = pump(client_read, server_write, |bytes| lock(&conversation).read_client(bytes)).await;
        if end == End::NotTaken {
            // An engine that takes no more of a request may have answered it.
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = to_engine => {}
        _ = pump(server_read, client_write, |bytes| lock(&conversation).read_engine(bytes)) => {}
    }
}

/// Reason for the end of a pump.
#[derive(PartialEq)]
enum End {
    Closed,
    /// The receiver takes no more.
    NotTaken,
}

fn lock(conversation: &Mutex<Conversation>) -> std::sync::MutexGuard<'_, Conversation> {
    conversation.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes are recorded before they are passed on: what a client has read is in the recording.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, record: impl Fn(&[u8])) -> End {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length) = from.read(&mut buffer).await {
        if length == 0 {
            return End::Closed;
        }
        record(&buffer[..length]);
        if to.write_all(&buffer[..length]).await.is_err() {
            return End::NotTaken;
        }
    }
    End::Closed
}

/// Both directions of one connection, put together.
struct Conversation {
    recording: Recording,
    requests: Messages,
    responses: Messages,
    unanswered: VecDeque<Message>,
    /// The request under way has been answered: the engine does not wait for a body that it does not read.
    answered_early: bool,
    /// After an upgrade: its path, frames of the client, frames of the engine.
    socket: Option<(String, Frames, Frames)>,
    /// The path of a stream of events that was begun.
    stream: Option<Arc<str>>,
}

impl Conversation {
    fn new(recording: Recording) -> Self {
        Self {
            recording,
            requests: Messages::default(),
            responses: Messages::default(),
            unanswered: VecDeque::new(),
            answered_early: false,
            socket: None,
            stream: None,
        }
    }

    fn read_client(&mut self, bytes: &[u8]) {
        if let Some((path, frames, _)) = &mut self.socket {
            for frame in frames.feed(bytes) {
                self.recording.add(Entry::Frame { path: path.clone(), from_engine: false, frame });
            }
            return;
        }
        self.requests.feed(bytes);
        while let Some(request) = self.requests.next(|_| true) {
            if !std::mem::take(&mut self.answered_early) {
                self.unanswered.push_back(request);
            }
        }
    }

    fn read_engine(&mut self, bytes: &[u8]) {
        if self.socket.is_some() {
            self.frames_from_engine(bytes);
            return;
        }
        self.responses.feed(bytes);
        loop {
            let under_way = self.requests.partial().map(|request| &*request);
            let asked = self.unanswered.front().or(under_way).map(|request| request.head.word(0).to_owned());
            let has_body = |head: &Head| {
                let status = head.word(1);
                !(status.starts_with('1') || status == "204" || status == "304" || asked.as_deref() == Some("HEAD"))
            };
            let Some(response) = self.responses.next(has_body) else { break };
            if self.stream.take().is_some() {
                continue;
            }
            let upgraded = response.head.word(1) == "101";
            let request = self.take_answered();
            let path = request.head.word(1).to_owned();
            self.recording.add(Entry::Answer { request, response });
            if upgraded {
                self.socket = Some((path, Frames::default(), Frames::default()));
                let rest = self.responses.take_rest();
                self.frames_from_engine(&rest);
                return;
            }
        }
        self.server_events();
    }

    /// The request that an answer belongs to: the oldest without one.
    fn take_answered(&mut self) -> Message {
        self.unanswered.pop_front().unwrap_or_else(|| {
            let partial = self.requests.partial().cloned();
            self.answered_early = partial.is_some();
            partial.unwrap_or_default()
        })
    }

    fn frames_from_engine(&mut self, bytes: &[u8]) {
        if let Some((path, _, frames)) = &mut self.socket {
            for frame in frames.feed(bytes) {
                self.recording.add(Entry::Frame { path: path.clone(), from_engine: true, frame });
            }
        }
    }

    fn server_events(&mut self) {
        let Some(message) = self.responses.partial().filter(|message| message.head.is_event_stream()) else { return };
        if self.stream.is_none() {
            let request = self.unanswered.pop_front().unwrap_or_default();
            self.stream = Some(request.head.word(1).into());
            let response = Message { head: message.head.clone(), body: Vec::new() };
            self.recording.add(Entry::Answer { request, response });
        }
        while let Some(end) = message.body.windows(2).position(|bytes| bytes == b"\n\n") {
            let block: Vec<u8> = message.body.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&block).trim_end().to_owned();
            // A comment keeps the connection open and says nothing.
            if let Some(path) = self.stream.as_deref().filter(|_| !text.starts_with(':')) {
                self.recording.add(Entry::ServerEvent { path: path.to_owned(), text });
            }
        }
    }
}
