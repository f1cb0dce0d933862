//! The observer plane: the event log and the frames of its socket.

use serde::{Deserialize, Serialize};
use serde_json::{json, value::RawValue};
use utoipa::ToSchema;

use crate::field::Timestamp;

/// A page of the event log.
#[derive(Debug, Serialize, ToSchema)]
pub struct EventsPage {
    /// Oldest first.
    pub events: Vec<LoggedEvent>,
    /// The number of the workspace's newest event.
    pub latest_seq: i64,
    /// `since` of the next page.
    pub next_since: i64,
}

/// An event of the log.
#[derive(Debug, Serialize, ToSchema)]
pub struct LoggedEvent {
    /// Its number in the workspace.
    pub seq: i64,
    /// Its type.
    #[serde(rename = "type")]
    #[schema(example = "channel.created")]
    pub kind: String,
    /// The channel that it happened in.
    pub channel_id: Option<String>,
    /// The live frame without its number.
    #[schema(value_type = Object, example = json!({ "type": "channel.created", "channel": { "name": "general", "topic": null } }))]
    pub payload: Box<RawValue>,
    /// When it happened.
    #[schema(value_type = Timestamp)]
    pub created_at: String,
}

/// A frame from an observer.
#[derive(Debug, PartialEq, Eq)]
pub enum ObserverFrame {
    /// Wants a `pong`.
    Ping,
    /// Answers a ping.
    Pong,
    /// `subscribe` or `unsubscribe`.
    Subscribe,
    /// Wants what it missed.
    Resync {
        /// The number of the last event that it saw.
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
    /// Reads a frame; `None` when it is broken or unknown.
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

/// The answer to a `resync`, after what was replayed.
#[must_use]
pub fn resync_ack(last_seen_seq: i64, current_seq: i64, replayed: usize, gap_detected: bool) -> String {
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
    fn frames_are_read_or_ignored() {
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
