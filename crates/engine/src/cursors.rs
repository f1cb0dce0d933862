//! What gateways learn about mailboxes (sent, acknowledged), written behind and set-wise.
//!
//! An ack counts once it is in Postgres. One number per mailbox waits in memory, so an outage of
//! Postgres costs no memory, and whatever waits is flushed within [`FLUSH_EVERY`].

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, Weak},
    time::Duration,
};

use relay_domain::{AgentId, WorkspaceScope};
use relay_store::cursors::CursorMove;
use tokio::sync::Notify;

use crate::{Engine, EngineResult, Inner};

/// How long acks gather before they are written.
const FLUSH_EVERY: Duration = Duration::from_millis(20);
/// Mailboxes per statement.
const PER_STATEMENT: usize = 1000;
/// How long to wait for a Postgres that is away.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Moves that wait to be written.
#[derive(Debug, Default)]
pub(crate) struct CursorMoves {
    waiting: Mutex<HashMap<(WorkspaceScope, AgentId), CursorMove>>,
    news: Notify,
}

impl CursorMoves {
    fn add(&self, moved: CursorMove) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        merge(&mut waiting, moved);
        drop(waiting);
        self.news.notify_one();
    }

    /// Puts moves back that could not be written.
    fn give_back(&self, moves: Vec<CursorMove>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        for moved in moves {
            match waiting.get(&(moved.scope, moved.agent_id)) {
                // The agent has moved meanwhile: what its old place learnt is void.
                Some(newer) if newer.node_id != moved.node_id || newer.provider != moved.provider => {}
                _ => merge(&mut waiting, moved),
            }
        }
    }

    fn take(&self) -> Vec<CursorMove> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.drain().map(|(_, moved)| moved).collect()
    }
}

fn merge(waiting: &mut HashMap<(WorkspaceScope, AgentId), CursorMove>, moved: CursorMove) {
    let entry = waiting.entry((moved.scope, moved.agent_id)).or_insert_with(|| moved.clone());
    if entry.node_id == moved.node_id && entry.provider == moved.provider {
        entry.sent_seq = entry.sent_seq.max(moved.sent_seq);
        entry.acked_seq = entry.acked_seq.max(moved.acked_seq);
    } else {
        *entry = moved;
    }
}

/// Writes moves until the engine is gone.
pub(crate) async fn run(engine: Weak<Inner>, moves: Weak<CursorMoves>) {
    loop {
        let Some(moves) = moves.upgrade() else { return };
        // The engine's end drops the moves: wake up now and then to notice.
        let _ = tokio::time::timeout(Duration::from_secs(1), moves.news.notified()).await;
        tokio::time::sleep(FLUSH_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        if let Err(error) = flush(&Engine { inner }, &moves).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "cursor moves wait for postgres");
            tokio::time::sleep(RETRY_AFTER).await;
            moves.news.notify_one();
        }
    }
}

async fn flush(engine: &Engine, moves: &CursorMoves) -> EngineResult<()> {
    let all = moves.take();
    for (nth, some) in all.chunks(PER_STATEMENT).enumerate() {
        match engine.store().flush_cursors(some, engine.now()).await {
            Ok(flushed) => {
                let acked = u64::try_from(flushed.acked).unwrap_or(0);
                metrics::counter!(relay_domain::metric_names::DELIVERIES_ACKED).increment(acked);
                flushed.recorded.into_iter().for_each(|recorded| engine.announce_to_observers(recorded));
            }
            Err(error) => {
                moves.give_back(all[nth * PER_STATEMENT..].to_vec());
                return Err(error.into());
            }
        }
    }
    Ok(())
}

impl Engine {
    /// A connection wrote or acknowledged up to here; it is stored within about 20 ms.
    pub fn cursor_moved(&self, moved: CursorMove) {
        self.inner.cursors.add(moved);
    }

    /// Writes everything that waits, now. For a drain.
    ///
    /// # Errors
    /// When Postgres is away; what was not written goes on waiting.
    pub async fn flush_cursors(&self) -> EngineResult<()> {
        flush(self, &self.inner.cursors).await
    }
}
