//! Last-seen times of agents: recorded off the request path, at most twice a minute for each.

use std::{sync::Weak, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope};
use relay_store::LastSeen;
use relay_tasks::batches::{Batches, QueueConfig};

use crate::{Engine, Inner, debounce::DebouncedNotes};

/// A note that finds no room is dropped: the agent's next call is noted instead.
const QUEUE: QueueConfig<LastSeen> =
    QueueConfig::new("last_seen", 8192, 1024).at_most_every(Duration::from_millis(100));
/// Bound of the agents whose last note is remembered.
const MAX_REMEMBERED: u64 = 200_000;

/// Sender of last-seen notes.
pub(crate) struct LastSeenRecorder {
    notes: DebouncedNotes<(WorkspaceScope, AgentId), LastSeen>,
}

impl LastSeenRecorder {
    /// Creates the sender, and the queue that [`write_last_seen`] empties.
    pub(crate) fn new() -> (Self, Batches<LastSeen>) {
        let (notes, batches) = DebouncedNotes::new(QUEUE, MAX_REMEMBERED);
        (Self { notes }, batches)
    }

    /// Notes a call of the agent.
    pub(crate) fn note(&self, scope: WorkspaceScope, agent_id: AgentId, at: DateTime<Utc>) {
        self.notes.add((scope, agent_id), || LastSeen { scope, agent_id, at });
    }

    /// Ends the debounce after the agent's status was set by other means: its next call is noted again.
    pub(crate) fn forget(&self, scope: WorkspaceScope, agent_id: AgentId) {
        self.notes.forget(&(scope, agent_id));
    }
}

/// Writes notes in batches until the engine is dropped.
pub(crate) async fn write_last_seen(engine: Weak<Inner>, mut notes: Batches<LastSeen>) {
    while let Some(batch) = notes.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        match engine.store().record_agents_seen(&batch, engine.now()).await {
            Ok(back) => back.into_iter().for_each(|recorded| engine.core().announce(recorded)),
            // No feature depends on one note; the agents' next calls are noted in half a minute.
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    notes = batch.len(),
                    "failed to write last-seen times"
                );
            }
        }
    }
}
