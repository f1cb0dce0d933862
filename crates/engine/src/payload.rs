//! What a node sees of a delivery: the `deliver` frame and its payload.
//!
//! Live frames and replayed ones come from here and from the same row type, so that nobody can tell
//! them apart.

use bytes::Bytes;
use relay_domain::{AgentId, DeliveryId, delivery::Mode};
use relay_store::{MessageRow, replay::StoredDelivery};
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};

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

/// The payload `{type, data}` of a message for one recipient, as JSON text.
///
/// Only a one-to-one conversation names its recipient; all others share one payload.
#[must_use]
pub fn payload(message: &MessageRow, recipient: &str) -> Box<RawValue> {
    let value = if message.thread_id.is_some() { thread_reply(message) } else { root(message, recipient) };
    // A value that came from JSON goes back to it.
    RawValue::from_string(value.to_string()).unwrap_or_default()
}

fn has_attachments(message: &MessageRow) -> bool {
    message.attachments.as_array().is_some_and(|list| !list.is_empty())
}

fn thread_reply(message: &MessageRow) -> Value {
    let mut data = json!({
        "id": message.message_id.to_string(),
        "channel_id": channel_id(message),
        "channel_name": message.channel_name,
        "agent_id": message.agent_id.to_string(),
        "agent_name": message.agent_name,
        "from_name": message.agent_name,
        "thread_id": message.thread_id.map(|id| id.to_string()),
        "text": message.text,
        "blocks": message.blocks,
        "metadata": metadata(&message.metadata),
        "has_attachments": has_attachments(message),
        "created_at": timestamp(message.created_at),
    });
    if let (Some(conversation), Some(data)) = (&message.conversation_id, data.as_object_mut()) {
        data.insert("conversation_id".to_owned(), json!(conversation));
    }
    json!({ "type": "thread.reply", "data": data })
}

fn root(message: &MessageRow, recipient: &str) -> Value {
    let id = message.message_id.to_string();
    let author = message.agent_id.to_string();
    let created_at = timestamp(message.created_at);
    if message.channel_type == 0 {
        let data = json!({
            "id": id,
            "channel_id": channel_id(message),
            "channel_name": message.channel_name,
            "agent_id": author,
            "agent_name": message.agent_name,
            "from_name": message.agent_name,
            "text": message.text,
            "blocks": message.blocks,
            "metadata": metadata(&message.metadata),
            "has_attachments": has_attachments(message),
            "thread_id": null,
            "created_at": created_at,
            "mentions": message.mentions,
            "attachments": message.attachments,
            "injection_mode": message.mode,
        });
        return json!({ "type": "message.created", "data": data });
    }
    // Some clients read the nested message, others the flat copies: both are sent.
    let mut data = json!({
        "conversation_id": message.conversation_id,
        "message": {
            "id": id,
            "agent_id": author,
            "agent_name": message.agent_name,
            "text": message.text,
            "injection_mode": message.mode,
            "attachments": message.attachments,
            "metadata": metadata(&message.metadata),
        },
        "id": id,
        "text": message.text,
        "injection_mode": message.mode,
        "attachments": message.attachments,
        "metadata": metadata(&message.metadata),
        "from_name": message.agent_name,
        "agent_name": message.agent_name,
        "created_at": created_at,
    });
    let kind = if message.channel_type == 1 { "dm.received" } else { "group_dm.received" };
    if let Some(data) = data.as_object_mut() {
        if message.channel_type == 1 {
            data.insert("from_agent_id".to_owned(), json!(author));
            data.insert("to".to_owned(), json!(recipient));
        } else {
            data.insert("agent_id".to_owned(), json!(author));
        }
    }
    json!({ "type": kind, "data": data })
}

/// The `deliver` frame of a row.
#[must_use]
pub fn deliver_frame(id: DeliveryId, agent: &str, seq: i64, mode: Mode, payload: &RawValue) -> Bytes {
    // A redriven row is a new message to brokers, which remember ids.
    let msg_id = if id.redrive_no == 0 { id.source.to_string() } else { format!("{}_r{}", id.source, id.redrive_no) };
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
    let message = row.message.as_ref()?;
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    let mode = Mode::from_code(row.mode).unwrap_or_default();
    Some(deliver_frame(id, &row.agent_name, row.seq, mode, &payload(message, &row.agent_name)))
}

fn encode(frame: &Deliver<'_>) -> Bytes {
    // Strings, numbers and raw JSON always encode.
    serde_json::to_vec(frame).unwrap_or_default().into()
}
