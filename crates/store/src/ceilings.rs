//! How many of something a workspace has, counted in the transaction that adds one.

use relay_domain::{WorkspaceScope, plan::Ceiling};
use sqlx::PgConnection;

use crate::{StoreError, StoreResult};

/// Whether a workspace is still within `ceiling` now that this transaction has added to it; `None` is no
/// ceiling. If it is not, the caller rolls back. Of several transactions that add at the same moment, one
/// goes on, and the others wait for its end, so that none of them misses what another adds.
pub(crate) async fn is_within(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    ceiling: Ceiling,
    most: Option<i64>,
) -> StoreResult<bool> {
    let Some(most) = most else { return Ok(true) };
    let doing = "counting what a plan limits";
    // Counting ends one past the ceiling.
    let count = match ceiling {
        Ceiling::Agents => {
            "SELECT count(*) FROM
                (SELECT FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL LIMIT $2 + 1) AS counted"
        }
        Ceiling::Channels => {
            "SELECT count(*) FROM (SELECT FROM channels WHERE workspace_id = $1 AND type = 0 LIMIT $2 + 1) AS counted"
        }
        Ceiling::Nodes => {
            "SELECT count(*) FROM (SELECT FROM nodes WHERE workspace_id = $1 AND NOT starts_with(node_id, 'node_direct_')
              LIMIT $2 + 1) AS counted"
        }
        Ceiling::Webhooks | Ceiling::Subscriptions | Ceiling::ObserverTokens | Ceiling::FileBytes => return Ok(true),
    };
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('ceiling ' || $2, $1))")
        .bind(scope.workspace_id().get())
        .bind(ceiling.as_str())
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let found: i64 = sqlx::query_scalar(count)
        .bind(scope.workspace_id().get())
        .bind(most)
        .fetch_one(tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    Ok(found <= most)
}
