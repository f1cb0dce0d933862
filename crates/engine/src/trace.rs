//! W3C trace context of the span that is open now, for the outbox and the log.

use opentelemetry::trace::TraceContextExt as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// `traceparent` of the current span; `None` when it is not sampled or nothing exports traces.
pub(crate) fn current() -> Option<String> {
    let context = tracing::Span::current().context();
    let span = context.span();
    let ids = span.span_context();
    (ids.is_valid() && ids.is_sampled()).then(|| format!("00-{}-{}-01", ids.trace_id(), ids.span_id()))
}
