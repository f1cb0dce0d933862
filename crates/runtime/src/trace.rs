//! W3C trace context as the one line of text that travels in headers and rows.

use std::collections::HashMap;

use opentelemetry::{
    global,
    propagation::{Extractor, Injector},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

const TRACEPARENT: &str = "traceparent";

/// The current span as a `traceparent`, or `None` when nobody traces.
#[must_use]
pub fn current_traceparent() -> Option<String> {
    let mut carrier = Headers(HashMap::new());
    let context = Span::current().context();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut carrier));
    carrier.0.remove(TRACEPARENT)
}

/// Makes `span` a child of the span that `traceparent` names. Text that is no `traceparent` is ignored,
/// since it comes from outside. Call before the span is entered.
pub fn set_parent(span: &Span, traceparent: &str) {
    let carrier = Headers(HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]));
    let context = global::get_text_map_propagator(|propagator| propagator.extract(&carrier));
    // Refused only when nobody traces, or the span has started already: then there is nothing to link.
    let _ = span.set_parent(context);
}

struct Headers(HashMap<String, String>);

impl Injector for Headers {
    fn set(&mut self, key: &str, value: String) {
        self.0.insert(key.to_owned(), value);
    }
}

impl Extractor for Headers {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
    use opentelemetry_sdk::{propagation::TraceContextPropagator, trace::SdkTracerProvider};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn a_trace_goes_on_across_a_header() {
        global::set_text_map_propagator(TraceContextPropagator::new());
        let provider = SdkTracerProvider::builder().build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let sent = tracing::info_span!("sent").in_scope(current_traceparent).expect("a span is current");
            let received = tracing::info_span!("received");
            set_parent(&received, &sent);
            let trace = received.context().span().span_context().trace_id().to_string();
            assert_eq!(sent.split('-').nth(1), Some(trace.as_str()));
        });
    }

    #[test]
    fn nonsense_from_outside_is_ignored_and_nobody_tracing_is_none() {
        set_parent(&tracing::info_span!("x"), "not a traceparent");
        assert_eq!(current_traceparent(), None);
    }
}
