//! Dispatch of invocations to sockets. The row counts; a hint carries the frame to the gateway with the socket, and
//! every gateway polls each second for invocations without a hint.

use std::{collections::HashSet, sync::Weak, time::Duration};

use relay_domain::{GatewayId, InvocationId, NodeId, ProviderName, WorkspaceScope};
pub use relay_store::SentInvocation;
use relay_store::{
    Store, StoreError, StoreResult, UnsentInvocation,
    actions::{
        invoke::Dispatch,
        new_invocation::{Handler, NewInvocation},
    },
    nodes::fence::Fence,
};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, queue};
use relay_wire::nodes::invoke_frame::invoke_frame;

use super::Actions;
use crate::{EngineResult, Inner, hints::Hint};

/// A note that finds no room stays unrecorded; its gateway finds it by polling and notes it again.
const INVOCATIONS: QueueConfig<InvocationNote> = QueueConfig {
    linger: Linger { after_items: 0, time: INVOCATIONS_GATHER_FOR },
    ..QueueConfig::new("dispatch_notes", 8192, 1000)
};
/// Time in which notes of invocations gather. Most are answered within it, and need no record. After the end of the
/// gateway, or with a connection that is replaced in this time, frames of this time are sent again.
const INVOCATIONS_GATHER_FOR: Duration = Duration::from_millis(20);
const OUTCOMES: QueueConfig<(WorkspaceScope, InvocationId)> = QueueConfig {
    linger: Linger { after_items: 0, time: OUTCOMES_GATHER_FOR },
    ..QueueConfig::new("outcome_notes", 8192, 1000)
};
/// Time in which notes of outcomes gather: each batch waits for the disk. After the end of the gateway, outcomes of
/// this time are sent again, under the same ids.
const OUTCOMES_GATHER_FOR: Duration = Duration::from_millis(100);
/// Pause before notes are written again that storage was unavailable for.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Frames above this size are not part of hints: their gateway reads the row.
const INLINE_FRAME: usize = 64 * 1024;

/// Invocation as it is written to a socket.
#[derive(Debug, Clone)]
pub struct InvokeFrame {
    pub scope: WorkspaceScope,
    pub invocation: InvocationId,
    pub attempt: i32,
    pub node_id: NodeId,
    pub provider: ProviderName,
    pub text: String,
}

/// Sender of dispatch notes.
#[derive(Debug)]
pub(crate) struct DispatchRecorder {
    invocations: BatchSender<InvocationNote>,
    /// Outcomes that were written to their callers.
    outcomes: BatchSender<(WorkspaceScope, InvocationId)>,
}

/// Receiving ends of the queues of dispatch notes.
pub(crate) struct DispatchNotes {
    invocations: Batches<InvocationNote>,
    outcomes: Batches<(WorkspaceScope, InvocationId)>,
}

/// Note about an invocation that was written to its handler's socket.
#[derive(Debug)]
enum InvocationNote {
    Sent(SentInvocation),
    /// It has its outcome, and no record that it was sent is needed.
    Ended(WorkspaceScope, InvocationId),
}

impl DispatchRecorder {
    pub(crate) fn new() -> (Self, DispatchNotes) {
        let (invocations, sent) = queue(INVOCATIONS);
        let (outcomes, announced) = queue(OUTCOMES);
        (Self { invocations, outcomes }, DispatchNotes { invocations: sent, outcomes: announced })
    }

    /// Notes that a caller received an outcome.
    pub(super) fn record_outcome_sent(&self, scope: WorkspaceScope, invocation: InvocationId) {
        // Without a note the outcome may be sent once more, under the same id, which brokers drop.
        let _ = self.outcomes.try_send((scope, invocation));
    }

    /// Notes that an invocation has its outcome.
    pub(super) fn record_end(&self, scope: WorkspaceScope, invocation: InvocationId) {
        // Without this note the record that it was sent changes nothing: an ended invocation is not marked.
        let _ = self.invocations.try_send(InvocationNote::Ended(scope, invocation));
    }
}

/// Writes notes until the engine is dropped.
pub(crate) async fn write_dispatch_notes(engine: Weak<Inner>, notes: DispatchNotes) {
    let DispatchNotes { mut invocations, mut outcomes } = notes;
    let write_invocations = async {
        while let Some(batch) = invocations.next().await {
            let sent = &unanswered(batch);
            if !sent.is_empty() {
                write(&engine, |store| async move { store.mark_invocations_sent(sent).await }).await;
            }
        }
    };
    let write_outcomes = async {
        while let Some(batch) = outcomes.next().await {
            let announced = &batch;
            write(&engine, |store| async move { store.mark_outcomes_announced(announced).await }).await;
        }
    };
    // Side by side: a statement for one kind that waits for storage must not hold up the other.
    tokio::join!(write_invocations, write_outcomes);
}

