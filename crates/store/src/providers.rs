//! Provider connections: registration with epochs, heartbeats, disconnects.
//!
//! What a connection may change about its node is guarded by its epoch in the WHERE (invariant 5).

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope, takeover::Incumbent};
use sqlx::{PgConnection, Row};

use crate::{
    Store, StoreError, StoreResult, capabilities,
    events::{self, NewEvent, Recorded, status_event},
    patience::{PATIENCE, Patient as _},
    presence::{self, Broker},
    redispatch,
};

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
    /// Whether it connects at all: nodes that are pushed to or whose agents claim do not.
    pub has_socket: bool,
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

/// What a connection claims a provider with.
#[derive(Debug, Clone)]
pub struct Claim<'a> {
    /// The epoch that it takes over from; none: there is no row yet.
    pub expected_epoch: Option<i64>,
    /// The gateway with the socket.
    pub gateway: GatewayId,
    /// A fresh id for each capability, which may become an action.
    pub action_ids: &'a [i64],
}

/// What came of a registration.
#[derive(Debug)]
pub enum Registered {
    /// The provider is this connection's, under this epoch.
    Taken {
        /// The fence of everything that the connection changes.
        epoch: i64,
        /// That the node came online, if it did.
        recorded: Recorded,
    },
    /// Somebody else registered since the holder was read: look again.
    Raced,
    /// Another node has the name.
    NameConflict,
    /// An action of this name is somebody else's.
    ActionConflict(String),
    /// The node is gone.
    NoNode,
}

impl Store {
    /// A node by id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn node_identity(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<Option<NodeIdentity>> {
        let row: Option<(String, String, bool)> =
            sqlx::query_as("SELECT name, role, kind = 'ws' FROM nodes WHERE workspace_id = $1 AND node_id = $2")
                .bind(scope.workspace_id().get())
                .bind(node.as_str())
                .fetch_optional(&self.pool)
                .patiently()
                .await
                .map_err(StoreError::from_sqlx("reading a node"))?;
        Ok(row.map(|(name, role, has_socket)| NodeIdentity { name, direct: role == "direct", has_socket }))
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

    /// Registers a provider's connection, taking over from the holder with the claim's epoch. The node takes the name that the registration gives. With its first provider a node comes
    /// online, which is recorded unless it is a direct one.
    ///
    /// A first epoch is the time in milliseconds, so that epochs rise even over a row that was removed
    /// and made again: a connection from before never passes the fence.
    ///
    /// What it advertises becomes actions.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn register_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        claim: Claim<'_>,
        registration: &Registration,
        at: DateTime<Utc>,
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
        let direct = role == "direct";
        let was_connected = direct || is_connected(&mut tx, scope, node, &registration.provider).await?;
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
                    handlers_live = excluded.handlers_live, load = 0, load_measured = false,
                    registered_at = now(), last_heartbeat_at = now()
              WHERE p.epoch = $5
             RETURNING epoch",
        )
        .bind(workspace)
        .bind(node.as_str())
        .bind(registration.provider.as_str())
        .bind(&registration.instance_id)
        .bind(claim.expected_epoch)
        .bind(claim.gateway.get())
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
        if !direct {
            let Registration { provider, capabilities, .. } = registration;
            let stored =
                capabilities::replace(&mut tx, scope, node, provider, capabilities, claim.action_ids, at).await?;
            if let Err(name) = stored {
                return Ok(Registered::ActionConflict(name));
            }
            redispatch::wake_waiting(&mut tx, scope, node, provider).await?;
        }
        let mut events = Vec::new();
        if !was_connected && presence::is_only_provider(&mut tx, scope, node, &registration.provider).await? {
            let name = registration.node_name.clone();
            events.push(Broker { scope, node_id: node.clone(), name }.online());
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Registered::Taken { epoch, recorded })
    }

    /// A provider's connection ended: it is disconnected and its agents are offline. Returns what was recorded
    /// of that; `None` when this epoch did not hold it any more.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn disconnect_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        epoch: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "disconnecting a provider";
        let work = async {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            let Some(ended) = end_connection(&mut tx, scope, node, provider, epoch, at).await? else { return Ok(None) };
            finish(tx, scope, ended, "disconnected", at).await.map(Some)
        };
        tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| Err(StoreError::still_away(doing)))
    }

    /// A provider leaves for good: its row goes with its capabilities, its agents are offline. `None` as
    /// above.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn deregister_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
        epoch: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "removing a provider";
        let work = async {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            let Some(ended) = end_connection(&mut tx, scope, node, provider, epoch, at).await? else { return Ok(None) };
            sqlx::query(
                "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4",
            )
            .bind(scope.workspace_id().get())
            .bind(node.as_str())
            .bind(provider.as_str())
            .bind(epoch)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
            capabilities::forget(&mut tx, scope, node, provider).await?;
            finish(tx, scope, ended, "deregistered", at).await.map(Some)
        };
        tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| Err(StoreError::still_away(doing)))
    }
}

