//! Hosting of agents by providers: registration, release and inventories. Main types: [`ListedAgent`] and
//! [`InventoryOutcome`]; called by the engine's provider use cases. Every change is fenced by the epoch of the
//! connection that requests it ([`Fence`]).

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope,
    access::token::{ChangeOrigin, TokenHash},
    actions,
    agents::AgentStatus,
    nodes::TEMPORARY_ABSENCE,
};

use crate::{
    Store, StoreError, StoreResult,
    access::rotation::{TokenRotation, replace_agent_token},
    agents::{
        sessions,
        spawn::{self, InventoryReconciliation, SpawnedAgent},
    },
    connections::DatabaseSession,
    decode::{decode_row, decode_rows},
    events::{self, Event, RecordedEvents, status_event},
    nodes::{assignment::hosts_unassigned, fence::Fence},
};

/// Harness session that an agent continues.
#[derive(Debug, Clone, Copy, Default)]
pub struct SessionHandle<'a> {
    /// Handle that resumes the session; `None` keeps the stored one.
    pub session_ref: Option<&'a str>,
    /// `true` if the session survives the end of its process; `None` keeps the stored value.
    pub resumable: Option<bool>,
}

/// Effect of moving an agent to a provider.
#[derive(Debug)]
pub struct MovedAgent {
    /// Node that it was located on.
    pub left: NodeId,
    /// Tokens that ended. Caches must forget them.
    pub ended_tokens: Vec<TokenHash>,
    /// Includes the agent's end on another node that it ran on.
    pub recorded: RecordedEvents,
}

/// Agent that owns a requested name.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct NameHolder {
    pub agent_id: AgentId,
    pub status: AgentStatus,
    pub node_id: NodeId,
    pub provider: Option<ProviderName>,
}

/// Agent in an inventory.
#[derive(Debug, Clone)]
pub struct ListedAgent {
    pub agent_id: AgentId,
    pub name: String,
    /// Harness handle that resumes the session.
    pub session_ref: Option<String>,
    /// Spawn invocation that started the agent.
    pub invocation: Option<InvocationId>,
}

/// Reason for which an inventory entry is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InventoryConflict {
    /// The agent does not exist or has another name.
    Identity,
    /// The agent is online at another node with a connected provider.
    Location,
    /// The agent is at another node, which is only temporarily unavailable.
    AwaitedLocation,
    /// Another provider of this node hosts the agent.
    Provider,
}

/// Result of an inventory.
#[derive(Debug)]
pub enum InventoryOutcome {
    /// Stored as the complete set of the provider's agents.
    Synced {
        /// Number of agents that were bound or came online.
        rebound: usize,
        /// Previous nodes of agents that moved.
        left: Vec<NodeId>,
        /// Agents of this provider that were not listed and are now offline.
        missing: Vec<AgentId>,
        /// Effect on the provider's spawn and release invocations.
        reconciled: InventoryReconciliation,
        recorded: RecordedEvents,
    },
    /// These entries conflict with other locations. Nothing was changed.
    Conflicts(Vec<(AgentId, InventoryConflict)>),
    /// The connection was superseded.
    Superseded,
}

/// Move of an agent to a provider.
#[derive(Debug, Clone, Copy)]
pub struct HostRequest<'a> {
    pub agent: AgentId,
    /// Id of the binding if the agent has none yet.
    pub binding_id: &'a str,
    pub session: SessionHandle<'a>,
    /// Replaces the agent's token. Within the fence: a superseded connection must not revoke the token in use.
    pub new_token: Option<TokenHash>,
    pub at: DateTime<Utc>,
}

#[derive(sqlx::FromRow)]
struct KnownAgent {
    agent_id: AgentId,
    name: String,
    node_id: NodeId,
    provider: Option<ProviderName>,
    status: AgentStatus,
    /// Node that it runs on, as far as nodes have reported.
    hosted_on: Option<NodeId>,
    /// `true` if a live gateway holds a provider for it at its current location.
    hosted: bool,
    /// `true` if its provider lost the connection a short time ago and did not deregister.
    awaited: bool,
}

