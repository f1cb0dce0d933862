//! Telemetry at a collector: one trace from a request to the ack over all processes; metrics; the cost of a request;
//! exemplars.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
    metrics_service_server::{MetricsService, MetricsServiceServer},
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric::Data, number_data_point};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use relay_testkit::{client::Api, ports::Port, receiver::Receiver as Endpoint, stack::Stack, wait};
use serde_json::json;
use tonic::{
    Request, Response, Status,
    transport::{Identity, Server, ServerTlsConfig},
};

const SOON: Duration = Duration::from_secs(30);
/// Number of messages to follow until one is complete.
const TRACES: u64 = 5;
/// Number of messages that wait for the recipient.
const WAITING: u64 = 3;
const CALLER: &str = "b7ad6b7169203331";

/// Credentials that the collector requires.
const PASSWORD: &str = "Bearer s3cret";
/// For 127.0.0.1, from an authority that only the test's processes trust.
const AUTHORITY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/operating/collector/authority.pem");
const CERTIFICATE: &str = include_str!("collector/certificate.pem");
const KEY: &str = include_str!("collector/key.pem");

/// Identity of an exporting process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Sender {
    service: String,
    instance: String,
}

/// Telemetry received from all processes.
#[derive(Clone, Default)]
struct Receiver {
    spans: Arc<Mutex<Vec<(Sender, Span)>>>,
    /// Newest export by process and metric.
    metrics: Arc<Mutex<HashMap<(Sender, String), Metric>>>,
}

impl Sender {
    fn from_resource(resource: Option<Resource>) -> Self {
        let attributes = resource.map(|resource| resource.attributes).unwrap_or_default();
        let said = |key: &str| {
            let found = attributes.iter().find(|attribute| attribute.key == key);
            match found.and_then(|attribute| attribute.value.clone()?.value) {
                Some(any_value::Value::StringValue(text)) => text,
                _ => String::new(),
            }
        };
        assert_eq!(said("deployment.environment.name"), "test", "what the environment adds: {attributes:?}");
        Self { service: said("service.name"), instance: said("service.instance.id") }
    }
}

/// Refuses exports without the credentials.
fn admit(request: Request<()>) -> Result<Request<()>, Status> {
    match request.metadata().get("authorization") {
        Some(said) if said.to_str().is_ok_and(|said| said == PASSWORD) => Ok(request),
        _ => Err(Status::unauthenticated("who is it?")),
    }
}

