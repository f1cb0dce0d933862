//! Telemetry variables, listed by `--config-explain`.

/// Telemetry variable.
#[derive(Debug)]
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    pub(crate) secret: bool,
    pub(crate) default: &'static str,
    pub(crate) help: &'static str,
}

const fn visible(name: &'static str, default: &'static str, help: &'static str) -> Variable {
    Variable { name, secret: false, default, help }
}

const fn secret(name: &'static str, help: &'static str) -> Variable {
    Variable { name, secret: true, default: "", help }
}

/// In the order of docs/telemetry.md; variables of one signal follow those of both.
pub(crate) const VARIABLES: &[Variable] = &[
    visible("RUST_LOG", super::DEFAULT_FILTER, "Filter of logs and spans"),
    visible("OTEL_EXPORTER_OTLP_ENDPOINT", "", "gRPC endpoint of a collector; enables the export of traces"),
    visible("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "Endpoint for traces; enables their export"),
    visible("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "", "Endpoint for metrics; enables their export"),
    visible("OTEL_TRACES_EXPORTER", "", "otlp or none"),
    visible("OTEL_METRICS_EXPORTER", "", "otlp, none or prometheus, separated by commas; scraping works either way"),
    visible("OTEL_LOGS_EXPORTER", "none", "none: logs are lines on stderr"),
    secret("OTEL_EXPORTER_OTLP_HEADERS", "Headers of each export: name=value, separated by commas"),
    secret("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "The same for traces"),
    secret("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "The same for metrics"),
    visible("OTEL_EXPORTER_OTLP_CERTIFICATE", "", "File with trusted certificate authorities of the collector, in PEM"),
    visible("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "", "The same for traces"),
    visible("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "", "The same for metrics"),
    visible("OTEL_EXPORTER_OTLP_TIMEOUT", "10000", "Timeout of an export, in milliseconds"),
    visible("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "The same for traces"),
    visible("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "", "The same for metrics"),
    visible("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "grpc"),
    visible("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "", "The same for traces"),
    visible("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "", "The same for metrics"),
    visible("OTEL_METRIC_EXPORT_INTERVAL", "60000", "Interval between metrics exports, in milliseconds"),
    visible("OTEL_TRACES_SAMPLER", "parentbased_always_on", "Sampler of traces"),
    visible("OTEL_TRACES_SAMPLER_ARG", "", "Ratio of the traces to keep, for samplers with a ratio"),
    visible("OTEL_PROPAGATORS", "tracecontext", "Formats of trace contexts; must include tracecontext"),
    visible("OTEL_SERVICE_NAME", "", "Service name; by default the program's name"),
    visible("OTEL_RESOURCE_ATTRIBUTES", "", "Further resource attributes, name=value"),
    visible("OTEL_SDK_DISABLED", "", "true disables all exports"),
];
