//! Builder of a stack: servers, schema, processes, readiness.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use super::state_dir::StateDir;
use super::{Backends, Service, ServiceSpec, Stack};
use crate::binaries;
use crate::ports::Port;
use crate::proxy::TcpProxy;
use crate::servers::{Nats, PgBouncer, Postgres};

const DATABASE: &str = "relay";
/// Connections of the pooler to the database: fewer than the processes open to it.
const POOLED_SERVERS: u32 = 12;

/// Configuration of a [`Stack`].
#[derive(Clone, Debug)]
pub struct StackBuilder {
    gateways: usize,
    workers: usize,
    through_proxies: bool,
    pooler: bool,
    state_dir: Option<PathBuf>,
    bin_dir: Option<PathBuf>,
    database_url: Option<String>,
    env: Vec<(String, String)>,
}

impl Default for StackBuilder {
    fn default() -> Self {
        Self {
            gateways: 2,
            workers: 1,
            through_proxies: false,
            pooler: false,
            state_dir: None,
            bin_dir: None,
            database_url: None,
            env: Vec::new(),
        }
    }
}

impl StackBuilder {
    /// Sets the number of gateways (default 2; 0 starts only the servers with the schema).
    #[must_use]
    pub fn gateways(mut self, count: usize) -> Self {
        self.gateways = count;
        self
    }

    /// Enables or disables the worker (enabled by default).
    #[must_use]
    pub fn worker(mut self, on: bool) -> Self {
        self.workers = usize::from(on);
        self
    }

    /// Sets the number of workers (default 1).
    #[must_use]
    pub fn workers(mut self, count: usize) -> Self {
        self.workers = count;
        self
    }

    /// Connects gateways and workers to Postgres and NATS through controllable proxies (off by default).
    #[must_use]
    pub fn through_proxies(mut self, on: bool) -> Self {
        self.through_proxies = on;
        self
    }

    /// Connects gateways and workers to Postgres through a pooler, behind the proxy if there is one (off by default).
    #[must_use]
    pub fn pooler(mut self, on: bool) -> Self {
        self.pooler = on;
        self
    }

    /// Uses this empty database of another server instead of starting one. There is no proxy of the stack to it.
    #[must_use]
    pub fn database(mut self, url: impl Into<String>) -> Self {
        self.database_url = Some(url.into());
        self
    }

