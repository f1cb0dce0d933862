//! Outbound frames of a socket: those that wait for their turn ([`OutgoingFrame`]), the bounded queue of those that
//! have left their stream, and the task that writes it. [`DeliveryTraces`] are the spans of the deliveries that leave
//! through it, and of their acks.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket};
use futures::{Sink, SinkExt as _, stream::SplitSink};
use relay_domain::mailboxes::stream::Seq;
use relay_tasks::byte_budget::ByteLease;
use relay_wire::nodes::deliver_frame::SharedFrame;
use tokio::{sync::Notify, time::Instant};

use crate::node::queue::{Receiver, Sender, queue};

/// Deliveries queue up to this many bytes or frames. A slow socket thus stops its own agents only.
const FULL_BYTES: usize = 256 * 1024;
const FULL_FRAMES: usize = 512;
/// Frames that wait at most. Replies and notices may exceed the delivery limit up to here. Beyond it the peer does not
/// read its replies, and the connection ends.
const SLOTS: usize = 2048;
/// A socket that accepts nothing for this long is closed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Above this many unwritten frames the socket is not read: the peer requests faster than it reads replies. Deliveries
/// stop well below it, so a peer that only receives is always read.
const CROWDED_FRAMES: usize = 1024;
/// Time that the peer has to receive the close frame and the frames before it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Traced frames whose acks are awaited; the trace of further ones ends with the frame.
const MAX_TRACED_FRAMES: usize = 64;
/// Time that a frame may wait for a slow socket. Its delivery may become a dead letter meanwhile, and the sender is
/// notified then.
pub(super) const MAX_HELD: Duration = Duration::from_secs(2);

/// Frame ready to send.
#[derive(Debug)]
pub(super) struct OutgoingFrame {
    pub(super) body: OutgoingBody,
    /// Counted while it waits.
    pub(super) _buffered: BufferedBytes,
    /// None for a tombstone.
    pub(super) delivery_id: Option<String>,
    pub(super) traceparent: Option<String>,
    pub(super) live: bool,
    /// Time when it came from another gateway or from storage.
    pub(super) held_since: Instant,
    /// Time at which the delivery expires, in milliseconds of Unix time. None for a tombstone, and if it was far when
    /// the live copy was sent.
    pub(super) expires_at_ms: Option<i64>,
}

impl OutgoingFrame {
    /// True if the delivery may have been settled meanwhile, or has expired, so that it must be read again before it is
    /// sent.
    pub(super) fn is_outdated(&self, now: Instant, unix_ms: i64) -> bool {
        // The rest of the last millisecond counts, else the delivery would be read before it can be dead-lettered.
        self.expires_at_ms.is_some_and(|at| at < unix_ms) || now.saturating_duration_since(self.held_since) >= MAX_HELD
    }
}

/// Text of a frame that waits for its turn.
#[derive(Debug)]
pub(super) enum OutgoingBody {
    /// Live copy or tombstone.
    Text(Utf8Bytes),
    /// Row of a repair, encoded when it leaves: its payload is shared with other recipients.
    Row { frame: SharedFrame, _memory: Arc<ByteLease> },
}

impl OutgoingBody {
    pub(super) fn byte_len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Row { frame, .. } => frame.byte_len(),
        }
    }

    pub(super) fn encode(self) -> Utf8Bytes {
        match self {
            Self::Text(text) => text,
            Self::Row { frame, .. } => frame.encode().into(),
        }
    }
}

/// Bytes of one kind of frame that wait on a connection. Clones share their count.
#[derive(Debug, Clone, Default)]
pub(super) struct BufferCount(Arc<AtomicUsize>);

/// Bytes of one waiting frame, counted until this is dropped.
#[derive(Debug)]
pub(super) struct BufferedBytes {
    count: BufferCount,
    bytes: usize,
}

