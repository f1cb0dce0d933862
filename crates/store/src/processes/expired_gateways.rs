//! Cleanup after gateways whose lease expired: their providers are disconnected, and connections that still exist are
//! fenced. Called by the liveness worker.

use std::time::Duration;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::nodes::GATEWAY_GRACE;

use crate::{
    Store, StoreError, StoreResult,
    nodes::liveness::{DisconnectOutcome, ProvidersToDisconnect, disconnect},
};

const GRACE_SECONDS: u64 = GATEWAY_GRACE.as_secs();

// Gateways that hold providers, and whose lease expired more than the grace ago. One look-up per gateway, not per
// provider, of which there are thousands. A missing row counts as expired: the gateway released its lease or never had
// one.
const EXPIRED_HOLDERS: &str = formatcp!(
    "WITH RECURSIVE holders (gateway_id) AS (
        (SELECT gateway_id FROM providers WHERE gateway_id IS NOT NULL ORDER BY gateway_id LIMIT 1)
         UNION ALL
        SELECT (SELECT p.gateway_id FROM providers p WHERE p.gateway_id > h.gateway_id ORDER BY p.gateway_id LIMIT 1)
          FROM holders h WHERE h.gateway_id IS NOT NULL
    )
    SELECT h.gateway_id FROM holders h
     WHERE h.gateway_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM gateways g
                        WHERE g.gateway_id = h.gateway_id
                          AND g.lease_until >= relay_now() - interval '{GRACE_SECONDS} seconds')"
);

// SKIP LOCKED: a provider that is being registered elsewhere belongs to another gateway afterwards.
const ORPHANS: &str = formatcp!(
    "SELECT p.workspace_id, p.node_id, p.provider, p.epoch, p.gateway_id
       FROM providers p
      WHERE p.gateway_id = ANY (ARRAY({EXPIRED_HOLDERS}))
      ORDER BY p.workspace_id, p.node_id, p.provider LIMIT $1
        FOR UPDATE OF p SKIP LOCKED"
);

/// Condition: a provider is connected to a gateway whose lease expired more than the grace ago.
pub(crate) const HAS_ORPHANS: &str = formatcp!("EXISTS ({EXPIRED_HOLDERS})");

impl Store {
    /// Disconnects up to `limit` providers whose gateway's lease expired more than [`GATEWAY_GRACE`] ago, marks their
    /// agents offline, and records both.
    ///
    /// Call only if this process has seen Postgres available for longer than a lease and the grace: during an outage no
    /// gateway can renew.
    pub async fn disconnect_orphaned_providers(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<DisconnectOutcome> {
        let doing = "disconnecting the providers of expired gateways";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let rows = sqlx::query(ORPHANS).bind(limit).fetch_all(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
        let changed = disconnect(&mut tx, &ProvidersToDisconnect::from_rows(&rows)?, "disconnected", at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }

    /// Deletes gateways whose lease ended more than `age` ago and that no provider refers to. Returns the number of
    /// deleted rows.
    pub async fn remove_expired_gateways(&self, age: Duration) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM gateways g
              WHERE g.lease_until < relay_now() - make_interval(secs => $1)
                AND NOT EXISTS (SELECT FROM providers p WHERE p.gateway_id = g.gateway_id)",
        )
        .bind(age.as_secs_f64())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting expired gateways"))?;
        Ok(done.rows_affected())
    }
}
