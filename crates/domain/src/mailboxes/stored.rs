//! [`StoredDelivery`]: a delivery and the content of its frame. Read by storage, encoded by `relay-wire`.

use std::{collections::HashSet, sync::Arc};

use chrono::{DateTime, Utc};

use super::{
    delivery::{Mode, Settlement, SourceKind},
    stream::Seq,
};
use crate::{AgentId, DeliveryId, JsonText, SourceId, WorkspaceId, WorkspaceScope, messages::Message};

/// Memory of a delivery besides its content, in bytes.
const ROW_BYTES: usize = 256;

/// Content of a delivery's frame. Storage reads rows first, then the contents that fit into a budget of bytes.
#[derive(Debug, Clone)]
pub enum Content {
    /// Not read yet.
    Unread {
        /// Table of the source.
        kind: SourceKind,
        /// Upper bound of its bytes, estimated for compressed columns.
        bytes: usize,
    },
    /// Message, shared by its recipients.
    Message(Arc<Message>),
    /// Outcome of an invocation.
    Outcome {
        /// Kind of the event.
        kind: &'static str,
        /// Data of the event.
        data: JsonText,
    },
    /// Retention has dropped it.
    Dropped,
}

/// Delivery with the content of its frame.
#[derive(Debug, Clone)]
pub struct StoredDelivery {
    /// Workspace of the recipient.
    pub scope: WorkspaceScope,
    /// Agent whose mailbox it is in.
    pub agent_id: AgentId,
    /// Name of the recipient.
    pub agent_name: String,
    /// Current node of the recipient, and its provider unless it is unassigned.
    pub location: (String, Option<String>),
    /// Position in the mailbox.
    pub seq: Seq,
    /// Id of the message or the invocation.
    pub source_id: SourceId,
    /// 0 for the original.
    pub redrive_no: i16,
    /// Requested injection mode.
    pub mode: Mode,
    /// End of its lifetime.
    pub expires_at: DateTime<Utc>,
    /// Decision about this delivery alone.
    pub settlement: Option<Settlement>,
    /// Author of the message.
    pub sender: Option<AgentId>,
    /// Content of its frame.
    pub content: Content,
}

impl StoredDelivery {
    /// Returns true if neither a message nor an outcome is left to deliver.
    #[must_use]
    pub const fn is_dropped(&self) -> bool {
        matches!(self.content, Content::Dropped)
    }

    /// Returns the message, once it was read.
    #[must_use]
    pub fn message(&self) -> Option<&Arc<Message>> {
        match &self.content {
            Content::Message(message) => Some(message),
            Content::Unread { .. } | Content::Outcome { .. } | Content::Dropped => None,
        }
    }

    /// Returns the id of the delivery.
    #[must_use]
    pub const fn id(&self) -> DeliveryId {
        DeliveryId { source: self.source_id, agent: self.agent_id, redrive_no: self.redrive_no }
    }
}

impl AsRef<Self> for StoredDelivery {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// Bytes of the contents that one read may hold. Recipients of one message share its content, which counts once; that
/// of a settled row is not read.
#[derive(Debug)]
pub struct ContentBudget {
    limit: usize,
    used: usize,
    counted: HashSet<(WorkspaceId, SourceId)>,
}

impl ContentBudget {
    /// Creates a budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, used: 0, counted: HashSet::new() }
    }

    /// Bytes that are used.
    #[must_use]
    pub const fn used(&self) -> usize {
        self.used
    }

    /// Adds a delivery if it fits. The first one always does, so that every read makes progress.
    pub fn add(&mut self, row: &StoredDelivery) -> bool {
        let source = (row.scope.workspace_id(), row.source_id);
        let is_read = !row.settlement.is_some_and(Settlement::is_settled) && !self.counted.contains(&source);
        let content = match row.content {
            Content::Unread { bytes, .. } if is_read => bytes,
            Content::Unread { .. } | Content::Message(_) | Content::Outcome { .. } | Content::Dropped => 0,
        };
        let bytes = content + ROW_BYTES;
        if self.used > 0 && self.used + bytes > self.limit {
            return false;
        }
        self.used += bytes;
        self.counted.insert(source);
        true
    }

    /// Returns the number of rows that fit, for each mailbox: a prefix of its rows. Mailboxes take turns, so that one
    /// with large rows does not take the budget of all.
    pub fn fit_prefixes<R: AsRef<StoredDelivery>>(&mut self, mailboxes: &[&[R]]) -> Vec<usize> {
        let mut fitting = vec![0; mailboxes.len()];
        let mut open: Vec<usize> = (0..mailboxes.len()).collect();
        while !open.is_empty() {
            open.retain(|&at| {
                // A mailbox ends with its first row that does not fit: later rows must not overtake it.
                let fits = mailboxes[at].get(fitting[at]).is_some_and(|row| self.add(row.as_ref()));
                fitting[at] += usize::from(fits);
                fits
            });
        }
        fitting
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(agent: i64, seq: Seq, bytes: usize) -> StoredDelivery {
        StoredDelivery {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            agent_id: AgentId::new(agent),
            agent_name: "bob".into(),
            location: ("n".into(), None),
            seq,
            source_id: SourceId::new(seq),
            redrive_no: 0,
            mode: Mode::Wait,
            expires_at: DateTime::UNIX_EPOCH,
            settlement: None,
            sender: None,
            content: Content::Unread { kind: SourceKind::Message, bytes },
        }
    }

    #[test]
    fn recipients_of_one_message_count_its_content_once() {
        let mailboxes: Vec<Vec<_>> =
            (0..100).map(|agent| vec![row(agent, 1, 900_000), row(agent, 2, 900_000)]).collect();
        let mailboxes: Vec<&[_]> = mailboxes.iter().map(Vec::as_slice).collect();
        let fitting = ContentBudget::new(1_000_000).fit_prefixes(&mailboxes);
        assert_eq!(fitting, [1; 100], "all of them get the first message");
    }

    #[test]
    fn a_row_larger_than_the_budget_is_read_alone() {
        let (large, small) = ([row(1, 1, 900)], [row(2, 2, 1)]);
        assert_eq!(ContentBudget::new(100).fit_prefixes(&[&large, &small]), [1, 0]);
    }

    proptest! {
        /// Every read makes progress, and only its first row may exceed the budget.
        #[test]
        fn reads_fit_into_their_budget(
            sizes in proptest::collection::vec(proptest::collection::vec(0..5000usize, 1..20), 1..10),
            limit in 0..50_000usize,
        ) {
            let mut source = 0;
            let mailboxes: Vec<Vec<StoredDelivery>> = sizes.iter().zip(0..).map(|(sizes, agent)| {
                sizes.iter().map(|bytes| { source += 1; row(agent, source, *bytes) }).collect()
            }).collect();
            let mailboxes: Vec<&[_]> = mailboxes.iter().map(Vec::as_slice).collect();
            let mut budget = ContentBudget::new(limit);
            let fitting = budget.fit_prefixes(&mailboxes);
            prop_assert!(fitting[0] >= 1);
            prop_assert!(budget.used() <= limit.max(sizes[0][0] + ROW_BYTES));
            let rows: usize = fitting.iter().sum();
            let all: usize = sizes.iter().map(Vec::len).sum();
            prop_assert!(rows == all || budget.used() + 5000 + ROW_BYTES > limit);
        }
    }
}
