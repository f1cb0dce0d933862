//! Gateways whose lease is gone: their sockets are gone too, or will be fenced off.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::{
    Store, StoreError, StoreResult,
    liveness::{Condemned, Disconnected, disconnect},
};

// A gateway without a row gave its lease back, or never had one: nobody speaks for its sockets either.
const ORPHANS: &str = "
SELECT p.workspace_id, p.node_id, p.provider, p.epoch, p.gateway_id
  FROM providers p
 WHERE p.gateway_id IS NOT NULL
   AND NOT EXISTS (SELECT FROM gateways g
                    WHERE g.gateway_id = p.gateway_id
                      AND g.lease_until >= now() - make_interval(secs => $1))
 ORDER BY p.workspace_id, p.node_id, p.provider LIMIT $2
   FOR UPDATE OF p SKIP LOCKED";

impl Store {
    /// Disconnects up to `limit` providers whose gateway's lease has been gone for `grace`, marks their agents
    /// offline, and records both.
    ///
    /// Judge only when this process has itself seen Postgres up for longer than a lease and the grace: while
    /// Postgres was away, nobody could renew.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn disconnect_orphaned_providers(
        &self,
        grace: Duration,
        limit: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<Disconnected> {
        let doing = "disconnecting the providers of dead gateways";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(ORPHANS)
            .bind(grace.as_secs_f64())
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let changed = disconnect(&mut tx, &Condemned::from_rows(&rows), "disconnected", at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }

    /// Removes the rows of gateways whose lease ended `age` ago and that no provider refers to any more.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn remove_dead_gateways(&self, age: Duration) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM gateways g
              WHERE g.lease_until < now() - make_interval(secs => $1)
                AND NOT EXISTS (SELECT FROM providers p WHERE p.gateway_id = g.gateway_id)",
        )
        .bind(age.as_secs_f64())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("removing the rows of dead gateways"))?;
        Ok(done.rows_affected())
    }
}
