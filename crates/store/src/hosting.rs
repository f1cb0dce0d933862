//! Agents at a node: which of them a provider hosts.
//!
//! Every change is fenced by the epoch of the connection that asks for it.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope, action};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Recorded, status_event},
    sessions,
    spawned::{self, CameUp, Reconciled},
};

/// A connection's claim on a provider.
#[derive(Debug, Clone)]
pub struct Fence {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// The connection's epoch.
    pub epoch: i64,
}

/// An agent that already has the wanted name.
#[derive(Debug, Clone)]
pub struct Taken {
    /// Its id.
    pub agent_id: AgentId,
    /// Whether it is offline.
    pub offline: bool,
    /// Its node.
    pub node_id: NodeId,
    /// Its provider.
    pub provider: Option<ProviderName>,
}

/// One agent that an inventory lists.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Its id.
    pub agent_id: AgentId,
    /// Its name.
    pub name: String,
    /// Handle for resuming its session.
    pub session_ref: Option<String>,
    /// The invocation that brought it up.
    pub invocation: Option<InvocationId>,
}

/// Why an entry of an inventory cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// Name and id disagree, or there is no such agent.
    Identity,
    /// The agent lives at another node whose provider is connected.
    Location,
    /// Another provider of this node hosts it.
    Provider,
}

/// What came of an inventory.
#[derive(Debug)]
pub enum Inventory {
    /// Taken over as the provider's complete live set.
    Synced {
        /// How many agents were bound or brought online by it.
        rebound: usize,
        /// Nodes that agents moved away from.
        left: Vec<NodeId>,
        /// Agents of this provider that were not listed, now offline.
        missing: Vec<AgentId>,
        /// What it means for what the provider was told to do.
        reconciled: Reconciled,
        /// Who came online by it, and who went offline.
        recorded: Recorded,
    },
    /// These entries are in conflict. Nothing was changed.
    Conflicts(Vec<(AgentId, Conflict)>),
    /// The connection has been superseded.
    Superseded,
}

#[derive(sqlx::FromRow)]
struct Known {
    agent_id: i64,
    name: String,
    node_id: String,
    provider: Option<String>,
    status: String,
    /// Whether the place where it is now has a connected provider for it.
    hosted: bool,
}

impl Store {
    /// Who has this name now.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent_taken(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<Taken>> {
        let row: Option<(i64, String, String, Option<String>)> = sqlx::query_as(
            "SELECT agent_id, status, node_id, provider FROM agents
              WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking an agent up by name"))?;
        Ok(row.map(|(id, status, node, provider)| Taken {
            agent_id: AgentId::new(id),
            offline: status == "offline",
            node_id: NodeId::new(node),
            provider: provider.map(ProviderName::new),
        }))
    }

