//! Ending invocations: the first outcome counts.

use relay_domain::{
    AgentId, InvocationId, WorkspaceScope,
    action::{HANDLER_UNAVAILABLE, MAX_ERROR_BYTES, NAME_IN_USE, TOLD_AFTERWARDS},
};
use relay_store::{
    finish::{Finished, FinishedAll, Outcome, OutcomeNotice, Source},
    hosting::Fence,
};
use serde_json::Value;

use super::{InvocationRow, call::check_value};
use crate::{Engine, EngineError, EngineResult, auth::Credential};

/// What the agent that handles an invocation says of it.
#[derive(Debug)]
pub struct Complete {
    /// What it brought.
    pub output: Option<Value>,
    /// Why it failed.
    pub error: Option<String>,
    /// How long it took, in milliseconds.
    pub duration_ms: Option<i64>,
}

/// What came of a provider's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completed {
    /// It is the outcome.
    Recorded,
    /// It goes to another node.
    HandedBack,
    /// It came too late, or from somebody who was not asked: nothing was changed.
    Refused,
}

impl Engine {
    /// An invocation of an action, whoever asks.
    ///
    /// # Errors
    /// When there is none of that id and action.
    pub async fn invocation(
        &self,
        scope: WorkspaceScope,
        action: &str,
        id: InvocationId,
    ) -> EngineResult<InvocationRow> {
        let row = self.store().invocation(scope, id).await?;
        row.filter(|row| row.action_name == action).ok_or(EngineError::InvocationNotFound)
    }

    /// The agent that handles an invocation, or the holder of the workspace's key, ends it. One that has ended is
    /// returned as it is.
    ///
    /// # Errors
    /// When there is no such invocation, a node handles it, the caller does not, or a field is out of bounds.
    pub async fn complete_invocation(
        &self,
        caller: &Credential,
        action: &str,
        id: InvocationId,
        complete: Complete,
    ) -> EngineResult<InvocationRow> {
        let scope = caller.scope();
        let row = self.invocation(scope, action, id).await?;
        let Some(handler) = row.handler_agent_id else { return Err(EngineError::NodeOwnedInvocation) };
        let agent = match caller {
            Credential::Agent(agent) if agent.agent_id == handler => Some(agent.agent_id),
            Credential::Workspace { .. } => None,
            Credential::Agent(_) | Credential::Node(_) | Credential::Observer(_) => {
                return Err(EngineError::NotTheHandler);
            }
        };
        let duration_ms = complete.duration_ms.filter(|ms| *ms >= 0);
        let result = match (complete.output, complete.error) {
            (Some(_), Some(_)) => return Err(EngineError::InvalidRequest("output or error, not both".to_owned())),
            (output, None) => {
                let output = output.unwrap_or(Value::Null);
                check_value("output", &output)?;
                Ok(output)
            }
            (None, Some(error)) => Err(shortened(error)),
        };
        let outcome = Outcome { scope, invocation: id, source: Source::Handler(agent), result, duration_ms };
        match self.inner.calls.finish(outcome).await? {
            Finished::Recorded(row) => Ok(*row),
            Finished::Refused => self.invocation(scope, action, id).await,
        }
    }

    /// A provider's result over its connection. One that cannot do it gives it back.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn provider_result(
        &self,
        fence: &Fence,
        id: InvocationId,
        result: Result<Value, String>,
    ) -> EngineResult<Completed> {
        if result.as_ref().is_err_and(|error| error == HANDLER_UNAVAILABLE)
            && self.store().hand_back(fence, id, self.now()).await?
        {
            return Ok(Completed::HandedBack);
        }
        let result = match result {
            // It was sent twice, and the first one brought the agent up.
            Err(error) if error.starts_with(NAME_IN_USE) => self.store().born_output(fence, id).await?.ok_or(error),
            other => other,
        };
        let result = match result {
            Ok(output) => match check_value("output", &output) {
                Ok(()) => Ok(output),
                Err(_) => Err("the output is too large".to_owned()),
            },
            Err(error) => Err(shortened(error)),
        };
        let source = Source::Provider(fence.clone());
        let outcome = Outcome { scope: fence.scope, invocation: id, source, result, duration_ms: None };
        Ok(match self.inner.calls.finish(outcome).await? {
            Finished::Recorded(_) => Completed::Recorded,
            Finished::Refused => {
                metrics::counter!(relay_domain::metric_names::ACTION_RESULTS_REFUSED).increment(1);
                Completed::Refused
            }
        })
    }

    /// A provider says that it is at work at what it was sent: from now on it may take as long as it needs.
    ///
    /// # Errors
    /// When it has nothing of that id, or storage is away.
    pub async fn provider_accepts(&self, fence: &Fence, id: InvocationId) -> EngineResult<()> {
        let noted = self.store().accept_invocation(fence, id, self.now()).await?;
        if noted { Ok(()) } else { Err(EngineError::InvocationNotFound) }
    }

    /// An agent registered on a provider, which had been told to bring it up.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn agent_came_up(&self, fence: &Fence, id: InvocationId, agent: AgentId) -> EngineResult<bool> {
        Ok(self.store().agent_came_up(fence, id, agent).await?)
    }

    /// Outcomes of 2 s ago and before that nobody has told these callers.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn untold_outcomes(&self, callers: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<OutcomeNotice>> {
        Ok(self.store().untold_outcomes(callers, TOLD_AFTERWARDS).await?)
    }

    /// A caller's socket was told an outcome; noted soon.
    pub fn outcome_told(&self, scope: WorkspaceScope, invocation: InvocationId) {
        self.inner.sent_invocations.told(scope, invocation);
    }

    /// Tells whoever should know of outcomes.
    pub(super) fn tell_outcomes(&self, done: &mut FinishedAll) {
        // Callers' sockets are told by the notices; what went into a mailbox is not told twice.
        for recorded in done.recorded.drain(..) {
            self.announce_to_observers(recorded);
        }
        for notice in done.notices.drain(..) {
            let (caller, id) = (vec![notice.caller], outcome_event_id(notice.invocation));
            self.hints().notify_all(notice.scope, Some(caller), "agent", notice.kind, notice.data, Some(id));
        }
        if !done.mailboxes.is_empty() {
            self.hint_at_due(done.mailboxes.iter().map(|(scope, agent, node)| (*scope, *agent, node)));
            self.hints().mailboxes_changed(done.mailboxes.drain(..).map(|(scope, agent, _)| (scope, agent)));
        }
    }
}

/// What the frame that tells an outcome is known by: always the same, so that brokers take one told again for a
/// repeat, and no message's id.
#[must_use]
pub fn outcome_event_id(invocation: InvocationId) -> String {
    format!("evt-{invocation}")
}

/// An error of a bounded length; an empty one says at least that there was one.
fn shortened(error: String) -> String {
    if error.is_empty() {
        return "failed".to_owned();
    }
    if error.len() <= MAX_ERROR_BYTES {
        return error;
    }
    let end = (0..=MAX_ERROR_BYTES).rev().find(|at| error.is_char_boundary(*at)).unwrap_or(0);
    error[..end].to_owned()
}
