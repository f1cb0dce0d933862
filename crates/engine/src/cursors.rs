//! What gateways learn about mailboxes (sent, acknowledged), written behind and set-wise.
//!
//! An ack counts once it is in Postgres. One move per mailbox, and per place that reports of it, waits in
//! memory, so an outage of Postgres costs no memory, and whatever waits is flushed within [`FLUSH_EVERY`].

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

/// The moves of one mailbox, one for each place that reports. Nearly always there is one; there are more while an
/// agent moves, or while it is of no particular provider. The fence of the statement tells which of them count.
type Places = Vec<CursorMove>;

/// Moves that wait to be written.
#[derive(Debug, Default)]
pub(crate) struct CursorMoves {
    waiting: Mutex<HashMap<(WorkspaceScope, AgentId), Places>>,
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
            merge(&mut waiting, moved);
        }
    }

    /// What waits, as rounds of at most one move per mailbox.
    fn take(&self) -> Vec<Vec<CursorMove>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rounds: Vec<Vec<CursorMove>> = Vec::new();
        for (_, places) in waiting.drain() {
            for (nth, moved) in places.into_iter().enumerate() {
                if nth == rounds.len() {
                    rounds.push(Vec::new());
                }
                rounds[nth].push(moved);
            }
        }
        rounds
    }
}

/// Adds a move to what waits. One place's never goes for another's: an ack that is lost here is not told again.
fn merge(waiting: &mut HashMap<(WorkspaceScope, AgentId), Places>, moved: CursorMove) {
    let places = waiting.entry((moved.scope, moved.agent_id)).or_default();
    match places.iter_mut().find(|known| known.node_id == moved.node_id && known.provider == moved.provider) {
        Some(known) => {
            known.sent_seq = known.sent_seq.max(moved.sent_seq);
            known.acked_seq = known.acked_seq.max(moved.acked_seq);
        }
        None => places.push(moved),
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
    let rounds = moves.take();
    let statements: Vec<&[CursorMove]> = rounds.iter().flat_map(|round| round.chunks(PER_STATEMENT)).collect();
    for (nth, some) in statements.iter().enumerate() {
        match engine.store().flush_cursors(some, engine.now()).await {
            Ok(flushed) => {
                let acked = u64::try_from(flushed.acked).unwrap_or(0);
                metrics::counter!(relay_domain::metric_names::DELIVERIES_ACKED).increment(acked);
                flushed.recorded.into_iter().for_each(|recorded| engine.announce_to_observers(recorded));
            }
            Err(error) => {
                moves.give_back(statements[nth..].concat());
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

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, ProviderName, WorkspaceId, session::Seq};

    use super::*;

    fn moved(provider: &str, sent_seq: Seq, acked_seq: Seq) -> CursorMove {
        CursorMove {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            agent_id: AgentId::new(1),
            node_id: NodeId::new("n1"),
            provider: ProviderName::new(provider),
            sent_seq,
            acked_seq,
        }
    }

    fn taken(moves: &CursorMoves) -> Vec<Vec<(String, Seq, Seq)>> {
        let one = |m: CursorMove| (m.provider.to_string(), m.sent_seq, m.acked_seq);
        moves.take().into_iter().map(|round| round.into_iter().map(one).collect()).collect()
    }

    #[test]
    fn an_ack_waits_whatever_another_provider_reports() {
        let moves = CursorMoves::default();
        moves.add(moved("a", 4, 0));
        moves.add(moved("a", 0, 4));
        moves.add(moved("b", 2, 0));
        moves.add(moved("a", 5, 3));
        let rounds = taken(&moves);
        assert_eq!(rounds, [[("a".to_owned(), 5, 4)], [("b".to_owned(), 2, 0)]], "one move per mailbox and statement");
        assert!(taken(&moves).is_empty());
    }

    #[test]
    fn what_could_not_be_written_lowers_nothing() {
        let moves = CursorMoves::default();
        moves.add(moved("a", 4, 4));
        let unwritten = moves.take().concat();
        moves.add(moved("b", 6, 6));
        moves.add(moved("a", 5, 0));
        moves.give_back(unwritten);
        assert_eq!(taken(&moves), [[("b".to_owned(), 6, 6)], [("a".to_owned(), 5, 4)]]);
    }
}
