//! A socket's way out: a bounded queue and the task that empties it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket};
use futures::{SinkExt as _, stream::SplitSink};
use tokio::sync::{Notify, mpsc};

/// Deliveries queue up to this many bytes or frames; a slow socket then stops its own agents.
const FULL_BYTES: usize = 256 * 1024;
const FULL_FRAMES: usize = 512;
/// Slots of the channel. Answers and notices may pass a full queue, up to here; past it the peer does
/// not read what it asked for, and the connection ends.
const SLOTS: usize = 2048;
/// A socket that takes nothing for this long is closed.
const STUCK: Duration = Duration::from_secs(30);
/// Above this many unwritten frames the socket is not read: its peer asks faster than it takes answers.
/// Deliveries stop well below it, so a peer that only receives is always heard.
const CROWDED_FRAMES: usize = 1024;
/// How long the peer has to take the close frame.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Level {
    bytes: AtomicUsize,
    frames: AtomicUsize,
    drained: Notify,
    /// Somebody found the queue full and waits for it to drain.
    awaited: AtomicBool,
    over: AtomicBool,
}

/// The connection's end of the queue.
pub(super) struct Outbound {
    sender: mpsc::Sender<Message>,
    level: Arc<Level>,
}

impl Outbound {
    /// A queue, and the task that empties it into the socket until either end goes.
    pub(super) fn new(sink: SplitSink<WebSocket, Message>) -> (Self, impl Future<Output = ()>) {
        let (sender, receiver) = mpsc::channel(SLOTS);
        let level = Arc::new(Level::default());
        (Self { sender, level: Arc::clone(&level) }, write(sink, receiver, level))
    }

    /// Whether deliveries must wait.
    pub(super) fn is_full(&self) -> bool {
        self.awaits_drain(|level| {
            level.bytes.load(Ordering::SeqCst) >= FULL_BYTES || level.frames.load(Ordering::SeqCst) >= FULL_FRAMES
        })
    }

    /// Whether requests must wait, lest their answers find no slot.
    pub(super) fn is_crowded(&self) -> bool {
        self.awaits_drain(|level| level.frames.load(Ordering::SeqCst) >= CROWDED_FRAMES)
    }

    /// Whether the queue is too high. If so the writer is asked for a word once it has drained: only then
    /// does it wake the connection. The second look closes the race with a writer that has just drained.
    fn awaits_drain(&self, too_high: impl Fn(&Level) -> bool) -> bool {
        if !too_high(&self.level) {
            return false;
        }
        self.level.awaited.store(true, Ordering::SeqCst);
        too_high(&self.level)
    }

    /// Whether the writer has ended: the socket is gone or stuck.
    pub(super) fn is_over(&self) -> bool {
        self.level.over.load(Ordering::Relaxed)
    }

    /// Resolves after the queue has drained somewhat, or ended.
    pub(super) async fn drained(&self) {
        self.level.drained.notified().await;
    }

    pub(super) fn text(&self, text: Utf8Bytes) {
        self.push(Message::Text(text));
    }

    pub(super) fn ping(&self) {
        self.push(Message::Ping(axum::body::Bytes::new()));
    }

    pub(super) fn close(&self, code: u16, reason: &'static str) {
        self.push(Message::Close(Some(CloseFrame { code, reason: reason.into() })));
    }

    fn push(&self, message: Message) {
        let size = size_of(&message);
        self.level.bytes.fetch_add(size, Ordering::Relaxed);
        self.level.frames.fetch_add(1, Ordering::Relaxed);
        if self.sender.try_send(message).is_err() {
            self.level.over.store(true, Ordering::Relaxed);
            self.level.drained.notify_one();
        }
    }
}

fn size_of(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.len(),
        _ => 0,
    }
}

async fn write(mut sink: SplitSink<WebSocket, Message>, mut queue: mpsc::Receiver<Message>, level: Arc<Level>) {
    while let Some(first) = queue.recv().await {
        let closing = matches!(first, Message::Close(_));
        let (mut bytes, mut frames) = (size_of(&first), 1);
        let written = tokio::time::timeout(if closing { CLOSE_WAIT } else { STUCK }, async {
            sink.feed(first).await?;
            // What is already here goes out in one write.
            while let Ok(next) = queue.try_recv() {
                bytes += size_of(&next);
                frames += 1;
                sink.feed(next).await?;
            }
            sink.flush().await
        });
        let done = matches!(written.await, Ok(Ok(())));
        level.bytes.fetch_sub(bytes, Ordering::SeqCst);
        level.frames.fetch_sub(frames, Ordering::SeqCst);
        if !done || closing {
            break;
        }
        if level.awaited.swap(false, Ordering::SeqCst) {
            level.drained.notify_one();
        }
    }
    level.over.store(true, Ordering::Relaxed);
    level.drained.notify_one();
}
