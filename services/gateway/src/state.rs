//! State shared by all handlers, and the readiness of this process.

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::extract::FromRef;
use relay_domain::GatewayId;
use relay_engine::{Engine, access::operators::Operators, recovery::Readiness};
use relay_runtime::shutdown::Shutdown;

use crate::{connections::Connections, node::Registry};

/// Interval of the storage check.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// State shared by all handlers. It is cloned several times for each request, which costs one count.
#[derive(Clone)]
pub struct AppState(Arc<GatewayState>);

/// State of this gateway.
pub struct GatewayState {
    pub engine: Engine,
    pub shutdown: Shutdown,
    pub gateway_id: GatewayId,
    /// Configured base of the URLs that this gateway creates.
    pub public_url: Option<String>,
    pub registry: Registry,
    /// Operators of the installation.
    pub operators: Operators,
    /// Counts of this gateway's connections.
    pub connections: Connections,
    /// Result of the latest storage check.
    storage_up: AtomicBool,
}

impl Deref for AppState {
    type Target = GatewayState;

    fn deref(&self) -> &GatewayState {
        &self.0
    }
}

impl AppState {
    /// Creates the state for a started engine. `public_url` is the base of the URLs that this gateway creates.
    pub fn new(
        engine: Engine,
        shutdown: Shutdown,
        connections: Connections,
        operators: Operators,
        public_url: Option<String>,
    ) -> Self {
        let gateway_id = engine.processes().become_gateway();
        Self(Arc::new(GatewayState {
            engine,
            shutdown,
            gateway_id,
            public_url,
            registry: Registry::default(),
            operators,
            connections,
            // Before the first check the recovery keeps the process unready, until it has seen the database.
            storage_up: AtomicBool::new(true),
        }))
    }

    /// Returns whether this process accepts new work: storage answers and it is not draining.
    pub fn is_ready(&self) -> bool {
        self.unready_reason().is_none()
    }

    /// Returns why this process accepts no new work; `None` if it does.
    pub fn unready_reason(&self) -> Option<&'static str> {
        if self.shutdown.is_requested() {
            return Some("draining");
        }
        if !self.storage_up.load(Ordering::Relaxed) {
            return Some("storage is unavailable");
        }
        match self.engine.recovery().readiness() {
            Readiness::Closed(reason) => Some(reason),
            Readiness::Open(_) => None,
        }
    }

    /// Checks storage periodically until the process drains.
    pub async fn watch_storage(self) {
        let stop = self.shutdown.token();
        while stop.run_until_cancelled(tokio::time::sleep(PROBE_EVERY)).await.is_some() {
            let up = self.engine.check_storage().await.is_ok();
            if self.storage_up.swap(up, Ordering::Relaxed) != up {
                tracing::warn!(storage.up = up, "readiness changed");
            }
        }
    }
}

impl FromRef<AppState> for Engine {
    fn from_ref(state: &AppState) -> Self {
        state.engine.clone()
    }
}
