//! Presence of agents: their status, and the time at which they were last seen. Every change of status is recorded as
//! an event in the same transaction. Called by the engine's last-seen batches, session events, and the worker.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, agents::AgentStatus};

use crate::{
    Store, StoreError, StoreResult,
    connections::DatabaseSession,
    events::{self, RecordedEvents, status_event},
    maintenance::loop_state::{AgentPosition, LoopState, lock_state, save_state},
};

/// Authenticated call of an agent, for its `last_seen_at`.
#[derive(Debug, Clone, Copy)]
pub struct LastSeen {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub at: DateTime<Utc>,
}

/// Result of one step over silent agents.
#[derive(Debug, Default)]
pub struct SilentAgents {
    /// Number of agents that this step marked offline.
    pub agents: u64,
    /// `true` if the pass is not complete.
    pub more: bool,
    pub recorded: Vec<RecordedEvents>,
}

const SCAN_LOOP: &str = "silent_agents";

/// SQL expression: last heartbeat of the provider that hosts an agent; null if it is not connected. An unassigned
/// agent counts as hosted by every provider of its node. `$agent` names the row of `agents`.
macro_rules! host_seen_at {
    ($agent:literal) => {
        concat!(
            "(SELECT max(p.last_heartbeat_at) FROM providers p
               WHERE p.workspace_id = ",
            $agent,
            ".workspace_id AND p.node_id = ",
            $agent,
            ".node_id AND p.gateway_id IS NOT NULL AND p.provider = coalesce(",
            $agent,
            ".provider, p.provider))"
        )
    };
}
pub(crate) use host_seen_at;

/// SQL expression: when an agent was last seen, by itself or through its provider. The heartbeats of a provider are
/// not written to its agents: thousands of rows would change because one connection is alive.
macro_rules! last_seen_at {
    ($agent:literal) => {
        concat!(
            "greatest(",
            $agent,
            ".last_seen_at, CASE WHEN ",
            $agent,
            ".status <> 'offline' THEN ",
            $crate::agents::presence::host_seen_at!($agent),
            " END)"
        )
    };
}
pub(crate) use last_seen_at;

/// Sets an agent's status, if its status is `only_from` or that is `None`, and updates its `last_seen_at`. Returns the
/// agent's name if the status changed.
pub(crate) async fn set_status(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
    status: AgentStatus,
    only_from: Option<AgentStatus>,
    at: DateTime<Utc>,
) -> StoreResult<Option<String>> {
    // The lock keeps the former status true until the commit, so that each change is recorded once. `greatest` keeps
    // last_seen_at from going back when calls are recorded out of order.
    let changed: Option<(String, bool)> = sqlx::query_as(
        "WITH former AS (
            SELECT agent_id, status FROM agents
             WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL FOR NO KEY UPDATE
         )
         UPDATE agents a SET last_seen_at = greatest(a.last_seen_at, $4),
                status = CASE WHEN former.status = coalesce($5, former.status) THEN $3 ELSE a.status END
           FROM former WHERE a.workspace_id = $1 AND a.agent_id = former.agent_id
         RETURNING a.name, former.status <> a.status",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(status)
    .bind(at)
    .bind(only_from)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("setting an agent's status"))?;
    Ok(changed.and_then(|(name, changed)| changed.then_some(name)))
}

/// Records the new status of agents as events of their workspaces.
async fn record_status_events(
    tx: &mut DatabaseSession,
    at: DateTime<Utc>,
    status: AgentStatus,
    mut agents: Vec<(WorkspaceId, AgentId, String)>,
) -> StoreResult<Vec<RecordedEvents>> {
    // Event heads are locked in this order, as in every transaction that appends to several workspaces.
    agents.sort_unstable();
    let events = agents.iter().map(|(workspace, agent, name)| {
        (WorkspaceScope::from_engine_row(*workspace), status_event(*agent, name, status))
    });
    events::append_mixed(tx, at, events.collect()).await
}

