//! Parses `deliver` frames: the reverse of `payload`.

use chrono::{DateTime, Utc};
use relay_domain::{
    ConversationId, DeliveryId, JsonText,
    mailboxes::delivery::{Mode, SourceKind},
    snowflake,
};
use relay_store::recovery::{LoggedDelivery, LoggedMessage};
use relay_stream::LoggedFrame;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Frame {
    mode: String,
    payload: Payload,
}

#[derive(Deserialize)]
struct Payload {
    #[serde(rename = "type")]
    kind: String,
    data: Value,
}

/// Fields that both kinds of message data have; the rest is optional.
#[derive(Deserialize)]
struct Data {
    id: String,
    agent_name: String,
    text: String,
    metadata: JsonText,
    created_at: DateTime<Utc>,
    #[serde(default)]
    channel_id: Option<String>,
    #[serde(default)]
    conversation_id: Option<String>,
    /// A one-to-one conversation has `from_agent_id` instead.
    #[serde(default)]
    agent_id: Option<String>,
    #[serde(default)]
    from_agent_id: Option<String>,
    #[serde(default)]
    blocks: Option<JsonText>,
    #[serde(default)]
    thread_id: Option<String>,
    #[serde(default)]
    mentions: Vec<String>,
    #[serde(default)]
    attachments: Option<Value>,
    #[serde(default)]
    injection_mode: Option<String>,
}

/// Parses the delivery of a frame; `None` when its id is no delivery's.
pub(super) fn read_delivery(logged: LoggedFrame) -> Option<LoggedDelivery> {
    let delivery_id: DeliveryId = logged.delivery_id.parse().ok()?;
    let frame: Option<Frame> = logged.body.as_ref().and_then(|body| serde_json::from_slice(body).ok());
    // A frame without a body names only its delivery. Nearly all of them are messages.
    let is_message = frame.as_ref().is_none_or(|frame| {
        matches!(frame.payload.kind.as_str(), "message.created" | "thread.reply" | "dm.received" | "group_dm.received")
    });
    // A frame whose text is lost, or has the mode of a later version, is delivered like most.
    let mode = frame.as_ref().and_then(|frame| frame.mode.parse::<Mode>().ok()).unwrap_or_default();
    let message = frame.filter(|_| is_message).and_then(|frame| read_message(frame.payload.data));
    // A redrive was created when it was stored, anything else with its source.
    let made_at = if delivery_id.redrive_no == 0 {
        snowflake::created_at_ms(delivery_id.source.get())
    } else {
        logged.stored_at_ms
    };
    Some(LoggedDelivery {
        scope: logged.scope,
        agent_id: logged.agent_id,
        seq: logged.seq,
        created_at: DateTime::from_timestamp_millis(made_at)?,
        sender: logged.sender.or_else(|| message.as_ref().map(|message| message.agent_id)),
        kind: if is_message { SourceKind::Message } else { SourceKind::ActionResult },
        mode,
        delivery_id,
        message,
    })
}

fn read_message(data: Value) -> Option<LoggedMessage> {
    let data: Data = serde_json::from_value(data).ok()?;
    Some(LoggedMessage {
        message_id: data.id.parse().ok()?,
        // A one-to-one conversation's channel is named after it, not numbered.
        channel_id: data.channel_id.and_then(|id| id.parse().ok()),
        conversation_id: data.conversation_id.map(ConversationId::new),
        agent_id: data.agent_id.or(data.from_agent_id)?.parse().ok()?,
        agent_name: data.agent_name,
        thread_id: data.thread_id.and_then(|id| id.parse().ok()),
        text: data.text,
        blocks: data.blocks.filter(|blocks| !blocks.is_null()),
        metadata: data.metadata,
        attachments: data.attachments.unwrap_or_else(|| Value::Array(Vec::new())),
        mentions: data.mentions,
        // A reply's frame has no mode of its own. A mode of a later version is delivered like most.
        mode: data.injection_mode.and_then(|mode| mode.parse().ok()).unwrap_or_default(),
        created_at: data.created_at,
    })
}

#[cfg(test)]
mod tests {
    use relay_domain::{
        AgentId, ChannelId, MessageId, WorkspaceId, WorkspaceScope, agents::AgentKind, channels::ChannelKind,
        messages::Message,
    };

    use serde_json::json;

    use super::*;
    use relay_wire::{messages::payload, nodes::deliver_frame};

    fn message() -> Message {
        Message {
            id: MessageId::new(5 << 22),
            channel_id: ChannelId::new(6),
            agent_id: AgentId::new(7),
            agent_name: "ada".into(),
            agent_kind: AgentKind::Agent,
            thread_id: None,
            text: "hello".into(),
            blocks: Some(json!([{ "type": "x" }]).into()),
            metadata: json!({ "k": 1 }).into(),
            attachments: json!([{ "id": "1" }]),
            mentions: vec!["bob".into()],
            mode: Mode::Steer,
            content_type: None,
            created_at: DateTime::from_timestamp_millis(snowflake::created_at_ms(5 << 22)).unwrap_or_default(),
            channel_name: "general".into(),
            channel_kind: ChannelKind::Channel,
            conversation_id: None,
        }
    }

    fn back(message: &Message) -> LoggedDelivery {
        let id = DeliveryId { source: message.id.into(), agent: AgentId::new(9), redrive_no: 0 };
        let body = deliver_frame::deliver_frame(id, "bob", 3, Mode::Steer, &payload::payload(message, "bob"));
        let logged = LoggedFrame {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            agent_id: AgentId::new(9),
            seq: 3,
            delivery_id: id.to_string(),
            stored_at_ms: 0,
            body: Some(body),
            sender: None,
        };
        read_delivery(logged).expect("a delivery")
    }

    #[test]
    fn messages_are_parsed_back_from_frames() {
        let read = back(&message());
        let found = read.message.expect("a message");
        assert_eq!((read.seq, read.sender), (3, Some(AgentId::new(7))));
        assert_eq!((read.mode, read.kind), (Mode::Steer, SourceKind::Message));
        assert_eq!((found.message_id, found.thread_id), (MessageId::new(5 << 22), None));
        assert_eq!(found.channel_id, Some(ChannelId::new(6)));
        assert_eq!((found.text.as_str(), found.mode), ("hello", Mode::Steer));
        assert_eq!((found.blocks, found.metadata), (message().blocks, message().metadata));
        assert_eq!((found.attachments, found.mentions), (message().attachments, message().mentions));
        assert_eq!((found.created_at, read.created_at), (message().created_at, message().created_at));
    }

    #[test]
    fn conversations_and_threads_are_parsed_back_from_frames() {
        for (channel_kind, thread) in [
            (ChannelKind::Direct, None),
            (ChannelKind::Group, None),
            (ChannelKind::Direct, Some(4)),
            (ChannelKind::Channel, Some(4)),
        ] {
            let conversation_id =
                channel_kind.is_conversation().then(|| ConversationId::new("dm_0123456789abcdef01234567"));
            let thread_id = thread.map(MessageId::new);
            let sent = Message { channel_kind, thread_id, conversation_id: conversation_id.clone(), ..message() };
            let found = back(&sent).message.expect("a message");
            assert_eq!((found.agent_id, found.thread_id), (AgentId::new(7), thread_id));
            assert_eq!(found.conversation_id, conversation_id);
            assert_eq!(found.channel_id.is_some(), !channel_kind.is_conversation());
        }
    }
}
