//! What every handler can reach.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::extract::FromRef;
use relay_domain::GatewayId;
use relay_engine::Engine;
use relay_runtime::shutdown::Shutdown;

use crate::node::Registry;

/// How often storage is asked for a sign of life.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Shared by all handlers. Cheap to clone.
#[derive(Clone)]
pub struct AppState {
    /// The use cases.
    pub engine: Engine,
    /// The end of the process.
    pub shutdown: Shutdown,
    /// This process as the rest of the engine knows it.
    pub gateway_id: GatewayId,
    /// The node sockets.
    pub registry: Registry,
    /// Whether storage answered lately.
    storage_up: Arc<AtomicBool>,
}

impl AppState {
    /// State over a started engine.
    pub fn new(engine: Engine, shutdown: Shutdown) -> Self {
        let gateway_id = engine.become_gateway();
        Self {
            engine,
            shutdown,
            gateway_id,
            registry: Registry::default(),
            storage_up: Arc::new(AtomicBool::new(true)),
        }
    }

    /// Whether new work should be sent here: storage answers and the process is not draining.
    pub fn is_ready(&self) -> bool {
        self.storage_up.load(Ordering::Relaxed) && !self.shutdown.is_asked()
    }

    /// Keeps [`AppState::is_ready`] true to the facts, until the process drains.
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
