//! Creation of invocations: every way to invoke something ends here.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, InvocationId, NodeId, WorkspaceScope,
    access::rights::Operation,
    actions::{
        Action, InvocationStatus, MAX_ACTION_NAME_BYTES, MAX_VALUE_BYTES, PlacementRecord, RELEASE, SPAWN,
        SPAWN_PREFIX, SkippedNode, WORKSPACE_CALLER, is_invokable_capacity,
    },
    encoded_length,
    names::check_name,
    nodes::CapabilityKind,
};
pub(crate) use relay_store::actions::new_invocation::{Handler, WaitPolicy};
use relay_store::{
    IdempotencyKey, InvocationRecord,
    actions::{
        definitions::NamedHandlers,
        invoke::InvokeOutcome,
        new_invocation::{Invoker, NewInvocation},
    },
};
use serde_json::{Map, Value};

use super::{Actions, may_invoke};
use crate::{
    EngineError, EngineResult,
    access::{callers::AgentCaller, idempotency::ClientKey},
    error::{Conflict, Denial, Dependency, InvalidInput, Limit, Missing},
};

#[derive(Debug)]
pub struct InvokeAction {
    pub name: String,
    /// Node of the action, by name or id; none: the one that the name leads to.
    pub node: Option<String>,
    /// `{}` when absent.
    pub input: Option<Value>,
    /// True to deliver the outcome to the caller's mailbox.
    pub durable: bool,
}

/// Checked invocation request, as the engine's own modules submit it.
#[derive(Debug, Clone)]
pub struct InvocationRequest {
    pub action_name: String,
    pub handler: Handler,
    /// `None`: the holder of the workspace key, or the engine itself.
    pub caller_id: Option<AgentId>,
    pub caller_name: String,
    pub input: Value,
    /// True to deliver the outcome to the caller's mailbox.
    pub durable: bool,
    pub key: Option<IdempotencyKey>,
}

/// Invocation with its placement.
#[derive(Debug, Clone)]
pub struct PlacedInvocation {
    pub id: InvocationId,
    pub status: InvocationStatus,
    /// Node that it was dispatched to.
    pub node_id: Option<NodeId>,
    pub created_at: DateTime<Utc>,
    /// True if an earlier request with the same key created it.
    pub replayed: bool,
}

/// Destination of an invocation by name.
#[derive(Debug)]
pub(super) enum Callee {
    Action(Action),
    /// Action of a provider that is invoked instead of the capacity of this name.
    Policy(Action),
    /// Capacity of nodes that may be invoked without an action.
    Capacity,
    /// No action, and no capacity that may be invoked.
    Nothing,
}

/// Response to an invocation request.
#[derive(Debug, Clone)]
pub struct InvocationReceipt {
    pub id: InvocationId,
    pub action_name: String,
    pub handler_agent_id: Option<AgentId>,
    /// The node that handles it: the one that must, otherwise the one that it was placed on.
    pub handler_node_id: Option<NodeId>,
    pub dispatched_node_id: Option<NodeId>,
    pub input: Value,
    pub status: InvocationStatus,
    pub created_at: DateTime<Utc>,
    /// True if an earlier request with the same key created it.
    pub replayed: bool,
}

impl Actions {
    /// Invokes an action by its name, or one of a certain node.
    ///
    /// # Errors
    /// When there is no such action, the caller may not invoke it, the input does not fit its schema, no handler is
    /// available, or too many invocations are open.
    pub async fn invoke(
        &self,
        caller: &AgentCaller,
        request: InvokeAction,
        key: Option<&ClientKey>,
    ) -> EngineResult<InvocationReceipt> {
        let target = request.node.as_deref().unwrap_or_default();
        let place = format!("{target}/{}", request.name);
        let stored = key.map(|key| key.stored(&caller.agent_id.to_string(), "action.invoke", &place));
        if request.name == SPAWN || request.name == RELEASE {
            return self.invoke_reserved(caller, request, key).await;
        }
        self.invoke_defined(caller.scope, Some(caller), request, stored).await
    }

