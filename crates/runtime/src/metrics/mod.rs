//! Prometheus metrics and health probes, on their own listener.
//!
//! The listener is for operators: clients never reach it, and it needs no token.

mod describe;
mod exemplars;
mod otlp;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use axum::{
    Router,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    routing::get,
};
pub use exemplars::record_exemplar;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
pub use otlp::export_metrics;
use relay_domain::metric_names as name;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::server::{self, Timeouts};

/// Histogram buckets for latencies: a tenth of a millisecond to half a minute.
const SECONDS: [f64; 17] =
    [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Histogram buckets for commit batches, which hold a few hundred requests at most.
const BATCH_SIZES: [f64; 11] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
/// Interval at which histograms are folded, so that they stay bounded if nothing scrapes them.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Connections to the metrics page and the probes; further ones are closed.
const MAX_CONNECTIONS: usize = 256;

/// Metrics recorder of the process.
#[derive(Clone)]
pub struct Handle {
    prometheus: PrometheusHandle,
}

impl Handle {
    /// Renders the metrics in the Prometheus text format.
    #[must_use]
    pub fn render(&self) -> String {
        self.prometheus.render()
    }
}

/// Readiness check of the process.
pub type Readiness = Arc<dyn Fn() -> bool + Send + Sync>;

/// Installs the recorder. Call once, first in `main`.
///
/// # Errors
/// If a recorder is already installed.
pub fn install() -> Result<Handle> {
    let prometheus = PrometheusBuilder::new()
        .set_buckets(&SECONDS)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Full(name::COMMIT_BATCH_SIZE.to_owned()), &BATCH_SIZES)
        })
        .and_then(|builder| {
            builder
                .set_buckets_for_metric(Matcher::Full(relay_tasks::metric_names::BATCH_ITEMS.to_owned()), &BATCH_SIZES)
        })
        .and_then(PrometheusBuilder::install_recorder)
        .context("install the metrics recorder")?;
    describe::describe_all();
    Ok(Handle { prometheus })
}

/// Binds `addr` and serves `/metrics`, `/health` and `/ready` there until `stop`.
///
/// `/health` is 200 while the process runs; `/ready` is 200 or 503, as `readiness` says. Returns the bound address,
/// whose port is chosen by the system if 0 was requested, and the server future.
///
/// # Errors
/// If the address cannot be bound.
pub async fn serve(
    addr: SocketAddr,
    handle: Handle,
    readiness: Readiness,
    stop: CancellationToken,
) -> io::Result<(SocketAddr, impl Future<Output = ()> + Send)> {
    let listener = TcpListener::bind(addr).await?;
    let addr = listener.local_addr()?;
    let upkeep = handle.prometheus.clone();
    let stopped = stop.clone();
    let upkeep = async move {
        while stopped.run_until_cancelled(tokio::time::sleep(UPKEEP_INTERVAL)).await.is_some() {
            upkeep.run_upkeep();
        }
    };
    let routes = Router::new()
        .route(
            "/metrics",
            get(move |headers: HeaderMap| {
                let text = handle.render();
                let accepts = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
                let (kind, text) = if accepts.contains(exemplars::OPENMETRICS) {
                    (exemplars::OPENMETRICS_CONTENT_TYPE, exemplars::render_openmetrics(&text))
                } else {
                    ("text/plain; version=0.0.4; charset=utf-8", text)
                };
                async move { ([(CONTENT_TYPE, kind)], text) }
            }),
        )
        .route("/health", get(|| async { "ok\n" }))
        .route(
            "/ready",
            get(move || {
                let ready = readiness();
                async move {
                    if ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
                }
            }),
        );
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let accept = move |_| {
        let place = Arc::clone(&places).try_acquire_owned().ok()?;
        let routes = routes.clone();
        Some((move |request| routes.clone().oneshot(request), place))
    };
    let serve = server::serve(listener, Timeouts::default(), accept, stop);
    Ok((addr, async move {
        tokio::join!(serve, upkeep);
    }))
}
