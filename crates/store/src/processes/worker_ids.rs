//! Leases of the worker numbers in snowflake ids, so that no two processes generate the same id.

use crate::{Store, StoreError, StoreResult, statement_timeout::StatementTimeout as _};

impl Store {
    /// Leases the worker number that has been free for longest, for `seconds`. Returns `None` if all are leased. The
    /// oldest comes first because a process that lost its lease may still use its number for a moment.
    pub async fn lease_worker_id(&self, owner: &str, seconds: i32) -> StoreResult<Option<i16>> {
        // SKIP LOCKED: processes that start together take different numbers instead of waiting for one.
        sqlx::query_scalar(
            "UPDATE worker_ids SET owner = $1, lease_until = relay_now() + make_interval(secs => $2)
             WHERE worker_id = (
                SELECT worker_id FROM worker_ids WHERE lease_until < relay_now()
                ORDER BY lease_until, worker_id LIMIT 1 FOR UPDATE SKIP LOCKED
             )
             RETURNING worker_id",
        )
        .bind(owner)
        .bind(f64::from(seconds))
        .fetch_optional(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("leasing a worker number"))
    }

    /// Renews a lease. Returns `false` if the number has another owner.
    pub async fn renew_worker_id(&self, worker: i16, owner: &str, seconds: i32) -> StoreResult<bool> {
        // The lease may have expired: as long as the number has no other owner, no other process has used it.
        let renewed = sqlx::query(
            "UPDATE worker_ids SET lease_until = relay_now() + make_interval(secs => $3)
             WHERE worker_id = $1 AND owner = $2",
        )
        .bind(worker)
        .bind(owner)
        .bind(f64::from(seconds))
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("renewing a worker number"))?;
        Ok(renewed.rows_affected() == 1)
    }
}
