//! Telemetry configuration: the standard `OTEL_*` variables and `RUST_LOG`, read and validated in one place.
//!
//! Both signals use gRPC. Exporters and transports of the standard that are not supported are reported as invalid, so
//! that a process that starts exports what it was configured to. `VARIABLES` lists the variables read here; the SDK
//! itself reads some more (`OTEL_BSP_…`, span limits).

mod variables;

use std::{str::FromStr as _, sync::OnceLock, time::Duration};

use anyhow::{Context as _, Result};
use opentelemetry::KeyValue;
use opentelemetry_sdk::{
    Resource,
    resource::{EnvResourceDetector, TelemetryResourceDetector},
};
use tonic::{
    metadata::{MetadataKey, MetadataMap, MetadataValue},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tracing_subscriber::EnvFilter;

pub(crate) use self::variables::VARIABLES;
use crate::environment::{Environment, ProcessEnvironment};

/// Default of `RUST_LOG`. The drivers log every reconnect attempt, and the engine already logs the outage.
const DEFAULT_FILTER: &str = "info,async_nats=warn,sqlx=warn,sqlx_core=warn";
/// Defaults of OpenTelemetry.
const DEFAULT_ENDPOINT: &str = "http://localhost:4317";
const DEFAULT_PERIOD: Duration = Duration::from_secs(60);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// Telemetry configuration of a process.
#[derive(Debug, PartialEq)]
pub(crate) struct TelemetryConfig {
    filter: String,
    pub(crate) traces: Option<ExportTarget>,
    pub(crate) metrics: Option<ExportTarget>,
    /// Interval between metrics exports.
    pub(crate) period: Duration,
}

/// Collector of one signal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExportTarget {
    url: String,
    /// Timeout of one export.
    pub(crate) timeout: Duration,
    headers: Vec<(String, String)>,
    /// Trusted certificate authorities in PEM, instead of those of the system.
    authority: Option<String>,
}

impl TelemetryConfig {
    /// Reads the configuration of this process.
    ///
    /// # Errors
    /// Lists every problem.
    pub(crate) fn read() -> Result<Self> {
        let mut problems = Vec::new();
        let config = Self::from_environment(&ProcessEnvironment, &mut problems);
        anyhow::ensure!(problems.is_empty(), "{}", problems.join("; "));
        Ok(config)
    }

    /// Reads the configuration from an environment and appends its problems to `problems`.
    pub(crate) fn from_environment(environment: &impl Environment, problems: &mut Vec<String>) -> Self {
        let filter = environment.variable("RUST_LOG").unwrap_or_else(|| DEFAULT_FILTER.to_owned());
        if let Err(error) = EnvFilter::builder().parse(&filter) {
            problems.push(format!("RUST_LOG: {error}"));
        }
        let mut reader = EnvironmentReader { environment, problems };
        if environment.variable("OTEL_SDK_DISABLED").is_some_and(|word| word.eq_ignore_ascii_case("true")) {
            return Self { filter, traces: None, metrics: None, period: DEFAULT_PERIOD };
        }
        // A common endpoint enables traces only: metrics are scraped by default.
        let everywhere = environment.variable("OTEL_EXPORTER_OTLP_ENDPOINT").is_some();
        let traces = reader.read_target("TRACES", everywhere, &["otlp", "none"]);
        let metrics = reader.read_target("METRICS", false, &["otlp", "none", "prometheus"]);
        if traces.is_some() {
            reader.check_sampler();
            reader.check_propagators();
        }
        if let Some(other) = environment.variable("OTEL_LOGS_EXPORTER").filter(|name| name != "none") {
            reader.add_problem(format!("OTEL_LOGS_EXPORTER: there is none, and no {other}: logs are lines on stderr"));
        }
        let period = metrics.as_ref().and_then(|_| reader.read_millis("OTEL_METRIC_EXPORT_INTERVAL"));
        let period = period.unwrap_or(DEFAULT_PERIOD);
        Self { filter, traces, metrics, period }
    }

    /// Returns the filter of logs and spans.
    pub(crate) fn filter(&self) -> EnvFilter {
        EnvFilter::new(&self.filter)
    }
}

impl ExportTarget {
    /// Creates a channel that connects on first use.
    ///
    /// # Errors
    /// If the URL or the authorities are invalid.
    pub(crate) fn channel(&self) -> Result<Channel> {
        Ok(self.endpoint()?.connect_lazy())
    }

