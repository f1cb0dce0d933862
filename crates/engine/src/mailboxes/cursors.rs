//! Delivery cursors of gateways (sent, acknowledged), written behind in batches.
//!
//! An ack counts once it is in Postgres. Only one move per mailbox and reporting provider waits in memory, so an outage
//! of Postgres costs no memory. A write costs by the mailbox and not by the ack, so acks of many mailboxes gather for
//! longer: a mailbox that is acked 50 times a second is then written four times instead of 50.

use std::{collections::HashSet, sync::Weak, time::Duration};

use relay_domain::{AgentId, WorkspaceScope};
use relay_store::mailboxes::cursors::{CursorMove, LockedCursors};
use relay_tasks::newest::NewestValues;

use super::Mailboxes;
use crate::{EngineResult, Inner, core::Core, events::announcement::Announcement};

/// Time that acks gather before they are written: at least, and at most.
const FLUSH_EVERY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));
/// Part of that time for each mailbox of the last write. Above 500 mailboxes a second each write has more of them than
/// the last, and the time grows to its bound.
const PAUSE_PER_MAILBOX: Duration = Duration::from_millis(2);
const MAX_PER_STATEMENT: usize = 1000;
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Moves of one mailbox, one for each reporting provider. Nearly always there is one; there are more while an agent
/// moves or is unassigned. The fence of the statement decides which of them count.
type MovesByProvider = Vec<CursorMove>;

/// Moves that wait to be written.
#[derive(Debug)]
pub(crate) struct CursorMoves(NewestValues<(WorkspaceScope, AgentId), MovesByProvider>);

impl Default for CursorMoves {
    fn default() -> Self {
        Self(NewestValues::new("cursors", |earlier, later| later.into_iter().for_each(|moved| merge(earlier, moved))))
    }
}

impl CursorMoves {
    fn add(&self, moved: CursorMove) {
        self.0.add((moved.scope, moved.agent_id), vec![moved]);
    }

    /// Puts moves back that could not be written.
    fn put_back(&self, moves: Vec<CursorMove>) {
        // Reversed: of several moves of one mailbox `put_back` takes the latest first.
        self.0.put_back(moves.into_iter().rev().map(|moved| ((moved.scope, moved.agent_id), vec![moved])));
    }

    /// Takes all moves, as rounds of at most one move per mailbox.
    fn take_rounds(&self) -> Vec<Vec<CursorMove>> {
        let mut rounds: Vec<Vec<CursorMove>> = Vec::new();
        for moves_of in self.0.take().into_values() {
            // Two moves of one mailbox in a statement would both start from the same old cursor, and one would be
            // lost.
            for (nth, moved) in moves_of.into_iter().enumerate() {
                if nth == rounds.len() {
                    rounds.push(Vec::new());
                }
                rounds[nth].push(moved);
            }
        }
        rounds
    }
}

/// Merges a move. One provider's move never replaces another's: an ack that is lost here is not repeated. Neither does
/// one of another recovery epoch, whose seqs may be those of other deliveries.
fn merge(moves_of: &mut MovesByProvider, moved: CursorMove) {
    let is_same = |known: &&mut CursorMove| {
        known.node_id == moved.node_id && known.provider == moved.provider && known.epoch == moved.epoch
    };
    match moves_of.iter_mut().find(is_same) {
        Some(known) => {
            known.sent_seq = known.sent_seq.max(moved.sent_seq);
            known.acked_seq = known.acked_seq.max(moved.acked_seq);
        }
        None => moves_of.push(moved),
    }
}

