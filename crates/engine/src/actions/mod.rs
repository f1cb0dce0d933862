//! Actions: work that agents may request from nodes and other agents. Spawning and releasing agents is such work.
//!
//! This file has the main type, [`Actions`], and defines actions. `call` creates invocations, `outcome` ends them,
//! `dispatch` sends them to sockets, `retry` is the worker's part. Only Postgres makes an invocation durable;
//! everything else is a hint.

pub mod redispatch;
pub mod spawn;
pub mod trigger_scans;
pub mod triggers;

mod call;
mod dispatch;
mod outcome;
mod pattern_cost;
mod queue;
mod receipts;
mod retry;
mod schemas;
mod sent_invocations;
mod trigger_patterns;

pub use call::{InvocationReceipt, InvocationRequest, InvokeAction, PlacedInvocation};
pub(crate) use dispatch::{DispatchNotes, DispatchRecorder, write_dispatch_notes};
pub use dispatch::{InvokeFrame, SentInvocation};
pub use outcome::{CompletionRequest, ProviderResultOutcome, outcome_event_id};
pub(crate) use queue::{CallQueues, QueuedCall, QueuedOutcome, run_calls, run_outcomes};
pub(crate) use trigger_patterns::TriggerPatterns;

use std::sync::Arc;

use relay_domain::{
    ActionId, NodeId, WorkspaceScope,
    access::rights::Operation,
    actions::{Action, MAX_ACTION_NAME_BYTES, MAX_ACTIONS, MAX_AVAILABLE_TO, MAX_DESCRIPTION_BYTES, is_reserved},
    encoded_length,
    events::kind,
    names::{check_json_length, check_length, check_name},
};
use relay_store::{
    actions::defining::{DefineOutcome, NewAction},
    events::Event,
};
use relay_wire::{actions::ActionBody, events::data::ActionDefined, field::ToValue as _};
use serde_json::{Map, Value};

use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    agents::Agents,
    channels::Channels,
    core::Core,
    error::{Conflict, InvalidInput, Limit, Missing},
    nodes::kinds::NodeKinds,
    parts::{Parts, parsed_sizes},
};

/// Handle of actions and invocations.
#[derive(Clone)]
pub struct Actions {
    pub(crate) core: Core,
    pub(crate) agents: Agents,
    pub(crate) channels: Channels,
    pub(crate) node_kinds: NodeKinds,
    pub(crate) calls: Arc<CallQueues>,
    pub(crate) dispatch_notes: Arc<DispatchRecorder>,
    pub(crate) schemas: Arc<schemas::Schemas>,
    pub(crate) trigger_patterns: TriggerPatterns,
}

impl Actions {
    /// Defines an action, or changes it when the same handler defined it before. An action whose handler has not been
    /// live for a minute gets the new handler, and is otherwise unchanged; its open invocations fail. Returns true if
    /// it is new.
    ///
    /// # Errors
    /// When a field is invalid, the caller may not define actions, an agent names another handler than itself, the
    /// handler does not exist, the node lacks the capability, or the name belongs to another handler that is live.
    pub async fn define(&self, caller: &Credential, request: ActionBody) -> EngineResult<(Action, bool)> {
        let scope = caller.scope();
        check_name("name", &request.name, MAX_ACTION_NAME_BYTES)?;
        if is_reserved(&request.name) {
            return Err(EngineError::Conflict(Conflict::ActionName(request.name)));
        }
        self.core.authorize(caller, Operation::DefineAction).await?;
        let description = request.description.unwrap_or_default();
        check_length("description", &description, MAX_DESCRIPTION_BYTES)?;
        let input_schema = checked_schema("input_schema", request.input_schema)?;
        let output_schema = checked_schema("output_schema", request.output_schema)?;
        let family = self.core.family(scope).await;
        self.schemas.check_definition(family, "input_schema", &input_schema).await?;
        self.schemas.check_definition(family, "output_schema", &output_schema).await?;
        let available_to = checked_names(request.available_to)?;
        let given = |name: Option<String>| name.filter(|name| !name.is_empty());
        let (agent_name, node_name) = (given(request.handler_agent), given(request.handler_node));
        let (handler_agent, handler_node) = match (&agent_name, &node_name) {
            (Some(agent), None) => (Some(self.handler_agent(caller, agent).await?), None),
            (None, Some(node)) => {
                // No agent is the handler of a node's action, so only the workspace key defines it.
                self.core.authorize(caller, Operation::ManageAction { handler: None }).await?;
                (None, Some(self.handler_node(scope, node, &request.name).await?))
            }
            _ => return Err(EngineError::Invalid(InvalidInput::ActionHandler)),
        };
        let event = ActionDefined {
            name: &request.name,
            description: &description,
            handler_agent: agent_name.as_deref(),
            handler_node: node_name.as_deref(),
        }
        .to_value();
        let new = NewAction {
            action_id: ActionId::new(self.core.next_id()),
            name: &request.name,
            description: &description,
            handler_agent,
            handler_node: handler_node.as_ref(),
            input_schema: &input_schema,
            output_schema: &output_schema,
            available_to: available_to.as_deref(),
            limit: MAX_ACTIONS,
            event: Event::new(kind::ACTION_REGISTERED, event),
            at: self.core.now(),
        };
        let defined = match self.core.store.define_action(scope, &new).await? {
            DefineOutcome::Stored { new, recorded } => {
                self.core.announce(recorded);
                new
            }
            DefineOutcome::TakenOver { recorded, mut failed } => {
                self.core.announce(recorded);
                self.announce_outcomes(&mut failed);
                false
            }
            DefineOutcome::NameTaken => return Err(EngineError::Conflict(Conflict::ActionName(request.name))),
            DefineOutcome::TooMany => return Err(EngineError::LimitExceeded(Limit::Actions)),
        };
        // Read back: after a takeover only the handler is that of the request.
        let row = self.core.store.action(scope, &request.name).await?;
        Ok((row.ok_or(EngineError::NotFound(Missing::Action))?, defined))
    }

