//! Workspaces whose search index is wanted, because they have searched or read statistics within the last weeks.

use relay_domain::WorkspaceScope;

use crate::{Store, StoreError, StoreResult};

/// Days for which the index of a workspace is wanted after a search.
const WANTED_DAYS: i32 = 30;

impl Store {
    /// Returns whether the index of any workspace is wanted.
    pub(super) async fn wants_any_index(&self) -> StoreResult<bool> {
        // The first condition on the time is that of the index.
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM search_progress WHERE wanted_until > '-infinity' AND wanted_until > relay_now())",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for wanted search indexes"))
    }

    /// Marks the index of a workspace as wanted. Most calls find it marked and write nothing.
    pub async fn want_index(&self, scope: WorkspaceScope) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO search_progress AS p (workspace_id, wanted_until)
             SELECT $1, relay_now() + make_interval(days => $2)
              WHERE NOT EXISTS (SELECT FROM search_progress
                                 WHERE workspace_id = $1 AND wanted_until > relay_now() + make_interval(days => $2) / 2)
             ON CONFLICT (workspace_id) DO UPDATE SET wanted_until = excluded.wanted_until",
        )
        .bind(scope.workspace_id())
        .bind(WANTED_DAYS)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("marking a search index as wanted"))?;
        Ok(())
    }
}
