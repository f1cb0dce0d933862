//! What the environment says of telemetry: the standard `OTEL_*` variables and `RUST_LOG`, read and checked in one place.
//!
//! Both signals go over gRPC. What the standard names of exporters and how they send, and this does not offer, is wrong, not
//! ignored: a process that starts exports what it was told to. `VARIABLES` are those that are read; the SDK reads some more
//! by itself (`OTEL_BSP_…`, limits of spans).

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
use crate::settings::{Process, Surroundings};

/// What is logged unless `RUST_LOG` says otherwise. The drivers report each attempt to reconnect; the engine
/// reports the outage.
const DEFAULT_FILTER: &str = "info,async_nats=warn,sqlx=warn,sqlx_core=warn";
/// OpenTelemetry's own defaults.
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

/// What is exported, where to.
#[derive(Debug, PartialEq)]
pub(crate) struct Wanted {
    filter: String,
    pub(crate) traces: Option<Target>,
    pub(crate) metrics: Option<Target>,
    /// How often metrics are sent.
    pub(crate) period: Duration,
}

/// A collector, for one signal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Target {
    url: String,
    /// How long it may take to answer.
    pub(crate) timeout: Duration,
    headers: Vec<(String, String)>,
    /// Whom to trust, in PEM, instead of the system's authorities.
    authority: Option<String>,
}

impl Wanted {
    /// What this process's environment says.
    ///
    /// # Errors
    /// With everything that is wrong.
    pub(crate) fn read() -> Result<Self> {
        let mut wrong = Vec::new();
        let wanted = Self::of(&Process, &mut wrong);
        anyhow::ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        Ok(wanted)
    }

    /// What the surroundings say. What is wrong with it is put on the list.
    pub(crate) fn of(around: &impl Surroundings, wrong: &mut Vec<String>) -> Self {
        let filter = around.variable("RUST_LOG").unwrap_or_else(|| DEFAULT_FILTER.to_owned());
        if let Err(error) = EnvFilter::builder().parse(&filter) {
            wrong.push(format!("RUST_LOG: {error}"));
        }
        let mut reader = Reader { around, wrong };
        if around.variable("OTEL_SDK_DISABLED").is_some_and(|word| word.eq_ignore_ascii_case("true")) {
            return Self { filter, traces: None, metrics: None, period: DEFAULT_PERIOD };
        }
        // An endpoint for all signals is one for traces: metrics are scraped unless more is asked for.
        let everywhere = around.variable("OTEL_EXPORTER_OTLP_ENDPOINT").is_some();
        let traces = reader.target("TRACES", everywhere, &["otlp", "none"]);
        let metrics = reader.target("METRICS", false, &["otlp", "none", "prometheus"]);
        if traces.is_some() {
            reader.sampler();
            reader.propagators();
        }
        if let Some(other) = around.variable("OTEL_LOGS_EXPORTER").filter(|name| name != "none") {
            reader.wrong(format!("OTEL_LOGS_EXPORTER: there is none, and no {other}: logs are lines on stderr"));
        }
        let period = metrics.as_ref().and_then(|_| reader.millis("OTEL_METRIC_EXPORT_INTERVAL"));
        let period = period.unwrap_or(DEFAULT_PERIOD);
        Self { filter, traces, metrics, period }
    }

    /// What is logged, and which spans there are.
    pub(crate) fn filter(&self) -> EnvFilter {
        EnvFilter::new(&self.filter)
    }
}

impl Target {
    /// A connection, made once it is used.
    ///
    /// # Errors
    /// When the URL or the authorities cannot be used.
    pub(crate) fn channel(&self) -> Result<Channel> {
        Ok(self.endpoint()?.connect_lazy())
    }

    /// The headers of each call.
    ///
    /// # Errors
    /// When one is no header.
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

struct Reader<'a, S> {
    around: &'a S,
    wrong: &'a mut Vec<String>,
}

