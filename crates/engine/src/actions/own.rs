//! Invocations that the engine makes for others' use cases: with an id known before, or done already.

use relay_domain::{InvocationId, NodeId, WorkspaceScope, action::Status};
use relay_store::invoke::{Handler, Invoker, NewInvocation};
use serde_json::Value;

use super::call::{Acknowledged, Call};
use crate::{Engine, EngineError, EngineResult};

impl Engine {
    /// What a caller was told of what it has made with this key before. That is settled first: whatever has changed
    /// since, a request sent again gets the same answer.
    ///
    /// # Errors
    /// When the key was used for something else, what it made is gone, or storage is away.
    pub(crate) async fn acknowledged_under(
        &self,
        scope: WorkspaceScope,
        key: Option<&([u8; 32], [u8; 32])>,
    ) -> EngineResult<Option<Acknowledged>> {
        let Some((hash, fingerprint)) = key else { return Ok(None) };
        let before = self.replay(scope, hash, fingerprint).await?;
        match before.and_then(|before| before.data["invocation_id"].as_i64()) {
            Some(id) => Ok(Some(self.acknowledged_before(scope, InvocationId::new(id)).await?)),
            None => Ok(None),
        }
    }

    /// What a caller was told of an invocation before.
    ///
    /// # Errors
    /// When it is gone, or storage is away.
    pub(crate) async fn acknowledged_before(
        &self,
        scope: WorkspaceScope,
        id: InvocationId,
    ) -> EngineResult<Acknowledged> {
        let row = self.store().invocation(scope, id).await?.ok_or(EngineError::InvocationNotFound)?;
        Ok(Acknowledged {
            id,
            action_name: row.action_name,
            handler_agent_id: row.handler_agent_id,
            handler_node_id: row.target_node_id.map(NodeId::new),
            dispatched_node_id: row.node_id.map(NodeId::new),
            input: row.input,
            status: Status::parse(&row.status).unwrap_or(Status::Pending),
            created_at: row.created_at,
            replayed: true,
        })
    }

    /// Records an invocation that the engine has done itself.
    ///
    /// # Errors
    /// When its key was used before for something else, or storage is away.
    pub(crate) async fn record_done(
        &self,
        scope: WorkspaceScope,
        call: Call,
        output: Value,
    ) -> EngineResult<Acknowledged> {
        let handler_node_id = match &call.handler {
            Handler::Node { target, .. } => target.clone(),
            Handler::Agent(_) => None,
        };
        let new = NewInvocation {
            scope,
            id: InvocationId::new(self.next_id()),
            action_name: call.action_name,
            handler: call.handler,
            caller: Invoker { agent_id: call.caller_id, name: call.caller_name },
            input: call.input,
            durable: call.durable && call.caller_id.is_some(),
            key: call.key,
            entropy: 0,
            at: self.now(),
        };
        let Some(mut done) = self.store().record_done(&new, &output).await? else {
            let made = self.made_before(scope, new.key).await?;
            return self.acknowledged_before(scope, made.id).await;
        };
        self.tell_outcomes(&mut done);
        Ok(Acknowledged {
            id: new.id,
            action_name: new.action_name,
            handler_agent_id: None,
            handler_node_id,
            dispatched_node_id: None,
            input: new.input,
            status: Status::Completed,
            created_at: new.at,
            replayed: false,
        })
    }
}
