//! Event log and frames of the observer socket. Main types: [`EventsPage`], [`LoggedEvent`], [`ObserverFrame`].

pub mod data;
pub mod observer_frame;
pub mod recorded_data;

use serde::{Deserialize, Serialize};
use serde_json::{json, value::RawValue};
use utoipa::ToSchema;

use crate::field::Timestamp;

/// Page of the event log.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventsPage {
    /// Events, oldest first.
    pub events: Vec<LoggedEvent>,
    /// Number of the newest event in the workspace.
    pub latest_seq: i64,
    /// Value of `since` for the next page.
    pub next_since: i64,
}

/// Event of the log.
#[derive(Debug, Serialize, ToSchema)]
pub struct LoggedEvent {
    /// Number of the event in the workspace.
    pub seq: i64,
    /// Kind of the event.
    #[serde(rename = "type")]
    #[schema(example = "channel.created")]
    pub kind: String,
    /// Id of the channel that the event concerns.
    pub channel_id: Option<String>,
    /// Live frame without its number.
    #[schema(value_type = Object, example = json!({ "type": "channel.created", "channel": { "name": "general", "topic": null } }))]
    pub payload: Box<RawValue>,
    /// Time of the event.
    #[schema(value_type = Timestamp)]
    pub created_at: String,
}

/// Frame from an observer.
#[derive(Debug, PartialEq, Eq)]
pub enum ObserverFrame {
    /// Request for a `pong`.
    Ping,
    /// Answer to a ping.
    Pong,
    /// `subscribe` or `unsubscribe`, without effect.
    Subscribe,
    /// Request for missed events.
    Resync {
        /// Number of the last event that the observer received.
        last_seen_seq: i64,
    },
}

#[derive(Deserialize)]
struct Raw {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    last_seen_seq: Option<i64>,
}

impl ObserverFrame {
    /// Decodes a frame; `None` when it is malformed or unknown.
    #[must_use]
    pub fn decode(text: &str) -> Option<Self> {
        let raw: Raw = serde_json::from_str(text).ok()?;
        match raw.kind.as_str() {
            "ping" => Some(Self::Ping),
            "pong" => Some(Self::Pong),
            "subscribe" | "unsubscribe" => Some(Self::Subscribe),
            "resync" => raw.last_seen_seq.filter(|seq| *seq >= 0).map(|last_seen_seq| Self::Resync { last_seen_seq }),
            _ => None,
        }
    }
}

/// Data of the server-sent event `resync`: events before `oldest_seq` can no longer be read.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "resync")]
pub struct StreamResync {
    /// Number of the oldest event that can still be read.
    pub oldest_seq: i64,
    /// Number of the newest event in the workspace.
    pub latest_seq: i64,
}

/// Data of the server-sent event `close`, the last of its stream.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "close")]
pub struct StreamClosed<'a> {
    /// Reason, and what the reader should do.
    pub reason: &'a str,
}

/// Answer to a `ping`.
pub const PONG: &str = r#"{"type":"pong"}"#;

/// Encodes the answer to a `resync`, sent after the replayed events.
#[must_use]
pub fn encode_resync_ack(last_seen_seq: i64, current_seq: i64, replayed: usize, gap_detected: bool) -> String {
    json!({
        "type": "resync_ack", "last_seen_seq": last_seen_seq, "current_seq": current_seq,
        "replayed": replayed, "gap_detected": gap_detected,
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_decoded_or_ignored() {
        let table = [
            (r#"{"type":"ping"}"#, Some(ObserverFrame::Ping)),
            (r#"{"type":"subscribe","channels":["general"]}"#, Some(ObserverFrame::Subscribe)),
            (r#"{"type":"resync","last_seen_seq":7,"since":"x"}"#, Some(ObserverFrame::Resync { last_seen_seq: 7 })),
            (r#"{"type":"resync","last_seen_seq":-1}"#, None),
            (r#"{"type":"resync"}"#, None),
            (r#"{"type":1}"#, None),
            ("[]", None),
            ("", None),
        ];
        for (text, expected) in table {
            assert_eq!(ObserverFrame::decode(text), expected, "{text}");
        }
    }
}
