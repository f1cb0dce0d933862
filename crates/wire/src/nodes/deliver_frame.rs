//! `deliver` frames on the node socket (docs/protocol/node.md, "deliver"): encoded by the engine, for live deliveries
//! and for replayed ones by the same functions, so that both are identical. A node reads them as
//! [`super::engine_frame::Deliver`].

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use relay_domain::{
    AgentId, DeliveryId, SourceId,
    mailboxes::{Content, StoredDelivery, delivery::Mode},
};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::messages::payload::{Payload, payload};

/// Largest encoded `deliver` frame, in bytes, and largest reply that shows a whole node. The smallest client limit on a
/// frame is 1 MiB; the rest is room for the transport's overhead.
pub const FRAME_LIMIT: usize = 900 * 1024;

/// `deliver` frame as it is written.
#[derive(Serialize)]
struct Deliver<'a> {
    v: u8,
    #[serde(rename = "type")]
    kind: &'static str,
    delivery_id: String,
    agent_id: String,
    agent: &'a str,
    msg_id: String,
    seq: i64,
    mode: &'a str,
    payload: &'a RawValue,
}

impl<'a> Deliver<'a> {
    fn of_delivery(id: DeliveryId, agent: &'a str, seq: i64, mode: Mode, payload: &'a RawValue) -> Self {
        Self {
            v: 1,
            kind: "deliver",
            delivery_id: id.to_string(),
            agent_id: id.agent.to_string(),
            agent,
            msg_id: delivered_message_id(&id),
            seq,
            mode: mode.as_str(),
            payload,
        }
    }
}

/// Returns the message id for recipients. A redriven delivery has a new one, since brokers remember ids.
#[must_use]
pub fn delivered_message_id(id: &DeliveryId) -> String {
    if id.redrive_no == 0 { id.source.to_string() } else { format!("{}_r{}", id.source, id.redrive_no) }
}

/// Encodes the `deliver` frame of a row.
#[must_use]
pub fn deliver_frame(id: DeliveryId, agent: &str, seq: i64, mode: Mode, payload: &RawValue) -> Bytes {
    encode(&Deliver::of_delivery(id, agent, seq, mode, payload))
}

/// Encodes the tombstone of a seq that will never be delivered (docs/protocol/node.md, "Tombstones").
///
/// Clients do not surface its type; its message id is its own, since brokers remember ids.
#[must_use]
pub fn tombstone_frame(agent_id: AgentId, agent: &str, seq: i64) -> Bytes {
    let id = format!("tomb_{agent_id}_{seq}");
    // The literal is JSON.
    let payload = RawValue::from_string(r#"{"type":"delivery.expired","data":{}}"#.to_owned()).unwrap_or_default();
    encode(&Deliver {
        v: 1,
        kind: "deliver",
        delivery_id: id.clone(),
        agent_id: agent_id.to_string(),
        agent,
        msg_id: id,
        seq,
        mode: Mode::Wait.as_str(),
        payload: &payload,
    })
}

/// Frame of a stored row. Its payload is shared with the message's other recipients, so it is encoded only when it is
/// written.
#[derive(Debug, Clone)]
pub struct SharedFrame {
    /// Text before the payload, which is the last field.
    head: String,
    payload: Arc<RawValue>,
}

impl SharedFrame {
    /// Returns the number of bytes of the encoded frame.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        // 1: the closing brace.
        self.head.len() + self.payload.get().len() + 1
    }

    /// Encodes the frame.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::with_capacity(self.byte_len());
        text.push_str(&self.head);
        text.push_str(self.payload.get());
        text.push('}');
        text
    }
}

/// Payloads of stored rows, encoded once for all recipients of a message.
#[derive(Debug, Default)]
pub struct SharedPayloads {
    by_source: HashMap<SourceId, Arc<RawValue>>,
}

impl SharedPayloads {
    /// Creates the frame of a row; `None` when its content is no longer kept, so that a tombstone takes its place, or
    /// was not read.
    pub fn frame(&mut self, row: &StoredDelivery) -> Option<SharedFrame> {
        let payload = match &row.content {
            // Only a one-to-one conversation names its recipient, and it has one.
            Content::Message(message) => {
                self.by_source.entry(row.source_id).or_insert_with(|| payload(message, &row.agent_name).into())
            }
            // Strings and JSON values always encode.
            Content::Outcome { kind, data } => self
                .by_source
                .entry(row.source_id)
                .or_insert_with(|| to_raw_value(&Payload { kind, data }).unwrap_or_default().into()),
            Content::Unread { .. } | Content::Dropped => return None,
        };
        let frame = Deliver::of_delivery(row.id(), &row.agent_name, row.seq, row.mode, RawValue::NULL);
        // Strings and numbers always encode.
        let mut head = serde_json::to_string(&frame).unwrap_or_default();
        // The payload is the last field, and `null` stands for it here.
        head.truncate(head.len().saturating_sub("null}".len()));
        Some(SharedFrame { head, payload: Arc::clone(payload) })
    }
}