#[tonic::async_trait]
impl MetricsService for Receiver {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let mut known = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_metrics {
            let sender = Sender::from_resource(resource.resource);
            for metric in resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
                known.insert((sender.clone(), metric.name.clone()), metric);
            }
        }
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut known = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let sender = Sender::from_resource(resource.resource);
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            known.extend(spans.map(|span| (sender.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Receiver {
    /// Returns a metric of each process of a service.
    fn metric(&self, service: &str, name: &str) -> HashMap<Sender, Metric> {
        let known = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        let own = known.iter().filter(|((sender, metric), _)| sender.service == service && metric == name);
        own.map(|((sender, _), metric)| (sender.clone(), metric.clone())).collect()
    }

    /// Returns the process that exported a span.
    fn sender(&self, of: &Span) -> Option<Sender> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.iter().find(|(_, span)| span.span_id == of.span_id).map(|(sender, _)| sender.clone())
    }

    /// Returns the spans of a trace by name.
    fn traced(&self, trace: &str) -> HashMap<String, Span> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let own = spans.iter().map(|(_, span)| span).filter(|span| hex(&span.trace_id) == trace);
        own.map(|span| (span.name.clone(), span.clone())).collect()
    }
}

/// Returns the id of the nth trace.
fn trace(nth: u64) -> String {
    format!("0af7651916cd43dd8448eb211c8{nth:05x}")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_on_one_gateway_and_its_ack_on_another_are_one_trace() -> Result<()> {
    let receiver = Receiver::default();
    // Traces over TLS, metrics without.
    let (secured, open) = (Port::free()?, Port::free()?);
    let tls = ServerTlsConfig::new().identity(Identity::from_pem(CERTIFICATE, KEY));
    let traces = Server::builder()
        .tls_config(tls)?
        .add_service(TraceServiceServer::with_interceptor(receiver.clone(), admit))
        .serve(secured.address().parse()?);
    let metrics = Server::builder()
        .add_service(MetricsServiceServer::with_interceptor(receiver.clone(), admit))
        .serve(open.address().parse()?);
    let servers = [tokio::spawn(traces), tokio::spawn(metrics)];
    let stack = Stack::builder()
        .gateways(2)
        .env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", format!("https://{}", secured.address()))
        .env("OTEL_EXPORTER_OTLP_CERTIFICATE", AUTHORITY)
        .env("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", format!("http://{}", open.address()))
        .env("OTEL_EXPORTER_OTLP_HEADERS", format!("authorization={}", PASSWORD.replace(' ', "%20")))
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        .env("OTEL_BSP_SCHEDULE_DELAY", "200")
        .env("OTEL_METRIC_EXPORT_INTERVAL", "300")
        .env("RUST_LOG", "info,async_nats=warn,sqlx=warn,sqlx_core=warn,relay::requests=debug")
        .start()
        .await?;
    let (sending, receiving) = (stack.gateway(0), stack.gateway(1));
    let key = Api::create_workspace(sending.url(), "traced").await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    // The first publish of a process creates the stream. Messages for an agent that connects later are replays without
    // a missing live copy.
    for _ in 0..WAITING {
        key.as_agent(&ada).dm("bob", "not followed").await?.success()?;
    }
    let mut socket = Api::new(receiving.url(), &bob.token).direct_socket().await?;
    for _ in 0..WAITING {
        socket.expect("deliver").await?;
    }
    socket.ack("bob", WAITING).await?;
    assert!(receiving.metric("relay_deliveries_replayed_total").await? >= 1.0);
    assert_eq!(receiving.metric("relay_deliveries_repaired_total").await?, 0.0);
    for process in [sending, receiving, stack.worker()] {
        for gauge in ["relay_database_connections", "relay_database_connections_max", "relay_nats_connected"] {
            // The gauges are updated each second.
            wait::until_ok(&format!("{gauge} of {}", process.name()), SOON, || async {
                ensure!(process.metric(gauge).await? >= 1.0, "not yet");
                anyhow::Ok(())
            })
            .await?;
        }
    }

    // A frame whose live copy is late is read from Postgres and belongs to the commit: then another message is
    // followed.
    let mut followed = Err(anyhow::anyhow!("nothing was followed"));
    for seq in WAITING + 1..=WAITING + TRACES {
        let trace = trace(seq);
        post(&key.as_agent(&ada), "/v1/dm", json!({ "to": "bob", "text": "follow me" }), &trace).await?;
        socket.expect("deliver").await?;
        socket.ack("bob", seq).await?;
        followed = wait_for_trace(&receiver, &trace).await.map(|spans| (trace, spans));
        if followed.is_ok() {
            break;
        }
    }
    let (trace, spans) = followed?;
    for span in spans.values() {
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{} ends before it begins", span.name);
    }
    metrics_arrive(&receiver).await?;
    // Spans and metrics have the same process identity.
    let gateways = receiver.metric("relay-gateway", "relay_connected_nodes");
    let (posted_at, acked_at) = (receiver.sender(&spans["http.request"]), receiver.sender(&spans["node.ack"]));
    assert_ne!(posted_at, acked_at);
    assert!([posted_at, acked_at].iter().flatten().filter(|sender| gateways.contains_key(sender)).count() == 2);
    check_exemplars(sending.metrics_url(), &trace).await?;
    check_worker_calls_in_trace(&receiver, &key, &key.as_agent(&ada)).await?;
    check_late_publish_in_trace(&receiver, &stack, &key.as_agent(&ada)).await?;
    // The cost of the post: authentication, resolution and commit.
    let line = wait::until_ok("the request's line in the log", SOON, || async {
        let log = std::fs::read_to_string(sending.log())?;
        let line = log.lines().find(|line| line.contains("relay::requests") && line.contains("\"/v1/dm\""));
        anyhow::Ok(serde_json::from_str::<serde_json::Value>(line.context("no line yet")?)?)
    })
    .await?;
    assert!(line["db.queries"].as_u64() >= Some(2), "{line}");
    assert!(line["db.ms"].as_f64() > Some(0.0) && line["elapsed_ms"].as_f64() >= line["db.ms"].as_f64(), "{line}");
    assert_eq!((&line["http.status"], &line["http.route"]), (&json!(201), &json!("/v1/dm")));
    servers.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(())
}

/// Posts as a caller whose own span is in a trace.
async fn post(api: &Api, path: &str, body: serde_json::Value, trace: &str) -> Result<()> {
    let posted = reqwest::Client::new()
        .post(format!("{}{path}", api.base()))
        .bearer_auth(api.token())
        .header("traceparent", format!("00-{trace}-{CALLER}-01"))
        .json(&body)
        .send()
        .await?;
    ensure!(posted.status().is_success(), "{posted:?}");
    Ok(())
}

/// Calls to endpoints and subscription URLs carry the trace of their post, and of no other.
async fn check_worker_calls_in_trace(receiver: &Receiver, key: &Api, sender: &Api) -> Result<()> {
    let called = Endpoint::accepting_all().await?;
    key.register_agent("carl").await?;
    let delivery = json!({ "url": called.url("/push"), "ack_mode": "on_2xx" });
    key.post("/v1/nodes", json!({ "name": "hook", "kind": "http_push", "delivery": delivery })).await?.success()?;
    key.bind("hook", "carl").await?;
    let subscription = json!({ "events": ["message.created"], "url": called.url("/events") });
    key.post("/v1/subscriptions", subscription).await?.success()?;
    let trace = trace(WAITING + TRACES + 1);
    post(sender, "/v1/channels/general/messages", json!({ "text": "follow me" }), &trace).await?;
    sender.post_message("general", "do not").await?.success()?;
    for (path, name) in [("/push", "push.attempt"), ("/events", "subscription.call")] {
        let calls = wait::until_ok("the calls of both messages", SOON, || async {
            let all = called.received();
            let of = |text: &str| {
                let call = all.iter().find(|call| call.path == path && call.json().to_string().contains(text));
                call.map(|call| call.header("traceparent").to_owned())
            };
            of("follow me").zip(of("do not")).context("not yet")
        })
        .await?;
        let (traced, other) = calls;
        let reported: Vec<_> = traced.split('-').collect();
        ensure!(reported.len() == 4 && reported[1] == trace && reported[3] == "01", "{path} was told {traced:?}");
        // The second post started a trace of its own.
        ensure!(!other.contains(&trace), "{path} was told {other:?}");
        wait::until_ok("the call's span below the commit", SOON, || async {
            let spans = receiver.traced(&trace);
            let span = spans.get(name).with_context(|| format!("no {name} in {:?}", spans.keys()))?;
            ensure!(hex(&span.span_id) == reported[2], "{path} was told {traced}, which is not {span:?}");
            let above: Vec<_> = ancestors(&spans, span).into_iter().map(|span| &*span.name).collect();
            ensure!(above.contains(&"engine.commit") && above.contains(&"http.request"), "{name} is below {above:?}");
            ensure!(receiver.sender(span).is_some_and(|sender| sender.service == "relay-worker"));
            anyhow::Ok(())
        })
        .await?;
    }
    Ok(())
}

/// A worker publishes what its gateway did not, within the trace of the commit.
async fn check_late_publish_in_trace(receiver: &Receiver, stack: &Stack, sender: &Api) -> Result<()> {
    stack.nats().stop().await?;
    wait::until("the gateway to miss NATS", SOON, || async {
        stack.gateway(0).metric("relay_nats_connected").await.is_ok_and(|connected| connected < 1.0)
    })
    .await;
    let trace = trace(WAITING + TRACES + 2);
    post(sender, "/v1/dm", json!({ "to": "bob", "text": "late" }), &trace).await?;
    stack.nats().restart().await?;
    wait::until_ok("the worker's publish", SOON, || async {
        let spans = receiver.traced(&trace);
        let span = spans.get("stream.republish").with_context(|| format!("it is not among {:?}", spans.keys()))?;
        let above: Vec<_> = ancestors(&spans, span).into_iter().map(|span| &*span.name).collect();
        ensure!(above.contains(&"engine.commit") && above.contains(&"http.request"), "it is below {above:?}");
        ensure!(receiver.sender(span).is_some_and(|sender| sender.service == "relay-worker"));
        anyhow::Ok(())
    })
    .await
}

/// Returns the spans of a message from request to ack, once complete. They form one tree below the caller's span.
async fn wait_for_trace(receiver: &Receiver, trace: &str) -> Result<HashMap<String, Span>> {
    let way = ["http.request", "engine.commit", "stream.publish", "node.deliver", "node.ack"];
    let spans = wait::until_ok("every span of the trace", SOON, || async {
        let spans = receiver.traced(trace);
        let missing: Vec<_> = way.iter().filter(|name| !spans.contains_key(**name)).collect();
        ensure!(missing.is_empty(), "{missing:?} did not come; {:?} did", spans.keys());
        anyhow::Ok(spans)
    })
    .await?;
    ensure!(hex(&spans["http.request"].parent_span_id) == CALLER, "{:?}", spans["http.request"]);
    for pair in way.windows(2) {
        let (parent, child) = (pair[0], &spans[pair[1]]);
        let known = spans.values().find(|span| span.span_id == child.parent_span_id);
        let known = known.with_context(|| format!("{} hangs on nothing", child.name))?;
        let above: Vec<_> = ancestors(&spans, known).into_iter().map(|span| span.name.clone()).collect();
        ensure!(above.iter().any(|name| name == parent), "{} is below {above:?}, not {parent}", child.name);
    }
    Ok(spans)
}

/// Checks counters, gauges and histograms of both services.
async fn metrics_arrive(receiver: &Receiver) -> Result<()> {
    wait::until_ok("metrics of both gateways and the worker", SOON, || async {
        let of = |service, name| receiver.metric(service, name).into_values().map(|metric| metric.data);
        ensure!(of("relay-gateway", "relay_connected_nodes").len() == 2, "both gateways, each by itself");
        let accepted =
            of("relay-gateway", "relay_messages_accepted_total").flatten().next().context("no counter yet")?;
        let Data::Sum(sum) = accepted else { anyhow::bail!("{accepted:?}") };
        ensure!(sum.is_monotonic && sum.data_points.len() == 1, "{sum:?}");
        ensure!(matches!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(count)) if count >= 1.0));
        let requests = of("relay-gateway", "relay_http_seconds").flatten().next().context("no histogram yet")?;
        let Data::Histogram(histogram) = requests else { anyhow::bail!("{requests:?}") };
        let point = histogram.data_points.first().context("a point")?;
        ensure!(point.bucket_counts.iter().sum::<u64>() == point.count && point.count > 0, "{point:?}");
        ensure!(point.bucket_counts.len() == point.explicit_bounds.len() + 1, "{point:?}");
        let lag = of("relay-worker", "relay_outbox_lag_seconds").flatten().next().context("no gauge yet")?;
        ensure!(matches!(lag, Data::Gauge(_)), "{lag:?}");
        anyhow::Ok(())
    })
    .await
}

