//! Gateway leases, by which other processes judge whether a gateway and its connections exist. Called by the engine's
//! gateway lease.

use std::time::Duration;

use relay_domain::{GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult, statement_timeout::StatementTimeout as _};

/// Result of renewing a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseRenewal {
    /// The lease was still valid.
    Continuous,
    /// The lease had expired and is held again; other processes may have disconnected this gateway's providers in
    /// between.
    Reacquired,
}

/// Connection of a provider to a gateway, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConnectedProvider {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
    pub provider: ProviderName,
    pub epoch: i64,
}

impl Store {
    /// Acquires or renews a gateway's lease.
    pub async fn renew_gateway_lease(&self, gateway: GatewayId, ttl: Duration) -> StoreResult<LeaseRenewal> {
        // `before` reads the snapshot from before the upsert. An expired lease may be renewed: a pause is not the end
        // of the process (ADR 0005).
        let unbroken: bool = sqlx::query_scalar(
            "WITH before AS (
                 SELECT lease_until > relay_now() AS held FROM gateways WHERE gateway_id = $1
             ), renewed AS (
                 INSERT INTO gateways (gateway_id, lease_until) VALUES ($1, relay_now() + make_interval(secs => $2))
                 ON CONFLICT (gateway_id) DO UPDATE SET lease_until = excluded.lease_until
             )
             SELECT coalesce((SELECT held FROM before), false)",
        )
        .bind(gateway)
        .bind(ttl.as_secs_f64())
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("renewing a gateway lease"))?;
        Ok(if unbroken { LeaseRenewal::Continuous } else { LeaseRenewal::Reacquired })
    }

    /// Returns the stored connections of a gateway. The gateway compares them with its sockets after its lease was
    /// interrupted.
    pub async fn providers_of_gateway(&self, gateway: GatewayId) -> StoreResult<Vec<ConnectedProvider>> {
        let rows: Vec<(WorkspaceId, NodeId, ProviderName, i64)> =
            sqlx::query_as("SELECT workspace_id, node_id, provider, epoch FROM providers WHERE gateway_id = $1")
                .bind(gateway)
                .fetch_all(&self.pool)
                .with_timeout()
                .await
                .map_err(StoreError::from_sqlx("reading a gateway's connections"))?;
        Ok(rows
            .into_iter()
            .map(|(workspace, node_id, provider, epoch)| ConnectedProvider {
                scope: WorkspaceScope::from_engine_row(workspace),
                node_id,
                provider,
                epoch,
            })
            .collect())
    }

    /// Releases the lease at the end of a drain.
    pub async fn release_gateway_lease(&self, gateway: GatewayId) -> StoreResult<()> {
        // Deleted instead of ended: a missing lease counts as expired for longer than the grace, so connections that
        // are left are ended at once.
        sqlx::query("DELETE FROM gateways WHERE gateway_id = $1")
            .bind(gateway)
            .execute(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("releasing a gateway lease"))?;
        Ok(())
    }
}
