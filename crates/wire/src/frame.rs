//! Frames of the node socket: JSON text, `v` 1 and a `type` in each.
//!
//! Decoding is lenient (unknown keys are ignored) and never loses the request's `id` when it can be
//! read, because brokers wait for an answer with that id.

use relay_domain::names::{MAX_JSON_DEPTH, nests_too_deeply, spells_nul};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Characters that a refusal tells at most.
const MAX_MESSAGE_CHARS: usize = 300;

/// A frame from a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Inbound {
    /// `node.register`
    Register(Box<Register>),
    /// `node.heartbeat`
    Heartbeat(Box<Heartbeat>),
    /// `node.deregister`
    Deregister,
    /// `agent.register`
    AgentRegister(AgentRegister),
    /// `agent.recover`
    AgentRecover(AgentRecover),
    /// `agent.deregister`
    AgentDeregister(AgentDeregister),
    /// `inventory.sync`
    Inventory(Inventory),
    /// `delivery.ack`
    Ack(Ack),
    /// `action.result`
    ActionResult(ActionResult),
    /// `action.accept`
    ActionAccept(ActionAccept),
    /// `node.spawn`
    Spawn(Spawn),
    /// Something that needs no answer: `pong`, `ping`, and the subscriptions that some clients send.
    Ignored,
}

/// A frame that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The request's id, when it could be read.
    pub id: Option<String>,
    /// What is wrong with it.
    pub message: String,
}

/// A decoded frame with the id that its answer carries.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// The request's id.
    pub id: Option<String>,
    /// The frame.
    pub frame: Inbound,
}

/// A provider's identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// The provider.
    pub name: String,
    /// This run of it.
    pub instance_id: String,
}

/// A capability as a provider advertises it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capability {
    /// What it is called.
    pub name: String,
    /// `action`, `capacity`, or an older word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Whether it claims the workspace-wide name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub global: Option<bool>,
    /// Whether invocations may wait for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<bool>,
    /// Free-form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
}

impl Capability {
    /// `capacity` or `action`: the canonical word wins, otherwise the name tells.
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

/// `node.register`
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Register {
    /// The node's name.
    pub name: String,
    /// Must be the token's node.
    pub node_id: String,
    /// Absent: the provider is called `default`.
    #[serde(default)]
    pub provider: Option<Provider>,
    /// Replaces the provider's set.
    pub capabilities: Vec<Capability>,
    /// 0 is unlimited.
    pub max_agents: u32,
    /// Tags.
    pub tags: Vec<String>,
    /// `owner/name` of repositories, kept as tags.
    #[serde(default)]
    pub repo_keys: Option<Vec<String>>,
    /// Free text.
    pub version: String,
}

/// `node.heartbeat`
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Heartbeat {
    /// Must be the connection's node, if given.
    #[serde(default)]
    pub node_id: Option<String>,
    /// From 0 to 1; some clients send null.
    #[serde(default)]
    pub load: Option<f64>,
    /// Whether somebody measured it. Some clients do not say.
    #[serde(default)]
    pub load_reported: Option<bool>,
    /// Agents that run.
    #[serde(default)]
    pub active_agents: u32,
    /// Whether handlers answer.
    #[serde(default)]
    pub handlers_live: bool,
    /// The whole capability list, if it changed.
    #[serde(default)]
    pub capabilities: Option<Vec<Capability>>,
    /// 0 is unlimited.
    #[serde(default)]
    pub max_agents: Option<u32>,
    /// Free text.
    #[serde(default)]
    pub version: Option<String>,
}

/// `agent.register`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AgentRegister {
    /// The agent's name.
    pub name: String,
    /// The spawn that this fulfils.
    #[serde(default)]
    pub invocation_id: Option<String>,
    /// Handle for resuming.
    #[serde(default)]
    pub session_ref: Option<String>,
    /// Whether the session can be resumed.
    #[serde(default)]
    pub resumable: Option<bool>,
    /// Whether it joins `general`; default true.
    #[serde(default)]
    pub auto_join_general: Option<bool>,
}

/// `agent.recover`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AgentRecover {
    /// The agent's name.
    pub name: String,
    /// The identity that the name must still have.
    pub expected_agent_id: String,
    /// Handle for resuming.
    #[serde(default)]
    pub session_ref: Option<String>,
    /// Whether the session can be resumed.
    #[serde(default)]
    pub resumable: Option<bool>,
}

/// `agent.deregister`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AgentDeregister {
    /// Which agent.
    pub agent_id: String,
}

/// `inventory.sync`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Inventory {
    /// The provider's complete live set.
    pub agents: Vec<InventoryEntry>,
}

/// One agent of an inventory.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct InventoryEntry {
    /// Its id.
    pub agent_id: String,
    /// Its name.
    pub name: String,
    /// The invocation that brought it up.
    #[serde(default)]
    pub invocation_id: Option<String>,
    /// Handle for resuming.
    #[serde(default)]
    pub session_ref: Option<String>,
}

/// `node.spawn`: the node brings an agent up on itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Spawn {
    /// As the body of a spawn by REST.
    pub input: Map<String, Value>,
}

/// `delivery.ack`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Ack {
    /// The agent's name.
    pub agent: String,
    /// Everything up to here.
    pub up_to_seq: u64,
}

/// `action.result`: one of `output` and `error`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ActionResult {
    /// The invocation.
    pub invocation_id: String,
    /// What it brought; null counts.
    #[serde(default, deserialize_with = "crate::field::present")]
    pub output: Option<Option<Value>>,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<String>,
    /// False for progress of a long task: it is at work, and what it says of that is not kept.
    #[serde(default, rename = "final")]
    pub is_final: Option<bool>,
}