/// Writes moves until the engine is dropped.
pub(crate) async fn run(engine: Weak<Inner>, moves: Weak<CursorMoves>) {
    let mut pause = FLUSH_EVERY.0;
    loop {
        let Some(moves) = moves.upgrade() else { return };
        // Wakes up regularly to notice that the moves were dropped with the engine.
        let _ = tokio::time::timeout(Duration::from_secs(1), moves.0.wait_for_values()).await;
        tokio::time::sleep(pause).await;
        let Some(inner) = engine.upgrade() else { return };
        match flush(&inner.core, &moves, LockedCursors::Skip).await {
            Ok(mailboxes) => pause = pause_after(mailboxes),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to write cursor moves, will retry");
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
    }
}

/// Returns the time that acks gather after a write of this many mailboxes.
fn pause_after(mailboxes: usize) -> Duration {
    let pause = PAUSE_PER_MAILBOX.saturating_mul(u32::try_from(mailboxes).unwrap_or(u32::MAX));
    pause.clamp(FLUSH_EVERY.0, FLUSH_EVERY.1)
}

/// Writes all waiting moves, or all but those of cursors that others hold, which stay; returns the number of their
/// mailboxes.
async fn flush(core: &Core, moves: &CursorMoves, locked: LockedCursors) -> EngineResult<usize> {
    // While another epoch was met, the writes below fail and the moves are kept.
    let served = core.store.served_epoch();
    let mut rounds = moves.take_rounds();
    if served.is_some() {
        // Acks of sockets from before a recovery: their deliveries are sent again, with the same ids.
        rounds.iter_mut().for_each(|round| round.retain(|moved| moved.epoch == served));
    }
    let statements: Vec<&[CursorMove]> = rounds.iter().flat_map(|round| round.chunks(MAX_PER_STATEMENT)).collect();
    for (nth, some) in statements.iter().enumerate() {
        match core.store.flush_cursors(some, locked, core.now()).await {
            Ok(flushed) => {
                // A count, which is never negative.
                let acked = u64::try_from(flushed.acked).unwrap_or(0);
                metrics::counter!(relay_domain::metric_names::DELIVERIES_ACKED).increment(acked);
                flushed
                    .recorded
                    .into_iter()
                    .for_each(|recorded| core.announce(Announcement::to_observers_only(recorded)));
                if !flushed.skipped.is_empty() {
                    let skipped: HashSet<_> = flushed.skipped.into_iter().collect();
                    let kept = some.iter().filter(|moved| skipped.contains(&(moved.scope, moved.agent_id)));
                    moves.put_back(kept.cloned().collect());
                }
            }
            Err(error) => {
                // With those of the failed statement: moves are monotonic, so writing one twice is harmless.
                moves.put_back(statements[nth..].concat());
                return Err(error.into());
            }
        }
    }
    Ok(statements.iter().map(|some| some.len()).sum())
}

impl Mailboxes {
    /// Records that a connection wrote or acknowledged up to here; stored within 20 ms, and within 250 ms while many
    /// mailboxes move.
    pub fn move_cursor(&self, moved: CursorMove) {
        self.cursors.add(moved);
    }

    /// Writes all waiting moves now, also those of cursors that others hold: for a drain, and before a position is
    /// judged.
    pub async fn flush_cursors(&self) -> EngineResult<()> {
        flush(&self.core, &self.cursors, LockedCursors::Wait).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, ProviderName, WorkspaceId, mailboxes::stream::Seq};

    use super::*;

    fn moved(provider: &str, sent_seq: Seq, acked_seq: Seq) -> CursorMove {
        CursorMove {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            agent_id: AgentId::new(1),
            node_id: NodeId::new("n1"),
            provider: ProviderName::new(provider),
            sent_seq,
            acked_seq,
            epoch: Some(1),
        }
    }

    fn taken(moves: &CursorMoves) -> Vec<Vec<(String, Seq, Seq)>> {
        let one = |m: CursorMove| (m.provider.to_string(), m.sent_seq, m.acked_seq);
        moves.take_rounds().into_iter().map(|round| round.into_iter().map(one).collect()).collect()
    }

    #[test]
    fn acks_of_different_providers_are_kept_apart() {
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
    fn an_ack_from_before_a_recovery_is_not_taken_for_one_after_it() {
        let moves = CursorMoves::default();
        moves.add(moved("a", 9, 9));
        moves.add(CursorMove { epoch: Some(2), ..moved("a", 3, 2) });
        assert_eq!(taken(&moves), [[("a".to_owned(), 9, 9)], [("a".to_owned(), 3, 2)]]);
    }

    #[test]
    fn acks_of_many_mailboxes_gather_for_longer() {
        let pauses = [0, 10, 11, 100, 1000, usize::MAX].map(|mailboxes| pause_after(mailboxes).as_millis());
        assert_eq!(pauses, [20, 20, 22, 200, 250, 250]);
    }

    #[test]
    fn moves_that_are_put_back_never_lower_a_cursor() {
        let moves = CursorMoves::default();
        moves.add(moved("a", 4, 4));
        let unwritten = moves.take_rounds().concat();
        moves.add(moved("b", 6, 6));
        moves.add(moved("a", 5, 0));
        moves.put_back(unwritten);
        assert_eq!(taken(&moves), [[("a".to_owned(), 5, 4)], [("b".to_owned(), 6, 6)]]);
    }
}
