//! Data of events that are recorded by the transaction that causes them, in the order of their nouns.

use relay_domain::{
    AgentId, ChannelId, DeliveryId, FileId, InvocationId, JsonText, MessageId, ObserverTokenId, SessionEventId,
    SubscriptionId, mailboxes::stream::Seq,
};
use serde::Serialize;
use serde_json::Value;

use crate::field::Timestamp;

/// Data of `agent.status.*`.
#[derive(Debug, Serialize)]
pub struct AgentStatusChanged<'a> {
    /// Id of the agent.
    pub agent_id: AgentId,
    /// Name of the agent.
    pub agent_name: &'a str,
    /// Status from now on.
    pub status: &'static str,
    /// The agent with its name.
    pub agent: NamedAgent<'a>,
}

/// Agent with its name, in an event.
#[derive(Debug, Serialize)]
pub struct NamedAgent<'a> {
    /// Name of the agent.
    pub name: &'a str,
    /// Id of the agent.
    pub id: AgentId,
}

/// Data of `delivery.accepted`.
#[derive(Debug, Serialize)]
pub struct DeliveryAccepted {
    /// Id of the delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Channel as clients name it.
    pub channel_id: String,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Reason for which the recipient gets it.
    pub reason: &'static str,
    /// Position in the recipient's mailbox.
    pub seq: Seq,
}

/// Data of `delivery.failed` in the event log when a recipient's mailbox is full.
#[derive(Debug, Serialize)]
pub struct DeliveryNotWritten {
    /// Always `null`: no delivery was written.
    pub delivery_id: Option<DeliveryId>,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub target_agent_id: AgentId,
    /// Always `depth_cap`.
    pub reason: &'static str,
    /// Text of the reason.
    pub error: &'static str,
    /// Always `false`.
    pub retryable: bool,
}

/// Data of `delivery.failed` for a dead letter.
#[derive(Debug, Serialize)]
pub struct DeliveryDeadLettered<'a> {
    /// Id of the delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub target_agent_id: AgentId,
    /// Name of the recipient; `null` if it was deleted and removed.
    pub target_agent_name: Option<&'a str>,
    /// Position in the recipient's mailbox.
    pub seq: Seq,
    /// Reason of the dead letter.
    pub reason: &'static str,
    /// Error text.
    pub error: &'a str,
    /// Always `false`.
    pub retryable: bool,
}

/// Data of `delivery.delivered`.
#[derive(Debug, Serialize)]
pub struct DeliveryDelivered {
    /// Id of the delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub agent_id: AgentId,
}

/// Data of `delivery.accepted` for a delivery that a redrive by filter wrote.
#[derive(Debug, Serialize)]
pub struct RedriveAccepted {
    /// Id of the new delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Channel of the message; `null` if retention has dropped it.
    pub channel_id: Option<ChannelId>,
    /// Position in the recipient's mailbox.
    pub seq: Seq,
    /// Id of the replaced delivery.
    pub redrive_of: DeliveryId,
}

impl RedriveAccepted {
    /// Describes the delivery `id`, which replaces `redrive_of`.
    #[must_use]
    pub const fn new(id: DeliveryId, redrive_of: DeliveryId, channel_id: Option<ChannelId>, seq: Seq) -> Self {
        let message_id = id.source.message_id();
        Self { delivery_id: id, message_id, agent_id: id.agent, channel_id, seq, redrive_of }
    }
}

/// Data of `action.invoked`.
#[derive(Debug, Serialize)]
pub struct ActionInvoked<'a> {
    /// Id of the invocation.
    pub invocation_id: InvocationId,
    /// Name of the action.
    pub action_name: &'a str,
    /// Name of the caller.
    pub caller_name: &'a str,
    /// Id of the handling agent; empty if a node handles it, since typed clients require a text.
    pub handler_agent_id: String,
}

/// Data of `action.completed` and `action.failed`.
#[derive(Debug, Serialize)]
pub struct ActionEnded<'a> {
    /// Id of the invocation.
    pub invocation_id: InvocationId,
    /// Name of the action.
    pub action_name: &'a str,
    /// Status of the invocation.
    pub status: &'static str,
    /// Output of the handler: an object or `null`.
    pub output: Option<JsonText>,
    /// Error of the handler.
    pub error: Option<&'a str>,
}

/// Data of `action.denied`.
#[derive(Debug, Serialize)]
pub struct ActionDenied<'a> {
    /// Name of the action.
    pub action_name: &'a str,
    /// Name of the caller.
    pub caller_name: &'a str,
    /// Text of the refusal.
    pub error: &'a str,
}

