//! Batches of sends as the committer submits them ([`Batch`]), and their outcomes ([`BatchOutcome`], [`BatchError`]).

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, BatchId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
    messages::Message,
};

use crate::{
    StoreError,
    events::{Event, RecordedEvents},
};

/// One recipient of a message.
#[derive(Debug, Clone)]
pub struct NewRecipient {
    pub agent_id: AgentId,
    pub mode: Mode,
    pub reason: Reason,
}

/// Idempotency key of a request. A retry with the same key gets the first response.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// SHA-256 over actor, operation, target and key.
    pub hash: Vec<u8>,
    /// SHA-256 over the request.
    pub fingerprint: Vec<u8>,
}

/// One request of a batch, with the facts that it was resolved with. The transaction checks them again.
#[derive(Debug, Clone)]
pub struct NewSend {
    pub scope: WorkspaceScope,
    /// Its id and `created_at` are assigned before the transaction, so that a resubmitted batch writes the same rows.
    pub message: Message,
    /// In any order, without the sender.
    pub recipients: Vec<NewRecipient>,
    /// The channel's membership version that `recipients` was resolved from.
    pub members_version: i64,
    /// The token generation that the sender was authenticated with; `None` for a post by a node.
    pub token_generation: Option<i64>,
    /// The sender is an internal agent, which is deleted from its creation on: its liveness is not checked.
    pub hidden_sender: bool,
    /// Present when the caller sent an idempotency key.
    pub key: Option<NewKey>,
    /// Lifetime of its deliveries in milliseconds; `None`: the workspace's delivery TTL.
    pub ttl_ms: Option<i64>,
    /// W3C trace context of the request; spans of later processing become its children.
    pub traceparent: Option<String>,
    /// Further events to record with the message's own. A `message.id` of null in one of them is replaced by
    /// the id of the message.
    pub events: Vec<Event>,
}

/// A batch of sends. Its content is fixed before its transaction, so that it can be submitted again.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Unique key of the outbox row; identifies a resubmitted batch.
    pub id: BatchId,
    /// The gateway that publishes it after the commit.
    pub gateway_id: GatewayId,
    /// W3C trace context of the batch.
    pub traceparent: Option<String>,
    pub sends: Vec<NewSend>,
}

/// A committed delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenDelivery {
    pub seq: Seq,
    /// The recipient's node at commit.
    pub node_id: NodeId,
    /// The provider that the recipient was bound to at commit.
    pub provider: Option<ProviderName>,
    pub expires_at: DateTime<Utc>,
}

/// Outcome of one request of a batch.
#[derive(Debug, Clone)]
pub enum SendOutcome {
    /// Committed. One entry per recipient, in the request's order; `None`: its mailbox is full.
    Committed(Vec<Option<WrittenDelivery>>),
    /// The key was used before for the same request; carries the first response.
    Replayed { response: serde_json::Value },
    /// The key was used before for another request.
    KeyReused,
    /// The facts that the request was resolved with have changed. Nothing was written; resolve it again.
    Stale,
}

/// Outcome of a batch.
#[derive(Debug)]
pub struct BatchOutcome {
    /// One per request, in order.
    pub sends: Vec<SendOutcome>,
    /// The recorded events. Empty for a batch that was committed by an earlier submission.
    pub events: Vec<RecordedEvents>,
}

/// Failure of a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Nothing was committed.
    #[error("the batch was not committed")]
    NotCommitted(#[source] StoreError),
    /// The connection was lost during the COMMIT. Submitting the same batch again gives the outcome.
    #[error("commit outcome of the batch unknown")]
    Unknown(#[source] StoreError),
}
