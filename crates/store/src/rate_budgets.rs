//! Request budgets: gateways take units of a minute's budget in batches.

use relay_domain::WorkspaceScope;

use crate::{Store, StoreError, StoreResult, patience::Patient as _};

/// What a taking got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Units for the asker.
    pub got: u32,
    /// Units that all gateways have taken in that minute.
    pub by_all: u32,
}

impl Store {
    /// Takes up to `wanted` units of an account's budget for one minute, as `relay_domain::rate::give` says.
    /// Nothing is left of a minute once a later one has begun.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn take_of_budget(
        &self,
        scope: WorkspaceScope,
        account: &str,
        minute: i64,
        budget: u32,
        wanted: u32,
    ) -> StoreResult<Taken> {
        let units = |units: u32| i32::try_from(units).unwrap_or(i32::MAX);
        let (given, taken): (i32, i32) = sqlx::query_as(
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
        .bind(scope.workspace_id().get())
        .bind(account)
        .bind(minute)
        .bind(units(wanted))
        .bind(units(budget))
        .fetch_one(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("taking of a request budget"))?;
        Ok(Taken { got: given.unsigned_abs(), by_all: taken.unsigned_abs() })
    }

    /// Removes up to `limit` accounts that nobody has taken from since before `minute`. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_rate_budgets(&self, minute: i64, limit: i64) -> StoreResult<u64> {
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
        .map_err(StoreError::from_sqlx("pruning request budgets"))?;
        Ok(done.rows_affected())
    }
}
