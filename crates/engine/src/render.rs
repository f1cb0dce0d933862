//! Messages as JSON: the one shape that every REST answer with a message is made of.

use chrono::{DateTime, SecondsFormat, Utc};
use relay_domain::conversation::public_channel_id;
use relay_store::{ListedMessage, MessageRow};
use serde_json::{Map, Value, json};

/// Metadata keys of the engine's own, hidden from clients.
pub(crate) const HIDDEN_METADATA: &str = "__relaycast_";

/// An instant as clients see it: UTC, milliseconds, `Z`.
#[must_use]
pub fn timestamp(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// The id of a message's channel as clients see it: a one-to-one conversation's channel is named after
/// the conversation.
#[must_use]
pub fn channel_id(message: &MessageRow) -> String {
    public_id(message.channel_id, message.conversation_id.as_deref())
}

/// The public id of a channel, given its conversation, if it is one.
#[must_use]
pub(crate) fn public_id(channel: i64, conversation: Option<&str>) -> String {
    conversation.and_then(public_channel_id).unwrap_or_else(|| channel.to_string())
}

/// Metadata without the engine's own keys; always an object.
#[must_use]
pub fn metadata(stored: &Value) -> Value {
    let Value::Object(all) = stored else {
        return Value::Object(Map::new());
    };
    let shown = all.iter().filter(|(key, _)| !key.starts_with(HIDDEN_METADATA));
    Value::Object(shown.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// A message in a list, or alone.
///
/// `read_by_count` counts those that read it explicitly and those that acknowledged it, up to 1000.
#[must_use]
pub fn listed(message: &ListedMessage) -> Value {
    message_with(&message.message, message.reply_count, message.read_by_count, message.reactions.clone())
}

/// A message that has just been accepted.
#[must_use]
pub fn fresh(message: &MessageRow) -> Value {
    message_with(message, 0, 0, json!([]))
}

fn message_with(message: &MessageRow, reply_count: i64, read_by_count: i64, reactions: Value) -> Value {
    let mut rendered = json!({
        "id": message.message_id.to_string(),
        "channel_id": channel_id(message),
        "channel_name": message.channel_name,
        "agent_id": message.agent_id.to_string(),
        "agent_name": message.agent_name,
        "agent_type": message.agent_type,
        "text": message.text,
        "blocks": message.blocks,
        "metadata": metadata(&message.metadata),
        "has_attachments": has_attachments(message),
        "thread_id": message.thread_id.map(|id| id.to_string()),
        "created_at": timestamp(message.created_at),
        "mentions": message.mentions,
        "attachments": message.attachments,
        "injection_mode": message.mode,
        "reply_count": reply_count,
        "reactions": reactions,
        "read_by_count": read_by_count,
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

/// A message inside a conversation's answers.
#[must_use]
pub fn in_conversation(message: &MessageRow) -> Value {
    json!({
        "id": message.message_id.to_string(),
        "agent_id": message.agent_id.to_string(),
        "agent_name": message.agent_name,
        "agent_type": message.agent_type,
        "text": message.text,
        "injection_mode": message.mode,
        "attachments": message.attachments,
        "metadata": metadata(&message.metadata),
        "created_at": timestamp(message.created_at),
    })
}

fn has_attachments(message: &MessageRow) -> bool {
    message.attachments.as_array().is_some_and(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> MessageRow {
        MessageRow {
            message_id: 5,
            channel_id: 6,
            agent_id: 7,
            agent_name: "ada".into(),
            agent_type: "agent".into(),
            thread_id: None,
            text: "hello".into(),
            blocks: None,
            metadata: json!({ "fooBar": 1, "__relaycast_x": 2 }),
            attachments: json!([]),
            mentions: vec!["bob".into()],
            mode: "wait".into(),
            content_type: None,
            created_at: DateTime::from_timestamp_millis(1_772_366_400_000).unwrap_or_default(),
            channel_name: "general".into(),
            channel_type: 0,
            conversation_id: None,
        }
    }

    #[test]
    fn ids_are_strings_and_own_metadata_is_hidden() {
        let json = fresh(&row());
        assert_eq!(json["id"], "5");
        assert_eq!(json["channel_id"], "6");
        assert_eq!(json["metadata"], json!({ "fooBar": 1 }));
        assert_eq!(json["created_at"], "2026-03-01T12:00:00.000Z");
        assert_eq!((&json["blocks"], &json["thread_id"]), (&Value::Null, &Value::Null));
        assert_eq!(json["has_attachments"], false);
    }

    #[test]
    fn a_direct_conversations_channel_is_named_after_it() {
        let mut message = row();
        message.conversation_id = Some("dm_0123456789abcdef01234567".into());
        assert_eq!(channel_id(&message), "dmch_0123456789abcdef01234567");
        message.conversation_id = Some("99".into());
        assert_eq!(channel_id(&message), "6", "a group's channel keeps its own id");
    }
}
