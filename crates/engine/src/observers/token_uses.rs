//! Last-used times of observer tokens: recorded off the request path, at most twice a minute for each.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, WorkspaceScope};
use relay_store::Store;
use relay_tasks::batches::{Batches, QueueConfig};

use crate::debounce::DebouncedNotes;

pub(crate) type TokenUse = (WorkspaceScope, ObserverTokenId, DateTime<Utc>);

/// Sender of token uses.
pub(super) type TokenUseRecorder = DebouncedNotes<ObserverTokenId, TokenUse>;

/// A note that finds no room is dropped: the token's next use is noted instead.
const QUEUE: QueueConfig<TokenUse> =
    QueueConfig::new("token_uses", 4096, 1024).at_most_every(Duration::from_millis(100));
/// Bound of the tokens whose last note is remembered.
const MAX_REMEMBERED: u64 = 100_000;

/// Creates the sender, and the queue that [`write_token_uses`] empties.
pub(super) fn recorder() -> (TokenUseRecorder, Batches<TokenUse>) {
    DebouncedNotes::new(QUEUE, MAX_REMEMBERED)
}

/// Writes notes in batches until the engine is dropped.
pub(crate) async fn write_token_uses(store: Store, mut notes: Batches<TokenUse>) {
    while let Some(batch) = notes.next().await {
        if let Err(error) = store.record_observer_token_use(&batch).await {
            // No feature depends on one note; the next use is noted in half a minute.
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                notes = batch.len(),
                "failed to write last-used times"
            );
        }
    }
}
