//! What every handler can reach.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::extract::FromRef;
use ipnet::IpNet;
use relay_domain::GatewayId;
use relay_engine::{Engine, operators::Operators, recovery::Standing};
use relay_runtime::shutdown::Shutdown;

use crate::{node::Registry, observe::Seats};

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
    /// What addresses that we mint begin with, if configured.
    pub public_url: Option<Arc<str>>,
    /// The node sockets.
    pub registry: Registry,
    /// Who runs the installation.
    pub operators: Arc<Operators>,
    /// Places for observers.
    pub observers: Seats,
    /// Whether storage answered lately.
    storage_up: Arc<AtomicBool>,
    /// Proxies whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Arc<[IpNet]>,
}

impl AppState {
    /// State over a started engine.
    pub fn new(engine: Engine, shutdown: Shutdown, trusted_proxies: Vec<IpNet>, operators: Operators) -> Self {
        let gateway_id = engine.become_gateway();
        Self {
            engine,
            shutdown,
            gateway_id,
            public_url: None,
            registry: Registry::default(),
            operators: Arc::new(operators),
            observers: Seats::default(),
            storage_up: Arc::new(AtomicBool::new(true)),
            trusted_proxies: trusted_proxies.into(),
        }
    }

    /// The same, with what addresses that we mint begin with.
    #[must_use]
    pub fn with_public_url(self, public_url: Option<String>) -> Self {
        Self { public_url: public_url.map(Arc::from), ..self }
    }

    /// Whether new work should be sent here: storage answers and the process is not draining.
    pub fn is_ready(&self) -> bool {
        self.why_not_ready().is_none()
    }

    /// Why new work should not be sent here; `None` when it may.
    pub fn why_not_ready(&self) -> Option<&'static str> {
        if self.shutdown.is_asked() {
            return Some("draining");
        }
        if !self.storage_up.load(Ordering::Relaxed) {
            return Some("storage is away");
        }
        match self.engine.standing() {
            Standing::Closed(reason) => Some(reason),
            Standing::Open(_) => None,
        }
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
