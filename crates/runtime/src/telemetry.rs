//! Logs and traces: lines on stderr always, spans over OTLP if configured.

use std::{
    error::Error,
    io::{IsTerminal as _, stderr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use opentelemetry::{global, trace::TracerProvider as _};
use opentelemetry_otlp::WithTonicConfig as _;
use opentelemetry_sdk::{propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tracing::{Level, Metadata};
use tracing_subscriber::{
    Layer as _,
    filter::{FilterExt as _, FilterFn, LevelFilter, filter_fn},
    fmt::writer::BoxMakeWriter,
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use crate::{
    log_lines::LogLines,
    otel::{self, ExportTarget, TelemetryConfig},
};

/// Time that an ending process waits for its last spans to be exported.
const FLUSH_WITHIN: Duration = Duration::from_secs(2);

/// Form of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line, for collectors.
    #[default]
    Json,
    /// Text for people, coloured on a terminal.
    Text,
}

/// Keeps telemetry running. Dropping it at the end of `main` exports buffered spans.
#[must_use = "telemetry ends when the guard is dropped"]
#[derive(Debug)]
pub struct Guard {
    provider: Option<SdkTracerProvider>,
    lines: Option<LogLines>,
}

/// Treatment of a stderr that takes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullStderr {
    /// Threads that log wait: no line is lost.
    Wait,
    /// Lines are dropped and counted: nothing waits for the reader of stderr.
    Drop,
}

/// Starts logging in JSON and, if `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
/// `OTEL_TRACES_EXPORTER` enables it, exporting spans. Call once, first in `main`, inside the tokio runtime.
///
/// `RUST_LOG` filters logs and spans; the default is `info`, with less from the drivers. Without an export no span
/// gets a trace id, so unused tracing costs nothing.
///
/// # Errors
/// If `RUST_LOG` or a variable of the exports is invalid, or a subscriber is already installed.
pub fn init(service_name: &'static str) -> Result<Guard> {
    init_with_format(service_name, LogFormat::Json, FullStderr::Wait)
}

/// [`init`] with log lines in a form of choice, and a choice for a stderr that takes nothing.
///
/// # Errors
/// As [`init`].
pub fn init_with_format(service_name: &'static str, format: LogFormat, full: FullStderr) -> Result<Guard> {
    global::set_text_map_propagator(TraceContextPropagator::new());
    let config = TelemetryConfig::read()?;
    let provider = config.traces.as_ref().map(|target| build_provider(service_name, target)).transpose()?;
    // Each layer has its own filter: the layer of costs needs the events of statements, which logs and traces leave
    // out.
    let spans = provider.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("relay"))
            .with_filter(config.filter().and(content_filter()))
    });
    let queue = match full {
        FullStderr::Wait => None,
        FullStderr::Drop => Some(LogLines::start(stderr()).context("start the thread that writes log lines")?),
    };
    let writer = queue.clone().map_or_else(|| BoxMakeWriter::new(stderr), BoxMakeWriter::new);
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
        LogFormat::Text => lines.with_ansi(stderr().is_terminal()).boxed(),
    };
    let logs = lines.with_filter(config.filter().and(content_filter()));
    tracing_subscriber::registry()
        .with(spans)
        .with(logs)
        .with(crate::cost::cost_layer())
        .try_init()
        .context("install the log subscriber")?;
    Ok(Guard { provider, lines: queue })
}

/// Filter by [`shows_no_content`]. The hint lets the level of `RUST_LOG` decide which callsites are asked at all.
fn content_filter() -> FilterFn {
    filter_fn(shows_no_content as fn(&Metadata<'_>) -> bool).with_max_level_hint(LevelFilter::TRACE)
}

/// Returns whether an event belongs in the logs and traces whatever `RUST_LOG` says. At these levels the crates write
/// down what they send and receive: headers and frames with keys and tokens.
fn shows_no_content(event: &Metadata<'_>) -> bool {
    let most = match event.target().split("::").next() {
        Some("tungstenite" | "tokio_tungstenite") => Level::DEBUG,
        Some("h2") => Level::INFO,
        _ => Level::TRACE,
    };
    *event.level() <= most
}

/// Formats an error and its causes on one line, for the `error` field of a log line.
#[must_use]
pub fn format_error_chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        line.push_str(": ");
        line.push_str(&next.to_string());
        cause = next.source();
    }
    line
}

fn build_provider(service_name: &'static str, target: &ExportTarget) -> Result<SdkTracerProvider> {
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
        // Before the lines, so that its warning is written as well.
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown_with_timeout(FLUSH_WITHIN)
        {
            tracing::warn!(%error, "failed to export the last spans");
        }
        if let Some(lines) = self.lines.take() {
            lines.flush();
        }
    }
}
