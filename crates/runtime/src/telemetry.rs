//! Logs and traces: JSON lines on stderr always, spans over OTLP when an endpoint is configured.

use std::{error::Error, io::stderr, time::Duration};

use anyhow::{Context as _, Result};
use opentelemetry::{global, trace::TracerProvider as _};
use opentelemetry_sdk::{Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// The variable that switches trace export on. Its value is a gRPC endpoint, `http://host:4317`.
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// What is logged unless `RUST_LOG` says otherwise. The drivers report each attempt to reconnect; the engine
/// reports the outage.
const DEFAULT_FILTER: &str = "info,async_nats=warn,sqlx=warn,sqlx_core=warn";
/// How long an ending process waits for its last spans to leave.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Keeps telemetry running. Dropping it at the end of `main` sends what is still buffered.
#[must_use = "telemetry ends when the guard is dropped"]
#[derive(Debug)]
pub struct Guard {
    provider: Option<SdkTracerProvider>,
}

/// Starts logging and, if `OTEL_EXPORTER_OTLP_ENDPOINT` is set, exporting spans. Call once, first in `main`, inside
/// the tokio runtime.
///
/// `RUST_LOG` filters logs and spans; the default is `info`, without the drivers' own chatter. Without an endpoint no span gets a trace
/// id: tracing that nobody reads costs nothing.
///
/// # Errors
/// When the endpoint or `RUST_LOG` cannot be parsed, or a subscriber was installed before.
pub fn init(service_name: &'static str) -> Result<Guard> {
    global::set_text_map_propagator(TraceContextPropagator::new());
    let provider = match std::env::var(OTLP_ENDPOINT) {
        Ok(endpoint) if !endpoint.is_empty() => Some(provider(service_name)?),
        _ => None,
    };
    let spans = provider
        .as_ref()
        .map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer("relay")).with_filter(filter()));
    let logs = tracing_subscriber::fmt::layer()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(stderr)
        .with_filter(filter());
    tracing_subscriber::registry()
        .with(spans)
        .with(logs)
        .with(crate::cost::layer())
        .try_init()
        .context("install the log subscriber")?;
    Ok(Guard { provider })
}

fn filter() -> EnvFilter {
    EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER))
}

/// An error and its causes on one line, for the `error` field of a log line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        line.push_str(": ");
        line.push_str(&next.to_string());
        cause = next.source();
    }
    line
}

fn provider(service_name: &'static str) -> Result<SdkTracerProvider> {
    // The exporter reads the endpoint, headers and timeout from OTEL_EXPORTER_OTLP_* itself.
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .build()
        .with_context(|| format!("set up the trace exporter named by {OTLP_ENDPOINT}"))?;
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(Resource::builder().with_service_name(service_name).build())
        .build())
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown_with_timeout(FLUSH_WITHIN)
        {
            tracing::warn!(%error, "the last spans could not be exported");
        }
    }
}