/// Scrapes in the OpenMetrics format contain exemplars.
async fn check_exemplars(url: &str, trace: &str) -> Result<()> {
    let answer = reqwest::Client::new().get(url).header("accept", "application/openmetrics-text; version=1.0.0");
    let answer = answer.send().await?.error_for_status()?;
    let kind = answer.headers().get("content-type").context("a content type")?.to_str()?.to_owned();
    let page = answer.text().await?;
    ensure!(kind.starts_with("application/openmetrics-text"), "{kind}");
    ensure!(page.ends_with("# EOF\n") && page.contains("# TYPE relay_messages_accepted counter"), "{page}");
    let exemplar = format!("trace_id=\"{trace}\"");
    let line = page.lines().find(|line| line.contains(&exemplar)).context("no exemplar of the trace")?;
    ensure!(line.starts_with("relay_http_seconds_bucket{") && line.contains("/v1/dm"), "{line}");
    Ok(())
}

/// Returns the span and its known ancestors.
fn ancestors<'a>(spans: &'a HashMap<String, Span>, from: &'a Span) -> Vec<&'a Span> {
    let mut chain = vec![from];
    while let Some(parent) = spans.values().find(|span| span.span_id == chain[chain.len() - 1].parent_span_id) {
        chain.push(parent);
    }
    chain
}
