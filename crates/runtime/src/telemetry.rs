//! Logs and traces: JSON lines on stderr always, spans over OTLP when the environment asks for it.

use std::{error::Error, io::stderr, time::Duration};

use anyhow::{Context as _, Result};
use opentelemetry::{global, trace::TracerProvider as _};
use opentelemetry_otlp::WithTonicConfig as _;
use opentelemetry_sdk::{propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing_subscriber::{Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

use crate::otel::{self, Target, Wanted};

/// How long an ending process waits for its last spans to leave.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Keeps telemetry running. Dropping it at the end of `main` sends what is still buffered.
#[must_use = "telemetry ends when the guard is dropped"]
#[derive(Debug)]
pub struct Guard {
    provider: Option<SdkTracerProvider>,
}

/// Starts logging and, if `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_TRACES_EXPORTER`
/// asks for it, exporting spans. Call once, first in `main`, inside the tokio runtime.
///
/// `RUST_LOG` filters logs and spans; the default is `info`, without the drivers' own chatter. Without an export no span
/// gets a trace id: tracing that nobody reads costs nothing.
///
/// # Errors
/// When `RUST_LOG` or a variable of the exports cannot be used, or a subscriber was installed before.
pub fn init(service_name: &'static str) -> Result<Guard> {
    global::set_text_map_propagator(TraceContextPropagator::new());
    let wanted = Wanted::read()?;
    let provider = wanted.traces.as_ref().map(|target| provider(service_name, target)).transpose()?;
    let spans = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer().with_tracer(provider.tracer("relay")).with_filter(wanted.filter())
    });
    let logs = tracing_subscriber::fmt::layer()
        .json()
        .flatten_event(true)
        .with_current_span(true)
        .with_span_list(false)
        .with_writer(stderr)
        .with_filter(wanted.filter());
    tracing_subscriber::registry()
        .with(spans)
        .with(logs)
        .with(crate::cost::layer())
        .try_init()
        .context("install the log subscriber")?;
    Ok(Guard { provider })
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

fn provider(service_name: &'static str, target: &Target) -> Result<SdkTracerProvider> {
    // The exporter reads headers and time-out from OTEL_EXPORTER_OTLP_* itself.
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(target.channel()?)
        .build()
        .context("set up the trace exporter")?;
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(otel::resource(service_name)).build())
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
