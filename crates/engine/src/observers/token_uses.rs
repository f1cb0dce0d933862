//! Last-used times of observer tokens: recorded off the request path, at most twice a minute for each.

use std::time::Duration;

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{ObserverTokenId, WorkspaceScope};
use relay_store::Store;
use tokio::sync::mpsc;

/// Minimum time between two notes of one token.
const DEBOUNCE: Duration = Duration::from_secs(30);
/// Bound of the queue. Further notes are dropped: the token's next use is noted instead.
const QUEUE: usize = 4096;
const BATCH: usize = 1024;
/// Bound of the debounce cache.
const MAX_REMEMBERED: u64 = 100_000;

pub(crate) type TokenUse = (WorkspaceScope, ObserverTokenId, DateTime<Utc>);

/// Sender of token uses.
pub(super) struct TokenUseRecorder {
    noted: Cache<ObserverTokenId, ()>,
    notes: mpsc::Sender<TokenUse>,
}

impl TokenUseRecorder {
    /// Creates the sender, and the queue that [`write_token_uses`] drains.
    pub(super) fn new() -> (Self, mpsc::Receiver<TokenUse>) {
        let (notes, receiver) = mpsc::channel(QUEUE);
        let noted = Cache::builder().max_capacity(MAX_REMEMBERED).time_to_live(DEBOUNCE).build();
        (Self { noted, notes }, receiver)
    }

    /// Notes a use of the token.
    pub(super) fn note(&self, scope: WorkspaceScope, token: ObserverTokenId, at: DateTime<Utc>) {
        if !self.noted.contains_key(&token) && self.notes.try_send((scope, token, at)).is_ok() {
            self.noted.insert(token, ());
        }
    }
}

/// Writes notes in batches until the engine is dropped.
pub(crate) async fn write_token_uses(store: Store, mut notes: mpsc::Receiver<TokenUse>) {
    let mut batch = Vec::with_capacity(BATCH);
    while notes.recv_many(&mut batch, BATCH).await > 0 {
        if let Err(error) = store.record_observer_token_use(&batch).await {
            // No feature depends on one note; the next use is noted in half a minute.
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                notes = batch.len(),
                "failed to write last-used times"
            );
        }
        batch.clear();
        // Later notes gather meanwhile for one statement; no caller waits for a note.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
