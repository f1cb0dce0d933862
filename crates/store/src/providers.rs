//! Provider connections: registration with epochs, heartbeats, disconnects.
//!
//! What a connection may change about its node is guarded by its epoch in the WHERE (invariant 5).

use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceScope, takeover::Incumbent};
use sqlx::Row;

use crate::{Store, StoreError, StoreResult, patience::Patient as _};

/// Who holds a provider now.
#[derive(Debug, Clone)]
pub struct Holder {
    /// The row's epoch; a registration names the epoch that it takes over from.
    pub epoch: i64,
    /// The instance that registered last.
    pub instance_id: String,
    /// The gateway with its socket, if connected and that gateway's lease runs.
    pub gateway_id: Option<GatewayId>,
}

impl Holder {
    /// How the holder relates to a registering instance.
    #[must_use]
    pub fn incumbent(holder: Option<&Self>, instance_id: &str) -> Incumbent {
        match holder {
            Some(h) if h.gateway_id.is_none() => Incumbent::None,
            None => Incumbent::None,
            Some(h) if h.instance_id == instance_id => Incumbent::SameInstance,
            Some(_) => Incumbent::Other,
        }
    }
}

/// A node as its socket needs it.
#[derive(Debug, Clone)]
pub struct NodeIdentity {
    /// The node's name.
    pub name: String,
    /// Whether it is one agent's own connection.
    pub direct: bool,
}

/// What a provider says of itself.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The node's name; a new one renames the node.
    pub node_name: String,
    /// The provider.
    pub provider: ProviderName,
    /// This run of it.
    pub instance_id: String,
    /// Capabilities as JSON: `[{name, kind, …}]`.
    pub capabilities: serde_json::Value,
    /// Whether `relay:delivery-cursor-v1` is among them.
    pub cursor_granted: bool,
    /// Tags.
    pub tags: Vec<String>,
    /// Free text.
    pub version: String,
    /// 0 is unlimited.
    pub max_agents: i32,
}

/// What came of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registered {
    /// The provider is this connection's, under this epoch.
    Taken {
        /// The fence of everything that the connection changes.
        epoch: i64,
    },
    /// Somebody else registered since the holder was read: look again.
    Raced,
    /// Another node has the name.
    NameConflict,
    /// The node is gone.
    NoNode,
}

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
    /// Agents that it runs.
    pub active_agents: i32,
    /// Whether its handlers answer.
    pub handlers_live: bool,
    /// The capability list, if the heartbeat carried one.
    pub capabilities: Option<serde_json::Value>,
}

