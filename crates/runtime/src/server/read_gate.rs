//! [`ReadGate`]: bound of the bytes that an upgraded connection reads ahead of its reader.
//!
//! A WebSocket library buffers a message until it is complete. Its reader learns nothing of the part that has arrived;
//! the stream below counts it and stops at a limit that the reader sets.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

/// Gate of one connection, shared by its stream and the reader of its messages. Open until a limit is set.
#[derive(Debug, Clone, Default)]
pub struct ReadGate(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Bytes that arrived and belong to no message that was read.
    pending: usize,
    limit: Option<usize>,
    is_discarding: bool,
    /// Stream that waits for a higher limit.
    stream: Option<Waker>,
    /// Reader that waits until the limit is reached.
    reader: Option<Waker>,
}

/// Treatment of the next bytes of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Read,
    /// To be read and dropped.
    Discard,
}

impl ReadGate {
    /// Sets the bytes of incomplete messages above which the connection is not read.
    pub fn set_limit(&self, bytes: usize) {
        let mut state = self.state();
        state.limit = Some(bytes);
        state.wake_stream();
    }

    /// Notes that a message was read whose last byte has arrived: nothing of it is pending.
    pub fn on_message(&self) {
        let mut state = self.state();
        state.pending = 0;
        state.wake_stream();
    }

    /// Notes that a control frame of this size was read. It may stand between the parts of a message.
    pub fn on_control_frame(&self, bytes: usize) {
        let mut state = self.state();
        // Its bytes may have arrived before the limit was set, when none were counted.
        state.pending = state.pending.saturating_sub(bytes);
        state.wake_stream();
    }

    /// Drops what arrives from now on.
    pub fn discard(&self) {
        let mut state = self.state();
        state.is_discarding = true;
        state.wake_stream();
    }

    /// Returns once more bytes are to be read than the limit allows. One reader may wait.
    pub async fn full(&self) {
        std::future::poll_fn(|context| {
            let mut state = self.state();
            if state.is_full() {
                return Poll::Ready(());
            }
            state.reader = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Waits until the stream may be read.
    pub(super) fn poll_admission(&self, context: &Context<'_>) -> Poll<Admission> {
        let mut state = self.state();
        if state.is_discarding {
            return Poll::Ready(Admission::Discard);
        }
        if !state.is_full() {
            return Poll::Ready(Admission::Read);
        }
        state.stream = Some(context.waker().clone());
        Poll::Pending
    }

    /// Counts bytes that were read.
    pub(super) fn on_bytes(&self, bytes: usize) {
        let mut state = self.state();
        // Only the reader of an upgraded connection sets a limit. Bodies of requests have their own.
        if state.limit.is_none() {
            return;
        }
        state.pending += bytes;
        if state.is_full()
            && let Some(reader) = state.reader.take()
        {
            reader.wake();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.pending >= limit)
    }

    fn wake_stream(&mut self) {
        if let Some(stream) = self.stream.take() {
            stream.wake();
        }
    }
}
