//! Rate limits: gateways acquire units of a minute's limit in batches.

use relay_domain::WorkspaceScope;

use crate::{Store, StoreError, StoreResult, statement_timeout::StatementTimeout as _};

/// Result of an acquisition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimitGrant {
    /// Units granted to the caller.
    pub granted: u32,
    /// Units that all gateways have acquired in that minute.
    pub acquired_by_all: u32,
}

impl Store {
    /// Acquires up to `wanted` of an account's `limit` units for one minute. Returns 0 for a minute that is over
    /// because a gateway has acquired units of a later one.
    ///
    /// The statement repeats `relay_domain::workspaces::rate_limit::grant_units`. The row of the account serializes the
    /// gateways.
    pub async fn acquire_rate_limit_units(
        &self,
        scope: WorkspaceScope,
        account: &str,
        minute: i64,
        limit: u32,
        wanted: u32,
    ) -> StoreResult<RateLimitGrant> {
        // A number above the range of the column is never reached.
        let units = |units: u32| i32::try_from(units).unwrap_or(i32::MAX);
        let (granted, acquired): (i32, i32) = sqlx::query_as(
            "INSERT INTO rate_budgets AS b (workspace_id, account, minute, taken, given)
             VALUES ($1, $2, $3, least($4, $5), least($4, $5))
             ON CONFLICT (workspace_id, account) DO UPDATE SET
                minute = greatest(b.minute, $3),
                given = CASE WHEN b.minute < $3 THEN excluded.given
                             WHEN b.minute = $3 THEN greatest(0, least($4, $5 - b.taken))
                             ELSE 0 END,
                taken = CASE WHEN b.minute < $3 THEN excluded.taken
                             WHEN b.minute = $3 THEN b.taken + greatest(0, least($4, $5 - b.taken))
                             ELSE b.taken END
             RETURNING given, taken",
        )
        .bind(scope.workspace_id())
        .bind(account)
        .bind(minute)
        .bind(units(wanted))
        .bind(units(limit))
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("acquiring rate limit units"))?;
        Ok(RateLimitGrant { granted: granted.unsigned_abs(), acquired_by_all: acquired.unsigned_abs() })
    }

    /// Removes up to `limit` accounts without an acquisition since `minute`. Returns their number.
    pub async fn prune_rate_limits(&self, minute: i64, limit: i64) -> StoreResult<u64> {
        // Rows that a gateway is acquiring from are skipped: they are no longer old.
        let done = sqlx::query(
            "DELETE FROM rate_budgets b
              USING (SELECT workspace_id, account FROM rate_budgets
                      WHERE minute < $1 ORDER BY minute LIMIT $2
                        FOR UPDATE SKIP LOCKED) AS old
              WHERE b.workspace_id = old.workspace_id AND b.account = old.account",
        )
        .bind(minute)
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning rate limits"))?;
        Ok(done.rows_affected())
    }
}
