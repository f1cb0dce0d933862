//! Gateway leases: who is alive, for everybody else to see.

use std::time::Duration;

use relay_domain::GatewayId;

use crate::{Store, StoreError, StoreResult};

/// What came of renewing a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// Held until the new expiry.
    Held,
    /// The row is gone or had expired: others may have taken over. Never reuse the id.
    Lost,
}

impl Store {
    /// Takes the lease of a new gateway run.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn take_gateway_lease(&self, gateway: GatewayId, ttl: Duration) -> StoreResult<()> {
        sqlx::query("INSERT INTO gateways (gateway_id, lease_until) VALUES ($1, now() + make_interval(secs => $2))")
            .bind(gateway.get())
            .bind(ttl.as_secs_f64())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("taking a gateway lease"))?;
        Ok(())
    }

    /// Renews a lease that has not expired.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn renew_gateway_lease(&self, gateway: GatewayId, ttl: Duration) -> StoreResult<Renewal> {
        let renewed = sqlx::query(
            "UPDATE gateways SET lease_until = now() + make_interval(secs => $2)
              WHERE gateway_id = $1 AND lease_until > now()",
        )
        .bind(gateway.get())
        .bind(ttl.as_secs_f64())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("renewing a gateway lease"))?;
        Ok(if renewed.rows_affected() == 1 { Renewal::Held } else { Renewal::Lost })
    }

    /// Gives the lease back at the end of a drain.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn release_gateway_lease(&self, gateway: GatewayId) -> StoreResult<()> {
        sqlx::query("DELETE FROM gateways WHERE gateway_id = $1")
            .bind(gateway.get())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("releasing a gateway lease"))?;
        Ok(())
    }
}
