//! Payloads of messages in deliveries: `{type, data}`, the same in `deliver` frames, push requests and subscription
//! calls.

use relay_domain::{
    ConversationId, JsonText,
    channels::ChannelKind,
    messages::{Message, client_metadata, from_address},
};
use serde::Serialize;
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};

use crate::field::Timestamp;

/// Payload of a delivery.
#[derive(Serialize)]
pub(crate) struct Payload<'a, T> {
    #[serde(rename = "type")]
    pub(crate) kind: &'a str,
    pub(crate) data: T,
}

/// Fields of all messages, in channels, threads and conversations.
#[derive(Serialize)]
struct CommonFields<'a> {
    id: &'a str,
    agent_name: &'a str,
    from_name: &'a str,
    text: &'a str,
    metadata: &'a JsonText,
    created_at: Timestamp,
}

/// Data of `message.created` and `thread.reply`.
#[derive(Serialize)]
pub(crate) struct ChannelData<'a> {
    #[serde(flatten)]
    common: CommonFields<'a>,
    channel_id: String,
    channel_name: &'a str,
    agent_id: &'a str,
    blocks: Option<&'a JsonText>,
    has_attachments: bool,
    thread_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    conversation_id: Option<&'a str>,
    /// Sender's address, of a thread reply in a conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    from_address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mentions: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attachments: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    injection_mode: Option<&'a str>,
}

/// Data of `dm.received` and `group_dm.received`. Some clients read the nested message, others the flat copies: both
/// are sent.
#[derive(Serialize)]
pub(crate) struct ConversationData<'a> {
    #[serde(flatten)]
    common: CommonFields<'a>,
    conversation_id: Option<&'a str>,
    message: NestedMessage<'a>,
    injection_mode: &'a str,
    attachments: &'a Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_agent_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_id: Option<&'a str>,
}

#[derive(Serialize)]
struct NestedMessage<'a> {
    id: &'a str,
    agent_id: &'a str,
    agent_name: &'a str,
    text: &'a str,
    injection_mode: &'a str,
    attachments: &'a Value,
    metadata: &'a JsonText,
}

/// Payload data, by the place of the message.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum MessageData<'a> {
    /// Channel or thread.
    Channel(ChannelData<'a>),
    Conversation(ConversationData<'a>),
}

/// Message as one recipient sees it, to be encoded on its own or as a part of a larger body.
///
/// Only a one-to-one conversation names its recipient; all others share one payload.
pub(crate) struct MessageView<'a> {
    message: &'a Message,
    recipient: &'a str,
    id: String,
    author: String,
    metadata: JsonText,
}

impl<'a> MessageView<'a> {
    /// Creates the view of `recipient`.
    pub(crate) fn new(message: &'a Message, recipient: &'a str) -> Self {
        let (id, author) = (message.id.to_string(), message.agent_id.to_string());
        Self { message, recipient, id, author, metadata: client_metadata(&message.metadata) }
    }

    /// Returns the payload's type.
    pub(crate) fn kind(&self) -> &'static str {
        self.message.event_kind()
    }

    /// Returns the payload's data.
    pub(crate) fn data(&self) -> MessageData<'_> {
        let message = self.message;
        let common = CommonFields {
            id: &self.id,
            agent_name: &message.agent_name,
            from_name: &message.agent_name,
            text: &message.text,
            metadata: &self.metadata,
            created_at: message.created_at.into(),
        };
        let conversation_id = message.conversation_id.as_ref().map(ConversationId::as_str);
        if message.thread_id.is_none() && message.channel_kind.is_conversation() {
            let direct = message.channel_kind == ChannelKind::Direct;
            let nested = NestedMessage {
                id: &self.id,
                agent_id: &self.author,
                agent_name: &message.agent_name,
                text: &message.text,
                injection_mode: message.mode.as_str(),
                attachments: &message.attachments,
                metadata: &self.metadata,
            };
            return MessageData::Conversation(ConversationData {
                common,
                conversation_id,
                message: nested,
                injection_mode: message.mode.as_str(),
                attachments: &message.attachments,
                from_address: from_address(&message.metadata),
                from_agent_id: direct.then_some(&self.author),
                to: direct.then_some(self.recipient),
                agent_id: (!direct).then_some(&self.author),
            });
        }
        // Replies lack some fields of `message.created` (docs/protocol/node.md, "Channel messages").
        let root = message.thread_id.is_none();
        MessageData::Channel(ChannelData {
            common,
            channel_id: message.client_channel_id(),
            channel_name: &message.channel_name,
            agent_id: &self.author,
            blocks: message.blocks.as_ref(),
            has_attachments: message.has_attachments(),
            thread_id: message.thread_id.map(|id| id.to_string()),
            conversation_id,
            from_address: conversation_id.and_then(|_| from_address(&message.metadata)),
            mentions: root.then_some(message.mentions.as_slice()),
            attachments: root.then_some(&message.attachments),
            injection_mode: root.then_some(message.mode.as_str()),
        })
    }
}

/// Encodes the payload `{type, data}` of a message for one recipient.
#[must_use]
pub fn payload(message: &Message, recipient: &str) -> Box<RawValue> {
    let shown = MessageView::new(message, recipient);
    // Strings, numbers and JSON values always encode.
    to_raw_value(&Payload { kind: shown.kind(), data: shown.data() }).unwrap_or_default()
}
