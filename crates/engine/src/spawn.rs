//! Spawn and release: agents that nodes bring up and end when they are asked to (contract: node.md 8.4 to 8.6).
//!
//! Both are invocations. What a spawn is given goes to its node untouched; only what places it is read.

use relay_domain::{
    AgentId, InvocationId, NodeId, WorkspaceScope,
    action::{MAX_ACTION_NAME_BYTES, RELEASE, SPAWN, SPAWN_PREFIX, WORKSPACE_CALLER},
    names::{MAX_NOTE_BYTES, check_agent_name, check_length, check_name, is_channel_name, strip_hash},
    token::TokenHash,
};
use relay_store::{
    AgentRow, DeleteIf,
    hosting::Fence,
    invoke::{Handler, Waits},
};
use serde_json::{Map, Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    actions::{Acknowledged, Call, InvokeAction},
    auth::{AgentCaller, Credential},
    idempotency::ClientKey,
};

/// Channels that an agent joins because its spawn says so; what is beyond it does not count.
const JOINED_CHANNELS: usize = 32;

/// A request to end an agent.
#[derive(Debug, Default)]
pub struct ReleaseAgent {
    /// Its name.
    pub name: String,
    /// Why, for its node.
    pub reason: Option<String>,
    /// Whether it is deleted once it has ended.
    pub delete_agent: bool,
    /// SHA-256 of its token in hexadecimal: it must have this one still.
    pub expected_token_hash: Option<String>,
    /// Its id: it must be this one.
    pub expected_agent_id: Option<AgentId>,
    /// Whether the outcome goes into the caller's mailbox.
    pub durable: bool,
}

impl Engine {
    /// Has an agent brought up by a node that can do it: the one that the input names, the one that last ran the
    /// session that it names, or any.
    ///
    /// # Errors
    /// When the input names no agent or nothing to run, the node does not exist or cannot do it, nobody can do it
    /// now, or too many invocations are open.
    pub async fn spawn(
        &self,
        caller: &Credential,
        input: Map<String, Value>,
        durable: bool,
        key: Option<&ClientKey>,
    ) -> EngineResult<Acknowledged> {
        let scope = caller.scope();
        let key = key.map(|key| (key.hash(&actor(caller), "agent.spawn", ""), key.fingerprint()));
        if let Some(before) = self.acknowledged_under(scope, key.as_ref()).await? {
            return Ok(before);
        }
        let capability = checked_spawn(&input)?;
        let durable = durable || flag(&input, "durable")?;
        let target = match target_of(&input)? {
            Some("self") => Some(self.own_broker(caller).await?),
            Some(name) => Some(NodeId::new(self.node_row(scope, name).await?.node_id)),
            None => None,
        };
        let origin = match (&target, text(&input, "session_ref")?) {
            (None, Some(session)) => self.store().session_origin(scope, session).await?,
            _ => None,
        };
        let target = target.or(origin);
        if let Some(node) = &target {
            self.check_capability(scope, node, &capability).await?;
        }
        // Who names a node means that node, away or not.
        let waits = if target.is_some() { Waits::Always } else { Waits::Never };
        // An action called the same may stand before the capacity, and ask for that itself.
        let handler = Handler::Node { capability, target, provider: None, only_capacity: false, waits };
        self.acknowledge(scope, spawn_call(caller, handler, input, durable, key)).await
    }

