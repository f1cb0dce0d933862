//! Sessions of agents that nodes run: how they came up, where they are resumed, and what follows their end.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, NodeId, WorkspaceId, WorkspaceScope, event, token::TokenHash};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    events::NewEvent,
    finish::{Finished, FinishedAll, conclude},
    hosting::Fence,
    invocations::{COLUMNS, InvocationRow},
    invoke::{Handler, NewInvocation, claim_keys},
    located::has_ended,
};

/// An agent that a node was asked to end.
#[derive(Debug, Clone)]
pub struct Released {
    /// Its tenant.
    pub scope: WorkspaceScope,
    /// The invocation with which its node was asked.
    pub invocation: InvocationId,
    /// The agent.
    pub agent: AgentId,
    /// Its name; none when it is gone.
    pub agent_name: Option<String>,
    /// Whether it is to be deleted now: that was asked for, and its node has ended it.
    pub deletes: bool,
}

impl Store {
    /// The node that last ran this session.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn session_origin(&self, scope: WorkspaceScope, session_ref: &str) -> StoreResult<Option<NodeId>> {
        let node: Option<String> = sqlx::query_scalar(
            "SELECT session_node_id FROM agents
              WHERE workspace_id = $1 AND session_ref = $2 AND session_node_id IS NOT NULL AND deleted_at IS NULL
              ORDER BY last_seen_at DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(session_ref)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking where a session was run"))?;
        Ok(node.map(NodeId::new))
    }

    /// What a provider was given to bring an agent up; `None` when it was not asked to by this invocation.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn spawn_input(&self, fence: &Fence, invocation: InvocationId) -> StoreResult<Option<Value>> {
        sqlx::query_scalar(
            "SELECT input FROM invocations
              WHERE workspace_id = $1 AND invocation_id = $2 AND node_id = $3 AND provider = $4
                AND status = 'dispatched' AND action_name <> 'release'",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(invocation.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading what a spawn was given"))
    }

    /// What a spawn brought whose agent has come up on this provider and is located there; `None` when it has not. Whether
    /// it shows as online does not matter: after a reconnection the provider may speak of it before its inventory does.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn born_output(&self, fence: &Fence, invocation: InvocationId) -> StoreResult<Option<Value>> {
        let row: Option<(i64, String, Option<String>)> = sqlx::query_as(
            "SELECT a.agent_id, a.name, a.session_ref
               FROM invocations i JOIN agents a USING (workspace_id, agent_id)
              WHERE i.workspace_id = $1 AND i.invocation_id = $2 AND i.node_id = $3 AND i.provider = $4
                AND a.node_id = $3 AND a.provider = $4 AND a.deleted_at IS NULL",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(invocation.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking whether a spawned agent runs"))?;
        Ok(row.map(|(agent, name, session_ref)| {
            json!({
                "agent_id": AgentId::new(agent), "name": name, "invocation_id": invocation, "session_ref": session_ref,
            })
        }))
    }

    /// Records an invocation of a node's capability that the engine has done itself. `None` when its key was used
    /// before.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn record_done(&self, new: &NewInvocation, output: &Value) -> StoreResult<Option<FinishedAll>> {
        let doing = "recording what was done already";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if claim_keys(&mut tx, &[new]).await?.contains(&true) {
            return Ok(None);
        }
        let (capability, target) = match &new.handler {
            Handler::Node { capability, target, .. } => (capability.as_str(), target.as_ref()),
            Handler::Agent(_) => (new.action_name.as_str(), None),
        };
        let query = format!(
            "INSERT INTO invocations AS i (workspace_id, invocation_id, action_name, capability, target_node_id, caller_id,
                    caller_name, input, output, status, duration_ms, due_at, created_at, completed_at, durable)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'completed', 0, $10, $10, $10, $11)
             RETURNING {COLUMNS}"
        );
        let done: Vec<InvocationRow> = sqlx::query_as(sqlx::AssertSqlSafe(query))
            .bind(new.scope.workspace_id().get())
            .bind(new.id.get())
            .bind(&new.action_name)
            .bind(capability)
            .bind(target.map(NodeId::as_str))
            .bind(new.caller.agent_id.map(AgentId::get))
            .bind(&new.caller.name)
            .bind(&new.input)
            .bind(output)
            .bind(new.at)
            .bind(new.durable)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let outcomes = done.iter().cloned().map(|row| Finished::Recorded(Box::new(row))).collect();
        let told = conclude(&mut tx, done, new.at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(FinishedAll { outcomes, ..told }))
    }

    /// Whether this is the agent's token.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn is_agents_token(&self, scope: WorkspaceScope, agent: AgentId, token: &TokenHash) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM tokens
                             WHERE token_hash = $3 AND kind = 'agent' AND workspace_id = $1 AND agent_id = $2)",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(&token.as_bytes()[..])
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("comparing an agent's token"))
    }

    /// Notes that an agent's node is about to be asked to end it, before it is.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn note_release(
        &self,
        scope: WorkspaceScope,
        invocation: InvocationId,
        agent: AgentId,
        deletes: bool,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO agent_releases (workspace_id, invocation_id, agent_id, deletes, created_at)
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
        )
        .bind(scope.workspace_id().get())
        .bind(invocation.get())
        .bind(agent.get())
        .bind(deletes)
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("noting a release"))?;
        Ok(())
    }

    /// Forgets a release: it was refused, or everything that follows from it is done.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn forget_release(&self, scope: WorkspaceScope, invocation: InvocationId) -> StoreResult<()> {
        sqlx::query("DELETE FROM agent_releases WHERE workspace_id = $1 AND invocation_id = $2")
            .bind(scope.workspace_id().get())
            .bind(invocation.get())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("forgetting a release"))?;
        Ok(())
    }

    /// Releases whose outcome is known, or whose invocation was never made, at most `limit`. One that deletes its agent
    /// waits until that one has ended as well: its node may say so later than that it has ended it, with the next
    /// inventory at the latest. An agent that was brought up again since, or is still there after two minutes, stays.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn settled_releases(&self, limit: i64) -> StoreResult<Vec<Released>> {
        let rows: Vec<(i64, i64, i64, Option<String>, bool)> = sqlx::query_as(concat!(
            "SELECT r.workspace_id, r.invocation_id, r.agent_id, a.name,
                    r.deletes AND coalesce(i.status = 'completed', false)
               FROM agent_releases r
               LEFT JOIN invocations i USING (workspace_id, invocation_id)
               LEFT JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id
                    AND a.deleted_at IS NULL
              WHERE i.completed_at IS NOT NULL
                    AND NOT (r.deletes AND i.status = 'completed' AND NOT ",
            has_ended!("a"),
            "
                             AND coalesce(a.rebound_at, a.bound_at, '-infinity') <= i.completed_at
                             AND i.completed_at > now() - interval '2 minutes')
                 OR i.invocation_id IS NULL AND r.created_at < now() - interval '1 minute'
              ORDER BY r.workspace_id, r.invocation_id LIMIT $1"
        ))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for releases with an outcome"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, invocation, agent, agent_name, deletes)| Released {
                scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
                invocation: InvocationId::new(invocation),
                agent: AgentId::new(agent),
                agent_name,
                deletes,
            })
            .collect())
    }

    /// Agents whose session is gone for good and whose mail is not yet, at most `limit`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn orphaned_mailboxes(&self, limit: i64) -> StoreResult<Vec<(WorkspaceScope, AgentId)>> {
        let rows: Vec<(i64, i64)> = sqlx::query_as(
            "SELECT workspace_id, agent_id FROM agents WHERE mailbox_orphaned
              ORDER BY workspace_id, agent_id LIMIT $1",
        )
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for orphaned mailboxes"))?;
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        Ok(rows.into_iter().map(|(workspace, agent)| (scope(workspace), AgentId::new(agent))).collect())
    }

    /// Says that these agents' mail is gone as well.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn orphaned_mailboxes_emptied(&self, agents: &[(WorkspaceScope, AgentId)]) -> StoreResult<()> {
        let (workspaces, agents): (Vec<i64>, Vec<i64>) =
            agents.iter().map(|(scope, agent)| (scope.workspace_id().get(), agent.get())).unzip();
        sqlx::query(
            "UPDATE agents a SET mailbox_orphaned = false
               FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
              WHERE a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id",
        )
        .bind(workspaces)
        .bind(agents)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("noting mailboxes as emptied"))?;
        Ok(())
    }
}

