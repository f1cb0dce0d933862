//! Payloads of deliveries: the `deliver` frame and its contents.
//!
//! Live frames and replayed ones come from the same functions and row type, so that they are identical.

use bytes::Bytes;
use relay_domain::{
    AgentId, ConversationId, DeliveryId,
    channels::ChannelKind,
    mailboxes::delivery::Mode,
    messages::{Message, client_metadata},
};
use relay_store::mailboxes::replay::StoredDelivery;
use serde::Serialize;
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};

use crate::messages::render::timestamp;

/// Largest encoded `deliver` frame, in bytes. The smallest client limit on a frame is 1 MiB; the rest is room for the
/// transport's overhead.
pub const FRAME_LIMIT: usize = 900 * 1024;

/// `deliver` frame as it is written.
#[derive(Serialize)]
struct Deliver<'a> {
    v: u8,
    #[serde(rename = "type")]
    kind: &'static str,
    delivery_id: &'a str,
    agent_id: String,
    agent: &'a str,
    msg_id: String,
    seq: i64,
    mode: &'a str,
    payload: &'a RawValue,
}

#[derive(Serialize)]
struct Payload<'a, T> {
    #[serde(rename = "type")]
    kind: &'a str,
    data: T,
}

/// Fields of all messages, in channels, threads and conversations.
#[derive(Serialize)]
struct CommonFields<'a> {
    id: &'a str,
    agent_name: &'a str,
    from_name: &'a str,
    text: &'a str,
    metadata: &'a Value,
    created_at: String,
}

/// Data of `message.created` and `thread.reply`.
#[derive(Serialize)]
pub(crate) struct ChannelData<'a> {
    #[serde(flatten)]
    common: CommonFields<'a>,
    channel_id: String,
    channel_name: &'a str,
    agent_id: &'a str,
    blocks: Option<&'a Value>,
    has_attachments: bool,
    thread_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    conversation_id: Option<&'a str>,
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
    metadata: &'a Value,
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
    metadata: Value,
}

impl<'a> MessageView<'a> {
    /// Creates the view of `recipient`.
    pub(crate) fn new(message: &'a Message, recipient: &'a str) -> Self {
        let (id, author) = (message.id.to_string(), message.agent_id.to_string());
        Self { message, recipient, id, author, metadata: Value::Object(client_metadata(&message.metadata)) }
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
            created_at: timestamp(message.created_at),
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
                from_agent_id: direct.then_some(&self.author),
                to: direct.then_some(self.recipient),
                agent_id: (!direct).then_some(&self.author),
            });
        }
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

/// Returns the message id for recipients. A redriven delivery has a new one, since brokers remember ids.
#[must_use]
pub fn delivered_message_id(id: &DeliveryId) -> String {
    if id.redrive_no == 0 { id.source.to_string() } else { format!("{}_r{}", id.source, id.redrive_no) }
}

/// Encodes the `deliver` frame of a row.
#[must_use]
pub fn deliver_frame(id: DeliveryId, agent: &str, seq: i64, mode: Mode, payload: &RawValue) -> Bytes {
    let msg_id = delivered_message_id(&id);
    encode(&Deliver {
        v: 1,
        kind: "deliver",
        delivery_id: &id.to_string(),
        agent_id: id.agent.to_string(),
        agent,
        msg_id,
        seq,
        mode: mode.as_str(),
        payload,
    })
}

/// Encodes the tombstone of a seq that will never be delivered (docs/protocol/node.md, "Tombstones").
///
/// Clients do not surface its type; its message id is its own, since brokers remember ids.
#[must_use]
pub fn tombstone_frame(agent_id: AgentId, agent: &str, seq: i64) -> Bytes {
    let id = format!("tomb_{agent_id}_{seq}");
    let payload = RawValue::from_string(r#"{"type":"delivery.expired","data":{}}"#.to_owned()).unwrap_or_default();
    encode(&Deliver {
        v: 1,
        kind: "deliver",
        delivery_id: &id,
        agent_id: agent_id.to_string(),
        agent,
        msg_id: id.clone(),
        seq,
        mode: Mode::Wait.as_str(),
        payload: &payload,
    })
}

/// Encodes the frame of a stored row; `None` when its message is no longer kept, so that a tombstone takes its place.
#[must_use]
pub fn stored_frame(row: &StoredDelivery) -> Option<Bytes> {
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    let payload = match (&row.message, &row.outcome) {
        (Some(message), _) => payload(message, &row.agent_name),
        // Strings and JSON values always encode.
        (None, Some((kind, data))) => to_raw_value(&Payload { kind, data }).unwrap_or_default(),
        (None, None) => return None,
    };
    Some(deliver_frame(id, &row.agent_name, row.seq, row.mode, &payload))
}

fn encode(frame: &Deliver<'_>) -> Bytes {
    // Strings, numbers and raw JSON always encode.
    serde_json::to_vec(frame).unwrap_or_default().into()
}
