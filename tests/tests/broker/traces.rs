//! The trace of a message on its node, at a collector.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
    trace_service_server::{TraceService, TraceServiceServer},
};
use opentelemetry_proto::tonic::common::v1::any_value;
use opentelemetry_proto::tonic::trace::v1::Span;
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::{ports::Port, shared, wait};
use serde_json::json;
use tonic::{Request, Response, Status, transport::Server};

use crate::scene::SOON;

/// Spans that were exported.
#[derive(Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let scopes = request.into_inner().resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.extend(scopes.flat_map(|scope| scope.spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    fn find(&self, is_wanted: impl Fn(&Span) -> bool) -> Option<Span> {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.iter().find(|span| is_wanted(span)).cloned()
    }
}

/// Text of an attribute of a span.
fn text(span: &Span, key: &str) -> Option<String> {
    let attribute = span.attributes.iter().find(|attribute| attribute.key == key)?;
    let any_value::Value::StringValue(text) = attribute.value.clone()?.value? else { return None };
    Some(text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_has_a_trace_from_its_frame_to_its_ack() -> Result<()> {
    let (collector, port) = (Collector::default(), Port::free()?);
    let server = Server::builder().add_service(TraceServiceServer::new(collector.clone()));
    let server = tokio::spawn(server.serve(port.address().parse()?));
    let engine = shared().await.any_gateway();
    let workspace = Api::create_workspace(engine, "node-traces").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let folder = tempfile::tempdir()?;
    let mut spec = BrokerSpec::new(engine, workspace.token(), "traced", folder.path())?;
    let endpoint = format!("http://{}", port.address());
    spec.env = [("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "200")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    let broker = NodeBroker::start(&spec).await?;
    let agent = FakeAgent::new("cooked", folder.path().join("agent.log"), &[]);
    broker.spawn(&agent, "agent", json!({})).await?;
    let posted = sender.dm("agent", "follow me").await?.success()?;
    let id = posted["message"]["id"].as_str().context("an id")?;

    let delivery = wait::until_ok("the delivery's span", SOON, || async {
        let is_wanted = |span: &Span| span.name == "node.delivery" && text(span, "message.id").as_deref() == Some(id);
        collector.find(is_wanted).context("not exported")
    })
    .await
    .with_context(|| broker.log_tail(20))?;
    assert_eq!(text(&delivery, "delivery.level").as_deref(), Some("L1"), "{delivery:?}");
    assert_eq!(text(&delivery, "delivery.method").as_deref(), Some("echo"), "{delivery:?}");
    let injection = wait::until_ok("the injection's span", SOON, || async {
        let is_wanted = |span: &Span| span.name == "node.injection" && span.parent_span_id == delivery.span_id;
        collector.find(is_wanted).context("not exported")
    })
    .await?;
    let (from, to) = (delivery.start_time_unix_nano, delivery.end_time_unix_nano);
    ensure!((from..=to).contains(&injection.start_time_unix_nano), "typed outside of the delivery");
    server.abort();
    Ok(())
}
