//! Connections of direct nodes, of which thousands return at once: they are registered, and their agents marked online,
//! in batches. Called by the engine's provider use cases.

use std::time::Duration;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, agents::AgentStatus};
use serde_json::Value;
use sqlx::{PgExecutor, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    codes::DIRECT,
    connections::DatabaseSession,
    events::{self, RecordedEvents, status_event},
    mailboxes::cursors::split_keys,
    nodes::{
        fence::ProviderKey,
        providers::{CLOCK_TOLERANCE, ProviderRegistration, RegisterOutcome, make_room},
    },
    statement_timeout::{STATEMENT_TIMEOUT, StatementTimeout as _},
};

/// Takes providers of direct nodes, each of another node. The newest connection of a node always wins: a registration
/// is refused only if the holder asked later. Nodes are locked before their providers, both in the order of their keys,
/// as by every registration. They are written in the same statement, and only if the provider was taken. The epoch is
/// that of the time, as in [`providers`](super::providers).
macro_rules! register {
    ($lock_clause:literal, $is_claimed:literal) => {
        formatcp!(
            "WITH locked_nodes AS MATERIALIZED (
    SELECT k.*
      FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::jsonb[], $7::boolean[], $8::jsonb[],
                  $9::text[], $10::int[], $11::boolean[], $12::timestamptz[], $13::text[]) WITH ORDINALITY
           AS k (workspace_id, node_id, provider, instance_id, gateway_id, capabilities, cursor_granted, tags, version,
                 max_agents, handlers_live, requested_at, machine_id, place)
      JOIN nodes n USING (workspace_id, node_id)
     WHERE n.role = '{DIRECT}'
     ORDER BY k.workspace_id, k.node_id FOR UPDATE OF n {lock_clause}
), locked_providers AS MATERIALIZED (
    SELECT l.place FROM locked_nodes l JOIN providers p USING (workspace_id, node_id, provider)
     ORDER BY l.workspace_id, l.node_id FOR UPDATE OF p {lock_clause}
), claims AS MATERIALIZED (
    SELECT l.* FROM locked_nodes l WHERE {is_claimed} ORDER BY l.workspace_id, l.node_id
), registered AS (
    INSERT INTO providers AS p (workspace_id, node_id, provider, instance_id, epoch, gateway_id, capabilities,
           cursor_granted, tags, version, max_agents, handlers_live, registered_at, last_heartbeat_at, requested_at)
    SELECT workspace_id, node_id, provider, instance_id, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, gateway_id,
           capabilities, cursor_granted, ARRAY(SELECT jsonb_array_elements_text(tags)), version, max_agents, handlers_live,
           relay_now(), relay_now(), requested_at
      FROM claims
    ON CONFLICT (workspace_id, node_id, provider) DO UPDATE
       SET instance_id = excluded.instance_id, epoch = greatest(p.epoch + 1, excluded.epoch), gateway_id = excluded.gateway_id,
           capabilities = excluded.capabilities, cursor_granted = excluded.cursor_granted, tags = excluded.tags,
           version = excluded.version, max_agents = excluded.max_agents, handlers_live = excluded.handlers_live,
           load = 0, load_measured = false, registered_at = relay_now(), last_heartbeat_at = relay_now(),
           disconnected_at = NULL, requested_at = excluded.requested_at
     WHERE NOT (p.gateway_id IS NOT NULL AND coalesce(p.requested_at > excluded.requested_at + $14::interval, false))
    RETURNING workspace_id, node_id, epoch
), node_connected AS (
    UPDATE nodes n
       SET last_connected_at = relay_now(), machine_id = coalesce(c.machine_id, n.machine_id),
           updated_at = CASE WHEN c.machine_id IS DISTINCT FROM n.machine_id AND c.machine_id IS NOT NULL THEN relay_now()
                             ELSE n.updated_at END
      FROM claims c JOIN registered USING (workspace_id, node_id)
     WHERE n.workspace_id = c.workspace_id AND n.node_id = c.node_id
)
SELECT place, epoch FROM claims LEFT JOIN registered USING (workspace_id, node_id)",
            lock_clause = $lock_clause,
            is_claimed = $is_claimed
        )
    };
}

/// Waits for a node or a provider that another transaction has locked.
const REGISTER: &str = register!("", "true");
/// Leaves those out, so that none of them delays the others.
const REGISTER_SKIPPING_LOCKED: &str = register!(
    "SKIP LOCKED",
    "l.place IN (SELECT place FROM locked_providers)
        OR NOT EXISTS (SELECT FROM providers p WHERE p.workspace_id = l.workspace_id AND p.node_id = l.node_id
                          AND p.provider = l.provider)"
);

/// Timeout of a batch, for which all later ones of the process wait. Callers have time for another attempt after it.
const BATCH_TIMEOUT: Duration = Duration::from_secs(3);

/// Connection of a direct node that registers.
#[derive(Debug, Clone, Copy)]
pub struct DirectClaim<'a> {
    pub scope: WorkspaceScope,
    pub node: &'a NodeId,
    pub gateway: GatewayId,
    /// Time when the connection asked, before any wait for Postgres.
    pub requested_at: DateTime<Utc>,
    pub registration: &'a ProviderRegistration,
}

impl<'a> DirectClaim<'a> {
    const fn key(&self) -> ProviderKey<'a> {
        ProviderKey { scope: self.scope, node: self.node, provider: &self.registration.provider }
    }
}

/// Row of [`REGISTER`].
#[derive(sqlx::FromRow)]
struct TakenProvider {
    /// Place of the claim, from 1.
    place: i64,
    /// `None` if the holder asked later.
    epoch: Option<i64>,
}

