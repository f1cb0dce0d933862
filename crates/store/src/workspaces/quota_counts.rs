//! Quota check: counts the rows of a workspace in the transaction that adds one.

use const_format::formatcp;
use relay_domain::{WorkspaceScope, workspaces::plan::Quota};

use crate::{StoreError, StoreResult, codes::CHANNEL, connections::DatabaseSession};

/// Returns whether a workspace is within `quota` after the insertion by this transaction; `None` is unlimited. The
/// caller rolls back if it is not.
pub(crate) async fn is_within_quota(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    quota: Quota,
    most: Option<i64>,
) -> StoreResult<bool> {
    let Some(most) = most else { return Ok(true) };
    let doing = "counting rows against a quota";
    // The LIMIT ends the count one past the quota, so that its cost does not grow with the workspace.
    let count = match quota {
        Quota::Agents => {
            "SELECT count(*) FROM
                (SELECT FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL LIMIT $2 + 1) AS counted"
        }
        Quota::Channels => {
            formatcp!(
                "SELECT count(*) FROM
                    (SELECT FROM channels WHERE workspace_id = $1 AND type = {CHANNEL} LIMIT $2 + 1) AS counted"
            )
        }
        Quota::Nodes => {
            "SELECT count(*) FROM (SELECT FROM nodes WHERE workspace_id = $1 AND NOT starts_with(node_id, 'node_direct_')
              LIMIT $2 + 1) AS counted"
        }
        Quota::ChildWorkspaces => {
            "SELECT count(*) FROM
                (SELECT FROM workspaces WHERE created_by = $1 AND deleted_at IS NULL
                    AND (expires_at IS NULL OR expires_at > relay_now()) LIMIT $2 + 1) AS counted"
        }
        // The statements that add these check their quota themselves.
        Quota::Webhooks | Quota::Subscriptions | Quota::ObserverTokens | Quota::FileBytes => return Ok(true),
    };
    // Serializes the transactions that add to one quota: the uncommitted rows of one are invisible to the count of
    // another. Held until the transaction ends. Releases that run side by side must agree on the text 'ceiling '.
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('ceiling ' || $2, $1))")
        .bind(scope.workspace_id())
        .bind(quota.as_str())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let found: i64 = sqlx::query_scalar(count)
        .bind(scope.workspace_id())
        .bind(most)
        .fetch_one(tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    Ok(found <= most)
}
