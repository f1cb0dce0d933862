//! Frames of the node socket: JSON text, each with `v` 1 and a `type`. Main types: [`InboundFrame`] and [`decode`];
//! used by the gateway, and by the broker to encode them.
//!
//! Decoding is lenient (unknown keys are ignored) and preserves the request's `id` whenever it is readable, because
//! brokers wait for an answer with that id.

use relay_domain::{
    AgentId,
    names::{MAX_JSON_DEPTH, contains_nul_escape, exceeds_max_depth},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::messages::batch::BatchBody;

/// Maximum length of an error message, in characters.
const MAX_MESSAGE_CHARS: usize = 300;

/// Frame from a node.
#[derive(Debug, Clone, PartialEq)]
pub enum InboundFrame {
    /// Frame of type `node.register`.
    Register(Box<Register>),
    /// Frame of type `node.heartbeat`.
    Heartbeat(Box<Heartbeat>),
    /// Frame of type `node.deregister`.
    Deregister,
    /// Frame of type `agent.register`.
    AgentRegister(AgentRegister),
    /// Frame of type `agent.recover`.
    AgentRecover(AgentRecover),
    /// Frame of type `agent.deregister`.
    AgentDeregister(AgentDeregister),
    /// Frame of type `inventory.sync`.
    Inventory(Inventory),
    /// Frame of type `delivery.ack`.
    Ack(Ack),
    /// Frame of type `action.result`.
    ActionResult(ActionResult),
    /// Frame of type `action.accept`.
    ActionAccept(ActionAccept),
    /// Frame of type `node.spawn`.
    Spawn(Spawn),
    /// Frame of type `message.send`.
    MessageSend(BatchBody),
    /// Frame without an answer: `pong`, `ping`, and subscriptions that some clients send.
    Ignored,
}

/// Rejected frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameRefusal {
    /// Id of the request, if it was readable.
    pub id: Option<String>,
    /// Problem of the frame, for the client.
    pub message: String,
}

/// Decoded frame with the id for its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodedFrame {
    /// Id of the request.
    pub id: Option<String>,
    /// The frame itself.
    pub frame: InboundFrame,
}

/// Identity of a provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// Name of the provider.
    pub name: String,
    /// Id of this run of the provider.
    pub instance_id: String,
}

/// Capability advertised by a provider.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capability {
    /// Name of the capability.
    pub name: String,
    /// `action`, `capacity`, or a legacy word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// `true` claims the workspace-wide name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global: Option<bool>,
    /// `true` lets invocations wait for the provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<bool>,
    /// Free-form metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
}

impl Capability {
    /// Returns `capacity` or `action`: the declared kind if it is canonical, otherwise derived from the name.
    #[must_use]
    pub fn canonical_kind(&self) -> &'static str {
        match self.kind.as_deref() {
            Some("action") => "action",
            Some("capacity") => "capacity",
            _ if self.name == "spawn" || self.name == "release" || self.name.starts_with("spawn:") => "capacity",
            _ => "action",
        }
    }
}

/// Frame of type `node.register`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Register {
    /// Name of the node.
    pub name: String,
    /// Id of the node; must match the token.
    pub node_id: String,
    /// Identity of the provider; absent for the provider `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<Provider>,
    /// Replaces the capabilities of the provider.
    pub capabilities: Vec<Capability>,
    /// Maximum number of agents; 0 for unlimited.
    pub max_agents: u32,
    /// Free-form tags.
    pub tags: Vec<String>,
    /// `owner/name` of repositories, stored as tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo_keys: Option<Vec<String>>,
    /// Free-form version of the software.
    pub version: String,
    /// Machine of a direct node, which is part of its agent's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
}

/// Frame of type `node.heartbeat`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Id of the node; must match the connection if present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<String>,
    /// Load from 0 to 1; some clients send null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// `true` if the load was measured. Some clients omit it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_reported: Option<bool>,
    /// Number of running agents.
    #[serde(default)]
    pub active_agents: u32,
    /// `true` if the handlers respond.
    #[serde(default)]
    pub handlers_live: bool,
    /// Name of the node, if it is repeated or has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All capabilities, if they changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Vec<Capability>>,
    /// Maximum number of agents; 0 for unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_agents: Option<u32>,
    /// Free-form version of the software.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Frame of type `agent.register`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRegister {
    /// Name of the agent.
    pub name: String,
    /// Id of the spawn invocation that this fulfils.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invocation_id: Option<String>,
    /// Handle for resuming the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_ref: Option<String>,
    /// `true` if the session can be resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumable: Option<bool>,
    /// `true` (default): the agent joins `general`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_join_general: Option<bool>,
}

