//! The variables of telemetry that are read, for `--config-explain`.

/// One of them.
#[derive(Debug)]
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    /// Whether its value is not shown.
    pub(crate) secret: bool,
    /// Empty where there is none.
    pub(crate) default: &'static str,
    pub(crate) help: &'static str,
}

const fn shown(name: &'static str, default: &'static str, help: &'static str) -> Variable {
    Variable { name, secret: false, default, help }
}

const fn secret(name: &'static str, help: &'static str) -> Variable {
    Variable { name, secret: true, default: "", help }
}

/// In the order of docs/configuration.md; a signal's own follow those for both.
pub(crate) const VARIABLES: &[Variable] = &[
    shown("RUST_LOG", super::DEFAULT_FILTER, "Filter of logs and spans"),
    shown("OTEL_EXPORTER_OTLP_ENDPOINT", "", "gRPC endpoint of a collector; switches the export of traces on"),
    shown("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "", "Another one for traces; switches their export on"),
    shown("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "", "Another one for metrics; switches their export on"),
    shown("OTEL_TRACES_EXPORTER", "", "otlp or none"),
    shown("OTEL_METRICS_EXPORTER", "", "otlp, none or prometheus, separated by commas; scraping works either way"),
    shown("OTEL_LOGS_EXPORTER", "none", "none: logs are lines on stderr"),
    secret("OTEL_EXPORTER_OTLP_HEADERS", "name=value, separated by commas: sent with each export"),
    secret("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "The same for traces"),
    secret("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "The same for metrics"),
    shown("OTEL_EXPORTER_OTLP_CERTIFICATE", "", "File with the authorities that a collector is trusted by, in PEM"),
    shown("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "", "The same for traces"),
    shown("OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE", "", "The same for metrics"),
    shown("OTEL_EXPORTER_OTLP_TIMEOUT", "10000", "How long an export may take, in milliseconds"),
    shown("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "", "The same for traces"),
    shown("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "", "The same for metrics"),
    shown("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "grpc"),
    shown("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "", "The same for traces"),
    shown("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "", "The same for metrics"),
    shown("OTEL_METRIC_EXPORT_INTERVAL", "60000", "How often metrics are sent, in milliseconds"),
    shown("OTEL_TRACES_SAMPLER", "parentbased_always_on", "Which traces are kept"),
    shown("OTEL_TRACES_SAMPLER_ARG", "", "The part of the traces to keep, for samplers with a ratio"),
    shown("OTEL_PROPAGATORS", "tracecontext", "How trace contexts travel; must name tracecontext"),
    shown("OTEL_SERVICE_NAME", "", "The name of the process; the program's own unless set"),
    shown("OTEL_RESOURCE_ATTRIBUTES", "", "What the process says of itself besides, name=value"),
    shown("OTEL_SDK_DISABLED", "", "true sends nothing"),
];
