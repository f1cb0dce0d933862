//! HTTP endpoint for calls of the engine: records every request and answers as scripted. Main type: [`Receiver`].

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use crate::wait;

/// Recorded request.
#[derive(Clone, Debug)]
pub struct Received {
    /// Path and query of the request.
    pub path: String,
    /// Headers; names in lower case.
    pub headers: HashMap<String, String>,
    /// Body of the request.
    pub body: Vec<u8>,
    /// Time at which it was complete.
    pub at: Instant,
    /// Number of other calls that were being answered at that time.
    pub concurrent: usize,
}

impl Received {
    /// Returns a header, empty without it.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// Returns the body as JSON; null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns whether the call is a delivery, as opposed to an event without one.
    pub fn is_delivery(&self) -> bool {
        self.headers.contains_key("x-relaycast-delivery")
    }

    /// Returns the seq of a delivery.
    pub fn seq(&self) -> i64 {
        self.json()["seq"].as_i64().unwrap_or_default()
    }
}

/// Behaviour of the endpoint for one request.
#[derive(Clone, Debug)]
pub enum Reply {
    /// A status without a body.
    Status(u16),
    /// Status, headers (with their line ends) and body.
    Full(u16, String, String),
    /// An answer after a delay.
    After(Duration, Box<Reply>),
    /// Exactly these bytes, followed by a close.
    Raw(Vec<u8>),
    /// These bytes, then silence.
    Hang(Vec<u8>),
    /// A 200 with one byte per second.
    Drip,
    /// A reset of the connection.
    Reset,
}

impl Reply {
    /// Creates a JSON answer.
    pub fn json(status: u16, body: &str) -> Self {
        Self::Full(status, "Content-Type: application/json\r\n".to_owned(), body.to_owned())
    }
}

/// Endpoint, stopped when dropped.
#[derive(Debug)]
pub struct Receiver {
    url: String,
    state: Arc<Mutex<State>>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct State {
    received: Vec<Arc<Received>>,
    by_path: HashMap<String, Vec<Arc<Received>>>,
    /// Answers to deliveries by path, one after the other; the last one is repeated.
    scripts: HashMap<String, VecDeque<Reply>>,
    /// Number of concurrent calls by delivery id.
    in_flight: HashMap<String, usize>,
    max_concurrency: usize,
}

impl State {
    fn begin(&mut self, request: Received) -> (usize, Arc<Received>, Option<Reply>) {
        let request = Arc::new(request);
        let now = self.in_flight.entry(request.header("webhook-id").to_owned()).or_default();
        *now += 1;
        if request.is_delivery() {
            self.max_concurrency = self.max_concurrency.max(*now);
        }
        let script = self.scripts.get_mut(&request.path).filter(|_| request.is_delivery());
        let reply = script.and_then(|left| if left.len() > 1 { left.pop_front() } else { left.front().cloned() });
        self.by_path.entry(request.path.clone()).or_default().push(Arc::clone(&request));
        self.received.push(Arc::clone(&request));
        (self.received.len() - 1, request, reply)
    }