/// `action.accept`: a long task has begun, and may take as long as it needs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ActionAccept {
    /// The invocation.
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
/// [`Refusal`] for text that is no JSON object, has no `v` of 1 or no known `type`, lacks a field,
/// nests too deeply, or spells the character U+0000, which cannot be stored.
/// A refused frame has no effect and the connection goes on.
pub fn decode(text: &str) -> Result<Decoded, Refusal> {
    let refused = |id: Option<String>, message: &str| Refusal { id, message: shortened(message) };
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
    // Sent unversioned by a published client.
    if matches!(kind, "pong" | "ping" | "subscribe" | "unsubscribe") {
        return Ok(Decoded { id, frame: Inbound::Ignored });
    }
    if head.v.as_ref().and_then(Value::as_u64) != Some(1) {
        return Err(refused(id, "v must be 1"));
    }
    if spells_nul(text.as_bytes()) {
        return Err(refused(id, "the character U+0000 cannot be stored"));
    }
    if nests_too_deeply(text.as_bytes()) {
        return Err(refused(id, &format!("a frame has at most {MAX_JSON_DEPTH} levels")));
    }
    let frame = match kind {
        "node.register" => body(text).map(|frame| Inbound::Register(Box::new(frame))),
        "node.heartbeat" => body(text).map(|frame| Inbound::Heartbeat(Box::new(frame))),
        "node.deregister" => Ok(Inbound::Deregister),
        "agent.register" => body(text).map(Inbound::AgentRegister),
        "agent.recover" => body(text).map(Inbound::AgentRecover),
        "agent.deregister" => body(text).map(Inbound::AgentDeregister),
        "inventory.sync" => body(text).map(Inbound::Inventory),
        "delivery.ack" => body(text).map(Inbound::Ack),
        "action.result" => body(text).map(Inbound::ActionResult),
        "action.accept" => body(text).map(Inbound::ActionAccept),
        "node.spawn" => body(text).map(Inbound::Spawn),
        other => Err(format!("unknown type {}", other.escape_debug())),
    };
    match frame {
        Ok(frame) => Ok(Decoded { id, frame }),
        Err(message) => Err(refused(id, &message)),
    }
}

/// Parser errors quote what they met, which may be as long as the frame.
fn shortened(message: &str) -> String {
    let end = message.char_indices().nth(MAX_MESSAGE_CHARS).map(|(at, _)| at);
    end.map_or_else(|| message.to_owned(), |end| format!("{}…", &message[..end]))
}

fn body<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// A `reply` frame. Without an id in the request there is nothing to correlate: the id is then empty.
#[must_use]
pub fn reply(id: Option<&str>, data: &Value) -> String {
    json!({ "v": 1, "id": id.unwrap_or_default(), "type": "reply", "ok": true, "data": data }).to_string()
}

/// An `error` frame.
#[must_use]
pub fn error(id: Option<&str>, code: &str, message: &str) -> String {
    json!({ "v": 1, "id": id.unwrap_or_default(), "type": "error", "ok": false, "code": code, "message": message })
        .to_string()
}

/// A `context.update` frame: best-effort, never acknowledged.
#[must_use]
pub fn context_update(topic: &str, event: &str, agent_ids: &[String], data: &Value) -> String {
    json!({ "v": 1, "type": "context.update", "topic": topic, "event": event, "agent_ids": agent_ids, "data": data })
        .to_string()
}

/// A `deliver` frame outside the mailbox: seq 0, best-effort, with an id of its own (contract: node.md 7.2).
#[must_use]
pub fn event_deliver(agent_id: &str, agent: &str, event_id: &str, event: &str, data: &Value) -> String {
    json!({
        "v": 1, "type": "deliver", "delivery_id": event_id, "agent_id": agent_id, "agent": agent,
        "msg_id": event_id, "seq": 0, "mode": "wait", "payload": { "type": event, "data": data },
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> Refusal {
        decode(text).expect_err(text)
    }

    #[test]
    fn a_bad_frame_is_refused_with_its_id_when_that_can_be_read() {
        assert_eq!(refusal("not json").id, None);
        assert_eq!(refusal("[]").id, None);
        assert_eq!(refusal(r#"{"id":"7","type":"inventory.sync","agents":[]}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":2,"id":"7","type":"inventory.sync","agents":[]}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":"7","type":"nope"}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":"7"}"#).id.as_deref(), Some("7"));
        assert_eq!(refusal(r#"{"v":1,"id":7,"type":"delivery.ack","agent":"a","up_to_seq":-1}"#).id, None);
    }

    #[test]
    fn what_clients_send_is_understood() {
        let heartbeat =
            r#"{"v":1,"type":"node.heartbeat","load":null,"active_agents":1,"handlers_live":false,"more":{}}"#;
        assert!(matches!(decode(heartbeat).map(|d| d.frame), Ok(Inbound::Heartbeat(_))));
        for ignored in [r#"{"type":"pong"}"#, r#"{"type":"subscribe","channels":["a"]}"#] {
            assert_eq!(decode(ignored).map(|d| d.frame), Ok(Inbound::Ignored));
        }
        let ack = r#"{"v":1,"type":"delivery.ack","agent":"ada","up_to_seq":3}"#;
        assert_eq!(decode(ack).map(|d| d.frame), Ok(Inbound::Ack(Ack { agent: "ada".into(), up_to_seq: 3 })));
    }

    #[test]
    fn a_legacy_kind_is_classed_by_name() {
        let kind = |name: &str, kind: Option<&str>| {
            Capability { name: name.into(), kind: kind.map(Into::into), global: None, queue: None, metadata: None }
                .canonical_kind()
        };
        assert_eq!(kind("spawn:claude", Some("spawn")), "capacity");
        assert_eq!(kind("build", Some("run")), "action");
        assert_eq!(kind("spawn:x", Some("action")), "action");
    }
}
