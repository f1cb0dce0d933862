//! Providers that went silent: their connection row says connected, their heartbeats say otherwise.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use sqlx::{PgConnection, Row};

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded, status_event},
    presence,
};

/// A provider whose connection was ended by the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DisconnectedProvider {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The gateway that held, or still holds, its socket.
    pub gateway_id: GatewayId,
    /// Its epoch from now on: what the old connection does is refused.
    pub epoch: i64,
    /// Whether no other provider of the node is connected: the node is offline now. Not said of direct nodes.
    pub node_is_offline: bool,
}

/// An agent that became offline with its provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentOffline {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The agent.
    pub agent_id: AgentId,
    /// Its name.
    pub name: String,
}

/// What ending connections changed.
#[derive(Debug, Default)]
pub struct Disconnected {
    /// The providers that were connected.
    pub providers: Vec<DisconnectedProvider>,
    /// The agents that were not offline.
    pub agents: Vec<AgentOffline>,
    /// That they and their nodes went offline.
    pub recorded: Vec<Recorded>,
}

/// The providers to disconnect, locked, as columns.
#[derive(Debug, Default)]
pub(crate) struct Condemned {
    workspaces: Vec<i64>,
    nodes: Vec<String>,
    providers: Vec<String>,
    epochs: Vec<i64>,
    gateways: Vec<i64>,
}

impl Condemned {
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// From rows of (workspace_id, node_id, provider, epoch, gateway_id).
    pub(crate) fn from_rows(rows: &[sqlx::postgres::PgRow]) -> Self {
        let mut condemned = Self::default();
        for row in rows {
            condemned.workspaces.push(row.get("workspace_id"));
            condemned.nodes.push(row.get("node_id"));
            condemned.providers.push(row.get("provider"));
            condemned.epochs.push(row.get("epoch"));
            condemned.gateways.push(row.get("gateway_id"));
        }
        condemned
    }
}

const SILENT: &str = "
SELECT workspace_id, node_id, provider, epoch, gateway_id
  FROM providers
 WHERE gateway_id IS NOT NULL AND last_heartbeat_at < now() - make_interval(secs => $1)
 ORDER BY workspace_id, node_id, provider LIMIT $2
   FOR UPDATE SKIP LOCKED";

// The epoch is repeated although the row is locked: it is the rule for whatever ends a connection.
const DISCONNECT: &str = "
UPDATE providers p
   SET gateway_id = NULL, epoch = p.epoch + 1, handlers_live = false
  FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[])
       AS k (workspace_id, node_id, provider, epoch)
 WHERE p.workspace_id = k.workspace_id AND p.node_id = k.node_id AND p.provider = k.provider
   AND p.epoch = k.epoch AND p.gateway_id IS NOT NULL
RETURNING p.workspace_id, p.node_id, p.provider, p.epoch";

// An agent of no particular provider goes offline with the node's last one. What an agent called before this does not
// bring it back. Agents are locked in order.
const AGENTS_OFFLINE: &str = "
WITH gone AS MATERIALIZED (
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
  FROM gone WHERE a.workspace_id = gone.workspace_id AND a.agent_id = gone.agent_id
RETURNING a.workspace_id, a.agent_id, a.name";

impl Store {
    /// Disconnects up to `limit` connected providers not heard of for `ttl`, marks their agents offline, and
    /// records both.
    ///
    /// Judge only when this process has itself seen Postgres up for a full `ttl`: while Postgres was away,
    /// nobody could be heard.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn disconnect_silent_providers(
        &self,
        ttl: Duration,
        limit: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<Disconnected> {
        let doing = "disconnecting silent providers";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(SILENT)
            .bind(ttl.as_secs_f64())
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let changed = disconnect(&mut tx, &Condemned::from_rows(&rows), "liveness_timeout", at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }
}

/// Ends these connections, marks their agents offline and records it: the last that the transaction does.
pub(crate) async fn disconnect(
    tx: &mut PgConnection,
    condemned: &Condemned,
    reason: &'static str,
    at: DateTime<Utc>,
) -> StoreResult<Disconnected> {
    let doing = "disconnecting providers";
    if condemned.is_empty() {
        return Ok(Disconnected::default());
    }
    let ended = sqlx::query(DISCONNECT)
        .bind(&condemned.workspaces)
        .bind(&condemned.nodes)
        .bind(&condemned.providers)
        .bind(&condemned.epochs)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let offline = sqlx::query(AGENTS_OFFLINE)
        .bind(&condemned.workspaces)
        .bind(&condemned.nodes)
        .bind(&condemned.providers)
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let mut agents: Vec<AgentOffline> = offline
        .iter()
        .map(|row| AgentOffline {
            scope: scope(row.get("workspace_id")),
            agent_id: AgentId::new(row.get("agent_id")),
            name: row.get("name"),
        })
        .collect();
    agents.sort_by_key(|agent| (agent.scope.workspace_id(), agent.agent_id));
    let nodes = presence::brokers_without_provider(tx, &condemned.workspaces, &condemned.nodes).await?;

    let mut changed = Disconnected::default();
    for row in &ended {
        let (workspace, node, provider): (i64, String, String) =
            (row.get("workspace_id"), row.get("node_id"), row.get("provider"));
        let at = (0..condemned.nodes.len()).find(|&i| {
            condemned.workspaces[i] == workspace && condemned.nodes[i] == node && condemned.providers[i] == provider
        });
        let (scope, node_id) = (scope(workspace), NodeId::new(node));
        changed.providers.push(DisconnectedProvider {
            node_is_offline: nodes.iter().any(|offline| offline.scope == scope && offline.node_id == node_id),
            scope,
            node_id,
            provider: ProviderName::new(provider),
            gateway_id: GatewayId::new(at.map_or(0, |i| condemned.gateways[i])),
            epoch: row.get("epoch"),
        });
    }
    let mut events: Vec<(WorkspaceScope, NewEvent)> = Vec::with_capacity(agents.len() + nodes.len());
    events.extend(agents.iter().map(|agent| (agent.scope, status_event(agent.agent_id, &agent.name, "offline"))));
    events.extend(nodes.iter().map(|node| (node.scope, node.offline(reason))));
    changed.recorded = events::append_mixed(tx, at, events).await?;
    changed.agents = agents;
    Ok(changed)
}

fn scope(workspace: i64) -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
}
