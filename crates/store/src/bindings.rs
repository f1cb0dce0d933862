//! Bindings made by REST: which node an agent is located on.
//!
//! An agent has one location. Binding moves it, unbinding lets it fall back to its implicit direct node.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, NodeId, WorkspaceScope, node::max_agents};
use sqlx::Row as _;

use crate::{Store, StoreError, StoreResult, located, push_mailboxes};

/// An agent located on a node.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct BindingRow {
    /// `None` for an agent on its implicit direct node.
    pub binding_id: Option<String>,
    /// The agent.
    pub agent_id: i64,
    /// Its name.
    pub agent_name: String,
    /// Which process of the node has it; `None` for whichever claims it.
    pub provider: Option<String>,
    /// What the broker resumes the agent's session by.
    pub session_ref: Option<String>,
    /// As given with the binding.
    pub priority: i32,
    /// When it was bound, or made.
    pub bound_at: DateTime<Utc>,
    /// When it last moved.
    pub rebound_at: Option<DateTime<Utc>>,
    /// Its mailbox is settled up to here.
    pub settled_floor: i64,
    /// Nothing is pushed to it any more: its endpoint has said that it is gone.
    pub disabled: bool,
}

/// What became of a bind.
#[derive(Debug, Clone)]
pub enum BindOutcome {
    /// The agent is located on the node.
    Bound {
        /// The agent.
        agent: AgentId,
        /// Where it was before.
        from: NodeId,
    },
    /// There is no such agent.
    NoAgent,
    /// The node takes no more agents.
    Full {
        /// How many it takes.
        max_agents: i32,
    },
}

impl Store {
    /// The agents located on a node, by name.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn bindings(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        agents: Option<&[AgentId]>,
        limit: i64,
    ) -> StoreResult<Vec<BindingRow>> {
        sqlx::query_as(
            "SELECT a.binding_id, a.agent_id, a.name AS agent_name, a.provider, a.session_ref, a.priority,
                    coalesce(a.bound_at, a.created_at) AS bound_at, a.rebound_at,
                    coalesce(c.settled_floor, 0) AS settled_floor,
                    coalesce(p.disabled_at IS NOT NULL AND p.node_id = a.node_id, false) AS disabled
               FROM agents a
               LEFT JOIN push_mailboxes p ON p.workspace_id = a.workspace_id AND p.agent_id = a.agent_id
               LEFT JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
              WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.deleted_at IS NULL
                AND ($3::bigint[] IS NULL OR a.agent_id = ANY ($3))
              ORDER BY a.name LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(agents.map(|agents| agents.iter().map(|agent| agent.get()).collect::<Vec<_>>()))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the agents of a node"))
    }

    /// Moves an agent to a node. Its provider becomes the node's only one, or the one of several that is there and
    /// fittest to have agents; it is left open where that leaves a choice. An agent that is bound there already keeps
    /// its binding.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn bind_agent(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        agent_name: &str,
        fresh_binding_id: &str,
        session_ref: Option<&str>,
        priority: Option<i32>,
    ) -> StoreResult<BindOutcome> {
        let doing = "binding an agent to a node";
        let workspace = scope.workspace_id().get();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Node before agent, as every transaction that locks both. It serialises the capacity check.
        let found: Option<(i32, String)> =
            sqlx::query_as("SELECT max_agents, kind FROM nodes WHERE workspace_id = $1 AND node_id = $2 FOR UPDATE")
                .bind(workspace)
                .bind(node.as_str())
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        let (node_limit, kind) = found.unzip();
        let agent = sqlx::query(
            "SELECT agent_id, node_id FROM agents
              WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL FOR UPDATE",
        )
        .bind(workspace)
        .bind(agent_name)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(agent) = agent else {
            return Ok(BindOutcome::NoAgent);
        };
        let (agent, from) = (AgentId::new(agent.get(0)), NodeId::new(agent.get::<String, _>(1)));

        let providers = located::providers(&mut tx, scope, node).await?;
        let limit = max_agents(node_limit.unwrap_or_default(), &providers.limits);
        if limit > 0 && from != *node {
            let located: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM agents WHERE workspace_id = $1 AND node_id = $2 AND deleted_at IS NULL",
            )
            .bind(workspace)
            .bind(node.as_str())
            .fetch_one(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
            if located >= i64::from(limit) {
                return Ok(BindOutcome::Full { max_agents: limit });
            }
        }

        sqlx::query(
            "UPDATE agents SET
                    provider = CASE WHEN node_id = $3 AND provider = ANY($4) THEN provider ELSE $5 END,
                    binding_id = CASE WHEN node_id = $3 AND binding_id IS NOT NULL THEN binding_id ELSE $6 END,
                    bound_at = CASE WHEN node_id = $3 AND bound_at IS NOT NULL THEN bound_at ELSE now() END,
                    rebound_at = CASE WHEN bound_at IS NOT NULL THEN now() END,
                    session_ref = coalesce($7, CASE WHEN node_id = $3 THEN session_ref END),
                    priority = coalesce($8, CASE WHEN node_id = $3 THEN priority ELSE 0 END),
                    node_id = $3
              WHERE workspace_id = $1 AND agent_id = $2",
        )
        .bind(workspace)
        .bind(agent.get())
        .bind(node.as_str())
        .bind(&providers.names)
        .bind(&providers.host)
        .bind(fresh_binding_id)
        .bind(session_ref)
        .bind(priority)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if kind.as_deref() == Some("http_push") {
            push_mailboxes::place(&mut tx, scope, agent, node).await?;
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(BindOutcome::Bound { agent, from })
    }

    /// Lets an agent that is bound to the node fall back to its implicit direct node. `None` when it
    /// is not bound there.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn unbind_agent(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        agent_name: &str,
    ) -> StoreResult<Option<AgentId>> {
        sqlx::query_scalar(
            "UPDATE agents SET node_id = 'node_direct_' || agent_id, provider = NULL, binding_id = NULL,
                    bound_at = NULL, rebound_at = NULL, session_ref = NULL, resumable = NULL, priority = 0
              WHERE workspace_id = $1 AND node_id = $2 AND name = $3 AND binding_id IS NOT NULL
                AND deleted_at IS NULL
          RETURNING agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(agent_name)
        .fetch_optional(&self.pool)
        .await
        .map(|id: Option<i64>| id.map(AgentId::new))
        .map_err(StoreError::from_sqlx("unbinding an agent from a node"))
    }
}
