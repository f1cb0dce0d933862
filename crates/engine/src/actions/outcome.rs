//! Outcomes of invocations: the first one recorded counts.

use relay_domain::{
    AgentId, InvocationId, WorkspaceScope,
    access::rights::Operation,
    actions::{HANDLER_UNAVAILABLE, Invocation, MAX_ERROR_BYTES, NAME_IN_USE, OUTCOME_NOTICE_MAX_AGE},
};
use relay_store::{
    DeleteCondition,
    actions::outcomes::{InvocationOutcome, OutcomeBatch, OutcomeNotice, OutcomeRecording, OutcomeSource},
    nodes::fence::Fence,
};
use serde_json::Value;

use super::{Actions, call::check_value};
use crate::{
    EngineError, EngineResult,
    access::callers::Credential,
    error::{Denial, Missing},
    events::announcement::Announcement,
    hints::SocketEvent,
};

/// Result of an invocation that an agent handles.
#[derive(Debug)]
pub struct CompletionRequest {
    pub output: Option<Value>,
    pub error: Option<String>,
    pub duration_ms: Option<i64>,
}

/// Outcome of a provider's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderResultOutcome {
    /// It is the invocation's outcome.
    Recorded,
    /// It is placed on another node.
    HandedBack,
    /// It came too late, or not from the handler: nothing was changed.
    Refused,
}

impl Actions {
    /// Finds an invocation of an action.
    ///
    /// # Errors
    /// When the action has no such invocation, or the caller neither called nor handles it.
    pub async fn invocation(&self, caller: &Credential, action: &str, id: InvocationId) -> EngineResult<Invocation> {
        let row = self.find_invocation(caller.scope(), action, id).await?;
        let read = Operation::ReadInvocation { caller: row.caller_id, handler: row.handler_agent_id };
        self.core.authorize(caller, read).await?;
        Ok(row)
    }

    async fn find_invocation(&self, scope: WorkspaceScope, action: &str, id: InvocationId) -> EngineResult<Invocation> {
        let row = self.core.store.invocation(scope, id).await?;
        row.filter(|row| row.action_name == action).ok_or(EngineError::NotFound(Missing::Invocation))
    }

    /// Ends an invocation as its handler or with the workspace key. An ended invocation is returned unchanged.
    ///
    /// # Errors
    /// When there is no such invocation, a node handles it, the caller does not, or a field is out of bounds.
    pub async fn complete(
        &self,
        caller: &Credential,
        action: &str,
        id: InvocationId,
        complete: CompletionRequest,
    ) -> EngineResult<Invocation> {
        let scope = caller.scope();
        let row = self.find_invocation(scope, action, id).await?;
        let Some(handler) = row.handler_agent_id else {
            return Err(EngineError::Forbidden(Denial::NodeOwnedInvocation));
        };
        self.core.authorize(caller, Operation::ManageAction { handler: Some(handler) }).await?;
        let agent = caller.agent_id();
        let duration_ms = complete.duration_ms.filter(|ms| *ms >= 0);
        let result = match (complete.output, complete.error) {
            (Some(_), Some(_)) => {
                return Err(EngineError::invalid_request("output or error, not both"));
            }
            (output, None) => {
                let output = output.unwrap_or(Value::Null);
                check_value("output", &output)?;
                Ok(output)
            }
            (None, Some(error)) => Err(truncate_error(error)),
        };
        // An agent may answer before the record that its socket got the invocation.
        let sent_to = self.dispatch_notes.invocations.location(scope, id);
        let source = OutcomeSource::Handler { agent, sent_to };
        // Only nodes release agents.
        let outcome = InvocationOutcome { scope, invocation: id, source, result, duration_ms, is_release_ended: true };
        match self.calls.record_outcome(self.core.family(scope).await, outcome).await? {
            OutcomeRecording::Recorded(row) => Ok(*row),
            OutcomeRecording::Refused | OutcomeRecording::OpenRelease(_) => {
                self.find_invocation(scope, action, id).await
            }
        }
    }

    /// Records a provider's result over its connection. A provider that cannot run the invocation hands it back.
    pub async fn record_provider_result(
        &self,
        fence: &Fence,
        id: InvocationId,
        result: Result<Value, String>,
    ) -> EngineResult<ProviderResultOutcome> {
        // Not handed back if an agent handles it or after too many attempts: then the error is its outcome.
        if result.as_ref().is_err_and(|error| error == HANDLER_UNAVAILABLE)
            && self.core.store.return_invocation(fence, id, self.core.now()).await?
        {
            return Ok(ProviderResultOutcome::HandedBack);
        }
        let result = match result {
            // It was dispatched twice, and the first dispatch started the agent.
            Err(error) if error.starts_with(NAME_IN_USE) => {
                self.core.store.spawned_agent_output(fence, id).await?.ok_or(error)
            }
            other => other,
        };
        let result = match result {
            Ok(output) => match check_value("output", &output) {
                Ok(()) => Ok(output),
                // An outcome and not an error: the provider would repeat the same output, and the caller wait for it.
                Err(_) => Err("the output is too large".to_owned()),
            },
            Err(error) => Err(truncate_error(error)),
        };
        let is_released = result.as_ref().ok().and_then(|output| output["released"].as_bool());
        let outcome = InvocationOutcome {
            scope: fence.scope,
            invocation: id,
            source: OutcomeSource::Provider(fence.clone()),
            is_release_ended: result.is_err() || is_released == Some(false),
            result,
            duration_ms: None,
        };
        let family = self.core.family(fence.scope).await;
        // The attempt to record also tells whether this is an open release, so all other results cost no read.
        let mut recording = self.calls.record_outcome(family, outcome).await?;
        if let OutcomeRecording::OpenRelease(outcome) = recording {
            self.end_released(fence, id, is_released).await?;
            let outcome = InvocationOutcome { is_release_ended: true, ..*outcome };
            recording = self.calls.record_outcome(family, outcome).await?;
        }
        Ok(match recording {
            OutcomeRecording::Recorded(_) => ProviderResultOutcome::Recorded,
            OutcomeRecording::Refused | OutcomeRecording::OpenRelease(_) => {
                metrics::counter!(relay_domain::metric_names::ACTION_RESULTS_REFUSED).increment(1);
                ProviderResultOutcome::Refused
            }
        })
    }

