//! Retention of the queue of event subscriptions. Called by the worker's pruning loop.

use std::time::Duration;

use crate::{Store, StoreError, StoreResult};

impl Store {
    /// Removes at most `limit` deliveries older than `age` that are not pending, or whose subscription is disabled.
    pub async fn prune_subscription_deliveries(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM subscription_deliveries d
              USING (SELECT workspace_id, subscription_id, delivery_id FROM subscription_deliveries o
                      WHERE created_at < relay_now() - make_interval(secs => $1)
                        AND (status <> 'pending'
                             OR NOT EXISTS (SELECT FROM subscriptions s
                                             WHERE s.workspace_id = o.workspace_id
                                               AND s.subscription_id = o.subscription_id AND s.is_active))
                      -- A row whose attempt is being recorded stays until the next pass.
                      ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE d.workspace_id = old.workspace_id AND d.subscription_id = old.subscription_id
                AND d.delivery_id = old.delivery_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning deliveries of subscriptions"))?;
        Ok(done.rows_affected())
    }

    /// Removes at most `limit` bodies older than `age` that no delivery refers to. Call after
    /// [`prune_subscription_deliveries`](Self::prune_subscription_deliveries).
    pub async fn prune_subscription_bodies(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        // Callers keep bodies for longer than events, so that no replay can queue an event whose body is removed here.
        let done = sqlx::query(
            "DELETE FROM subscription_bodies b
              USING (SELECT workspace_id, event_seq FROM subscription_bodies o
                      WHERE created_at < relay_now() - make_interval(secs => $1)
                        -- Deliveries have the time of their event, by which there is an index.
                        AND NOT EXISTS (SELECT FROM subscription_deliveries d
                                         WHERE d.created_at = o.created_at AND d.workspace_id = o.workspace_id
                                           AND d.event_seq = o.event_seq)
                      ORDER BY created_at LIMIT $2) AS old
              WHERE b.workspace_id = old.workspace_id AND b.event_seq = old.event_seq",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning bodies of subscriptions"))?;
        Ok(done.rows_affected())
    }
}