impl Store {
    /// Returns the agent that owns a name.
    pub async fn agent_holding_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<NameHolder>> {
        let row = sqlx::query(
            "SELECT agent_id, status, node_id, provider FROM agents
              WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an agent by name"))?;
        row.map(|row| decode_row("agents", &row)).transpose()
    }

    /// Moves an agent to the fence's node and provider and marks it online. Returns `None` if the fence does not hold
    /// or the agent was deleted.
    ///
    /// `FOR SHARE` on the provider blocks a takeover until the commit; several agents may register concurrently.
    pub async fn host_agent(&self, fence: &Fence, request: HostRequest<'_>) -> StoreResult<Option<MovedAgent>> {
        let HostRequest { agent, binding_id, session, new_token, at } = request;
        let doing = "moving an agent to a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The provider before the agent, as at the end of a connection: each CTE reads the one before it, otherwise the
        // plan would choose the order of the locks.
        //
        // An agent that runs again takes its deliveries itself, so they must not become dead letters any more.
        let moved = sqlx::query(
            "WITH held AS (
                 SELECT 1 FROM providers
                  WHERE workspace_id = $1 AND node_id = $3 AND provider = $4 AND epoch = $5 FOR SHARE
             ), before AS (
                 SELECT node_id, name, status, hosted_on FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL AND EXISTS (SELECT 1 FROM held)
                    FOR UPDATE
             ), moved AS (
                 UPDATE agents
                    SET node_id = $3, provider = $4, status = 'active', last_seen_at = relay_now(),
                        binding_id = coalesce(binding_id, $6), bound_at = coalesce(bound_at, relay_now()),
                        rebound_at = CASE WHEN bound_at IS NULL THEN NULL ELSE relay_now() END,
                        session_ref = coalesce($7, session_ref), resumable = coalesce($8, resumable),
                        session_node_id = $3, hosted_on = $3, mailbox_orphaned = false
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL
                    AND EXISTS (SELECT 1 FROM before)
              RETURNING agent_id
             )
             SELECT before.node_id, before.name, before.status, before.hosted_on FROM before, moved",
        )
        .bind(fence.scope.workspace_id())
        .bind(agent)
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .bind(binding_id)
        .bind(session.session_ref)
        .bind(session.resumable)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(moved) = moved else { return Ok(None) };
        let (left, name, status, host): (NodeId, String, AgentStatus, Option<NodeId>) = decode_row("agents", &moved)?;
        let ended_tokens = match new_token {
            None => Vec::new(),
            Some(token) => {
                let by = ChangeOrigin::Node;
                let rotation = TokenRotation { agent, token, by, presented_generation: None, at };
                // Never `None`: the statement before has locked the agent.
                replace_agent_token(&mut tx, fence.scope, &rotation).await?.unwrap_or_default()
            }
        };
        let mut events = if status == AgentStatus::Active {
            Vec::new()
        } else {
            vec![status_event(agent, &name, AgentStatus::Active)]
        };
        let hosts = host.into_iter().map(|host| (agent, host));
        events.extend(sessions::move_events(&mut tx, fence.scope, &fence.node_id, hosts).await?);
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        // A repetition would replace the token once more.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some(MovedAgent { left, ended_tokens, recorded }))
    }

