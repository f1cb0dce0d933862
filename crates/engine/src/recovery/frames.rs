//! A `deliver` frame read back into what it was made of: the other direction of `payload`.

use chrono::{DateTime, Utc};
use relay_domain::{
    DeliveryId,
    delivery::{Mode, SourceKind},
    snowflake,
};
use relay_store::recovery::{LoggedDelivery, LoggedMessage};
use relay_stream::LoggedFrame;
use serde::Deserialize;
use serde_json::{Value, json};

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

/// What both kinds of message data have; the rest is optional.
#[derive(Deserialize)]
struct Data {
    id: String,
    agent_name: String,
    text: String,
    metadata: Value,
    created_at: DateTime<Utc>,
    #[serde(default)]
    channel_id: Option<String>,
    #[serde(default)]
    conversation_id: Option<String>,
    /// In a one-to-one conversation, its place is taken by `from_agent_id`.
    #[serde(default)]
    agent_id: Option<String>,
    #[serde(default)]
    from_agent_id: Option<String>,
    #[serde(default)]
    blocks: Option<Value>,
    #[serde(default)]
    thread_id: Option<String>,
    #[serde(default)]
    mentions: Vec<String>,
    #[serde(default)]
    attachments: Option<Value>,
    #[serde(default)]
    injection_mode: Option<String>,
}

/// The delivery of a frame; none when its id is no delivery's.
pub(super) fn delivery(logged: LoggedFrame) -> Option<LoggedDelivery> {
    let delivery_id: DeliveryId = logged.delivery_id.parse().ok()?;
    let frame: Option<Frame> = logged.body.as_ref().and_then(|body| serde_json::from_slice(body).ok());
    let is_message = frame.as_ref().is_none_or(|frame| {
        matches!(frame.payload.kind.as_str(), "message.created" | "thread.reply" | "dm.received" | "group_dm.received")
    });
    let mode = frame.as_ref().and_then(|frame| frame.mode.parse::<Mode>().ok()).unwrap_or_default();
    let message = frame.filter(|_| is_message).and_then(|frame| message(frame.payload.data));
    // A redrive was made when it was stored, anything else with its source.
    let made_at =
        if delivery_id.redrive_no == 0 { snowflake::made_at_ms(delivery_id.source) } else { logged.stored_at_ms };
    Some(LoggedDelivery {
        scope: logged.scope,
        agent_id: logged.agent_id,
        seq: logged.seq,
        created_at: DateTime::from_timestamp_millis(made_at)?,
        sender: logged.sender.or_else(|| message.as_ref().map(|message| relay_domain::AgentId::new(message.agent_id))),
        kind: if is_message { SourceKind::Message } else { SourceKind::ActionResult }.code(),
        mode: mode.code(),
        delivery_id,
        message,
    })
}

fn message(data: Value) -> Option<LoggedMessage> {
    let data: Data = serde_json::from_value(data).ok()?;
    Some(LoggedMessage {
        message_id: data.id.parse().ok()?,
        // A one-to-one conversation's channel is named after it, not numbered.
        channel_id: data.channel_id.and_then(|id| id.parse().ok()),
        conversation_id: data.conversation_id,
        agent_id: data.agent_id.or(data.from_agent_id)?.parse().ok()?,
        agent_name: data.agent_name,
        thread_id: data.thread_id.and_then(|id| id.parse().ok()),
        text: data.text,
        blocks: data.blocks.filter(|blocks| !blocks.is_null()),
        metadata: data.metadata,
        attachments: data.attachments.unwrap_or_else(|| json!([])),
        mentions: data.mentions,
        mode: data.injection_mode.unwrap_or_else(|| Mode::Wait.as_str().to_owned()),
        created_at: data.created_at,
    })
}

#[cfg(test)]
mod tests {
    use relay_domain::{AgentId, WorkspaceId, WorkspaceScope};
    use relay_store::MessageRow;

    use super::*;
    use crate::payload;

    fn row() -> MessageRow {
        MessageRow {
            message_id: 5 << 22,
            channel_id: 6,
            agent_id: 7,
            agent_name: "ada".into(),
            agent_type: "agent".into(),
            thread_id: None,
            text: "hello".into(),
            blocks: Some(json!([{ "type": "x" }])),
            metadata: json!({ "k": 1 }),
            attachments: json!([{ "id": "1" }]),
            mentions: vec!["bob".into()],
            mode: "steer".into(),
            content_type: None,
            created_at: DateTime::from_timestamp_millis(snowflake::made_at_ms(5 << 22)).unwrap_or_default(),
            channel_name: "general".into(),
            channel_type: 0,
            conversation_id: None,
        }
    }

    fn back(row: &MessageRow) -> LoggedDelivery {
        let id = DeliveryId { source: row.message_id, agent: AgentId::new(9), redrive_no: 0 };
        let body = payload::deliver_frame(id, "bob", 3, Mode::Steer, &payload::payload(row, "bob"));
        let logged = LoggedFrame {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(1)),
            agent_id: AgentId::new(9),
            seq: 3,
            delivery_id: id.to_string(),
            stored_at_ms: 0,
            body: Some(body),
            sender: None,
        };
        delivery(logged).expect("a delivery")
    }

    #[test]
    fn a_message_comes_back_from_its_frame() {
        let read = back(&row());
        let message = read.message.expect("a message");
        assert_eq!((read.seq, read.mode, read.kind, read.sender), (3, 1, 0, Some(AgentId::new(7))));
        assert_eq!((message.message_id, message.channel_id, message.thread_id), (5 << 22, Some(6), None));
        assert_eq!((message.text.as_str(), message.mode.as_str()), ("hello", "steer"));
        assert_eq!((message.blocks, message.metadata), (row().blocks, row().metadata));
        assert_eq!((message.attachments, message.mentions), (row().attachments, row().mentions));
        assert_eq!((message.created_at, read.created_at), (row().created_at, row().created_at));
    }

    #[test]
    fn conversations_and_threads_come_back_too() {
        for (channel_type, thread) in [(1, None), (2, None), (1, Some(4)), (0, Some(4))] {
            let conversation = (channel_type != 0).then(|| "dm_0123456789abcdef01234567".to_owned());
            let row = MessageRow { channel_type, thread_id: thread, conversation_id: conversation.clone(), ..row() };
            let message = back(&row).message.expect("a message");
            assert_eq!((message.agent_id, message.thread_id), (7, thread));
            assert_eq!(message.conversation_id, conversation);
            assert_eq!(message.channel_id.is_some(), channel_type == 0);
        }
    }
}
