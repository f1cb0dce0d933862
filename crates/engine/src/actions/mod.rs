//! Actions: what agents may ask nodes and other agents to do.
//!
//! Here are their definitions. `call` makes invocations, `outcome` ends them, `dispatch` is their way to the sockets,
//! `retry` the worker's part. Postgres alone makes an invocation durable; whatever else carries it is a hint.

mod call;
mod dispatch;
mod frame;
mod input;
mod outcome;
mod own;
mod queue;
mod retry;

pub use call::{Acknowledged, Call, InvokeAction, Made};
pub use dispatch::{Delivered, InvokeFrame};
pub(crate) use dispatch::{SentNotes, write_notes};
pub use outcome::{Complete, Completed, outcome_event_id};
pub(crate) use queue::{CallQueues, run_calls, run_outcomes};
pub use relay_store::{InvocationRow, actions::ActionRow, finish::shown_output};

use relay_domain::{
    ActionId, NodeId, WorkspaceScope,
    action::{MAX_ACTION_NAME_BYTES, MAX_ACTIONS, MAX_AVAILABLE_TO, MAX_DESCRIPTION_BYTES, is_reserved},
    event,
    names::{check_json_length, check_length, check_name},
};
use relay_store::{
    AgentRow,
    actions::{Defined, NewAction},
    events::NewEvent,
};
use serde_json::{Value, json};

use crate::{
    Engine, EngineError, EngineResult,
    agents::encoded_length,
    auth::{AgentCaller, Credential},
};

/// Names of actions that an agent's record shows at most.
pub const MAX_NAMED: i64 = 1000;

/// A request to define an action.
#[derive(Debug, Default)]
pub struct DefineAction {
    /// What it is called.
    pub name: String,
    /// For people.
    pub description: Option<String>,
    /// The name of the agent that handles it, or
    pub handler_agent: Option<String>,
    /// the name of the node that does.
    pub handler_node: Option<String>,
    /// JSON schema of its input.
    pub input_schema: Option<Value>,
    /// JSON schema of its output.
    pub output_schema: Option<Value>,
    /// The names of the agents that may invoke it; none: all.
    pub available_to: Option<Vec<String>>,
}

impl Engine {
    /// Defines an action, or changes it when the same handler defined it before. Tells whether it is new.
    ///
    /// # Errors
    /// When a field is out of bounds or makes no sense, an agent names another handler than itself, the handler does
    /// not exist, the node cannot do it, or the name is another handler's.
    pub async fn define_action(&self, caller: &Credential, request: DefineAction) -> EngineResult<(ActionRow, bool)> {
        let scope = caller.scope();
        check_name("name", &request.name, MAX_ACTION_NAME_BYTES)?;
        if is_reserved(&request.name) {
            return Err(EngineError::ActionNameConflict(request.name));
        }
        let description = request.description.unwrap_or_default();
        check_length("description", &description, MAX_DESCRIPTION_BYTES)?;
        let input_schema = checked_schema("input_schema", request.input_schema)?;
        let output_schema = checked_schema("output_schema", request.output_schema)?;
        let available_to = checked_names(request.available_to)?;
        let (handler_agent, handler_node) = match (&request.handler_agent, &request.handler_node) {
            (Some(agent), None) => (Some(self.handler_agent(caller, agent).await?), None),
            (None, Some(node)) => {
                if let Credential::Agent(_) = caller {
                    return Err(EngineError::NotTheHandler);
                }
                (None, Some(self.handler_node(scope, node, &request.name).await?))
            }
            _ => return Err(EngineError::InvalidActionHandler),
        };
        let event = json!({
            "name": request.name, "description": description,
            "handler_agent": request.handler_agent, "handler_node": request.handler_node,
        });
        let new = NewAction {
            action_id: ActionId::new(self.next_id()),
            name: &request.name,
            description: &description,
            handler_agent,
            handler_node: handler_node.as_ref(),
            input_schema: &input_schema,
            output_schema: &output_schema,
            available_to: available_to.as_deref(),
            limit: MAX_ACTIONS,
            event: NewEvent::new(event::ACTION_REGISTERED, event),
            at: self.now(),
        };
        let defined = match self.store().define_action(scope, &new).await? {
            Defined::Stored { new, recorded } => {
                self.announce(recorded);
                new
            }
            Defined::NameTaken => return Err(EngineError::ActionNameConflict(request.name)),
            Defined::TooMany => return Err(EngineError::TooManyActions),
        };
        let row = self.store().action(scope, &request.name).await?;
        Ok((row.ok_or(EngineError::ActionNotFound)?, defined))
    }