    /// Unbinds an agent from this provider: the agent returns to its implicit direct node, offline. `last_seen_at`
    /// advances to `at`, so activity notes from before do not bring it online again. Returns `None` if the agent is not
    /// hosted here.
    pub async fn unbind_hosted_agent(
        &self,
        fence: &Fence,
        agent: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "unbinding an agent from a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let left = sqlx::query(
            "WITH here AS MATERIALIZED (
                 SELECT agent_id, name, status, coalesce(hosted_on = $3, false) AS was_hosted FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND node_id = $3 AND deleted_at IS NULL
                    AND (provider IS NULL OR provider = $4)
                    AND EXISTS (SELECT 1 FROM providers WHERE workspace_id = $1 AND node_id = $3
                                   AND provider = $4 AND epoch = $5)
                    FOR UPDATE
             )
             UPDATE agents a
                SET node_id = $6, provider = NULL, status = 'offline', last_seen_at = greatest(a.last_seen_at, $7),
                    binding_id = NULL, bound_at = NULL, rebound_at = NULL, hosted_on = NULL,
                    mailbox_orphaned = coalesce(NOT a.resumable, false)
               FROM here
              WHERE a.workspace_id = $1 AND a.agent_id = here.agent_id
          RETURNING here.name, here.status, here.was_hosted",
        )
        .bind(fence.scope.workspace_id())
        .bind(agent)
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .bind(NodeId::direct(agent))
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(left) = left else { return Ok(None) };
        let (name, status, was_hosted): (String, AgentStatus, bool) = decode_row("agents", &left)?;
        let mut events = if status == AgentStatus::Offline {
            Vec::new()
        } else {
            vec![status_event(agent, &name, AgentStatus::Offline)]
        };
        // The end of a released agent was recorded with its release.
        if was_hosted {
            events.extend(sessions::exit_events(&mut tx, fence.scope, &fence.node_id, &[agent], "deregistered").await?);
        }
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Applies a provider's inventory: listed agents are bound and online, the provider's other agents go offline.
    /// Records the changes.
    pub async fn sync_inventory(
        &self,
        fence: &Fence,
        listed: &[ListedAgent],
        at: DateTime<Utc>,
    ) -> StoreResult<InventoryOutcome> {
        let doing = "applying an inventory";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Provider before agents, as at the end of a connection. A take-over waits until the inventory is applied.
        if !lock_provider(&mut tx, fence).await? {
            return Ok(InventoryOutcome::Superseded);
        }
        let known = lock_listed(&mut tx, fence, listed).await?;
        let changes = match check_listed(fence, listed, &known) {
            Ok(changes) => changes,
            Err(conflicts) => return Ok(InventoryOutcome::Conflicts(conflicts)),
        };
        bind_listed(&mut tx, fence, listed).await?;
        let missing = mark_missing(&mut tx, fence, listed, at).await?;
        let mut events = changes.events;
        let offline: Vec<&MissingAgent> = missing.iter().filter(|agent| agent.was_online).collect();
        events.extend(offline.iter().map(|agent| status_event(agent.agent_id, &agent.name, AgentStatus::Offline)));
        let ended: Vec<AgentId> = missing.iter().filter(|agent| agent.was_hosted).map(|agent| agent.agent_id).collect();
        let missing: Vec<AgentId> = offline.into_iter().map(|agent| agent.agent_id).collect();
        let spawned: Vec<SpawnedAgent> = listed.iter().filter_map(spawned_agent).collect();
        // Agents are locked before invocations, as when an agent is linked to its spawn.
        let reconciled = spawn::reconcile_spawns(&mut tx, fence, &spawned, at).await?;
        let (scope, node) = (fence.scope, &fence.node_id);
        events.extend(sessions::exit_events(&mut tx, scope, node, &ended, "missing_from_inventory").await?);
        // `known` was read before the agents were bound, so it has their former hosts.
        let hosts = known.into_values().filter_map(|agent| Some((agent.agent_id, agent.hosted_on?)));
        events.extend(sessions::move_events(&mut tx, scope, node, hosts).await?);
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let ListedChanges { rebound, left, .. } = changes;
        Ok(InventoryOutcome::Synced { rebound, left, missing, reconciled, recorded })
    }
}

