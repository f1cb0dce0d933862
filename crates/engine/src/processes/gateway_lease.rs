//! Lease of a gateway: proof to other processes that its sockets are alive.

use std::{sync::Arc, time::Duration};

use relay_domain::GatewayId;
use relay_store::processes::gateway_leases::{ConnectedProvider, LeaseRenewal};

use super::Processes;
use crate::{EngineResult, hints};

/// A gateway that has not renewed for this long counts as expired.
pub const LEASE: Duration = Duration::from_secs(3);

impl Processes {
    /// Makes this process a gateway, with an id that no restart reuses.
    #[must_use]
    pub fn become_gateway(&self) -> GatewayId {
        // Once: all parts of the process share the id and the one receiver of its hints.
        *self.core.gateway.get_or_init(|| {
            let id = GatewayId::new(self.core.next_id());
            let receive = hints::receive_remote(Arc::downgrade(&self.core.hints), self.stream.clone(), Some(id));
            self.tasks.spawn("gateway-hints", receive);
            id
        })
    }

    /// Renews the lease; call each second. After a gap it returns the connections that this gateway still holds: the
    /// others were released by the rest of the system and must close.
    ///
    /// # Errors
    /// When storage is unavailable. Sockets stay open meanwhile: no other gateway can take them over either.
    pub async fn renew_lease(&self, gateway: GatewayId) -> EngineResult<Option<Vec<ConnectedProvider>>> {
        match self.core.store.renew_gateway_lease(gateway, LEASE).await? {
            LeaseRenewal::Continuous => Ok(None),
            LeaseRenewal::Reacquired => Ok(Some(self.core.store.providers_of_gateway(gateway).await?)),
        }
    }

    /// Lists the connections that the database assigns to a gateway.
    pub async fn held_connections(&self, gateway: GatewayId) -> EngineResult<Vec<ConnectedProvider>> {
        Ok(self.core.store.providers_of_gateway(gateway).await?)
    }

    /// Releases the lease at the end of a drain.
    pub async fn release_lease(&self, gateway: GatewayId) -> EngineResult<()> {
        Ok(self.core.store.release_gateway_lease(gateway).await?)
    }
}