/// Data of `access.denied`.
#[derive(Debug, Serialize)]
pub struct AccessDenied<'a> {
    /// Code of the answer.
    pub code: &'a str,
    /// Right that would permit it; null if no setting does.
    pub right: Option<&'a str>,
    /// Id of the agent that was refused.
    pub agent_id: AgentId,
    /// Name of the agent that was refused.
    pub agent_name: &'a str,
}

/// Data of `action.taken_over`.
#[derive(Debug, Serialize)]
pub struct ActionTakenOver<'a> {
    /// Name of the action.
    pub name: &'a str,
    /// Name of the agent that handles it from now on.
    pub handler_agent: Option<&'a str>,
    /// Name of the node that handles it from now on.
    pub handler_node: Option<&'a str>,
    /// Name of the agent that handled it.
    pub former_handler_agent: Option<&'a str>,
    /// Name of the node that handled it.
    pub former_handler_node: Option<&'a str>,
}

/// Data of `agent.exited`.
#[derive(Debug, Serialize)]
pub struct AgentExited<'a> {
    /// Id of the agent.
    pub agent_id: AgentId,
    /// Name of the agent.
    pub agent_name: &'a str,
    /// Node that hosted it.
    pub node_id: &'a str,
    /// Invocation that spawned it; null if none did.
    pub invocation_id: Option<InvocationId>,
    /// `released`, `deleted`, `deregistered`, `missing_from_inventory` or `node_deleted`.
    pub reason: &'a str,
}

/// Data of a report of a harness session.
#[derive(Debug, Serialize)]
pub struct SessionReported<'a> {
    /// Name of the agent.
    pub agent_name: &'a str,
    /// Id of the report, chosen by its sender.
    pub id: SessionEventId,
    /// Id of the agent.
    pub agent_id: AgentId,
    /// Content of the report.
    pub payload: &'a Value,
    /// Number of the report within the agent's session.
    pub sequence: i64,
}

/// Data of `node.registered` and `node.deleted`.
#[derive(Debug, Serialize)]
pub struct NodeEnrolled<'a> {
    /// Id of the node.
    pub node_id: &'a str,
    /// Name of the node.
    pub node_name: &'a str,
    /// Kind of the node.
    pub kind: &'static str,
    /// Role of the node.
    pub role: &'static str,
}

/// Data of `node.status.online` and `node.status.offline`.
#[derive(Debug, Serialize)]
pub struct NodePresence<'a> {
    /// Id of the node.
    pub node_id: &'a str,
    /// Name of the node.
    pub node_name: &'a str,
    /// Reason for which it is offline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
}

/// Data of `file.uploaded`.
#[derive(Debug, Serialize)]
pub struct FileUploaded<'a> {
    /// The file.
    pub file: UploadedFile<'a>,
    /// Id of the agent that uploaded it.
    pub agent_id: AgentId,
}

/// File of [`FileUploaded`].
#[derive(Debug, Serialize)]
pub struct UploadedFile<'a> {
    /// Id of the file.
    pub file_id: FileId,
    /// Name of the file.
    pub filename: &'a str,
    /// Name of the agent that uploaded it.
    pub uploaded_by: &'a str,
}

/// Data of `subscription.disabled`. Without the URL: it may contain a secret, and observers read the event.
#[derive(Debug, Serialize)]
pub struct SubscriptionDisabled<'a> {
    /// Id of the subscription.
    pub subscription_id: SubscriptionId,
    /// Reason for disabling it.
    pub reason: &'a str,
    /// Time of the first failure.
    pub failing_since: Option<Timestamp>,
}

/// Data of `token.created`, `token.rotated` and `token.revoked`.
#[derive(Debug, Serialize)]
pub struct TokenChanged<'a> {
    /// Kind of the token: workspace, agent, node or observer.
    pub token: &'static str,
    /// Originator: `workspace_key`, `agent`, `node` or `operator`.
    pub by: &'static str,
    /// Agent that the token stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
    /// Node that the token stands for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<&'a str>,
    /// Id of the observer token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observer_token_id: Option<ObserverTokenId>,
}

/// Data of `workspace.updated`.
#[derive(Debug, Serialize)]
pub struct WorkspaceUpdated<'a> {
    /// Names of the settings that the request set.
    pub settings: &'a [&'static str],
    /// Originator, as in [`TokenChanged`].
    pub by: &'static str,
}
