//! Frames that the engine sends on the node socket, as a node reads them. Main types: [`EngineFrame`] and [`decode`];
//! used by the broker.
//!
//! Decoding tolerates unknown keys and unknown types, so that a node outlives additions to the protocol.

use serde::{Deserialize, de::Error as _};
use serde_json::{Map, Value};

/// Frame from the engine.
#[derive(Debug, Clone, PartialEq)]
pub enum EngineFrame {
    /// Frame of type `deliver`.
    Deliver(Box<Deliver>),
    /// Frame of type `action.invoke`.
    Invoke(Box<ActionInvoke>),
    /// Frame of type `reply`.
    Reply(Reply),
    /// Frame of type `error`.
    Error(ErrorReply),
    /// Frame that asks nothing of a node: `context.update`, and types that are not known.
    Ignored {
        /// Its type.
        kind: String,
    },
}

/// Frame of type `deliver`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Deliver {
    /// Id of the delivery.
    pub delivery_id: String,
    /// Id of the recipient.
    pub agent_id: String,
    /// Name of the recipient; acks repeat it.
    pub agent: String,
    /// Id of the message, unique for each delivery of a recipient.
    pub msg_id: String,
    /// Position in the recipient's mailbox; 0 for a frame without a row.
    pub seq: u64,
    /// Request to interrupt the recipient, or not.
    pub mode: DeliverMode,
    /// The content.
    pub payload: Payload,
}

/// Urgency of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum DeliverMode {
    /// In its turn.
    Wait,
    /// Interrupts the recipient.
    Steer,
}

/// From a text only: a derived implementation takes an object such as `{"wait":null}` as well.
impl TryFrom<String> for DeliverMode {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.as_str() {
            "wait" => Ok(Self::Wait),
            "steer" => Ok(Self::Steer),
            _ => Err("unknown mode, expected wait or steer"),
        }
    }
}

/// Content of a delivery.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct Payload {
    /// Kind of the content, such as `message.created`; empty if there is none.
    pub kind: String,
    /// The content itself.
    pub data: Map<String, Value>,
}

/// From an object only: a derived implementation takes a list of the values as well.
impl TryFrom<Map<String, Value>> for Payload {
    type Error = &'static str;

    fn try_from(mut fields: Map<String, Value>) -> Result<Self, Self::Error> {
        let kind = match fields.remove("type") {
            None => String::new(),
            Some(Value::String(kind)) => kind,
            Some(_) => return Err("the type of a payload is no text"),
        };
        let data = match fields.remove("data") {
            None => Map::new(),
            Some(Value::Object(data)) => data,
            Some(_) => return Err("the data of a payload is no object"),
        };
        Ok(Self { kind, data })
    }
}

/// Frame of type `action.invoke`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ActionInvoke {
    /// Id of the invocation, the same for each attempt.
    pub invocation_id: String,
    /// Name of the capability or action.
    pub action: String,
    /// Input of the caller.
    #[serde(default)]
    pub input: Map<String, Value>,
    /// Id of the agent that handles the action, if an agent does.
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Name of that agent.
    #[serde(default)]
    pub agent_name: Option<String>,
    /// Id of the caller, if the capability asked for it.
    #[serde(default)]
    pub caller_id: Option<String>,
    /// Name of the caller.
    #[serde(default)]
    pub caller_name: Option<String>,
}

/// Frame of type `reply`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Reply {
    /// Id of the request; empty if it had none.
    #[serde(default)]
    pub id: String,
    /// Data of the answer.
    #[serde(default)]
    pub data: Value,
}

/// Frame of type `error`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ErrorReply {
    /// Id of the request; empty if it had none or was not readable.
    #[serde(default)]
    pub id: String,
    /// Stable code for programs.
    #[serde(default)]
    pub code: String,
    /// Text for people.
    #[serde(default)]
    pub message: String,
}

#[derive(Deserialize)]
struct Head {
    #[serde(rename = "type")]
    kind: String,
}

/// Decodes one text frame.
///
/// # Errors
/// If the text is not a JSON object with a `type`, or a frame of a known type lacks a field.
pub fn decode(text: &str) -> Result<EngineFrame, serde_json::Error> {
    // A derived implementation takes a list of the values as well.
    if !text.trim_start().starts_with('{') {
        return Err(serde_json::Error::custom("a frame is an object"));
    }
    let head: Head = serde_json::from_str(text)?;
    Ok(match head.kind.as_str() {
        "deliver" => EngineFrame::Deliver(serde_json::from_str(text)?),
        "action.invoke" => EngineFrame::Invoke(serde_json::from_str(text)?),
        "reply" => EngineFrame::Reply(serde_json::from_str(text)?),
        "error" => EngineFrame::Error(serde_json::from_str(text)?),
        _ => EngineFrame::Ignored { kind: head.kind },
    })
}

#[cfg(test)]
mod tests {
    use super::super::frame;
    use super::*;

    #[test]
    fn frames_of_the_engine_are_decoded() {
        let event = frame::encode_event_delivery("7", "ada", "evt-1", "message.reacted", &serde_json::json!({"a": 1}));
        let Ok(EngineFrame::Deliver(deliver)) = decode(&event) else { panic!("{event}") };
        assert_eq!((deliver.seq, deliver.agent.as_str(), deliver.mode), (0, "ada", DeliverMode::Wait));
        assert_eq!(deliver.payload.kind, "message.reacted");
        let reply = frame::encode_reply(Some("q"), &Value::Null);
        assert_eq!(decode(&reply).ok(), Some(EngineFrame::Reply(Reply { id: "q".into(), data: Value::Null })));
        let refused = frame::encode_error(None, "code", "text");
        assert!(matches!(decode(&refused), Ok(EngineFrame::Error(error)) if error.code == "code"));
        let update = frame::encode_context_update("presence", "e", &[], &Value::Null);
        assert_eq!(decode(&update).ok(), Some(EngineFrame::Ignored { kind: "context.update".into() }));
        assert!(decode(r#"{"v":1}"#).is_err() && decode(r#"{"type":"deliver"}"#).is_err());
    }

    #[test]
    fn a_list_is_no_object() {
        for text in ["[]", r#"["reply"]"#, r#"["error"]"#, r#" ["unknown"]"#] {
            assert!(decode(text).is_err(), "{text}");
        }
        let right = serde_json::json!({
            "type": "deliver", "delivery_id": "d", "agent_id": "7", "agent": "ada", "msg_id": "m", "seq": 1, "mode": "wait",
            "payload": { "type": "message.created", "data": { "text": "hi" } },
        });
        assert!(decode(&right.to_string()).is_ok());
        let wrong = [
            ("payload", serde_json::json!([])),
            ("payload", serde_json::json!(["message.created", { "text": "hi" }])),
            ("mode", serde_json::json!({ "wait": null })),
        ];
        for (key, value) in wrong {
            let mut frame = right.clone();
            frame[key] = value;
            assert!(decode(&frame.to_string()).is_err(), "{frame}");
        }
    }
}