impl Store {
    /// Sets the status that an agent reports at `at`; with `only_from` only if that is its status. `None` when the
    /// status did not change, or the agent is deleted.
    pub async fn set_agent_status(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        status: AgentStatus,
        only_from: Option<AgentStatus>,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "setting an agent's status";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let mut recorded = None;
        if let Some(name) = set_status(&mut tx, scope, agent, status, only_from, at).await? {
            let event = status_event(agent, &name, status);
            recorded = Some(events::append(&mut tx, scope, at, vec![event]).await?);
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Records calls of agents. An offline agent becomes active, unless its row is newer than the call. Returns the
    /// recorded events.
    pub async fn record_agents_seen(&self, seen: &[LastSeen], at: DateTime<Utc>) -> StoreResult<Vec<RecordedEvents>> {
        let doing = "recording the calls of agents";
        let workspaces: Vec<WorkspaceId> = seen.iter().map(|s| s.scope.workspace_id()).collect();
        let agents: Vec<AgentId> = seen.iter().map(|s| s.agent_id).collect();
        let instants: Vec<DateTime<Utc>> = seen.iter().map(|s| s.at).collect();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Rows are locked in key order, so that two gateways cannot deadlock.
        let back: Vec<(WorkspaceId, AgentId, String)> = sqlx::query_as(
            "WITH seen AS (
                SELECT workspace_id, agent_id, max(at) AS at
                FROM unnest($1::bigint[], $2::bigint[], $3::timestamptz[]) AS s (workspace_id, agent_id, at)
                GROUP BY workspace_id, agent_id
             ), locked AS (
                SELECT a.workspace_id, a.agent_id, a.status, seen.at
                FROM agents a JOIN seen USING (workspace_id, agent_id)
                WHERE a.deleted_at IS NULL AND a.last_seen_at < seen.at
                ORDER BY a.workspace_id, a.agent_id FOR UPDATE OF a
             ), updated AS (
                UPDATE agents a SET last_seen_at = locked.at,
                       status = CASE WHEN a.status = 'offline' THEN 'active' ELSE a.status END
                FROM locked
                WHERE a.workspace_id = locked.workspace_id AND a.agent_id = locked.agent_id
                  AND a.last_seen_at < locked.at
                RETURNING a.workspace_id, a.agent_id, a.name, locked.status
             )
             SELECT workspace_id, agent_id, name FROM updated WHERE status = 'offline'",
        )
        .bind(workspaces)
        .bind(agents)
        .bind(instants)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let recorded = record_status_events(&mut tx, at, AgentStatus::Active, back).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Marks agents offline that were silent for `ttl`: one step, of at most `page` agents, of a pass over all that are
    /// not offline.
    ///
    /// The caller must have seen Postgres available for a full `ttl`, because calls during an outage are not recorded.
    pub async fn mark_silent_agents(&self, ttl: Duration, page: i64, at: DateTime<Utc>) -> StoreResult<SilentAgents> {
        let doing = "marking silent agents offline";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<AgentPosition>(&mut tx, SCAN_LOOP).await? {
            // Another worker makes this step.
            LoopState::Busy => return Ok(SilentAgents::default()),
            LoopState::Locked(position) => position.unwrap_or(AgentPosition::START),
        };
        // Read without locks: almost all agents were seen recently, and their rows are hot. The providers of those that
        // were not seen themselves are read once for all of their agents.
        let present: Vec<(WorkspaceId, AgentId, bool)> = sqlx::query_as(
            "WITH page AS MATERIALIZED (
                SELECT workspace_id, agent_id, node_id, provider,
                       last_seen_at < relay_now() - make_interval(secs => $4) AS is_silent
                  FROM agents
                 WHERE deleted_at IS NULL AND status <> 'offline' AND (workspace_id, agent_id) > ($1, $2)
                 ORDER BY workspace_id, agent_id LIMIT $3
             ), live_providers AS MATERIALIZED (
                SELECT p.workspace_id, p.node_id, p.provider
                  FROM (SELECT DISTINCT workspace_id, node_id FROM page WHERE is_silent) AS k
                  JOIN providers p USING (workspace_id, node_id)
                 WHERE p.gateway_id IS NOT NULL AND p.last_heartbeat_at >= relay_now() - make_interval(secs => $4)
             )
             SELECT workspace_id, agent_id, is_silent AND CASE
                        WHEN provider IS NULL
                        THEN (workspace_id, node_id) NOT IN (SELECT workspace_id, node_id FROM live_providers)
                        ELSE (workspace_id, node_id, provider) NOT IN (SELECT * FROM live_providers) END
               FROM page ORDER BY workspace_id, agent_id",
        )
        .bind(from.workspace_id)
        .bind(from.agent_id)
        .bind(page)
        .bind(ttl.as_secs_f64())
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let more = usize::try_from(page).is_ok_and(|page| present.len() >= page);
        let next = match present.last() {
            Some(&(workspace_id, agent_id, _)) if more => AgentPosition { workspace_id, agent_id },
            _ => AgentPosition::START,
        };
        // Saved before the marking, in the same transaction: if that fails, the step is repeated.
        save_state(&mut tx, SCAN_LOOP, &next).await?;
        let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) =
            present.iter().filter(|(.., silent)| *silent).map(|(workspace, agent, _)| (*workspace, *agent)).unzip();
        let mut marked: Vec<(WorkspaceId, AgentId, String)> = Vec::new();
        if !agents.is_empty() {
            // The silence is checked again on the locked row, because an agent may have called since. A row that
            // another transaction holds is skipped until the next pass, so that this step neither waits nor deadlocks.
            marked = sqlx::query_as(concat!(
                "WITH silent AS (
                    SELECT a.workspace_id, a.agent_id
                      FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
                      JOIN agents a USING (workspace_id, agent_id)
                     WHERE a.deleted_at IS NULL AND a.status <> 'offline'
                       AND a.last_seen_at < relay_now() - make_interval(secs => $3)
                       AND coalesce(",
                host_seen_at!("a"),
                " < relay_now() - make_interval(secs => $3), true)
                     ORDER BY a.workspace_id, a.agent_id FOR UPDATE OF a SKIP LOCKED
                 )
                 UPDATE agents a SET status = 'offline' FROM silent
                  WHERE a.workspace_id = silent.workspace_id AND a.agent_id = silent.agent_id
                 RETURNING a.workspace_id, a.agent_id, a.name"
            ))
            .bind(workspaces)
            .bind(agents)
            .bind(ttl.as_secs_f64())
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        }
        let agents = marked.len() as u64;
        let recorded = record_status_events(&mut tx, at, AgentStatus::Offline, marked).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(SilentAgents { agents, more, recorded })
    }
}