/// Reads and locks the listed agents that exist, in id order.
async fn lock_listed(
    tx: &mut DatabaseSession,
    fence: &Fence,
    listed: &[ListedAgent],
) -> StoreResult<HashMap<AgentId, KnownAgent>> {
    let rows = sqlx::query(
        "SELECT a.agent_id, a.name, a.node_id, a.provider, a.status, a.hosted_on,
                EXISTS (SELECT 1 FROM providers p JOIN gateways g ON g.gateway_id = p.gateway_id
                         WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                           AND (a.provider IS NULL OR p.provider = a.provider)
                           AND g.lease_until > relay_now()) AS hosted,
                EXISTS (SELECT FROM providers p
                         WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                           AND (a.provider IS NULL OR p.provider = a.provider)
                           AND (p.gateway_id IS NOT NULL OR coalesce(p.disconnected_at, p.last_heartbeat_at)
                                                            > relay_now() - make_interval(secs => $3))) AS awaited
           FROM agents a
          WHERE a.workspace_id = $1 AND a.agent_id = ANY ($2) AND a.deleted_at IS NULL
          ORDER BY a.agent_id FOR UPDATE OF a",
    )
    .bind(fence.scope.workspace_id())
    .bind(ids_of(listed))
    .bind(TEMPORARY_ABSENCE.as_secs_f64())
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("locking listed agents"))?;
    let known: Vec<KnownAgent> = decode_rows("agents", &rows)?;
    Ok(known.into_iter().map(|agent| (agent.agent_id, agent)).collect())
}

/// Effect of a valid inventory on the listed agents.
#[derive(Default)]
struct ListedChanges {
    rebound: usize,
    left: Vec<NodeId>,
    events: Vec<Event>,
}

fn check_listed(
    fence: &Fence,
    listed: &[ListedAgent],
    known: &HashMap<AgentId, KnownAgent>,
) -> Result<ListedChanges, Vec<(AgentId, InventoryConflict)>> {
    let (mut changes, mut conflicts) = (ListedChanges::default(), Vec::new());
    for entry in listed {
        let Some(agent) = known.get(&entry.agent_id).filter(|agent| agent.name == entry.name) else {
            conflicts.push((entry.agent_id, InventoryConflict::Identity));
            continue;
        };
        let here = agent.node_id == fence.node_id;
        let other_provider = agent.provider.as_ref().is_some_and(|provider| *provider != fence.provider);
        let offline = agent.status == AgentStatus::Offline;
        // An agent that ended at a connected provider may come up elsewhere. One that lost its connection returns.
        let is_kept = if agent.hosted { !offline && (!here || other_provider) } else { !here && agent.awaited };
        if is_kept {
            let conflict = match (here, agent.hosted) {
                (true, _) => InventoryConflict::Provider,
                (false, true) => InventoryConflict::Location,
                (false, false) => InventoryConflict::AwaitedLocation,
            };
            conflicts.push((entry.agent_id, conflict));
            continue;
        }
        if !here {
            changes.left.push(agent.node_id.clone());
        }
        if offline {
            changes.events.push(status_event(entry.agent_id, &agent.name, AgentStatus::Active));
        }
        changes.rebound += usize::from(!here || other_provider || offline);
    }
    if conflicts.is_empty() { Ok(changes) } else { Err(conflicts) }
}

/// Agent that an inventory leaves out.
#[derive(sqlx::FromRow)]
struct MissingAgent {
    agent_id: AgentId,
    name: String,
    was_online: bool,
    /// `true` if the node has named it before as running there.
    was_hosted: bool,
}

