//! Making invocations.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope,
    action::{MAX_ACTION_NAME_BYTES, MAX_VALUE_BYTES, RELEASE, SPAWN, Status, WORKSPACE_CALLER, is_invokable_capacity},
    names::check_name,
};
pub(crate) use relay_store::invoke::{Handler, Waits};
use relay_store::invoke::{Invoked, Invoker, NewInvocation};
use serde_json::{Value, json};

use super::{ActionRow, input, may_invoke};
use crate::{Engine, EngineError, EngineResult, agents::encoded_length, auth::AgentCaller, idempotency::ClientKey};

/// A request to invoke an action.
#[derive(Debug)]
pub struct InvokeAction {
    /// The action.
    pub name: String,
    /// The node whose action it is, by name or id; none: the one that the name leads to.
    pub node: Option<String>,
    /// What it is given; `{}` when absent.
    pub input: Option<Value>,
    /// Whether the outcome goes into the caller's mailbox.
    pub durable: bool,
}

/// An invocation as the engine's own parts make it: whatever had to be checked has been.
#[derive(Debug, Clone)]
pub struct Call {
    /// What callers know it as.
    pub action_name: String,
    /// Who is to do it.
    pub handler: Handler,
    /// Who invokes it; none: the holder of the workspace's key, or the engine itself.
    pub caller_id: Option<AgentId>,
    /// What that one is called.
    pub caller_name: String,
    /// What it is given.
    pub input: Value,
    /// Whether the outcome goes into the caller's mailbox.
    pub durable: bool,
    /// What its idempotency key is stored as, with the fingerprint of the request.
    pub key: Option<([u8; 32], [u8; 32])>,
}

/// An invocation that was made.
#[derive(Debug, Clone)]
pub struct Made {
    /// Its id.
    pub id: InvocationId,
    /// Where it stands.
    pub status: Status,
    /// The node that it was sent to.
    pub node_id: Option<NodeId>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Whether the same key has made it before.
    pub replayed: bool,
}

/// What a caller is told at once.
#[derive(Debug, Clone)]
pub struct Acknowledged {
    /// Its id.
    pub id: InvocationId,
    /// What was invoked.
    pub action_name: String,
    /// The agent that handles it.
    pub handler_agent_id: Option<AgentId>,
    /// The node that handles it, if it is one certain node's.
    pub handler_node_id: Option<NodeId>,
    /// The node that it was sent to.
    pub dispatched_node_id: Option<NodeId>,
    /// What it was given.
    pub input: Value,
    /// Where it stands.
    pub status: Status,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Whether the same key has made it before.
    pub replayed: bool,
}

impl Engine {
    /// Invokes an action: by its name, or as a node's.
    ///
    /// # Errors
    /// When there is no such action, the caller may not invoke it, the input does not fit its schema, nobody can do
    /// it now, or too many are open.
    pub async fn invoke_action(
        &self,
        caller: &AgentCaller,
        request: InvokeAction,
        key: Option<&ClientKey>,
    ) -> EngineResult<Acknowledged> {
        let target = request.node.as_deref().unwrap_or_default();
        let place = format!("{target}/{}", request.name);
        let stored =
            key.map(|key| (key.hash(&caller.agent_id.to_string(), "action.invoke", &place), key.fingerprint()));
        if request.name == SPAWN || request.name == RELEASE {
            return self.invoke_reserved(caller, request, key).await;
        }
        self.invoke_defined(caller.scope, Some(caller), request, stored).await
    }

