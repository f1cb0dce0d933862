//! Bindings of agents to nodes. Main types: [`NewBinding`] and [`BindOutcome`]; called by the engine's binding use
//! cases.
//!
//! An agent has one location. Binding moves it; unbinding returns it to its implicit direct node.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    agents::binding::Binding,
    nodes::{DIRECT_ID_PREFIX, NodeKind, effective_max_agents},
};
use sqlx::{
    FromRow, Postgres, Row as _,
    postgres::{PgArguments, PgRow},
    query::QueryAs,
};

use crate::{
    Store, StoreError, StoreResult,
    agents::sessions,
    connections::DatabaseSession,
    decode::decode_rows,
    events::{self, RecordedEvents},
    nodes::assignment,
    push::mailboxes,
};

/// Row of `agents`, with the position of the mailbox.
struct BindingRow(Binding);

impl FromRow<'_, PgRow> for BindingRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(Binding {
            binding_id: row.try_get("binding_id")?,
            agent_id: row.try_get("agent_id")?,
            agent_name: row.try_get("name")?,
            provider: row.try_get("provider")?,
            session_ref: row.try_get("session_ref")?,
            priority: row.try_get("priority")?,
            bound_at: row.try_get("bound_at")?,
            rebound_at: row.try_get("rebound_at")?,
            settled_floor: row.try_get("settled_floor")?,
            is_disabled: row.try_get("is_disabled")?,
        }))
    }
}

/// Binding to be made.
#[derive(Debug, Clone, Copy)]
pub struct NewBinding<'a> {
    pub node: &'a NodeId,
    pub agent_name: &'a str,
    /// Id for a new binding; an agent that is bound to the node keeps the id of its binding.
    pub binding_id: &'a str,
    pub session_ref: Option<&'a str>,
    /// `None` keeps the priority of an existing binding.
    pub priority: Option<i32>,
}

/// Agent that was returned to its own node.
#[derive(Debug)]
pub struct UnboundAgent {
    pub agent: AgentId,
    /// Node that it was bound to.
    pub node: NodeId,
    pub recorded: RecordedEvents,
}

/// Statement that returns the selected agent to its own node. The condition on the binding makes a repeated unbind, or
/// one that lost against a move, change nothing.
macro_rules! unbind {
    ($selected:literal) => {
        concat!(
            "WITH bound AS MATERIALIZED (
                 SELECT agent_id, node_id, coalesce(hosted_on = node_id, false) AS was_hosted FROM agents
                  WHERE workspace_id = $1 AND binding_id IS NOT NULL AND deleted_at IS NULL AND ",
            $selected,
            " FOR UPDATE
             )
             UPDATE agents a SET node_id = 'node_direct_' || a.agent_id, provider = NULL, binding_id = NULL,
                    bound_at = NULL, rebound_at = NULL, hosted_on = NULL, session_ref = NULL, resumable = NULL,
                    priority = 0
               FROM bound WHERE a.workspace_id = $1 AND a.agent_id = bound.agent_id
          RETURNING a.agent_id, bound.node_id, bound.was_hosted"
        )
    };
}

/// Outcome of [`Store::bind_agent`].
#[derive(Debug, Clone)]
pub enum BindOutcome {
    Bound {
        agent: AgentId,
        /// Former location.
        from: NodeId,
        /// End of the agent on the node that it ran on, if that is another one.
        recorded: RecordedEvents,
    },
    NoAgent,
    /// The node was deleted meanwhile.
    NoNode,
    /// The node has as many agents as it may have.
    Full {
        max_agents: i32,
    },
}

/// Statement that unbinds an agent: returns it, the node that it leaves, and true if it ran there.
type UnbindQuery<'q> = QueryAs<'q, Postgres, (AgentId, NodeId, bool), PgArguments>;

