//! Spawn and release: nodes start and end agents on request (docs/protocol/node.md, "Spawn" and "Release").
//!
//! Both are invocations. The input of a spawn goes to its node unchanged; only the fields that affect placement are
//! read.

use relay_domain::{
    AgentId, InvocationId, NodeId, WorkspaceScope,
    access::{rights::Operation, token::TokenHash},
    actions::{MAX_ACTION_NAME_BYTES, RELEASE, SPAWN, SPAWN_PREFIX, WORKSPACE_CALLER},
    agents::{Agent, AgentStatus},
    names::{MAX_NOTE_BYTES, check_agent_name, check_length, check_name, is_channel_name, strip_hash},
    nodes::{CapabilityKind, NodeRole},
};
use relay_store::{
    DeleteCondition, IdempotencyKey,
    actions::new_invocation::{Handler, WaitPolicy},
    nodes::fence::Fence,
};
use relay_wire::{
    agents::spawn::{ReleaseInput, Released},
    field::ToValue as _,
};
use serde_json::{Map, Value};

use super::Actions;
use crate::{
    EngineError, EngineResult,
    access::{
        callers::{AgentCaller, Credential},
        idempotency::ClientKey,
    },
    actions::{InvocationReceipt, InvocationRequest, InvokeAction, call::policy_handler},
    agents::lifecycle::ChangeAgent,
    error::{Conflict, Dependency, InvalidInput, Missing},
};

/// Bound of the channels that a spawn makes its agent join; further ones are ignored.
const MAX_JOINED_CHANNELS: usize = 32;

#[derive(Debug, Default)]
pub struct ReleaseAgent {
    pub name: String,
    /// Free text for the node.
    pub reason: Option<String>,
    /// True to delete the agent after it has ended.
    pub delete_agent: bool,
    /// SHA-256 of the expected token, in hexadecimal.
    pub expected_token_hash: Option<String>,
    pub expected_agent_id: Option<AgentId>,
    /// True to deliver the outcome to the caller's mailbox.
    pub durable: bool,
}

impl Actions {
    /// Starts an agent on a capable node: the requested one, the one that last ran the requested session, or any.
    ///
    /// # Errors
    /// When the input names no agent or capability, the node does not exist or lacks the capability, no node can do it
    /// now, or too many invocations are open.
    pub async fn spawn(
        &self,
        caller: &Credential,
        input: Map<String, Value>,
        durable: bool,
        key: Option<&ClientKey>,
    ) -> EngineResult<InvocationReceipt> {
        let scope = caller.scope();
        self.core.authorize(caller, Operation::Spawn).await?;
        let key = key.map(|key| key.stored(&actor_key(caller), "agent.spawn", ""));
        if let Some(before) = self.find_receipt(scope, key.as_ref()).await? {
            return Ok(before);
        }
        let capability = required_capability(&input)?;
        let durable = durable || optional_flag(&input, "durable")?;
        let target = match requested_node(&input)? {
            Some("self") => Some(self.broker_of_caller(caller).await?),
            Some(name) => Some(self.core.stored_node(scope, name).await?.node_id),
            None => None,
        };
        let origin = match (&target, optional_text(&input, "session_ref")?) {
            (None, Some(session)) => self.core.store.session_origin(scope, session).await?,
            _ => None,
        };
        let target = target.or(origin);
        // A policy precedes the capacity wherever it is requested, or it would protect nothing (ADR 0036).
        let policy = self.core.store.capacity_policy(scope, target.as_ref(), &[&capability, SPAWN]).await?;
        if let Some(policy) = policy {
            self.check_caller(scope, calling_agent(caller), &policy).await?;
            let family = self.core.family(scope).await;
            let input = self.schemas.check_input(family, &policy.input_schema, Value::Object(input)).await?;
            let call = spawn_call(caller, policy_handler(policy), input, durable, key);
            return self.create_invocation(scope, self.new_invocation_id(), call).await;
        }
        if let Some(node) = &target {
            self.check_capability(scope, node, &capability).await?;
        }
        // A requested node is meant literally, so the invocation waits for it even while it is unavailable.
        let wait_policy = if target.is_some() { WaitPolicy::Always } else { WaitPolicy::Never };
        // An action of the same name may shadow the capacity, and call it in turn.
        let handler = Handler::Node { capability, target, provider: None, only_capacity: false, wait_policy };
        self.create_invocation(
            scope,
            self.new_invocation_id(),
            spawn_call(caller, handler, Value::Object(input), durable, key),
        )
        .await
    }

