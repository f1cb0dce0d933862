//! Last-seen times of agents: recorded off the request path, at most twice a minute for each.

use std::{sync::Weak, time::Duration};

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{AgentId, WorkspaceScope};
use relay_store::LastSeen;
use tokio::sync::mpsc;

use crate::{Engine, Inner};

/// Minimum time between two notes of one agent.
const DEBOUNCE: Duration = Duration::from_secs(30);
/// Bound of the queue. Further notes are dropped: the agent's next call is noted instead.
const QUEUE: usize = 8192;
const BATCH: usize = 1024;
/// Bound of the debounce cache.
const MAX_REMEMBERED: u64 = 200_000;

/// Sender of last-seen notes.
#[derive(Debug)]
pub(crate) struct LastSeenRecorder {
    noted: Cache<(WorkspaceScope, AgentId), ()>,
    notes: mpsc::Sender<LastSeen>,
}

impl LastSeenRecorder {
    /// Creates the sender, and the queue that [`write_last_seen`] drains.
    pub(crate) fn new() -> (Self, mpsc::Receiver<LastSeen>) {
        let (notes, receiver) = mpsc::channel(QUEUE);
        let noted = Cache::builder().max_capacity(MAX_REMEMBERED).time_to_live(DEBOUNCE).build();
        (Self { noted, notes }, receiver)
    }

    /// Notes a call of the agent.
    pub(crate) fn note(&self, scope: WorkspaceScope, agent_id: AgentId, at: DateTime<Utc>) {
        let key = (scope, agent_id);
        if !self.noted.contains_key(&key) && self.notes.try_send(LastSeen { scope, agent_id, at }).is_ok() {
            self.noted.insert(key, ());
        }
    }

    /// Ends the debounce after the agent's status was set by other means: its next call is noted again.
    pub(crate) fn forget(&self, scope: WorkspaceScope, agent_id: AgentId) {
        self.noted.invalidate(&(scope, agent_id));
    }
}

/// Writes notes in batches until the engine is dropped.
pub(crate) async fn write_last_seen(engine: Weak<Inner>, mut notes: mpsc::Receiver<LastSeen>) {
    let mut batch = Vec::with_capacity(BATCH);
    while notes.recv_many(&mut batch, BATCH).await > 0 {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        match engine.store().record_agents_seen(&batch, engine.now()).await {
            Ok(back) => back.into_iter().for_each(|recorded| engine.announce(recorded)),
            // No feature depends on one note; the agents' next calls are noted in half a minute.
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    notes = batch.len(),
                    "failed to write last-seen times"
                );
            }
        }
        drop(engine);
        batch.clear();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
