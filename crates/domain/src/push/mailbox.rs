//! Mailboxes of agents on http_push nodes as a worker serves them: leased, read in pages, released. Main types:
//! [`LeasedMailbox`] and [`PushRow`].

use chrono::{DateTime, Utc};

use crate::{
    AgentId, NodeId, WorkspaceScope,
    mailboxes::{StoredDelivery, stream::Seq},
};

/// Maximum number of redelivered rows, and of new rows, that one read returns per mailbox.
pub const PAGE: i64 = 50;

/// Recipient of deliveries.
pub type MailboxKey = (WorkspaceScope, AgentId);

/// Mailbox whose lease this worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasedMailbox {
    /// Workspace of the agent.
    pub scope: WorkspaceScope,
    /// Agent whose mailbox it is.
    pub agent_id: AgentId,
    /// Node of the recipient.
    pub node_id: NodeId,
    /// Name of the recipient.
    pub agent_name: String,
    /// Fences the worker's writes.
    pub epoch: i64,
    /// Push position: every row up to here has been handed over, is settled, or is deferred.
    pub pushed_seq: Seq,
    /// Recovery epoch of the claim. After a recovery the position may be that of lost rows, and is not written any
    /// more.
    pub recovery_epoch: Option<i64>,
}

impl LeasedMailbox {
    /// Returns the recipient.
    #[must_use]
    pub const fn key(&self) -> MailboxKey {
        (self.scope, self.agent_id)
    }
}

/// Release of a mailbox by its worker.
#[derive(Debug, Clone)]
pub struct MailboxRelease {
    /// The mailbox, with its push position.
    pub mailbox: LeasedMailbox,
    /// Next instant at which it is known to be due.
    pub due_at: Option<DateTime<Utc>>,
    /// `true` if new rows do not make it due before [`Self::due_at`].
    pub is_blocked: bool,
}

/// A delivery that may be due.
#[derive(Debug, Clone)]
pub struct PushRow {
    /// The delivery with the content of its request.
    pub delivery: StoredDelivery,
    /// W3C trace context of the message, if it was traced.
    pub traceparent: Option<String>,
    /// End of its deferral.
    pub available_at: Option<DateTime<Utc>>,
    /// Failed attempts so far.
    pub retry_no: i16,
    /// `true` if the consumer deferred it, `false` if a failed attempt did.
    pub is_deferred_by_consumer: bool,
    /// `true` if the push position passed it before and its deferral has ended.
    pub is_redelivery: bool,
}

impl AsRef<StoredDelivery> for PushRow {
    fn as_ref(&self) -> &StoredDelivery {
        &self.delivery
    }
}

/// Rows of one mailbox that are due.
#[derive(Debug)]
pub struct PushPage {
    /// Workspace of the mailbox.
    pub scope: WorkspaceScope,
    /// Agent whose mailbox it is.
    pub agent_id: AgentId,
    /// `true` while the worker holds the lease, the agent is on the node, and the workspace is not suspended.
    pub is_leased: bool,
    /// Earliest end of a deferral below the push position.
    pub next_redelivery_at: Option<DateTime<Utc>>,
    /// Redelivered rows, then rows above the push position, each by seq.
    pub rows: Vec<PushRow>,
    /// `true` if further rows may be due.
    pub has_more: bool,
}