    async fn handler_agent(&self, caller: &Credential, name: &str) -> EngineResult<relay_domain::AgentId> {
        if let Credential::Agent(own) = caller
            && &*own.name != name
        {
            // Whether there is such an agent does not matter.
            self.core.authorize(caller, Operation::ManageAction { handler: None }).await?;
        }
        Ok(self.agents.by_name(caller.scope(), name).await?.id)
    }

    async fn handler_node(&self, scope: WorkspaceScope, name: &str, action: &str) -> EngineResult<NodeId> {
        let node = self.core.stored_node(scope, name).await?;
        if self.core.store.node_capability_kind(scope, &node.node_id, action).await?.is_none() {
            return Err(EngineError::Conflict(Conflict::CapabilityMismatch {
                node: node.name,
                capability: action.to_owned(),
            }));
        }
        Ok(node.node_id)
    }

    /// Lists the actions that the caller may invoke, by name. The workspace key sees those that every agent may.
    pub async fn list(&self, caller: &Credential) -> EngineResult<Parts<Action>> {
        let agent = match caller {
            Credential::Agent(agent) => Some((agent.agent_id, &*agent.name)),
            Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => None,
        };
        let scope = caller.scope();
        let actions = self.core.store.action_sizes(scope, agent, MAX_ACTIONS).await?;
        let store = self.core.store.clone();
        let read = move |ids: Vec<ActionId>| {
            let store = store.clone();
            async move { Ok(store.actions(scope, &ids).await?) }
        };
        self.core.read_in_parts(scope, parsed_sizes(actions), read).await
    }

    /// Finds an action that the caller may invoke.
    pub async fn visible(&self, caller: &Credential, name: &str) -> EngineResult<Action> {
        let row = self.core.store.action(caller.scope(), name).await?.ok_or(EngineError::NotFound(Missing::Action))?;
        let shown = match caller {
            Credential::Agent(agent) => may_invoke(&row, agent) || row.handler_agent_id == Some(agent.agent_id),
            Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => row.available_to.is_none(),
        };
        if shown { Ok(row) } else { Err(EngineError::NotFound(Missing::Action)) }
    }

    /// Deletes an action. Its open invocations fail.
    ///
    /// # Errors
    /// When the name is unknown, or the caller is neither its handler nor holds the workspace key.
    pub async fn delete(&self, caller: &Credential, name: &str) -> EngineResult<()> {
        let scope = caller.scope();
        let row = self.core.store.action(scope, name).await?.ok_or(EngineError::NotFound(Missing::Action))?;
        if let Credential::Agent(agent) = caller {
            let handles = row.handler_agent_id == Some(agent.agent_id);
            // As for an unknown name: an agent that may not invoke an action does not learn that it exists.
            if !handles && !may_invoke(&row, agent) {
                return Err(EngineError::NotFound(Missing::Action));
            }
        }
        self.core.authorize(caller, Operation::ManageAction { handler: row.handler_agent_id }).await?;
        let failed = self.core.store.delete_action(scope, row.action_id, self.core.now()).await?;
        let mut failed = failed.ok_or(EngineError::NotFound(Missing::Action))?;
        self.announce_outcomes(&mut failed);
        Ok(())
    }
}

fn may_invoke(action: &Action, agent: &AgentCaller) -> bool {
    action.available_to.as_ref().is_none_or(|names| names.iter().any(|name| **name == *agent.name))
}

fn checked_schema(field: &'static str, schema: Option<Value>) -> EngineResult<Value> {
    let schema = schema.filter(|schema| !schema.is_null()).unwrap_or_else(|| Map::new().into());
    if !schema.is_object() {
        return Err(EngineError::invalid_request(format!("{field} must be an object")));
    }
    check_json_length(field, encoded_length(&schema))?;
    Ok(schema)
}

fn checked_names(names: Option<Vec<String>>) -> EngineResult<Option<Vec<String>>> {
    let Some(names) = names else { return Ok(None) };
    if names.len() > MAX_AVAILABLE_TO {
        return Err(EngineError::invalid_request(format!("at most {MAX_AVAILABLE_TO} names in available_to")));
    }
    let names: Vec<String> = names.iter().map(|name| name.trim_start_matches('@').to_owned()).collect();
    for name in &names {
        check_name("available_to", name, relay_domain::names::MAX_AGENT_NAME_BYTES)?;
    }
    Ok(Some(names))
}