impl<S: Surroundings> Reader<'_, S> {
    /// Once, though both signals may share a variable.
    fn wrong(&mut self, line: String) {
        if !self.wrong.contains(&line) {
            self.wrong.push(line);
        }
    }

    /// Where a signal goes, if it is asked for: by its exporter, else by an endpoint.
    fn target(&mut self, signal: &str, everywhere: bool, exporters: &[&str]) -> Option<Target> {
        let own = self.around.variable(&format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"));
        let asked = format!("OTEL_{signal}_EXPORTER");
        let on = match self.around.variable(&asked) {
            None => everywhere || own.is_some(),
            Some(names) => {
                for name in names.split(',').map(str::trim).filter(|name| !exporters.contains(name)) {
                    self.wrong(format!("{asked}: there is {}, and no {name}", exporters.join(", ")));
                }
                names.split(',').any(|name| name.trim() == "otlp")
            }
        };
        if !on {
            return None;
        }
        if let Some((name, protocol)) = self.either(signal, "PROTOCOL").filter(|(_, protocol)| protocol != "grpc") {
            self.wrong(format!("{name}: there is grpc, and no {protocol}"));
        }
        if let Some((name, way)) = self.either(signal, "COMPRESSION").filter(|(_, way)| way != "none") {
            self.wrong(format!("{name}: there is none, and no {way}"));
        }
        for what in ["CLIENT_KEY", "CLIENT_CERTIFICATE"] {
            if let Some((name, _)) = self.either(signal, what) {
                self.wrong(format!("{name}: no certificate is shown to a collector; headers can say who sends"));
            }
        }
        let (from, url) = self
            .either(signal, "ENDPOINT")
            .unwrap_or_else(|| (format!("OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"), DEFAULT_ENDPOINT.to_owned()));
        let timeout = self.either(signal, "TIMEOUT").and_then(|(name, _)| self.millis(&name));
        let headers = self.either(signal, "HEADERS").map(|(name, text)| self.headers(&name, &text));
        let authority = self.either(signal, "CERTIFICATE").and_then(|(name, path)| {
            let pem = self.around.file(&path);
            pem.map_err(|error| self.wrong(format!("{name}: {error}"))).ok()
        });
        let target = Target {
            url,
            timeout: timeout.unwrap_or(DEFAULT_TIMEOUT),
            headers: headers.unwrap_or_default(),
            authority,
        };
        if let Err(error) = target.endpoint() {
            self.wrong(format!("{from}: {error:#}"));
        }
        if let Err(error) = target.metadata() {
            self.wrong(format!("OTEL_EXPORTER_OTLP_HEADERS: {error:#}"));
        }
        Some(target)
    }

    /// The signal's own variable, else the one for all signals: its name and value.
    fn either(&self, signal: &str, what: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_{signal}_{what}"), format!("OTEL_EXPORTER_OTLP_{what}")];
        names.into_iter().find_map(|name| self.around.variable(&name).map(|value| (name, value)))
    }

    fn millis(&mut self, name: &str) -> Option<Duration> {
        let text = self.around.variable(name)?;
        let millis = text.parse().ok().filter(|millis| *millis > 0).map(Duration::from_millis);
        if millis.is_none() {
            self.wrong(format!("{name}: {text} is no number of milliseconds"));
        }
        millis
    }

    /// `name=value,name=value`, the values percent-encoded.
    fn headers(&mut self, from: &str, text: &str) -> Vec<(String, String)> {
        let mut headers = Vec::new();
        for (nth, part) in text.split_terminator(',').enumerate() {
            let header = part
                .split_once('=')
                .and_then(|(name, value)| Some((name.trim().to_ascii_lowercase(), decoded(value.trim())?)));
            match header {
                Some(header) => headers.push(header),
                // Not repeated: it may be a secret.
                None => self.wrong(format!("{from}: entry {} is no name=value", nth + 1)),
            }
        }
        headers
    }

    /// Trace contexts travel as `traceparent` and in no other way. Baggage, which the standard's default names too, is not sent.
    fn propagators(&mut self) {
        let Some(names) = self.around.variable("OTEL_PROPAGATORS") else { return };
        if !names.split(',').any(|name| name.trim() == "tracecontext") {
            self.wrong(format!("OTEL_PROPAGATORS: there is tracecontext, and no {names}"));
        }
    }

    fn sampler(&mut self) {
        let Some(sampler) = self.around.variable("OTEL_TRACES_SAMPLER") else { return };
        if !SAMPLERS.contains(&sampler.as_str()) {
            self.wrong(format!("OTEL_TRACES_SAMPLER: there is {}, and no {sampler}", SAMPLERS.join(", ")));
        }
        let part = self.around.variable("OTEL_TRACES_SAMPLER_ARG");
        if sampler.ends_with("traceidratio")
            && part.is_some_and(|part| !part.parse().is_ok_and(|part: f64| (0.0..=1.0).contains(&part)))
        {
            self.wrong("OTEL_TRACES_SAMPLER_ARG: the part of the traces to keep is between 0.0 and 1.0".to_owned());
        }
    }
}

