//! Data of events: the same object in the event log, in `context.update` frames, in http_push calls and in calls of
//! subscriptions. Message events are an exception: their data is the message itself.

use relay_domain::{AgentId, ChannelId, ConversationId, DeliveryId, MessageId, WebhookId, mailboxes::stream::Seq};
use serde::Serialize;
use serde_json::Value;

use crate::field::Timestamp;

/// Data of `message.reacted`.
#[derive(Debug, Serialize)]
pub struct MessageReacted<'a> {
    /// Id of the message.
    pub message_id: MessageId,
    /// Emoji or its shortcode.
    pub emoji: &'a str,
    /// Name of the agent that reacted.
    pub agent_name: &'a str,
    /// Id of the agent that reacted.
    pub agent_id: AgentId,
    /// `added` or `removed`.
    pub action: &'a str,
    /// Conversation of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<&'a ConversationId>,
    /// Name of the message's channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<&'a str>,
    /// The same: published clients differ in the name that they read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_name: Option<&'a str>,
    /// Id of the message's channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_id: Option<ChannelId>,
}

/// Data of `message.updated`, as sockets receive it.
#[derive(Debug, Serialize)]
pub struct MessageUpdated<'a> {
    /// Id of the message.
    pub id: MessageId,
    /// Name of its channel.
    pub channel_name: &'a str,
    /// Id of the author.
    pub agent_id: AgentId,
    /// Name of the author.
    pub agent_name: &'a str,
    /// The same, as older clients read it.
    pub from_name: &'a str,
    /// Text after the change.
    pub text: &'a str,
    /// Conversation of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<&'a ConversationId>,
}

/// Data of `message.read`.
#[derive(Debug, Serialize)]
pub struct MessageRead<'a> {
    /// Id of the message.
    pub message_id: MessageId,
    /// Name of the reader.
    pub agent_name: &'a str,
    /// Id of the reader.
    pub agent_id: AgentId,
    /// Time of the first read.
    pub read_at: Timestamp,
}

/// Data of `delivery.failed`, as the sender receives it when a recipient's mailbox is full.
#[derive(Debug, Serialize)]
pub struct DeliveryRefused<'a> {
    /// Always `null`: no delivery was written.
    pub delivery_id: Option<&'a str>,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub target_agent_id: AgentId,
    /// Name of the recipient.
    pub target_agent_name: Option<&'a str>,
    /// Stable word for the reason.
    pub reason: &'a str,
    /// The reason as a text.
    pub error: &'a str,
    /// Whether a repetition may succeed.
    pub retryable: bool,
}

/// Data of `webhook.received`.
#[derive(Debug, Serialize)]
pub struct WebhookReceived<'a> {
    /// Id of the webhook.
    pub webhook_id: WebhookId,
    /// Name of its channel.
    pub channel: &'a str,
    /// The message that the call became.
    pub message: WebhookMessage<'a>,
}

/// Message of [`WebhookReceived`].
#[derive(Debug, Serialize)]
pub struct WebhookMessage<'a> {
    /// Id of the message; the commit fills it in.
    pub id: Option<MessageId>,
    /// Text of the message.
    pub text: &'a str,
    /// Source that the caller named.
    pub source: Option<&'a str>,
    /// Name of the author.
    pub author: &'a str,
}

/// Data of `channel.created` and `channel.updated`.
#[derive(Debug, Serialize)]
pub struct ChannelChanged<'a> {
    /// Channel after the change.
    pub channel: ChannelWithTopic<'a>,
}

/// Channel of [`ChannelChanged`].
#[derive(Debug, Serialize)]
pub struct ChannelWithTopic<'a> {
    /// Name of the channel.
    pub name: &'a str,
    /// Topic of the channel.
    pub topic: Option<&'a str>,
}

/// Data of `channel.archived`.
#[derive(Debug, Serialize)]
pub struct ChannelArchived<'a> {
    /// Channel after the change.
    pub channel: ChannelName<'a>,
}

/// Channel of [`ChannelArchived`].
#[derive(Debug, Serialize)]
pub struct ChannelName<'a> {
    /// Name of the channel.
    pub name: &'a str,
}

/// Data of `member.*` events of a channel.
#[derive(Debug, Serialize)]
pub struct MemberChanged<'a> {
    /// Name of the channel.
    pub channel: &'a str,
    /// Name of the member.
    pub agent_name: &'a str,
    /// Id of the member.
    pub agent_id: AgentId,
}

/// Data of `member.*` events of a conversation.
#[derive(Debug, Serialize)]
pub struct ParticipantChanged<'a> {
    /// Id of the conversation.
    pub conversation_id: &'a str,
    /// Name of its backing channel.
    pub channel: &'a str,
    /// Name of the participant.
    pub agent_name: &'a str,
    /// Id of the participant.
    pub agent_id: AgentId,
}

/// Data of `action.registered`.
#[derive(Debug, Serialize)]
pub struct ActionDefined<'a> {
    /// Name of the action.
    pub name: &'a str,
    /// Description for callers.
    pub description: &'a str,
    /// Name of the agent that handles it.
    pub handler_agent: Option<&'a str>,
    /// Name of the node that handles it.
    pub handler_node: Option<&'a str>,
}

/// Data of `node.binding.disabled`.
#[derive(Debug, Serialize)]
pub struct BindingDisabled<'a> {
    /// Id of the node.
    pub node_id: &'a str,
    /// Id of the agent that is no longer called.
    pub agent_id: AgentId,
    /// Name of that agent.
    pub agent_name: &'a str,
    /// The endpoint's last answer.
    pub reason: &'a str,
}

/// Data of `delivery.deferred`, and of `delivery.failed` after a recipient's report. Absent fields do not apply.
#[derive(Debug, Serialize)]
pub struct DeliveryReported<'a> {
    /// Id of the delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Time of the next delivery.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_at: Option<Timestamp>,
    /// Reason for which it was deferred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// Error that the recipient reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    /// `true` if the recipient expects that a repetition may succeed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retryable: Option<bool>,
    /// Delivery that replaces this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redriven_as: Option<DeliveryId>,
    /// Fields of a dead letter, which have precedence.
    #[serde(flatten)]
    pub dead_letter: Option<Value>,
}

impl DeliveryReported<'_> {
    /// Names the delivery, without any result.
    #[must_use]
    pub fn new(id: DeliveryId) -> Self {
        Self {
            delivery_id: id,
            message_id: id.source.message_id(),
            agent_id: id.agent,
            available_at: None,
            reason: None,
            error: None,
            retryable: None,
            redriven_as: None,
            dead_letter: None,
        }
    }
}

/// Data of `delivery.accepted` for a delivery that replaces another.
#[derive(Debug, Serialize)]
pub struct DeliveryRedriven {
    /// Id of the new delivery.
    pub delivery_id: DeliveryId,
    /// Id of the message.
    pub message_id: MessageId,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Position of the new delivery in the recipient's mailbox.
    pub seq: Seq,
    /// Id of the replaced delivery.
    pub redrive_of: DeliveryId,
    /// Channel of the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_id: Option<ChannelId>,
}