impl Store {
    /// A node by id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn node_identity(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<NodeIdentity>> {
        let row: Option<(String, String)> =
            sqlx::query_as("SELECT name, role FROM nodes WHERE workspace_id = $1 AND node_id = $2")
                .bind(scope.workspace_id().get())
                .bind(node.as_str())
                .fetch_optional(&self.pool)
                .patiently()
                .await
                .map_err(StoreError::from_sqlx("reading a node"))?;
        Ok(row.map(|(name, role)| NodeIdentity { name, direct: role == "direct" }))
    }

    /// Who holds a provider, judged by the holder's gateway lease.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn provider_holder(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> StoreResult<Option<Holder>> {
        let row: Option<(i64, String, Option<i64>)> = sqlx::query_as(
            "SELECT p.epoch, p.instance_id, g.gateway_id
               FROM providers p
               LEFT JOIN gateways g ON g.gateway_id = p.gateway_id AND g.lease_until > now()
              WHERE p.workspace_id = $1 AND p.node_id = $2 AND p.provider = $3",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .fetch_optional(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("reading a provider's holder"))?;
        Ok(row.map(|(epoch, instance_id, gateway)| Holder {
            epoch,
            instance_id,
            gateway_id: gateway.map(GatewayId::new),
        }))
    }

    /// Registers a provider's connection, taking over from the holder with `expected_epoch` (none: no
    /// row yet). The node takes the name that the registration gives.
    ///
    /// A first epoch is the time in milliseconds, so that epochs rise even over a row that was removed
    /// and made again: a connection from before never passes the fence.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn register_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        expected_epoch: Option<i64>,
        gateway: GatewayId,
        registration: &Registration,
    ) -> StoreResult<Registered> {
        let workspace = scope.workspace_id().get();
        let doing = "registering a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The node row serialises registrations of its providers.
        let node_row: Option<(String, String)> =
            sqlx::query_as("SELECT name, role FROM nodes WHERE workspace_id = $1 AND node_id = $2 FOR UPDATE")
                .bind(workspace)
                .bind(node.as_str())
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        let Some((name, role)) = node_row else { return Ok(Registered::NoNode) };
        // A direct node's name follows from its agent and is not for its client to change.
        if name != registration.node_name && role != "direct" {
            let renamed =
                sqlx::query("UPDATE nodes SET name = $3, updated_at = now() WHERE workspace_id = $1 AND node_id = $2")
                    .bind(workspace)
                    .bind(node.as_str())
                    .bind(&registration.node_name)
                    .execute(&mut *tx)
                    .await
                    .map_err(StoreError::from_sqlx(doing));
            match renamed {
                Err(error) if error.violates("nodes_name_is_unique") => return Ok(Registered::NameConflict),
                other => other?,
            };
        }
        let epoch: Option<i64> = sqlx::query_scalar(
            "INSERT INTO providers AS p (workspace_id, node_id, provider, instance_id, epoch, gateway_id,
                    capabilities, cursor_granted, tags, version, max_agents, handlers_live,
                    registered_at, last_heartbeat_at)
             VALUES ($1, $2, $3, $4, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $6, $7, $8, $9, $10, $11, $12, now(), now())
             ON CONFLICT (workspace_id, node_id, provider) DO UPDATE
                SET instance_id = excluded.instance_id, epoch = p.epoch + 1,
                    gateway_id = excluded.gateway_id, capabilities = excluded.capabilities,
                    cursor_granted = excluded.cursor_granted, tags = excluded.tags,
                    version = excluded.version, max_agents = excluded.max_agents,
                    handlers_live = excluded.handlers_live, load = 0, active_agents = 0,
                    registered_at = now(), last_heartbeat_at = now()
              WHERE p.epoch = $5
             RETURNING epoch",
        )
        .bind(workspace)
        .bind(node.as_str())
        .bind(registration.provider.as_str())
        .bind(&registration.instance_id)
        .bind(expected_epoch)
        .bind(gateway.get())
        .bind(&registration.capabilities)
        .bind(registration.cursor_granted)
        .bind(&registration.tags)
        .bind(&registration.version)
        .bind(registration.max_agents)
        .bind(registration.capabilities.as_array().is_some_and(|list| !list.is_empty()))
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(epoch) = epoch else { return Ok(Registered::Raced) };
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Registered::Taken { epoch })
    }

    /// Records heartbeats, set-wise; at most one per provider. Those of an older epoch change nothing.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn record_heartbeats(&self, beats: &[Heartbeat]) -> StoreResult<()> {
        let workspaces: Vec<i64> = beats.iter().map(|b| b.scope.workspace_id().get()).collect();
        let nodes: Vec<&str> = beats.iter().map(|b| b.node_id.as_str()).collect();
        let providers: Vec<&str> = beats.iter().map(|b| b.provider.as_str()).collect();
        let epochs: Vec<i64> = beats.iter().map(|b| b.epoch).collect();
        let loads: Vec<f64> = beats.iter().map(|b| b.load).collect();
        let actives: Vec<i32> = beats.iter().map(|b| b.active_agents).collect();
        let live: Vec<bool> = beats.iter().map(|b| b.handlers_live).collect();
        let capabilities: Vec<Option<&serde_json::Value>> = beats.iter().map(|b| b.capabilities.as_ref()).collect();
        sqlx::query(
            "WITH beats AS (
                 SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[],
                                      $5::float8[], $6::int[], $7::bool[], $8::jsonb[])
                     AS b (workspace_id, node_id, provider, epoch, load, active, live, capabilities)
                  ORDER BY workspace_id, node_id, provider
             ), heard AS (
                 UPDATE providers p
                    SET load = b.load, active_agents = b.active, handlers_live = b.live,
                        capabilities = coalesce(b.capabilities, p.capabilities), last_heartbeat_at = now()
                   FROM beats b
                  WHERE p.workspace_id = b.workspace_id AND p.node_id = b.node_id
                    AND p.provider = b.provider AND p.epoch = b.epoch
              RETURNING p.workspace_id, p.node_id, p.provider
             )
             -- A node that is heard of speaks for its agents, which may never call by themselves.
             UPDATE agents a SET last_seen_at = now()
               FROM heard h
              WHERE a.workspace_id = h.workspace_id AND a.node_id = h.node_id AND a.deleted_at IS NULL
                AND (a.provider IS NULL OR a.provider = h.provider) AND a.status <> 'offline'
                AND a.last_seen_at < now() - interval '30 seconds'",
        )
        .bind(workspaces)
        .bind(nodes)
        .bind(providers)
        .bind(epochs)
        .bind(loads)
        .bind(actives)
        .bind(live)
        .bind(capabilities)
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("recording heartbeats"))?;
        Ok(())
    }

    /// A provider's connection ended: it is disconnected and its agents are offline. Returns whether
    /// this epoch still held it.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn disconnect_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        epoch: i64,
    ) -> StoreResult<bool> {
        let row = sqlx::query(
            "WITH gone AS (
                 UPDATE providers SET gateway_id = NULL, handlers_live = false, active_agents = 0, load = 0
                  WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4
                    AND gateway_id IS NOT NULL
              RETURNING workspace_id, node_id, provider
             ), offline AS (
                 UPDATE agents a SET status = 'offline'
                   FROM gone
                  WHERE a.workspace_id = gone.workspace_id AND a.node_id = gone.node_id
                    AND (a.provider = gone.provider
                         OR a.provider IS NULL AND NOT EXISTS (
                            SELECT 1 FROM providers p
                             WHERE p.workspace_id = gone.workspace_id AND p.node_id = gone.node_id
                               AND p.provider <> gone.provider AND p.gateway_id IS NOT NULL))
                    AND a.deleted_at IS NULL
             )
             SELECT count(*) AS n FROM gone",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .bind(epoch)
        .fetch_one(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("disconnecting a provider"))?;
        Ok(row.get::<i64, _>("n") == 1)
    }

    /// A provider leaves for good: its row goes with its capabilities, its agents are offline.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn deregister_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        epoch: i64,
    ) -> StoreResult<bool> {
        if !self.disconnect_provider(scope, node, provider, epoch).await? {
            return Ok(false);
        }
        let gone = sqlx::query(
            "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .bind(epoch)
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("removing a provider"))?;
        Ok(gone.rows_affected() == 1)
    }
}