    fn end(&mut self, id: &str) {
        if let Some(now) = self.in_flight.get_mut(id) {
            *now -= 1;
        }
    }
}

impl Receiver {
    /// Starts an endpoint. `answer` gets each request with its number, from 0, unless the path has a script.
    pub async fn start<F>(answer: F) -> Result<Self>
    where
        F: Fn(usize, &Received) -> Reply + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for calls")?;
        let url = format!("http://{}", listener.local_addr()?);
        let state: Arc<Mutex<State>> = Arc::default();
        let handler = Handler { state: Arc::clone(&state), answer: Arc::new(answer), busy: Arc::default() };
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(handler.clone().serve(stream));
                // Otherwise the set would keep every connection that has ended.
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { url, state, task: task.abort_handle() })
    }

    /// Starts an endpoint that accepts everything.
    pub async fn accepting_all() -> Result<Self> {
        Self::start(|_, _| Reply::Status(204)).await
    }

    /// Returns the URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// Scripts the answers to deliveries to a path, one after the other; the last one is repeated.
    pub fn script(&self, path: &str, replies: impl IntoIterator<Item = Reply>) {
        lock(&self.state).scripts.insert(path.to_owned(), replies.into_iter().collect());
    }

    /// Returns the requests received so far.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.state).received.iter().map(|received| Received::clone(received)).collect()
    }

    /// Returns the deliveries to a path, in order.
    pub fn calls(&self, path: &str) -> Vec<Arc<Received>> {
        self.recorded(path, true)
    }

    /// Returns the events without a delivery for a path, in order.
    pub fn events(&self, path: &str) -> Vec<Arc<Received>> {
        self.recorded(path, false)
    }

    fn recorded(&self, path: &str, deliveries: bool) -> Vec<Arc<Received>> {
        let all = lock(&self.state).by_path.get(path).cloned().unwrap_or_default();
        all.into_iter().filter(|received| received.is_delivery() == deliveries).collect()
    }

    /// Returns the seqs of the deliveries to a path, in order.
    pub fn seqs(&self, path: &str) -> Vec<i64> {
        self.calls(path).iter().map(|call| call.seq()).collect()
    }

    /// Forgets the requests received so far, whose bodies may be large. Those that follow are numbered from 0.
    pub fn forget(&self) {
        let mut state = lock(&self.state);
        state.received.clear();
        state.by_path.clear();
    }

    /// Returns the maximum number of concurrent calls of one delivery; 1 unless ordering is broken.
    pub fn max_concurrency(&self) -> usize {
        lock(&self.state).max_concurrency
    }

    /// Returns the number of requests received so far.
    pub fn count(&self) -> usize {
        lock(&self.state).received.len()
    }

    /// Waits until `count` requests have arrived, and returns all of them.
    ///
    /// # Panics
    /// If that takes longer than `timeout`.
    pub async fn wait_for(&self, count: usize, timeout: Duration) -> Vec<Received> {
        let what = format!("{count} calls");
        wait::until(&what, timeout, || async { self.count() >= count }).await;
        self.received()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Answer = dyn Fn(usize, &Received) -> Reply + Send + Sync;

/// Handler of the connections of one endpoint.
#[derive(Clone)]
struct Handler {
    state: Arc<Mutex<State>>,
    answer: Arc<Answer>,
    busy: Arc<AtomicUsize>,
}

impl Handler {
    async fn serve(self, mut stream: TcpStream) {
        let mut buffer = Vec::new();
        while let Ok(Some(mut request)) = read_request(&mut stream, &mut buffer).await {
            request.concurrent = self.busy.fetch_add(1, Ordering::SeqCst);
            let (request, reply) = {
                // The answer is chosen under the lock, in the order of the numbers. It must not use the receiver.
                let mut state = lock(&self.state);
                let (nth, request, scripted) = state.begin(request);
                let reply = scripted.unwrap_or_else(|| (self.answer)(nth, &request));
                (request, reply)
            };
            // An error means that the caller has disconnected, as callers with a timeout do.
            let keep_alive = write_reply(&mut stream, reply).await.unwrap_or(false);
            self.busy.fetch_sub(1, Ordering::SeqCst);
            lock(&self.state).end(request.header("webhook-id"));
            if !keep_alive {
                return;
            }
        }
    }
}

/// Returns whether the connection accepts another request.
async fn write_reply(stream: &mut TcpStream, reply: Reply) -> std::io::Result<bool> {
    let mut reply = reply;
    while let Reply::After(pause, then) = reply {
        tokio::time::sleep(pause).await;
        reply = *then;
    }
    match reply {
        Reply::Status(status) => write_full(stream, status, "", "").await.map(|()| true),
        Reply::Full(status, headers, body) => write_full(stream, status, &headers, &body).await.map(|()| true),
        Reply::Raw(bytes) => stream.write_all(&bytes).await.map(|()| false),
        Reply::Hang(bytes) => {
            stream.write_all(&bytes).await?;
            // Waits until the caller disconnects.
            let _ = stream.read(&mut [0; 1]).await;
            Ok(false)
        }
        Reply::Drip => {
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" {
                stream.write_all(&[*byte]).await?;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            Ok(true)
        }
        Reply::Reset => {
            stream.set_zero_linger()?;
            Ok(false)
        }
        Reply::After(..) => Ok(false),
    }
}

async fn write_full(stream: &mut TcpStream, status: u16, headers: &str, body: &str) -> std::io::Result<()> {
    let length = if status == 204 { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    stream.write_all(format!("HTTP/1.1 {status} Scripted\r\n{length}{headers}\r\n{body}").as_bytes()).await
}

/// Returns the next request, or `None` at the end of the connection. Further bytes stay in `buffer`.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<Option<Received>> {
    let head_ends = loop {
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8(buffer[..head_ends].to_vec())?;
    let mut lines = head.split("\r\n");
    let path = lines.next().and_then(|line| line.split(' ').nth(1)).context("a request line")?.to_owned();
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(Ok(0), |text| text.parse())?;
    let whole = head_ends + 4 + length;
    while buffer.len() < whole {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let body = buffer[head_ends + 4..whole].to_vec();
    buffer.drain(..whole);
    Ok(Some(Received { path, headers, body, at: Instant::now(), concurrent: 0 }))
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
