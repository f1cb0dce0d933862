//! [`StoredDelivery`]: a delivery with the content of its frame. Read by storage, encoded by `relay-wire`.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::{
    delivery::{Mode, Settlement},
    stream::Seq,
};
use crate::{AgentId, DeliveryId, WorkspaceScope, messages::Message};

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
    pub source_id: i64,
    /// 0 for the original.
    pub redrive_no: i16,
    /// Requested injection mode.
    pub mode: Mode,
    /// End of its lifetime.
    pub expires_at: DateTime<Utc>,
    /// Decision about this delivery alone.
    pub settlement: Option<Settlement>,
    /// `None` for an invocation outcome, and once retention has dropped the message.
    pub message: Option<Message>,
    /// Event kind and data of an invocation outcome.
    pub outcome: Option<(Cow<'static, str>, Value)>,
}

impl StoredDelivery {
    /// Returns the id of the delivery.
    #[must_use]
    pub const fn id(&self) -> DeliveryId {
        DeliveryId { source: self.source_id, agent: self.agent_id, redrive_no: self.redrive_no }
    }
}
