//! [`ApiServer`]: the listen API, and the file that leads clients to it. It answers before the engine is joined.

use std::{
    io::stdout,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::{Context as _, Result};
use relay_runtime::metrics;
use relay_tasks::TaskSet;
use tokio::{
    net::TcpListener,
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    api::{Api, Inner, router},
    cli::Init,
    events::Hub,
    lease::Lease,
    print_line,
    state::{ConnectionFile, StateDirectory},
};

/// Maximum time for answers that are in flight when the broker stops.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(300);

/// The servers and the connection file.
pub(super) struct ApiServer {
    pub(super) api: Api,
    /// URL of the API for programs on this machine.
    pub(super) local_url: String,
    server: JoinHandle<()>,
    metrics_server: Option<JoinHandle<()>>,
    connection: ConnectionFile,
    /// Locked until the connection file is removed: the next broker writes its own.
    pub(super) directory: StateDirectory,
}

impl ApiServer {
    /// Binds the port, writes the connection file and prints the address.
    pub(super) async fn start(
        settings: &Init,
        directory: StateDirectory,
        tasks: &TaskSet,
        recorder: metrics::Handle,
        stop: CancellationToken,
    ) -> Result<Self> {
        let listener = TcpListener::bind(SocketAddr::new(settings.api_bind, settings.api_port)).await;
        let listener = listener.with_context(|| format!("listen on {}:{}", settings.api_bind, settings.api_port))?;
        let address = listener.local_addr().context("read the port")?;
        let url = format!("http://{address}");
        if !settings.api_bind.is_loopback() {
            tracing::warn!(%address, "the API controls every agent and listens beyond this machine");
        }
        // An empty variable counts as absent: with an empty key a request without any would be let in.
        let key = settings.api_key.clone().filter(|key| !key.is_empty());
        let key = key.unwrap_or_else(|| format!("br_{}", uuid::Uuid::new_v4().simple()));
        let connection = ConnectionFile::write(&directory, &url, address.port(), &key)?;
        let closing = CancellationToken::new();
        let api = Api::new(Inner {
            key,
            url: url.clone(),
            hub: Hub::new(),
            lease: Lease::new(settings.persist),
            metrics: recorder.clone(),
            stop,
            closing: closing.clone(),
            broker: OnceLock::new(),
        });
        let server = axum::serve(listener, router(api.clone())).with_graceful_shutdown(closing.cancelled_owned());
        let server = tasks.spawn("api-server", log_failure(server.into_future()));
        // Before the line: a driver that has read it expects a broker that stays.
        let metrics_server = serve_metrics(settings, recorder, &api, tasks).await?;
        announce(&url).await;
        Ok(Self {
            api,
            local_url: format!("http://{}", on_this_machine(address)),
            server,
            metrics_server,
            connection,
            directory,
        })
    }

    /// Removes the connection file and ends all sockets.
    pub(super) async fn stop(self) {
        // First, so that no further client is led to an API that ends.
        drop(self.connection);
        self.api.inner.closing.cancel();
        // Sockets of readers that are left are cut by the end of the process.
        let _ = timeout(ANSWER_TIMEOUT, self.server).await;
        if let Some(metrics_server) = self.metrics_server {
            metrics_server.abort();
        }
    }
}

/// The address itself, or loopback for one that stands for all interfaces.
fn on_this_machine(address: SocketAddr) -> SocketAddr {
    let loopback = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(loopback, address.port())
}

async fn serve_metrics(
    settings: &Init,
    recorder: metrics::Handle,
    api: &Api,
    tasks: &TaskSet,
) -> Result<Option<JoinHandle<()>>> {
    let Some(address) = settings.metrics else { return Ok(None) };
    let closing = api.inner.closing.clone();
    let api = api.clone();
    let readiness = Arc::new(move || api.broker().is_some_and(|broker| broker.members.are_connected()));
    let served = metrics::serve(address, recorder, readiness, closing).await;
    let (_, server) = served.with_context(|| format!("listen on {address}"))?;
    Ok(Some(tasks.spawn("metrics-server", server)))
}

/// Logs why a server ended; its end stops the broker.
async fn log_failure(server: impl Future<Output = std::io::Result<()>>) {
    if let Err(error) = server.await {
        tracing::error!(%error, "server failed");
    }
}

/// Prints the line that drivers wait for.
async fn announce(url: &str) {
    let line = format!("[agent-relay] API listening on {url}");
    // It waits for a stdout that is not read, for a limited time.
    let _ = spawn_blocking(move || print_line(stdout(), line)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_reach_the_api_over_loopback() {
        for (bound, reached) in [
            ("127.0.0.1:5", "127.0.0.1:5"),
            ("192.0.2.1:5", "192.0.2.1:5"),
            ("0.0.0.0:5", "127.0.0.1:5"),
            ("[::]:5", "[::1]:5"),
        ] {
            let bound = bound.parse().expect("an address");
            assert_eq!(on_this_machine(bound).to_string(), reached);
        }
    }
}
