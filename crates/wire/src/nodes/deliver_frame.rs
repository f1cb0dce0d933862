//! `deliver` frames on the node socket (docs/protocol/node.md, "deliver"): encoded by the engine, for live deliveries and
//! for replayed ones by the same functions, so that both are identical. A node reads them as
//! [`super::engine_frame::Deliver`].

use bytes::Bytes;
use relay_domain::{
    AgentId, DeliveryId,
    mailboxes::{StoredDelivery, delivery::Mode},
};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::messages::payload::{Payload, payload};

/// Largest encoded `deliver` frame, in bytes. The smallest client limit on a frame is 1 MiB; the rest is room for the
/// transport's overhead.
pub const FRAME_LIMIT: usize = 900 * 1024;

/// `deliver` frame as it is written.
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

/// Returns the message id for recipients. A redriven delivery has a new one, since brokers remember ids.
#[must_use]
pub fn delivered_message_id(id: &DeliveryId) -> String {
    if id.redrive_no == 0 { id.source.to_string() } else { format!("{}_r{}", id.source, id.redrive_no) }
}

/// Encodes the `deliver` frame of a row.
#[must_use]
pub fn deliver_frame(id: DeliveryId, agent: &str, seq: i64, mode: Mode, payload: &RawValue) -> Bytes {
    let msg_id = delivered_message_id(&id);
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

/// Encodes the tombstone of a seq that will never be delivered (docs/protocol/node.md, "Tombstones").
///
/// Clients do not surface its type; its message id is its own, since brokers remember ids.
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

/// Encodes the frame of a stored row; `None` when its message is no longer kept, so that a tombstone takes its place.
#[must_use]
pub fn stored_frame(row: &StoredDelivery) -> Option<Bytes> {
    let payload = match (&row.message, &row.outcome) {
        (Some(message), _) => payload(message, &row.agent_name),
        // Strings and JSON values always encode.
        (None, Some((kind, data))) => to_raw_value(&Payload { kind, data }).unwrap_or_default(),
        (None, None) => return None,
    };
    Some(deliver_frame(row.id(), &row.agent_name, row.seq, row.mode, &payload))
}

fn encode(frame: &Deliver<'_>) -> Bytes {
    // Strings, numbers and raw JSON always encode.
    serde_json::to_vec(frame).unwrap_or_default().into()
}
