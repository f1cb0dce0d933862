//! What providers say of themselves every few seconds.

use chrono::{DateTime, Utc};
use relay_domain::{NodeId, ProviderName, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, capabilities, patience::Patient as _, redispatch};

/// What a heartbeat says.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The connection's epoch.
    pub epoch: i64,
    /// From 0 to 1.
    pub load: f64,
    /// Whether somebody measured that.
    pub load_measured: bool,
    /// Agents that it runs.
    pub active_agents: i32,
    /// Agents that it takes, if it says so again; 0 for unlimited.
    pub max_agents: Option<i32>,
    /// Free text, if it says so again.
    pub version: Option<String>,
    /// Whether its handlers answer.
    pub handlers_live: bool,
    /// The capability list, if the heartbeat carried one.
    pub capabilities: Option<serde_json::Value>,
}

impl Store {
    /// Records heartbeats, set-wise; at most one per provider. Those of an older epoch change nothing. Returns those
    /// that brought other capabilities than are known, for [`Store::refresh_capabilities`].
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn record_heartbeats<'a>(&self, beats: &'a [Heartbeat]) -> StoreResult<Vec<&'a Heartbeat>> {
        let workspaces: Vec<i64> = beats.iter().map(|b| b.scope.workspace_id().get()).collect();
        let nodes: Vec<&str> = beats.iter().map(|b| b.node_id.as_str()).collect();
        let providers: Vec<&str> = beats.iter().map(|b| b.provider.as_str()).collect();
        let epochs: Vec<i64> = beats.iter().map(|b| b.epoch).collect();
        let loads: Vec<f64> = beats.iter().map(|b| b.load).collect();
        let measured: Vec<bool> = beats.iter().map(|b| b.load_measured).collect();
        let actives: Vec<i32> = beats.iter().map(|b| b.active_agents).collect();
        let live: Vec<bool> = beats.iter().map(|b| b.handlers_live).collect();
        let limits: Vec<Option<i32>> = beats.iter().map(|b| b.max_agents).collect();
        let versions: Vec<Option<&str>> = beats.iter().map(|b| b.version.as_deref()).collect();
        let capabilities: Vec<Option<&serde_json::Value>> = beats.iter().map(|b| b.capabilities.as_ref()).collect();
        let changed: Vec<i64> = sqlx::query_scalar(
            "WITH beats AS (
                 SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::float8[], $6::int[],
                                      $7::bool[], $8::jsonb[], $9::bool[], $10::int[], $11::text[]) WITH ORDINALITY
                     AS b (workspace_id, node_id, provider, epoch, load, active, live, capabilities, measured,
                           max_agents, version, ord)
                  ORDER BY workspace_id, node_id, provider
             ), before AS MATERIALIZED (
                 SELECT b.ord FROM beats b JOIN providers p USING (workspace_id, node_id, provider, epoch)
                  WHERE b.capabilities <> p.capabilities
             ), heard AS (
                 UPDATE providers p
                    SET load = b.load, load_measured = b.measured, active_agents = b.active, handlers_live = b.live,
                        max_agents = coalesce(b.max_agents, p.max_agents), version = coalesce(b.version, p.version),
                        capabilities = coalesce(b.capabilities, p.capabilities), last_heartbeat_at = now()
                   FROM beats b
                  WHERE p.workspace_id = b.workspace_id AND p.node_id = b.node_id
                    AND p.provider = b.provider AND p.epoch = b.epoch
              RETURNING p.workspace_id, p.node_id, p.provider
             ), spoken_for AS (
             -- A node that is heard of speaks for its agents, which may never call by themselves.
             UPDATE agents a SET last_seen_at = now()
               FROM heard h
              WHERE a.workspace_id = h.workspace_id AND a.node_id = h.node_id AND a.deleted_at IS NULL
                AND (a.provider IS NULL OR a.provider = h.provider) AND a.status <> 'offline'
                AND a.last_seen_at < now() - interval '30 seconds'
             )
             SELECT ord FROM before",
        )
        .bind(workspaces)
        .bind(nodes)
        .bind(providers)
        .bind(epochs)
        .bind(loads)
        .bind(actives)
        .bind(live)
        .bind(capabilities)
        .bind(measured)
        .bind(limits)
        .bind(versions)
        .fetch_all(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("recording heartbeats"))?;
        let beat = |ord: i64| beats.get(usize::try_from(ord - 1).ok()?);
        Ok(changed.into_iter().filter_map(beat).collect())
    }

    /// What a provider advertises has changed without a registration. Placement and actions follow, unless an action
    /// that it claims is somebody else's: then they stay as they were, and false is returned.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn refresh_capabilities(
        &self,
        beat: &Heartbeat,
        action_ids: &[i64],
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let doing = "refreshing a provider's capabilities";
        let Some(capabilities) = &beat.capabilities else { return Ok(true) };
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let broker: Option<i32> = sqlx::query_scalar(
            "SELECT 1 FROM providers p JOIN nodes n USING (workspace_id, node_id)
              WHERE p.workspace_id = $1 AND p.node_id = $2 AND p.provider = $3 AND p.epoch = $4 AND n.role <> 'direct'
                FOR UPDATE OF p",
        )
        .bind(beat.scope.workspace_id().get())
        .bind(beat.node_id.as_str())
        .bind(beat.provider.as_str())
        .bind(beat.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if broker.is_none() {
            return Ok(true);
        }
        let Heartbeat { scope, node_id, provider, .. } = beat;
        if capabilities::replace(&mut tx, *scope, node_id, provider, capabilities, action_ids, at).await?.is_err() {
            return Ok(false);
        }
        redispatch::wake_waiting(&mut tx, *scope, node_id, provider).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(true)
    }
}