impl BufferCount {
    pub(super) fn add(&self, bytes: usize) -> BufferedBytes {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        BufferedBytes { count: self.clone(), bytes }
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for BufferedBytes {
    fn drop(&mut self) {
        self.count.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct QueueState {
    bytes: AtomicUsize,
    frames: AtomicUsize,
    drained: Notify,
    /// The connection found the queue full and waits for it to drain.
    drain_awaited: AtomicBool,
    /// A close frame was queued.
    close_queued: Notify,
    closed: AtomicBool,
}

/// Room for deliveries in the queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) bytes: usize,
    pub(super) frames: usize,
}

impl Room {
    /// Returns whether deliveries must wait.
    pub(super) const fn is_empty(self) -> bool {
        self.bytes == 0 || self.frames == 0
    }

    /// Takes the room of a frame. The last one may be larger than the bytes that are left.
    pub(super) const fn take(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.frames = self.frames.saturating_sub(1);
    }
}

/// Sender side of the queue.
pub(super) struct Outbound {
    sender: Sender<Message>,
    state: Arc<QueueState>,
}

impl Outbound {
    /// Creates a queue and the task that writes it to the socket until either side ends.
    pub(super) fn new(sink: SplitSink<WebSocket, Message>) -> (Self, impl Future<Output = ()>) {
        let (sender, receiver) = queue(SLOTS);
        let state = Arc::new(QueueState::default());
        (Self { sender, state: Arc::clone(&state) }, drain_queue(sink, receiver, state))
    }

    /// Returns whether deliveries must wait.
    pub(super) fn is_full(&self) -> bool {
        self.awaits_drain(|state| {
            state.bytes.load(Ordering::SeqCst) >= FULL_BYTES || state.frames.load(Ordering::SeqCst) >= FULL_FRAMES
        })
    }

    /// Returns the room for deliveries.
    pub(super) fn room(&self) -> Room {
        if self.is_full() {
            return Room::default();
        }
        Room {
            bytes: FULL_BYTES.saturating_sub(self.state.bytes.load(Ordering::SeqCst)),
            frames: FULL_FRAMES.saturating_sub(self.state.frames.load(Ordering::SeqCst)),
        }
    }

    /// Returns whether requests must wait, so that their replies find a slot.
    pub(super) fn is_crowded(&self) -> bool {
        self.awaits_drain(|state| state.frames.load(Ordering::SeqCst) >= CROWDED_FRAMES)
    }

    /// Returns whether the queue is above a limit. If so, asks the writer to notify the connection once it has
    /// drained. The second check closes the race with a writer that drained in between.
    fn awaits_drain(&self, too_high: impl Fn(&QueueState) -> bool) -> bool {
        if !too_high(&self.state) {
            return false;
        }
        // SeqCst on both sides: with weaker orders each could miss the other's write, and the connection would wait for
        // ever.
        self.state.drain_awaited.store(true, Ordering::SeqCst);
        too_high(&self.state)
    }

    /// Returns whether the writer has ended: the socket is closed or stuck.
    pub(super) fn is_closed(&self) -> bool {
        self.state.closed.load(Ordering::Relaxed)
    }

    /// Resolves after the queue has drained somewhat, or ended.
    pub(super) async fn drained(&self) {
        self.state.drained.notified().await;
    }

    pub(super) fn send_text(&self, text: Utf8Bytes) {
        self.enqueue(Message::Text(text));
    }

    pub(super) fn send_ping(&self) {
        self.enqueue(Message::Ping(axum::body::Bytes::new()));
    }

    pub(super) fn send_close(&self, code: u16, reason: &'static str) {
        self.enqueue(Message::Close(Some(CloseFrame { code, reason: reason.into() })));
        self.state.close_queued.notify_one();
    }

    fn enqueue(&self, message: Message) {
        let size = size_of(&message);
        // Relaxed: only this task adds, and it sees its own additions when it asks for the room.
        self.state.bytes.fetch_add(size, Ordering::Relaxed);
        self.state.frames.fetch_add(1, Ordering::Relaxed);
        if !self.sender.try_send(message) {
            // The peer does not read its replies, or the writer has ended: either way the connection ends.
            self.state.closed.store(true, Ordering::Relaxed);
            self.state.drained.notify_one();
        }
    }
}

fn size_of(message: &Message) -> usize {
    match message {
        Message::Text(text) => text.len(),
        Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Close(_) => 0,
    }
}

async fn drain_queue(mut sink: impl Sink<Message> + Unpin, mut queue: Receiver<Message>, state: Arc<QueueState>) {
    // One for all batches: a peer that does not read may hold up frames that were queued before the close.
    let mut close_timeout = pin!(async {
        state.close_queued.notified().await;
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    });
    while let Some(first) = queue.recv().await {
        let mut closing = matches!(first, Message::Close(_));
        let (mut bytes, mut frames) = (size_of(&first), 1);
        // A text may hold the memory that it takes, and the sink copies it.
        let mut unwritten = vec![first.clone()];
        let writing = async {
            sink.feed(first).await?;
            // Frames that are already queued go out in one write.
            while let Some(next) = queue.try_recv() {
                closing |= matches!(next, Message::Close(_));
                bytes += size_of(&next);
                frames += 1;
                unwritten.push(next.clone());
                sink.feed(next).await?;
            }
            sink.flush().await
        };
        // An error and a timeout are the same: part of a frame may be written, so nothing can follow it.
        let done = tokio::select! {
            biased;
            written = writing => written.is_ok(),
            () = &mut close_timeout => false,
            () = tokio::time::sleep(WRITE_TIMEOUT) => false,
        };
        // Not before the flush: frames in the sink are unwritten, and a slow peer must not make room for more of them.
        state.bytes.fetch_sub(bytes, Ordering::SeqCst);
        state.frames.fetch_sub(frames, Ordering::SeqCst);
        if !done || closing {
            break;
        }
        if state.drain_awaited.swap(false, Ordering::SeqCst) {
            state.drained.notify_one();
        }
    }
    // Wakes the connection, which may wait for room that will not come.
    state.closed.store(true, Ordering::Relaxed);
    state.drained.notify_one();
}

/// Traced frames of one agent without an ack.
#[derive(Debug, Default)]
pub(super) struct DeliveryTraces {
    /// Seq and trace context, oldest first.
    frames: VecDeque<(Seq, String)>,
}

impl DeliveryTraces {
    /// Writes a frame inside a span below `traceparent`, and remembers the span until the ack.
    pub(super) fn in_delivery_span(
        &mut self,
        seq: Seq,
        delivery_id: Option<&str>,
        traceparent: &str,
        write: impl FnOnce(),
    ) {
        let span = tracing::info_span!("node.deliver", delivery.seq = seq, delivery.id = delivery_id);
        relay_trace::set_parent(&span, traceparent);
        let _entered = span.enter();
        write();
        if self.frames.len() < MAX_TRACED_FRAMES
            && let Some(sent) = relay_trace::current_traceparent()
        {
            self.frames.push_back((seq, sent));
        }
    }

    /// Ends the traces of frames up to `floor` with an empty span, which marks the time of the ack.
    pub(super) fn on_ack(&mut self, floor: Seq) {
        while let Some((_, sent)) = self.frames.pop_front_if(|(seq, _)| *seq <= floor) {
            let span = tracing::info_span!("node.ack", delivery.up_to_seq = floor);
            relay_trace::set_parent(&span, &sent);
            span.in_scope(|| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::Pin,
        task::{Context, Poll},
    };

    use super::*;

    /// Socket of a peer that reads nothing.
    struct FullSink;

    impl Sink<Message> for FullSink {
        type Error = axum::Error;

        fn poll_ready(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
            Poll::Pending
        }

        fn start_send(self: Pin<&mut Self>, _: Message) -> Result<(), axum::Error> {
            Ok(())
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
            Poll::Pending
        }

        fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<(), axum::Error>> {
            Poll::Pending
        }
    }

    fn outbound() -> (Outbound, Receiver<Message>) {
        let (sender, receiver) = queue(SLOTS);
        (Outbound { sender, state: Arc::default() }, receiver)
    }

    #[test]
    fn deliveries_wait_at_512_frames_or_256_kib_and_requests_at_1024_frames() {
        let (outbound, _receiver) = outbound();
        for _ in 1..FULL_FRAMES {
            outbound.send_text("x".into());
        }
        assert_eq!(outbound.room(), Room { bytes: FULL_BYTES - FULL_FRAMES + 1, frames: 1 });
        assert!(!outbound.state.drain_awaited.load(Ordering::SeqCst));
        outbound.send_ping();
        assert!(outbound.room().is_empty() && !outbound.is_crowded());
        assert!(outbound.state.drain_awaited.load(Ordering::SeqCst), "the writer reports that it has drained");
        for _ in FULL_FRAMES..CROWDED_FRAMES {
            outbound.send_ping();
        }
        assert!(outbound.is_crowded());
        let (outbound, _receiver) = self::outbound();
        outbound.send_text("x".repeat(FULL_BYTES).into());
        assert!(outbound.is_full());
    }

    #[test]
    fn a_peer_that_does_not_read_its_replies_loses_the_connection() {
        let (outbound, _receiver) = outbound();
        for _ in 0..SLOTS {
            outbound.send_ping();
        }
        assert!(!outbound.is_closed());
        outbound.send_ping();
        assert!(outbound.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_close_waits_no_longer_if_frames_are_before_it() {
        let (outbound, receiver) = outbound();
        outbound.send_text("not read".into());
        outbound.send_close(1012, "draining");
        let began = Instant::now();
        drain_queue(FullSink, receiver, Arc::clone(&outbound.state)).await;
        assert!(began.elapsed() < WRITE_TIMEOUT, "{:?}", began.elapsed());
        assert!(outbound.is_closed());
    }

    #[test]
    fn the_last_frame_may_be_larger_than_the_room() {
        let mut room = Room { bytes: 10, frames: 3 };
        room.take(4);
        assert_eq!(room, Room { bytes: 6, frames: 2 });
        room.take(100);
        assert_eq!((room, room.is_empty()), (Room { bytes: 0, frames: 1 }, true));
    }

    #[test]
    fn a_frame_is_read_again_once_it_was_held_for_long_or_its_delivery_has_expired() {
        let held_since = Instant::now();
        for (held, expires_at_ms, unix_ms, expected) in [
            (Duration::ZERO, None, 5000, false),
            (MAX_HELD, None, 5000, true),
            (Duration::ZERO, Some(5000), 5000, false),
            (Duration::ZERO, Some(5000), 5001, true),
            (MAX_HELD, Some(9000), 5000, true),
        ] {
            let frame = OutgoingFrame {
                body: OutgoingBody::Text("frame".into()),
                _buffered: BufferCount::default().add(5),
                delivery_id: None,
                traceparent: None,
                live: true,
                held_since,
                expires_at_ms,
            };
            assert_eq!(
                frame.is_outdated(held_since + held, unix_ms),
                expected,
                "{held:?}, {expires_at_ms:?} at {unix_ms}"
            );
        }
    }
}
