//! W3C trace context as the `traceparent` text in headers, rows and the log, and spans that continue it.

use http::{HeaderMap, HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, TextMapPropagator as _},
    trace::TraceContextExt as _,
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Returns the `traceparent` of the current span; `None` when it is not sampled or no exporter is installed.
#[must_use]
pub fn current_traceparent() -> Option<String> {
    traceparent_of(&Span::current())
}

/// Returns the `traceparent` of a span; `None` when it is not sampled or no exporter is installed.
#[must_use]
pub fn traceparent_of(span: &Span) -> Option<String> {
    let context = span.context();
    let span = context.span();
    let ids = span.span_context();
    (ids.is_valid() && ids.is_sampled()).then(|| format!("00-{}-{}-01", ids.trace_id(), ids.span_id()))
}

/// Returns the trace id of a span; `None` when it is not sampled or no exporter is installed.
#[must_use]
pub fn trace_id_of(span: &Span) -> Option<String> {
    let context = span.context();
    let span = context.span();
    let ids = span.span_context();
    (ids.is_valid() && ids.is_sampled()).then(|| ids.trace_id().to_string())
}

/// Makes `span` a child of the span in `traceparent`. Invalid text is ignored, since it comes from outside. Call before
/// the span is entered.
pub fn set_parent(span: &Span, traceparent: &str) {
    if let Some(parent) = remote_context(traceparent) {
        // Fails only without an exporter or after the span has started: then there is nothing to link.
        let _ = span.set_parent(parent);
    }
}

/// Creates a span with `make` as a child of `traceparent`. Without a valid `traceparent`, `make` is not called.
pub fn child_span(traceparent: Option<&str>, make: impl FnOnce() -> Span) -> Option<Span> {
    let parent = remote_context(traceparent?)?;
    let span = make();
    // Fails only without an exporter or after the span has started: then there is nothing to link.
    let _ = span.set_parent(parent);
    Some(span)
}

/// Inserts `traceparent` into the headers of an outgoing call: that of `span`, or `parent` where no exporter is
/// installed.
pub fn insert_traceparent(headers: &mut HeaderMap, span: Option<&Span>, parent: Option<&str>) {
    let own = span.and_then(traceparent_of);
    // `parent` may have been stored as any text. A call is made without it instead of failing.
    if let Some(Ok(value)) = own.as_deref().or(parent).map(HeaderValue::from_str) {
        headers.insert("traceparent", value);
    }
}

/// Reads the remote span of a `traceparent`; `None` for invalid text.
fn remote_context(traceparent: &str) -> Option<Context> {
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Carrier(traceparent));
    context.span().span_context().is_valid().then_some(context)
}

/// Headers of which only `traceparent` is set.
struct Carrier<'a>(&'a str);

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == "traceparent").then_some(self.0)
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent"]
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn traceparent_round_trips_and_invalid_text_is_ignored() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let sampled = |text: &str| remote_context(text).map(|context| context.span().span_context().is_sampled());
        assert_eq!(sampled(text), Some(true));
        let quiet = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        assert_eq!(sampled(quiet), Some(false), "the caller decides about tracing");
        for invalid in [
            "",
            "00",
            "00-x-y-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "not a traceparent",
        ] {
            assert!(remote_context(invalid).is_none(), "{invalid}");
            set_parent(&tracing::info_span!("x"), invalid);
        }
        assert!(child_span(None, || unreachable!("there is no parent")).is_none());
        assert_eq!(current_traceparent(), None, "no exporter is installed");
        let mut headers = HeaderMap::new();
        insert_traceparent(&mut headers, None, None);
        assert!(headers.is_empty());
        let unexported = child_span(Some(text), || tracing::info_span!("x"));
        insert_traceparent(&mut headers, unexported.as_ref(), Some(text));
        assert_eq!(headers["traceparent"], text, "the trace continues without an exporter");
    }

    #[test]
    fn traces_continue_across_a_header() {
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let sent = tracing::info_span!("sent").in_scope(current_traceparent).expect("a span is current");
            let child = child_span(Some(&sent), || tracing::info_span!("child"));
            let mut headers = HeaderMap::new();
            insert_traceparent(&mut headers, child.as_ref(), Some(&sent));
            let inserted = headers["traceparent"].to_str().expect("text").to_owned();
            assert!(
                inserted != sent && inserted.split('-').nth(1) == sent.split('-').nth(1),
                "{inserted} is a child of {sent}"
            );
            let received = tracing::info_span!("received");
            set_parent(&received, &sent);
            assert_eq!(trace_id_of(&received).as_deref(), sent.split('-').nth(1));
        });
    }
}
