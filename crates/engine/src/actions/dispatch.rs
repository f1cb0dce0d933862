//! The way of an invocation to a socket. The row is what counts; a hint carries the frame to the gateway that has the
//! socket, and every gateway looks each second for what no hint has brought.

use std::{sync::Weak, time::Duration};

use relay_domain::{GatewayId, InvocationId, NodeId, ProviderName, WorkspaceScope};
use relay_store::{
    Sent, StoreError, Unsent,
    hosting::Fence,
    invoke::{Dispatch, Handler, NewInvocation},
};
use tokio::sync::mpsc;

use super::frame;
use crate::{Engine, EngineResult, Inner, hints::Hint};

/// Notes that wait to be written. What finds no room is found unnoted by its gateway, each second, and noted again.
const NOTES: usize = 8192;
/// Pause before notes are written again that storage was not there for.
const NOTE_RETRY: Duration = Duration::from_millis(500);
/// Notes that one statement writes.
const NOTES_AT_ONCE: usize = 1000;
/// Frames above this are not carried by hints: their gateway reads the row.
const INLINE_FRAME: usize = 64 * 1024;

/// An invocation as it is written to a socket.
#[derive(Debug, Clone)]
pub struct InvokeFrame {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The invocation.
    pub invocation: InvocationId,
    /// Which try.
    pub attempt: i32,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The frame.
    pub text: String,
}

/// That an invocation was written to a socket.
pub type Delivered = Sent;

/// What was written to sockets, on its way into the rows.
#[derive(Debug)]
pub(crate) struct SentNotes {
    sender: mpsc::Sender<Note>,
}

/// Something that was written to a socket.
#[derive(Debug)]
pub(crate) enum Note {
    /// An invocation, to its handler.
    Sent(Delivered),
    /// An outcome, to its caller.
    Told(WorkspaceScope, InvocationId),
}

impl SentNotes {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Note>) {
        let (sender, receiver) = mpsc::channel(NOTES);
        (Self { sender }, receiver)
    }

    /// A caller was told an outcome.
    pub(super) fn told(&self, scope: WorkspaceScope, invocation: InvocationId) {
        let _ = self.sender.try_send(Note::Told(scope, invocation));
    }
}

/// Writes notes until the engine is gone.
pub(crate) async fn write_notes(engine: Weak<Inner>, mut notes: mpsc::Receiver<Note>) {
    let mut gathered = Vec::new();
    while notes.recv_many(&mut gathered, NOTES_AT_ONCE).await > 0 {
        let (mut sent, mut told) = (Vec::new(), Vec::new());
        for note in gathered.drain(..) {
            match note {
                Note::Sent(delivered) => sent.push(delivered),
                Note::Told(scope, invocation) => told.push((scope, invocation)),
            }
        }
        // A note that is lost has its invocation done twice.
        while let Some(inner) = engine.upgrade() {
            let noted = async {
                if !sent.is_empty() {
                    inner.store.invocations_sent(&sent).await?;
                }
                if told.is_empty() { Ok(()) } else { inner.store.outcomes_told(&told).await }
            };
            match noted.await {
                Err(error) if !matches!(error, StoreError::Refused { .. }) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "what was sent is not noted yet");
                }
                Err(error) => {
                    tracing::error!(error = &error as &dyn std::error::Error, "what was sent was not noted");
                    break;
                }
                Ok(()) => break,
            }
            drop(inner);
            tokio::time::sleep(NOTE_RETRY).await;
        }
    }
}

impl Engine {
    /// An invocation was written to a socket; noted soon.
    pub fn invocation_sent(&self, sent: Delivered) {
        let _ = self.inner.sent_invocations.sender.try_send(Note::Sent(sent));
    }

    /// What is to be written to a gateway's sockets and has not been.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn unsent_invocations(&self, gateway: GatewayId) -> EngineResult<Vec<InvokeFrame>> {
        Ok(self.store().unsent_invocations(gateway).await?.into_iter().map(framed).collect())
    }

    /// What earlier connections of these providers were sent, and nobody has answered.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn invocations_sent_before(&self, fences: &[Fence]) -> EngineResult<Vec<InvokeFrame>> {
        Ok(self.store().invocations_sent_before(fences).await?.into_iter().map(framed).collect())
    }

    /// Tells the gateway with the socket that there is something to write to it.
    pub(super) fn hint_dispatch(&self, new: &NewInvocation, dispatch: &Dispatch) {
        let Some(gateway) = dispatch.gateway_id else { return };
        let action = match &new.handler {
            Handler::Agent(_) => &new.action_name,
            Handler::Node { capability, .. } => capability,
        };
        let caller = dispatch.tells_caller.then(|| (new.caller.agent_id, new.caller.name.clone()));
        let text = frame::invoke(new.id, action, &new.input, dispatch.agent.as_ref(), caller.as_ref());
        let hint = Hint::Invoke {
            workspace: new.scope.workspace_id(),
            node: dispatch.node_id.clone(),
            provider: dispatch.provider.clone(),
            invocation: new.id.get(),
            attempt: dispatch.attempt,
            frame: Some(text).filter(|text| text.len() <= INLINE_FRAME),
        };
        self.hints().to_gateway(gateway, self.gateway_id(), hint);
    }

    /// The same for one that was placed anew: its gateway reads the row.
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
        self.hints().to_gateway(gateway, self.gateway_id(), hint);
    }
}

fn framed(row: Unsent) -> InvokeFrame {
    let text = frame::invoke(row.invocation_id, &row.action, &row.input, row.agent.as_ref(), row.caller.as_ref());
    InvokeFrame {
        scope: row.scope,
        invocation: row.invocation_id,
        attempt: row.attempt,
        node_id: row.node_id,
        provider: row.provider,
        text,
    }
}