    /// Marks agents online: the connection that hosts them has registered. Records those that were offline.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agents_online(
        &self,
        scope: WorkspaceScope,
        agents: &[AgentId],
        at: DateTime<Utc>,
    ) -> StoreResult<Recorded> {
        let doing = "marking agents online";
        let ids: Vec<i64> = agents.iter().map(|agent| agent.get()).collect();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let came: Vec<(i64, String)> = sqlx::query_as(
            "WITH here AS MATERIALIZED (
                 SELECT agent_id, name, status FROM agents
                  WHERE workspace_id = $1 AND agent_id = ANY ($2) AND deleted_at IS NULL
                  ORDER BY agent_id FOR UPDATE
             ), seen AS (
                 UPDATE agents a SET status = CASE WHEN here.status = 'offline' THEN 'active' ELSE here.status END,
                        last_seen_at = now()
                   FROM here WHERE a.workspace_id = $1 AND a.agent_id = here.agent_id
             )
             SELECT agent_id, name FROM here WHERE status = 'offline' ORDER BY agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(ids)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let events = came.iter().map(|(id, name)| status_event(AgentId::new(*id), name, "active")).collect();
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(recorded)
    }

    /// Moves an agent to the fence's node and provider, online. Returns the node that it left and what was
    /// recorded if it was not active before, or `None` when the fence no longer holds or the agent is gone.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn host_agent(
        &self,
        fence: &Fence,
        agent: AgentId,
        binding_id: &str,
        session_ref: Option<&str>,
        resumable: Option<bool>,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<(NodeId, Recorded)>> {
        let doing = "moving an agent to a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let moved: Option<(String, String, String)> = sqlx::query_as(
            "WITH held AS (
                 SELECT 1 FROM providers
                  WHERE workspace_id = $1 AND node_id = $3 AND provider = $4 AND epoch = $5 FOR SHARE
             ), before AS (
                 SELECT node_id, name, status FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL FOR UPDATE
             ), moved AS (
                 UPDATE agents
                    SET node_id = $3, provider = $4, status = 'active', last_seen_at = now(),
                        binding_id = coalesce(binding_id, $6), bound_at = coalesce(bound_at, now()),
                        rebound_at = CASE WHEN bound_at IS NULL THEN NULL ELSE now() END,
                        session_ref = coalesce($7, session_ref), resumable = coalesce($8, resumable),
                        session_node_id = $3, mailbox_orphaned = false
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL
                    AND EXISTS (SELECT 1 FROM held) AND EXISTS (SELECT 1 FROM before)
              RETURNING agent_id
             )
             SELECT before.node_id, before.name, before.status FROM before, moved",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(agent.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(binding_id)
        .bind(session_ref)
        .bind(resumable)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some((left, name, status)) = moved else { return Ok(None) };
        let events = if status == "active" { Vec::new() } else { vec![status_event(agent, &name, "active")] };
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((NodeId::new(left), recorded)))
    }

    /// Unbinds an agent that this provider hosts: back to its implicit direct node, offline, which is recorded
    /// if it was not. What it called before brings it back no more. `None` when it was not hosted here.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn unhost_agent(
        &self,
        fence: &Fence,
        agent: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "unbinding an agent from a provider";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let left: Option<(String, String)> = sqlx::query_as(
            "WITH here AS MATERIALIZED (
                 SELECT agent_id, name, status FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND node_id = $3 AND deleted_at IS NULL
                    AND (provider IS NULL OR provider = $4)
                    AND EXISTS (SELECT 1 FROM providers WHERE workspace_id = $1 AND node_id = $3
                                   AND provider = $4 AND epoch = $5)
                    FOR UPDATE
             )
             UPDATE agents a
                SET node_id = $6, provider = NULL, status = 'offline', last_seen_at = greatest(a.last_seen_at, $7),
                    binding_id = NULL, bound_at = NULL, rebound_at = NULL,
                    mailbox_orphaned = coalesce(NOT a.resumable, false)
               FROM here
              WHERE a.workspace_id = $1 AND a.agent_id = here.agent_id
          RETURNING here.name, here.status",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(agent.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(NodeId::direct(agent).as_str())
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some((name, status)) = left else { return Ok(None) };
        let mut events = if status == "offline" { Vec::new() } else { vec![status_event(agent, &name, "offline")] };
        events.extend(sessions::exits(&mut tx, fence, &[agent.get()], "deregistered").await?);
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Takes a provider's inventory over: listed agents are bound and online, others offline. Who was not so
    /// before is recorded.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn sync_inventory(&self, fence: &Fence, listed: &[Listed], at: DateTime<Utc>) -> StoreResult<Inventory> {
        let doing = "taking an inventory over";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !hold(&mut tx, fence).await? {
            return Ok(Inventory::Superseded);
        }
        let ids: Vec<i64> = listed.iter().map(|l| l.agent_id.get()).collect();
        let known: Vec<Known> = sqlx::query_as(
            "SELECT a.agent_id, a.name, a.node_id, a.provider, a.status,
                    EXISTS (SELECT 1 FROM providers p JOIN gateways g ON g.gateway_id = p.gateway_id
                             WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                               AND (a.provider IS NULL OR p.provider = a.provider)
                               AND g.lease_until > now()) AS hosted
               FROM agents a
              WHERE a.workspace_id = $1 AND a.agent_id = ANY ($2) AND a.deleted_at IS NULL
              ORDER BY a.agent_id FOR UPDATE OF a",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(&ids)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let known: HashMap<i64, Known> = known.into_iter().map(|agent| (agent.agent_id, agent)).collect();
        let (mut rebound, mut left, mut conflicts) = (0, Vec::new(), Vec::new());
        let mut events = Vec::new();
        for entry in listed {
            let Some(agent) = known.get(&entry.agent_id.get()).filter(|agent| agent.name == entry.name) else {
                conflicts.push((entry.agent_id, Conflict::Identity));
                continue;
            };
            let here = agent.node_id == fence.node_id.as_str();
            let other_provider = agent.provider.as_deref().is_some_and(|p| p != fence.provider.as_str());
            if agent.hosted && agent.status != "offline" {
                if !here {
                    conflicts.push((entry.agent_id, Conflict::Location));
                    continue;
                }
                if other_provider {
                    conflicts.push((entry.agent_id, Conflict::Provider));
                    continue;
                }
            }
            if !here {
                left.push(NodeId::new(&agent.node_id));
            }
            if !here || other_provider || agent.status == "offline" {
                rebound += 1;
            }
            if agent.status == "offline" {
                events.push(status_event(entry.agent_id, &agent.name, "active"));
            }
        }
        if !conflicts.is_empty() {
            return Ok(Inventory::Conflicts(conflicts));
        }
        bind_listed(&mut tx, fence, listed).await?;
        // An agent registers before its process starts, and an inventory may come in between: who is just being brought up
        // is not missing.
        let missing: Vec<(i64, String)> = sqlx::query_as(
            "UPDATE agents a SET status = 'offline', last_seen_at = greatest(a.last_seen_at, $6),
                    mailbox_orphaned = coalesce(NOT a.resumable, false)
              WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.provider = $3 AND a.deleted_at IS NULL
                AND a.status <> 'offline' AND a.agent_id <> ALL ($4)
                AND NOT EXISTS (SELECT FROM invocations i
                                 WHERE i.workspace_id = a.workspace_id AND i.agent_id = a.agent_id
                                   AND i.status = 'dispatched' AND i.came_up IS NULL
                                   AND coalesce(i.sent_at, i.dispatched_at) > $5)
          RETURNING a.agent_id, a.name",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(&ids)
        .bind(at - TimeDelta::from_std(action::DISPATCH_TIMEOUT).unwrap_or_default())
        .bind(at)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        events.extend(missing.iter().map(|(id, name)| status_event(AgentId::new(*id), name, "offline")));
        let came_up: Vec<CameUp> = listed.iter().filter_map(came_up).collect();
        let reconciled = spawned::reconcile(&mut tx, fence, &came_up, at).await?;
        let gone: Vec<i64> = missing.iter().map(|(id, _)| *id).collect();
        events.extend(sessions::exits(&mut tx, fence, &gone, "missing_from_inventory").await?);
        let recorded = events::append(&mut tx, fence.scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let missing = missing.into_iter().map(|(id, _)| AgentId::new(id)).collect();
        Ok(Inventory::Synced { rebound, left, missing, reconciled, recorded })
    }
}

fn came_up(entry: &Listed) -> Option<CameUp> {
    Some(CameUp {
        invocation: entry.invocation?,
        agent_id: entry.agent_id,
        name: entry.name.clone(),
        session_ref: entry.session_ref.clone(),
    })
}

/// Locks the provider row and tells whether the fence still holds.
async fn hold(tx: &mut PgConnection, fence: &Fence) -> StoreResult<bool> {
    let held: Option<i64> = sqlx::query_scalar(
        "UPDATE providers SET last_heartbeat_at = now()
          WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4 RETURNING epoch",
    )
    .bind(fence.scope.workspace_id().get())
    .bind(fence.node_id.as_str())
    .bind(fence.provider.as_str())
    .bind(fence.epoch)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("holding a provider"))?;
    Ok(held.is_some())
}

