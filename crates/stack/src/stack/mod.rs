//! The whole engine as separate processes, private to one test.

mod builder;
mod service;
mod state_dir;

use std::path::Path;

pub use builder::{StackBuilder, migrate};
pub use service::{Backends, Service, ServiceSpec};

use crate::proxy::TcpProxy;
use crate::servers::{Nats, PgBouncer, Postgres};
use state_dir::StateDir;

/// Running and ready Postgres, NATS, gateways and workers, stopped when dropped.
#[derive(Debug)]
pub struct Stack {
    // Fields are dropped in this order: engine processes, pooler, proxies, servers, folder.
    gateways: Vec<Service>,
    workers: Vec<Service>,
    pooler: Option<PgBouncer>,
    postgres_proxy: Option<TcpProxy>,
    nats_proxy: Option<TcpProxy>,
    nats: Nats,
    postgres: Option<Postgres>,
    database_url: String,
    state: StateDir,
}

impl Stack {
    /// Returns a builder, by default of two gateways and a worker in a temporary folder.
    pub fn builder() -> StackBuilder {
        StackBuilder::default()
    }

    /// Returns gateway `index`, from 0.
    ///
    /// # Panics
    /// If there are fewer gateways.
    #[track_caller]
    pub fn gateway(&self, index: usize) -> &Service {
        &self.gateways[index]
    }

    /// Returns all gateways.
    pub fn gateways(&self) -> &[Service] {
        &self.gateways
    }

    /// Returns all workers.
    pub fn workers(&self) -> &[Service] {
        &self.workers
    }

    /// Returns the first worker.
    ///
    /// # Panics
    /// If the stack has none.
    #[track_caller]
    pub fn worker(&self) -> &Service {
        self.workers.first().expect("this stack was built without a worker")
    }

    /// Returns the Postgres server.
    ///
    /// # Panics
    /// If the stack was built with the database of another server.
    #[track_caller]
    pub fn postgres(&self) -> &Postgres {
        self.postgres.as_ref().expect("built with the database of another server")
    }

    /// Returns the NATS server.
    pub fn nats(&self) -> &Nats {
        &self.nats
    }

    /// Returns the URL of the engine's database, without a proxy of the stack.
    pub fn database_url(&self) -> &str {
        &self.database_url
    }

    /// Returns the direct URL of the NATS server.
    pub fn nats_url(&self) -> String {
        self.nats.url()
    }

    /// Returns the pooler between the engine processes and Postgres.
    ///
    /// # Panics
    /// If the stack was not built with `pooler(true)`.
    #[track_caller]
    pub fn pooler(&self) -> &PgBouncer {
        self.pooler.as_ref().expect("built without pooler(true)")
    }

    /// Returns the proxy between the engine processes and Postgres.
    ///
    /// # Panics
    /// If the stack was not built with `through_proxies(true)`.
    #[track_caller]
    pub fn postgres_proxy(&self) -> &TcpProxy {
        self.postgres_proxy.as_ref().expect("built without through_proxies(true)")
    }

    /// Returns the proxy between the engine processes and NATS.
    ///
    /// # Panics
    /// If the stack was not built with `through_proxies(true)`.
    #[track_caller]
    pub fn nats_proxy(&self) -> &TcpProxy {
        self.nats_proxy.as_ref().expect("built without through_proxies(true)")
    }

    /// Returns the folder with data and `logs/`.
    pub fn state_dir(&self) -> &Path {
        self.state.path()
    }

    /// Returns the last lines of every engine process's log, for error messages.
    pub fn logs(&self, lines: usize) -> String {
        let services = self.gateways.iter().chain(&self.workers);
        services.map(|s| format!("== {} ==\n{}\n", s.name(), s.log_tail(lines))).collect()
    }
}
