//! [`Delivery`]: one delivery as its recipient sees it. Read by storage, shown by the delivery routes.

use chrono::{DateTime, Utc};

use super::{
    dead_letter::DeadLetterReason,
    delivery::{DeliveryState, Mode, Reason, Settlement, SettlementRequest, derive_state},
    stream::Seq,
};
use crate::{
    AgentId, ChannelId, ConversationId, DeliveryId, MessageId, NodeId,
    channels::client_channel_id,
    nodes::{NodeKind, NodeRole},
};

/// A delivery with its settlement, its node and its message.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    /// Id, which names the source and the recipient.
    pub id: DeliveryId,
    /// Position in the recipient's mailbox.
    pub seq: Seq,
    /// Channel of the message.
    pub channel_id: Option<ChannelId>,
    /// Conversation of the message.
    pub conversation_id: Option<ConversationId>,
    /// Node of the agent when the delivery was written.
    pub node_id: NodeId,
    /// Current properties of that node; `None` for an implicit direct node without a token.
    pub node: Option<DeliveryNode>,
    /// Requested injection mode.
    pub mode: Mode,
    /// Reason for the delivery.
    pub written_for: Reason,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
    /// End of the delivery's lifetime.
    pub expires_at: DateTime<Utc>,
    /// Highest seq of the mailbox recorded as written to a socket.
    pub sent_seq: Seq,
    /// Ack floor of the mailbox.
    pub ack_floor: Seq,
    /// Time when the ack floor passed the delivery, to the second.
    pub floor_acked_at: Option<DateTime<Utc>>,
    /// Decision of the recipient or the engine about this delivery alone.
    pub settlement: Option<SettlementRecord>,
    /// Attempts so far; `http_push` nodes only.
    pub attempt_count: Option<i32>,
    /// Time of the first successful attempt; `http_push` nodes only.
    pub handed_over_at: Option<DateTime<Utc>>,
    /// `None` if the source is not a message, or retention has dropped it.
    pub message: Option<DeliveryMessage>,
}

/// Settlement of one delivery apart from the floors of its mailbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettlementRecord {
    /// The settlement itself.
    pub state: Settlement,
    /// Time of the settlement.
    pub at: DateTime<Utc>,
    /// Error of a failure or a dead letter.
    pub error: Option<String>,
    /// True if the recipient considers another attempt useful.
    pub retryable: Option<bool>,
    /// Reason of a deferral or a dead letter.
    pub reason: Option<String>,
    /// End of a deferral.
    pub available_at: Option<DateTime<Utc>>,
    /// Failures so far, if it is deferred because of them.
    pub retry_no: i16,
    /// Seq of the delivery that replaced it.
    pub redriven_seq: Option<Seq>,
}

/// Node of a delivery, as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryNode {
    pub kind: NodeKind,
    pub role: NodeRole,
    /// Adapter that deliveries use.
    pub adapter: String,
}

/// Message of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryMessage {
    /// Id of the author.
    pub agent_id: AgentId,
    /// Name of the author.
    pub agent_name: String,
    /// Address that the author of a direct message had.
    pub from_address: Option<String>,
    /// Text of the message; empty in lists until it is read.
    pub text: String,
    /// Root of the thread, for replies.
    pub thread_id: Option<MessageId>,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
}

impl Delivery {
    /// Derives the state that the recipient sees.
    #[must_use]
    pub fn state(&self) -> DeliveryState {
        let settlement = self.settlement.as_ref();
        let state =
            derive_state(self.seq, self.sent_seq, self.ack_floor, settlement.map(|settlement| settlement.state));
        let is_rejected = settlement
            .is_some_and(|settlement| settlement.reason.as_deref() == Some(DeadLetterReason::Rejected.as_str()));
        if state == DeliveryState::DeadLettered && is_rejected {
            // A dead letter to operators, but a failure to the recipient that rejected it (docs/protocol/rest.md,
            // "Delivery transitions").
            return DeliveryState::Failed;
        }
        state
    }

    /// Returns the settlement if the delivery is queued because of it.
    fn deferral(&self) -> Option<&SettlementRecord> {
        self.settlement
            .as_ref()
            .filter(|settlement| settlement.state == Settlement::Deferred && self.state() == DeliveryState::Queued)
    }

    /// Returns the reason for the delivery, or for its deferral.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self.deferral() {
            // A delivery that comes back after a failure was not deferred by its recipient.
            Some(deferral) if !self.is_retry() && !self.is_requeued() => deferral.reason.as_deref(),
            Some(_) | None => Some(self.written_for.as_str()),
        }
    }

    /// True if it comes back because its consumer failed it as retryable.
    #[must_use]
    pub fn is_requeued(&self) -> bool {
        self.deferral().is_some_and(|deferral| deferral.retryable == Some(true))
    }

    /// True if it comes back because an attempt has failed.
    #[must_use]
    pub fn is_retry(&self) -> bool {
        self.deferral().is_some_and(|deferral| deferral.retry_no > 0 && deferral.retryable.is_none())
    }

    /// Returns the time of the acknowledgement; `None` unless it is acknowledged, or where no time was kept.
    #[must_use]
    pub fn acked_at(&self) -> Option<DateTime<Utc>> {
        if self.state() != DeliveryState::Acked {
            return None;
        }
        let own = self.settlement.as_ref().filter(|settlement| settlement.state == Settlement::Acked);
        own.map(|settlement| settlement.at).or(self.floor_acked_at)
    }

    /// Returns the delivery that replaced it in the same mailbox.
    #[must_use]
    pub fn redriven_as(&self) -> Option<DeliveryId> {
        let redriven = self.settlement.as_ref()?.redriven_seq;
        redriven.map(|_| DeliveryId { redrive_no: self.id.redrive_no + 1, ..self.id })
    }

    /// Returns the channel id that clients see.
    #[must_use]
    pub fn client_channel_id(&self) -> Option<String> {
        let conversation = self.conversation_id.as_ref().map(ConversationId::as_str);
        self.channel_id.map(|id| client_channel_id(id, conversation))
    }
}

/// Position of one agent's mailbox.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Mailbox {
    pub agent_id: AgentId,
    #[cfg_attr(feature = "sqlx", sqlx(rename = "name"))]
    pub agent_name: String,
    /// Seq of the newest delivery; 0 if there is none.
    pub last_seq: Seq,
    pub ack_floor: Seq,
    pub settled_floor: Seq,
}

/// Report of a recipient about one of its deliveries.
#[derive(Debug, Clone)]
pub enum DeliveryReport {
    Ack,
    Fail {
        error: Option<String>,
        /// `Some(true)`: the delivery is retried, in place on http_push and poll nodes and as a new delivery on ws
        /// nodes, whose brokers drop ids that they have seen. `Some(false)`: it becomes a dead letter. `None`: the
        /// failure is recorded only.
        retryable: Option<bool>,
    },
    Defer {
        available_at: DateTime<Utc>,
        reason: Option<String>,
    },
}

impl DeliveryReport {
    /// Returns the request that the rules of settling decide on.
    #[must_use]
    pub const fn request(&self) -> SettlementRequest {
        match self {
            Self::Ack => SettlementRequest::Ack,
            Self::Fail { .. } => SettlementRequest::Fail,
            Self::Defer { .. } => SettlementRequest::Defer,
        }
    }
}
