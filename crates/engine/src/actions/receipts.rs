//! Receipts of invocations: those of repeated keys, and those that the engine completes itself.

use relay_domain::{InvocationId, WorkspaceScope, actions::InvocationStatus};
use relay_store::{
    IdempotencyKey, InvocationRecord,
    actions::new_invocation::{Handler, Invoker, NewInvocation},
};
use serde_json::Value;

use super::{
    Actions,
    call::{InvocationReceipt, InvocationRequest},
};
use crate::{EngineError, EngineResult, access::idempotency::Replay, error::Missing};

impl Actions {
    /// Loads the receipt of an earlier request with this key. Checked first: a repeated request gets the same response
    /// whatever has changed since.
    ///
    /// # Errors
    /// When the key was used for another request, or its invocation is no longer kept.
    pub(crate) async fn find_receipt(
        &self,
        scope: WorkspaceScope,
        key: Option<&IdempotencyKey>,
    ) -> EngineResult<Option<InvocationReceipt>> {
        let Some(key) = key else { return Ok(None) };
        let before = self.core.replay(scope, key).await?;
        match before.and_then(Replay::record::<InvocationRecord>) {
            Some(before) => Ok(Some(self.load_receipt(scope, before.invocation_id).await?)),
            None => Ok(None),
        }
    }

    /// Loads the receipt of an invocation.
    ///
    /// # Errors
    /// When it is no longer kept.
    pub(crate) async fn load_receipt(
        &self,
        scope: WorkspaceScope,
        id: InvocationId,
    ) -> EngineResult<InvocationReceipt> {
        let row = self.core.store.invocation(scope, id).await?.ok_or(EngineError::NotFound(Missing::Invocation))?;
        Ok(InvocationReceipt {
            id,
            action_name: row.action_name,
            handler_agent_id: row.handler_agent_id,
            handler_node_id: row
                .target_node_id
                // The node of an invocation that an agent handles only has that agent's socket.
                .or_else(|| row.node_id.clone().filter(|_| row.handler_agent_id.is_none())),
            dispatched_node_id: row.node_id,
            input: row.input,
            status: row.status,
            created_at: row.created_at,
            replayed: true,
        })
    }

    /// Records an invocation that the engine has completed itself.
    ///
    /// # Errors
    /// When its key was used for another request.
    pub(crate) async fn record_done(
        &self,
        scope: WorkspaceScope,
        call: InvocationRequest,
        output: Value,
    ) -> EngineResult<InvocationReceipt> {
        let handler_node_id = match &call.handler {
            Handler::Node { target, .. } => target.clone(),
            Handler::Agent(_) => None,
        };
        let new = NewInvocation {
            scope,
            id: self.new_invocation_id(),
            action_name: call.action_name,
            handler: call.handler,
            caller: Invoker { agent_id: call.caller_id, name: call.caller_name },
            input: call.input,
            durable: call.durable && call.caller_id.is_some(),
            key: call.key,
            entropy: 0,
            at: self.core.now(),
        };
        // `None`: another request with this key was first.
        let Some(mut done) = self.core.store.record_completed_invocation(&new, &output).await? else {
            let made = self.find_repeated_invocation(scope, new.key).await?;
            return self.load_receipt(scope, made.id).await;
        };
        self.announce_outcomes(&mut done);
        Ok(InvocationReceipt {
            id: new.id,
            action_name: new.action_name,
            handler_agent_id: None,
            handler_node_id,
            dispatched_node_id: None,
            input: new.input,
            status: InvocationStatus::Completed,
            created_at: new.at,
            replayed: false,
        })
    }
}
