//! Definitions of actions.

use chrono::{DateTime, Utc};
use relay_domain::{ActionId, AgentId, NodeId, WorkspaceScope};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult, capabilities,
    events::{self, NewEvent, Recorded},
};

/// An action.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ActionRow {
    /// Its id.
    pub action_id: i64,
    /// What it is called.
    pub name: String,
    /// For people.
    pub description: String,
    /// Whether the name alone leads to it.
    pub claims_name: bool,
    /// The agent that handles it.
    pub handler_agent_id: Option<i64>,
    /// That agent's name.
    pub handler_agent: Option<String>,
    /// The node that handles it.
    pub handler_node_id: Option<String>,
    /// That node's name.
    pub handler_node: Option<String>,
    /// The provider of that node whose capability it is; none: it was defined by REST, and any of them may.
    pub provider: Option<String>,
    /// What its input must be like: a JSON schema.
    pub input_schema: Value,
    /// What its output is like.
    pub output_schema: Value,
    /// Who may invoke it; none: every agent.
    pub available_to: Option<Vec<String>>,
    /// When it was defined.
    pub created_at: DateTime<Utc>,
}

/// An action to be defined, or defined anew by the same handler.
#[derive(Debug)]
pub struct NewAction<'a> {
    /// Its id, if it is new.
    pub action_id: ActionId,
    /// Its name.
    pub name: &'a str,
    /// For people.
    pub description: &'a str,
    /// The agent that handles it, or
    pub handler_agent: Option<AgentId>,
    /// the node that does.
    pub handler_node: Option<&'a NodeId>,
    /// JSON schema of its input.
    pub input_schema: &'a Value,
    /// JSON schema of its output.
    pub output_schema: &'a Value,
    /// Who may invoke it.
    pub available_to: Option<&'a [String]>,
    /// How many a workspace may have.
    pub limit: i64,
    /// That it was defined, for observers.
    pub event: NewEvent,
    /// Now.
    pub at: DateTime<Utc>,
}

/// What became of a definition.
#[derive(Debug)]
pub enum Defined {
    /// It is stored.
    Stored {
        /// Whether it was not there before.
        new: bool,
        /// What to announce.
        recorded: Recorded,
    },
    /// The name is another handler's.
    NameTaken,
    /// The workspace has as many as it may.
    TooMany,
}

macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT c.action_id, c.name, c.description, c.claims_name, c.handler_agent_id, a.name AS handler_agent,
                    c.handler_node_id, n.name AS handler_node, c.provider, c.input_schema, c.output_schema, c.available_to,
                    c.created_at
               FROM actions c
               LEFT JOIN agents a ON a.workspace_id = c.workspace_id AND a.agent_id = c.handler_agent_id
               LEFT JOIN nodes n ON n.workspace_id = c.workspace_id AND n.node_id = c.handler_node_id ",
            $rest
        )
    };
}