    /// Returns the headers of every call.
    ///
    /// # Errors
    /// If a header is invalid.
    pub(crate) fn metadata(&self) -> Result<MetadataMap> {
        let mut metadata = MetadataMap::new();
        for (name, value) in &self.headers {
            let key = MetadataKey::from_str(name).with_context(|| format!("{name} is no name of a header"))?;
            // The value may be a secret.
            let value =
                MetadataValue::try_from(value).with_context(|| format!("the value of {name} is no header's"))?;
            metadata.append(key, value);
        }
        Ok(metadata)
    }

    fn endpoint(&self) -> Result<Endpoint> {
        anyhow::ensure!(
            self.url.starts_with("http://") || self.url.starts_with("https://"),
            "the endpoint is no http:// or https:// address"
        );
        let endpoint = Endpoint::from_shared(self.url.clone()).context("the endpoint is no address")?;
        let endpoint = endpoint.timeout(self.timeout).connect_timeout(self.timeout);
        if !self.url.starts_with("https://") {
            return Ok(endpoint);
        }
        let tls = match &self.authority {
            Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        endpoint.tls_config(tls).context("set up TLS")
    }
}

struct EnvironmentReader<'a, S> {
    environment: &'a S,
    problems: &'a mut Vec<String>,
}

impl<S: Environment> EnvironmentReader<'_, S> {
    /// Adds a problem once, although both signals may share a variable.
    fn add_problem(&mut self, line: String) {
        if !self.problems.contains(&line) {
            self.problems.push(line);
        }
    }

    /// Reads the collector of a signal, if it is enabled by its exporter or by an endpoint.
    fn read_target(&mut self, signal: &str, everywhere: bool, exporters: &[&str]) -> Option<ExportTarget> {
        let own = self.environment.variable(&format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"));
        let asked = format!("OTEL_{signal}_EXPORTER");
        let on = match self.environment.variable(&asked) {
            None => everywhere || own.is_some(),
            Some(names) => {
                for name in names.split(',').map(str::trim).filter(|name| !exporters.contains(name)) {
                    self.add_problem(format!("{asked}: there is {}, and no {name}", exporters.join(", ")));
                }
                names.split(',').any(|name| name.trim() == "otlp")
            }
        };
        if !on {
            return None;
        }
        if let Some((name, protocol)) =
            self.signal_variable(signal, "PROTOCOL").filter(|(_, protocol)| protocol != "grpc")
        {
            self.add_problem(format!("{name}: there is grpc, and no {protocol}"));
        }
        if let Some((name, way)) = self.signal_variable(signal, "COMPRESSION").filter(|(_, way)| way != "none") {
            self.add_problem(format!("{name}: there is none, and no {way}"));
        }
        for what in ["CLIENT_KEY", "CLIENT_CERTIFICATE"] {
            if let Some((name, _)) = self.signal_variable(signal, what) {
                self.add_problem(format!("{name}: no certificate is shown to a collector; headers can say who sends"));
            }
        }
        let (from, url) = self
            .signal_variable(signal, "ENDPOINT")
            .unwrap_or_else(|| (format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"), DEFAULT_ENDPOINT.to_owned()));
        let timeout = self.signal_variable(signal, "TIMEOUT").and_then(|(name, _)| self.read_millis(&name));
        let headers = self.signal_variable(signal, "HEADERS").map(|(name, text)| self.parse_headers(&name, &text));
        let authority = self.signal_variable(signal, "CERTIFICATE").and_then(|(name, path)| {
            let pem = self.environment.file(&path);
            pem.map_err(|error| self.add_problem(format!("{name}: {error}"))).ok()
        });
        let target = ExportTarget {
            url,
            timeout: timeout.unwrap_or(DEFAULT_TIMEOUT),
            headers: headers.unwrap_or_default(),
            authority,
        };
        if let Err(error) = target.endpoint() {
            self.add_problem(format!("{from}: {error:#}"));
        }
        if let Err(error) = target.metadata() {
            self.add_problem(format!("OTEL_EXPORTER_OTLP_HEADERS: {error:#}"));
        }
        Some(target)
    }

    /// Returns name and value of the signal's own variable, or of the common one.
    fn signal_variable(&self, signal: &str, what: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_{signal}_{what}"), format!("OTEL_EXPORTER_OTLP_{what}")];
        names.into_iter().find_map(|name| self.environment.variable(&name).map(|value| (name, value)))
    }

    fn read_millis(&mut self, name: &str) -> Option<Duration> {
        let text = self.environment.variable(name)?;
        let millis = text.parse().ok().filter(|millis| *millis > 0).map(Duration::from_millis);
        if millis.is_none() {
            self.add_problem(format!("{name}: {text} is no number of milliseconds"));
        }
        millis
    }

    /// Parses `name=value,name=value` with percent-encoded values.
    fn parse_headers(&mut self, from: &str, text: &str) -> Vec<(String, String)> {
        let mut headers = Vec::new();
        for (nth, part) in text.split_terminator(',').enumerate() {
            let header = part
                .split_once('=')
                .and_then(|(name, value)| Some((name.trim().to_ascii_lowercase(), decode_percent(value.trim())?)));
            match header {
                Some(header) => headers.push(header),
                // Not repeated: it may be a secret.
                None => self.add_problem(format!("{from}: entry {} is no name=value", nth + 1)),
            }
        }
        headers
    }

    /// Checks that trace contexts use `traceparent`, the only supported format. Baggage, part of the standard's
    /// default, is accepted but not sent.
    fn check_propagators(&mut self) {
        let Some(names) = self.environment.variable("OTEL_PROPAGATORS") else { return };
        if !names.split(',').any(|name| name.trim() == "tracecontext") {
            self.add_problem(format!("OTEL_PROPAGATORS: there is tracecontext, and no {names}"));
        }
    }

    fn check_sampler(&mut self) {
        let Some(sampler) = self.environment.variable("OTEL_TRACES_SAMPLER") else { return };
        if !SAMPLERS.contains(&sampler.as_str()) {
            self.add_problem(format!("OTEL_TRACES_SAMPLER: there is {}, and no {sampler}", SAMPLERS.join(", ")));
        }
        let part = self.environment.variable("OTEL_TRACES_SAMPLER_ARG");
        if sampler.ends_with("traceidratio")
            && part.is_some_and(|part| !part.parse().is_ok_and(|part: f64| (0.0..=1.0).contains(&part)))
        {
            self.add_problem(
                "OTEL_TRACES_SAMPLER_ARG: the part of the traces to keep is between 0.0 and 1.0".to_owned(),
            );
        }
    }
}

/// Decodes percent-encoding.
fn decode_percent(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            plain.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            plain.push(byte);
        }
    }
    String::from_utf8(plain).ok()
}