/// Whether a provider counts as connected. Its row, if there is one, stays as it is until the commit.
async fn is_connected(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
) -> StoreResult<bool> {
    let connected: Option<bool> = sqlx::query_scalar(
        "SELECT gateway_id IS NOT NULL FROM providers
          WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 FOR UPDATE",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(provider.as_str())
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("locking a provider"))?;
    Ok(connected.unwrap_or(false))
}

/// A connection that was ended.
struct Ended {
    node_id: NodeId,
    direct: bool,
    offline: Vec<NewEvent>,
}

// Agents are locked in order. One of no particular provider goes offline with the node's last one. What an agent called
// before this does not bring it back: such notes may be written later. How many agents the provider runs stays as it
// last said: it comes back with them, and has as little room until its next heartbeat.
const END_CONNECTION: &str = "
WITH gone AS (
    UPDATE providers SET gateway_id = NULL, handlers_live = false, load = 0
     WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4 AND gateway_id IS NOT NULL
 RETURNING workspace_id, node_id, provider
), theirs AS MATERIALIZED (
    SELECT a.agent_id
      FROM agents a JOIN gone USING (workspace_id, node_id)
     WHERE a.deleted_at IS NULL AND a.status <> 'offline'
       AND (a.provider = gone.provider
            OR a.provider IS NULL AND NOT EXISTS (
               SELECT 1 FROM providers p
                WHERE p.workspace_id = gone.workspace_id AND p.node_id = gone.node_id
                  AND p.provider <> gone.provider AND p.gateway_id IS NOT NULL))
     ORDER BY a.agent_id FOR UPDATE OF a
), offline AS (
    UPDATE agents a SET status = 'offline', last_seen_at = greatest(a.last_seen_at, $5)
      FROM theirs WHERE a.workspace_id = $1 AND a.agent_id = theirs.agent_id
 RETURNING a.agent_id, a.name
)
SELECT coalesce((SELECT role = 'direct' FROM nodes WHERE workspace_id = $1 AND node_id = $2), true) AS direct,
       ARRAY(SELECT agent_id FROM offline ORDER BY agent_id) AS agents,
       ARRAY(SELECT name FROM offline ORDER BY agent_id) AS names
  FROM gone";

/// Ends the connection of this epoch. `None` when it has been ended or superseded.
async fn end_connection(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
    epoch: i64,
    at: DateTime<Utc>,
) -> StoreResult<Option<Ended>> {
    let row = sqlx::query(END_CONNECTION)
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(provider.as_str())
        .bind(epoch)
        .bind(at)
        .fetch_optional(tx)
        .await
        .map_err(StoreError::from_sqlx("ending a provider's connection"))?;
    let Some(row) = row else { return Ok(None) };
    let agents = row.get::<Vec<i64>, _>("agents").into_iter().zip(row.get::<Vec<String>, _>("names"));
    let offline = agents.map(|(id, name)| status_event(AgentId::new(id), &name, "offline")).collect();
    Ok(Some(Ended { node_id: node.clone(), direct: row.get("direct"), offline }))
}

/// Records what the end of a connection changed, and commits.
async fn finish(
    mut tx: sqlx::PgTransaction<'_>,
    scope: WorkspaceScope,
    ended: Ended,
    reason: &'static str,
    at: DateTime<Utc>,
) -> StoreResult<Recorded> {
    let mut events = ended.offline;
    if !ended.direct {
        let (workspace, node) = ([scope.workspace_id().get()], [ended.node_id.to_string()]);
        let gone = presence::brokers_without_provider(&mut tx, &workspace, &node).await?;
        events.extend(gone.iter().map(|node| node.offline(reason)));
    }
    let recorded = events::append(&mut tx, scope, at, events).await?;
    tx.commit().await.map_err(StoreError::from_sqlx("ending a provider's connection"))?;
    Ok(recorded)
}
