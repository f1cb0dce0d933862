//! Seqs that this process sent before a failover: the database may have lost the deliveries, and must not assign their
//! numbers to others (ADR 0044). Brokers report what they received; for clients with a socket of their own only the
//! gateway knows, and for http_push endpoints only the worker.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use relay_domain::{
    AgentId, ProviderName, WorkspaceScope,
    mailboxes::stream::Seq,
    push::mailbox::{LeasedMailbox, MailboxKey},
};
use relay_store::nodes::fence::Fence;

use super::Recovery;
use crate::{Engine, EngineError, EngineResult};

/// Mailboxes of one generation, about 6 MiB: as many as the sockets that a gateway takes by default. A lost delivery is
/// younger than the lag of the standby, so it belongs to one of the mailboxes that were served last.
const GENERATION: usize = 32_768;
/// Mailboxes that are compared by one statement.
const MAILBOXES_PER_READ: usize = 1000;
/// Bound of raising one head. The statements of a transaction have no deadline on this side: on a dead network the
/// process would not serve until the kernel closes the connection.
const RAISE_TIMEOUT: Duration = Duration::from_secs(10);

/// Highest sent seqs of the mailboxes that this process served last, over sockets or as http_push: between
/// [`GENERATION`] and twice as many. They are kept when the socket closes or the mailbox is released, and through
/// recoveries.
#[derive(Debug, Default)]
pub(crate) struct LastSent(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    current: HashMap<MailboxKey, SentPosition>,
    /// Dropped when the current one is full.
    former: HashMap<MailboxKey, SentPosition>,
}

#[derive(Debug, Clone)]
struct SentPosition {
    /// Last connection that sent, or the http_push node.
    fence: Fence,
    seq: Seq,
}

impl LastSent {
    fn note(&self, fence: &Fence, agent: AgentId, seq: Seq) {
        let key = (fence.scope, agent);
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Generations { current, former } = &mut *generations;
        if let Some(sent) = current.get_mut(&key) {
            sent.seq = sent.seq.max(seq);
            // Cloned only when the agent has moved: this runs for each delivery that is sent.
            if sent.fence.node_id != fence.node_id || sent.fence.provider != fence.provider {
                sent.fence = fence.clone();
            }
            return;
        }
        // Moved to the current generation before the former one may be dropped.
        let seq = former.remove(&key).map_or(seq, |sent| sent.seq.max(seq));
        if current.len() >= GENERATION {
            *former = std::mem::take(current);
        }
        current.insert(key, SentPosition { fence: fence.clone(), seq });
    }

    fn read(&self) -> Vec<(MailboxKey, SentPosition)> {
        let generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = generations.current.iter().chain(&generations.former);
        all.map(|(key, sent)| (*key, sent.clone())).collect()
    }
}

impl Recovery {
    /// Notes the highest seq that was sent to an agent over a connection, now or before it was opened.
    pub fn note_sent(&self, connection: &Fence, agent: AgentId, seq: Seq) {
        if seq > 0 {
            self.state.last_sent.note(connection, agent, seq);
        }
    }

    /// Notes a seq that is sent to an http_push endpoint.
    pub fn note_pushed(&self, mailbox: &LeasedMailbox, seq: Seq) {
        // An http_push node has no provider.
        let provider = ProviderName::default_provider();
        let fence = Fence { scope: mailbox.scope, node_id: mailbox.node_id.clone(), provider, epoch: 0 };
        self.note_sent(&fence, mailbox.agent_id, seq);
    }
}

/// Raises the heads of mailboxes above what this process sent before the last recovery, unless that was done.
pub(super) async fn raise_heads(engine: &Engine) -> EngineResult<()> {
    let state = &engine.inner.recovery.state;
    if !state.must_raise_heads.load(Ordering::SeqCst) {
        return Ok(());
    }
    for chunk in state.last_sent.read().chunks(MAILBOXES_PER_READ) {
        let positions: Vec<(WorkspaceScope, AgentId, Seq)> =
            chunk.iter().map(|((scope, agent), sent)| (*scope, *agent, sent.seq)).collect();
        // Most mailboxes lost nothing. Only the others are locked, one by one.
        let reassigned = engine.store().reassigned_seqs(&positions).await?;
        for (key, sent) in chunk.iter().filter(|(key, _)| reassigned.contains(key)) {
            let raised = engine.inner.recovery.raise_to(&sent.fence, key.1, sent.seq);
            let raised = tokio::time::timeout(RAISE_TIMEOUT, raised).await;
            raised.map_err(|_| EngineError::storage_timeout("raising a mailbox head above a sent seq"))??;
        }
    }
    // Last: a failure or a deadline leaves the flag, and the next check compares all of them again.
    state.must_raise_heads.store(false, Ordering::SeqCst);
    Ok(())
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, WorkspaceId};

    use super::*;

    fn note(positions: &LastSent, agent: usize, node: &str, seq: Seq) {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        let provider = ProviderName::default_provider();
        let fence = Fence { scope, node_id: NodeId::new(node), provider, epoch: 1 };
        positions.note(&fence, AgentId::new(i64::try_from(agent).unwrap()), seq);
    }

    fn seqs(positions: &LastSent, agent: i64) -> Vec<(String, Seq)> {
        let own = positions.read().into_iter().filter(|((_, id), _)| *id == AgentId::new(agent));
        own.map(|(_, sent)| (sent.fence.node_id.to_string(), sent.seq)).collect()
    }

    #[test]
    fn a_mailbox_keeps_its_highest_seq_and_its_last_node() {
        let positions = LastSent::default();
        for (node, seq) in [("a", 3), ("a", 7), ("b", 5)] {
            note(&positions, 1, node, seq);
        }
        assert_eq!(seqs(&positions, 1), [("b".to_owned(), 7)]);
    }

    #[test]
    fn the_mailboxes_served_last_are_kept_and_no_others() {
        let positions = LastSent::default();
        note(&positions, 0, "a", 9);
        (1..GENERATION).for_each(|agent| note(&positions, agent, "a", 1));
        // Of the former generation by then, and served again.
        (GENERATION..GENERATION + 2).for_each(|agent| note(&positions, agent, "a", 1));
        note(&positions, 0, "a", 4);
        assert_eq!(seqs(&positions, 0), [("a".to_owned(), 9)]);
        (GENERATION..4 * GENERATION).for_each(|agent| note(&positions, agent, "a", 1));
        assert_eq!(seqs(&positions, 0), []);
        assert!((GENERATION..=2 * GENERATION).contains(&positions.read().len()));
    }
}
