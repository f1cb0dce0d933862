//! Roster of nodes and their providers: lookup, listing and removal of providers.
//! Called by the engine's roster use cases.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    agents::AgentStatus,
    nodes::{
        NODE_TTL, Node, NodeKind, NodeProvider, NodeRole,
        roster::{NodeFilter, NodeListPosition, RosterNode},
    },
};
use serde::Serialize;
use sqlx::{
    FromRow, Postgres, Row as _,
    postgres::{PgArguments, PgRow},
    query::Query,
    types::Json,
};

use crate::{
    Store, StoreError, StoreResult,
    codes::WS,
    decode::{decode_row, decode_rows},
    events::{self, Event, RecordedEvents, status_event},
    nodes::{capabilities, fence::ProviderKey, presence},
    sizes::{NODE_BYTES, PROVIDERS_BYTES},
    statement_timeout::StatementTimeout as _,
    subscriptions::definitions::EncryptedSecret,
};

/// Entry of a list of capabilities, which is searched by name.
#[derive(Clone, Serialize)]
struct CapabilityName<'a> {
    name: &'a str,
}

struct NodeRow(Node);

impl FromRow<'_, PgRow> for NodeRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(Node {
            node_id: row.try_get("node_id")?,
            name: row.try_get("name")?,
            kind: row.try_get("kind")?,
            role: row.try_get("role")?,
            machine_id: row.try_get("machine_id")?,
            delivery_adapter: row.try_get("delivery_adapter")?,
            capabilities: row.try_get::<Json<_>, _>("capabilities")?.0,
            tags: row.try_get("tags")?,
            version: row.try_get("version")?,
            max_agents: row.try_get("max_agents")?,
            delivery: row.try_get("delivery")?,
            bound_agents: row.try_get("bound_agents")?,
            created_at: row.try_get("created_at")?,
        }))
    }
}

struct NodeProviderRow(NodeProvider);

impl FromRow<'_, PgRow> for NodeProviderRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(NodeProvider {
            node_id: row.try_get("node_id")?,
            name: row.try_get("provider")?,
            capabilities: row.try_get::<Json<_>, _>("capabilities")?.0,
            tags: row.try_get("tags")?,
            version: row.try_get("version")?,
            max_agents: row.try_get("max_agents")?,
            active_agents: row.try_get("active_agents")?,
            reserved_agents: row.try_get("reserved_agents")?,
            load: row.try_get("load")?,
            handlers_live: row.try_get("handlers_live")?,
            last_heartbeat_at: row.try_get("last_heartbeat_at")?,
            liveness: row.try_get::<bool, _>("live")?.into(),
        }))
    }
}

// The count reads the index `agents_by_node`.
const NODE_COLUMNS: &str = "n.node_id, n.name, n.kind, n.role, n.machine_id, n.delivery_adapter, n.capabilities, \
                            n.tags, n.version, n.max_agents, n.delivery, n.created_at, \
                            (SELECT count(*) FROM agents b WHERE b.workspace_id = n.workspace_id \
                                AND b.node_id = n.node_id AND b.deleted_at IS NULL) AS bound_agents";

// $3 is the time to live of a node, in seconds.
const PROVIDER_COLUMNS: &str = "p.node_id, p.provider, p.capabilities, p.tags, p.version, p.max_agents, \
     p.active_agents, p.load, p.handlers_live, p.last_heartbeat_at, \
     p.gateway_id IS NOT NULL AND p.last_heartbeat_at > relay_now() - make_interval(secs => $3) AS live, \
     (SELECT count(*) FROM invocations i \
       WHERE i.workspace_id = p.workspace_id AND i.node_id = p.node_id AND i.provider = p.provider \
         AND i.status = 'dispatched' AND i.reserves) AS reserved_agents";

/// Entry of a node list, whose contents are read apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedNode {
    pub node_id: NodeId,
    pub position: NodeListPosition,
}

const SMALL_NODES: &str = formatcp!(
    "SELECT k.place, {NODE_COLUMNS}, {PROVIDERS_BYTES} AS bytes
       FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (workspace_id, node_id, place)
       JOIN nodes n ON n.workspace_id = k.workspace_id AND n.node_id = k.node_id
      WHERE {NODE_BYTES} + {PROVIDERS_BYTES} <= $3
      ORDER BY k.place"
);

const PROVIDERS_OF_NODES: &str = formatcp!(
    "SELECT k.place, {PROVIDER_COLUMNS}
       FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (workspace_id, node_id, place)
       JOIN providers p ON p.workspace_id = k.workspace_id AND p.node_id = k.node_id
      ORDER BY k.place, p.registered_at, p.provider"
);

