//! What gateways still have to write to sockets, and what they have written.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, GatewayId, InvocationId, NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult, hosting::Fence};

/// Rows that one look brings at most.
const PER_LOOK: i64 = 1000;
/// Rows of one provider that one look brings at most, so that a slow socket holds nobody else up.
const PER_PROVIDER: i64 = 100;

/// An invocation that is to be written to a socket.
#[derive(Debug, Clone)]
pub struct Unsent {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The invocation.
    pub invocation_id: InvocationId,
    /// Which try.
    pub attempt: i32,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// What the frame calls the action.
    pub action: String,
    /// What it is given.
    pub input: Value,
    /// The agent that handles it, with its name.
    pub agent: Option<(AgentId, String)>,
    /// Who invoked it, if the frame tells: an id, none for the workspace's key, and a name.
    pub caller: Option<(Option<AgentId>, String)>,
}

impl FromRow<'_, PgRow> for Unsent {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let agent = |column: &str| row.try_get::<Option<i64>, _>(column).map(|id| id.map(AgentId::new));
        let agent_name: Option<String> = row.try_get("agent_name")?;
        let caller =
            if row.try_get("tells_caller")? { Some((agent("caller_id")?, row.try_get("caller_name")?)) } else { None };
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.try_get("workspace_id")?)),
            invocation_id: InvocationId::new(row.try_get("invocation_id")?),
            attempt: row.try_get("attempt")?,
            node_id: NodeId::new(row.try_get::<String, _>("node_id")?),
            provider: ProviderName::new(row.try_get::<String, _>("provider")?),
            action: row.try_get("action")?,
            input: row.try_get("input")?,
            agent: agent("handler_agent_id")?.zip(agent_name),
            caller,
        })
    }
}

// An agent of no particular provider is asked through the one that registered first.
const UNSENT: &str = "
WITH unsent AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id, i.created_at, a.name AS agent_name, p.node_id, p.provider,
           row_number() OVER (PARTITION BY p.workspace_id, p.node_id, p.provider ORDER BY i.created_at) AS nth
      FROM invocations i
      LEFT JOIN agents a ON a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id
      JOIN providers p ON p.workspace_id = i.workspace_id
           AND p.node_id = CASE WHEN i.status = 'invoked' THEN a.node_id ELSE i.node_id END
           AND (p.provider = CASE WHEN i.status = 'invoked' THEN a.provider ELSE i.provider END
                OR i.status = 'invoked' AND a.provider IS NULL)
     WHERE i.sent_epoch IS NULL AND i.status IN ('dispatched', 'invoked') AND p.gateway_id = $1
       AND (i.status = 'dispatched' OR a.provider IS NOT NULL OR NOT EXISTS (
            SELECT FROM providers o
             WHERE o.workspace_id = p.workspace_id AND o.node_id = p.node_id AND o.gateway_id IS NOT NULL
               AND (o.registered_at, o.provider) < (p.registered_at, p.provider)))
)
SELECT u.workspace_id, u.invocation_id, u.agent_name, u.node_id, u.provider, i.attempt, i.handler_agent_id,
       coalesce(i.capability, i.action_name) AS action, i.input, i.tells_caller, i.caller_id, i.caller_name
  FROM unsent u JOIN invocations i USING (workspace_id, invocation_id)
 WHERE u.nth <= $2
 ORDER BY u.nth, u.created_at LIMIT $3";

// Two ways to the rows, each with an index: what nodes do, and what agents located there do. Of an agent of no particular
// provider the one that was sent it is asked again, as long as that one is there.
const SENT_BEFORE: &str = "
WITH held AS MATERIALIZED (
    SELECT p.workspace_id, p.node_id, p.provider, p.epoch
      FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[]) AS k (workspace_id, node_id, provider, epoch)
      JOIN providers p USING (workspace_id, node_id, provider, epoch)
), before AS (
    SELECT h.workspace_id, i.invocation_id, i.created_at, h.node_id, h.provider, NULL::text AS agent_name
      FROM held h
      JOIN invocations i USING (workspace_id, node_id, provider)
     WHERE i.status = 'dispatched' AND i.sent_epoch < h.epoch
     UNION ALL
    SELECT h.workspace_id, i.invocation_id, i.created_at, h.node_id, h.provider, a.name
      FROM held h
      JOIN agents a ON a.workspace_id = h.workspace_id AND a.node_id = h.node_id
           AND (a.provider IS NULL OR a.provider = h.provider) AND a.deleted_at IS NULL
      JOIN invocations i ON i.workspace_id = a.workspace_id AND i.handler_agent_id = a.agent_id
     WHERE i.status = 'invoked' AND i.sent_epoch < h.epoch
       AND (a.provider IS NOT NULL OR i.provider = h.provider OR NOT EXISTS (
            SELECT FROM providers o
             WHERE o.workspace_id = a.workspace_id AND o.node_id = a.node_id AND o.provider = i.provider
               AND o.gateway_id IS NOT NULL))
), turns AS (
    SELECT b.*, row_number() OVER (PARTITION BY b.workspace_id, b.node_id, b.provider ORDER BY b.created_at) AS nth
      FROM before b
)
SELECT t.workspace_id, t.invocation_id, t.agent_name, t.node_id, t.provider, i.attempt, i.handler_agent_id,
       coalesce(i.capability, i.action_name) AS action, i.input, i.tells_caller, i.caller_id, i.caller_name
  FROM turns t JOIN invocations i USING (workspace_id, invocation_id)
 WHERE t.nth <= $5
 ORDER BY t.nth, t.created_at LIMIT $6";

