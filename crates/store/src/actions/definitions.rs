//! Definitions of actions as read: [`Action`]. Called by the engine's action use cases.

use const_format::formatcp;
use relay_domain::{ActionId, AgentId, NodeId, WorkspaceScope, actions::Action, nodes::CapabilityKind};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult, decode::decode_row, sizes::ACTION_BYTES};

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

/// Handlers that the name of an action leads to in a workspace.
#[derive(Debug)]
pub struct NamedHandlers {
    /// Action that owns the name, unless its handler was deleted.
    pub action: Option<Action>,
    /// `true` if any node advertises a capacity with this name.
    pub is_capacity: bool,
}

impl FromRow<'_, PgRow> for NamedHandlers {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let is_owned = row.try_get::<Option<ActionId>, _>("action_id")?.is_some();
        let action = if is_owned { Some(Action::from_row(row)?) } else { None };
        Ok(Self { action, is_capacity: row.try_get("is_capacity")? })
    }
}

impl Store {
    /// Returns the action that owns a name, and whether the name is that of a capacity.
    pub async fn named_handlers(&self, scope: WorkspaceScope, name: &str) -> StoreResult<NamedHandlers> {
        // Joined to a row that always exists: the name may be that of a capacity and of no action.
        sqlx::query_as(concat!(
            "SELECT k.is_capacity, o.*
               FROM (SELECT EXISTS (SELECT FROM node_capabilities
                                     WHERE workspace_id = $1 AND name = $2 AND kind = 'capacity')) AS k (is_capacity)
               LEFT JOIN (",
            select!(
                "WHERE c.workspace_id = $1 AND c.name = $2 AND c.claims_name
                   AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)"
            ),
            ") AS o ON true"
        ))
        .bind(scope.workspace_id())
        .bind(name)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the handlers of a name"))
    }

    /// Returns the action that owns a name, unless its handler was deleted.
    pub async fn action(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<Action>> {
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.name = $2 AND c.claims_name
               AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)"
        ))
        .bind(scope.workspace_id())
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an action"))
    }

    /// Returns a node's own action with this name, even if another handler owns the name in the workspace.
    pub async fn action_of_node(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        name: &str,
    ) -> StoreResult<Option<Action>> {
        sqlx::query_as(select!("WHERE c.workspace_id = $1 AND c.handler_node_id = $2 AND c.name = $3"))
            .bind(scope.workspace_id())
            .bind(node)
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an action of a node"))
    }

    /// Returns the actions of nodes with this name that own it on their node only, at most `limit`.
    pub async fn node_actions_named(&self, scope: WorkspaceScope, name: &str, limit: i64) -> StoreResult<Vec<Action>> {
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.name = $2 AND NOT c.claims_name AND c.handler_node_id IS NOT NULL
             ORDER BY c.action_id LIMIT $3"
        ))
        .bind(scope.workspace_id())
        .bind(name)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading actions of nodes"))
    }

    /// Returns the policy that is invoked instead of a capacity with one of these names, the most specific name first:
    /// an action of the target node, or one that owns the name in the workspace. Only a provider's capability makes an
    /// action a policy.
    pub async fn capacity_policy(
        &self,
        scope: WorkspaceScope,
        target: Option<&NodeId>,
        names: &[&str],
    ) -> StoreResult<Option<Action>> {
        // Without a target the first key of the order is null for all.
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.name = ANY ($3) AND (c.claims_name OR c.handler_node_id = $2)
               AND EXISTS (SELECT FROM node_capabilities k
                            WHERE k.workspace_id = c.workspace_id AND k.node_id = c.handler_node_id AND k.name = c.name
                              AND k.provider = coalesce(c.provider, k.provider) AND k.kind = 'action')
             ORDER BY (c.handler_node_id = $2) DESC NULLS LAST, array_position($3, c.name) LIMIT 1"
        ))
        .bind(scope.workspace_id())
        .bind(target)
        .bind(names)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the policy of a capacity"))
    }

    /// Lists the actions that own their names, ordered by name, each with an upper bound of its size. With
    /// `available_to`, only those that this agent may invoke or handles.
    pub async fn action_sizes(
        &self,
        scope: WorkspaceScope,
        available_to: Option<(AgentId, &str)>,
        limit: i64,
    ) -> StoreResult<Vec<(ActionId, usize)>> {
        let rows: Vec<(ActionId, i64)> = sqlx::query_as(formatcp!(
            "SELECT c.action_id, {ACTION_BYTES}::bigint
               FROM actions c
               LEFT JOIN agents a ON a.workspace_id = c.workspace_id AND a.agent_id = c.handler_agent_id
              WHERE c.workspace_id = $1 AND c.claims_name AND (c.handler_agent_id IS NULL OR a.deleted_at IS NULL)
                AND (c.available_to IS NULL OR $3 = ANY (c.available_to) OR c.handler_agent_id = $2)
              ORDER BY c.name LIMIT $4"
        ))
        .bind(scope.workspace_id())
        .bind(available_to.map(|(id, _)| id))
        .bind(available_to.map(|(_, name)| name))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing actions"))?;
        Ok(rows.into_iter().map(|(action, bytes)| (action, usize::try_from(bytes).unwrap_or(usize::MAX))).collect())
    }

    /// Reads those of these actions that still own their names, ordered by name.
    pub async fn actions(&self, scope: WorkspaceScope, actions: &[ActionId]) -> StoreResult<Vec<Action>> {
        sqlx::query_as(select!(
            "WHERE c.workspace_id = $1 AND c.action_id = ANY ($2) AND c.claims_name
             ORDER BY c.name"
        ))
        .bind(scope.workspace_id())
        .bind(actions)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading actions"))
    }

    /// Returns the kind of a capability that a node advertises over its socket or over REST. Providers take precedence
    /// over REST, and `capacity` over `action`.
    pub async fn node_capability_kind(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        name: &str,
    ) -> StoreResult<Option<CapabilityKind>> {
        // `capacity` sorts after `action`, so that DESC puts it first.
        let row = sqlx::query(
            "SELECT kind FROM (
                 SELECT 0 AS rank, kind FROM node_capabilities
                  WHERE workspace_id = $1 AND node_id = $2 AND name = $3
                 UNION ALL
                 SELECT 1, coalesce(c ->> 'kind', 'action')
                   FROM nodes n CROSS JOIN LATERAL jsonb_array_elements(n.capabilities) AS c
                  WHERE n.workspace_id = $1 AND n.node_id = $2 AND c ->> 'name' = $3
             ) AS advertised ORDER BY rank, kind DESC LIMIT 1",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a capability of a node"))?;
        let kind = row.map(|row| decode_row("node_capabilities", &row)).transpose()?;
        Ok(kind.map(|(kind,)| kind))
    }
}
