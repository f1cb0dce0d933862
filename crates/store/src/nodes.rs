//! Nodes as the roster shows them.

use chrono::{DateTime, Utc};
use relay_domain::{NodeId, ProviderName, WorkspaceScope, node::NODE_TTL};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult};

/// A node as stored. What its providers add is in [`NodeProviderRow`].
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct NodeRow {
    /// The node.
    pub node_id: String,
    /// Its name, unique in the workspace.
    pub name: String,
    /// `ws`, `http_push` or `poll`.
    pub kind: String,
    /// `direct` or `broker`.
    pub role: String,
    /// What brokers without a node id of their own are recognised by.
    pub machine_id: Option<String>,
    /// How deliveries reach it.
    pub delivery_adapter: String,
    /// The capabilities given by REST: an array of objects.
    pub capabilities: Value,
    /// Its tags.
    pub tags: Vec<String>,
    /// Free text.
    pub version: Option<String>,
    /// Agents it takes, 0 for unlimited; providers bring their own figures.
    pub max_agents: i32,
    /// When it was first enrolled.
    pub created_at: DateTime<Utc>,
}

/// What the roster shows of a provider.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct NodeProviderRow {
    /// Its node.
    pub node_id: String,
    /// Its name.
    pub provider: String,
    /// An array of objects.
    pub capabilities: Value,
    /// Its tags.
    pub tags: Vec<String>,
    /// Free text.
    pub version: Option<String>,
    /// Agents it takes, 0 for unlimited.
    pub max_agents: i32,
    /// Agents it said it has.
    pub active_agents: i32,
    /// From 0 to 1.
    pub load: f64,
    /// Whether it said its handlers run.
    pub handlers_live: bool,
    /// When it was last heard of.
    pub last_heartbeat_at: DateTime<Utc>,
    /// Connected, and heard of within the TTL.
    pub live: bool,
}

/// Which nodes a list is about.
#[derive(Debug, Clone, Default)]
pub struct NodeFilter {
    /// The node of this name.
    pub name: Option<String>,
    /// Nodes with a capability of this name.
    pub capability: Option<String>,
    /// Only live nodes, or only others.
    pub live: Option<bool>,
    /// How many at most.
    pub limit: i64,
}

const NODE_COLUMNS: &str = "n.node_id, n.name, n.kind, n.role, n.machine_id, n.delivery_adapter, n.capabilities, \
                            n.tags, n.version, n.max_agents, n.created_at";

impl Store {
    /// The node of a name or id; a name wins.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn node(&self, scope: WorkspaceScope, name_or_id: &str) -> StoreResult<Option<NodeRow>> {
        sqlx::query_as(
            "SELECT node_id, name, kind, role, machine_id, delivery_adapter, capabilities, tags, version,
                    max_agents, created_at
               FROM nodes WHERE workspace_id = $1 AND (name = $2 OR node_id = $2)
              ORDER BY (name = $2) DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node"))
    }

    /// Nodes: brokers first, then by name.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn nodes(&self, scope: WorkspaceScope, filter: &NodeFilter) -> StoreResult<Vec<NodeRow>> {
        let mut query = sqlx::QueryBuilder::new("SELECT ");
        query.push(NODE_COLUMNS).push(" FROM nodes n WHERE n.workspace_id = ");
        query.push_bind(scope.workspace_id().get());
        // The node of an agent outlives it in the table, not in the list.
        query.push(
            " AND CASE WHEN n.node_id LIKE 'node\\_direct\\_%'
                       THEN EXISTS (SELECT FROM agents a WHERE a.workspace_id = n.workspace_id
                                     AND a.agent_id = substring(n.node_id FROM 13)::bigint
                                     AND a.deleted_at IS NULL)
                       ELSE true END",
        );
        if let Some(name) = &filter.name {
            query.push(" AND n.name = ").push_bind(name);
        }
        if let Some(capability) = &filter.capability {
            let wanted = serde_json::json!([{ "name": capability }]);
            query.push(" AND (n.capabilities @> ").push_bind(wanted.clone());
            query.push(
                " OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id
                              AND p.node_id = n.node_id AND p.capabilities @> ",
            );
            query.push_bind(wanted).push("))");
        }
        if let Some(live) = filter.live {
            query.push(
                " AND EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id
                               AND p.node_id = n.node_id AND p.gateway_id IS NOT NULL
                               AND p.last_heartbeat_at > now() - make_interval(secs => ",
            );
            query.push_bind(NODE_TTL.as_secs_f64()).push(")) = ").push_bind(live);
        }
        query.push(" ORDER BY n.role, n.name LIMIT ").push_bind(filter.limit);
        query.build_query_as().fetch_all(&self.pool).await.map_err(StoreError::from_sqlx("listing nodes"))
    }

    /// The providers of some nodes, by node and name.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn providers_of_nodes(
        &self,
        scope: WorkspaceScope,
        nodes: &[String],
    ) -> StoreResult<Vec<NodeProviderRow>> {
        sqlx::query_as(
            "SELECT node_id, provider, capabilities, tags, version, max_agents, active_agents, load, handlers_live,
                    last_heartbeat_at,
                    gateway_id IS NOT NULL AND last_heartbeat_at > now() - make_interval(secs => $3) AS live
               FROM providers WHERE workspace_id = $1 AND node_id = ANY($2)
              ORDER BY node_id, registered_at, provider",
        )
        .bind(scope.workspace_id().get())
        .bind(nodes)
        .bind(NODE_TTL.as_secs_f64())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the providers of nodes"))
    }

    /// Forgets a provider: its capabilities leave the node, and its agents are offline and wait for
    /// whichever provider claims them. Returns the epoch that it was held under; `None` when there is no
    /// such provider.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn forget_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> StoreResult<Option<i64>> {
        let doing = "removing a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let epoch: Option<i64> = sqlx::query_scalar(
            "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 RETURNING epoch",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            "UPDATE agents SET provider = NULL, status = 'offline', rebound_at = now()
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(epoch)
    }
}
