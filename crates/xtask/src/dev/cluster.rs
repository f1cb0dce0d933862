//! The processes of `dev`.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use relay_testkit::ports::Port;
use relay_testkit::stack::{self, Service};

use super::Args;
use super::backends::Backends;

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
        let given =
            stack::Backends { database_url: backends.database_url.clone(), nats_url: backends.nats_url.clone() };
        // The stack's own default lets tenants' URLs lead to this machine.
        let strict = [("RELAY_EGRESS_ALLOW".to_owned(), String::new())];
        let env = if args.strict { &strict[..] } else { &[] };
        let mut gateways = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let name = format!("gateway-{}", index + 1);
            let metrics = Port::free()?;
            let gateway = Service::gateway(
                &name,
                bin_dir.join("relay-gateway"),
                &given,
                &format!("127.0.0.1:{port}"),
                &metrics.address(),
                env,
                &logs.join(format!("{name}.log")),
            )?;
            gateways.push(gateway.keeping([metrics]));
        }
        let metrics = Port::free()?;
        let log = logs.join("worker.log");
        let program = bin_dir.join("relay-worker");
        let worker = Service::worker("worker", program, &given, &metrics.address(), env, &log)?;
        let cluster = Self { gateways, worker: worker.keeping([metrics]), backends, logs };
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

fn report(outcome: Result<()>) {
    if let Err(error) = outcome {
        eprintln!("{error:#}");
    }
}

/// The gateways' ports, all of them free.
fn gateway_ports(args: &Args) -> Result<Vec<u16>> {
    let last = args.port.checked_add(args.gateways - 1).context("the ports would exceed 65535")?;
    for port in args.port..=last {
        TcpListener::bind(("127.0.0.1", port))
            .with_context(|| format!("port {port} is not free; choose others with --port"))?;
    }
    Ok((args.port..=last).collect())
}
