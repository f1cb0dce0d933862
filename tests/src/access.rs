//! Every route of the gateway with its authentication class, and every right. Used by the tests of tenancy and rights.

use serde_json::Value;

/// Authentication class of a route (docs/protocol/rest.md, "Authentication classes").
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Class {
    /// No token required.
    None,
    /// No token required; a token that is sent must be a workspace key.
    MaybeKey,
    /// Workspace key.
    Key,
    /// Agent token.
    Agent,
    /// Agent token; a workspace key is refused with 403.
    Acting,
    /// Workspace key or agent token.
    Any,
    /// Workspace key, or observer token with `stream:read`.
    Observe,
    /// Workspace key, or observer token with any scope.
    ReadAnything,
    /// Workspace key, or observer token with a certain scope.
    Read,
    /// Workspace key, agent token, or observer token with a certain scope.
    ReadOrAgent,
    /// As [`Class::ReadOrAgent`], or node token.
    ReadOrAgentOrNode,
    /// Agent or node token; a workspace key is refused with 403.
    Sender,
    /// Operator; workspace tokens are refused.
    Operator,
    /// Token of the inbound webhook in the path.
    Hook,
    /// Node token, checked at the upgrade.
    Socket,
}

/// Right, and the code without it.
type RightAndCode = (&'static str, &'static str);

/// Restriction of a route by rights, or to the handler of an action (docs/protocol/rest.md, "Rights").
#[derive(Clone, Copy, Debug)]
pub struct Restriction {
    pub method: &'static str,
    pub path: &'static str,
    /// Right that agents have by default, and the code without it.
    pub closed_by: Option<RightAndCode>,
    /// Right that agents lack by default and that opens what belongs to others, and the code without it.
    pub opened_by: Option<RightAndCode>,
    /// Code for agents that do not handle the action. No right opens it.
    pub handler_only: Option<&'static str>,
}

const fn closed_or_others(
    (method, path): (&'static str, &'static str),
    closed_by: RightAndCode,
    opened_by: RightAndCode,
) -> Restriction {
    Restriction { method, path, closed_by: Some(closed_by), opened_by: Some(opened_by), handler_only: None }
}

const fn closed(method: &'static str, path: &'static str, by: RightAndCode) -> Restriction {
    Restriction { method, path, closed_by: Some(by), opened_by: None, handler_only: None }
}

const fn others(method: &'static str, path: &'static str, by: RightAndCode) -> Restriction {
    Restriction { method, path, closed_by: None, opened_by: Some(by), handler_only: None }
}

const fn handler_only(method: &'static str, path: &'static str) -> Restriction {
    Restriction { method, path, closed_by: None, opened_by: None, handler_only: Some("forbidden") }
}

/// Rights that agents have by default.
pub const DEFAULT_RIGHTS: [&str; 8] =
    ["send", "join", "spawn", "subscribe", "create_triggers", "define_actions", "release_spawned", "post_through_node"];
/// Rights that agents lack by default.
pub const FURTHER_RIGHTS: [&str; 4] = ["release_any", "read_any_invocation", "read_all_events", "trigger_any"];

/// Returns settings that give these rights, and settings of the others that deny them.
#[must_use]
pub fn settings_of_rights(granted: &[&str]) -> Value {
    let all = DEFAULT_RIGHTS.iter().chain(&FURTHER_RIGHTS);
    all.map(|right| ((*right).to_owned(), Value::Bool(granted.contains(right)))).collect()
}

const SEND: RightAndCode = ("send", "send_denied");
const JOIN: RightAndCode = ("join", "join_denied");
const RELEASE: RightAndCode = ("release_spawned", "release_denied");
const RELEASE_ANY: RightAndCode = ("release_any", "agent_not_spawned_by_caller");
const ALL_EVENTS: RightAndCode = ("read_all_events", "subscription_not_own");
const TRIGGER_ANY: RightAndCode = ("trigger_any", "trigger_not_own");

