//! [`ReadGate`]: bound of the bytes that are read from an upgraded connection before its owner allows more.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::sync::Notify;

/// Gate of one connection, an extension of its requests. Open until it is given a bound.
#[derive(Debug, Clone, Default)]
pub struct ReadGate(Arc<Gate>);

#[derive(Debug)]
struct Gate {
    /// Bytes that may be read. The read that ends it may exceed it by its buffer.
    left: AtomicUsize,
    /// Read that waits.
    reader: Mutex<Option<Waker>>,
    closed: Notify,
}

impl Default for Gate {
    fn default() -> Self {
        Self { left: AtomicUsize::new(usize::MAX), reader: Mutex::default(), closed: Notify::new() }
    }
}

impl ReadGate {
    /// Allows this many bytes from now on.
    pub fn allow(&self, bytes: usize) {
        self.0.left.store(bytes, Ordering::SeqCst);
        if let Some(reader) = self.reader().take() {
            reader.wake();
        }
    }

    /// Allows more bytes than before.
    pub fn allow_more(&self, bytes: usize) {
        let left = self.0.left.load(Ordering::SeqCst);
        self.allow(left.saturating_add(bytes));
    }

    /// Waits until a read has found no byte allowed.
    pub async fn closed(&self) {
        loop {
            self.0.closed.notified().await;
            if self.0.left.load(Ordering::SeqCst) == 0 {
                return;
            }
        }
    }

    /// Polls whether a byte may be read.
    pub(super) fn poll_open(&self, context: &Context<'_>) -> Poll<()> {
        if self.0.left.load(Ordering::SeqCst) > 0 {
            return Poll::Ready(());
        }
        let mut reader = self.reader();
        // Read again: the bytes may have been allowed before the waker could be seen.
        if self.0.left.load(Ordering::SeqCst) > 0 {
            return Poll::Ready(());
        }
        *reader = Some(context.waker().clone());
        self.0.closed.notify_one();
        Poll::Pending
    }

    pub(super) fn on_read(&self, bytes: usize) {
        let left = self.0.left.load(Ordering::SeqCst);
        if left < usize::MAX {
            self.0.left.store(left.saturating_sub(bytes), Ordering::SeqCst);
        }
    }

    fn reader(&self) -> MutexGuard<'_, Option<Waker>> {
        self.0.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