    async fn handler_agent(&self, caller: &Credential, name: &str) -> EngineResult<relay_domain::AgentId> {
        match caller {
            Credential::Agent(own) if &*own.name != name => Err(EngineError::NotTheHandler),
            _ => Ok(self.agent_by_name(caller.scope(), name).await?.agent_id),
        }
    }

    async fn handler_node(&self, scope: WorkspaceScope, name: &str, action: &str) -> EngineResult<NodeId> {
        let row = self.node_row(scope, name).await?;
        let node = NodeId::new(row.node_id);
        if self.store().capability_kind_on(scope, &node, action).await?.is_none() {
            return Err(EngineError::CapabilityMismatch { node: row.name, capability: action.to_owned() });
        }
        Ok(node)
    }

    /// The actions that the caller may invoke, by name. The workspace's key sees those that every agent may.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn actions(&self, caller: &Credential) -> EngineResult<Vec<ActionRow>> {
        let agent = match caller {
            Credential::Agent(agent) => Some((agent.agent_id, &*agent.name)),
            _ => None,
        };
        Ok(self.store().actions(caller.scope(), agent, MAX_ACTIONS).await?)
    }

    /// An action that the caller may invoke.
    ///
    /// # Errors
    /// When there is none for this caller.
    pub async fn action(&self, caller: &Credential, name: &str) -> EngineResult<ActionRow> {
        let row = self.store().action(caller.scope(), name).await?.ok_or(EngineError::ActionNotFound)?;
        let shown = match caller {
            Credential::Agent(agent) => may_invoke(&row, agent) || row.handler_agent_id == Some(agent.agent_id.get()),
            _ => row.available_to.is_none(),
        };
        if shown { Ok(row) } else { Err(EngineError::ActionNotFound) }
    }

    /// The names of what an agent handles and of what it may invoke, as far as the caller may know; at most
    /// [`MAX_NAMED`] in all, what it handles first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn actions_of_agent(
        &self,
        caller: &Credential,
        agent: &AgentRow,
    ) -> EngineResult<(Vec<String>, Vec<String>)> {
        let reader = match caller {
            Credential::Agent(reader) => Some((reader.agent_id, &*reader.name)),
            _ => None,
        };
        let of = (agent.agent_id, agent.name.as_str());
        Ok(self.store().actions_of_agent(caller.scope(), of, reader, MAX_NAMED).await?)
    }

    /// Ends an action; what was invoked by it goes on.
    ///
    /// # Errors
    /// When there is none of that name, or the caller is neither its handler nor holds the workspace's key.
    pub async fn delete_action(&self, caller: &Credential, name: &str) -> EngineResult<()> {
        let scope = caller.scope();
        let row = self.store().action(scope, name).await?.ok_or(EngineError::ActionNotFound)?;
        if let Credential::Agent(agent) = caller {
            let handles = row.handler_agent_id == Some(agent.agent_id.get());
            if !handles && !may_invoke(&row, agent) {
                return Err(EngineError::ActionNotFound);
            }
            if !handles {
                return Err(EngineError::NotTheHandler);
            }
        }
        let gone = self.store().delete_action(scope, ActionId::new(row.action_id)).await?;
        if gone { Ok(()) } else { Err(EngineError::ActionNotFound) }
    }
}

/// Whether an agent is among those that an action is for.
fn may_invoke(action: &ActionRow, agent: &AgentCaller) -> bool {
    action.available_to.as_ref().is_none_or(|names| names.iter().any(|name| **name == *agent.name))
}

fn checked_schema(field: &'static str, schema: Option<Value>) -> EngineResult<Value> {
    let schema = schema.filter(|schema| !schema.is_null()).unwrap_or_else(|| json!({}));
    if !schema.is_object() {
        return Err(EngineError::InvalidRequest(format!("{field} must be an object")));
    }
    check_json_length(field, encoded_length(&schema))?;
    input::compile(&schema)
        .map_err(|problem| EngineError::InvalidRequest(format!("{field} is no schema: {problem}")))?;
    Ok(schema)
}

fn checked_names(names: Option<Vec<String>>) -> EngineResult<Option<Vec<String>>> {
    let Some(names) = names else { return Ok(None) };
    if names.len() > MAX_AVAILABLE_TO {
        return Err(EngineError::InvalidRequest(format!("at most {MAX_AVAILABLE_TO} names in available_to")));
    }
    let names: Vec<String> = names.iter().map(|name| name.trim_start_matches('@').to_owned()).collect();
    for name in &names {
        check_name("available_to", name, relay_domain::names::MAX_AGENT_NAME_BYTES)?;
    }
    Ok(Some(names))
}
