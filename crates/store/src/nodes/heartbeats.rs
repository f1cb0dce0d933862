//! Heartbeats of providers: load, agent counts and capabilities, recorded in batches. Called by the engine's provider
//! use cases.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{ActionId, JsonText, NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    actions::redispatch,
    codes::DIRECT,
    nodes::{capabilities, fence::ProviderKey},
    statement_timeout::StatementTimeout as _,
};

/// Heartbeat of a provider.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Epoch of the connection.
    pub epoch: i64,
    /// From 0 to 1.
    pub load: f64,
    /// `true` if the load is measured, `false` if it is the default.
    pub load_measured: bool,
    /// Number of agents that the provider runs.
    pub active_agents: i32,
    /// Maximum number of agents if the heartbeat repeats it; 0 means unlimited.
    pub max_agents: Option<i32>,
    /// Version if the heartbeat repeats it.
    pub version: Option<String>,
    /// Name of the node if it differs from the one that the connection declared before.
    pub node_name: Option<String>,
    /// `true` if the provider's handlers respond.
    pub handlers_live: bool,
    /// Capability list if the heartbeat contains one.
    pub capabilities: Option<JsonText>,
}

impl Store {
    /// Records a batch of heartbeats, at most one per provider; those of an older epoch change nothing. Returns the
    /// heartbeats with changed capabilities, for [`Store::refresh_capabilities`].
    pub async fn record_heartbeats<'a>(&self, beats: &'a [Heartbeat]) -> StoreResult<Vec<&'a Heartbeat>> {
        let workspaces: Vec<WorkspaceId> = beats.iter().map(|b| b.scope.workspace_id()).collect();
        let nodes: Vec<NodeId> = beats.iter().map(|b| b.node_id.clone()).collect();
        let providers: Vec<ProviderName> = beats.iter().map(|b| b.provider.clone()).collect();
        let epochs: Vec<i64> = beats.iter().map(|b| b.epoch).collect();
        let loads: Vec<f64> = beats.iter().map(|b| b.load).collect();
        let measured: Vec<bool> = beats.iter().map(|b| b.load_measured).collect();
        let actives: Vec<i32> = beats.iter().map(|b| b.active_agents).collect();
        let live: Vec<bool> = beats.iter().map(|b| b.handlers_live).collect();
        let limits: Vec<Option<i32>> = beats.iter().map(|b| b.max_agents).collect();
        let versions: Vec<Option<&str>> = beats.iter().map(|b| b.version.as_deref()).collect();
        let capabilities: Vec<Option<&str>> =
            beats.iter().map(|b| b.capabilities.as_ref().map(JsonText::get)).collect();
        // `before` reads the snapshot of the statement, so it compares with the capabilities that `recorded` replaces.
        let changed: Vec<i64> = sqlx::query_scalar(
            "WITH beats AS (
                 SELECT b.*, capability_list::jsonb AS capabilities
                   FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::float8[], $6::int[],
                               $7::bool[], $8::text[], $9::bool[], $10::int[], $11::text[]) WITH ORDINALITY
                     AS b (workspace_id, node_id, provider, epoch, load, active, live, capability_list, measured,
                           max_agents, version, ord)
                  ORDER BY workspace_id, node_id, provider
             ), before AS MATERIALIZED (
                 SELECT b.ord FROM beats b JOIN providers p USING (workspace_id, node_id, provider, epoch)
                  WHERE b.capabilities <> p.capabilities
             ), recorded AS (
                 UPDATE providers p
                    SET load = b.load, load_measured = b.measured, active_agents = b.active, handlers_live = b.live,
                        max_agents = coalesce(b.max_agents, p.max_agents), version = coalesce(b.version, p.version),
                        capabilities = coalesce(b.capabilities, p.capabilities), last_heartbeat_at = relay_now()
                   FROM beats b
                  WHERE p.workspace_id = b.workspace_id AND p.node_id = b.node_id
                    AND p.provider = b.provider AND p.epoch = b.epoch
              RETURNING p.workspace_id, p.node_id, p.provider
             ), due AS MATERIALIZED (
                 -- `OFFSET 0`: by the node, also while the table has no statistics. Another plan reads all agents of the
                 -- workspace for each heartbeat.
                 SELECT h.workspace_id, k.agent_id
                   FROM recorded h
                  CROSS JOIN LATERAL (SELECT * FROM agents
                                       WHERE workspace_id = h.workspace_id AND node_id = h.node_id
                                         AND deleted_at IS NULL OFFSET 0) AS k
                  WHERE (k.provider IS NULL OR k.provider = h.provider) AND k.status <> 'offline'
                    AND k.last_seen_at < relay_now() - interval '200 seconds'
             ), hosted AS (
             -- The heartbeat counts as activity of the hosted agents, which may never call themselves. Readers derive that
             -- from the provider; processes of the version before read this column, and mark an agent offline that was not
             -- seen for 300 seconds.
             UPDATE agents a SET last_seen_at = relay_now()
               FROM due d
              WHERE a.workspace_id = d.workspace_id AND a.agent_id = d.agent_id
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
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("recording heartbeats"))?;
        let beat = |ord: i64| beats.get(usize::try_from(ord - 1).ok()?);
        Ok(changed.into_iter().filter_map(beat).collect())
    }

    /// Renames a broker node outside a registration. The old name stays if another node has the new one, or if another
    /// connection holds the provider.
    pub async fn rename_node(&self, beat: &Heartbeat) -> StoreResult<bool> {
        let Some(name) = &beat.node_name else { return Ok(true) };
        let renamed = sqlx::query(formatcp!(
            "UPDATE nodes n SET name = $5, updated_at = relay_now()
              WHERE n.workspace_id = $1 AND n.node_id = $2 AND n.role <> '{DIRECT}' AND n.name <> $5
                AND EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = $2 AND p.provider = $3
                                                      AND p.epoch = $4)
                AND NOT EXISTS (SELECT FROM nodes taken WHERE taken.workspace_id = $1 AND taken.name = $5)"
        ))
        .bind(beat.scope.workspace_id())
        .bind(&beat.node_id)
        .bind(&beat.provider)
        .bind(beat.epoch)
        .bind(name)
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("renaming a node"));
        match renamed {
            // Another node took the name in the same moment.
            Err(error) if error.violates("nodes_name_is_unique") => Ok(false),
            other => Ok(other?.rows_affected() > 0),
        }
    }

    /// Applies the changed capabilities of a heartbeat outside a registration. If an action that the provider claims
    /// belongs to another handler, changes nothing and returns `false`.
    pub async fn refresh_capabilities(
        &self,
        beat: &Heartbeat,
        capabilities: &Value,
        action_ids: &[ActionId],
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let doing = "refreshing a provider's capabilities";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let broker: Option<i32> = sqlx::query_scalar(formatcp!(
            "SELECT 1 FROM providers p JOIN nodes n USING (workspace_id, node_id)
              WHERE p.workspace_id = $1 AND p.node_id = $2 AND p.provider = $3 AND p.epoch = $4 AND n.role <> '{DIRECT}'
                FOR UPDATE OF p"
        ))
        .bind(beat.scope.workspace_id())
        .bind(&beat.node_id)
        .bind(&beat.provider)
        .bind(beat.epoch)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // A superseded connection has nothing to refresh, and direct nodes define no actions.
        if broker.is_none() {
            return Ok(true);
        }
        let key = ProviderKey { scope: beat.scope, node: &beat.node_id, provider: &beat.provider };
        if capabilities::replace_capabilities(&mut tx, key, capabilities, action_ids, at).await?.is_err() {
            // The drop of the transaction undoes the capabilities that were written before the conflict was found.
            return Ok(false);
        }
        // A new capability may serve invocations that wait.
        redispatch::wake_waiting(&mut tx, key).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(true)
    }
}