    /// Handles `spawn` and `release` by their names, as placement clients invoke them.
    pub(crate) async fn invoke_reserved(
        &self,
        caller: &AgentCaller,
        request: InvokeAction,
        key: Option<&ClientKey>,
    ) -> EngineResult<InvocationReceipt> {
        let mut input = match request.input {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(input)) => input,
            Some(_) => return Err(EngineError::invalid_request("input must be an object")),
        };
        let caller = Credential::Agent(caller.clone());
        if request.name == SPAWN {
            if let Some(node) = request.node {
                input.insert("target_node".to_owned(), Value::String(node));
            }
            return self.spawn(&caller, input, request.durable, key).await;
        }
        let owned = |field| optional_text(&input, field).map(|text| text.map(str::to_owned));
        let release = ReleaseAgent {
            name: owned("name")?.ok_or_else(|| EngineError::invalid_request("name is required"))?,
            reason: owned("reason")?,
            delete_agent: input.get("delete_agent") == Some(&Value::Bool(true)),
            expected_token_hash: owned("expected_token_hash")?,
            expected_agent_id: None,
            durable: request.durable,
        };
        self.release(&caller, release, key).await
    }

    /// Starts an agent on a node by a capacity of its own. An action of the same name is skipped, as it may be the one
    /// that asks.
    pub async fn spawn_on_node(&self, fence: &Fence, input: Map<String, Value>) -> EngineResult<InvocationReceipt> {
        let capability = required_capability(&input)?;
        if self.core.store.node_capability_kind(fence.scope, &fence.node_id, &capability).await?
            != Some(CapabilityKind::Capacity)
        {
            return Err(EngineError::Conflict(Conflict::CapabilityMismatch {
                node: fence.node_id.to_string(),
                capability,
            }));
        }
        let node = self.core.stored_node(fence.scope, fence.node_id.as_str()).await?;
        let caller = Credential::Workspace { scope: fence.scope };
        let handler = Handler::Node {
            capability,
            target: Some(fence.node_id.clone()),
            provider: None,
            only_capacity: true,
            wait_policy: WaitPolicy::Always,
        };
        let call = spawn_call(&caller, handler, Value::Object(input), false, None);
        self.create_invocation(
            fence.scope,
            self.new_invocation_id(),
            InvocationRequest { caller_name: node.name, ..call },
        )
        .await
    }

    /// Ends an agent through the node that runs it, or through the policy for releases. Without a node, or to delete it
    /// while its node is unavailable, the engine ends it itself.
    ///
    /// # Errors
    /// When there is no such agent, the caller may not end it, its id or token is not the expected one, or its node is
    /// unavailable.
    pub async fn release(
        &self,
        caller: &Credential,
        request: ReleaseAgent,
        key: Option<&ClientKey>,
    ) -> EngineResult<InvocationReceipt> {
        let scope = caller.scope();
        let operation = "agent.release";
        let key = key.map(|key| key.stored(&actor_key(caller), operation, &request.name));
        if let Some(before) = self.find_receipt(scope, key.as_ref()).await? {
            return Ok(before);
        }
        check_length("reason", request.reason.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
        let agent = self.agents.by_name(scope, &request.name).await?;
        let release = Operation::Release { agent: agent.id, spawned_by: agent.spawned_by };
        self.core.authorize(caller, release).await?;
        if request.expected_agent_id.is_some_and(|expected| expected != agent.id) {
            return Err(EngineError::Conflict(Conflict::AgentIdentityMismatch(agent.name)));
        }
        let token = request.expected_token_hash.as_deref().map(read_token_hash).transpose()?;
        if let Some(token) = &token
            && !self.core.store.is_token_of_agent(scope, agent.id, token).await?
        {
            return Err(EngineError::Conflict(Conflict::ReleaseGeneration));
        }
        let mut call = release_call(caller, &agent, &request, key);
        if agent.is_on_direct_node() {
            return self.release_without_node(scope, call, &agent, token, request.delete_agent).await;
        }
        let policy = self.core.store.capacity_policy(scope, Some(&agent.node_id), &[RELEASE]).await?;
        let has_policy = policy.is_some();
        if let Some(policy) = policy {
            self.check_caller(scope, calling_agent(caller), &policy).await?;
            let family = self.core.family(scope).await;
            call.input = self.schemas.check_input(family, &policy.input_schema, call.input).await?;
            call.handler = policy_handler(policy);
        }
        // Recorded before its node can have finished it.
        let id = self.new_invocation_id();
        self.core.store.record_release(scope, id, agent.id, request.delete_agent, self.core.now()).await?;
        match self.create_invocation(scope, id, call.clone()).await {
            Ok(done) if done.id == id => return Ok(done),
            Err(EngineError::DependencyUnavailable(Dependency::Handler(_))) if !has_policy => {
                self.core.store.delete_release(scope, id).await?
            }
            // Its key was used before, or it was refused for another reason.
            other => {
                self.core.store.delete_release(scope, id).await?;
                return other;
            }
        }
        if request.delete_agent {
            self.release_without_node(scope, call, &agent, token, true).await
        } else {
            Err(EngineError::DependencyUnavailable(Dependency::AgentHost(agent.name)))
        }
    }

    /// Ends an agent without its node: deletes it, or marks it offline.
    async fn release_without_node(
        &self,
        scope: WorkspaceScope,
        call: InvocationRequest,
        agent: &Agent,
        token: Option<TokenHash>,
        deletes: bool,
    ) -> EngineResult<InvocationReceipt> {
        if deletes {
            let condition = DeleteCondition {
                agent: Some(agent.id),
                token,
                is_release: true,
                orphans_mailbox: true,
                ..DeleteCondition::default()
            };
            match self.agents.delete_if(scope, &agent.name, &condition).await {
                Err(EngineError::NotFound(Missing::Agent(_))) if condition.token.is_some() => {
                    return Err(EngineError::Conflict(Conflict::ReleaseGeneration));
                }
                other => other?,
            }
        } else {
            let change = ChangeAgent { status: Some(AgentStatus::Offline), ..Default::default() };
            self.agents.update(scope, &agent.name, &change).await?;
        }
        let output = Released { released: true, name: &agent.name }.to_value();
        // The agent has ended, so a failure must not invite the client to repeat the request.
        self.record_done(scope, call, output).await.map_err(EngineError::after_commit)
    }

    /// Returns the broker node that the calling agent runs on.
    async fn broker_of_caller(&self, caller: &Credential) -> EngineResult<NodeId> {
        let Some(agent) = caller.agent_id() else {
            return Err(EngineError::Invalid(InvalidInput::PlacementSelfRequiresAgent));
        };
        let agent = self.agents.by_id(caller.scope(), agent).await?;
        let role = self.core.store.node_role(caller.scope(), &agent.node_id).await?;
        if agent.is_on_direct_node() || role != Some(NodeRole::Broker) {
            return Err(EngineError::Conflict(Conflict::PlacementSelfUnavailable));
        }
        Ok(agent.node_id)
    }

    async fn check_capability(&self, scope: WorkspaceScope, node: &NodeId, capability: &str) -> EngineResult<()> {
        match self.core.store.node_capability_kind(scope, node, capability).await? {
            Some(_) => Ok(()),
            None => Err(EngineError::Conflict(Conflict::CapabilityMismatch {
                node: node.to_string(),
                capability: capability.to_owned(),
            })),
        }
    }

    /// Finishes a spawn after its agent has registered: it joins the channels of the input, so that their messages
    /// reach it from the start. A missing channel is no failure.
    pub async fn finish_spawn(
        &self,
        fence: &Fence,
        invocation: InvocationId,
        agent: AgentId,
        name: &str,
    ) -> EngineResult<()> {
        if !self.record_spawned_agent(fence, invocation, agent).await? {
            return Ok(());
        }
        let Some(input) = self.core.store.spawn_input(fence, invocation).await? else { return Ok(()) };
        for channel in requested_channels(&input) {
            match self.channels.add_agent(fence.scope, agent, name, &channel).await {
                Ok(())
                | Err(
                    EngineError::NotFound(Missing::Channel(_))
                    | EngineError::Invalid(InvalidInput::ChannelArchived(_))
                    | EngineError::Invalid(InvalidInput::ChannelName),
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
    input: Value,
    durable: bool,
    key: Option<IdempotencyKey>,
) -> InvocationRequest {
    InvocationRequest {
        action_name: SPAWN.to_owned(),
        handler,
        caller_id: caller.agent_id(),
        caller_name: caller_name_of(caller),
        input,
        durable,
        key,
    }
}

const fn calling_agent(caller: &Credential) -> Option<&AgentCaller> {
    match caller {
        Credential::Agent(agent) => Some(agent),
        Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => None,
    }
}

fn release_call(
    caller: &Credential,
    agent: &Agent,
    request: &ReleaseAgent,
    key: Option<IdempotencyKey>,
) -> InvocationRequest {
    let input = ReleaseInput {
        name: &agent.name,
        reason: request.reason.as_deref(),
        delete_agent: request.delete_agent,
        expected_token_hash: request.expected_token_hash.as_deref(),
    };
    InvocationRequest {
        action_name: RELEASE.to_owned(),
        handler: Handler::Node {
            capability: RELEASE.to_owned(),
            target: Some(agent.node_id.clone()),
            // Another provider of the node does not run the agent.
            provider: agent.provider.clone(),
            only_capacity: false,
            wait_policy: WaitPolicy::Never,
        },
        caller_id: caller.agent_id(),
        caller_name: caller_name_of(caller),
        input: input.to_value(),
        durable: request.durable,
        key,
    }
}

/// Returns the capability that a spawn needs.
fn required_capability(input: &Map<String, Value>) -> EngineResult<String> {
    let invalid = |problem: &str| EngineError::invalid_request(problem.to_owned());
    check_agent_name(optional_text(input, "name")?.ok_or_else(|| invalid("name is required"))?)?;
    let word = match optional_text(input, "capability")? {
        Some(capability) => capability,
        None => optional_text(input, "cli")?.ok_or_else(|| invalid("cli is required"))?,
    };
    let capability = if word.starts_with(SPAWN_PREFIX) { word.to_owned() } else { format!("{SPAWN_PREFIX}{word}") };
    check_name("cli", &capability, MAX_ACTION_NAME_BYTES)?;
    Ok(capability)
}

fn requested_node(input: &Map<String, Value>) -> EngineResult<Option<&str>> {
    for field in ["target_node", "node", "target"] {
        if let Some(name) = optional_text(input, field)? {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Reads a text of the input; null and an empty text count as absent.
fn optional_text<'a>(input: &'a Map<String, Value>, field: &'static str) -> EngineResult<Option<&'a str>> {
    match input.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
        Some(_) => Err(EngineError::invalid_request(format!("{field} must be a string"))),
    }
}

/// Reads a flag of the input; null and nothing count as false.
fn optional_flag(input: &Map<String, Value>, field: &'static str) -> EngineResult<bool> {
    match input.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(EngineError::invalid_request(format!("{field} must be a boolean"))),
    }
}

fn requested_channels(input: &Value) -> Vec<String> {
    let one = input["channel"].as_str();
    let many = input["channels"].as_array().map(Vec::as_slice).unwrap_or_default().iter().filter_map(Value::as_str);
    let mut channels: Vec<String> = Vec::new();
    for name in one.into_iter().chain(many).map(strip_hash).filter(|name| is_channel_name(name)) {
        if channels.len() < MAX_JOINED_CHANNELS && !channels.iter().any(|known| known == name) {
            channels.push(name.to_owned());
        }
    }
    channels
}

fn actor_key(caller: &Credential) -> String {
    caller.agent_id().map_or_else(|| "-".to_owned(), |agent| agent.to_string())
}

fn caller_name_of(caller: &Credential) -> String {
    match caller {
        Credential::Agent(agent) => agent.name.to_string(),
        Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => WORKSPACE_CALLER.to_owned(),
    }
}

fn read_token_hash(hex_text: &str) -> EngineResult<TokenHash> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(hex_text, &mut bytes)
        .map_err(|_| EngineError::invalid_request("expected_token_hash must be 64 hexadecimal digits"))?;
    Ok(TokenHash::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(value: Value) -> Map<String, Value> {
        let Value::Object(map) = value else { panic!("{value} is no object") };
        map
    }

    #[test]
    fn spawn_requires_a_capability() {
        for (input, expected) in [
            (json!({ "name": "a", "cli": "claude" }), Some("spawn:claude")),
            (json!({ "name": "a", "cli": "x", "capability": "spawn:codex" }), Some("spawn:codex")),
            (json!({ "name": "a", "capability": "codex", "harnessConfig": { "a": 1 } }), Some("spawn:codex")),
            (json!({ "name": "a", "cli": null }), None),
            (json!({ "name": "a", "cli": 7 }), None),
            (json!({ "cli": "claude" }), None),
            (json!({ "name": "", "cli": "claude" }), None),
        ] {
            assert_eq!(required_capability(&map(input.clone())).ok().as_deref(), expected, "{input}");
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
            assert_eq!(requested_node(&map(input.clone())).unwrap(), expected, "{input}");
        }
    }

    #[test]
    fn invalid_channel_names_are_ignored() {
        let input = json!({ "channel": "#general", "channels": ["general", "builds", "Not A Channel", 7] });
        assert_eq!(requested_channels(&input), ["general", "builds"]);
        assert!(requested_channels(&json!({ "name": "a" })).is_empty());
    }
}
