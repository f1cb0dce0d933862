//! Disconnection of providers whose heartbeats stopped, and of the agents that they host. [`disconnect`] is shared with
//! the cleanup of expired gateways; called by the liveness worker.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, agents::AgentStatus};
use sqlx::postgres::PgRow;

use crate::{
    Store, StoreError, StoreResult,
    connections::DatabaseSession,
    decode::decode_rows,
    events::{self, Event, RecordedEvents, status_event},
    nodes::presence,
};

/// Provider that was disconnected by the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DisconnectedProvider {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    pub provider: ProviderName,
    /// Gateway that holds or held the provider's socket.
    pub gateway_id: GatewayId,
    /// New epoch; changes by the old connection are refused.
    pub epoch: i64,
    /// `true` if the node has no connected provider left. Always `false` for direct nodes.
    pub node_is_offline: bool,
}

/// Agent that went offline with its provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfflineAgent {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub name: String,
}

/// Changes made by a disconnection.
#[derive(Debug, Default)]
pub struct DisconnectOutcome {
    /// Providers that were connected.
    pub providers: Vec<DisconnectedProvider>,
    /// Agents that were not offline.
    pub agents: Vec<OfflineAgent>,
    pub recorded: Vec<RecordedEvents>,
}

/// Locked providers to disconnect, as column arrays.
#[derive(Debug, Default)]
pub(crate) struct ProvidersToDisconnect {
    workspaces: Vec<WorkspaceId>,
    nodes: Vec<NodeId>,
    providers: Vec<ProviderName>,
    epochs: Vec<i64>,
    gateways: Vec<GatewayId>,
}

#[derive(sqlx::FromRow)]
struct ProviderToDisconnect {
    workspace_id: WorkspaceId,
    node_id: NodeId,
    provider: ProviderName,
    epoch: i64,
    gateway_id: GatewayId,
}

impl ProvidersToDisconnect {
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Reads rows with the columns workspace_id, node_id, provider, epoch and gateway_id.
    pub(crate) fn from_rows(rows: &[PgRow]) -> StoreResult<Self> {
        let mut targets = Self::default();
        for target in decode_rows::<ProviderToDisconnect>("providers", rows)? {
            targets.workspaces.push(target.workspace_id);
            targets.nodes.push(target.node_id);
            targets.providers.push(target.provider);
            targets.epochs.push(target.epoch);
            targets.gateways.push(target.gateway_id);
        }
        Ok(targets)
    }
}

// SKIP LOCKED: a row that another transaction holds changes now, for example by a heartbeat, and is judged again
// later.
const SILENT: &str = "
SELECT workspace_id, node_id, provider, epoch, gateway_id
  FROM providers
 WHERE gateway_id IS NOT NULL AND last_heartbeat_at < relay_now() - make_interval(secs => $1)
 ORDER BY workspace_id, node_id, provider LIMIT $2
   FOR UPDATE SKIP LOCKED";

// The raised epoch fences the old connection, whose gateway may still believe that it holds the provider.
const DISCONNECT: &str = "
UPDATE providers p
   SET gateway_id = NULL, disconnected_at = relay_now(), epoch = p.epoch + 1, handlers_live = false
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[])
       AS k (workspace_id, node_id, provider, epoch)
 WHERE p.workspace_id = k.workspace_id AND p.node_id = k.node_id AND p.provider = k.provider
   AND p.epoch = k.epoch AND p.gateway_id IS NOT NULL
RETURNING p.workspace_id, p.node_id, p.provider, p.epoch";

// An unassigned agent goes offline with the last connected provider of its node. `last_seen_at` advances, so activity
// notes from before do not bring the agent online again. Agents are locked in id order, as everywhere.
const AGENTS_OFFLINE: &str = "
WITH stranded AS MATERIALIZED (
    SELECT a.workspace_id, a.agent_id
      FROM agents a
     WHERE a.deleted_at IS NULL AND a.status <> 'offline'
       AND EXISTS (SELECT FROM unnest($1::bigint[], $2::text[], $3::text[]) AS k (workspace_id, node_id, provider)
                    WHERE k.workspace_id = a.workspace_id AND k.node_id = a.node_id
                      AND (a.provider = k.provider OR a.provider IS NULL))
       AND NOT EXISTS (SELECT FROM providers p
                        WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                          AND p.gateway_id IS NOT NULL
                          AND (p.provider = a.provider OR a.provider IS NULL))
     ORDER BY a.workspace_id, a.agent_id
       FOR UPDATE OF a
)
UPDATE agents a SET status = 'offline', last_seen_at = greatest(a.last_seen_at, $4)
  FROM stranded s WHERE a.workspace_id = s.workspace_id AND a.agent_id = s.agent_id
