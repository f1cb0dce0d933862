//! Facts that decide which events the agent of a subscription may read, when they are matched and before each call.
//! Called by the engine's subscription worker.

use relay_domain::{AgentId, InvocationId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, subscriptions::dispatch::LeasedSubscription};

impl Store {
    /// Gives up pending deliveries that an owner may not read any more: it has left their conversations, or `reads_any`
    /// is false and it reads nothing. Without effect once the lease is lost.
    pub async fn drop_unreadable_calls(
        &self,
        leased: &LeasedSubscription,
        owner: AgentId,
        reads_any: bool,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE subscription_deliveries d
                SET status = 'dead_letter', next_attempt_at = NULL, updated_at = relay_now(),
                    last_error = 'not called: the agent of the subscription may not read this any more'
               FROM subscriptions s
              WHERE s.workspace_id = $1 AND s.subscription_id = $2 AND s.lease_epoch = $3
                AND d.workspace_id = $1 AND d.subscription_id = $2 AND d.status = 'pending'
                AND (NOT $5 OR d.conversation_id IS NOT NULL AND NOT EXISTS (
                        SELECT FROM channels c JOIN channel_members m USING (workspace_id, channel_id)
                         WHERE c.workspace_id = $1 AND c.conversation_id = d.conversation_id AND m.agent_id = $4))",
        )
        .bind(leased.scope.workspace_id())
        .bind(leased.id)
        .bind(leased.epoch)
        .bind(owner)
        .bind(reads_any)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("giving up unreadable deliveries of a subscription"))?;
        Ok(())
    }

    /// Returns those of these conversations that an agent takes part in.
    pub async fn conversations_with_member(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        conversations: &[&str],
    ) -> StoreResult<Vec<String>> {
        sqlx::query_scalar(
            "SELECT c.conversation_id FROM channels c JOIN channel_members m USING (workspace_id, channel_id)
              WHERE c.workspace_id = $1 AND c.conversation_id = ANY ($3) AND m.agent_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(conversations)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the conversations of an agent"))
    }

    /// Returns those of these invocations that an agent called or handles.
    pub async fn invocations_with_party(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        invocations: &[InvocationId],
    ) -> StoreResult<Vec<InvocationId>> {
        sqlx::query_scalar(
            "SELECT invocation_id FROM invocations
              WHERE workspace_id = $1 AND invocation_id = ANY ($3) AND (caller_id = $2 OR handler_agent_id = $2)",
        )
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(invocations)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the invocations of an agent"))
    }
}
