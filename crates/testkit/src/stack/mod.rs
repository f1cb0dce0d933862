//! The whole engine as separate processes, private to one test.

mod builder;
mod service;
mod state_dir;

use std::path::Path;

pub use builder::{StackBuilder, migrate};
pub use service::{Backends, Service};

use crate::proxy::TcpProxy;
use crate::servers::{Nats, Postgres};
use state_dir::StateDir;

/// Postgres, NATS, gateways and a worker, all running and ready. Everything ends when it is dropped.
#[derive(Debug)]
pub struct Stack {
    // The order is the order of dropping: engine processes, proxies, servers, folder.
    gateways: Vec<Service>,
    workers: Vec<Service>,
    postgres_proxy: Option<TcpProxy>,
    nats_proxy: Option<TcpProxy>,
    nats: Nats,
    postgres: Postgres,
    database_url: String,
    state: StateDir,
}

impl Stack {
    /// Two gateways and a worker in a temporary folder unless told otherwise.
    pub fn builder() -> StackBuilder {
        StackBuilder::default()
    }

    /// Gateway `index`, from 0.
    ///
    /// # Panics
    /// If there are not that many.
    #[track_caller]
    pub fn gateway(&self, index: usize) -> &Service {
        &self.gateways[index]
    }

    /// All gateways.
    pub fn gateways(&self) -> &[Service] {
        &self.gateways
    }

    /// All workers.
    pub fn workers(&self) -> &[Service] {
        &self.workers
    }

    /// The (first) worker.
    ///
    /// # Panics
    /// If the stack was built without one.
    #[track_caller]
    pub fn worker(&self) -> &Service {
        self.workers.first().expect("this stack was built without a worker")
    }

    /// The Postgres server.
    pub fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// The NATS server.
    pub fn nats(&self) -> &Nats {
        &self.nats
    }

    /// URL of the engine's database, not through the proxy.
    pub fn database_url(&self) -> &str {
        &self.database_url
    }

    /// URL of the NATS server, not through the proxy.
    pub fn nats_url(&self) -> String {
        self.nats.url()
    }

    /// The proxy between the engine processes and Postgres.
    ///
    /// # Panics
    /// If the stack was not built with `through_proxies(true)`.
    #[track_caller]
    pub fn postgres_proxy(&self) -> &TcpProxy {
        self.postgres_proxy.as_ref().expect("built without through_proxies(true)")
    }

    /// The proxy between the engine processes and NATS.
    ///
    /// # Panics
    /// If the stack was not built with `through_proxies(true)`.
    #[track_caller]
    pub fn nats_proxy(&self) -> &TcpProxy {
        self.nats_proxy.as_ref().expect("built without through_proxies(true)")
    }

    /// The folder with data and `logs/`.
    pub fn state_dir(&self) -> &Path {
        self.state.path()
    }

    /// The last lines of every engine process's log, for a failing test to print.
    pub fn logs(&self, lines: usize) -> String {
        let services = self.gateways.iter().chain(&self.workers);
        services.map(|s| format!("== {} ==\n{}\n", s.name(), s.log_tail(lines))).collect()
    }
}
