//! Decisions about rights. Every use case that rights restrict calls [`Core::authorize`]; its refusals are answered
//! with 403 and recorded as `access.denied`, within the bounds of `refusals.rs`.

use relay_domain::{
    WorkspaceScope,
    access::rights::{self, Actor, Operation, Right},
    events::kind,
};
use relay_store::{access::rights::AgentWithRights, events::Event};
use relay_wire::{events::recorded_data::AccessDenied, field::ToValue as _};

use super::callers::{AgentCaller, Credential};
use crate::{EngineError, EngineResult, core::Core, error::Denial};

/// Caller as the decision and its record need it.
pub(crate) struct RightsCaller<'a> {
    pub(crate) scope: WorkspaceScope,
    pub(crate) actor: Actor,
    pub(crate) name: &'a str,
}

impl<'a> From<&'a AgentCaller> for RightsCaller<'a> {
    fn from(caller: &'a AgentCaller) -> Self {
        let actor = Actor::Agent { id: caller.agent_id, rights: caller.rights };
        Self { scope: caller.scope, actor, name: &caller.name }
    }
}

impl<'a> From<&'a Credential> for RightsCaller<'a> {
    fn from(caller: &'a Credential) -> Self {
        match caller {
            Credential::Agent(agent) => agent.into(),
            // Only refusals of agents are recorded, so no other caller needs a name.
            Credential::Workspace { scope } => Self { scope: *scope, actor: Actor::Workspace, name: "" },
            Credential::Node(_) | Credential::Observer(_) => {
                Self { scope: caller.scope(), actor: Actor::Outsider, name: "" }
            }
        }
    }
}

impl<'a> From<(WorkspaceScope, &'a AgentWithRights)> for RightsCaller<'a> {
    fn from((scope, agent): (WorkspaceScope, &'a AgentWithRights)) -> Self {
        let actor = Actor::Agent { id: agent.agent_id, rights: agent.rights };
        Self { scope, actor, name: &agent.name }
    }
}

impl Core {
    /// Checks that a caller may do something, and records a refusal.
    ///
    /// # Errors
    /// When it may not.
    pub(crate) async fn authorize<'a>(
        &self,
        caller: impl Into<RightsCaller<'a>>,
        operation: Operation,
    ) -> EngineResult<()> {
        let caller = caller.into();
        let Err(refusal) = rights::check(caller.actor, operation) else { return Ok(()) };
        if let Actor::Agent { id, .. } = caller.actor
            && self.refusals.is_due(caller.scope.workspace_id(), id, refusal)
        {
            let data = AccessDenied {
                code: refusal.code(),
                right: refusal.right().map(Right::as_str),
                agent_id: id,
                agent_name: caller.name,
            };
            let event = Event::new(kind::ACCESS_DENIED, data.to_value()).by_agent(id);
            match self.store.record_event(caller.scope, event, self.now()).await {
                Ok(recorded) => self.announce(recorded),
                // The refusal is answered all the same.
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "failed to record a refusal");
                }
            }
        }
        Err(EngineError::Forbidden(Denial::Refused(refusal)))
    }
}