/// Frame of type `agent.recover`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecover {
    /// Name of the agent.
    pub name: String,
    /// Id that the named agent must still have.
    pub expected_agent_id: String,
    /// Handle for resuming the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_ref: Option<String>,
    /// `true` if the session can be resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumable: Option<bool>,
}

/// Frame of type `agent.deregister`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentDeregister {
    /// Id of the agent.
    pub agent_id: String,
}

/// Frame of type `inventory.sync`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// All running agents of the provider.
    pub agents: Vec<InventoryEntry>,
}

/// Agent in an inventory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryEntry {
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub name: String,
    /// Id of the invocation that spawned it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invocation_id: Option<String>,
    /// Handle for resuming the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_ref: Option<String>,
}

/// `node.spawn`: the node spawns an agent on itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    /// Input as in the body of a spawn over REST.
    pub input: Map<String, Value>,
}

/// Frame of type `delivery.ack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ack {
    /// Name of the agent.
    pub agent: String,
    /// Acknowledges every delivery up to this seq.
    pub up_to_seq: u64,
}

/// `action.result`: one of `output` and `error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActionResult {
    /// Id of the invocation.
    pub invocation_id: String,
    /// Output; null is a value.
    #[serde(default, deserialize_with = "crate::field::present", skip_serializing_if = "Option::is_none")]
    pub output: Option<Option<Value>>,
    /// Error of a failed invocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// `false` for a progress report of a long-running invocation; its content is not stored.
    #[serde(default, rename = "final", skip_serializing_if = "Option::is_none")]
    pub is_final: Option<bool>,
}

/// `action.accept`: the work has begun and may take as long as it needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionAccept {
    /// Id of the invocation.
    pub invocation_id: String,
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    v: Option<Value>,
    #[serde(default, rename = "type")]
    kind: Option<Value>,
    #[serde(default)]
    id: Option<Value>,
}

/// Decodes one text frame.
///
/// # Errors
/// [`FrameRefusal`] for a text that is not a JSON object, has no `v` of 1 or no known `type`, lacks a field, nests too
/// deeply, or contains the character U+0000, which cannot be stored. A refused frame has no effect and the connection
/// stays open.
pub fn decode(text: &str) -> Result<DecodedFrame, FrameRefusal> {
    let refused = |id: Option<String>, message: &str| FrameRefusal { id, message: truncate_message(message) };
    if !text.trim_start().starts_with('{') {
        return Err(refused(None, "a frame is one JSON object"));
    }
    let head: Head = serde_json::from_str(text).map_err(|_| match serde_json::from_str::<Value>(text) {
        Ok(frame) => refused(frame["id"].as_str().map(ToOwned::to_owned), "a key is repeated"),
        Err(_) => refused(None, "a frame is one JSON object"),
    })?;
    let id = head.id.as_ref().and_then(Value::as_str).map(ToOwned::to_owned);
    let Some(kind) = head.kind.as_ref().and_then(Value::as_str) else {
        return Err(refused(id, "type is missing"));
    };
    // A published client sends these without a version.
    if matches!(kind, "pong" | "ping" | "subscribe" | "unsubscribe") {
        return Ok(DecodedFrame { id, frame: InboundFrame::Ignored });
    }
    if head.v.as_ref().and_then(Value::as_u64) != Some(1) {
        return Err(refused(id, "v must be 1"));
    }
    // The contents of a batch are checked post by post.
    if kind == "message.send" {
        let frame = parse_body(text).map(InboundFrame::MessageSend);
        return match frame {
            Ok(frame) => Ok(DecodedFrame { id, frame }),
            Err(message) => Err(refused(id, &message)),
        };
    }
    if contains_nul_escape(text.as_bytes()) {
        return Err(refused(id, "the character U+0000 cannot be stored"));
    }
    if exceeds_max_depth(text.as_bytes()) {
        return Err(refused(id, &format!("a frame has at most {MAX_JSON_DEPTH} levels")));
    }
    let frame = match kind {
        "node.register" => parse_body(text).map(|frame| InboundFrame::Register(Box::new(frame))),
        "node.heartbeat" => parse_body(text).map(|frame| InboundFrame::Heartbeat(Box::new(frame))),
        "node.deregister" => Ok(InboundFrame::Deregister),
        "agent.register" => parse_body(text).map(InboundFrame::AgentRegister),
        "agent.recover" => parse_body(text).map(InboundFrame::AgentRecover),
        "agent.deregister" => parse_body(text).map(InboundFrame::AgentDeregister),
        "inventory.sync" => parse_body(text).map(InboundFrame::Inventory),
        "delivery.ack" => parse_body(text).map(InboundFrame::Ack),
        "action.result" => parse_body(text).map(InboundFrame::ActionResult),
        "action.accept" => parse_body(text).map(InboundFrame::ActionAccept),
        "node.spawn" => parse_body(text).map(InboundFrame::Spawn),
        other => Err(format!("unknown type {}", other.escape_debug())),
    };
    match frame {
        Ok(frame) => Ok(DecodedFrame { id, frame }),
        Err(message) => Err(refused(id, &message)),
    }
}