    /// Invokes anything but what the engine dispatches itself; without a caller, in the name of the workspace.
    ///
    /// # Errors
    /// As [`Engine::invoke_action`].
    pub(crate) async fn invoke_defined(
        &self,
        scope: WorkspaceScope,
        caller: Option<&AgentCaller>,
        request: InvokeAction,
        key: Option<([u8; 32], [u8; 32])>,
    ) -> EngineResult<Acknowledged> {
        if let Some(before) = self.acknowledged_under(scope, key.as_ref()).await? {
            return Ok(before);
        }
        check_name("action", &request.name, MAX_ACTION_NAME_BYTES)?;
        let given = request.input.filter(|input| !input.is_null()).unwrap_or_else(|| json!({}));
        if !given.is_object() {
            let message = "input must be an object".to_owned();
            return Err(EngineError::InvalidActionInput { path: String::new(), message });
        }
        check_value("input", &given)?;
        let node = match &request.node {
            None => None,
            Some(name) => Some(NodeId::new(self.node_row(scope, name).await?.node_id)),
        };
        let action = match &node {
            None => self.store().action(scope, &request.name).await?,
            Some(node) => self.store().action_of_node(scope, node.as_str(), &request.name).await?,
        };
        let handler = match &action {
            Some(action) => {
                self.check_call(scope, caller, action, &given).await?;
                handler_of(action)
            }
            None => self.capacity(scope, &request.name, node).await?,
        };
        let call = Call {
            action_name: request.name,
            handler,
            caller_id: caller.map(|caller| caller.agent_id),
            caller_name: caller.map_or_else(|| WORKSPACE_CALLER.to_owned(), |caller| caller.name.to_string()),
            input: given,
            durable: request.durable,
            key,
        };
        self.acknowledge(scope, call).await
    }

    /// Makes an invocation and says what a caller is told of it.
    ///
    /// # Errors
    /// As [`Engine::acknowledge`].
    pub async fn acknowledge(&self, scope: WorkspaceScope, call: Call) -> EngineResult<Acknowledged> {
        self.acknowledge_as(scope, InvocationId::new(self.next_id()), call).await
    }

    /// The same under an id that was taken before.
    ///
    /// # Errors
    /// As [`Engine::acknowledge`].
    pub(crate) async fn acknowledge_as(
        &self,
        scope: WorkspaceScope,
        id: InvocationId,
        call: Call,
    ) -> EngineResult<Acknowledged> {
        let (handler_agent_id, handler_node_id) = match &call.handler {
            Handler::Agent(agent) => (Some(*agent), None),
            Handler::Node { target, .. } => (None, target.clone()),
        };
        let (action_name, input) = (call.action_name.clone(), call.input.clone());
        let made = self.call_as(scope, id, call).await?;
        Ok(Acknowledged {
            id: made.id,
            action_name,
            handler_agent_id,
            handler_node_id,
            dispatched_node_id: made.node_id,
            input,
            status: made.status,
            created_at: made.created_at,
            replayed: made.replayed,
        })
    }

    /// Makes an invocation, places it, and sends it on its way: what every way to invoke something ends in.
    ///
    /// # Errors
    /// When nobody can do it now and it may not wait, too many are open, its key was used for something else, or
    /// storage is away.
    async fn call_as(&self, scope: WorkspaceScope, id: InvocationId, call: Call) -> EngineResult<Made> {
        let new = NewInvocation {
            scope,
            id,
            action_name: call.action_name,
            handler: call.handler,
            caller: Invoker { agent_id: call.caller_id, name: call.caller_name },
            input: call.input,
            durable: call.durable && call.caller_id.is_some(),
            key: call.key,
            entropy: fastrand::u64(..),
            at: self.now(),
        };
        let (id, created_at, key) = (new.id, new.at, new.key);
        match self.inner.calls.make(new).await? {
            Invoked::Made(status, dispatch) => {
                let node_id = dispatch.map(|dispatch| dispatch.node_id);
                Ok(Made { id, status, node_id, created_at, replayed: false })
            }
            Invoked::KeyUsed => self.made_before(scope, key).await,
            // The queue tries these again by itself.
            Invoked::Busy => Err(EngineError::Overloaded),
            Invoked::Unavailable(reasons) => Err(EngineError::HandlerUnavailable(why(&reasons))),
            Invoked::QueueFull => Err(EngineError::HandlerUnavailable("as many wait for its node as may".to_owned())),
            Invoked::TooManyOfAction => Err(EngineError::TooManyInvocations("this action")),
            Invoked::TooManyOfWorkspace => Err(EngineError::TooManyInvocations("this workspace")),
        }
    }

