//! Dispatch of invocations to sockets. The row counts; a hint carries the frame to the gateway with the socket, and
//! every gateway polls each second for invocations without a hint.

use std::{sync::Weak, time::Duration};

use relay_domain::{GatewayId, InvocationId, NodeId, ProviderName, WorkspaceScope};
pub use relay_store::SentInvocation;
use relay_store::{
    StoreError, UnsentInvocation,
    actions::{
        invoke::Dispatch,
        new_invocation::{Handler, NewInvocation},
    },
    nodes::fence::Fence,
};
use relay_tasks::batches::{BatchSender, Batches, QueueConfig, queue};
use relay_wire::nodes::invoke_frame::invoke_frame;

use super::Actions;
use crate::{EngineResult, Inner, hints::Hint};

/// A note that finds no room stays unrecorded; its gateway finds it by polling and notes it again.
const QUEUE: QueueConfig<DispatchNote> = QueueConfig::new("dispatch_notes", 8192, 1000).at_most_every(GATHER_FOR);
/// Time in which notes gather. Most invocations are answered within it, and their note changes no row. After the end of
/// the gateway, or with a connection that is replaced in this time, frames of this time are sent again.
const GATHER_FOR: Duration = Duration::from_millis(20);
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
    sender: BatchSender<DispatchNote>,
}

/// Record of a frame that was written to a socket.
#[derive(Debug)]
pub(crate) enum DispatchNote {
    /// Invocation, written to its handler.
    InvocationSent(SentInvocation),
    /// Outcome, written to its caller.
    OutcomeSent(WorkspaceScope, InvocationId),
}

impl DispatchRecorder {
    pub(crate) fn new() -> (Self, Batches<DispatchNote>) {
        let (sender, notes) = queue(QUEUE);
        (Self { sender }, notes)
    }

    /// Notes that a caller received an outcome.
    pub(super) fn record_outcome_sent(&self, scope: WorkspaceScope, invocation: InvocationId) {
        let _ = self.sender.try_send(DispatchNote::OutcomeSent(scope, invocation));
    }
}

/// Writes notes until the engine is dropped.
pub(crate) async fn write_dispatch_notes(engine: Weak<Inner>, mut notes: Batches<DispatchNote>) {
    while let Some(batch) = notes.next().await {
        let (mut sent, mut outcomes) = (Vec::new(), Vec::new());
        for note in batch {
            match note {
                DispatchNote::InvocationSent(delivered) => sent.push(delivered),
                DispatchNote::OutcomeSent(scope, invocation) => outcomes.push((scope, invocation)),
            }
        }
        // Retried without limit: an invocation whose note is lost is dispatched again.
        while let Some(inner) = engine.upgrade() {
            let noted = async {
                if !sent.is_empty() {
                    inner.core.store.mark_invocations_sent(&sent).await?;
                }
                if outcomes.is_empty() { Ok(()) } else { inner.core.store.mark_outcomes_announced(&outcomes).await }
            };
            match noted.await {
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
                    break;
                }
                Ok(()) => break,
            }
            drop(inner);
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }
}

impl Actions {
    /// Notes that an invocation was written to a socket.
    pub fn record_invocation_sent(&self, sent: SentInvocation) {
        let _ = self.dispatch_notes.sender.try_send(DispatchNote::InvocationSent(sent));
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