/// Builds the resource: shared by both signals, unique per process. Attributes from the environment take precedence.
pub(crate) fn resource(service: &'static str) -> Resource {
    static INSTANCE: OnceLock<String> = OnceLock::new();
    let instance = INSTANCE.get_or_init(|| uuid::Uuid::new_v4().to_string());
    let mut own = vec![KeyValue::new("service.instance.id", instance.as_str())];
    // A pod's name, in Kubernetes.
    own.extend(ProcessEnvironment.variable("HOSTNAME").map(|host| KeyValue::new("host.name", host)));
    let resource = Resource::builder_empty()
        .with_service_name(service)
        .with_attributes(own)
        .with_detectors(&[Box::new(TelemetryResourceDetector), Box::new(EnvResourceDetector::new())]);
    match ProcessEnvironment.variable("OTEL_SERVICE_NAME") {
        Some(name) => resource.with_service_name(name).build(),
        None => resource.build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
    const TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    const METRICS: &str = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";

    struct TestEnvironment<'a>(&'a [(&'a str, &'a str)]);

    impl Environment for TestEnvironment<'_> {
        fn variable(&self, name: &str) -> Option<String> {
            self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        }

        fn file(&self, _: &str) -> Result<String, String> {
            Err("not found".to_owned())
        }
    }

    fn read_config(set: &[(&str, &str)]) -> (TelemetryConfig, Vec<String>) {
        let mut problems = Vec::new();
        (TelemetryConfig::from_environment(&TestEnvironment(set), &mut problems), problems)
    }

    #[test]
    fn endpoints_and_exporters_enable_signals() {
        let check = |set: &[(&str, &str)], traces: Option<&str>, metrics: Option<&str>| {
            let (config, problems) = read_config(set);
            assert_eq!(problems, Vec::<String>::new(), "{set:?}");
            assert_eq!(config.traces.map(|target| target.url).as_deref(), traces, "{set:?}");
            assert_eq!(config.metrics.map(|target| target.url).as_deref(), metrics, "{set:?}");
        };
        let (a, b) = ("http://a:4317", "http://b:4317");
        check(&[], None, None);
        check(&[(ALL, a)], Some(a), None);
        check(&[(TRACES, b)], Some(b), None);
        check(&[(ALL, a), (TRACES, b)], Some(b), None);
        check(&[(METRICS, b)], None, Some(b));
        check(&[(ALL, a), (METRICS, b)], Some(a), Some(b));
        check(&[(ALL, a), ("OTEL_METRICS_EXPORTER", "otlp")], Some(a), Some(a));
        check(&[(ALL, a), ("OTEL_METRICS_EXPORTER", "prometheus")], Some(a), None);
        check(&[(METRICS, b), ("OTEL_METRICS_EXPORTER", "none")], None, None);
        check(&[(ALL, a), ("OTEL_TRACES_EXPORTER", "none")], None, None);
        check(&[("OTEL_TRACES_EXPORTER", "otlp")], Some(DEFAULT_ENDPOINT), None);
        check(&[(ALL, a), (METRICS, b), ("OTEL_SDK_DISABLED", "TRUE")], None, None);
    }

    #[test]
    fn a_variable_of_one_signal_overrides_the_common_one() {
        let (config, problems) = read_config(&[
            (ALL, "http://a:4317"),
            ("OTEL_METRICS_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20abc, x-tenant = one"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-tenant=two"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "3000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "500"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "250"),
        ]);
        assert_eq!((problems, config.period), (Vec::new(), Duration::from_millis(250)));
        let (traces, metrics) = (config.traces.expect("traces"), config.metrics.expect("metrics"));
        assert_eq!((traces.timeout.as_secs(), metrics.timeout.as_millis()), (3, 500));
        let headers = metrics.metadata().expect("headers");
        assert_eq!(headers.get("authorization").expect("the header"), "Bearer abc");
        assert_eq!(headers.get("x-tenant").expect("the header"), "one");
        assert_eq!(traces.metadata().expect("headers").get("x-tenant").expect("the header"), "two");
    }

    #[test]
    fn unsupported_values_are_reported() {
        let check = |set: &[(&str, &str)], said: &str| {
            let (_, problems) = read_config(set);
            assert!(problems.len() == 1 && problems[0].contains(said), "{set:?}: {problems:?}");
        };
        let on = (ALL, "http://a:4317");
        check(&[("RUST_LOG", "info,relay=loud")], "RUST_LOG");
        check(&[(ALL, "a:4317")], "OTEL_EXPORTER_OTLP_ENDPOINT: the endpoint is no http");
        check(&[(TRACES, "ftp://a")], "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: the endpoint is no http");
        check(&[(METRICS, "http://a b")], "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT");
        check(&[("OTEL_TRACES_EXPORTER", "zipkin")], "OTEL_TRACES_EXPORTER");
        check(&[on, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")], "OTEL_EXPORTER_OTLP_PROTOCOL");
        check(&[on, ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")], "OTEL_EXPORTER_OTLP_COMPRESSION");
        check(&[on, ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key")], "OTEL_EXPORTER_OTLP_CLIENT_KEY");
        check(&[on, ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "/c")], "TRACES_CLIENT_CERTIFICATE");
        check(&[on, ("OTEL_PROPAGATORS", "b3,jaeger")], "OTEL_PROPAGATORS: there is tracecontext");
        check(&[("OTEL_LOGS_EXPORTER", "otlp")], "OTEL_LOGS_EXPORTER: there is none");
        check(&[on, ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")], "OTEL_EXPORTER_OTLP_TIMEOUT");
        check(&[on, ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none")], "OTEL_EXPORTER_OTLP_CERTIFICATE: not found");
        check(&[on, ("OTEL_EXPORTER_OTLP_HEADERS", "a=b,sesame")], "entry 2");
        check(&[on, ("OTEL_EXPORTER_OTLP_HEADERS", "se same=b")], "OTEL_EXPORTER_OTLP_HEADERS");
        check(&[on, ("OTEL_TRACES_SAMPLER", "sometimes")], "OTEL_TRACES_SAMPLER");
        check(&[on, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")], "SAMPLER_ARG");
        let metrics = (METRICS, "http://a:4317");
        check(&[metrics, ("OTEL_METRIC_EXPORT_INTERVAL", "0")], "OTEL_METRIC_EXPORT_INTERVAL");
        let usable = [on, ("OTEL_PROPAGATORS", "tracecontext, baggage"), ("OTEL_LOGS_EXPORTER", "none")];
        assert_eq!(read_config(&usable).1, Vec::<String>::new());
        // Without an export its settings do not matter.
        for unused in [
            ("OTEL_PROPAGATORS", "b3"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ] {
            assert_eq!(read_config(&[unused]).1, Vec::<String>::new());
        }
        let (_, problems) = read_config(&[("RUST_LOG", "relay=loud"), (ALL, "a"), ("OTEL_METRICS_EXPORTER", "carbon")]);
        assert_eq!(problems.len(), 3, "{problems:?}");
    }

    #[test]
    fn each_process_has_its_own_instance_id() {
        let resource = resource("relay-gateway");
        let said = |key: &'static str| resource.get(&key.into()).map(|value| value.to_string());
        assert_eq!(said("service.name").as_deref(), Some("relay-gateway"));
        assert!(said("service.instance.id").is_some_and(|id| id.len() == 36), "{resource:?}");
    }
}
