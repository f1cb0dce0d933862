//! What a node sees of a delivery: the `deliver` frame and its payload.
//!
//! Live frames and replayed ones come from here and from the same row type, so that nobody can tell
//! them apart.

use bytes::Bytes;
use relay_domain::{AgentId, DeliveryId, delivery::Mode};
use relay_store::{MessageRow, replay::StoredDelivery};
use serde::Serialize;
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};

use crate::render::{channel_id, metadata, timestamp};

/// Largest encoded `deliver` frame, in bytes. The smallest client limit on a frame is 1 MiB; the rest
/// is room for what the transport adds.
pub const FRAME_LIMIT: usize = 900 * 1024;

/// A `deliver` frame, exactly as it is written.
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

/// What all messages show, in channels, threads and conversations.
#[derive(Serialize)]
struct Common<'a> {
    id: &'a str,
    agent_name: &'a str,
    from_name: &'a str,
    text: &'a str,
    metadata: &'a Value,
    created_at: String,
}

/// `message.created` and `thread.reply`.
#[derive(Serialize)]
pub(crate) struct InChannel<'a> {
    #[serde(flatten)]
    common: Common<'a>,
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

/// `dm.received` and `group_dm.received`. Some clients read the nested message, others the flat copies:
/// both are sent.
#[derive(Serialize)]
pub(crate) struct InConversation<'a> {
    #[serde(flatten)]
    common: Common<'a>,
    conversation_id: Option<&'a str>,
    message: Nested<'a>,
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
struct Nested<'a> {
    id: &'a str,
    agent_id: &'a str,
    agent_name: &'a str,
    text: &'a str,
    injection_mode: &'a str,
    attachments: &'a Value,
    metadata: &'a Value,
}

/// What a payload's `data` is, by where its message was posted.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Data<'a> {
    /// A channel or a thread.
    Channel(InChannel<'a>),
    /// A conversation.
    Conversation(InConversation<'a>),
}

/// A message as one recipient is to see it, to be encoded on its own or as a part of something larger.
///
/// Only a one-to-one conversation names its recipient; all others share one payload.
pub(crate) struct Shown<'a> {
    message: &'a MessageRow,
    recipient: &'a str,
    id: String,
    author: String,
    metadata: Value,
}

impl<'a> Shown<'a> {
    /// A message for `recipient`.
    pub(crate) fn new(message: &'a MessageRow, recipient: &'a str) -> Self {
        let (id, author) = (message.message_id.to_string(), message.agent_id.to_string());
        Self { message, recipient, id, author, metadata: metadata(&message.metadata) }
    }

    /// The payload's type.
    pub(crate) fn kind(&self) -> &'static str {
        match (self.message.thread_id, self.message.channel_type) {
            (None, 1) => "dm.received",
            (None, 2) => "group_dm.received",
            (None, _) => "message.created",
            (Some(_), _) => "thread.reply",
        }
    }

    /// The payload's data.
    pub(crate) fn data(&self) -> Data<'_> {
        let message = self.message;
        let common = Common {
            id: &self.id,
            agent_name: &message.agent_name,
            from_name: &message.agent_name,
            text: &message.text,
            metadata: &self.metadata,
            created_at: timestamp(message.created_at),
        };
        if message.thread_id.is_none() && matches!(message.channel_type, 1 | 2) {
            let direct = message.channel_type == 1;
            let nested = Nested {
                id: &self.id,
                agent_id: &self.author,
                agent_name: &message.agent_name,
                text: &message.text,
                injection_mode: &message.mode,
                attachments: &message.attachments,
                metadata: &self.metadata,
            };
            return Data::Conversation(InConversation {
                common,
                conversation_id: message.conversation_id.as_deref(),
                message: nested,
                injection_mode: &message.mode,
                attachments: &message.attachments,
                from_agent_id: direct.then_some(&self.author),
                to: direct.then_some(self.recipient),
                agent_id: (!direct).then_some(&self.author),
            });
        }
        let root = message.thread_id.is_none();
        Data::Channel(InChannel {
            common,
            channel_id: channel_id(message),
            channel_name: &message.channel_name,
            agent_id: &self.author,
            blocks: message.blocks.as_ref(),
            has_attachments: message.attachments.as_array().is_some_and(|list| !list.is_empty()),
            thread_id: message.thread_id.map(|id| id.to_string()),
            conversation_id: message.conversation_id.as_deref(),
            mentions: root.then_some(message.mentions.as_slice()),
            attachments: root.then_some(&message.attachments),
            injection_mode: root.then_some(&message.mode),
        })
    }
}

/// The payload `{type, data}` of a message for one recipient, as JSON text.
#[must_use]
pub fn payload(message: &MessageRow, recipient: &str) -> Box<RawValue> {
    let shown = Shown::new(message, recipient);
    // Strings, numbers and JSON values always encode.
    to_raw_value(&Payload { kind: shown.kind(), data: shown.data() }).unwrap_or_default()
}

/// The id by which recipients know a delivered message: a redriven one is a new message to brokers, which remember
/// ids.
#[must_use]
pub fn message_id(id: &DeliveryId) -> String {
    if id.redrive_no == 0 { id.source.to_string() } else { format!("{}_r{}", id.source, id.redrive_no) }
}

/// The `deliver` frame of a row.
#[must_use]
pub fn deliver_frame(id: DeliveryId, agent: &str, seq: i64, mode: Mode, payload: &RawValue) -> Bytes {
    let msg_id = message_id(&id);
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

/// The frame that stands in for a seq that will never be delivered (contract: node.md 6.7 A).
///
/// Its type is one that no client surfaces; its message id is its own, since brokers remember ids.
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

/// The frame of a row read back from the store; `None` when its message is gone, so that a tombstone
/// takes its place.
#[must_use]
pub fn stored_frame(row: &StoredDelivery) -> Option<Bytes> {
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    let mode = Mode::from_code(row.mode).unwrap_or_default();
    let payload = match (&row.message, &row.outcome) {
        (Some(message), _) => payload(message, &row.agent_name),
        // Strings and JSON values always encode.
        (None, Some((kind, data))) => to_raw_value(&Payload { kind, data }).unwrap_or_default(),
        (None, None) => return None,
    };
    Some(deliver_frame(id, &row.agent_name, row.seq, mode, &payload))
}

fn encode(frame: &Deliver<'_>) -> Bytes {
    // Strings, numbers and raw JSON always encode.
    serde_json::to_vec(frame).unwrap_or_default().into()
}
