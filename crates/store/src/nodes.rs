//! Nodes as the roster shows them.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    node::{NODE_TTL, NodeKind},
};
use serde_json::Value;
use sqlx::{FromRow as _, Row as _};

use crate::{
    Store, StoreError, StoreResult, capabilities,
    events::{self, NewEvent, Recorded, status_event},
    presence,
    subscriptions::Sealed,
};

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
    /// How it is called, without its secrets; nodes of kind `http_push` only.
    pub delivery: Option<Value>,
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
    /// Places promised to what is on its way there.
    pub reserved_agents: i64,
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
    /// Nodes that are listed behind this one, whether it is still there or not.
    pub after: Option<NodePlace>,
    /// How many at most.
    pub limit: i64,
}

/// Where a node stands in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlace {
    /// Its role.
    pub role: String,
    /// Its name.
    pub name: String,
}

const NODE_COLUMNS: &str = "n.node_id, n.name, n.kind, n.role, n.machine_id, n.delivery_adapter, n.capabilities, \
                            n.tags, n.version, n.max_agents, n.delivery, n.created_at";

impl Store {
    /// The node of a name or id; a name wins.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn node(&self, scope: WorkspaceScope, name_or_id: &str) -> StoreResult<Option<NodeRow>> {
        sqlx::query_as(
            "SELECT node_id, name, kind, role, machine_id, delivery_adapter, capabilities, tags, version,
                    max_agents, delivery, created_at
               FROM nodes WHERE workspace_id = $1 AND (name = $2 OR node_id = $2)
              ORDER BY (name = $2) DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node"))
    }

    /// The kinds of those of these nodes that there are.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn node_kinds(
        &self,
        of: &[(WorkspaceScope, NodeId)],
    ) -> StoreResult<Vec<(WorkspaceScope, NodeId, NodeKind)>> {
        let rows: Vec<(i64, String, String)> = sqlx::query_as(
            "SELECT n.workspace_id, n.node_id, n.kind
               FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)
               JOIN nodes n USING (workspace_id, node_id)",
        )
        .bind(of.iter().map(|(scope, _)| scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, node)| node.as_str()).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the kinds of nodes"))?;
        let known = rows.into_iter().filter_map(|(workspace, node, kind)| {
            let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
            Some((scope, NodeId::new(node), NodeKind::parse(&kind)?))
        });
        Ok(known.collect())
    }

    /// The node of an id or, without one, of a name, with the secrets of its delivery settings.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn node_to_change(
        &self,
        scope: WorkspaceScope,
        id: Option<&NodeId>,
        name: &str,
    ) -> StoreResult<Option<(NodeRow, Option<Sealed>)>> {
        let row = sqlx::query(
            "SELECT node_id, name, kind, role, machine_id, delivery_adapter, capabilities, tags, version,
                    max_agents, delivery, created_at, sealed_key_id, sealed
               FROM nodes WHERE workspace_id = $1 AND (node_id = $2 OR name = $3)
              ORDER BY (node_id = $2) DESC NULLS LAST LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(id.map(NodeId::as_str))
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node to be changed"))?;
        let Some(row) = row else { return Ok(None) };
        let node = NodeRow::from_row(&row).map_err(StoreError::from_sqlx("reading a node to be changed"))?;
        let sealed = row.get::<Option<String>, _>("sealed_key_id").zip(row.get::<Option<Vec<u8>>, _>("sealed"));
        Ok(Some((node, sealed.map(|(key_id, bytes)| Sealed { key_id, bytes }))))
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
            // What is called or asks has no connection that could be lost.
            query.push(
                " AND (n.kind <> 'ws' OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id
                               AND p.node_id = n.node_id AND p.gateway_id IS NOT NULL
                               AND p.last_heartbeat_at > now() - make_interval(secs => ",
            );
            query.push_bind(NODE_TTL.as_secs_f64()).push("))) = ").push_bind(live);
        }
        if let Some(after) = &filter.after {
            query.push(" AND (n.role, n.name) > (").push_bind(&after.role).push(", ").push_bind(&after.name).push(")");
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
                    gateway_id IS NOT NULL AND last_heartbeat_at > now() - make_interval(secs => $3) AS live,
                    (SELECT count(*) FROM invocations i
                      WHERE i.workspace_id = p.workspace_id AND i.node_id = p.node_id AND i.provider = p.provider
                        AND i.status = 'dispatched' AND i.reserves) AS reserved_agents
               FROM providers p WHERE workspace_id = $1 AND node_id = ANY($2)
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
    /// whichever provider claims them. Returns the epoch that it was held under (`None` when there is no such
    /// provider), and what was recorded.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn forget_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        at: DateTime<Utc>,
    ) -> StoreResult<(Option<i64>, Recorded)> {
        let doing = "removing a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let gone: Option<(i64, bool)> = sqlx::query_as(
            "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3
          RETURNING epoch, gateway_id IS NOT NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let agents: Vec<(i64, String, String)> = sqlx::query_as(
            "WITH theirs AS MATERIALIZED (
                 SELECT agent_id, name, status FROM agents
                  WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND deleted_at IS NULL
                  ORDER BY agent_id FOR UPDATE
             ), left_open AS (
                 UPDATE agents a SET provider = NULL, status = 'offline', rebound_at = now(),
                        last_seen_at = greatest(a.last_seen_at, $4)
                   FROM theirs WHERE a.workspace_id = $1 AND a.agent_id = theirs.agent_id
             )
             SELECT agent_id, name, status FROM theirs ORDER BY agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        capabilities::forget(&mut tx, scope, node, provider).await?;
        let were_there = agents.iter().filter(|(_, _, status)| status != "offline");
        let mut events: Vec<NewEvent> =
            were_there.map(|(id, name, _)| status_event(AgentId::new(*id), name, "offline")).collect();
        if gone.is_some_and(|(_, was_connected)| was_connected) {
            let (workspace, node) = ([scope.workspace_id().get()], [node.to_string()]);
            let offline = presence::brokers_without_provider(&mut tx, &workspace, &node).await?;
            events.extend(offline.iter().map(|node| node.offline("deregistered")));
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok((gone.map(|(epoch, _)| epoch), recorded))
    }
}