/// Marks the provider's agents offline that an inventory does not list. Some that have ended may be offline already:
/// their connection was lost before.
async fn mark_missing(
    tx: &mut DatabaseSession,
    fence: &Fence,
    listed: &[ListedAgent],
    at: DateTime<Utc>,
) -> StoreResult<Vec<MissingAgent>> {
    // An agent registers before its process starts, and an inventory may arrive in between: an agent with a recent
    // spawn invocation is not missing. An agent whose provider was removed belongs to the provider that hosts the
    // unassigned ones.
    sqlx::query_as(concat!(
        "WITH unlisted AS MATERIALIZED (
             SELECT a.agent_id, a.status <> 'offline' AS was_online, coalesce(a.hosted_on = $2, false) AS was_hosted
               FROM agents a
              WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.deleted_at IS NULL
                AND (a.provider = $3 OR a.provider IS NULL AND a.hosted_on = $2 AND ",
        hosts_unassigned!("$1", "$2", "$3"),
        ")
                AND (a.status <> 'offline' OR a.hosted_on = $2) AND a.agent_id <> ALL ($4)
                AND NOT EXISTS (SELECT FROM invocations i
                                 WHERE i.workspace_id = a.workspace_id AND i.agent_id = a.agent_id
                                   AND i.status = 'dispatched' AND i.came_up IS NULL
                                   AND coalesce(i.sent_at, i.dispatched_at) > $5)
              ORDER BY a.agent_id FOR UPDATE
         )
         UPDATE agents a
            SET status = 'offline', hosted_on = NULL,
                last_seen_at = CASE WHEN u.was_online THEN greatest(a.last_seen_at, $6) ELSE a.last_seen_at END,
                mailbox_orphaned = CASE WHEN u.was_online THEN coalesce(NOT a.resumable, false)
                                        ELSE a.mailbox_orphaned END
           FROM unlisted u WHERE a.workspace_id = $1 AND a.agent_id = u.agent_id
      RETURNING a.agent_id, a.name, u.was_online, u.was_hosted",
    ))
    .bind(fence.scope.workspace_id())
    .bind(&fence.node_id)
    .bind(&fence.provider)
    .bind(ids_of(listed))
    .bind(at - actions::DISPATCH_TIMEOUT)
    .bind(at)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("marking missing agents offline"))
}

fn ids_of(listed: &[ListedAgent]) -> Vec<AgentId> {
    listed.iter().map(|entry| entry.agent_id).collect()
}

fn spawned_agent(entry: &ListedAgent) -> Option<SpawnedAgent> {
    Some(SpawnedAgent {
        invocation: entry.invocation?,
        agent_id: entry.agent_id,
        name: entry.name.clone(),
        session_ref: entry.session_ref.clone(),
    })
}

/// Locks the provider row until the commit, and returns whether the fence holds. An inventory counts as a heartbeat.
async fn lock_provider(tx: &mut DatabaseSession, fence: &Fence) -> StoreResult<bool> {
    let held: Option<i64> = sqlx::query_scalar(
        "UPDATE providers SET last_heartbeat_at = relay_now()
          WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4 RETURNING epoch",
    )
    .bind(fence.scope.workspace_id())
    .bind(&fence.node_id)
    .bind(&fence.provider)
    .bind(fence.epoch)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("locking a provider"))?;
    Ok(held.is_some())
}

async fn bind_listed(tx: &mut DatabaseSession, fence: &Fence, listed: &[ListedAgent]) -> StoreResult<()> {
    let ids = ids_of(listed);
    let sessions: Vec<Option<&str>> = listed.iter().map(|l| l.session_ref.as_deref()).collect();
    sqlx::query(
        "UPDATE agents a
            SET node_id = $2, provider = $3, status = CASE WHEN status = 'offline' THEN 'active' ELSE status END,
                last_seen_at = relay_now(),
                binding_id = coalesce(a.binding_id,
                    'anb_' || a.agent_id || '_' || (extract(epoch FROM relay_now()) * 1000)::bigint),
                bound_at = coalesce(a.bound_at, relay_now()), session_ref = coalesce(l.session_ref, a.session_ref),
                session_node_id = $2, hosted_on = $2, mailbox_orphaned = false
           FROM unnest($4::bigint[], $5::text[]) AS l (agent_id, session_ref)
          WHERE a.workspace_id = $1 AND a.agent_id = l.agent_id",
    )
    .bind(fence.scope.workspace_id())
    .bind(&fence.node_id)
    .bind(&fence.provider)
    .bind(ids)
    .bind(sessions)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("binding listed agents"))?;
    Ok(())
}