    /// `spawn` and `release` by their names, as placement clients ask for them.
    ///
    /// # Errors
    /// As [`Engine::spawn`] and [`Engine::release`].
    pub(crate) async fn invoke_reserved(
        &self,
        caller: &AgentCaller,
        request: InvokeAction,
        key: Option<&ClientKey>,
    ) -> EngineResult<Acknowledged> {
        let mut input = match request.input {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(input)) => input,
            Some(_) => return Err(EngineError::InvalidRequest("input must be an object".to_owned())),
        };
        let caller = Credential::Agent(caller.clone());
        if request.name == SPAWN {
            if let Some(node) = request.node {
                input.insert("target_node".to_owned(), Value::String(node));
            }
            return self.spawn(&caller, input, request.durable, key).await;
        }
        let owned = |field| text(&input, field).map(|text| text.map(str::to_owned));
        let release = ReleaseAgent {
            name: owned("name")?.ok_or_else(|| EngineError::InvalidRequest("name is required".to_owned()))?,
            reason: owned("reason")?,
            delete_agent: input.get("delete_agent") == Some(&Value::Bool(true)),
            expected_token_hash: owned("expected_token_hash")?,
            expected_agent_id: None,
            durable: request.durable,
        };
        self.release(&caller, release, key).await
    }

    /// A node has an agent brought up by a capacity of its own: an action that is called the same is passed over, as
    /// it may be what asks.
    ///
    /// # Errors
    /// As [`Engine::spawn`].
    pub async fn spawn_on_node(&self, fence: &Fence, input: Map<String, Value>) -> EngineResult<Acknowledged> {
        let capability = checked_spawn(&input)?;
        if self.store().capability_kind_on(fence.scope, &fence.node_id, &capability).await?.as_deref()
            != Some("capacity")
        {
            return Err(EngineError::CapabilityMismatch { node: fence.node_id.to_string(), capability });
        }
        let node = self.node_row(fence.scope, fence.node_id.as_str()).await?;
        let caller = Credential::Workspace { scope: fence.scope };
        let handler = Handler::Node {
            capability,
            target: Some(fence.node_id.clone()),
            provider: None,
            only_capacity: true,
            waits: Waits::Always,
        };
        let call = spawn_call(&caller, handler, input, false, None);
        self.acknowledge(fence.scope, Call { caller_name: node.name, ..call }).await
    }

    /// Ends an agent: through the node that runs it; by itself if it runs on no node, or if it is to be deleted and
    /// its node is away.
    ///
    /// # Errors
    /// When there is no such agent, it is not the expected one, or nobody can reach its node.
    pub async fn release(
        &self,
        caller: &Credential,
        request: ReleaseAgent,
        key: Option<&ClientKey>,
    ) -> EngineResult<Acknowledged> {
        let scope = caller.scope();
        let operation = "agent.release";
        let key = key.map(|key| (key.hash(&actor(caller), operation, &request.name), key.fingerprint()));
        if let Some(before) = self.acknowledged_under(scope, key.as_ref()).await? {
            return Ok(before);
        }
        check_length("reason", request.reason.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
        let agent = self.agent_by_name(scope, &request.name).await?;
        if request.expected_agent_id.is_some_and(|expected| expected != agent.agent_id) {
            return Err(EngineError::AgentIdentityMismatch(agent.name));
        }
        let token = request.expected_token_hash.as_deref().map(read_token_hash).transpose()?;
        if let Some(token) = &token
            && !self.store().is_agents_token(scope, agent.agent_id, token).await?
        {
            return Err(EngineError::ReleaseGenerationConflict);
        }
        let mut input = Map::new();
        input.insert("name".to_owned(), json!(agent.name));
        if let Some(reason) = &request.reason {
            input.insert("reason".to_owned(), json!(reason));
        }
        input.insert("delete_agent".to_owned(), json!(request.delete_agent));
        let call = Call {
            action_name: RELEASE.to_owned(),
            handler: Handler::Node {
                capability: RELEASE.to_owned(),
                target: Some(agent.node_id.clone()),
                // Another provider of the node knows nothing of it.
                provider: agent.provider.clone(),
                only_capacity: false,
                waits: Waits::Never,
            },
            caller_id: caller.agent_id(),
            caller_name: name_of(caller),
            input: Value::Object(input),
            durable: request.durable,
            key,
        };
        if agent.node_id == NodeId::direct(agent.agent_id) {
            return self.release_here(scope, call, &agent, token, request.delete_agent).await;
        }
        // Known before its node can have done it.
        let id = InvocationId::new(self.next_id());
        self.store().note_release(scope, id, agent.agent_id, request.delete_agent, self.now()).await?;
        match self.acknowledge_as(scope, id, call.clone()).await {
            Ok(done) if done.id == id => return Ok(done),
            Err(EngineError::HandlerUnavailable(_)) => self.store().forget_release(scope, id).await?,
            // Its key was used before, or it was refused for another reason.
            other => {
                self.store().forget_release(scope, id).await?;
                return other;
            }
        }
        if request.delete_agent {
            self.release_here(scope, call, &agent, token, true).await
        } else {
            Err(EngineError::AgentHostUnavailable(agent.name))
        }
    }

    /// Ends an agent without its node: it is deleted, or offline.
    async fn release_here(
        &self,
        scope: WorkspaceScope,
        call: Call,
        agent: &AgentRow,
        token: Option<TokenHash>,
        deletes: bool,
    ) -> EngineResult<Acknowledged> {
        if deletes {
            let only = DeleteIf { agent: Some(agent.agent_id), token, empties: true, ..DeleteIf::default() };
            match self.delete_agent_if(scope, &agent.name, &only).await {
                Err(EngineError::AgentNotFound(_)) if only.token.is_some() => {
                    return Err(EngineError::ReleaseGenerationConflict);
                }
                other => other?,
            }
        } else {
            let change = crate::agents::ChangeAgent {
                status: Some(relay_domain::agent::AgentStatus::Offline),
                ..Default::default()
            };
            self.update_agent(scope, &agent.name, &change).await?;
        }
        let output = json!({ "released": true, "name": agent.name });
        self.record_done(scope, call, output).await.map_err(EngineError::after_commit)
    }

    /// The broker node that the calling agent runs on.
    async fn own_broker(&self, caller: &Credential) -> EngineResult<NodeId> {
        let Some(agent) = caller.agent_id() else { return Err(EngineError::PlacementSelfRequiresAgent) };
        let node = self.agent(caller.scope(), agent).await?.node_id;
        if node == NodeId::direct(agent) || self.is_direct_node(caller.scope(), &node).await? != Some(false) {
            return Err(EngineError::PlacementSelfUnavailable);
        }
        Ok(node)
    }

    async fn check_capability(&self, scope: WorkspaceScope, node: &NodeId, capability: &str) -> EngineResult<()> {
        match self.store().capability_kind_on(scope, node, capability).await? {
            Some(_) => Ok(()),
            None => Err(EngineError::CapabilityMismatch { node: node.to_string(), capability: capability.to_owned() }),
        }
    }

    /// An agent came up on a node by a spawn: it joins the channels that the spawn names, so that their mail reaches
    /// it from its first moment on. A channel that does not exist is no reason to fail.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn born(&self, fence: &Fence, invocation: InvocationId, agent: AgentId, name: &str) -> EngineResult<()> {
        if !self.agent_came_up(fence, invocation, agent).await? {
            return Ok(());
        }
        let Some(input) = self.store().spawn_input(fence, invocation).await? else { return Ok(()) };
        for channel in channels_of(&input) {
            match self.join_as(fence.scope, agent, name, &channel).await {
                Ok(())
                | Err(
                    EngineError::ChannelNotFound(_) | EngineError::ChannelArchived(_) | EngineError::InvalidChannelName,
                ) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn spawn_call(
    caller: &Credential,
    handler: Handler,
    input: Map<String, Value>,
    durable: bool,
    key: Option<([u8; 32], [u8; 32])>,
) -> Call {
    Call {
        action_name: SPAWN.to_owned(),
        handler,
        caller_id: caller.agent_id(),
        caller_name: name_of(caller),
        input: Value::Object(input),
        durable,
        key,
    }
}

/// The capability that a spawn needs.
fn checked_spawn(input: &Map<String, Value>) -> EngineResult<String> {
    let invalid = |problem: &str| EngineError::InvalidRequest(problem.to_owned());
    check_agent_name(text(input, "name")?.ok_or_else(|| invalid("name is required"))?)?;
    let word = match text(input, "capability")? {
        Some(capability) => capability,
        None => text(input, "cli")?.ok_or_else(|| invalid("cli is required"))?,
    };
    let capability = if word.starts_with(SPAWN_PREFIX) { word.to_owned() } else { format!("{SPAWN_PREFIX}{word}") };
    check_name("cli", &capability, MAX_ACTION_NAME_BYTES)?;
    Ok(capability)
}

/// The node that a spawn names.
fn target_of(input: &Map<String, Value>) -> EngineResult<Option<&str>> {
    for field in ["target_node", "node", "target"] {
        if let Some(name) = text(input, field)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// A text of the input; null and nothing count as absent.
fn text<'a>(input: &'a Map<String, Value>, field: &'static str) -> EngineResult<Option<&'a str>> {
    match input.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
        Some(_) => Err(EngineError::InvalidRequest(format!("{field} must be a string"))),
    }
}

/// A flag of the input; null and nothing count as false.
fn flag(input: &Map<String, Value>, field: &'static str) -> EngineResult<bool> {
    match input.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(EngineError::InvalidRequest(format!("{field} must be a boolean"))),
    }
}

/// The channels that a spawn wants its agent to be in.
fn channels_of(input: &Value) -> Vec<String> {
    let one = input["channel"].as_str();
    let many = input["channels"].as_array().map(Vec::as_slice).unwrap_or_default().iter().filter_map(Value::as_str);
    let mut channels: Vec<String> = Vec::new();
    for name in one.into_iter().chain(many).map(strip_hash).filter(|name| is_channel_name(name)) {
        if channels.len() < JOINED_CHANNELS && !channels.iter().any(|known| known == name) {
            channels.push(name.to_owned());
        }
    }
    channels
}

fn actor(caller: &Credential) -> String {
    caller.agent_id().map_or_else(|| "-".to_owned(), |agent| agent.to_string())
}

fn name_of(caller: &Credential) -> String {
    match caller {
        Credential::Agent(agent) => agent.name.to_string(),
        Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => WORKSPACE_CALLER.to_owned(),
    }
}

fn read_token_hash(hex_text: &str) -> EngineResult<TokenHash> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(hex_text, &mut bytes)
        .map_err(|_| EngineError::InvalidRequest("expected_token_hash must be 64 hexadecimal digits".to_owned()))?;
    Ok(TokenHash::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            other => panic!("{other} is no object"),
        }
    }

    #[test]
    fn what_to_run_is_a_capability() {
        for (input, expected) in [
            (json!({ "name": "a", "cli": "claude" }), Some("spawn:claude")),
            (json!({ "name": "a", "cli": "x", "capability": "spawn:codex" }), Some("spawn:codex")),
            (json!({ "name": "a", "capability": "codex", "harnessConfig": { "a": 1 } }), Some("spawn:codex")),
            (json!({ "name": "a", "cli": null }), None),
            (json!({ "name": "a", "cli": 7 }), None),
            (json!({ "cli": "claude" }), None),
            (json!({ "name": "", "cli": "claude" }), None),
        ] {
            assert_eq!(checked_spawn(&map(input.clone())).ok().as_deref(), expected, "{input}");
        }
    }

    #[test]
    fn a_node_is_named_in_one_of_three_fields() {
        for (input, expected) in [
            (json!({ "target_node": "a", "node": "b" }), Some("a")),
            (json!({ "node": "self" }), Some("self")),
            (json!({ "target": "c" }), Some("c")),
            (json!({ "target": null, "node": "" }), None),
        ] {
            assert_eq!(target_of(&map(input.clone())).unwrap(), expected, "{input}");
        }
    }

    #[test]
    fn channels_are_those_that_can_be() {
        let input = json!({ "channel": "#general", "channels": ["general", "builds", "Not A Channel", 7] });
        assert_eq!(channels_of(&input), ["general", "builds"]);
        assert!(channels_of(&json!({ "name": "a" })).is_empty());
    }
}
