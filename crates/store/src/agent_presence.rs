//! Whether agents are there, and what they are doing. Every real change of status is an event, recorded in
//! the transaction that makes it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, agent::AgentStatus};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Recorded, status_event},
    loop_state::{Remembered, recall, remember},
};

/// One authenticated call of an agent, for its `last_seen_at`.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// The workspace.
    pub scope: WorkspaceScope,
    /// The agent.
    pub agent_id: AgentId,
    /// When.
    pub at: DateTime<Utc>,
}

/// What a step over agents that have gone silent did.
#[derive(Debug, Default)]
pub struct WentSilent {
    /// How many are offline now.
    pub agents: u64,
    /// Whether the pass goes on.
    pub more: bool,
    /// What to announce.
    pub recorded: Vec<Recorded>,
}

/// Where the look at silent agents goes on.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Position {
    workspace_id: i64,
    agent_id: i64,
}

const SILENCE: &str = "silent_agents";

/// Sets an agent's status, with `only_from` if it has that one, and notes that it was heard of. Its name when
/// the status is another one now.
pub(crate) async fn set_status(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    agent: AgentId,
    status: AgentStatus,
    only_from: Option<AgentStatus>,
    at: DateTime<Utc>,
) -> StoreResult<Option<String>> {
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
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .bind(status.as_str())
    .bind(at)
    .bind(only_from.map(AgentStatus::as_str))
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("setting an agent's status"))?;
    Ok(changed.and_then(|(name, changed)| changed.then_some(name)))
}

/// Records that these agents have this status now, in all their workspaces.
async fn record(
    tx: &mut PgConnection,
    at: DateTime<Utc>,
    status: AgentStatus,
    mut agents: Vec<(i64, i64, String)>,
) -> StoreResult<Vec<Recorded>> {
    agents.sort_unstable();
    let events = agents.iter().map(|(workspace, agent, name)| {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(*workspace));
        (scope, status_event(AgentId::new(*agent), name, status.as_str()))
    });
    events::append_mixed(tx, at, events.collect()).await
}

impl Store {
    /// Sets what an agent is doing, as told by itself at `at`; with `only_from` only if it was doing that.
    /// `None` when nothing has changed, or it is deleted.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn set_agent_status(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        status: AgentStatus,
        only_from: Option<AgentStatus>,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "setting an agent's status";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let mut recorded = None;
        if let Some(name) = set_status(&mut tx, scope, agent, status, only_from, at).await? {
            let event = status_event(agent, &name, status.as_str());
            recorded = Some(events::append(&mut tx, scope, at, vec![event]).await?);
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Notes calls of agents: they are alive, and no longer offline unless something newer says so. Returns
    /// what to announce.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agents_seen(&self, seen: &[Seen], at: DateTime<Utc>) -> StoreResult<Vec<Recorded>> {
        let doing = "noting that agents were seen";
        let workspaces: Vec<i64> = seen.iter().map(|s| s.scope.workspace_id().get()).collect();
        let agents: Vec<i64> = seen.iter().map(|s| s.agent_id.get()).collect();
        let instants: Vec<DateTime<Utc>> = seen.iter().map(|s| s.at).collect();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Rows are locked in key order, so that two gateways cannot deadlock.
        let back: Vec<(i64, i64, String)> = sqlx::query_as(
            "WITH seen AS (
                SELECT workspace_id, agent_id, max(at) AS at
                FROM unnest($1::bigint[], $2::bigint[], $3::timestamptz[]) AS s (workspace_id, agent_id, at)
                GROUP BY workspace_id, agent_id
             ), locked AS (
                SELECT a.workspace_id, a.agent_id, a.status, seen.at
                FROM agents a JOIN seen USING (workspace_id, agent_id)
                WHERE a.deleted_at IS NULL AND a.last_seen_at < seen.at
                ORDER BY a.workspace_id, a.agent_id FOR UPDATE OF a
             ), noted AS (
                UPDATE agents a SET last_seen_at = locked.at,
                       status = CASE WHEN a.status = 'offline' THEN 'active' ELSE a.status END
                FROM locked
                WHERE a.workspace_id = locked.workspace_id AND a.agent_id = locked.agent_id
                  AND a.last_seen_at < locked.at
                RETURNING a.workspace_id, a.agent_id, a.name, locked.status
             )
             SELECT workspace_id, agent_id, name FROM noted WHERE status = 'offline'",
        )
        .bind(workspaces)
        .bind(agents)
        .bind(instants)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let recorded = record(&mut tx, at, AgentStatus::Active, back).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Marks agents offline that have not been heard of for `ttl`: one step of at most `page` agents of a
    /// pass over all that are not offline.
    ///
    /// Judge only when this process has itself seen Postgres up for a full `ttl`: while Postgres was away,
    /// nobody could be heard.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn mark_silent_agents(&self, ttl: Duration, page: i64, at: DateTime<Utc>) -> StoreResult<WentSilent> {
        let doing = "looking for silent agents";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match recall::<Position>(&mut tx, SILENCE).await? {
            Remembered::Busy => return Ok(WentSilent::default()),
            Remembered::Ours(position) => position.unwrap_or_default(),
        };
        let present: Vec<(i64, i64, bool)> = sqlx::query_as(
            "SELECT workspace_id, agent_id, last_seen_at < now() - make_interval(secs => $4) FROM agents
              WHERE deleted_at IS NULL AND status <> 'offline' AND (workspace_id, agent_id) > ($1, $2)
              ORDER BY workspace_id, agent_id LIMIT $3",
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
            Some((workspace_id, agent_id, _)) if more => Position { workspace_id: *workspace_id, agent_id: *agent_id },
            _ => Position::default(),
        };
        remember(&mut tx, SILENCE, &next).await?;
        let (workspaces, agents): (Vec<i64>, Vec<i64>) =
            present.iter().filter(|(.., silent)| *silent).map(|(workspace, agent, _)| (*workspace, *agent)).unzip();
        let mut gone: Vec<(i64, i64, String)> = Vec::new();
        if !agents.is_empty() {
            // Who was heard of meanwhile stays; who is being changed is looked at in the next pass.
            gone = sqlx::query_as(
                "WITH silent AS (
                    SELECT a.workspace_id, a.agent_id
                      FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
                      JOIN agents a USING (workspace_id, agent_id)
                     WHERE a.deleted_at IS NULL AND a.status <> 'offline'
                       AND a.last_seen_at < now() - make_interval(secs => $3)
                     ORDER BY a.workspace_id, a.agent_id FOR UPDATE OF a SKIP LOCKED
                 )
                 UPDATE agents a SET status = 'offline' FROM silent
                  WHERE a.workspace_id = silent.workspace_id AND a.agent_id = silent.agent_id
                 RETURNING a.workspace_id, a.agent_id, a.name",
            )
            .bind(workspaces)
            .bind(agents)
            .bind(ttl.as_secs_f64())
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        }
        let agents = gone.len() as u64;
        let recorded = record(&mut tx, at, AgentStatus::Offline, gone).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(WentSilent { agents, more, recorded })
    }
}
