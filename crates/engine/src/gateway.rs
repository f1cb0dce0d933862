//! A gateway's lease: how everybody else knows that its sockets live.

use std::{sync::Arc, time::Duration};

use relay_domain::GatewayId;
use relay_store::leases::{HeldProvider, Renewal};

use crate::{Engine, EngineResult, hints};

/// A gateway that has not renewed for this long is taken for dead.
pub const LEASE: Duration = Duration::from_secs(3);

impl Engine {
    /// The gateway that this process is, from [`Engine::become_gateway`] on.
    #[must_use]
    pub fn gateway_id(&self) -> Option<GatewayId> {
        self.inner.gateway_id.get().copied()
    }

    /// Makes this process a gateway, with an id of its own that no restart reuses.
    pub fn become_gateway(&self) -> GatewayId {
        *self.inner.gateway_id.get_or_init(|| {
            let id = GatewayId::new(self.next_id());
            tokio::spawn(hints::receive(Arc::downgrade(&self.inner), self.inner.stream.clone(), Some(id)));
            id
        })
    }

    /// Renews the lease; to be called each second. After a break, returns the connections that are
    /// still this gateway's: any other has been given up by the rest of the engine and must close.
    ///
    /// # Errors
    /// When storage is away. Sockets stay open meanwhile: nobody can take them over either.
    pub async fn renew_lease(&self, gateway: GatewayId) -> EngineResult<Option<Vec<HeldProvider>>> {
        match self.store().renew_gateway_lease(gateway, LEASE).await? {
            Renewal::Held => Ok(None),
            Renewal::HeldAgain => Ok(Some(self.store().providers_held(gateway).await?)),
        }
    }

    /// The connections that the database says are on a gateway.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn connections_held(&self, gateway: GatewayId) -> EngineResult<Vec<HeldProvider>> {
        Ok(self.store().providers_held(gateway).await?)
    }

    /// Gives the lease back at the end of a drain.
    ///
    /// # Errors
    /// When storage is away: the lease runs out by itself.
    pub async fn release_lease(&self, gateway: GatewayId) -> EngineResult<()> {
        Ok(self.store().release_gateway_lease(gateway).await?)
    }
}