    /// Stores data and logs in `dir` instead of a temporary folder.
    #[must_use]
    pub fn state_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.state_dir = Some(dir.into());
        self
    }

    /// Takes the binaries from `dir` (default: see [`binaries::directory`]).
    #[must_use]
    pub fn bin_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.bin_dir = Some(dir.into());
        self
    }

    /// Sets an environment variable for gateways and worker.
    #[must_use]
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// Starts everything and waits until it is ready.
    pub async fn start(self) -> Result<Stack> {
        let bin_dir = match &self.bin_dir {
            Some(dir) => dir.clone(),
            None => binaries::directory()?,
        };
        let state = match &self.state_dir {
            Some(dir) => StateDir::open(dir)?,
            None => StateDir::temporary()?,
        };
        let (postgres_dir, nats_dir) = (state.path().join("postgres"), state.path().join("nats"));
        let start_postgres = self.start_postgres(&postgres_dir);
        let ((postgres, database_url), nats) = tokio::try_join!(start_postgres, Nats::start(&nats_dir))?;
        // Directly: a migration holds a lock of its session, which a pooler would not keep (ADR 0065).
        migrate(&binaries::find(&bin_dir, "relayctl")?, &database_url, &nats.url()).await?;

        let mut backends = Backends { database_url: database_url.clone(), nats_url: nats.url() };
        let (mut postgres_proxy, mut nats_proxy) = (None, None);
        if self.through_proxies {
            if let Some(postgres) = &postgres {
                let to_postgres = TcpProxy::start(&postgres.address())?;
                backends.database_url = to_postgres.through(&database_url)?;
                postgres_proxy = Some(to_postgres);
            }
            let to_nats = TcpProxy::start(&nats.address())?;
            backends.nats_url = format!("nats://{}", to_nats.address());
            nats_proxy = Some(to_nats);
        }
        let logs = state.path().join("logs");
        fs::create_dir_all(&logs)?;
        let mut shared = self.clone();
        let pooler = if self.pooler { Some(shared.start_pooler(&mut backends, &logs).await?) } else { None };
        let mut stack = Stack {
            gateways: Vec::new(),
            workers: Vec::new(),
            pooler,
            postgres_proxy,
            nats_proxy,
            nats,
            postgres,
            database_url,
            state,
        };
        // Files of all processes are in one folder, as on a single host.
        let files = stack.state.path().join("files").to_string_lossy().into_owned();
        shared.env.insert(0, ("RELAY_FILES_DIR".to_owned(), files));
        shared.start_services(&mut stack, &bin_dir, &backends, &logs).await?;
        Ok(stack)
    }

    /// Starts a pooler in front of the database, and leads the processes through it.
    async fn start_pooler(&mut self, backends: &mut Backends, logs: &Path) -> Result<PgBouncer> {
        let direct_url = backends.database_url.clone();
        let pooler = PgBouncer::start(logs, &direct_url, POOLED_SERVERS).await?;
        backends.database_url = pooler.through(&direct_url)?;
        let settings = [("RELAY_DATABASE_POOLER", "transaction".to_owned()), ("DATABASE_DIRECT_URL", direct_url)];
        // First, so that callers can override them.
        self.env.splice(0..0, settings.map(|(name, value)| (name.to_owned(), value)));
        Ok(pooler)
    }

    /// Starts Postgres unless a database was given. Returns the URL of the engine's database.
    async fn start_postgres(&self, dir: &Path) -> Result<(Option<Postgres>, String)> {
        if let Some(url) = &self.database_url {
            return Ok((None, url.clone()));
        }
        let postgres = Postgres::start(dir).await?;
        let url = postgres.create_database(DATABASE).await?;
        Ok((Some(postgres), url))
    }

    async fn start_services(&self, stack: &mut Stack, bin_dir: &Path, backends: &Backends, logs: &Path) -> Result<()> {
        for number in 1..=self.gateways {
            let name = format!("gateway-{number}");
            let program = binaries::find(bin_dir, "relay-gateway")?;
            let log = logs.join(format!("{name}.log"));
            let (main, metrics) = (Port::free()?, Port::free()?);
            let spec = ServiceSpec { name: &name, program, backends, env: &self.env, log };
            let gateway = Service::gateway(&spec, &main.address(), &metrics.address())?;
            stack.gateways.push(gateway.with_reserved_ports([main, metrics]));
        }
        for number in 1..=self.workers {
            let name = if number == 1 { "worker".to_owned() } else { format!("worker-{number}") };
            let program = binaries::find(bin_dir, "relay-worker")?;
            let metrics = Port::free()?;
            let log = logs.join(format!("{name}.log"));
            let spec = ServiceSpec { name: &name, program, backends, env: &self.env, log };
            let worker = Service::worker(&spec, &metrics.address())?;
            stack.workers.push(worker.with_reserved_ports([metrics]));
        }
        for service in stack.gateways.iter().chain(&stack.workers) {
            service.wait_ready().await?;
        }
        Ok(())
    }
}

/// Runs `relayctl migrate`.
pub async fn migrate(relayctl: &Path, database_url: &str, nats_url: &str) -> Result<()> {
    let output = Command::new(relayctl)
        .arg("migrate")
        .env("DATABASE_URL", database_url)
        .env("NATS_URL", nats_url)
        .stdin(Stdio::null())
        .output()
        .await
        .with_context(|| format!("run {}", relayctl.display()))?;
    if !output.status.success() {
        bail!(
            "relayctl migrate ended with {}:\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
