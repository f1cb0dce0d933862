//! Provider connections: registration with epochs, and disconnection. Main types: [`ProviderRegistration`] and
//! [`RegisterOutcome`]; called by the engine's provider use cases.
//!
//! Every change by a connection repeats its epoch in the WHERE (invariant 5).

use chrono::{DateTime, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    ActionId, AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    agents::AgentStatus,
    nodes::{MAX_PROVIDERS, NODE_RETENTION, takeover::Incumbent},
};

use crate::{
    Store, StoreError, StoreResult,
    actions::redispatch,
    codes::{BROKER, DIRECT},
    connections::{DatabaseSession, Transaction},
    events::{self, Event, RecordedEvents, status_event},
    nodes::{
        capabilities,
        fence::{Fence, ProviderKey},
        presence::{self, Broker},
    },
    statement_timeout::{STATEMENT_TIMEOUT, StatementTimeout as _},
};

/// Difference between the clocks of two gateways. Requests at nearly the same time take over from each other.
pub(super) const CLOCK_TOLERANCE: TimeDelta = TimeDelta::seconds(1);

/// Current holder of a provider.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ProviderHolder {
    /// Epoch of the row; a registration names the epoch that it replaces.
    pub epoch: i64,
    /// Instance that registered last.
    pub instance_id: String,
    /// Gateway that holds the socket, if the provider is connected and the gateway's lease is valid.
    pub gateway_id: Option<GatewayId>,
}

impl ProviderHolder {
    /// Classifies the holder relative to a registering instance.
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

/// Content of a provider's registration.
#[derive(Debug, Clone)]
pub struct ProviderRegistration {
    /// Name of the node; a different one renames the node.
    pub node_name: String,
    pub provider: ProviderName,
    /// Id of this run of the provider.
    pub instance_id: String,
    /// JSON array of capabilities: `[{name, kind, …}]`.
    pub capabilities: serde_json::Value,
    /// `true` if the capabilities contain `relay:delivery-cursor-v1`.
    pub cursor_granted: bool,
    pub tags: Vec<String>,
    pub version: String,
    /// Machine of a direct node if the client names it.
    pub machine_id: Option<String>,
    /// Maximum number of agents; 0 means unlimited.
    pub max_agents: i32,
}

/// Claim of a connection on a provider.
#[derive(Debug, Clone)]
pub struct ProviderClaim<'a> {
    /// Epoch that it replaces; `None` if the provider has no row.
    pub expected_epoch: Option<i64>,
    /// Gateway that holds the socket.
    pub gateway: GatewayId,
    /// One id per capability, for the actions that capabilities define.
    pub action_ids: &'a [ActionId],
    /// Time when the connection asked for the provider, before any wait for Postgres.
    pub requested_at: DateTime<Utc>,
}

/// Result of a registration.
#[derive(Debug)]
pub enum RegisterOutcome {
    /// The connection holds the provider.
    Registered {
        /// Epoch that fences all changes by the connection.
        epoch: i64,
        /// Event of the node coming online, if it was offline.
        recorded: RecordedEvents,
    },
    /// Another connection registered since the holder was read; the caller reads it again.
    Raced,
    /// The holder asked for the provider later: this registration waited longer for Postgres.
    Superseded,
    NameConflict,
    /// Another handler owns this action name.
    ActionConflict(String),
    /// The node does not exist.
    NoNode,
    /// The node has as many other providers as it may.
    TooManyProviders,
}

const LOCK_BROKER: &str =
    formatcp!("SELECT name FROM nodes WHERE workspace_id = $1 AND node_id = $2 AND role = '{BROKER}' FOR UPDATE");

