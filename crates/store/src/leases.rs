//! Gateway leases: who is alive, for everybody else to see.

use std::time::Duration;

use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, patience::Patient as _};

/// What came of renewing a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// Held without a break.
    Held,
    /// Held again, after it had expired: others may have taken this gateway's connections meanwhile.
    HeldAgain,
}

/// A connection that the database says is on a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeldProvider {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
    /// The provider.
    pub provider: ProviderName,
    /// Its epoch.
    pub epoch: i64,
}

impl Store {
    /// Takes or renews a gateway's lease.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn renew_gateway_lease(&self, gateway: GatewayId, ttl: Duration) -> StoreResult<Renewal> {
        let unbroken: bool = sqlx::query_scalar(
            "WITH before AS (
                 SELECT lease_until > now() AS held FROM gateways WHERE gateway_id = $1
             ), renewed AS (
                 INSERT INTO gateways (gateway_id, lease_until) VALUES ($1, now() + make_interval(secs => $2))
                 ON CONFLICT (gateway_id) DO UPDATE SET lease_until = excluded.lease_until
             )
             SELECT coalesce((SELECT held FROM before), false)",
        )
        .bind(gateway.get())
        .bind(ttl.as_secs_f64())
        .fetch_one(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("renewing a gateway lease"))?;
        Ok(if unbroken { Renewal::Held } else { Renewal::HeldAgain })
    }

    /// The connections that are on a gateway, for it to compare with its own after a break.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn providers_held(&self, gateway: GatewayId) -> StoreResult<Vec<HeldProvider>> {
        let rows: Vec<(i64, String, String, i64)> =
            sqlx::query_as("SELECT workspace_id, node_id, provider, epoch FROM providers WHERE gateway_id = $1")
                .bind(gateway.get())
                .fetch_all(&self.pool)
                .patiently()
                .await
                .map_err(StoreError::from_sqlx("reading a gateway's connections"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, node, provider, epoch)| HeldProvider {
                scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
                node_id: NodeId::new(node),
                provider: ProviderName::new(provider),
                epoch,
            })
            .collect())
    }

    /// Gives the lease back at the end of a drain.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn release_gateway_lease(&self, gateway: GatewayId) -> StoreResult<()> {
        sqlx::query("DELETE FROM gateways WHERE gateway_id = $1")
            .bind(gateway.get())
            .execute(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("releasing a gateway lease"))?;
        Ok(())
    }
}
