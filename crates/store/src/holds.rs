//! Who is kept out: suspended workspaces and drained nodes.

use relay_domain::{NodeId, WorkspaceId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, patience::Patient as _};

/// SQL: whether the workspace of a row is over, or suspended. Then nothing is sent to the addresses that it has given.
macro_rules! is_held {
    ($row:literal) => {
        concat!(
            "EXISTS (SELECT FROM workspaces held WHERE held.workspace_id = ",
            $row,
            ".workspace_id AND (held.deleted_at IS NOT NULL OR held.suspended_at IS NOT NULL OR held.expires_at <= now()))"
        )
    };
}
pub(crate) use is_held;

/// Everybody who is kept out now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HoldRows {
    /// Suspended workspaces.
    pub suspended: Vec<WorkspaceId>,
    /// Nodes without a socket.
    pub drained: Vec<(WorkspaceScope, NodeId)>,
}

impl Store {
    /// Everybody who is kept out now.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn holds(&self) -> StoreResult<HoldRows> {
        let rows: Vec<(i64, Option<String>)> = sqlx::query_as(
            "SELECT workspace_id, NULL FROM workspaces WHERE suspended_at IS NOT NULL AND deleted_at IS NULL
             UNION ALL
             SELECT workspace_id, node_id FROM nodes WHERE draining_at IS NOT NULL AND drained_at <= now()",
        )
        .fetch_all(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("reading who is kept out"))?;
        let mut holds = HoldRows::default();
        for (workspace, node) in rows {
            let workspace = WorkspaceId::new(workspace);
            match node {
                None => holds.suspended.push(workspace),
                Some(node) => holds.drained.push((WorkspaceScope::from_engine_row(workspace), NodeId::new(node))),
            }
        }
        Ok(holds)
    }

    /// Suspends a living workspace, or lets it go on. `None` when there is none, else whether that changed anything.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn set_suspended(&self, scope: WorkspaceScope, suspended: bool) -> StoreResult<Option<bool>> {
        sqlx::query_scalar(
            "WITH found AS (
                SELECT workspace_id, suspended_at IS NOT NULL AS was FROM workspaces
                 WHERE workspace_id = $1 AND deleted_at IS NULL FOR UPDATE
             ), changed AS (
                UPDATE workspaces w SET suspended_at = CASE WHEN $2 THEN now() END
                  FROM found WHERE w.workspace_id = found.workspace_id AND found.was <> $2
             )
             SELECT was <> $2 FROM found",
        )
        .bind(scope.workspace_id().get())
        .bind(suspended)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("suspending a workspace"))
    }

    /// Drains a node by id or name, its sockets after `grace_seconds`; or, with `None`, lets it come back. Returns its
    /// id, `None` when there is no such node.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn set_drained(
        &self,
        scope: WorkspaceScope,
        node: &str,
        grace_seconds: Option<i32>,
    ) -> StoreResult<Option<String>> {
        sqlx::query_scalar(
            "UPDATE nodes
                SET draining_at = CASE WHEN $3::int IS NOT NULL THEN coalesce(draining_at, now()) END,
                    drained_at = CASE WHEN $3::int IS NOT NULL THEN now() + make_interval(secs => $3) END
              WHERE workspace_id = $1 AND node_id = (
                    SELECT node_id FROM nodes WHERE workspace_id = $1 AND (node_id = $2 OR name = $2)
                     ORDER BY node_id = $2 DESC LIMIT 1)
             RETURNING node_id",
        )
        .bind(scope.workspace_id().get())
        .bind(node)
        .bind(grace_seconds)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("draining a node"))
    }

    /// How much a node still does: processes that are connected, and invocations that it was given.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn work_of_node(&self, scope: WorkspaceScope, node: &str) -> StoreResult<(i64, i64)> {
        sqlx::query_as(
            "SELECT (SELECT count(*) FROM providers p JOIN gateways g USING (gateway_id)
                      WHERE p.workspace_id = $1 AND p.node_id = $2 AND g.lease_until > now()),
                    (SELECT count(*) FROM invocations
                      WHERE workspace_id = $1 AND node_id = $2 AND status = 'dispatched')",
        )
        .bind(scope.workspace_id().get())
        .bind(node)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading what a node still does"))
    }
}