async fn bind_listed(tx: &mut PgConnection, fence: &Fence, listed: &[Listed]) -> StoreResult<()> {
    let ids: Vec<i64> = listed.iter().map(|l| l.agent_id.get()).collect();
    let sessions: Vec<Option<&str>> = listed.iter().map(|l| l.session_ref.as_deref()).collect();
    let bindings: Vec<String> = ids.iter().map(|id| format!("anb_{id}_{}", Utc::now().timestamp_millis())).collect();
    sqlx::query(
        "UPDATE agents a
            SET node_id = $2, provider = $3, status = CASE WHEN status = 'offline' THEN 'active' ELSE status END,
                last_seen_at = now(), binding_id = coalesce(a.binding_id, l.binding_id),
                bound_at = coalesce(a.bound_at, now()), session_ref = coalesce(l.session_ref, a.session_ref),
                session_node_id = $2, mailbox_orphaned = false
           FROM unnest($4::bigint[], $5::text[], $6::text[]) AS l (agent_id, session_ref, binding_id)
          WHERE a.workspace_id = $1 AND a.agent_id = l.agent_id",
    )
    .bind(fence.scope.workspace_id().get())
    .bind(fence.node_id.as_str())
    .bind(fence.provider.as_str())
    .bind(ids)
    .bind(sessions)
    .bind(bindings)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("binding listed agents"))?;
    Ok(())
}
