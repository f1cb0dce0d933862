//! Connections of direct nodes, of which thousands return at once: registered by one statement each, their agents
//! marked online in batches. Called by the engine's provider use cases.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, agents::AgentStatus};
use sqlx::PgExecutor;

use crate::{
    Store, StoreError, StoreResult,
    codes::DIRECT,
    connections::DatabaseSession,
    events::{self, RecordedEvents, status_event},
    mailboxes::cursors::split_keys,
    nodes::{
        fence::ProviderKey,
        providers::{CLOCK_TOLERANCE, ProviderClaim, ProviderRegistration, RegisterOutcome, make_room},
    },
    statement_timeout::{STATEMENT_TIMEOUT, StatementTimeout as _},
};

/// Takes the provider of a direct node, whose newest connection always wins: a registration is refused only if the
/// holder asked later. The node is locked first, as by every registration. It is written in the same statement, and
/// only if the provider was taken. The epoch is that of the time, as in [`providers`](super::providers).
const REGISTER: &str = formatcp!(
    "WITH node AS MATERIALIZED (
    SELECT node_id FROM nodes WHERE workspace_id = $1 AND node_id = $2 AND role = '{DIRECT}' FOR UPDATE
), registered AS (
    INSERT INTO providers AS p (workspace_id, node_id, provider, instance_id, epoch, gateway_id, capabilities,
           cursor_granted, tags, version, max_agents, handlers_live, registered_at, last_heartbeat_at, requested_at)
    SELECT $1, node_id, $3, $4, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $5, $6, $7, $8, $9, $10, $11,
           relay_now(), relay_now(), $12
      FROM node
    ON CONFLICT (workspace_id, node_id, provider) DO UPDATE
       SET instance_id = excluded.instance_id, epoch = greatest(p.epoch + 1, excluded.epoch), gateway_id = excluded.gateway_id,
           capabilities = excluded.capabilities, cursor_granted = excluded.cursor_granted, tags = excluded.tags,
           version = excluded.version, max_agents = excluded.max_agents, handlers_live = excluded.handlers_live,
           load = 0, load_measured = false, registered_at = relay_now(), last_heartbeat_at = relay_now(),
           disconnected_at = NULL, requested_at = excluded.requested_at
     WHERE NOT (p.gateway_id IS NOT NULL AND coalesce(p.requested_at > $13, false))
    RETURNING epoch
), node_connected AS (
    UPDATE nodes SET last_connected_at = relay_now(), machine_id = coalesce($14, machine_id),
           updated_at = CASE WHEN $14 IS DISTINCT FROM machine_id AND $14 IS NOT NULL THEN relay_now() ELSE updated_at END
     WHERE workspace_id = $1 AND node_id = $2 AND EXISTS (SELECT FROM registered)
)
SELECT (SELECT epoch FROM registered) FROM node"
);

