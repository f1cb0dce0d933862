//! Seqs that this worker has sent to http_push endpoints. After a failover the database may have lost the deliveries, and
//! must not assign their numbers to others (ADR 0044).

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use relay_domain::{
    NodeId,
    mailboxes::stream::Seq,
    push::mailbox::{LeasedMailbox, MailboxKey},
};
use relay_engine::recovery::SentPosition;

/// Mailboxes of one generation, about 2 MiB. A lost delivery is younger than the lag of the standby, so it belongs to one of
/// the mailboxes that were served last.
const GENERATION: usize = 16_384;

/// Highest sent seqs of the last mailboxes that were served, also after their release: between [`GENERATION`] and twice as
/// many. The dispatchers of all recoveries share them.
#[derive(Debug, Default)]
pub(crate) struct PushedPositions(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    current: HashMap<MailboxKey, Pushed>,
    /// Dropped when the current one is full.
    former: HashMap<MailboxKey, Pushed>,
}

#[derive(Debug)]
struct Pushed {
    node_id: NodeId,
    seq: Seq,
}

impl PushedPositions {
    pub(crate) fn note(&self, mailbox: &LeasedMailbox, seq: Seq) {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Generations { current, former } = &mut *generations;
        if let Some(pushed) = current.get_mut(&mailbox.key()) {
            pushed.seq = pushed.seq.max(seq);
            if pushed.node_id != mailbox.node_id {
                pushed.node_id = mailbox.node_id.clone();
            }
            return;
        }
        let seq = former.remove(&mailbox.key()).map_or(seq, |pushed| pushed.seq.max(seq));
        if current.len() >= GENERATION {
            *former = std::mem::take(current);
        }
        current.insert(mailbox.key(), Pushed { node_id: mailbox.node_id.clone(), seq });
    }

    pub(crate) fn read(&self) -> Vec<SentPosition> {
        let generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = generations.current.iter().chain(&generations.former);
        all.map(|((scope, agent), pushed)| SentPosition::pushed(*scope, pushed.node_id.clone(), *agent, pushed.seq))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{AgentId, WorkspaceId, WorkspaceScope};

    use super::*;

    fn note(positions: &PushedPositions, agent: usize, node: &str, seq: Seq) {
        let mailbox = LeasedMailbox {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            agent_id: AgentId::new(i64::try_from(agent).unwrap()),
            node_id: NodeId::new(node),
            agent_name: String::new(),
            epoch: 1,
            pushed_seq: 0,
            recovery_epoch: None,
        };
        positions.note(&mailbox, seq);
    }

    fn seqs(positions: &PushedPositions, agent: i64) -> Vec<(String, Seq)> {
        let own = positions.read().into_iter().filter(|sent| sent.agent_id == AgentId::new(agent));
        own.map(|sent| (sent.fence.node_id.to_string(), sent.seq)).collect()
    }

    #[test]
    fn a_mailbox_keeps_its_highest_seq_and_its_last_node() {
        let positions = PushedPositions::default();
        for (node, seq) in [("a", 3), ("a", 7), ("b", 5)] {
            note(&positions, 1, node, seq);
        }
        assert_eq!(seqs(&positions, 1), [("b".to_owned(), 7)]);
    }

    #[test]
    fn the_mailboxes_served_last_are_kept_and_no_others() {
        let positions = PushedPositions::default();
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
