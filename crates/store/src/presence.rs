//! Which nodes have come or gone, for the event log.
//!
//! A node is online while any of its providers is connected. Two providers that come and go at once must
//! not both miss the change, nor both tell it: who asks holds the workspace's event log, in which the
//! answer is recorded next.

use relay_domain::{NodeId, ProviderName, WorkspaceId, WorkspaceScope, event};
use serde_json::json;
use sqlx::PgConnection;

use crate::{StoreError, StoreResult, events::NewEvent};

/// A node that is not one agent's own: what those do shows as their agents' status.
#[derive(Debug)]
pub(crate) struct Broker {
    pub(crate) scope: WorkspaceScope,
    pub(crate) node_id: NodeId,
    pub(crate) name: String,
}

impl Broker {
    /// The node has a connected provider now.
    pub(crate) fn online(&self) -> NewEvent {
        let data = json!({ "node_id": self.node_id.as_str(), "node_name": self.name });
        NewEvent::new(event::NODE_ONLINE, data)
    }

    /// The node has no connected provider any more.
    pub(crate) fn offline(&self, reason: &'static str) -> NewEvent {
        let data = json!({ "node_id": self.node_id.as_str(), "node_name": self.name, "reason": reason });
        NewEvent::new(event::NODE_OFFLINE, data)
    }
}

// Waits for whoever records something in these workspaces. The statement after it sees what they did.
const LOCK_LOGS_OF_BROKERS: &str = "
WITH brokers AS MATERIALIZED (
    SELECT n.workspace_id, n.node_id, n.name
      FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)) AS k
      JOIN nodes n USING (workspace_id, node_id)
     WHERE n.role = 'broker'
), locked AS (
    INSERT INTO event_heads AS h (workspace_id)
    SELECT DISTINCT workspace_id FROM brokers ORDER BY workspace_id
    ON CONFLICT (workspace_id) DO UPDATE SET next_seq = h.next_seq
)
SELECT workspace_id, node_id, name FROM brokers ORDER BY workspace_id, node_id";

/// Those of the nodes (each a workspace and an id) that have no connected provider now. Locks the event logs
/// of the workspaces with brokers among them: nothing but recording events may follow.
pub(crate) async fn brokers_without_provider(
    tx: &mut PgConnection,
    workspaces: &[i64],
    nodes: &[String],
) -> StoreResult<Vec<Broker>> {
    let doing = "looking which nodes went offline";
    let brokers: Vec<(i64, String, String)> = sqlx::query_as(LOCK_LOGS_OF_BROKERS)
        .bind(workspaces)
        .bind(nodes)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    if brokers.is_empty() {
        return Ok(Vec::new());
    }
    let (workspaces, nodes): (Vec<i64>, Vec<&str>) = brokers.iter().map(|(w, n, _)| (*w, n.as_str())).unzip();
    let online: Vec<(i64, String)> = sqlx::query_as(
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
        .map(|(workspace, node, name)| Broker {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
            node_id: NodeId::new(node),
            name,
        })
        .collect())
}

/// Whether this provider is the only connected one of its node. Locks the workspace's event log: nothing but
/// recording events may follow.
pub(crate) async fn is_only_provider(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
) -> StoreResult<bool> {
    let doing = "looking whether a node came online";
    sqlx::query(LOCK_LOGS_OF_BROKERS)
        .bind([scope.workspace_id().get()])
        .bind([node.as_str()])
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    sqlx::query_scalar(
        "SELECT NOT EXISTS (SELECT FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider <> $3
                                                    AND gateway_id IS NOT NULL)",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(provider.as_str())
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))
}
