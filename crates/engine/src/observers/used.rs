//! When observer tokens were last used: noted off the request path, at most twice a minute for each.

use std::time::Duration;

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{ObserverTokenId, WorkspaceScope};
use relay_store::Store;
use tokio::sync::mpsc;

/// Uses of a token within this time after a noted one are not noted.
const DEBOUNCE: Duration = Duration::from_secs(30);
/// Notes that may wait. Further ones are dropped: the token's next use is noted instead.
const WAITING: usize = 4096;
/// Notes written by one statement.
const BATCH: usize = 1024;
/// Tokens remembered as noted.
const REMEMBERED: u64 = 100_000;

/// One use of one token.
pub(crate) type Used = (WorkspaceScope, ObserverTokenId, DateTime<Utc>);

/// Collects notes for the writer.
pub(super) struct UsedNotes {
    noted: Cache<ObserverTokenId, ()>,
    notes: mpsc::Sender<Used>,
}

impl UsedNotes {
    /// The collector, and what [`write_used`] reads.
    pub(super) fn new() -> (Self, mpsc::Receiver<Used>) {
        let (notes, receiver) = mpsc::channel(WAITING);
        let noted = Cache::builder().max_capacity(REMEMBERED).time_to_live(DEBOUNCE).build();
        (Self { noted, notes }, receiver)
    }

    /// The token was used.
    pub(super) fn note(&self, scope: WorkspaceScope, token: ObserverTokenId, at: DateTime<Utc>) {
        if !self.noted.contains_key(&token) && self.notes.try_send((scope, token, at)).is_ok() {
            self.noted.insert(token, ());
        }
    }
}

/// Writes notes as they come, in batches, until the engine is gone.
pub(crate) async fn write_used(store: Store, mut notes: mpsc::Receiver<Used>) {
    let mut batch = Vec::with_capacity(BATCH);
    while notes.recv_many(&mut batch, BATCH).await > 0 {
        if let Err(error) = store.observer_tokens_used(&batch).await {
            // Nothing depends on one note; the next use is noted in half a minute.
            tracing::warn!(error = &error as &dyn std::error::Error, notes = batch.len(), "last-used notes are lost");
        }
        batch.clear();
        // What gathers meanwhile goes in one statement; nobody waits for a note.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