/// Truncates a parser error, which quotes its input and may be as long as the frame.
fn truncate_message(message: &str) -> String {
    let end = message.char_indices().nth(MAX_MESSAGE_CHARS).map(|(at, _)| at);
    end.map_or_else(|| message.to_owned(), |end| format!("{}…", &message[..end]))
}

fn parse_body<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// Encodes a frame of a node, with the id for its answer. `None` for [`InboundFrame::Ignored`]: it stands for several.
#[must_use]
pub fn encode_from_node(id: Option<&str>, frame: &InboundFrame) -> Option<String> {
    let (kind, body) = match frame {
        InboundFrame::Register(body) => ("node.register", serde_json::to_value(body)),
        InboundFrame::Heartbeat(body) => ("node.heartbeat", serde_json::to_value(body)),
        InboundFrame::Deregister => ("node.deregister", Ok(json!({}))),
        InboundFrame::AgentRegister(body) => ("agent.register", serde_json::to_value(body)),
        InboundFrame::AgentRecover(body) => ("agent.recover", serde_json::to_value(body)),
        InboundFrame::AgentDeregister(body) => ("agent.deregister", serde_json::to_value(body)),
        InboundFrame::Inventory(body) => ("inventory.sync", serde_json::to_value(body)),
        InboundFrame::Ack(body) => ("delivery.ack", serde_json::to_value(body)),
        InboundFrame::ActionResult(body) => ("action.result", serde_json::to_value(body)),
        InboundFrame::ActionAccept(body) => ("action.accept", serde_json::to_value(body)),
        InboundFrame::Spawn(body) => ("node.spawn", serde_json::to_value(body)),
        InboundFrame::MessageSend(body) => ("message.send", serde_json::to_value(body)),
        InboundFrame::Ignored => return None,
    };
    // Structs of strings, numbers and JSON values always encode, and to objects.
    let Ok(Value::Object(fields)) = body else { return None };
    let mut frame = Map::new();
    frame.insert("v".to_owned(), json!(1));
    frame.insert("type".to_owned(), json!(kind));
    if let Some(id) = id {
        frame.insert("id".to_owned(), json!(id));
    }
    frame.extend(fields);
    Some(Value::Object(frame).to_string())
}