impl Store {
    /// Defines an action, or changes the definition that the same handler has given before. A capability's action of
    /// the same node is taken over.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn define_action(&self, scope: WorkspaceScope, new: &NewAction<'_>) -> StoreResult<Defined> {
        let doing = "defining an action";
        let workspace = scope.workspace_id().get();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        capabilities::lock_names(&mut tx, scope).await?;
        let known: Vec<(i64, bool, Option<i64>, Option<String>)> = sqlx::query_as(
            "SELECT action_id, claims_name, handler_agent_id, handler_node_id FROM actions
              WHERE workspace_id = $1 AND name = $2 AND (claims_name OR handler_node_id = $3)",
        )
        .bind(workspace)
        .bind(new.name)
        .bind(new.handler_node.map(NodeId::as_str))
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let same = |(_, _, agent, node): &&(i64, bool, Option<i64>, Option<String>)| {
            *agent == new.handler_agent.map(AgentId::get) && node.as_deref() == new.handler_node.map(NodeId::as_str)
        };
        let ours = known.iter().find(same).map(|(id, _, _, _)| *id);
        if known.iter().any(|(id, claims, _, _)| *claims && Some(*id) != ours) {
            return Ok(Defined::NameTaken);
        }
        let written = sqlx::query(
            "INSERT INTO actions (workspace_id, action_id, name, description, claims_name, handler_agent_id,
                                  handler_node_id, input_schema, output_schema, available_to, created_at)
             SELECT $1, $2, $3, $4, true, $5, $6, $7, $8, $9, $10
              WHERE $11 OR (SELECT count(*) FROM actions WHERE workspace_id = $1) < $12
             ON CONFLICT (workspace_id, action_id) DO UPDATE
                SET description = excluded.description, claims_name = true, provider = NULL,
                    input_schema = excluded.input_schema, output_schema = excluded.output_schema,
                    available_to = excluded.available_to",
        )
        .bind(workspace)
        .bind(ours.unwrap_or(new.action_id.get()))
        .bind(new.name)
        .bind(new.description)
        .bind(new.handler_agent.map(AgentId::get))
        .bind(new.handler_node.map(NodeId::as_str))
        .bind(new.input_schema)
        .bind(new.output_schema)
        .bind(new.available_to)
        .bind(new.at)
        .bind(ours.is_some())
        .bind(new.limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if written.rows_affected() == 0 {
            return Ok(Defined::TooMany);
        }
        let recorded = events::append(&mut tx, scope, new.at, vec![new.event.clone()]).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Defined::Stored { new: ours.is_none(), recorded })
    }

    /// The action that a name leads to, whose handler still exists.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn action(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<ActionRow>> {
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.name = $2 AND c.claims_name
               AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)"
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an action"))
    }

    /// The action of this name of a node.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn action_of_node(
        &self,
        scope: WorkspaceScope,
        node: &str,
        name: &str,
    ) -> StoreResult<Option<ActionRow>> {
        sqlx::query_as(select!("WHERE c.workspace_id = $1 AND c.handler_node_id = $2 AND c.name = $3"))
            .bind(scope.workspace_id().get())
            .bind(node)
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an action of a node"))
    }

    /// The actions that names lead to, by name; with `available_to` those that this agent may invoke or handles,
    /// without those that everybody may.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn actions(
        &self,
        scope: WorkspaceScope,
        available_to: Option<(AgentId, &str)>,
        limit: i64,
    ) -> StoreResult<Vec<ActionRow>> {
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.claims_name AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)
               AND (c.available_to IS NULL OR $3 = ANY (c.available_to) OR c.handler_agent_id = $2)
             ORDER BY c.name LIMIT $4"
        ))
        .bind(scope.workspace_id().get())
        .bind(available_to.map(|(id, _)| id.get()))
        .bind(available_to.map(|(_, name)| name))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing actions"))
    }

    /// The names of what an agent handles, and of what it may invoke, by name; with `reader` only what that agent may
    /// see itself. At most `limit` in all.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn actions_of_agent(
        &self,
        scope: WorkspaceScope,
        agent: (AgentId, &str),
        reader: Option<(AgentId, &str)>,
        limit: i64,
    ) -> StoreResult<(Vec<String>, Vec<String>)> {
        let rows: Vec<(String, bool, bool)> = sqlx::query_as(
            "SELECT name, handles, may
               FROM (SELECT c.name, coalesce(c.handler_agent_id = $2, false) AS handles,
                            c.available_to IS NULL OR $3 = ANY (c.available_to) AS may,
                            $4::bigint IS NULL OR c.available_to IS NULL OR $5 = ANY (c.available_to)
                                OR coalesce(c.handler_agent_id = $4, false) AS shown
                       FROM actions c
                       LEFT JOIN agents a ON a.workspace_id = c.workspace_id AND a.agent_id = c.handler_agent_id
                      WHERE c.workspace_id = $1 AND c.claims_name
                        AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)) AS c
              WHERE shown AND (handles OR may)
              ORDER BY handles DESC, name LIMIT $6",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.0.get())
        .bind(agent.1)
        .bind(reader.map(|(id, _)| id.get()))
        .bind(reader.map(|(_, name)| name))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the actions of an agent"))?;
        let handled = rows.iter().filter(|(_, handles, _)| *handles).map(|(name, ..)| name.clone()).collect();
        let mut open: Vec<String> = rows.into_iter().filter(|(_, _, may)| *may).map(|(name, ..)| name).collect();
        open.sort_unstable();
        Ok((handled, open))
    }

    /// Deletes an action. What was invoked by it goes on. False when it is gone already.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_action(&self, scope: WorkspaceScope, action: ActionId) -> StoreResult<bool> {
        let gone = sqlx::query("DELETE FROM actions WHERE workspace_id = $1 AND action_id = $2")
            .bind(scope.workspace_id().get())
            .bind(action.get())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("deleting an action"))?;
        Ok(gone.rows_affected() == 1)
    }

    /// Whether a node advertises a capability, over a socket or by REST; its kind if it does: `capacity` when some of
    /// its providers have it as an action and some as a capacity.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn capability_kind_on(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        name: &str,
    ) -> StoreResult<Option<String>> {
        sqlx::query_scalar(
            "SELECT kind FROM (
                 SELECT 0 AS rank, kind FROM node_capabilities
                  WHERE workspace_id = $1 AND node_id = $2 AND name = $3
                 UNION ALL
                 SELECT 1, coalesce(c ->> 'kind', 'action')
                   FROM nodes n CROSS JOIN LATERAL jsonb_array_elements(n.capabilities) AS c
                  WHERE n.workspace_id = $1 AND n.node_id = $2 AND c ->> 'name' = $3
             ) AS known ORDER BY rank, kind DESC LIMIT 1",
        )
        .bind(scope.workspace_id().get())
        .bind(node.as_str())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for a capability of a node"))
    }

    /// Whether any node advertises a capacity of this name.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn capacity_exists(&self, scope: WorkspaceScope, name: &str) -> StoreResult<bool> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM node_capabilities
                             WHERE workspace_id = $1 AND name = $2 AND kind = 'capacity')",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for a capacity"))
    }
}
