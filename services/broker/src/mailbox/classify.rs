//! Classification of `deliver` frames: text to type, or nothing to show to the agent.

use relay_wire::nodes::engine_frame::{Deliver, DeliverMode};
use serde_json::{Map, Value};

use super::{Author, Message, Origin, Urgency};

/// Meaning of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FrameMeaning {
    /// Text for the agent.
    Typed(Box<Message>),
    /// Acknowledged without being shown: reactions, read receipts, tombstones, and types that are not known.
    Silent {
        /// `false` for types that are not known.
        is_known: bool,
    },
}

/// Classifies a frame that came at `now_ms`.
pub(crate) fn classify(frame: Deliver, now_ms: i64) -> FrameMeaning {
    let origin = match frame.payload.kind.as_str() {
        "action.completed" | "action.failed" | "action.denied" => Origin::ActionResult,
        "message.reacted" | "message.read" | "delivery.expired" => return FrameMeaning::Silent { is_known: true },
        "" | "message.created" | "message.received" | "message.new" | "message.sent" | "message.delivered" => {
            Origin::Engine
        }
        kind if ["thread.", "dm.", "direct_message.", "group_dm."].iter().any(|family| kind.starts_with(family)) => {
            Origin::Engine
        }
        // A later engine may have further kinds: without an ack the mailbox would stop at them.
        _ => return FrameMeaning::Silent { is_known: false },
    };
    let data = &frame.payload.data;
    let text_of = |keys: &[&str]| keys.iter().find_map(|key| data.get(*key)?.as_str()).map(str::to_owned);
    let body = match origin {
        Origin::ActionResult => result_text(data),
        Origin::Engine | Origin::Task | Origin::Continuity | Origin::Redelivered => {
            text_of(&["text", "body", "content"])
        }
    };
    let channel = text_of(&["channel_name"]).filter(|name| !name.is_empty());
    let name = text_of(&["agent_name", "from_name", "from"]).unwrap_or_else(|| "relay".to_owned());
    let is_direct = channel.is_none();
    FrameMeaning::Typed(Box::new(Message {
        delivery_id: frame.delivery_id,
        event_id: frame.msg_id,
        seq: (frame.seq > 0).then_some(frame.seq),
        author: Author { name, agent_id: text_of(&["agent_id", "from_agent_id"]) },
        target: channel.map_or_else(|| frame.agent.clone(), |name| format!("#{name}")),
        body: body.unwrap_or_default(),
        thread_id: text_of(&["thread_id", "parent_id"]),
        priority: priority(data).unwrap_or(if is_direct { 2 } else { 3 }),
        urgency: match frame.mode {
            DeliverMode::Wait => Urgency::Wait,
            DeliverMode::Steer => Urgency::Steer,
        },
        origin,
        queued_at_ms: now_ms,
    }))
}

/// Id of the message and name of the reader, if the frame says that a message was read.
pub(crate) fn read_receipt(frame: &Deliver) -> Option<(&str, &str)> {
    let text = |key: &str| frame.payload.data.get(key)?.as_str();
    (frame.seq == 0 && frame.payload.kind == "message.read").then_some(())?;
    Some((text("message_id")?, text("agent_name")?))
}

/// Sender that the broker itself has noted in a message that it posted for somebody outside of the workspace.
pub(crate) fn relayed_author(data: &Map<String, Value>) -> Option<&str> {
    data.get("metadata")?.get("relay_from")?.as_str()
}

fn result_text(data: &Map<String, Value>) -> Option<String> {
    let output = data.get("output").filter(|output| !output.is_null()).or_else(|| data.get("error"))?;
    Some(output.as_str().map_or_else(|| output.to_string(), str::to_owned))
}

fn priority(data: &Map<String, Value>) -> Option<u8> {
    let given = data.get("priority").or_else(|| data.get("metadata")?.get("priority"))?;
    match given.as_str() {
        Some("low") => Some(1),
        Some("normal") => Some(2),
        Some("high") => Some(3),
        Some("urgent") => Some(4),
        Some(_) => None,
        None => given.as_u64().and_then(|number| u8::try_from(number).ok()).filter(|n| (1..=4).contains(n)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn typed(kind: &str, seq: u64, data: Value) -> Option<Message> {
        let frame = json!({
            "delivery_id": "del_1", "agent_id": "7", "agent": "ada", "msg_id": "42", "seq": seq, "mode": "steer",
            "payload": { "type": kind, "data": data },
        });
        match classify(serde_json::from_value(frame).expect("a frame"), 5) {
            FrameMeaning::Typed(message) => Some(*message),
            FrameMeaning::Silent { .. } => None,
        }
    }

    #[test]
    fn messages_are_typed_with_sender_and_target() {
        let data = json!({ "text": "hi", "agent_name": "bob", "agent_id": "3", "channel_name": "room" });
        let message = typed("message.created", 4, data).expect("a message");
        assert_eq!((message.body.as_str(), message.author.name.as_str()), ("hi", "bob"));
        assert_eq!((message.target.as_str(), message.priority, message.seq), ("#room", 3, Some(4)));
        assert_eq!(message.urgency, Urgency::Steer);
        let direct = typed("dm.received", 5, json!({ "body": "x", "metadata": { "priority": "urgent" } }));
        let direct = direct.expect("a message");
        assert_eq!((direct.target.as_str(), direct.priority), ("ada", 4));
    }

    #[test]
    fn outcomes_are_typed_and_reactions_are_not() {
        let outcome = typed("action.completed", 0, json!({ "output": { "a": 1 } })).expect("an outcome");
        assert_eq!((outcome.body.as_str(), outcome.seq, outcome.has_receipt()), (r#"{"a":1}"#, None, false));
        let failed = typed("action.failed", 0, json!({ "output": null, "error": "no" })).expect("an outcome");
        assert_eq!(failed.body, "no");
        for kind in ["thread.message.created", "direct_message.received", "group_dm.received", ""] {
            assert!(typed(kind, 1, json!({ "text": "x" })).is_some(), "{kind}");
        }
        for silent in ["message.reacted", "message.read", "message.updated", "delivery.expired", "something.new"] {
            assert_eq!(typed(silent, 1, json!({})), None, "{silent}");
        }
    }
}