#[derive(FromRow)]
struct PlacedNodeSize {
    place: i64,
    bytes: i64,
}

#[derive(FromRow)]
struct ProvidersBytes {
    bytes: i64,
}

#[derive(FromRow)]
struct NodeSize {
    node_id: NodeId,
    role: NodeRole,
    name: String,
    bytes: i64,
}

impl Store {
    /// Returns the node with a name or id; the name takes precedence.
    pub async fn node(&self, scope: WorkspaceScope, name_or_id: &str) -> StoreResult<Option<Node>> {
        let row = sqlx::query(formatcp!(
            "SELECT {NODE_COLUMNS} FROM nodes n WHERE n.workspace_id = $1 AND (n.name = $2 OR n.node_id = $2)
              ORDER BY (n.name = $2) DESC LIMIT 1"
        ))
        .bind(scope.workspace_id())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node"))?;
        row.map(|row| decode_node(&row)).transpose()
    }

    /// Returns the role of a node; `None` when there is no such node.
    pub async fn node_role(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<NodeRole>> {
        sqlx::query_scalar("SELECT role FROM nodes WHERE workspace_id = $1 AND node_id = $2")
            .bind(scope.workspace_id())
            .bind(node)
            .fetch_optional(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("reading the role of a node"))
    }

    /// Returns the kinds of those of these nodes that exist.
    pub async fn node_kinds(
        &self,
        of: &[(WorkspaceScope, NodeId)],
    ) -> StoreResult<Vec<(WorkspaceScope, NodeId, NodeKind)>> {
        let rows = sqlx::query(
            "SELECT n.workspace_id, n.node_id, n.kind
               FROM unnest($1::bigint[], $2::text[]) AS k (workspace_id, node_id)
               JOIN nodes n USING (workspace_id, node_id)",
        )
        .bind(of.iter().map(|(scope, _)| scope.workspace_id()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, node)| node.clone()).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the kinds of nodes"))?;
        let kinds: Vec<(WorkspaceId, NodeId, NodeKind)> = decode_rows("nodes", &rows)?;
        let scope = WorkspaceScope::from_engine_row;
        Ok(kinds.into_iter().map(|(workspace, node, kind)| (scope(workspace), node, kind)).collect())
    }

    /// Returns the node with this id, otherwise with this name, and the encrypted secrets of its delivery settings.
    pub async fn node_with_secrets(
        &self,
        scope: WorkspaceScope,
        id: Option<&NodeId>,
        name: &str,
    ) -> StoreResult<Option<(Node, Option<EncryptedSecret>)>> {
        let row = sqlx::query(formatcp!(
            "SELECT {NODE_COLUMNS}, n.sealed_key_id, n.sealed
               FROM nodes n WHERE n.workspace_id = $1 AND (n.node_id = $2 OR n.name = $3)
              ORDER BY (n.node_id = $2) DESC NULLS LAST LIMIT 1"
        ))
        .bind(scope.workspace_id())
        .bind(id)
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node with its secrets"))?;
        let Some(row) = row else { return Ok(None) };
        let SealedColumns { sealed_key_id, sealed } = decode_row("nodes", &row)?;
        let secret = sealed_key_id.zip(sealed).map(|(key_id, bytes)| EncryptedSecret { key_id, bytes });
        Ok(Some((decode_node(&row)?, secret)))
    }

    /// Lists nodes with the sizes of their contents and those of their providers: brokers first, then by name.
    pub async fn node_sizes(
        &self,
        scope: WorkspaceScope,
        filter: &NodeFilter,
    ) -> StoreResult<Vec<(ListedNode, usize)>> {
        // Built from the filters that are set: one text with all conditions would have one generic plan for all of
        // them.
        let mut query = sqlx::QueryBuilder::new(formatcp!(
            "SELECT n.node_id, n.role, n.name, {NODE_BYTES} + {PROVIDERS_BYTES} AS bytes
               FROM nodes n WHERE n.workspace_id = "
        ));
        query.push_bind(scope.workspace_id());
        // A direct node of a deleted agent stays in the table, because its token may be presented again, and is not
        // listed.
        // A CASE, because the cast must not be evaluated for the ids of other nodes.
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
            let wanted = Json([CapabilityName { name: capability }]);
            query.push(" AND (n.capabilities @> ").push_bind(wanted.clone());
            query.push(
                " OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id
                              AND p.node_id = n.node_id AND p.capabilities @> ",
            );
            query.push_bind(wanted).push("))");
        }
        if let Some(liveness) = filter.liveness {
            // Nodes of kind `http_push` and `poll` have no connection, so they are always live.
            query.push(formatcp!(
                " AND (n.kind <> '{WS}' OR EXISTS (SELECT FROM providers p WHERE p.workspace_id = n.workspace_id
                               AND p.node_id = n.node_id AND p.gateway_id IS NOT NULL
                               AND p.last_heartbeat_at > relay_now() - make_interval(secs => "
            ));
            query.push_bind(NODE_TTL.as_secs_f64()).push("))) = ").push_bind(liveness.is_online());
        }
        if let Some(agents) = &filter.hosts {
            query.push(
                " AND EXISTS (SELECT FROM agents a WHERE a.workspace_id = n.workspace_id AND a.node_id = n.node_id
                              AND a.deleted_at IS NULL AND a.agent_id = ANY (",
            );
            query.push_bind(agents).push("))");
        }
        if let Some(after) = &filter.after {
            query.push(" AND (n.role, n.name) > (").push_bind(after.role).push(", ").push_bind(&after.name).push(")");
        }
        // `broker` sorts before `direct`.
        query.push(" ORDER BY n.role, n.name LIMIT ").push_bind(filter.limit);
        let rows = query.build().fetch_all(&self.pool).await.map_err(StoreError::from_sqlx("listing nodes"))?;
        let listed: Vec<NodeSize> = decode_rows("nodes", &rows)?;
        let entry = |NodeSize { node_id, role, name, bytes }| {
            (
                ListedNode { node_id, position: NodeListPosition { role, name } },
                usize::try_from(bytes).unwrap_or(usize::MAX),
            )
        };
        Ok(listed.into_iter().map(entry).collect())
    }

    /// Returns the node with a name or id, and the size of the contents of its providers; the name takes precedence.
    pub async fn node_with_size(&self, scope: WorkspaceScope, name_or_id: &str) -> StoreResult<Option<(Node, usize)>> {
        let row = sqlx::query(formatcp!(
            "SELECT {NODE_COLUMNS}, {PROVIDERS_BYTES} AS bytes
               FROM nodes n WHERE n.workspace_id = $1 AND (n.name = $2 OR n.node_id = $2)
              ORDER BY (n.name = $2) DESC LIMIT 1"
        ))
        .bind(scope.workspace_id())
        .bind(name_or_id)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a node with its size"))?;
        let Some(row) = row else { return Ok(None) };
        let ProvidersBytes { bytes } = decode_row("nodes", &row)?;
        Ok(Some((decode_node(&row)?, usize::try_from(bytes).unwrap_or(usize::MAX))))
    }

    /// Reads these nodes: brokers first, then by name.
    pub async fn nodes(&self, scope: WorkspaceScope, nodes: &[NodeId]) -> StoreResult<Vec<Node>> {
        let rows = sqlx::query(formatcp!(
            "SELECT {NODE_COLUMNS} FROM nodes n WHERE n.workspace_id = $1 AND n.node_id = ANY ($2)
              ORDER BY n.role, n.name"
        ))
        .bind(scope.workspace_id())
        .bind(nodes)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading nodes"))?;
        rows.iter().map(decode_node).collect()
    }

    /// Returns the locations of those of these agents that are not deleted.
    pub async fn locations_of_agents(
        &self,
        scope: WorkspaceScope,
        agents: &[AgentId],
    ) -> StoreResult<Vec<(NodeId, Option<ProviderName>)>> {
        let rows = sqlx::query(
            "SELECT node_id, provider FROM agents
              WHERE workspace_id = $1 AND agent_id = ANY ($2) AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(agents)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the locations of agents"))?;
        decode_rows("agents", &rows)
    }

    /// Returns the providers of these nodes, by node, then in the order of registration.
    pub async fn providers_of_nodes(&self, scope: WorkspaceScope, nodes: &[NodeId]) -> StoreResult<Vec<NodeProvider>> {
        let rows = sqlx::query(formatcp!(
            "SELECT {PROVIDER_COLUMNS} FROM providers p WHERE p.workspace_id = $1 AND p.node_id = ANY($2)
              ORDER BY p.node_id, p.registered_at, p.provider"
        ))
        .bind(scope.workspace_id())
        .bind(nodes)
        .bind(NODE_TTL.as_secs_f64())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the providers of nodes"))?;
        let providers: Vec<NodeProviderRow> = decode_rows("providers", &rows)?;
        Ok(providers.into_iter().map(|NodeProviderRow(provider)| provider).collect())
    }

    /// Reads nodes of several workspaces with their providers, and the size of these. `None` for a node that does not
    /// exist, or whose contents exceed `max_bytes` with those of its providers.
    pub async fn small_nodes(
        &self,
        nodes: &[(WorkspaceScope, NodeId)],
        max_bytes: i64,
    ) -> StoreResult<Vec<Option<(RosterNode, usize)>>> {
        let doing = "reading nodes with their providers";
        let mut found: Vec<Option<(RosterNode, usize)>> = nodes.iter().map(|_| None).collect();
        let query = bind_nodes(SMALL_NODES, nodes).bind(max_bytes);
        for row in query.fetch_all(&self.pool).await.map_err(StoreError::from_sqlx(doing))? {
            let PlacedNodeSize { place, bytes } = decode_row("nodes", &row)?;
            if let Some(place) = usize::try_from(place - 1).ok().and_then(|index| found.get_mut(index)) {
                let node = RosterNode { node: decode_node(&row)?, providers: Vec::new() };
                *place = Some((node, usize::try_from(bytes).unwrap_or(usize::MAX)));
            }
        }
        // Their places among `nodes`, by their place in the statement.
        let (places, small): (Vec<usize>, Vec<_>) = nodes
            .iter()
            .enumerate()
            .filter(|(index, _)| found[*index].is_some())
            .map(|(i, key)| (i, key.clone()))
            .unzip();
        let query = bind_nodes(PROVIDERS_OF_NODES, &small).bind(NODE_TTL.as_secs_f64());
        for row in query.fetch_all(&self.pool).await.map_err(StoreError::from_sqlx(doing))? {
            let place: i64 = row.try_get("place").map_err(StoreError::from_sqlx(doing))?;
            let index = usize::try_from(place - 1).ok().and_then(|nth| places.get(nth));
            if let Some(Some((node, _))) = index.and_then(|index| found.get_mut(*index)) {
                let NodeProviderRow(provider) = decode_row("providers", &row)?;
                node.providers.push(provider);
            }
        }
        Ok(found)
    }

    /// Deletes a provider with its capabilities; its agents go offline and become unassigned. Returns the epoch that
    /// the provider had (`None` if it did not exist), and the recorded events.
    pub async fn remove_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        at: DateTime<Utc>,
    ) -> StoreResult<(Option<i64>, RecordedEvents)> {
        let doing = "removing a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Provider before agents, as at the end of a connection. A connection that still exists finds no row with its
        // epoch any more, so all its changes are refused.
        let deleted: Option<(i64, bool)> = sqlx::query_as(
            "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3
          RETURNING epoch, gateway_id IS NOT NULL",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(provider)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(
            // Also without a row of the provider: agents keep the name of one that has deregistered.
            "WITH hosted AS MATERIALIZED (
                 SELECT agent_id, name, status FROM agents
                  WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND deleted_at IS NULL
                  ORDER BY agent_id FOR UPDATE
             ), unassigned AS (
                 UPDATE agents a SET provider = NULL, status = 'offline', rebound_at = relay_now(),
                        last_seen_at = greatest(a.last_seen_at, $4)
                   FROM hosted h WHERE a.workspace_id = $1 AND a.agent_id = h.agent_id
             )
             SELECT agent_id, name, status FROM hosted ORDER BY agent_id",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(provider)
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let agents: Vec<(AgentId, String, AgentStatus)> = decode_rows("agents", &rows)?;
        capabilities::remove_capabilities(&mut tx, ProviderKey { scope, node, provider }).await?;
        let were_online = agents.iter().filter(|(_, _, status)| *status != AgentStatus::Offline);
        let mut events: Vec<Event> =
            were_online.map(|(id, name, _)| status_event(*id, name, AgentStatus::Offline)).collect();
        if deleted.is_some_and(|(_, was_connected)| was_connected) {
            let (workspace, node) = ([scope.workspace_id()], [node.clone()]);
            let offline = presence::brokers_without_provider(&mut tx, &workspace, &node).await?;
            events.extend(offline.iter().map(|node| node.offline_event("deregistered")));
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok((deleted.map(|(epoch, _)| epoch), recorded))
    }
}

fn bind_nodes<'q>(statement: &'static str, nodes: &[(WorkspaceScope, NodeId)]) -> Query<'q, Postgres, PgArguments> {
    sqlx::query(statement)
        .bind(nodes.iter().map(|(scope, _)| scope.workspace_id()).collect::<Vec<WorkspaceId>>())
        .bind(nodes.iter().map(|(_, node)| node.clone()).collect::<Vec<NodeId>>())
}

fn decode_node(row: &PgRow) -> StoreResult<Node> {
    decode_row("nodes", row).map(|NodeRow(node)| node)
}

#[derive(sqlx::FromRow)]
struct SealedColumns {
    sealed_key_id: Option<String>,
    sealed: Option<Vec<u8>>,
}
