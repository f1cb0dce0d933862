//! Suspended workspaces and drained nodes, which gateways refuse.

use relay_domain::{NodeId, WorkspaceId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, statement_timeout::StatementTimeout as _};

/// SQL condition: the workspace of a row is deleted, expired or suspended, or its creator is suspended. Nothing is sent
/// to its endpoints then.
macro_rules! is_suspended {
    ($row:literal) => {
        concat!(
            "EXISTS (SELECT FROM workspaces held WHERE held.workspace_id = ",
            $row,
            ".workspace_id AND (held.deleted_at IS NOT NULL OR held.suspended_at IS NOT NULL OR held.expires_at <= relay_now()
                 OR EXISTS (SELECT FROM workspaces creator WHERE creator.workspace_id = held.created_by
                               AND creator.suspended_at IS NOT NULL AND creator.deleted_at IS NULL)))"
        )
    };
}
pub(crate) use is_suspended;

/// Condition: [`Store::suspensions`] returns anything. In the order of the indexes, so that no plan reads the other
/// rows.
pub(crate) const HAS_SUSPENDED: &str = "(
    (SELECT true FROM workspaces WHERE suspended_at IS NOT NULL AND deleted_at IS NULL
      ORDER BY workspace_id LIMIT 1) IS NOT NULL
     OR (SELECT true FROM nodes WHERE draining_at IS NOT NULL AND drained_at <= relay_now()
          ORDER BY workspace_id, node_id LIMIT 1) IS NOT NULL)";

/// Workspaces and nodes that gateways refuse.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SuspensionRows {
    pub suspended: Vec<WorkspaceId>,
    /// Nodes whose grace period is over.
    pub drained: Vec<(WorkspaceScope, NodeId)>,
}

/// Work of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub struct NodeWorkload {
    pub connected_providers: i64,
    pub dispatched_invocations: i64,
}

impl Store {
    /// Returns all suspended workspaces, with the children of these, and drained nodes.
    pub async fn suspensions(&self) -> StoreResult<SuspensionRows> {
        // UNION: a child that is suspended itself, and by its creator, is listed once.
        let rows: Vec<(WorkspaceId, Option<NodeId>)> = sqlx::query_as(
            "SELECT workspace_id, NULL FROM workspaces WHERE suspended_at IS NOT NULL AND deleted_at IS NULL
             UNION
             SELECT child.workspace_id, NULL
               FROM workspaces creator JOIN workspaces child ON child.created_by = creator.workspace_id
              WHERE creator.suspended_at IS NOT NULL AND creator.deleted_at IS NULL AND child.deleted_at IS NULL
             UNION ALL
             SELECT workspace_id, node_id FROM nodes WHERE draining_at IS NOT NULL AND drained_at <= relay_now()",
        )
        .fetch_all(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("reading suspensions"))?;
        let mut refused = SuspensionRows::default();
        for (workspace, node) in rows {
            match node {
                None => refused.suspended.push(workspace),
                Some(node) => refused.drained.push((WorkspaceScope::from_engine_row(workspace), node)),
            }
        }
        Ok(refused)
    }

    /// Suspends or resumes a workspace, and with it its children that are not suspended themselves. Returns whether
    /// that changed anything; `None` if it is deleted.
    pub async fn set_suspended(&self, scope: WorkspaceScope, suspended: bool) -> StoreResult<Option<bool>> {
        // The lock lets one of two operators change the state; the other learns that it was changed before.
        sqlx::query_scalar(
            "WITH found AS (
                SELECT workspace_id, suspended_at IS NOT NULL AS was FROM workspaces
                 WHERE workspace_id = $1 AND deleted_at IS NULL FOR UPDATE
             ), changed AS (
                UPDATE workspaces w SET suspended_at = CASE WHEN $2 THEN relay_now() END
                  FROM found WHERE w.workspace_id = found.workspace_id AND found.was <> $2
             )
             SELECT was <> $2 FROM found",
        )
        .bind(scope.workspace_id())
        .bind(suspended)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("suspending a workspace"))
    }

    /// Drains a node, given by id or name, and refuses its sockets after `grace_seconds`. `None` ends the drain.
    /// Returns the id of the node.
    pub async fn set_drained(
        &self,
        scope: WorkspaceScope,
        node: &str,
        grace_seconds: Option<i32>,
    ) -> StoreResult<Option<NodeId>> {
        // A repeated drain keeps its beginning and moves the end of the grace. An id takes precedence over an equal
        // name.
        sqlx::query_scalar(
            "UPDATE nodes
                SET draining_at = CASE WHEN $3::int IS NOT NULL THEN coalesce(draining_at, relay_now()) END,
                    drained_at = CASE WHEN $3::int IS NOT NULL THEN relay_now() + make_interval(secs => $3) END
              WHERE workspace_id = $1 AND node_id = (
                    SELECT node_id FROM nodes WHERE workspace_id = $1 AND (node_id = $2 OR name = $2)
                     ORDER BY node_id = $2 DESC LIMIT 1)
             RETURNING node_id",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .bind(grace_seconds)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("draining a node"))
    }

    /// Returns the work of a node that a drain waits for.
    pub async fn node_workload(&self, scope: WorkspaceScope, node: &NodeId) -> StoreResult<NodeWorkload> {
        // A provider counts as connected only while the lease of its gateway is valid.
        sqlx::query_as(
            "SELECT (SELECT count(*) FROM providers p JOIN gateways g USING (gateway_id)
                      WHERE p.workspace_id = $1 AND p.node_id = $2 AND g.lease_until > relay_now()) AS connected_providers,
                    (SELECT count(*) FROM invocations
                      WHERE workspace_id = $1 AND node_id = $2 AND status = 'dispatched') AS dispatched_invocations",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the workload of a node"))
    }
}