    /// Invokes anything except spawn and release. Without a caller it is invoked in the name of the workspace.
    pub(crate) async fn invoke_defined(
        &self,
        scope: WorkspaceScope,
        caller: Option<&AgentCaller>,
        request: InvokeAction,
        key: Option<IdempotencyKey>,
    ) -> EngineResult<InvocationReceipt> {
        if let Some(before) = self.find_receipt(scope, key.as_ref()).await? {
            return Ok(before);
        }
        check_name("action", &request.name, MAX_ACTION_NAME_BYTES)?;
        if let Some(caller) = caller {
            self.authorize_spawn(caller, &request.name).await?;
        }
        let given = request.input.filter(|input| !input.is_null()).unwrap_or_else(|| Map::new().into());
        if !given.is_object() {
            let message = "input must be an object".to_owned();
            return Err(EngineError::Invalid(InvalidInput::ActionInput { path: String::new(), message }));
        }
        check_value("input", &given)?;
        let node = match &request.node {
            None => None,
            Some(name) => Some(self.core.stored_node(scope, name).await?.node_id),
        };
        let family = self.core.family(scope).await;
        let (handler, input) = match self.find_callee(scope, node.as_ref(), &request.name).await? {
            Callee::Action(action) => {
                self.check_caller(scope, caller, &action).await?;
                (action_handler(&action), self.schemas.check_input(family, &action.input_schema, given).await?)
            }
            Callee::Policy(policy) => {
                self.check_caller(scope, caller, &policy).await?;
                let given = name_capability(given, &request.name, &policy.name);
                let input = self.schemas.check_input(family, &policy.input_schema, given).await?;
                (policy_handler(policy), input)
            }
            Callee::Capacity => (capacity_handler(&request.name, node), given),
            Callee::Nothing => return Err(EngineError::NotFound(Missing::Action)),
        };
        let call = InvocationRequest {
            action_name: request.name,
            handler,
            caller_id: caller.map(|caller| caller.agent_id),
            caller_name: caller.map_or_else(|| WORKSPACE_CALLER.to_owned(), |caller| caller.name.to_string()),
            input,
            durable: request.durable,
            key,
        };
        self.create_invocation(scope, self.new_invocation_id(), call).await
    }

    pub(super) fn new_invocation_id(&self) -> InvocationId {
        InvocationId::new(self.core.next_id())
    }