/// Without its percent-encoding.
fn decoded(text: &str) -> Option<String> {
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

/// Who sends: the same for both signals, another for each process. What the environment says of it goes first.
pub(crate) fn resource(service: &'static str) -> Resource {
    static INSTANCE: OnceLock<String> = OnceLock::new();
    let instance = INSTANCE.get_or_init(|| uuid::Uuid::new_v4().to_string());
    let mut own = vec![KeyValue::new("service.instance.id", instance.as_str())];
    // A pod's name, in Kubernetes.
    own.extend(Process.variable("HOSTNAME").map(|host| KeyValue::new("host.name", host)));
    let resource = Resource::builder_empty()
        .with_service_name(service)
        .with_attributes(own)
        .with_detectors(&[Box::new(TelemetryResourceDetector), Box::new(EnvResourceDetector::new())]);
    match Process.variable("OTEL_SERVICE_NAME") {
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

    /// Variables.
    struct Given<'a>(&'a [(&'a str, &'a str)]);

    impl Surroundings for Given<'_> {
        fn variable(&self, name: &str) -> Option<String> {
            self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        }

        fn file(&self, _: &str) -> Result<String, String> {
            Err("not found".to_owned())
        }
    }

    fn of(set: &[(&str, &str)]) -> (Wanted, Vec<String>) {
        let mut wrong = Vec::new();
        (Wanted::of(&Given(set), &mut wrong), wrong)
    }

    #[test]
    fn the_environment_decides_where_each_signal_goes() {
        let check = |set: &[(&str, &str)], traces: Option<&str>, metrics: Option<&str>| {
            let (wanted, wrong) = of(set);
            assert_eq!(wrong, Vec::<String>::new(), "{set:?}");
            assert_eq!(wanted.traces.map(|target| target.url).as_deref(), traces, "{set:?}");
            assert_eq!(wanted.metrics.map(|target| target.url).as_deref(), metrics, "{set:?}");
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
    fn how_a_signal_is_sent_may_be_said_for_it_alone() {
        let (wanted, wrong) = of(&[
            (ALL, "http://a:4317"),
            ("OTEL_METRICS_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20abc, x-tenant = one"),
            ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-tenant=two"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "3000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "500"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "250"),
        ]);
        assert_eq!((wrong, wanted.period), (Vec::new(), Duration::from_millis(250)));
        let (traces, metrics) = (wanted.traces.expect("traces"), wanted.metrics.expect("metrics"));
        assert_eq!((traces.timeout.as_secs(), metrics.timeout.as_millis()), (3, 500));
        let headers = metrics.metadata().expect("headers");
        assert_eq!(headers.get("authorization").expect("the header"), "Bearer abc");
        assert_eq!(headers.get("x-tenant").expect("the header"), "one");
        assert_eq!(traces.metadata().expect("headers").get("x-tenant").expect("the header"), "two");
    }

    #[test]
    fn what_cannot_be_used_is_wrong() {
        let check = |set: &[(&str, &str)], said: &str| {
            let (_, wrong) = of(set);
            assert!(wrong.len() == 1 && wrong[0].contains(said), "{set:?}: {wrong:?}");
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
        assert_eq!(of(&usable).1, Vec::<String>::new());
        // Nothing is sent, so how it would be sent does not matter.
        for unused in [
            ("OTEL_PROPAGATORS", "b3"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ] {
            assert_eq!(of(&[unused]).1, Vec::<String>::new());
        }
        let (_, wrong) = of(&[("RUST_LOG", "relay=loud"), (ALL, "a"), ("OTEL_METRICS_EXPORTER", "carbon")]);
        assert_eq!(wrong.len(), 3, "{wrong:?}");
    }

    #[test]
    fn each_process_has_a_name_of_its_own() {
        let resource = resource("relay-gateway");
        let said = |key: &'static str| resource.get(&key.into()).map(|value| value.to_string());
        assert_eq!(said("service.name").as_deref(), Some("relay-gateway"));
        assert!(said("service.instance.id").is_some_and(|id| id.len() == 36), "{resource:?}");
    }
}