fn encode(frame: &Deliver<'_>) -> Bytes {
    // Strings, numbers and raw JSON always encode.
    serde_json::to_vec(frame).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use relay_domain::{
        ChannelId, ConversationId, MessageId, WorkspaceId, WorkspaceScope, agents::AgentKind, channels::ChannelKind,
        messages::Message,
    };
    use serde_json::{Value, json};

    use super::*;

    fn message(channel_kind: ChannelKind, thread: Option<i64>) -> Message {
        Message {
            id: MessageId::new(5),
            channel_id: ChannelId::new(10),
            channel_name: "general".to_owned(),
            channel_kind,
            conversation_id: channel_kind.is_conversation().then(|| ConversationId::new("77")),
            agent_id: AgentId::new(1),
            agent_name: "ada".to_owned(),
            agent_kind: AgentKind::Agent,
            thread_id: thread.map(MessageId::new),
            text: "a \"quoted\"\nline".to_owned(),
            blocks: None,
            metadata: json!({ "a": 1, "__relaycast_hidden": 2 }).into(),
            attachments: json!([]),
            mentions: vec!["bob".to_owned()],
            mode: Mode::Wait,
            content_type: None,
            created_at: DateTime::UNIX_EPOCH,
        }
    }

    fn stored(message: Option<Message>, redrive_no: i16) -> StoredDelivery {
        StoredDelivery {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            agent_id: AgentId::new(2),
            agent_name: "bob".to_owned(),
            location: ("n1".to_owned(), None),
            seq: 8,
            source_id: SourceId::new(5),
            redrive_no,
            mode: Mode::Steer,
            expires_at: DateTime::UNIX_EPOCH,
            settlement: None,
            sender: Some(AgentId::new(1)),
            content: message.map_or(Content::Dropped, |message| Content::Message(message.into())),
        }
    }

    fn stored_frame(row: &StoredDelivery) -> Option<Bytes> {
        SharedPayloads::default().frame(row).map(|frame| frame.encode().into())
    }

    fn decoded(frame: &Bytes) -> Value {
        serde_json::from_slice(frame).unwrap()
    }

    #[test]
    fn a_replayed_frame_is_the_live_one_byte_for_byte() {
        for (kind, thread, expected) in [
            (ChannelKind::Channel, None, "message.created"),
            (ChannelKind::Channel, Some(4), "thread.reply"),
            (ChannelKind::Direct, None, "dm.received"),
            (ChannelKind::Group, None, "group_dm.received"),
        ] {
            let row = stored(Some(message(kind, thread)), 0);
            let live = deliver_frame(row.id(), "bob", 8, Mode::Steer, &payload(&message(kind, thread), "bob"));
            assert_eq!(stored_frame(&row), Some(live.clone()));
            let frame = decoded(&live);
            assert_eq!((&frame["payload"]["type"], &frame["seq"]), (&json!(expected), &json!(8)));
            assert_eq!(frame["payload"]["data"]["metadata"], json!({ "a": 1 }), "hidden keys stay inside");
            let names_recipient = frame["payload"]["data"].get("to") == Some(&json!("bob"));
            assert_eq!(names_recipient, kind == ChannelKind::Direct && thread.is_none());
        }
    }

    #[test]
    fn a_redriven_frame_has_a_message_id_of_its_own_and_a_lost_message_no_frame() {
        let frames = [0, 2].map(|no| stored_frame(&stored(Some(message(ChannelKind::Channel, None)), no)));
        let ids = frames.map(|frame| frame.map(|frame| decoded(&frame)["msg_id"].clone()));
        assert_eq!(ids, [Some(json!("5")), Some(json!("5_r2"))]);
        assert_eq!(stored_frame(&stored(None, 0)), None);
        assert_eq!(decoded(&tombstone_frame(AgentId::new(2), "bob", 8))["payload"]["type"], "delivery.expired");
    }
}
