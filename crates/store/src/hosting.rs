//! Agents at a node: which of them a provider hosts.
//!
//! Every change is fenced by the epoch of the connection that asks for it.

use std::collections::HashMap;

use chrono::Utc;
use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceScope};
use sqlx::PgConnection;

use crate::{Store, StoreError, StoreResult};

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inventory {
    /// Taken over as the provider's complete live set.
    Synced {
        /// How many agents were bound or brought online by it.
        rebound: usize,
        /// Nodes that agents moved away from.
        left: Vec<NodeId>,
        /// Agents of this provider that were not listed, now offline.
        missing: Vec<AgentId>,
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

    /// Marks agents online: the connection that hosts them has registered.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agents_online(&self, scope: WorkspaceScope, agents: &[AgentId]) -> StoreResult<()> {
        let ids: Vec<i64> = agents.iter().map(|agent| agent.get()).collect();
        sqlx::query(
            "UPDATE agents SET status = CASE WHEN status = 'offline' THEN 'active' ELSE status END,
                    last_seen_at = now()
              WHERE workspace_id = $1 AND agent_id = ANY ($2) AND deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(ids)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking agents online"))?;
        Ok(())
    }

    /// Moves an agent to the fence's node and provider, online. Returns the node that it left, or
    /// `None` when the fence no longer holds or the agent is gone.
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
    ) -> StoreResult<Option<NodeId>> {
        let left: Option<String> = sqlx::query_scalar(
            "WITH held AS (
                 SELECT 1 FROM providers
                  WHERE workspace_id = $1 AND node_id = $3 AND provider = $4 AND epoch = $5 FOR SHARE
             ), before AS (
                 SELECT node_id FROM agents
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL FOR UPDATE
             ), moved AS (
                 UPDATE agents
                    SET node_id = $3, provider = $4, status = 'active', last_seen_at = now(),
                        binding_id = coalesce(binding_id, $6), bound_at = coalesce(bound_at, now()),
                        rebound_at = CASE WHEN bound_at IS NULL THEN NULL ELSE now() END,
                        session_ref = coalesce($7, session_ref), resumable = coalesce($8, resumable)
                  WHERE workspace_id = $1 AND agent_id = $2 AND deleted_at IS NULL
                    AND EXISTS (SELECT 1 FROM held) AND EXISTS (SELECT 1 FROM before)
              RETURNING agent_id
             )
             SELECT before.node_id FROM before, moved",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(agent.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(binding_id)
        .bind(session_ref)
        .bind(resumable)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("moving an agent to a provider"))?;
        Ok(left.map(NodeId::new))
    }

    /// Unbinds an agent that this provider hosts: back to its implicit direct node, offline. Returns
    /// whether it was hosted here.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn unhost_agent(&self, fence: &Fence, agent: AgentId) -> StoreResult<bool> {
        let done = sqlx::query(
            "UPDATE agents
                SET node_id = $6, provider = NULL, status = 'offline', binding_id = NULL, bound_at = NULL,
                    rebound_at = NULL
              WHERE workspace_id = $1 AND agent_id = $2 AND node_id = $3 AND deleted_at IS NULL
                AND (provider IS NULL OR provider = $4)
                AND EXISTS (SELECT 1 FROM providers WHERE workspace_id = $1 AND node_id = $3
                               AND provider = $4 AND epoch = $5)",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(agent.get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(NodeId::direct(agent).as_str())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("unbinding an agent from a provider"))?;
        Ok(done.rows_affected() == 1)
    }

    /// Takes a provider's inventory over: listed agents are bound and online, others offline.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn sync_inventory(&self, fence: &Fence, listed: &[Listed]) -> StoreResult<Inventory> {
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
        }
        if !conflicts.is_empty() {
            return Ok(Inventory::Conflicts(conflicts));
        }
        bind_listed(&mut tx, fence, listed).await?;
        let missing: Vec<i64> = sqlx::query_scalar(
            "UPDATE agents SET status = 'offline'
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND deleted_at IS NULL
                AND status <> 'offline' AND agent_id <> ALL ($4)
          RETURNING agent_id",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(&ids)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Inventory::Synced { rebound, left, missing: missing.into_iter().map(AgentId::new).collect() })
    }
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
                bound_at = coalesce(a.bound_at, now()), session_ref = coalesce(l.session_ref, a.session_ref)
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