impl Store {
    /// Returns the holder of a provider. A holder whose gateway lease expired counts as disconnected.
    pub async fn provider_holder(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        provider: &ProviderName,
    ) -> StoreResult<Option<ProviderHolder>> {
        sqlx::query_as(
            "SELECT p.epoch, p.instance_id, g.gateway_id
               FROM providers p
               LEFT JOIN gateways g ON g.gateway_id = p.gateway_id AND g.lease_until > relay_now()
              WHERE p.workspace_id = $1 AND p.node_id = $2 AND p.provider = $3",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(provider)
        .fetch_optional(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("reading a provider's holder"))
    }

    /// Registers the connection of a broker's provider, which replaces the connection with the claim's epoch. The node
    /// takes the name of the registration, and capabilities define actions. The first connected provider of a broker
    /// records that the node is online. Direct nodes register by [`Store::register_direct`].
    ///
    /// The first epoch of a provider is the time in milliseconds, so that epochs increase even if the row was deleted
    /// and created again: an older connection never passes the fence.
    pub async fn register_provider(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        claim: ProviderClaim<'_>,
        registration: &ProviderRegistration,
        at: DateTime<Utc>,
    ) -> StoreResult<RegisterOutcome> {
        let doing = "registering a provider";
        let key = ProviderKey { scope, node, provider: &registration.provider };
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Locks the node: registrations of its providers are serialised.
        let name: Option<String> = sqlx::query_scalar(LOCK_BROKER)
            .bind(scope.workspace_id())
            .bind(node)
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(name) = name else { return Ok(RegisterOutcome::NoNode) };
        if name != registration.node_name {
            match rename_node(&mut tx, key, &registration.node_name).await {
                Err(error) if error.violates("nodes_name_is_unique") => return Ok(RegisterOutcome::NameConflict),
                other => other?,
            }
        }
        if claim.expected_epoch.is_none() && !make_room(&mut tx, key).await? {
            return Ok(RegisterOutcome::TooManyProviders);
        }
        note_connection(&mut tx, key).await?;
        let was_connected = is_connected(&mut tx, key).await?;
        let Some(epoch) = take_provider(&mut tx, key, &claim, registration).await? else {
            let is_late = is_held_by_later_request(&mut tx, key, claim.requested_at).await?;
            return Ok(if is_late { RegisterOutcome::Superseded } else { RegisterOutcome::Raced });
        };
        let capabilities = &registration.capabilities;
        let stored = capabilities::replace_capabilities(&mut tx, key, capabilities, claim.action_ids, at).await?;
        if let Err(name) = stored {
            return Ok(RegisterOutcome::ActionConflict(name));
        }
        redispatch::wake_waiting(&mut tx, key).await?;
        let mut events = Vec::new();
        if !was_connected && presence::is_only_provider(&mut tx, key).await? {
            let name = registration.node_name.clone();
            events.push(Broker { scope, node_id: node.clone(), name }.online_event());
        }
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(RegisterOutcome::Registered { epoch, recorded })
    }

    /// Returns the epoch of exactly this registration, if it was committed and still holds the provider.
    pub async fn committed_registration(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        claim: &ProviderClaim<'_>,
        registration: &ProviderRegistration,
    ) -> StoreResult<Option<i64>> {
        sqlx::query_scalar(
            "SELECT epoch FROM providers
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3
                AND gateway_id = $4 AND instance_id = $5 AND requested_at = $6",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(&registration.provider)
        .bind(claim.gateway)
        .bind(&registration.instance_id)
        .bind(claim.requested_at)
        .fetch_optional(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("finding a registration"))
    }

    /// Disconnects a provider whose connection ended, and marks its agents offline. Returns the recorded events, or
    /// `None` if this epoch no longer holds the provider.
    pub async fn disconnect_provider(&self, fence: &Fence, at: DateTime<Utc>) -> StoreResult<Option<RecordedEvents>> {
        let doing = "disconnecting a provider";
        let work = async {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            let Some(ended) = end_connection(&mut tx, fence, at).await? else { return Ok(None) };
            commit_end(tx, fence, ended, "disconnected", at).await.map(Some)
        };
        tokio::time::timeout(STATEMENT_TIMEOUT, work).await.unwrap_or_else(|_| Err(StoreError::unavailable(doing)))
    }

    /// Deletes a provider with its capabilities, and marks its agents offline. Returns the recorded events, or `None`
    /// if this epoch no longer holds the provider.
    pub async fn deregister_provider(&self, fence: &Fence, at: DateTime<Utc>) -> StoreResult<Option<RecordedEvents>> {
        let doing = "removing a provider";
        let work = async {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            // Without its provider only this shows that the node was live. First, because a node is locked before its
            // providers.
            note_connection(&mut tx, fence.key()).await?;
            let Some(ended) = end_connection(&mut tx, fence, at).await? else { return Ok(None) };
            sqlx::query(
                "DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4",
            )
            .bind(fence.scope.workspace_id())
            .bind(&fence.node_id)
            .bind(&fence.provider)
            .bind(fence.epoch)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
            capabilities::remove_capabilities(&mut tx, fence.key()).await?;
            commit_end(tx, fence, ended, "deregistered", at).await.map(Some)
        };
        tokio::time::timeout(STATEMENT_TIMEOUT, work).await.unwrap_or_else(|_| Err(StoreError::unavailable(doing)))
    }
}

async fn rename_node(tx: &mut DatabaseSession, key: ProviderKey<'_>, name: &str) -> StoreResult<()> {
    sqlx::query("UPDATE nodes SET name = $3, updated_at = relay_now() WHERE workspace_id = $1 AND node_id = $2")
        .bind(key.scope.workspace_id())
        .bind(key.node)
        .bind(name)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("renaming a node"))?;
    Ok(())
}

/// Returns whether the node has a place for a provider: its own, or one among [`MAX_PROVIDERS`]. A provider that was
/// disconnected for a day leaves its place, so that names which change with each start of a program do not fill the
/// node. The node is locked, so no other one is added meanwhile.
pub(super) async fn make_room(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<bool> {
    let doing = "making room for a provider";
    let has_place: bool = sqlx::query_scalar(
        "SELECT count(*) < $4 OR bool_or(provider = $3) FROM providers WHERE workspace_id = $1 AND node_id = $2",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(MAX_PROVIDERS)
    .fetch_one(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    if has_place {
        return Ok(true);
    }
    let removed: Option<ProviderName> = sqlx::query_scalar(
        "DELETE FROM providers
          WHERE workspace_id = $1 AND node_id = $2 AND gateway_id IS NULL AND provider = (
                SELECT provider FROM providers
                 WHERE workspace_id = $1 AND node_id = $2 AND provider <> $3 AND gateway_id IS NULL
                   AND coalesce(disconnected_at, last_heartbeat_at) < relay_now() - make_interval(secs => $4)
                 ORDER BY coalesce(disconnected_at, last_heartbeat_at) LIMIT 1)
      RETURNING provider",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(NODE_RETENTION.as_secs_f64())
    .fetch_optional(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    let Some(removed) = removed else { return Ok(false) };
    capabilities::remove_capabilities(tx, ProviderKey { provider: &removed, ..key }).await?;
    Ok(true)
}

/// Notes that the node was connected, for as long as it exists.
async fn note_connection(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<()> {
    sqlx::query("UPDATE nodes SET last_connected_at = relay_now() WHERE workspace_id = $1 AND node_id = $2")
        .bind(key.scope.workspace_id())
        .bind(key.node)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("noting a connection of a node"))?;
    Ok(())
}

/// Returns whether the provider is held by a connection that asked for it later. Gateways' clocks may differ by
/// [`CLOCK_TOLERANCE`]. The node is locked, so no other registration intervenes.
async fn is_held_by_later_request(
    tx: &mut DatabaseSession,
    key: ProviderKey<'_>,
    requested_at: DateTime<Utc>,
) -> StoreResult<bool> {
    let later: Option<bool> = sqlx::query_scalar(
        "SELECT gateway_id IS NOT NULL AND coalesce(requested_at > $4, false) FROM providers
          WHERE workspace_id = $1 AND node_id = $2 AND provider = $3",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(requested_at + CLOCK_TOLERANCE)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("reading when a provider was requested"))?;
    // Without a provider there is no later request.
    Ok(later.unwrap_or(false))
}

/// Writes the provider's row with a higher epoch. Returns `None` if the row has another epoch than the claim expects,
/// or a later request.
///
/// The epoch is the time in milliseconds, so that a registration after a failover has another one than a registration
/// that the failover has lost: the end of that connection is recorded after the recovery.
async fn take_provider(
    tx: &mut DatabaseSession,
    key: ProviderKey<'_>,
    claim: &ProviderClaim<'_>,
    registration: &ProviderRegistration,
) -> StoreResult<Option<i64>> {
    sqlx::query_scalar(
        "INSERT INTO providers AS p (workspace_id, node_id, provider, instance_id, epoch, gateway_id,
                capabilities, cursor_granted, tags, version, max_agents, handlers_live,
                registered_at, last_heartbeat_at, requested_at)
         VALUES ($1, $2, $3, $4, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, $6, $7, $8, $9, $10, $11, $12,
                 relay_now(), relay_now(), $13)
         ON CONFLICT (workspace_id, node_id, provider) DO UPDATE
            SET instance_id = excluded.instance_id, epoch = greatest(p.epoch + 1, excluded.epoch),
                gateway_id = excluded.gateway_id, capabilities = excluded.capabilities,
                cursor_granted = excluded.cursor_granted, tags = excluded.tags,
                version = excluded.version, max_agents = excluded.max_agents,
                handlers_live = excluded.handlers_live, load = 0, load_measured = false,
                registered_at = relay_now(), last_heartbeat_at = relay_now(), disconnected_at = NULL,
                requested_at = excluded.requested_at
          WHERE p.epoch = $5 AND NOT (p.gateway_id IS NOT NULL AND coalesce(p.requested_at > $14, false))
         RETURNING epoch",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .bind(&registration.instance_id)
    .bind(claim.expected_epoch)
    .bind(claim.gateway)
    .bind(&registration.capabilities)
    .bind(registration.cursor_granted)
    .bind(&registration.tags)
    .bind(&registration.version)
    .bind(registration.max_agents)
    .bind(registration.capabilities.as_array().is_some_and(|list| !list.is_empty()))
    .bind(claim.requested_at)
    .bind(claim.requested_at + CLOCK_TOLERANCE)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("registering a provider"))
}

/// Returns whether a provider counts as connected, and locks its row until the commit.
async fn is_connected(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<bool> {
    let connected: Option<bool> = sqlx::query_scalar(
        "SELECT gateway_id IS NOT NULL FROM providers
          WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 FOR UPDATE",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("locking a provider"))?;
    Ok(connected == Some(true))
}

/// Connection that was ended, with the agents that went offline with it.
#[derive(sqlx::FromRow)]
struct EndedConnection {
    /// `true` as well if the node was deleted: then no event is recorded for it.
    direct: bool,
    agents: Vec<AgentId>,
    /// Names of `agents`, in the same order.
    names: Vec<String>,
}

// Agents are locked in id order. An unassigned agent goes offline with the last connected provider of its node.
// `last_seen_at` advances, because activity from before may be recorded later and must not bring the agent online
// again. `active_agents` keeps the last reported value: the provider returns with these agents and has no more room
// until its next heartbeat.
const END_CONNECTION: &str = formatcp!(
    "
WITH ended AS (
    UPDATE providers SET gateway_id = NULL, disconnected_at = relay_now(), handlers_live = false, load = 0
     WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4 AND gateway_id IS NOT NULL
 RETURNING workspace_id, node_id, provider
), hosted AS MATERIALIZED (
    SELECT a.agent_id
      FROM agents a JOIN ended USING (workspace_id, node_id)
     WHERE a.deleted_at IS NULL AND a.status <> 'offline'
       AND (a.provider = ended.provider
            OR a.provider IS NULL AND NOT EXISTS (
               SELECT 1 FROM providers p
                WHERE p.workspace_id = ended.workspace_id AND p.node_id = ended.node_id
                  AND p.provider <> ended.provider AND p.gateway_id IS NOT NULL))
     ORDER BY a.agent_id FOR UPDATE OF a
), offline AS (
    UPDATE agents a SET status = 'offline', last_seen_at = greatest(a.last_seen_at, $5)
      FROM hosted h WHERE a.workspace_id = $1 AND a.agent_id = h.agent_id
 RETURNING a.agent_id, a.name
)
SELECT coalesce((SELECT role = '{DIRECT}' FROM nodes WHERE workspace_id = $1 AND node_id = $2), true) AS direct,
       ARRAY(SELECT agent_id FROM offline ORDER BY agent_id) AS agents,
       ARRAY(SELECT name FROM offline ORDER BY agent_id) AS names
  FROM ended"
);

/// Ends the connection of this epoch. Returns `None` if it has ended or was superseded.
async fn end_connection(
    tx: &mut DatabaseSession,
    fence: &Fence,
    at: DateTime<Utc>,
) -> StoreResult<Option<EndedConnection>> {
    sqlx::query_as(END_CONNECTION)
        .bind(fence.scope.workspace_id())
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .bind(at)
        .fetch_optional(tx)
        .await
        .map_err(StoreError::from_sqlx("ending a provider's connection"))
}

/// Records the events of an ended connection, and commits.
async fn commit_end(
    mut tx: Transaction,
    fence: &Fence,
    ended: EndedConnection,
    reason: &'static str,
    at: DateTime<Utc>,
) -> StoreResult<RecordedEvents> {
    let agents = ended.agents.iter().zip(&ended.names);
    let mut events: Vec<Event> = agents.map(|(id, name)| status_event(*id, name, AgentStatus::Offline)).collect();
    if !ended.direct {
        let (workspace, node) = ([fence.scope.workspace_id()], [fence.node_id.clone()]);
        let offline = presence::brokers_without_provider(&mut tx, &workspace, &node).await?;
        events.extend(offline.iter().map(|node| node.offline_event(reason)));
    }
    let recorded = events::append(&mut tx, fence.scope, at, events).await?;
    tx.commit().await.map_err(StoreError::from_sqlx("ending a provider's connection"))?;
    Ok(recorded)
}
