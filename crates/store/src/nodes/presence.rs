//! Presence of nodes, for `node.online` and `node.offline` events. A node is online while any of its providers is
//! connected. Called by registration and disconnection of providers.
//!
//! Two providers of a node that connect or disconnect concurrently must not both miss the change, nor both record it.
//! The functions therefore lock the workspace's event log before they read, and the caller appends the event next.

use const_format::formatcp;
use relay_domain::{NodeId, WorkspaceId, WorkspaceScope, events::kind};
use relay_wire::{events::recorded_data::NodePresence, field::ToValue as _};

use crate::{
    StoreError, StoreResult, codes::BROKER, connections::DatabaseSession, events::Event, nodes::fence::ProviderKey,
};

/// Node with the role `broker`. Direct nodes have no presence events: their agents' status shows the same.
#[derive(Debug)]
pub(crate) struct Broker {
    pub(crate) scope: WorkspaceScope,
    pub(crate) node_id: NodeId,
    pub(crate) name: String,
}

impl Broker {
    pub(crate) fn online_event(&self) -> Event {
        Event::new(kind::NODE_ONLINE, self.presence(None).to_value())
    }

    pub(crate) fn offline_event(&self, reason: &'static str) -> Event {
        Event::new(kind::NODE_OFFLINE, self.presence(Some(reason)).to_value())
    }

    fn presence<'a>(&'a self, reason: Option<&'a str>) -> NodePresence<'a> {
        NodePresence { node_id: self.node_id.as_str(), node_name: &self.name, reason }
    }
}

// The no-op upsert locks the event heads, in workspace order. It waits for transactions that append events, and the
// next statement sees their changes.
const LOCK_LOGS_OF_BROKERS: &str = formatcp!(
    "
WITH brokers AS MATERIALIZED (
    SELECT n.workspace_id, n.node_id, n.name
      FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)) AS k
      JOIN nodes n USING (workspace_id, node_id)
     WHERE n.role = '{BROKER}'
), locked AS (
    INSERT INTO event_heads AS h (workspace_id)
    SELECT DISTINCT workspace_id FROM brokers ORDER BY workspace_id
    ON CONFLICT (workspace_id) DO UPDATE SET next_seq = h.next_seq
)
SELECT workspace_id, node_id, name FROM brokers ORDER BY workspace_id, node_id"
);

/// Returns the brokers among these nodes (workspace and id pairs) without a connected provider. Locks the event logs of
/// their workspaces until the commit, so only appending events may follow.
pub(crate) async fn brokers_without_provider(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    nodes: &[NodeId],
) -> StoreResult<Vec<Broker>> {
    let doing = "reading nodes that went offline";
    let brokers: Vec<(WorkspaceId, NodeId, String)> = sqlx::query_as(LOCK_LOGS_OF_BROKERS)
        .bind(workspaces)
        .bind(nodes)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    if brokers.is_empty() {
        return Ok(Vec::new());
    }
    let (workspaces, nodes): (Vec<WorkspaceId>, Vec<NodeId>) = brokers.iter().map(|(w, n, _)| (*w, n.clone())).unzip();
    let online: Vec<(WorkspaceId, NodeId)> = sqlx::query_as(
        "SELECT DISTINCT p.workspace_id, p.node_id
           FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)
           JOIN providers p USING (workspace_id, node_id)
          WHERE p.gateway_id IS NOT NULL",
    )
    .bind(workspaces)
    .bind(nodes)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(brokers
        .into_iter()
        .filter(|(workspace, node, _)| !online.iter().any(|(w, n)| w == workspace && n == node))
        .map(|(workspace, node_id, name)| Broker { scope: WorkspaceScope::from_engine_row(workspace), node_id, name })
        .collect())
}

/// Returns whether this provider is the only connected one of its node. Locks the workspace's event log until the
/// commit, so only appending events may follow.
pub(crate) async fn is_only_provider(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<bool> {
    let doing = "checking that a node came online";
    sqlx::query(LOCK_LOGS_OF_BROKERS)
        .bind([key.scope.workspace_id()])
        .bind([key.node.clone()])
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    sqlx::query_scalar(
        "SELECT NOT EXISTS (SELECT FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider <> $3
                                                    AND gateway_id IS NOT NULL)",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))
}