    /// Ends the agent whose release its node reports, and deletes it if the caller has asked for that. A node has ended
    /// it unless it says otherwise; a policy may have refused, so it must say so. This precedes the outcome, so that
    /// the name is free when the caller learns of it; a process that stops between the two leaves an open invocation,
    /// which the node answers again.
    async fn end_released(&self, fence: &Fence, id: InvocationId, is_released: Option<bool>) -> EngineResult<()> {
        let Some(agent) = self.core.store.agent_of_release(fence, id).await? else { return Ok(()) };
        if agent.is_placed_on_policy && is_released.is_none() {
            return Ok(());
        }
        if !agent.deletes {
            let recorded = self.core.store.end_released_agent(fence.scope, &agent, self.core.now()).await?;
            self.core.announce(recorded);
            return Ok(());
        }
        let condition = DeleteCondition {
            agent: Some(agent.agent_id),
            is_release: true,
            orphans_mailbox: true,
            ..DeleteCondition::default()
        };
        match self.agents.delete_if(fence.scope, &agent.name, &condition).await {
            // Another process deleted it first.
            Ok(()) | Err(EngineError::NotFound(Missing::Agent(_))) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Records that a provider has begun: from now on it may take as long as it needs.
    ///
    /// # Errors
    /// When it has no such invocation.
    pub async fn accept(&self, fence: &Fence, id: InvocationId) -> EngineResult<()> {
        let noted = self.core.store.accept_invocation(fence, id, self.core.now()).await?;
        if noted { Ok(()) } else { Err(EngineError::NotFound(Missing::Invocation)) }
    }

    /// Links an agent that registered on a provider to the spawn that asked for it.
    pub async fn record_spawned_agent(&self, fence: &Fence, id: InvocationId, agent: AgentId) -> EngineResult<bool> {
        Ok(self.core.store.link_spawned_agent(fence, id, agent).await?)
    }

    /// Returns outcomes that are 2 s old or older and were not sent to these callers.
    pub async fn unannounced_outcomes(
        &self,
        callers: &[(WorkspaceScope, AgentId)],
    ) -> EngineResult<Vec<OutcomeNotice>> {
        Ok(self.core.store.unannounced_outcomes(callers, OUTCOME_NOTICE_MAX_AGE).await?)
    }

    /// Notes that a caller's socket received an outcome.
    pub fn record_outcome_sent(&self, scope: WorkspaceScope, invocation: InvocationId) {
        self.dispatch_notes.record_outcome_sent(scope, invocation);
    }

    /// Announces outcomes to observers, callers and mailboxes.
    pub(super) fn announce_outcomes(&self, done: &mut OutcomeBatch) {
        // The notices inform callers' sockets; an outcome in a mailbox is not sent twice.
        for recorded in done.recorded.drain(..) {
            self.core.announce(Announcement::to_observers_only(recorded));
        }
        for notice in done.notices.drain(..) {
            let event = SocketEvent {
                agents: Some(vec![notice.caller]),
                topic: "agent",
                event: notice.kind,
                data: notice.data,
                event_id: Some(outcome_event_id(notice.invocation)),
            };
            match notice.gateway_id {
                // The outcomes of a burst would otherwise wake every gateway once for each.
                Some(gateway) => {
                    self.core.hints.notify_gateway(gateway, self.core.gateway_id(), notice.scope, event);
                }
                None => self.core.hints.notify_all(notice.scope, event),
            }
        }
        if !done.mailboxes.is_empty() {
            self.node_kinds
                .hint_due_deliveries(done.mailboxes.iter().map(|(scope, agent, node)| (*scope, *agent, node)));
            self.core.hints.mailboxes_changed(done.mailboxes.drain(..).map(|(scope, agent, _)| (scope, agent)));
        }
    }
}

/// Returns the event id of an outcome's frame: stable, so that brokers drop a repeated one, and never a message's id.
#[must_use]
pub fn outcome_event_id(invocation: InvocationId) -> String {
    format!("evt-{invocation}")
}

/// Bounds an error text; an empty one becomes `failed`.
fn truncate_error(error: String) -> String {
    if error.is_empty() {
        return "failed".to_owned();
    }
    if error.len() <= MAX_ERROR_BYTES {
        return error;
    }
    let end = (0..=MAX_ERROR_BYTES).rev().find(|at| error.is_char_boundary(*at)).unwrap_or(0);
    error[..end].to_owned()
}
