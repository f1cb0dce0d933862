//! Private etcd server, which Patroni keeps its leader key in.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::http;
use crate::ports::Port;
use crate::process::{Process, Spec};
use crate::servers::find;

const READY_WITHIN: Duration = Duration::from_secs(30);

/// Etcd of one server on a loopback port.
#[derive(Debug)]
pub(super) struct Etcd {
    process: Process,
    clients: Port,
    _peers: Port,
}

impl Etcd {
    /// Starts a server with its files in `dir`.
    pub(super) async fn start(dir: &Path) -> Result<Self> {
        let program = find::on_path("etcd").context("found no etcd; install Debian's package etcd-server")?;
        let (clients, peers) = (Port::free()?, Port::free()?);
        let url = |port: &Port| format!("http://{}", port.address());
        let mut spec = Spec::new("etcd", program, dir.join("etcd.log"));
        spec.args = [
            ("--data-dir", dir.join("etcd").display().to_string()),
            ("--listen-client-urls", url(&clients)),
            ("--advertise-client-urls", url(&clients)),
            ("--listen-peer-urls", url(&peers)),
            ("--initial-advertise-peer-urls", url(&peers)),
            ("--initial-cluster", format!("default={}", url(&peers))),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        let server = Self { process: Process::start(spec)?, clients, _peers: peers };
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Returns the address for clients, `host:port`.
    pub(super) fn address(&self) -> String {
        self.clients.address()
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let (client, health) = (http::client().build()?, format!("http://{}/health", self.address()));
        let probe = || async {
            let answer = client.get(&health).send().await?.text().await?;
            ensure!(answer.contains("true"), "not healthy: {answer}");
            Ok(())
        };
        self.process.wait_until_ready(READY_WITHIN, probe).await
    }
}