    /// Creates an invocation under this id.
    pub(crate) async fn create_invocation(
        &self,
        scope: WorkspaceScope,
        id: InvocationId,
        call: InvocationRequest,
    ) -> EngineResult<InvocationReceipt> {
        let handler = call.handler.clone();
        let (action_name, input) = (call.action_name.clone(), call.input.clone());
        let made = self.place_invocation(scope, id, call).await?;
        let (handler_agent_id, handler_node_id) = match handler {
            Handler::Agent(agent) => (Some(agent), None),
            Handler::Node { target, .. } => (None, target.or_else(|| made.node_id.clone())),
        };
        Ok(InvocationReceipt {
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

    /// Creates an invocation, places it and dispatches it.
    ///
    /// # Errors
    /// When no handler is available and it may not wait, too many are open, or its key was used for another request.
    async fn place_invocation(
        &self,
        scope: WorkspaceScope,
        id: InvocationId,
        call: InvocationRequest,
    ) -> EngineResult<PlacedInvocation> {
        let new = NewInvocation {
            scope,
            id,
            action_name: call.action_name,
            handler: call.handler,
            caller: Invoker { agent_id: call.caller_id, name: call.caller_name },
            input: call.input,
            // Only an agent has a mailbox for the outcome.
            durable: call.durable && call.caller_id.is_some(),
            key: call.key,
            // Decides among nodes with equal load. Drawn here, because the rules of placement are pure.
            entropy: fastrand::u64(..),
            at: self.core.now(),
        };
        let (id, created_at, key) = (new.id, new.at, new.key);
        match self.calls.create(self.core.family(scope).await, new).await? {
            InvokeOutcome::Created(status, dispatch) => {
                let node_id = dispatch.map(|dispatch| dispatch.node_id);
                Ok(PlacedInvocation { id, status, node_id, created_at, replayed: false })
            }
            // An earlier request with this key has committed, perhaps while this one was checked.
            InvokeOutcome::KeyUsed => self.find_repeated_invocation(scope, key).await,
            // The queue retries these itself.
            InvokeOutcome::Busy => Err(EngineError::Overloaded),
            InvokeOutcome::Unavailable(record) => {
                Err(EngineError::DependencyUnavailable(Dependency::Handler(describe_skipped(&record))))
            }
            InvokeOutcome::HandlerLost => Err(EngineError::DependencyUnavailable(Dependency::Handler(
                "the agent that handles it is not connected".to_owned(),
            ))),
            InvokeOutcome::QueueFull => Err(EngineError::DependencyUnavailable(Dependency::Handler(
                "as many wait for its node as may".to_owned(),
            ))),
            InvokeOutcome::TooManyOfAction => Err(EngineError::LimitExceeded(Limit::Invocations("this action"))),
            InvokeOutcome::TooManyOfWorkspace => Err(EngineError::LimitExceeded(Limit::Invocations("this workspace"))),
        }
    }

    /// Loads the invocation that was created under a repeated key.
    pub(super) async fn find_repeated_invocation(
        &self,
        scope: WorkspaceScope,
        key: Option<IdempotencyKey>,
    ) -> EngineResult<PlacedInvocation> {
        let in_progress = || EngineError::Conflict(Conflict::IdempotencyInProgress);
        // Absent: the first request was refused, or its outcome is not known yet.
        let replay = self.core.replay(scope, &key.ok_or_else(in_progress)?).await?.ok_or_else(in_progress)?;
        let id = replay.record::<InvocationRecord>().ok_or_else(in_progress)?.invocation_id;
        let row = self.core.store.invocation(scope, id).await?.ok_or(EngineError::NotFound(Missing::Invocation))?;
        Ok(PlacedInvocation {
            id,
            status: row.status,
            node_id: row.node_id,
            created_at: row.created_at,
            replayed: true,
        })
    }

    /// Checks that an agent may spawn, if the name is that of a capacity to spawn.
    pub(super) async fn authorize_spawn(&self, caller: &AgentCaller, name: &str) -> EngineResult<()> {
        if name.starts_with(SPAWN_PREFIX) {
            self.core.authorize(caller, Operation::Spawn).await?;
        }
        Ok(())
    }

    /// Checks that an agent may invoke an action. A denial is recorded for the agent and for observers, up to a bound.
    pub(super) async fn check_caller(
        &self,
        scope: WorkspaceScope,
        caller: Option<&AgentCaller>,
        action: &Action,
    ) -> EngineResult<()> {
        match caller {
            Some(caller) if !may_invoke(action, caller) => {
                if self.core.refusals.is_denial_due(scope.workspace_id(), caller.agent_id) {
                    let (store, now) = (&self.core.store, self.core.now());
                    match store.record_denial(scope, &action.name, caller.agent_id, &caller.name, now).await {
                        Ok(recorded) => self.core.announce(recorded),
                        // The denial is answered all the same.
                        Err(error) => {
                            tracing::debug!(error = &error as &dyn std::error::Error, "failed to record a denial");
                        }
                    }
                }
                Err(EngineError::Forbidden(Denial::ActionDenied(action.name.clone())))
            }
            // The workspace key is none of the named agents.
            None if action.available_to.is_some() => {
                Err(EngineError::Forbidden(Denial::ActionDenied(action.name.clone())))
            }
            _ => Ok(()),
        }
    }

    /// Finds what the name of an action leads to, on a node or in the workspace. A policy for spawns precedes the
    /// actions and capacities of nodes; an agent's own action is none of them.
    pub(super) async fn find_callee(
        &self,
        scope: WorkspaceScope,
        node: Option<&NodeId>,
        name: &str,
    ) -> EngineResult<Callee> {
        let NamedHandlers { action, is_capacity } = match node {
            None => self.core.store.named_handlers(scope, name).await?,
            Some(node) => {
                let action = self.core.store.action_of_node(scope, node, name).await?;
                let is_capacity = action.is_none()
                    && self.core.store.node_capability_kind(scope, node, name).await? == Some(CapabilityKind::Capacity);
                NamedHandlers { action, is_capacity }
            }
        };
        let is_handled_by_agent = action.as_ref().is_some_and(|action| action.handler_agent_id.is_some());
        if name.starts_with(SPAWN_PREFIX)
            && !is_handled_by_agent
            && let Some(policy) = self.core.store.capacity_policy(scope, node, &[name, SPAWN]).await?
        {
            return Ok(Callee::Policy(policy));
        }
        Ok(match action {
            Some(action) => Callee::Action(action),
            None if is_capacity && is_invokable_capacity(name) => Callee::Capacity,
            None => Callee::Nothing,
        })
    }
}

/// Returns the handler of a capacity without a defined action: any node with the capacity.
fn capacity_handler(name: &str, target: Option<NodeId>) -> Handler {
    Handler::Node {
        capability: name.to_owned(),
        target,
        provider: None,
        // A policy of a node is invoked instead of its capacity to spawn.
        only_capacity: !name.starts_with(SPAWN_PREFIX),
        wait_policy: WaitPolicy::AsDeclared,
    }
}

/// Returns the handler of a policy. Its caller is refused while it is unavailable, so that a capacity is never used
/// without it and no caller waits for a policy that may refuse.
pub(super) fn policy_handler(policy: Action) -> Handler {
    Handler::Node {
        capability: policy.name,
        target: policy.handler_node_id,
        provider: policy.provider,
        only_capacity: false,
        wait_policy: WaitPolicy::Never,
    }
}

/// Names the capacity in the input of a policy for all spawns: its frame names the policy only.
fn name_capability(mut input: Value, capacity: &str, policy: &str) -> Value {
    if let Some(input) = input.as_object_mut()
        && capacity != policy
    {
        input.entry("capability").or_insert_with(|| capacity.into());
    }
    input
}

pub(super) fn action_handler(action: &Action) -> Handler {
    match action.handler_agent_id {
        Some(agent) => Handler::Agent(agent),
        None => Handler::Node {
            capability: action.name.clone(),
            target: action.handler_node_id.clone(),
            // The first provider of a node keeps the action's name: other providers that advertise it were never asked
            // for.
            provider: action.provider.clone(),
            only_capacity: false,
            wait_policy: WaitPolicy::AsDeclared,
        },
    }
}

/// Checks that an input or output fits into a frame.
pub(super) fn check_value(field: &'static str, value: &Value) -> EngineResult<()> {
    if encoded_length(value) > MAX_VALUE_BYTES {
        return Err(EngineError::invalid_request(format!("{field} has at most {MAX_VALUE_BYTES} bytes of JSON")));
    }
    Ok(())
}

/// Summarizes a placement for the caller.
fn describe_skipped(record: &PlacementRecord) -> String {
    let describe = |skip: &SkippedNode| {
        // A record without the name of the node has its id.
        let node = skip.node.as_deref().unwrap_or(skip.node_id.as_str());
        format!("{node}: {}", skip.reason.replace('_', " "))
    };
    let named: Vec<String> = record.skipped.iter().take(5).map(describe).collect();
    if named.is_empty() { "no node has the capability".to_owned() } else { named.join(", ") }
}