// Agents are locked in one order. Several connections may name an agent.
const MARK_ONLINE: &str = "
WITH connected AS MATERIALIZED (
    SELECT a.workspace_id, a.agent_id, a.name, a.status
      FROM (SELECT DISTINCT workspace_id, agent_id
              FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
      JOIN agents a USING (workspace_id, agent_id)
     WHERE a.deleted_at IS NULL
     ORDER BY a.workspace_id, a.agent_id FOR UPDATE OF a
), seen AS (
    UPDATE agents a SET status = CASE WHEN connected.status = 'offline' THEN 'active' ELSE connected.status END,
           last_seen_at = relay_now()
      FROM connected WHERE a.workspace_id = connected.workspace_id AND a.agent_id = connected.agent_id
)
SELECT workspace_id, agent_id, name FROM connected WHERE status = 'offline' ORDER BY workspace_id, agent_id";

async fn lock_node(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<()> {
    sqlx::query("SELECT FROM nodes WHERE workspace_id = $1 AND node_id = $2 FOR UPDATE")
        .bind(key.scope.workspace_id())
        .bind(key.node)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("locking a direct node"))?;
    Ok(())
}

/// Returns the epoch of the taken provider: `None` without the node, `Some(None)` if the holder asked later.
async fn take_provider(
    executor: impl PgExecutor<'_>,
    key: ProviderKey<'_>,
    claim: &ProviderClaim<'_>,
    registration: &ProviderRegistration,
) -> sqlx::Result<Option<Option<i64>>> {
    sqlx::query_scalar(REGISTER)
        .bind(key.scope.workspace_id())
        .bind(key.node)
        .bind(key.provider)
        .bind(&registration.instance_id)
        .bind(claim.gateway)
        .bind(&registration.capabilities)
        .bind(registration.cursor_granted)
        .bind(&registration.tags)
        .bind(&registration.version)
        .bind(registration.max_agents)
        .bind(registration.capabilities.as_array().is_some_and(|list| !list.is_empty()))
        .bind(claim.requested_at)
        .bind(claim.requested_at + CLOCK_TOLERANCE)
        .bind(&registration.machine_id)
        .fetch_optional(executor)
        .await
}

impl Store {
    /// Registers the connection of a direct node, which replaces the one before. The outcome is
    /// [`RegisterOutcome::Registered`], [`RegisterOutcome::Superseded`], [`RegisterOutcome::TooManyProviders`] or
    /// [`RegisterOutcome::NoNode`].
    pub async fn register_direct(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        claim: ProviderClaim<'_>,
        registration: &ProviderRegistration,
        at: DateTime<Utc>,
    ) -> StoreResult<RegisterOutcome> {
        let doing = "registering a direct node";
        let key = ProviderKey { scope, node, provider: &registration.provider };
        let found = if registration.provider == ProviderName::default_provider() {
            // Carries no recovery epoch: it assigns no number, and its connection was compared with the known database
            // (ADR 0044).
            take_provider(&self.pool, key, &claim, registration)
                .with_timeout()
                .await
                .map_err(StoreError::from_sqlx(doing))
        } else {
            // Published clients name no provider. Others have a bound, which is counted under the lock of the node.
            let work = async {
                let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
                lock_node(&mut tx, key).await?;
                if !make_room(&mut tx, key).await? {
                    return Ok(Err(RegisterOutcome::TooManyProviders));
                }
                let taken = take_provider(&mut *tx, key, &claim, registration).await;
                let taken = taken.map_err(StoreError::from_sqlx(doing))?;
                tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
                Ok(Ok(taken))
            };
            match tokio::time::timeout(STATEMENT_TIMEOUT, work).await {
                Ok(Ok(Err(refused))) => return Ok(refused),
                Ok(Ok(Ok(taken))) => Ok(taken),
                Ok(Err(error)) => Err(error),
                // It may have been committed nevertheless: the engine then frees the provider
                // (`committed_registration`).
                Err(_) => Err(StoreError::unavailable(doing)),
            }
        };
        Ok(match found? {
            None => RegisterOutcome::NoNode,
            Some(None) => RegisterOutcome::Superseded,
            Some(Some(epoch)) => {
                // Direct nodes have no presence events, so nothing is recorded.
                let recorded =
                    RecordedEvents { scope, first_seq: 0, created_at: at, events: Vec::new(), watched: false };
                RegisterOutcome::Registered { epoch, recorded }
            }
        })
    }

    /// Marks agents online after the connections that host them registered, those of all workspaces in one transaction.
    /// Records the ones that were offline.
    pub async fn mark_agents_online(
        &self,
        agents: &[(WorkspaceScope, AgentId)],
        at: DateTime<Utc>,
    ) -> StoreResult<Vec<RecordedEvents>> {
        let doing = "marking agents online";
        let (workspaces, ids) = split_keys(agents);
        // One deadline for the whole transaction, whose statements have none of their own on this side.
        let work = async {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            let returned: Vec<(WorkspaceId, AgentId, String)> = sqlx::query_as(MARK_ONLINE)
                .bind(workspaces)
                .bind(ids)
                .fetch_all(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            let status = |(workspace, agent, name): (WorkspaceId, AgentId, String)| {
                (WorkspaceScope::from_engine_row(workspace), status_event(agent, &name, AgentStatus::Active))
            };
            let recorded = events::append_mixed(&mut tx, at, returned.into_iter().map(status).collect()).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
            Ok(recorded)
        };
        tokio::time::timeout(STATEMENT_TIMEOUT, work).await.unwrap_or_else(|_| Err(StoreError::unavailable(doing)))
    }
}