/// An invocation that was written to a socket.
#[derive(Debug, Clone)]
pub struct Sent {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The invocation.
    pub invocation_id: InvocationId,
    /// Which try.
    pub attempt: i32,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The epoch of the connection.
    pub epoch: i64,
}

impl Store {
    /// What is to be written to this gateway's sockets and has not been, the oldest of each provider first.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn unsent_invocations(&self, gateway: GatewayId) -> StoreResult<Vec<Unsent>> {
        sqlx::query_as(UNSENT)
            .bind(gateway.get())
            .bind(PER_PROVIDER)
            .bind(PER_LOOK)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for unsent invocations"))
    }

    /// What earlier connections of these providers were sent, and nobody has answered, the oldest of each provider first.
    /// What is noted as sent again is not brought by the next look, which goes on behind it.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn invocations_sent_before(&self, fences: &[Fence]) -> StoreResult<Vec<Unsent>> {
        sqlx::query_as(SENT_BEFORE)
            .bind(fences.iter().map(|fence| fence.scope.workspace_id().get()).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| fence.node_id.as_str()).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| fence.provider.as_str()).collect::<Vec<_>>())
            .bind(fences.iter().map(|fence| fence.epoch).collect::<Vec<_>>())
            .bind(PER_PROVIDER)
            .bind(PER_LOOK)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for invocations of an earlier connection"))
    }

    /// Notes what was written to sockets. A row that has moved on meanwhile is left alone.
    ///
    /// # Errors
    /// When Postgres is away; they are written again then.
    pub async fn invocations_sent(&self, sent: &[Sent]) -> StoreResult<()> {
        sqlx::query(
            "WITH s AS (
                 SELECT DISTINCT ON (workspace_id, invocation_id) *
                   FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::text[], $5::text[], $6::bigint[])
                        AS s (workspace_id, invocation_id, attempt, node_id, provider, epoch)
                  ORDER BY workspace_id, invocation_id, epoch DESC
             ), locked AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id
                   FROM invocations i JOIN s USING (workspace_id, invocation_id)
                  WHERE i.completed_at IS NULL AND i.attempt = s.attempt
                  ORDER BY 1, 2 FOR UPDATE OF i
             )
             UPDATE invocations i
                SET sent_epoch = s.epoch, sent_at = coalesce(i.sent_at, now()), node_id = s.node_id,
                    provider = s.provider, dispatched_at = coalesce(i.dispatched_at, now()), unreachable_since = NULL
               FROM locked JOIN s USING (workspace_id, invocation_id)
              WHERE i.workspace_id = s.workspace_id AND i.invocation_id = s.invocation_id
                AND i.attempt = s.attempt AND i.status IN ('dispatched', 'invoked')",
        )
        .bind(sent.iter().map(|s| s.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.invocation_id.get()).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.attempt).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.node_id.as_str()).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.provider.as_str()).collect::<Vec<_>>())
        .bind(sent.iter().map(|s| s.epoch).collect::<Vec<_>>())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("noting invocations as sent"))?;
        Ok(())
    }

    /// Notes that a provider is at work at what it was sent: its silence takes it away no more. False when it is not
    /// (or no longer) this provider's.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn accept_invocation(
        &self,
        fence: &Fence,
        invocation: InvocationId,
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let noted = sqlx::query(
            "UPDATE invocations i SET accepted_at = coalesce(i.accepted_at, $6)
              WHERE i.workspace_id = $1 AND i.invocation_id = $5 AND i.completed_at IS NULL
                AND EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = $2
                               AND p.provider = $3 AND p.epoch = $4)
                AND (i.status = 'dispatched' AND i.node_id = $2 AND i.provider = $3
                     OR i.status = 'invoked' AND EXISTS (
                        SELECT FROM agents a
                         WHERE a.workspace_id = $1 AND a.agent_id = i.handler_agent_id AND a.node_id = $2
                           AND (a.provider IS NULL OR a.provider = $3)))",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(invocation.get())
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("accepting an invocation"))?;
        Ok(noted.rows_affected() == 1)
    }
}
