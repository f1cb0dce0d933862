//! [`Api`]: what all routes share, and [`Broker`], which exists once the engine was joined.

use std::sync::{Arc, OnceLock};

use relay_runtime::metrics;
use tokio_util::sync::CancellationToken;

use crate::{
    agents::{Members, Services},
    events::Hub,
    lease::Lease,
    runner::Runners,
};

/// State of the routes. Clones are the same.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    /// The key that every caller needs.
    pub(crate) key: String,
    /// URL of this API; requests from pages of any other origin are refused.
    pub(crate) url: String,
    pub(crate) hub: Arc<Hub>,
    pub(crate) lease: Lease,
    pub(crate) metrics: metrics::Handle,
    /// Cancelled by a request to stop.
    pub(crate) stop: CancellationToken,
    /// Cancelled at the end of the stop, when the last events were published; ends all sockets.
    pub(crate) closing: CancellationToken,
    pub(crate) broker: OnceLock<Broker>,
}

/// The broker in operation.
pub(crate) struct Broker {
    /// Of the default workspace.
    pub(crate) services: Services,
    /// All workspaces.
    pub(crate) members: Members,
    pub(crate) runners: Arc<Runners>,
}

impl Api {
    pub(crate) fn new(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }

    /// The broker, once it is ready.
    pub(crate) fn broker(&self) -> Option<&Broker> {
        self.inner.broker.get()
    }
}