/// Returns the invocations that have no outcome among these notes.
fn unanswered(notes: Vec<InvocationNote>) -> Vec<SentInvocation> {
    let (mut sent, mut ended) = (Vec::new(), HashSet::new());
    for note in notes {
        match note {
            InvocationNote::Sent(one) => sent.push(one),
            InvocationNote::Ended(scope, invocation) => _ = ended.insert((scope, invocation)),
        }
    }
    sent.retain(|one| !ended.contains(&(one.scope, one.invocation_id)));
    sent
}

/// Writes notes. Retried without limit: an invocation whose note is lost is dispatched again.
async fn write<F: Future<Output = StoreResult<()>>>(engine: &Weak<Inner>, notes: impl Fn(Store) -> F) {
    while let Some(inner) = engine.upgrade() {
        let written = notes(inner.core.store.clone());
        // Before the wait: during an outage these retries would keep the engine from ending.
        drop(inner);
        match written.await {
            Err(error) if !matches!(error, StoreError::Refused { .. }) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "failed to record dispatched invocations, will retry"
                );
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "failed to record dispatched invocations: storage refused the statement"
                );
                // A repetition would be refused as well, and would hold up all later notes.
                return;
            }
            Ok(()) => return,
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

impl Actions {
    /// Notes that an invocation was written to a socket.
    pub fn record_invocation_sent(&self, sent: SentInvocation) {
        let _ = self.dispatch_notes.invocations.try_send(InvocationNote::Sent(sent));
    }

    /// Returns the invocations that a gateway's sockets have not received yet.
    pub async fn unsent_invocations(&self, gateway: GatewayId) -> EngineResult<Vec<InvokeFrame>> {
        Ok(self.core.store.unsent_invocations(gateway).await?.into_iter().map(to_invoke_frame).collect())
    }

    /// Returns the unanswered invocations that earlier connections of these providers received.
    pub async fn unanswered_invocations(&self, fences: &[Fence]) -> EngineResult<Vec<InvokeFrame>> {
        Ok(self.core.store.invocations_of_earlier_epochs(fences).await?.into_iter().map(to_invoke_frame).collect())
    }

    /// Hints the gateway with the socket to write an invocation.
    pub(super) fn hint_dispatch(&self, new: &NewInvocation, dispatch: &Dispatch) {
        // No gateway holds its socket now; the next one finds the row by its scan.
        let Some(gateway) = dispatch.gateway_id else { return };
        let action = match &new.handler {
            Handler::Agent(_) => &new.action_name,
            Handler::Node { capability, .. } => capability,
        };
        let caller = dispatch.tells_caller.then(|| (new.caller.agent_id, new.caller.name.clone()));
        let text = invoke_frame(new.id, action, &new.input, dispatch.agent.as_ref(), caller.as_ref());
        let hint = Hint::Invoke {
            workspace: new.scope.workspace_id(),
            node: dispatch.node_id.clone(),
            provider: dispatch.provider.clone(),
            invocation: new.id.get(),
            attempt: dispatch.attempt,
            frame: Some(text).filter(|text| text.len() <= INLINE_FRAME),
        };
        self.core.hints.send_to_gateway(gateway, self.core.gateway_id(), hint);
    }

    /// Hints an invocation that was placed again: its gateway reads the row.
    pub(super) fn hint_redispatch(&self, scope: WorkspaceScope, invocation: InvocationId, dispatch: &Dispatch) {
        let Some(gateway) = dispatch.gateway_id else { return };
        let hint = Hint::Invoke {
            workspace: scope.workspace_id(),
            node: dispatch.node_id.clone(),
            provider: dispatch.provider.clone(),
            invocation: invocation.get(),
            attempt: dispatch.attempt,
            frame: None,
        };
        self.core.hints.send_to_gateway(gateway, self.core.gateway_id(), hint);
    }
}

fn to_invoke_frame(row: UnsentInvocation) -> InvokeFrame {
    let text = invoke_frame(row.invocation_id, &row.action, &row.input, row.agent.as_ref(), row.caller.as_ref());
    InvokeFrame {
        scope: row.scope,
        invocation: row.invocation_id,
        attempt: row.attempt,
        node_id: row.node_id,
        provider: row.provider,
        text,
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn only_invocations_without_an_outcome_are_recorded_as_sent() {
        let scope = |workspace| WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
        let sent = |workspace, invocation| {
            InvocationNote::Sent(SentInvocation {
                scope: scope(workspace),
                invocation_id: InvocationId::new(invocation),
                attempt: 1,
                node_id: NodeId::new("n1"),
                provider: ProviderName::new("a"),
                epoch: 1,
                written_at: Instant::now(),
            })
        };
        let ended = InvocationNote::Ended(scope(1), InvocationId::new(7));
        let left = unanswered(vec![sent(1, 7), sent(1, 8), ended, sent(2, 7)]);
        let left: Vec<_> = left.iter().map(|one| (one.scope, one.invocation_id.get())).collect();
        assert_eq!(left, [(scope(1), 8), (scope(2), 7)]);
    }
}
