//! Events as observers see them: a flat object with `type` and `created_at` (docs/protocol/rest.md, "Event frames").

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, ConversationId, MessageId,
    events::{Event, EventBody, event_id::stable_event_id},
    messages::Message,
};
use serde::Serialize;
use serde_json::{Map, Value, value::RawValue};

use crate::field::{Timestamp, ToValue};

/// Fields that begin each frame.
#[derive(Serialize)]
struct Frame<'a, T> {
    #[serde(rename = "type")]
    kind: &'a str,
    created_at: Timestamp,
    #[serde(flatten)]
    body: T,
}

/// Body of an event whose message has expired: only its id is still known.
#[derive(Serialize)]
struct ExpiredMessage {
    message_id: MessageId,
}

/// Body of `message.*` events.
#[derive(Serialize)]
struct MessageBody<'a> {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    conversation_id: Option<&'a ConversationId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channel: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channel_id: Option<ChannelId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_id: Option<MessageId>,
    message: ShownMessage<'a>,
}

#[derive(Serialize)]
struct ShownMessage<'a> {
    id: MessageId,
    agent_id: AgentId,
    agent_name: &'a str,
    agent_type: &'a str,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attachments: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    injection_mode: Option<&'a str>,
}

/// Field `agent` of `agent.status.*` events.
#[derive(Serialize)]
struct StatusAgent<'a> {
    name: &'a Value,
    id: Option<&'a Value>,
}

/// Encodes an event without its number. `message` is the stored message of a message event, or `None` once it has
/// expired.
#[must_use]
pub fn encode(event: &Event, message: Option<&Message>, created_at: DateTime<Utc>) -> Box<RawValue> {
    match (&event.body, message) {
        (EventBody::Data(data), _) => encode_body(event, created_at, with_location(event, data)),
        (EventBody::Message(_), Some(message)) => encode_body(event, created_at, message_body(event, message)),
        (EventBody::Message(message_id), None) => {
            encode_body(event, created_at, ExpiredMessage { message_id: *message_id })
        }
    }
}

fn encode_body<T: Serialize>(event: &Event, created_at: DateTime<Utc>, body: T) -> Box<RawValue> {
    let frame = Frame { kind: &event.kind, created_at: created_at.into(), body };
    // Strings, numbers and JSON values always encode.
    serde_json::value::to_raw_value(&frame).unwrap_or_default()
}

fn message_body<'a>(event: &Event, message: &'a Message) -> MessageBody<'a> {
    let in_channel = message.conversation_id.is_none();
    // The log keeps no former text or attachments: an update shows what changed, which is the text.
    let whole = event.kind != relay_domain::events::kind::MESSAGE_UPDATED;
    MessageBody {
        id: stable_event_id(message.id).to_string(),
        conversation_id: message.conversation_id.as_ref(),
        channel: in_channel.then_some(message.channel_name.as_str()),
        channel_id: in_channel.then_some(message.channel_id),
        parent_id: message.thread_id,
        message: ShownMessage {
            id: message.id,
            agent_id: message.agent_id,
            agent_name: &message.agent_name,
            agent_type: message.agent_kind.as_str(),
            text: &message.text,
            attachments: whole.then_some(&message.attachments),
            injection_mode: whole.then(|| message.mode.as_str()),
        },
    }
}

/// Adds the event's location to the data that nodes and subscriptions get, with the few names that differ for
/// observers.
fn with_location(event: &Event, data: &Value) -> Map<String, Value> {
    let mut body = Map::new();
    let is_delivery = event.kind.starts_with("delivery.");
    for (key, value) in data.as_object().into_iter().flatten() {
        // The number of the event has precedence over the delivery's seq.
        let key = if is_delivery && key == "seq" { "delivery_seq" } else { key.as_str() };
        // The frame has a type and a time of its own.
        if !matches!(key, "type" | "created_at") {
            body.entry(key).or_insert_with(|| value.clone());
        }
    }
    // Data that name their location themselves keep it.
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            body.entry(key).or_insert(value);
        }
    };
    put("channel", event.channel_name.as_deref().map(Value::from));
    put("channel_id", event.channel_id.map(|id| id.to_value()));
    put("conversation_id", event.conversation_id.as_deref().map(Value::from));
    if let (true, Some(name)) = (event.kind.starts_with("agent.status."), data.get("agent_name")) {
        body.insert("agent".to_owned(), StatusAgent { name, id: data.get("agent_id") }.to_value());
    }
    body
}
