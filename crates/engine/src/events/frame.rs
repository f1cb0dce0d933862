//! An event as observers see it: a flat object with `type` and `created_at` (contract: rest.md 4.4).

use chrono::{DateTime, Utc};
use relay_domain::{MessageId, event_id::stable_event_id};
use relay_store::{
    MessageRow,
    events::{EventBody, NewEvent},
};
use serde_json::{Map, Value, json, value::RawValue};

use crate::render::timestamp;

/// The frame of an event, without its number.
pub(super) fn frame(event: &NewEvent, message: Option<&MessageRow>, created_at: DateTime<Utc>) -> Box<RawValue> {
    let mut frame = Map::new();
    frame.insert("type".to_owned(), json!(event.kind));
    frame.insert("created_at".to_owned(), json!(timestamp(created_at)));
    match (&event.body, message) {
        (EventBody::Data(data), _) => of_data(&mut frame, event, data),
        (EventBody::Message(_), Some(message)) => of_message(&mut frame, event, message),
        // Its message has been dropped by retention: only that it was is still known.
        (EventBody::Message(id), None) => {
            frame.insert("message_id".to_owned(), json!(id.to_string()));
        }
    }
    // Strings, numbers and JSON values always encode.
    serde_json::value::to_raw_value(&frame).unwrap_or_default()
}

fn of_message(frame: &mut Map<String, Value>, event: &NewEvent, message: &MessageRow) {
    let mut put = |key: &str, value: Value| frame.insert(key.to_owned(), value);
    let id = message.message_id.to_string();
    put("id", json!(stable_event_id(MessageId::new(message.message_id)).to_string()));
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
        "agent_type": message.agent_type,
        "text": message.text,
    });
    if event.kind != "message.updated" {
        shown["attachments"] = message.attachments.clone();
        shown["injection_mode"] = json!(message.mode);
    }
    put("message", shown);
}

/// What nodes and subscriptions get, with the few names that differ on the observer stream.
fn of_data(frame: &mut Map<String, Value>, event: &NewEvent, data: &Value) {
    let delivery = event.kind.starts_with("delivery.");
    for (key, value) in data.as_object().into_iter().flatten() {
        // The number of the event wins over a number of the delivery's own.
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
