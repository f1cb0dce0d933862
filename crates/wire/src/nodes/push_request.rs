//! Bodies of requests to the endpoints of `http_push` nodes (docs/protocol/node.md, "Push request" and "Push events").

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, JsonText, WorkspaceId,
    mailboxes::{Content, StoredDelivery},
};
use serde::Serialize;
use serde_json::Value;

use super::deliver_frame::delivered_message_id;
use crate::{
    field::Timestamp,
    messages::payload::{MessageData, MessageView},
};

/// Bytes around the message's text, which conversations contain twice.
const BODY_OVERHEAD: usize = 1024;
/// Topic of an outcome that is sent as an event.
const OUTCOME_TOPIC: &str = "agent";

/// Encoded body of a delivery's request, with what its headers repeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryBody<'a> {
    /// Kind of the event, such as `message.created`.
    pub kind: &'a str,
    /// Id of the delivery.
    pub delivery_id: String,
    /// Encoded JSON object.
    pub bytes: Vec<u8>,
}

#[derive(Serialize)]
struct Body<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    workspace_id: String,
    delivery_id: &'a str,
    message_id: String,
    agent_id: String,
    agent_name: &'a str,
    seq: i64,
    mode: &'static str,
    timestamp: Timestamp,
    data: BodyData<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_ids: Option<[String; 1]>,
}

/// Data of a delivery: a message, or the outcome of an invocation.
#[derive(Serialize)]
#[serde(untagged)]
enum BodyData<'a> {
    Message(&'a MessageData<'a>),
    Outcome(&'a JsonText),
}

/// Encodes the body of a delivery's request at the time of the attempt; `None` when its message or invocation is no
/// longer kept. The body of an outcome also has the fields of an event.
#[must_use]
pub fn delivery_body(row: &StoredDelivery, at: DateTime<Utc>) -> Option<DeliveryBody<'_>> {
    // Declared here because the body borrows from them.
    let (shown, posted);
    let (kind, data, text_bytes) = match &row.content {
        Content::Message(message) => {
            shown = MessageView::new(message, &row.agent_name);
            posted = shown.data();
            (shown.kind(), BodyData::Message(&posted), message.text.len())
        }
        Content::Outcome { kind, data } => (*kind, BodyData::Outcome(data), 0),
        Content::Unread { .. } | Content::Dropped => return None,
    };
    let is_outcome = matches!(data, BodyData::Outcome(_));
    let id = row.id();
    let delivery_id = id.to_string();
    let body = Body {
        kind,
        workspace_id: row.scope.workspace_id().to_string(),
        delivery_id: &delivery_id,
        message_id: delivered_message_id(&id),
        agent_id: row.agent_id.to_string(),
        agent_name: &row.agent_name,
        seq: row.seq,
        mode: row.mode.as_str(),
        timestamp: at.into(),
        data,
        topic: is_outcome.then_some(OUTCOME_TOPIC),
        agent_ids: is_outcome.then(|| [row.agent_id.to_string()]),
    };
    // Strings, numbers and JSON values always encode.
    let mut bytes = Vec::with_capacity(BODY_OVERHEAD + 2 * text_bytes);
    serde_json::to_writer(&mut bytes, &body).ok()?;
    Some(DeliveryBody { kind, delivery_id, bytes })
}

/// Body of an event's call to the endpoint of an `http_push` node.
#[derive(Debug, Serialize)]
pub struct EventCall<'a> {
    /// Kind of the event.
    #[serde(rename = "type")]
    pub kind: &'a str,
    /// Id of the workspace.
    pub workspace_id: WorkspaceId,
    /// Time of the call.
    pub timestamp: Timestamp,
    /// Data of the event.
    pub data: &'a Value,
    /// Topic of the event, such as `channel`.
    pub topic: &'a str,
    /// Channel of the event, if its data names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_id: Option<&'a str>,
    /// Agents at the endpoint that the event is for.
    pub agent_ids: &'a [AgentId],
}
