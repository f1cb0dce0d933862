//! Messages as JSON: the shape of all REST responses with a message.

use chrono::{DateTime, SecondsFormat, Utc};
use relay_domain::messages::{ListedMessage, Message};
use serde_json::{Map, Value, json};

/// Prefix of the engine's own metadata keys, hidden from clients.
pub(crate) const HIDDEN_METADATA: &str = "__relaycast_";

/// Formats an instant for clients: UTC, milliseconds, `Z`.
#[must_use]
pub fn timestamp(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// Returns metadata without the engine's own keys; always an object.
#[must_use]
pub fn metadata(stored: &Value) -> Value {
    let Value::Object(all) = stored else {
        return Value::Object(Map::new());
    };
    let shown = all.iter().filter(|(key, _)| !key.starts_with(HIDDEN_METADATA));
    Value::Object(shown.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Renders a message of a list, or a single one.
///
/// `read_by_count` counts agents that read it explicitly or acknowledged it, up to 1000.
#[must_use]
pub fn listed_message(listed: &ListedMessage) -> Value {
    let message = &listed.message;
    let mut rendered = json!({
        "id": message.id,
        "channel_id": message.client_channel_id(),
        "channel_name": message.channel_name,
        "agent_id": message.agent_id,
        "agent_name": message.agent_name,
        "agent_type": message.agent_kind.as_str(),
        "text": message.text,
        "blocks": message.blocks,
        "metadata": metadata(&message.metadata),
        "has_attachments": message.has_attachments(),
        "thread_id": message.thread_id,
        "created_at": timestamp(message.created_at),
        "mentions": message.mentions,
        "attachments": message.attachments,
        "injection_mode": message.mode.as_str(),
        "reply_count": listed.reply_count,
        "reactions": listed.reactions,
        "read_by_count": listed.read_by_count,
    });
    if let Some(object) = rendered.as_object_mut() {
        if let Some(content_type) = &message.content_type {
            object.insert("content_type".into(), json!(content_type));
        }
        if let Some(conversation) = &message.conversation_id {
            object.insert("conversation_id".into(), json!(conversation));
        }
    }
    rendered
}

/// Renders a message of a conversation.
#[must_use]
pub fn conversation_message(message: &Message) -> Value {
    json!({
        "id": message.id,
        "agent_id": message.agent_id,
        "agent_name": message.agent_name,
        "agent_type": message.agent_kind.as_str(),
        "text": message.text,
        "injection_mode": message.mode.as_str(),
        "attachments": message.attachments,
        "metadata": metadata(&message.metadata),
        "created_at": timestamp(message.created_at),
    })
}

#[cfg(test)]
mod tests {
    use relay_domain::{
        AgentId, ChannelId, MessageId, agents::AgentKind, channels::ChannelKind, mailboxes::delivery::Mode,
    };

    use super::*;

    #[test]
    fn ids_are_strings_and_own_metadata_is_hidden() {
        let message = Message {
            id: MessageId::new(5),
            channel_id: ChannelId::new(6),
            channel_name: "general".into(),
            channel_kind: ChannelKind::Channel,
            conversation_id: None,
            agent_id: AgentId::new(7),
            agent_name: "ada".into(),
            agent_kind: AgentKind::Agent,
            thread_id: None,
            text: "hello".into(),
            blocks: None,
            metadata: json!({ "fooBar": 1, "__relaycast_x": 2 }),
            attachments: json!([]),
            mentions: vec!["bob".into()],
            mode: Mode::Wait,
            content_type: None,
            created_at: DateTime::from_timestamp_millis(1_772_366_400_000).unwrap_or_default(),
        };
        let json = listed_message(&message.into());
        assert_eq!(json["id"], "5");
        assert_eq!(json["channel_id"], "6");
        assert_eq!(json["metadata"], json!({ "fooBar": 1 }));
        assert_eq!(json["created_at"], "2026-03-01T12:00:00.000Z");
        assert_eq!((&json["blocks"], &json["thread_id"]), (&Value::Null, &Value::Null));
        assert_eq!(json["has_attachments"], false);
    }
}
