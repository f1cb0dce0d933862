//! An HTTP endpoint of a test's own, for what the engine calls: it writes down every request and answers as the
//! test says.

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

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Received {
    /// Path and query.
    pub path: String,
    /// Headers; names in lower case.
    pub headers: HashMap<String, String>,
    /// The body.
    pub body: Vec<u8>,
    /// When it was complete.
    pub at: Instant,
    /// How many others were being answered at that moment.
    pub beside: usize,
}

impl Received {
    /// A header, or nothing.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Whether it is a delivery, rather than an event that none carries.
    pub fn is_delivery(&self) -> bool {
        self.headers.contains_key("x-relaycast-delivery")
    }

    /// A delivery's place in its mailbox.
    pub fn seq(&self) -> i64 {
        self.json()["seq"].as_i64().unwrap_or_default()
    }
}

/// What the endpoint does with a request.
#[derive(Clone, Debug)]
pub enum Reply {
    /// A status without a body.
    Status(u16),
    /// Status, headers (with their line ends) and body.
    Full(u16, String, String),
    /// An answer after a pause: a slow receiver.
    After(Duration, Box<Reply>),
    /// Exactly these bytes, then the connection is closed.
    Raw(Vec<u8>),
    /// These bytes, then silence.
    Hang(Vec<u8>),
    /// A 200 of which a byte comes each second.
    Drip,
    /// The connection is reset.
    Reset,
}

impl Reply {
    /// A JSON answer.
    pub fn json(status: u16, body: &str) -> Self {
        Self::Full(status, "Content-Type: application/json\r\n".to_owned(), body.to_owned())
    }
}

/// The endpoint. It ends with this value.
#[derive(Debug)]
pub struct Receiver {
    url: String,
    state: Arc<Mutex<State>>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct State {
    received: Vec<Arc<Received>>,
    of_path: HashMap<String, Vec<Arc<Received>>>,
    /// What deliveries to a path are answered, one after the other; the last one stays.
    scripts: HashMap<String, VecDeque<Reply>>,
    /// Calls under way, by their id.
    under_way: HashMap<String, usize>,
    most_at_once: usize,
}

impl State {
    fn begin(&mut self, request: Received) -> (usize, Arc<Received>, Option<Reply>) {
        let request = Arc::new(request);
        let now = self.under_way.entry(request.header("webhook-id").to_owned()).or_default();
        *now += 1;
        if request.is_delivery() {
            self.most_at_once = self.most_at_once.max(*now);
        }
        let script = self.scripts.get_mut(&request.path).filter(|_| request.is_delivery());
        let reply = script.and_then(|left| if left.len() > 1 { left.pop_front() } else { left.front().cloned() });
        self.of_path.entry(request.path.clone()).or_default().push(Arc::clone(&request));
        self.received.push(Arc::clone(&request));
        (self.received.len() - 1, request, reply)
    }

    fn end(&mut self, id: &str) {
        if let Some(now) = self.under_way.get_mut(id) {
            *now -= 1;
        }
    }
}

impl Receiver {
    /// Listens on this machine. `answer` gets each request with its number, from 0, unless the path has a script.
    pub async fn start<F>(answer: F) -> Result<Self>
    where
        F: Fn(usize, &Received) -> Reply + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for calls")?;
        let url = format!("http://{}", listener.local_addr()?);
        let state: Arc<Mutex<State>> = Arc::default();
        let served = Served { state: Arc::clone(&state), answer: Arc::new(answer), busy: Arc::default() };
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(served.clone().connection(stream));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { url, state, task: task.abort_handle() })
    }

    /// An endpoint that takes everything.
    pub async fn obliging() -> Result<Self> {
        Self::start(|_, _| Reply::Status(204)).await
    }

    /// `http://host:port` with a path behind it.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// What deliveries to a path are answered from now on, one after the other; the last one stays.
    pub fn script(&self, path: &str, replies: impl IntoIterator<Item = Reply>) {
        lock(&self.state).scripts.insert(path.to_owned(), replies.into_iter().collect());
    }

    /// What has come in so far.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.state).received.iter().map(|received| Received::clone(received)).collect()
    }

    /// The deliveries that came for a path, in order.
    pub fn calls(&self, path: &str) -> Vec<Arc<Received>> {
        self.of_path(path, true)
    }

    /// The events without a delivery that came for a path, in order.
    pub fn events(&self, path: &str) -> Vec<Arc<Received>> {
        self.of_path(path, false)
    }

    fn of_path(&self, path: &str, deliveries: bool) -> Vec<Arc<Received>> {
        let all = lock(&self.state).of_path.get(path).cloned().unwrap_or_default();
        all.into_iter().filter(|received| received.is_delivery() == deliveries).collect()
    }

    /// The seqs of the deliveries that came for a path, in order.
    pub fn seqs(&self, path: &str) -> Vec<i64> {
        self.calls(path).iter().map(|call| call.seq()).collect()
    }

    /// Calls of one delivery that were ever under way at the same time; 1 unless something is wrong.
    pub fn most_at_once(&self) -> usize {
        lock(&self.state).most_at_once
    }

    /// How much has come in so far.
    pub fn count(&self) -> usize {
        lock(&self.state).received.len()
    }

    /// Waits until `count` requests have come in, and returns all there are.
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

#[derive(Clone)]
struct Served {
    state: Arc<Mutex<State>>,
    answer: Arc<Answer>,
    busy: Arc<AtomicUsize>,
}

impl Served {
    async fn connection(self, mut stream: TcpStream) {
        let mut buffer = Vec::new();
        while let Ok(Some(mut request)) = read_request(&mut stream, &mut buffer).await {
            request.beside = self.busy.fetch_add(1, Ordering::SeqCst);
            let (request, reply) = {
                let mut state = lock(&self.state);
                let (nth, request, scripted) = state.begin(request);
                let reply = scripted.unwrap_or_else(|| (self.answer)(nth, &request));
                (request, reply)
            };
            let goes_on = write_reply(&mut stream, reply).await.unwrap_or(false);
            self.busy.fetch_sub(1, Ordering::SeqCst);
            lock(&self.state).end(request.header("webhook-id"));
            if !goes_on {
                return;
            }
        }
    }
}

/// Whether the connection takes another request.
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
            // Until the caller hangs up.
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
    stream.write_all(format!("HTTP/1.1 {status} Told\r\n{length}{headers}\r\n{body}").as_bytes()).await
}

/// The next request, or `None` at the end of the connection. What was read beyond it stays in `buffer`.
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
    Ok(Some(Received { path, headers, body, at: Instant::now(), beside: 0 }))
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