RETURNING a.workspace_id, a.agent_id, a.name";

impl Store {
    /// Disconnects up to `limit` connected providers without a heartbeat for `ttl`, marks their agents offline, and
    /// records both.
    ///
    /// Call only if this process has seen Postgres available for a full `ttl`: during an outage no heartbeat can be
    /// recorded.
    pub async fn disconnect_silent_providers(
        &self,
        ttl: Duration,
        limit: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<DisconnectOutcome> {
        let doing = "disconnecting silent providers";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(SILENT)
            .bind(ttl.as_secs_f64())
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let changed = disconnect(&mut tx, &ProvidersToDisconnect::from_rows(&rows)?, "liveness_timeout", at).await?;
        // Also if nothing was found: a dropped transaction costs its connection two tests, and its plans early.
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }
}

/// Disconnects these providers, marks their agents offline and records both. Must be the last write of the transaction,
/// because it locks the workspaces' event logs.
pub(crate) async fn disconnect(
    tx: &mut DatabaseSession,
    targets: &ProvidersToDisconnect,
    reason: &'static str,
    at: DateTime<Utc>,
) -> StoreResult<DisconnectOutcome> {
    let doing = "disconnecting providers";
    if targets.is_empty() {
        return Ok(DisconnectOutcome::default());
    }
    let ended: Vec<(WorkspaceId, NodeId, ProviderName, i64)> = sqlx::query_as(DISCONNECT)
        .bind(&targets.workspaces)
        .bind(&targets.nodes)
        .bind(&targets.providers)
        .bind(&targets.epochs)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let offline: Vec<(WorkspaceId, AgentId, String)> = sqlx::query_as(AGENTS_OFFLINE)
        .bind(&targets.workspaces)
        .bind(&targets.nodes)
        .bind(&targets.providers)
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let mut agents: Vec<OfflineAgent> = offline
        .into_iter()
        .map(|(workspace, agent_id, name)| OfflineAgent {
            scope: WorkspaceScope::from_engine_row(workspace),
            agent_id,
            name,
        })
        .collect();
    // The update returns its rows in no order.
    agents.sort_by_key(|agent| (agent.scope.workspace_id(), agent.agent_id));
    // After the disconnections, which decide whether a node is offline. Directly before the events, because this read
    // locks the event counters.
    let nodes = presence::brokers_without_provider(tx, &targets.workspaces, &targets.nodes).await?;

    let mut changed = DisconnectOutcome::default();
    for (workspace, node_id, provider, epoch) in ended {
        let target = (0..targets.nodes.len()).find(|&i| {
            targets.workspaces[i] == workspace && targets.nodes[i] == node_id && targets.providers[i] == provider
        });
        // The statement returns only rows that it was given.
        let Some(target) = target else { continue };
        let scope = WorkspaceScope::from_engine_row(workspace);
        changed.providers.push(DisconnectedProvider {
            node_is_offline: nodes.iter().any(|offline| offline.scope == scope && offline.node_id == node_id),
            scope,
            node_id,
            provider,
            gateway_id: targets.gateways[target],
            epoch,
        });
    }
    let mut events: Vec<(WorkspaceScope, Event)> = Vec::with_capacity(agents.len() + nodes.len());
    events.extend(
        agents.iter().map(|agent| (agent.scope, status_event(agent.agent_id, &agent.name, AgentStatus::Offline))),
    );
    events.extend(nodes.iter().map(|node| (node.scope, node.offline_event(reason))));
    changed.recorded = events::append_mixed(tx, at, events).await?;
    changed.agents = agents;
    Ok(changed)
}