    /// What was made with a key before.
    pub(super) async fn made_before(
        &self,
        scope: WorkspaceScope,
        key: Option<([u8; 32], [u8; 32])>,
    ) -> EngineResult<Made> {
        let (hash, fingerprint) = key.ok_or(EngineError::IdempotencyInProgress)?;
        // Not there: the request that had it was refused, or its answer is not known yet.
        let replay = self.replay(scope, &hash, &fingerprint).await?.ok_or(EngineError::IdempotencyInProgress)?;
        let id = replay.data["invocation_id"].as_i64().map(InvocationId::new);
        let id = id.ok_or(EngineError::IdempotencyInProgress)?;
        let row = self.store().invocation(scope, id).await?.ok_or(EngineError::InvocationNotFound)?;
        Ok(Made {
            id,
            status: Status::parse(&row.status).unwrap_or(Status::Pending),
            node_id: row.node_id.map(NodeId::new),
            created_at: row.created_at,
            replayed: true,
        })
    }

    /// Whether an agent may invoke an action with this input. A denial is told to the agent and to observers.
    async fn check_call(
        &self,
        scope: WorkspaceScope,
        caller: Option<&AgentCaller>,
        action: &ActionRow,
        given: &Value,
    ) -> EngineResult<()> {
        match caller {
            Some(caller) if !may_invoke(action, caller) => {
                let denied = self.store().record_denial(scope, &action.name, caller.agent_id, &caller.name, self.now());
                self.announce(denied.await?);
                return Err(EngineError::ActionDenied(action.name.clone()));
            }
            None if action.available_to.is_some() => return Err(EngineError::ActionDenied(action.name.clone())),
            _ => {}
        }
        input::check(&action.input_schema, given)
            .map_err(|problem| EngineError::InvalidActionInput { path: problem.path, message: problem.message })
    }

    /// A capacity that nobody has defined as an action: any node that has it may do it.
    async fn capacity(&self, scope: WorkspaceScope, name: &str, node: Option<NodeId>) -> EngineResult<Handler> {
        if !is_invokable_capacity(name) {
            return Err(EngineError::ActionNotFound);
        }
        let known = match &node {
            None => self.store().capacity_exists(scope, name).await?,
            Some(node) => self.store().capability_kind_on(scope, node, name).await?.as_deref() == Some("capacity"),
        };
        if !known {
            return Err(EngineError::ActionNotFound);
        }
        Ok(Handler::Node {
            capability: name.to_owned(),
            target: node,
            provider: None,
            only_capacity: true,
            waits: Waits::AsDeclared,
        })
    }
}

/// Who handles a defined action.
fn handler_of(action: &ActionRow) -> Handler {
    match action.handler_agent_id {
        Some(agent) => Handler::Agent(AgentId::new(agent)),
        None => Handler::Node {
            capability: action.name.clone(),
            target: action.handler_node_id.as_deref().map(NodeId::new),
            // The first of a node's providers keeps the name: another that advertises it as well was never asked for.
            provider: action.provider.as_deref().map(ProviderName::new),
            only_capacity: false,
            waits: Waits::AsDeclared,
        },
    }
}

/// An input or output must fit into a frame.
pub(super) fn check_value(field: &'static str, value: &Value) -> EngineResult<()> {
    if encoded_length(value) > MAX_VALUE_BYTES {
        return Err(EngineError::InvalidRequest(format!("{field} has at most {MAX_VALUE_BYTES} bytes of JSON")));
    }
    Ok(())
}

/// Why nobody can do something, for people.
fn why(reasons: &Value) -> String {
    let skipped = reasons["skipped"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named: Vec<String> = skipped
        .iter()
        .take(5)
        .map(|skip| {
            let node = skip["node"].as_str().or(skip["node_id"].as_str()).unwrap_or_default();
            format!("{node}: {}", skip["reason"].as_str().unwrap_or_default().replace('_', " "))
        })
        .collect();
    if named.is_empty() { "no node has the capability".to_owned() } else { named.join(", ") }
}
