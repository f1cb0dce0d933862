//! Telemetry as a collector gets it: one trace from a request to the ack, over all processes that it goes through;
//! metrics; what a request cost; the trace behind a slow bucket.

use std::collections::HashMap;
use std::net::SocketAddr;
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
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric::Data, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use relay_testkit::{client::Api, ports::Port, stack::Stack, wait};
use serde_json::json;
use tonic::{Request, Response, Status, transport::Server};

const SOON: Duration = Duration::from_secs(30);
/// Messages that are followed until one is followed all the way.
const TRACES: usize = 5;
const CALLER: &str = "b7ad6b7169203331";

/// What processes have sent.
#[derive(Clone, Default)]
struct Receiver {
    spans: Arc<Mutex<Vec<Span>>>,
    /// The newest export, by service and metric.
    metrics: Arc<Mutex<HashMap<(String, String), Metric>>>,
}

#[tonic::async_trait]
impl MetricsService for Receiver {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let mut known = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_metrics {
            let service = format!("{:?}", resource.resource.map(|resource| resource.attributes));
            let service = if service.contains("relay-gateway") { "gateway" } else { "worker" };
            for metric in resource.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
                known.insert((service.to_owned(), metric.name.clone()), metric);
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
        let resources = request.into_inner().resource_spans;
        let spans = resources.into_iter().flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans);
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Receiver {
    fn metric(&self, service: &str, name: &str) -> Option<Metric> {
        let known = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(service.to_owned(), name.to_owned())).cloned()
    }

    /// The spans of a trace, by name.
    fn traced(&self, trace: &str) -> HashMap<String, Span> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let own = spans.iter().filter(|span| hex(&span.trace_id) == trace);
        own.map(|span| (span.name.clone(), span.clone())).collect()
    }
}

/// The id of the nth trace.
fn trace(nth: u64) -> String {
    format!("0af7651916cd43dd8448eb211c8{nth:05x}")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_on_one_gateway_and_its_ack_on_another_are_one_trace() -> Result<()> {
    let receiver = Receiver::default();
    let port = Port::free()?;
    let address: SocketAddr = port.address().parse()?;
    let server = Server::builder()
        .add_service(TraceServiceServer::new(receiver.clone()))
        .add_service(MetricsServiceServer::new(receiver.clone()))
        .serve(address);
    let server = tokio::spawn(server);
    let stack = Stack::builder()
        .gateways(2)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}"))
        .env("OTEL_BSP_SCHEDULE_DELAY", "200")
        .env("OTEL_METRICS_EXPORTER", "otlp")
        .env("OTEL_METRIC_EXPORT_INTERVAL", "300")
        .env("RUST_LOG", "info,async_nats=warn,sqlx=warn,sqlx_core=warn,relay::requests=debug")
        .start()
        .await?;
    let (sending, receiving) = (stack.gateway(0), stack.gateway(1));
    let key = Api::create_workspace(sending.url(), "traced").await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    let mut socket = Api::new(receiving.url(), &bob.token).direct_socket().await?;
    // The first publish of a process sets things up.
    key.as_agent(&ada).dm("bob", "not followed").await?.success()?;
    socket.expect("deliver").await?;
    socket.ack("bob", 1).await?;

    // A frame that the log was too slow for was read from Postgres, and hangs on the commit: then another one is followed.
    let mut followed = Err(anyhow::anyhow!("nothing was followed"));
    for seq in 2..2 + TRACES as u64 {
        let trace = trace(seq);
        let posted = reqwest::Client::new()
            .post(format!("{}/v1/dm", sending.url()))
            .bearer_auth(&ada.token)
            .header("traceparent", format!("00-{trace}-{CALLER}-01"))
            .json(&json!({ "to": "bob", "text": "follow me" }))
            .send()
            .await?;
        ensure!(posted.status().is_success(), "{posted:?}");
        socket.expect("deliver").await?;
        socket.ack("bob", seq).await?;
        followed = whole_trace(&receiver, &trace).await.map(|spans| (trace, spans));
        if followed.is_ok() {
            break;
        }
    }
    let (trace, spans) = followed?;
    for span in spans.values() {
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{} ends before it begins", span.name);
    }
    metrics_arrive(&receiver).await?;
    leads_from_the_bucket_to_the_trace(sending.metrics_url(), &trace).await?;
    // What the post cost: it was authenticated, resolved and committed.
    let line = wait::until_ok("the request's line in the log", SOON, || async {
        let log = std::fs::read_to_string(sending.log())?;
        let line = log.lines().find(|line| line.contains("relay::requests") && line.contains("\"/v1/dm\""));
        anyhow::Ok(serde_json::from_str::<serde_json::Value>(line.context("no line yet")?)?)
    })
    .await?;
    assert!(line["db.queries"].as_u64() >= Some(2), "{line}");
    assert!(line["db.ms"].as_f64() > Some(0.0) && line["elapsed_ms"].as_f64() >= line["db.ms"].as_f64(), "{line}");
    assert_eq!((&line["http.status"], &line["http.route"]), (&json!(201), &json!("/v1/dm")));
    server.abort();
    Ok(())
}

/// The spans of a message from the request to the ack, once all are there. They are one tree: from what the caller said,
/// down to the ack.
async fn whole_trace(receiver: &Receiver, trace: &str) -> Result<HashMap<String, Span>> {
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

/// Counters, gauges and histograms of both services.
async fn metrics_arrive(receiver: &Receiver) -> Result<()> {
    wait::until_ok("metrics of gateway and worker", SOON, || async {
        let accepted = receiver.metric("gateway", "relay_messages_accepted_total").context("no counter yet")?;
        let Some(Data::Sum(sum)) = accepted.data else { anyhow::bail!("{:?}", accepted.data) };
        ensure!(sum.is_monotonic && sum.data_points.len() == 1, "{sum:?}");
        ensure!(matches!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(count)) if count >= 1.0));
        let requests = receiver.metric("gateway", "relay_http_seconds").context("no histogram yet")?;
        let Some(Data::Histogram(histogram)) = requests.data else { anyhow::bail!("{:?}", requests.data) };
        let point = histogram.data_points.first().context("a point")?;
        ensure!(point.bucket_counts.iter().sum::<u64>() == point.count && point.count > 0, "{point:?}");
        ensure!(point.bucket_counts.len() == point.explicit_bounds.len() + 1, "{point:?}");
        let lag = receiver.metric("worker", "relay_outbox_lag_seconds").context("no gauge yet")?;
        ensure!(matches!(lag.data, Some(Data::Gauge(_))), "{lag:?}");
        anyhow::Ok(())
    })
    .await
}

/// Whoever asks for OpenMetrics gets exemplars.
async fn leads_from_the_bucket_to_the_trace(url: &str, trace: &str) -> Result<()> {
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

/// The span and those above it, as far as they are known.
fn ancestors<'a>(spans: &'a HashMap<String, Span>, from: &'a Span) -> Vec<&'a Span> {
    let mut chain = vec![from];
    while let Some(parent) = spans.values().find(|span| span.span_id == chain[chain.len() - 1].parent_span_id) {
        chain.push(parent);
    }
    chain
}
