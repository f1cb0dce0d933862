//! Dispatch of invocations to sockets. The row counts; a hint carries the frame to the gateway with the socket, and
//! every gateway polls each second for invocations without a hint.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

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

use super::{Actions, sent_invocations::SentInvocations};
use crate::{EngineResult, Inner, hints::Hint};

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

/// Notes about invocations and outcomes that were written to sockets.
#[derive(Debug)]
pub(crate) struct DispatchRecorder {
    pub(super) invocations: Arc<SentInvocations>,
    /// Outcomes that were written to their callers.
    outcomes: BatchSender<(WorkspaceScope, InvocationId)>,
}

/// Notes that wait to be written.
pub(crate) struct DispatchNotes {
    invocations: Arc<SentInvocations>,
    outcomes: Batches<(WorkspaceScope, InvocationId)>,
}

impl DispatchRecorder {
    pub(crate) fn new() -> (Self, DispatchNotes) {
        let invocations = Arc::<SentInvocations>::default();
        let (outcomes, announced) = queue(OUTCOMES);
        let notes = DispatchNotes { invocations: Arc::clone(&invocations), outcomes: announced };
        (Self { invocations, outcomes }, notes)
    }

    /// Notes that a caller received an outcome.
    pub(super) fn record_outcome_sent(&self, scope: WorkspaceScope, invocation: InvocationId) {
        // Without a note the outcome may be sent once more, under the same id, which brokers drop.
        let _ = self.outcomes.try_send((scope, invocation));
    }
}

/// Writes notes until the engine is dropped.
pub(crate) async fn write_dispatch_notes(engine: Weak<Inner>, notes: DispatchNotes) {
    let DispatchNotes { invocations, mut outcomes } = notes;
    let write_invocations = async {
        while engine.strong_count() > 0 {
            let sent = &invocations.next_batch().await;
            if !sent.is_empty() {
                write(&engine, |store| async move { store.mark_invocations_sent(sent).await }).await;
                invocations.remove_recorded(sent);
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
        self.dispatch_notes.invocations.add(sent);
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
