//! Events as observers see them: a flat object with `type` and `created_at` (docs/protocol/rest.md, "Event frames").

use chrono::{DateTime, Utc};
use relay_domain::{events::event_id::stable_event_id, messages::Message};
use relay_store::events::{Event, EventBody};
use serde_json::{Map, Value, json, value::RawValue};

use crate::messages::render::timestamp;

/// Encodes an event without its number.
pub(super) fn event_frame(event: &Event, message: Option<&Message>, created_at: DateTime<Utc>) -> Box<RawValue> {
    let mut frame = Map::new();
    frame.insert("type".to_owned(), json!(event.kind));
    frame.insert("created_at".to_owned(), json!(timestamp(created_at)));
    match (&event.body, message) {
        (EventBody::Data(data), _) => put_data(&mut frame, event, data),
        (EventBody::Message(_), Some(message)) => put_message(&mut frame, event, message),
        // Retention has dropped the message: only its id is still known.
        (EventBody::Message(id), None) => {
            frame.insert("message_id".to_owned(), json!(id.to_string()));
        }
    }
    // Strings, numbers and JSON values always encode.
    serde_json::value::to_raw_value(&frame).unwrap_or_default()
}

fn put_message(frame: &mut Map<String, Value>, event: &Event, message: &Message) {
    let mut put = |key: &str, value: Value| frame.insert(key.to_owned(), value);
    let id = message.id.to_string();
    put("id", json!(stable_event_id(message.id).to_string()));
    match &message.conversation_id {
        Some(conversation) => put("conversation_id", json!(conversation)),
        None => {
            put("channel", json!(message.channel_name));
            put("channel_id", json!(message.channel_id.to_string()))
        }
    };
    if let Some(thread) = message.thread_id {
        put("parent_id", json!(thread.to_string()));
    }
    let mut shown = json!({
        "id": id,
        "agent_id": message.agent_id.to_string(),
        "agent_name": message.agent_name,
        "agent_type": message.agent_kind.as_str(),
        "text": message.text,
    });
    if event.kind != "message.updated" {
        shown["attachments"] = message.attachments.clone();
        shown["injection_mode"] = json!(message.mode.as_str());
    }
    put("message", shown);
}

/// Puts the data that nodes and subscriptions get, with the few names that differ on the observer stream.
fn put_data(frame: &mut Map<String, Value>, event: &Event, data: &Value) {
    let delivery = event.kind.starts_with("delivery.");
    for (key, value) in data.as_object().into_iter().flatten() {
        // The number of the event has precedence over the delivery's seq.
        let key = if delivery && key == "seq" { "delivery_seq" } else { key.as_str() };
        if !frame.contains_key(key) {
            frame.insert(key.to_owned(), value.clone());
        }
    }
    if let (Some(name), false) = (&event.channel_name, frame.contains_key("channel")) {
        frame.insert("channel".to_owned(), json!(name));
    }
    if let (Some(id), false) = (event.channel_id, frame.contains_key("channel_id")) {
        frame.insert("channel_id".to_owned(), json!(id.to_string()));
    }
    if let (Some(id), false) = (&event.conversation_id, frame.contains_key("conversation_id")) {
        frame.insert("conversation_id".to_owned(), json!(id));
    }
    if let (true, Some(name)) = (event.kind.starts_with("agent.status."), data.get("agent_name")) {
        frame.insert("agent".to_owned(), json!({ "name": name, "id": data.get("agent_id") }));
    }
}
