//! The processes of `dev`.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use relay_stack::ports::Port;
use relay_stack::stack::{self, Service, ServiceSpec};

use super::Args;
use super::backends::Backends;

/// Folder of uploaded files. The engine's default is a folder in the working directory.
const FILES_DIR: &str = "RELAY_FILES_DIR";

pub(super) struct Cluster {
    // Dropped in this order: engine processes before the servers they use.
    gateways: Vec<Service>,
    worker: Service,
    pub(super) backends: Backends,
    logs: PathBuf,
}

impl Cluster {
    pub(super) async fn start(args: &Args, state_dir: &Path, bin_dir: &Path) -> Result<Self> {
        let ports = gateway_ports(args)?;
        let logs = state_dir.join("logs");
        std::fs::create_dir_all(&logs)?;
        let backends = Backends::start(state_dir).await?;
        stack::migrate(&bin_dir.join("relayctl"), &backends.database_url, &backends.nats_url).await?;
        let direct =
            stack::Backends { database_url: backends.database_url.clone(), nats_url: backends.nats_url.clone() };
        let env = &environment(args, state_dir)[..];
        let mut gateways = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let name = format!("gateway-{}", index + 1);
            let metrics = Port::free()?;
            let spec = ServiceSpec {
                name: &name,
                program: bin_dir.join("relay-gateway"),
                backends: &direct,
                env,
                log: logs.join(format!("{name}.log")),
            };
            let gateway = Service::gateway(&spec, &format!("127.0.0.1:{port}"), &metrics.address())?;
            gateways.push(gateway.with_reserved_ports([metrics]));
        }
        let metrics = Port::free()?;
        let spec = ServiceSpec {
            name: "worker",
            program: bin_dir.join("relay-worker"),
            backends: &direct,
            env,
            log: logs.join("worker.log"),
        };
        let worker = Service::worker(&spec, &metrics.address())?;
        let cluster = Self { gateways, worker: worker.with_reserved_ports([metrics]), backends, logs };
        for service in cluster.services() {
            service.wait_ready().await?;
        }
        Ok(cluster)
    }

    pub(super) fn gateways(&self) -> &[Service] {
        &self.gateways
    }

    pub(super) fn worker(&self) -> &Service {
        &self.worker
    }

    pub(super) fn services(&self) -> impl Iterator<Item = &Service> {
        self.gateways.iter().chain([&self.worker])
    }

    pub(super) fn logs(&self) -> &Path {
        &self.logs
    }

    pub(super) fn pids(&self) -> BTreeMap<String, u32> {
        let mut pids: BTreeMap<String, u32> =
            self.services().map(|service| (service.name().to_owned(), service.pid())).collect();
        if let Some(postgres) = &self.backends.postgres {
            pids.insert("postgres".into(), postgres.pid());
        }
        if let Some(nats) = &self.backends.nats {
            pids.insert("nats".into(), nats.pid());
        }
        pids
    }

    /// Drains the engine processes, then stops the servers. What does not stop in time is killed and reported.
    pub(super) async fn stop(&self) {
        // The engine first: its drain writes acks and releases leases, for which it needs the servers.
        let drained = self.services().map(Service::terminate);
        for outcome in futures::future::join_all(drained).await {
            report(outcome);
        }
        if let Some(nats) = &self.backends.nats {
            report(nats.stop().await);
        }
        if let Some(postgres) = &self.backends.postgres {
            report(postgres.stop().await);
        }
    }
}

/// Settings of gateways and worker on top of what this process was given.
fn environment(args: &Args, state_dir: &Path) -> Vec<(String, String)> {
    let mut env = Vec::new();
    if std::env::var_os(FILES_DIR).is_none_or(|dir| dir.is_empty()) {
        let files = state_dir.join("files");
        env.push((FILES_DIR.to_owned(), files.to_string_lossy().into_owned()));
    }
    if args.strict {
        // The stack's own default lets tenants' URLs lead to this machine.
        env.push(("RELAY_EGRESS_ALLOW".to_owned(), String::new()));
    }
    env
}

fn report(outcome: Result<()>) {
    if let Err(error) = outcome {
        eprintln!("{error:#}");
    }
}

/// The gateways' ports, all of them free.
fn gateway_ports(args: &Args) -> Result<Vec<u16>> {
    // Checked before anything starts; otherwise the reason would stand in the log of a gateway only.
    let last = args.port.checked_add(args.gateways - 1).context("the ports would exceed 65535")?;
    for port in args.port..=last {
        TcpListener::bind(("127.0.0.1", port))
            .with_context(|| format!("port {port} is not free; choose others with --port"))?;
    }
    Ok((args.port..=last).collect())
}