/// Every route that rights restrict, or that is for the handler of an action. `POST /v1/messages/batch` has an outcome
/// for each post instead.
pub const RESTRICTIONS: &[Restriction] = &[
    closed("POST", "/v1/channels", JOIN),
    closed("POST", "/v1/channels/{channel}/join", JOIN),
    closed("POST", "/v1/channels/{channel}/invite", JOIN),
    closed("POST", "/v1/agents/{agent}/subscription-channel", JOIN),
    closed("POST", "/v1/channels/{channel}/messages", SEND),
    closed("POST", "/v1/messages/{message}/replies", SEND),
    closed("PATCH", "/v1/messages/{message}", SEND),
    closed("POST", "/v1/dm", SEND),
    closed("POST", "/v1/to/{address}", SEND),
    closed("POST", "/v1/dm/group", SEND),
    closed("POST", "/v1/dm/{conversation}/messages", SEND),
    closed("POST", "/v1/dm/{conversation}/participants", SEND),
    closed("DELETE", "/v1/dm/{conversation}/participants/{agent}", SEND),
    closed("POST", "/v1/agents/spawn", ("spawn", "spawn_denied")),
    closed_or_others(("POST", "/v1/agents/release"), RELEASE, RELEASE_ANY),
    closed_or_others(("POST", "/v1/agents/release-exact"), RELEASE, RELEASE_ANY),
    closed_or_others(("DELETE", "/v1/agents/{agent}"), ("release_spawned", "agent_not_spawned_by_caller"), RELEASE_ANY),
    closed("POST", "/v1/subscriptions", ("subscribe", "subscribe_denied")),
    others("GET", "/v1/subscriptions/{subscription}", ALL_EVENTS),
    others("DELETE", "/v1/subscriptions/{subscription}", ALL_EVENTS),
    others("POST", "/v1/subscriptions/{subscription}/replay", ALL_EVENTS),
    others("GET", "/v1/subscriptions/{subscription}/deliveries", ALL_EVENTS),
    others("POST", "/v1/subscriptions/{subscription}/deliveries/{number}/replay", ALL_EVENTS),
    closed("POST", "/v1/actions", ("define_actions", "define_actions_denied")),
    others("GET", "/v1/actions/{action}/invocations/{invocation}", ("read_any_invocation", "invocation_not_own")),
    handler_only("DELETE", "/v1/actions/{action}"),
    handler_only("POST", "/v1/actions/{action}/invocations/{invocation}/complete"),
    closed("POST", "/v1/triggers", ("create_triggers", "trigger_denied")),
    others("PATCH", "/v1/triggers/{trigger}", TRIGGER_ANY),
    others("DELETE", "/v1/triggers/{trigger}", TRIGGER_ANY),
];