/// Encodes a `reply` frame. The id is empty if the request had none. Data of strings, numbers and JSON always encode.
#[must_use]
pub fn encode_reply<T: Serialize>(id: Option<&str>, data: &T) -> String {
    serde_json::to_string(&Reply { v: 1, id: id.unwrap_or_default(), r#type: "reply", ok: true, data })
        .unwrap_or_default()
}

#[derive(Serialize)]
struct Reply<'a, T> {
    v: u8,
    id: &'a str,
    r#type: &'static str,
    ok: bool,
    data: &'a T,
}

/// Encodes an `error` frame. The id is empty if the request had none.
#[must_use]
pub fn encode_error(id: Option<&str>, code: &str, message: &str) -> String {
    json!({ "v": 1, "id": id.unwrap_or_default(), "type": "error", "ok": false, "code": code, "message": message })
        .to_string()
}

/// Encodes a `context.update` frame: best-effort, never acknowledged.
#[must_use]
pub fn encode_context_update(topic: &str, event: &str, agent_ids: &[String], data: &Value) -> String {
    json!({ "v": 1, "type": "context.update", "topic": topic, "event": event, "agent_ids": agent_ids, "data": data })
        .to_string()
}

/// Encodes the `delivery.accepted` before the first `deliver` of a row, `del_<message>_<agent>`, to a direct node.
#[must_use]
pub fn encode_delivery_accepted(agent: AgentId, delivery_id: &str) -> String {
    let message_id = delivery_id.split('_').nth(1).unwrap_or_default();
    format!(
        r#"{{"v":1,"type":"context.update","topic":"agent","event":"delivery.accepted","agent_ids":["{agent}"],"data":{{"delivery_id":"{delivery_id}","message_id":"{message_id}"}}}}"#
    )
}

/// Encodes a `deliver` frame outside the mailbox: seq 0, best-effort, with its own id (docs/protocol/node.md, "Event
/// frames").
#[must_use]
pub fn encode_event_delivery(agent_id: &str, agent: &str, event_id: &str, event: &str, data: &Value) -> String {
    json!({
        "v": 1, "type": "deliver", "delivery_id": event_id, "agent_id": agent_id, "agent": agent,
        "msg_id": event_id, "seq": 0, "mode": "wait", "payload": { "type": event, "data": data },
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> FrameRefusal {
        decode(text).expect_err(text)
    }

    #[test]
    fn a_bad_frame_is_refused_with_its_id_if_readable() {
        assert_eq!(refusal("not json").id, None);
        assert_eq!(refusal("[]").id, None);
        assert_eq!(refusal(r#"{"id":"7","type":"inventory.sync","agents":[]}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":2,"id":"7","type":"inventory.sync","agents":[]}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":"7","type":"nope"}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":"7"}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":7,"type":"delivery.ack","agent":"a","up_to_seq":-1}"#).id, None);
    }

    #[test]
    fn frames_of_published_clients_are_decoded() {
        let heartbeat =
            r#"{"v":1,"type":"node.heartbeat","load":null,"active_agents":1,"handlers_live":false,"more":{}}"#;
        assert!(matches!(decode(heartbeat).map(|d| d.frame), Ok(InboundFrame::Heartbeat(_))));
        for ignored in [r#"{"type":"pong"}"#, r#"{"type":"subscribe","channels":["a"]}"#] {
            assert_eq!(decode(ignored).map(|d| d.frame), Ok(InboundFrame::Ignored));
        }
        let ack = r#"{"v":1,"type":"delivery.ack","agent":"ada","up_to_seq":3}"#;
        assert_eq!(decode(ack).map(|d| d.frame), Ok(InboundFrame::Ack(Ack { agent: "ada".into(), up_to_seq: 3 })));
    }

    #[test]
    fn encoded_frames_are_decoded_to_the_same() {
        let result = |output, error| {
            InboundFrame::ActionResult(ActionResult { invocation_id: "inv_1".into(), output, error, is_final: None })
        };
        let entry = InventoryEntry {
            agent_id: "7".into(),
            name: "ada".into(),
            invocation_id: None,
            session_ref: Some("s".into()),
        };
        for frame in [
            InboundFrame::Ack(Ack { agent: "ada".into(), up_to_seq: 3 }),
            InboundFrame::Inventory(Inventory { agents: vec![entry] }),
            InboundFrame::Deregister,
            result(Some(None), None),
            result(Some(Some(json!({ "a": [1] }))), None),
            result(None, Some("failed".into())),
            InboundFrame::MessageSend(
                serde_json::from_str(r#"{"messages":[{"to":"ada","text":"a"},7]}"#).expect("a batch"),
            ),
        ] {
            let text = encode_from_node(Some("q-1"), &frame).expect("a frame");
            assert_eq!(decode(&text), Ok(DecodedFrame { id: Some("q-1".into()), frame }), "{text}");
        }
        let ack = InboundFrame::Ack(Ack { agent: "a".into(), up_to_seq: 0 });
        let text = encode_from_node(None, &ack).expect("a frame");
        assert_eq!(text, r#"{"v":1,"type":"delivery.ack","agent":"a","up_to_seq":0}"#);
    }

    #[test]
    fn a_legacy_kind_is_classified_by_name() {
        let kind = |name: &str, kind: Option<&str>| {
            Capability { name: name.into(), kind: kind.map(Into::into), global: None, queue: None, metadata: None }
                .canonical_kind()
        };
        assert_eq!(kind("spawn:claude", Some("spawn")), "capacity");
        assert_eq!(kind("build", Some("run")), "action");
        assert_eq!(kind("spawn:x", Some("action")), "action");
    }
}
