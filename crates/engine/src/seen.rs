//! When agents were last heard of: noted off the request path, at most twice a minute for each.

use std::{sync::Weak, time::Duration};

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{AgentId, WorkspaceScope};
use relay_store::Seen;
use tokio::sync::mpsc;

use crate::{Engine, Inner};

/// An agent's calls within this time after a noted one are not noted.
const DEBOUNCE: Duration = Duration::from_secs(30);
/// Notes that may wait. Further ones are dropped: the agent's next call is noted instead.
const WAITING: usize = 8192;
/// Notes written by one statement.
const BATCH: usize = 1024;
/// Agents remembered as noted.
const REMEMBERED: u64 = 200_000;

/// Collects notes for the writer.
#[derive(Debug)]
pub(crate) struct SeenNotes {
    noted: Cache<(WorkspaceScope, AgentId), ()>,
    notes: mpsc::Sender<Seen>,
}

impl SeenNotes {
    /// The collector, and what [`write_notes`] reads.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Seen>) {
        let (notes, receiver) = mpsc::channel(WAITING);
        let noted = Cache::builder().max_capacity(REMEMBERED).time_to_live(DEBOUNCE).build();
        (Self { noted, notes }, receiver)
    }

    /// The agent called.
    pub(crate) fn note(&self, scope: WorkspaceScope, agent_id: AgentId, at: DateTime<Utc>) {
        let key = (scope, agent_id);
        if !self.noted.contains_key(&key) && self.notes.try_send(Seen { scope, agent_id, at }).is_ok() {
            self.noted.insert(key, ());
        }
    }

    /// The agent's status was set by other means: its next call is noted again.
    pub(crate) fn forget(&self, scope: WorkspaceScope, agent_id: AgentId) {
        self.noted.invalidate(&(scope, agent_id));
    }
}

/// Writes notes as they come, in batches, until the engine is gone.
pub(crate) async fn write_notes(engine: Weak<Inner>, mut notes: mpsc::Receiver<Seen>) {
    let mut batch = Vec::with_capacity(BATCH);
    while notes.recv_many(&mut batch, BATCH).await > 0 {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        match engine.store().agents_seen(&batch, engine.now()).await {
            Ok(back) => back.into_iter().for_each(|recorded| engine.announce(recorded)),
            // Nothing depends on one note; the agents' next calls are noted in half a minute.
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    notes = batch.len(),
                    "last-seen notes are lost"
                );
            }
        }
        drop(engine);
        batch.clear();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