/// Method, path, class, and the smallest body with a valid shape.
pub const ROUTES: &[(&str, &str, Class, &str)] = &[
    ("GET", "/health", Class::None, ""),
    ("GET", "/ready", Class::None, ""),
    ("GET", "/openapi.json", Class::None, ""),
    ("GET", "/docs", Class::None, ""),
    ("GET", "/console", Class::None, ""),
    ("GET", "/console/{file}", Class::None, ""),
    ("POST", "/v1/workspaces", Class::MaybeKey, r#"{"name":"w"}"#),
    ("GET", "/v1/workspaces/by-name/{name}", Class::None, ""),
    ("DELETE", "/v1/workspaces/{id}", Class::Key, ""),
    ("GET", "/v1/workspace", Class::ReadAnything, ""),
    ("PATCH", "/v1/workspace", Class::Key, r#"{"metadata":{"touched":true}}"#),
    ("DELETE", "/v1/workspace", Class::Key, ""),
    ("POST", "/v1/observer-tokens", Class::Key, r#"{"name":"intruder","scopes":["stream:read"]}"#),
    ("GET", "/v1/observer-tokens", Class::Key, ""),
    ("GET", "/v1/observer-tokens/{observer}", Class::Key, ""),
    ("PATCH", "/v1/observer-tokens/{observer}", Class::Key, r#"{"name":"touched"}"#),
    ("DELETE", "/v1/observer-tokens/{observer}", Class::Key, ""),
    ("POST", "/v1/observer-tokens/{observer}/rotate", Class::Key, ""),
    ("POST", "/v1/agents", Class::Key, r#"{"name":"intruder"}"#),
    ("GET", "/v1/agents", Class::ReadOrAgent, ""),
    ("GET", "/v1/agents/presence", Class::Any, ""),
    ("POST", "/v1/agents/heartbeat", Class::Agent, "{}"),
    ("POST", "/v1/agents/disconnect", Class::Agent, "{}"),
    ("POST", "/v1/agents/spawn", Class::Any, r#"{"name":"intruder","cli":"sh"}"#),
    ("POST", "/v1/agents/release", Class::Any, r#"{"name":"{agent}"}"#),
    ("POST", "/v1/agents/release-exact", Class::Any, r#"{"name":"{agent}","expected_agent_id":"7"}"#),
    ("GET", "/v1/agents/{agent}", Class::ReadOrAgent, ""),
    ("PATCH", "/v1/agents/{agent}", Class::Key, r#"{"persona":"touched"}"#),
    ("DELETE", "/v1/agents/{agent}", Class::Any, ""),
    ("POST", "/v1/agents/{agent}/rotate-token", Class::Any, "{}"),
    ("GET", "/v1/agent", Class::Agent, ""),
    ("POST", "/v1/agent/node-token", Class::Agent, "{}"),
    ("POST", "/v1/channels", Class::Any, r#"{"name":"intruders"}"#),
    ("GET", "/v1/channels", Class::ReadOrAgentOrNode, ""),
    ("GET", "/v1/channels/{channel}", Class::ReadOrAgentOrNode, ""),
    ("PATCH", "/v1/channels/{channel}", Class::Any, r#"{"topic":"touched"}"#),
    ("DELETE", "/v1/channels/{channel}", Class::Any, ""),
    ("PATCH", "/v1/channels/{channel}/topic", Class::Any, r#"{"topic":"touched"}"#),
    ("POST", "/v1/channels/{channel}/join", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/leave", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/invite", Class::Acting, r#"{"agent_name":"{agent}"}"#),
    ("GET", "/v1/channels/{channel}/members", Class::ReadOrAgent, ""),
    ("POST", "/v1/channels/{channel}/mute", Class::Agent, ""),
    ("POST", "/v1/channels/{channel}/unmute", Class::Agent, ""),
    ("GET", "/v1/channels/{channel}/messages", Class::ReadOrAgent, ""),
    ("POST", "/v1/agents/{agent}/subscription-channel", Class::Any, ""),
    ("POST", "/v1/to/{address}", Class::Acting, r#"{"text":"touched"}"#),
    ("GET", "/v1/sessions/{session}/messages", Class::Key, ""),
    ("POST", "/v1/channels/{channel}/messages", Class::Sender, r#"{"text":"touched"}"#),
    ("POST", "/v1/nodes", Class::Key, r#"{"name":"intruder"}"#),
    ("GET", "/v1/nodes", Class::ReadOrAgent, ""),
    ("GET", "/v1/nodes/{node}", Class::ReadOrAgent, ""),
    ("PATCH", "/v1/nodes/{node}", Class::Key, r#"{"delivery":{"ordering":"seq"}}"#),
    ("DELETE", "/v1/nodes/{node}", Class::Key, ""),
    ("GET", "/v1/nodes/{node}/agents", Class::ReadOrAgent, ""),
    ("POST", "/v1/nodes/{node}/agents", Class::Key, r#"{"agent_name":"{agent}"}"#),
    ("DELETE", "/v1/nodes/{node}/agents/{agent}", Class::Key, ""),
    ("DELETE", "/v1/nodes/{node}/providers/{provider}", Class::Key, ""),
    ("GET", "/v1/deliveries", Class::Agent, ""),
    ("GET", "/v1/observe/mailboxes", Class::Read, ""),
    ("POST", "/v1/deliveries/claim", Class::Agent, "{}"),
    ("GET", "/v1/deliveries/{delivery}/attempts", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/ack", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/fail", Class::Agent, ""),
    ("POST", "/v1/deliveries/{delivery}/defer", Class::Agent, r#"{"available_at":"2030-01-01T00:00:00Z"}"#),
    ("POST", "/v1/messages/batch", Class::Sender, r#"{"messages":[{"channel":"no-such-room","text":"touched"}]}"#),
    ("GET", "/v1/messages/{message}", Class::ReadOrAgent, ""),
    ("GET", "/v1/messages/{message}/replies", Class::ReadOrAgent, ""),
    ("POST", "/v1/messages/{message}/replies", Class::Acting, r#"{"text":"touched"}"#),
    ("POST", "/v1/messages/{message}/read", Class::Agent, ""),
    ("PATCH", "/v1/messages/{message}", Class::Acting, r#"{"text":"touched"}"#),
    ("GET", "/v1/messages/{message}/readers", Class::Any, ""),
    ("GET", "/v1/messages/{message}/reactions", Class::ReadOrAgent, ""),
    ("POST", "/v1/messages/{message}/reactions", Class::Agent, r#"{"emoji":"touched"}"#),
    ("DELETE", "/v1/messages/{message}/reactions/{emoji}", Class::Agent, ""),
    ("GET", "/v1/channels/{channel}/read-status", Class::ReadOrAgent, ""),
    ("GET", "/v1/inbox", Class::Agent, ""),
    ("GET", "/v1/search", Class::ReadOrAgent, ""),
    ("GET", "/v1/activity", Class::Read, ""),
    ("GET", "/v1/workspace/metrics", Class::Read, ""),
    ("GET", "/v1/workspace/usage", Class::Read, ""),
    ("GET", "/v1/messages/{message}/trace", Class::Read, ""),
    ("GET", "/v1/console/messages", Class::Read, ""),
    ("GET", "/v1/console/stats", Class::Key, ""),
    ("GET", "/v1/console/agents", Class::Key, ""),
    ("GET", "/v1/console/costs", Class::Key, ""),
    ("GET", "/v1/workspace/system-prompt", Class::Any, ""),
    ("PUT", "/v1/workspace/system-prompt", Class::Key, r#"{"prompt":"touched"}"#),
    ("GET", "/v1/dm/conversations/all", Class::Read, ""),
    ("GET", "/v1/dm/conversations/{conversation}/messages", Class::Read, ""),
    ("POST", "/v1/dm", Class::Acting, r#"{"to":"{agent}","text":"touched"}"#),
    ("GET", "/v1/dm/conversations", Class::Agent, ""),
    ("POST", "/v1/dm/group", Class::Acting, r#"{"participants":["{agent}"]}"#),
    ("GET", "/v1/dm/{conversation}/messages", Class::Agent, ""),
    ("POST", "/v1/dm/{conversation}/messages", Class::Acting, r#"{"text":"touched"}"#),
    ("POST", "/v1/dm/{conversation}/participants", Class::Acting, r#"{"agent_name":"{agent}"}"#),
    ("DELETE", "/v1/dm/{conversation}/participants/{agent}", Class::Acting, ""),
    ("POST", "/v1/operator/workspaces", Class::Operator, r#"{"name":"w"}"#),
    ("GET", "/v1/operator/workspaces/{id}/quotas", Class::Operator, ""),
    ("PUT", "/v1/operator/workspaces/{id}/quotas", Class::Operator, "{}"),
    ("GET", "/v1/operator/signing-keys", Class::Operator, ""),
    ("POST", "/v1/operator/signing-keys", Class::Operator, "{}"),
    ("DELETE", "/v1/operator/signing-keys/{kid}", Class::Operator, ""),
    ("GET", "/v1/workspace/events", Class::Observe, ""),
    ("GET", "/v1/workspace/events/stream", Class::Observe, ""),
    ("GET", "/v1/ws", Class::Observe, ""),
    ("POST", "/v1/agents/{agent}/events", Class::Any, r#"{"type":"tool.called"}"#),
    ("GET", "/v1/agents/{agent}/events", Class::ReadOrAgent, ""),
    ("POST", "/v1/files/upload", Class::Agent, r#"{"filename":"f","content_type":"text/plain","size_bytes":1}"#),
    ("GET", "/v1/files", Class::ReadOrAgent, ""),
    ("GET", "/v1/files/{file}", Class::ReadOrAgent, ""),
    ("DELETE", "/v1/files/{file}", Class::Agent, ""),
    ("POST", "/v1/files/{file}/complete", Class::Agent, ""),
    ("PUT", "/_relayfiles", Class::None, ""),
    ("GET", "/_relayfiles", Class::None, ""),
    ("POST", "/v1/webhooks", Class::Key, r#"{"channel":"{channel}"}"#),
    ("GET", "/v1/webhooks", Class::Key, ""),
    ("DELETE", "/v1/webhooks/{webhook}", Class::Key, ""),
    ("POST", "/v1/hooks/{webhook}", Class::Hook, r#"{"text":"touched"}"#),
    ("GET", "/v1/dead-letters", Class::Key, ""),
    ("GET", "/v1/dead-letters/summary", Class::Key, ""),
    ("GET", "/v1/dead-letters/{delivery}", Class::Key, ""),
    ("DELETE", "/v1/dead-letters/{delivery}", Class::Key, ""),
    ("POST", "/v1/dead-letters/redrive", Class::Key, r#"{"filter":{}}"#),
    ("GET", "/v1/dead-letters/redrives/{number}", Class::Key, ""),
    ("POST", "/v1/dead-letters/purge", Class::Key, r#"{"filter":{}}"#),
    ("POST", "/v1/subscriptions", Class::Any, r#"{"events":["*"],"url":"https://127.0.0.1:9/"}"#),
    ("GET", "/v1/subscriptions", Class::Any, ""),
    ("GET", "/v1/subscriptions/{subscription}", Class::Any, ""),
    ("DELETE", "/v1/subscriptions/{subscription}", Class::Any, ""),
    ("POST", "/v1/subscriptions/{subscription}/replay", Class::Any, r#"{"since":"2026-01-01T00:00:00Z"}"#),
    ("GET", "/v1/subscriptions/{subscription}/deliveries", Class::Any, ""),
    ("POST", "/v1/subscriptions/{subscription}/deliveries/{number}/replay", Class::Any, ""),
    ("POST", "/v1/actions", Class::Any, r#"{"name":"intruder","handler_agent":"{agent}"}"#),
    ("GET", "/v1/actions", Class::Any, ""),
    ("GET", "/v1/actions/{action}", Class::Any, ""),
    ("DELETE", "/v1/actions/{action}", Class::Any, ""),
    ("POST", "/v1/actions/{action}/invoke", Class::Acting, "{}"),
    ("GET", "/v1/actions/{action}/invocations/{invocation}", Class::Any, ""),
    ("POST", "/v1/actions/{action}/invocations/{invocation}/complete", Class::Any, r#"{"output":"touched"}"#),
    ("POST", "/v1/nodes/{node}/actions/{action}/invoke", Class::Acting, "{}"),
    ("POST", "/v1/triggers", Class::Any, r#"{"action_name":"touched"}"#),
    ("GET", "/v1/triggers", Class::Any, ""),
    ("GET", "/v1/triggers/{trigger}", Class::Any, ""),
    ("PATCH", "/v1/triggers/{trigger}", Class::Any, r#"{"pattern":"touched"}"#),
    ("DELETE", "/v1/triggers/{trigger}", Class::Any, ""),
    ("GET", "/v1/node/ws", Class::Socket, ""),
];