impl TakenProvider {
    fn outcome(&self, scope: WorkspaceScope, at: DateTime<Utc>) -> RegisterOutcome {
        let Some(epoch) = self.epoch else { return RegisterOutcome::Superseded };
        // Direct nodes have no presence events, so nothing is recorded.
        let recorded = RecordedEvents { scope, first_seq: 0, created_at: at, events: Vec::new(), watched: false };
        RegisterOutcome::Registered { epoch, recorded }
    }
}

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

/// Takes the providers of these claims; returns a row for each that has a node, of which `statement` may leave some
/// out.
async fn take_providers(
    executor: impl PgExecutor<'_>,
    statement: &'static str,
    claims: &[DirectClaim<'_>],
) -> sqlx::Result<Vec<TakenProvider>> {
    let registrations: Vec<&ProviderRegistration> = claims.iter().map(|claim| claim.registration).collect();
    let has_capabilities = |r: &&ProviderRegistration| r.capabilities.as_array().is_some_and(|list| !list.is_empty());
    sqlx::query_as(statement)
        .bind(claims.iter().map(|claim| claim.scope.workspace_id()).collect::<Vec<WorkspaceId>>())
        .bind(claims.iter().map(|claim| claim.node.clone()).collect::<Vec<NodeId>>())
        .bind(registrations.iter().map(|r| r.provider.clone()).collect::<Vec<ProviderName>>())
        .bind(registrations.iter().map(|r| r.instance_id.as_str()).collect::<Vec<&str>>())
        .bind(claims.iter().map(|claim| claim.gateway).collect::<Vec<GatewayId>>())
        .bind(registrations.iter().map(|r| &r.capabilities).collect::<Vec<&Value>>())
        .bind(registrations.iter().map(|r| r.cursor_granted).collect::<Vec<bool>>())
        // An array of arrays must be rectangular.
        .bind(registrations.iter().map(|r| Json(&r.tags)).collect::<Vec<Json<&Vec<String>>>>())
        .bind(registrations.iter().map(|r| r.version.as_str()).collect::<Vec<&str>>())
        .bind(registrations.iter().map(|r| r.max_agents).collect::<Vec<i32>>())
        .bind(registrations.iter().map(has_capabilities).collect::<Vec<bool>>())
        .bind(claims.iter().map(|claim| claim.requested_at).collect::<Vec<DateTime<Utc>>>())
        .bind(registrations.iter().map(|r| r.machine_id.as_deref()).collect::<Vec<Option<&str>>>())
        .bind(CLOCK_TOLERANCE)
        .fetch_all(executor)
        .await
}

impl Store {
    /// Registers connections of direct nodes with the default provider, no two of one node. Each replaces the one
    /// before. `None`: the node or its provider is locked, or there is no such node; [`Store::register_direct`]
    /// distinguishes these.
    ///
    /// Carries no recovery epoch: it assigns no number, and the connections were compared with the known database
    /// (ADR 0044).
    pub async fn register_direct_nodes(
        &self,
        claims: &[DirectClaim<'_>],
        at: DateTime<Utc>,
    ) -> StoreResult<Vec<Option<RegisterOutcome>>> {
        let doing = "registering direct nodes";
        let taking = take_providers(&self.pool, REGISTER_SKIPPING_LOCKED, claims);
        // The host of the former primary may never answer.
        let taken = tokio::select! {
            // An answer that has arrived counts, even if the fence closes at the same time.
            biased;
            taken = tokio::time::timeout(BATCH_TIMEOUT, taking) => {
                taken.map_err(|_| StoreError::unavailable(doing))?.map_err(StoreError::from_sqlx(doing))?
            }
            () = self.fence.next_close() => return Err(StoreError::unavailable(doing)),
        };
        let mut outcomes: Vec<_> = claims.iter().map(|_| None).collect();
        for taken in taken {
            let index = usize::try_from(taken.place - 1).unwrap_or(usize::MAX);
            if let (Some(outcome), Some(claim)) = (outcomes.get_mut(index), claims.get(index)) {
                *outcome = Some(taken.outcome(claim.scope, at));
            }
        }
        Ok(outcomes)
    }

    /// Registers the connection of a direct node, which replaces the one before. The outcome is
    /// [`RegisterOutcome::Registered`], [`RegisterOutcome::Superseded`], [`RegisterOutcome::TooManyProviders`] or
    /// [`RegisterOutcome::NoNode`].
    pub async fn register_direct(&self, claim: DirectClaim<'_>, at: DateTime<Utc>) -> StoreResult<RegisterOutcome> {
        let doing = "registering a direct node";
        let key = claim.key();
        let taken = if *key.provider == ProviderName::default_provider() {
            let claims = [claim];
            let taking = take_providers(&self.pool, REGISTER, &claims).with_timeout();
            taking.await.map_err(StoreError::from_sqlx(doing))?
        } else {
            // Published clients name no provider. Others have a bound, which is counted under the lock of the node.
            let work = async {
                let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
                lock_node(&mut tx, key).await?;
                if !make_room(&mut tx, key).await? {
                    return Ok(None);
                }
                let taken = take_providers(&mut *tx, REGISTER, &[claim]).await.map_err(StoreError::from_sqlx(doing))?;
                tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
                Ok(Some(taken))
            };
            // It may have been committed after the time nevertheless: the engine then frees the provider
            // (`committed_registration`).
            let done = tokio::time::timeout(STATEMENT_TIMEOUT, work).await;
            match done.unwrap_or_else(|_| Err(StoreError::unavailable(doing)))? {
                Some(taken) => taken,
                None => return Ok(RegisterOutcome::TooManyProviders),
            }
        };
        Ok(taken.first().map_or(RegisterOutcome::NoNode, |taken| taken.outcome(claim.scope, at)))
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