impl Store {
    /// Lists agents located on a node, by name: all of them, or those among `agents`.
    pub async fn bindings(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        agents: Option<&[AgentId]>,
        limit: i64,
    ) -> StoreResult<Vec<Binding>> {
        // The row of http_push may be that of a former node of the agent.
        let rows = sqlx::query(
            "SELECT a.binding_id, a.agent_id, a.name, a.provider, a.session_ref, a.priority,
                    coalesce(a.bound_at, a.created_at) AS bound_at, a.rebound_at,
                    coalesce(c.settled_floor, 0) AS settled_floor,
                    coalesce(p.disabled_at IS NOT NULL AND p.node_id = a.node_id, false) AS is_disabled
               FROM agents a
               LEFT JOIN push_mailboxes p ON p.workspace_id = a.workspace_id AND p.agent_id = a.agent_id
               LEFT JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
              WHERE a.workspace_id = $1 AND a.node_id = $2 AND a.deleted_at IS NULL
                AND ($3::bigint[] IS NULL OR a.agent_id = ANY ($3))
              ORDER BY a.name LIMIT $4",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(agents)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the agents of a node"))?;
        Ok(decode_rows::<BindingRow>("agents", &rows)?.into_iter().map(|row| row.0).collect())
    }

    /// Moves an agent to a node. Its provider becomes the node's only one, or the most suitable connected one; it is
    /// unassigned where several are equally suitable. An agent that is bound to the node already keeps its binding.
    pub async fn bind_agent(
        &self,
        scope: WorkspaceScope,
        new: NewBinding<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<BindOutcome> {
        let doing = "binding an agent to a node";
        let NewBinding { node, .. } = new;
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Node before agent, as in every transaction that locks both. The lock on the node serialises the capacity
        // check.
        let locked: Option<(i32, NodeKind)> =
            sqlx::query_as("SELECT max_agents, kind FROM nodes WHERE workspace_id = $1 AND node_id = $2 FOR UPDATE")
                .bind(scope.workspace_id())
                .bind(node)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        // Only an agent's own node may have no row: it is implicit.
        if locked.is_none() && !node.as_str().starts_with(DIRECT_ID_PREFIX) {
            return Ok(BindOutcome::NoNode);
        }
        let (node_limit, kind) = locked.unzip();
        let agent: Option<(AgentId, NodeId, Option<NodeId>)> = sqlx::query_as(
            "SELECT agent_id, node_id, hosted_on FROM agents
              WHERE workspace_id = $1 AND name = $2 AND deleted_at IS NULL FOR UPDATE",
        )
        .bind(scope.workspace_id())
        .bind(new.agent_name)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some((agent, from, host)) = agent else { return Ok(BindOutcome::NoAgent) };

        let providers = assignment::read_providers(&mut tx, scope, node).await?;
        // A node without a row is implicit and has no limit of its own.
        let max_agents = effective_max_agents(node_limit.unwrap_or(0), &providers.limits);
        // An agent that is located there already takes no further place.
        if max_agents > 0 && from != *node && count_located(&mut tx, scope, node).await? >= i64::from(max_agents) {
            return Ok(BindOutcome::Full { max_agents });
        }
        move_agent(&mut tx, scope, agent, &new, &providers).await?;
        match kind {
            Some(NodeKind::HttpPush) => mailboxes::place_mailbox(&mut tx, scope, agent, node).await?,
            Some(NodeKind::Ws | NodeKind::Poll) | None => {}
        }
        let moved = host.into_iter().map(|host| (agent, host));
        let events = sessions::move_events(&mut tx, scope, node, moved).await?;
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(BindOutcome::Bound { agent, from, recorded })
    }

    /// Returns an agent that is bound to the node to its implicit direct node. `None` when it is not bound there.
    pub async fn unbind_agent(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        agent_name: &str,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<UnboundAgent>> {
        let unbind = sqlx::query_as(unbind!("node_id = $2 AND name = $3"))
            .bind(scope.workspace_id())
            .bind(node)
            .bind(agent_name);
        self.unbind(scope, unbind, at).await
    }

    /// Moves an agent from the node that it is bound to back to its own. `None`: it is not bound.
    pub async fn unbind_from_any_node(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<UnboundAgent>> {
        let unbind = sqlx::query_as(unbind!("agent_id = $2")).bind(scope.workspace_id()).bind(agent);
        self.unbind(scope, unbind, at).await
    }

    /// Moves an agent back to its own node, and records its end if it ran on the node that it leaves.
    async fn unbind(
        &self,
        scope: WorkspaceScope,
        unbind: UnbindQuery<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<UnboundAgent>> {
        let doing = "unbinding an agent from a node";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The node is not locked: a place that becomes free can only make a check of its capacity refuse too early.
        let unbound = unbind.fetch_optional(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
        let Some((agent, node, was_hosted)) = unbound else { return Ok(None) };
        let ended: &[AgentId] = if was_hosted { &[agent] } else { &[] };
        let events = sessions::exit_events(&mut tx, scope, &node, ended, "deregistered").await?;
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(UnboundAgent { agent, node, recorded }))
    }
}

async fn count_located(tx: &mut DatabaseSession, scope: WorkspaceScope, node: &NodeId) -> StoreResult<i64> {
    sqlx::query_scalar("SELECT count(*) FROM agents WHERE workspace_id = $1 AND node_id = $2 AND deleted_at IS NULL")
        .bind(scope.workspace_id())
        .bind(node)
        .fetch_one(tx)
        .await
        .map_err(StoreError::from_sqlx("counting the agents of a node"))
}

/// Writes the location of an agent whose row is locked. On the same node, the binding stays and only given values
/// change.
async fn move_agent(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    agent: AgentId,
    new: &NewBinding<'_>,
    providers: &assignment::NodeProviders,
) -> StoreResult<()> {
    // All expressions read the row from before the update, although it sets `node_id` as well.
    sqlx::query(
        "UPDATE agents SET
                provider = CASE WHEN node_id = $3 AND provider = ANY($4) THEN provider ELSE $5 END,
                binding_id = CASE WHEN node_id = $3 AND binding_id IS NOT NULL THEN binding_id ELSE $6 END,
                bound_at = CASE WHEN node_id = $3 AND bound_at IS NOT NULL THEN bound_at ELSE relay_now() END,
                rebound_at = CASE WHEN bound_at IS NOT NULL THEN relay_now() END,
                session_ref = coalesce($7, CASE WHEN node_id = $3 THEN session_ref END),
                priority = coalesce($8, CASE WHEN node_id = $3 THEN priority ELSE 0 END),
                hosted_on = CASE WHEN hosted_on = $3 THEN hosted_on END, node_id = $3
          WHERE workspace_id = $1 AND agent_id = $2",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(new.node)
    .bind(&providers.names)
    .bind(&providers.host)
    .bind(new.binding_id)
    .bind(new.session_ref)
    .bind(new.priority)
    .execute(tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("moving an agent to a node"))
}