/// That these agents of a provider have ended, for whoever had them brought up. One that its node was asked to end
/// was released, whatever else it looks like.
pub(crate) async fn exits(
    tx: &mut PgConnection,
    fence: &Fence,
    agents: &[i64],
    reason: &'static str,
) -> StoreResult<Vec<NewEvent>> {
    if agents.is_empty() {
        return Ok(Vec::new());
    }
    let rows: Vec<(i64, String, i64, Option<i64>, bool)> = sqlx::query_as(
        "SELECT a.agent_id, a.name, i.invocation_id, i.caller_id,
                EXISTS (SELECT FROM agent_releases r
                         WHERE r.workspace_id = a.workspace_id AND r.agent_id = a.agent_id) AS released
           FROM agents a
          CROSS JOIN LATERAL (
                SELECT invocation_id, caller_id FROM invocations i
                 WHERE i.workspace_id = a.workspace_id AND i.agent_id = a.agent_id
                 ORDER BY i.invocation_id DESC LIMIT 1) AS i
          WHERE a.workspace_id = $1 AND a.agent_id = ANY ($2)
          ORDER BY a.agent_id",
    )
    .bind(fence.scope.workspace_id().get())
    .bind(agents)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("looking who had agents brought up"))?;
    let event = |(agent, name, invocation, caller, released): (i64, String, i64, Option<i64>, bool)| {
        let agent = AgentId::new(agent);
        let data = json!({
            "agent_id": agent, "agent_name": name, "node_id": fence.node_id.as_str(),
            "invocation_id": InvocationId::new(invocation),
            "reason": if released { "released" } else { reason },
        });
        let told = NewEvent::new(event::AGENT_EXITED, data);
        match caller {
            Some(caller) => told.by(AgentId::new(caller)),
            None => told,
        }
    };
    Ok(rows.into_iter().map(event).collect())
}
