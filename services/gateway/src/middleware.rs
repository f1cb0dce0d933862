//! Middleware of every request: its id, span, timeout, panics, metrics and cross-origin headers. Applied by `router`
//! and `main`.

use std::{any::Any, panic::AssertUnwindSafe, time::Duration};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, uri::PathAndQuery},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures::FutureExt as _;
use relay_domain::metric_names as name;
use relay_engine::recovery::Readiness;
use relay_runtime::{
    cost::{self, Cost},
    metrics,
};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::{
    connections::admit_request,
    cross_origin,
    error::ApiError,
    rate_limits::ReportedStatus,
    routes::{files::TRANSFER_PATH, mailboxes::deliveries::CLAIM_PATH},
    state::AppState,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Slower requests are logged at info level.
const SLOW_REQUEST: Duration = Duration::from_secs(1);
/// Timeout of a file transfer. A stalled transfer is detected by its reader or writer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3660);
/// Timeout of a claim, which may wait for 30 s before it starts.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum length of a client's request id; longer ones are replaced.
const MAX_REQUEST_ID_LENGTH: usize = 128;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");

/// Middleware of all routes. It is one layer: axum clones and boxes the layers below each layer for every request.
pub async fn serve_request(State(state): State<AppState>, request: Request, next: Next) -> Response {
    // Before all limits: browsers send no token with it, and without an answer they do not send the request itself.
    if request.method() == Method::OPTIONS {
        return cross_origin::answer_preflight(&request);
    }
    let mut response = wrap_request(request, |request| answer_request(state, request, next)).await;
    cross_origin::expose_answer(response.headers_mut());
    response
}

/// Answers a request that has its span and timeout.
async fn answer_request(state: AppState, mut request: Request, next: Next) -> Response {
    let permits = match admit_request(&state, &mut request) {
        Ok(permits) => permits,
        Err(refusal) => return refusal.into_response(),
    };
    if let Err(refusal) = require_recovered(&state, &request) {
        return permits.hold_until_sent(refusal.into_response());
    }
    let reported = ReportedStatus::attach(&mut request);
    // Converts a panic in a handler to a 500 of that request.
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let response = answered.map_or_else(panic_response, |response| reported.add_headers(response));
    permits.hold_until_sent(response)
}

/// Sets the request id, the span and the timeout, and records log and metrics.
///
/// The query string is neither logged nor added to the span, because sockets carry tokens in it.
async fn wrap_request<F>(request: Request, serve: impl FnOnce(Request) -> F) -> Response
where
    F: Future<Output = Response>,
{
    let id = request_id(&request);
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route =
        request.extensions().get::<MatchedPath>().map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let has_nul = path.contains("%00") || request.uri().query().is_some_and(|query| query.contains("%00"));
    let span = tracing::info_span!(
        "http.request", http.method = %method, http.path = %path, http.request_id = ?id, http.status = tracing::field::Empty
    );
    if let Some(parent) = request.headers().get("traceparent").and_then(|value| value.to_str().ok()) {
        relay_trace::set_parent(&span, parent);
    }
    let limit = match &*path {
        TRANSFER_PATH => TRANSFER_TIMEOUT,
        CLAIM_PATH => CLAIM_TIMEOUT,
        _ => REQUEST_TIMEOUT,
    };
    let started_at = Instant::now();
    let inner = async {
        // Postgres has no U+0000 in texts and refuses a parameter with one.
        if has_nul {
            return ApiError::invalid_request("The character U+0000 cannot be looked for").into_response();
        }
        match tokio::time::timeout(limit, serve(request)).await {
            Ok(response) => response,
            Err(_) => timeout_response(&method),
        }
    };
    // Boxed, because a future that takes another one as its argument holds it twice.
    let inner = Box::pin(inner.instrument(span.clone()));
    let (mut response, cost) = cost::measure_cost(inner).await;
    let (status, elapsed) = (response.status(), started_at.elapsed());
    span.in_scope(|| log_request(&route, status, elapsed, cost));
    if let Some(trace) = relay_trace::trace_id_of(&span) {
        // Only for the trace. The log parses and writes the fields of a span again for each one that is recorded.
        span.record("http.status", status.as_u16());
        metrics::record_exemplar(&route, elapsed.as_secs_f64(), trace);
    }
    record_metrics(&method, route, status, elapsed);
    response.headers_mut().insert(CORRELATION_ID, id.clone());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Refuses requests that need the database until it is known to be current. A restored database would assign numbers
/// twice.
fn require_recovered(state: &AppState, request: &Request) -> Result<(), ApiError> {
    match state.engine.recovery().readiness() {
        Readiness::Closed(reason) if request.uri().path().starts_with("/v1/") => Err(ApiError::not_ready(reason)),
        Readiness::Closed(_) | Readiness::Open(_) => Ok(()),
    }
}

/// Logs a request: failed and slow ones always, the others on demand with `RUST_LOG=info,relay::requests=debug`.
fn log_request(route: &str, status: StatusCode, elapsed: Duration, cost: Cost) {
    let (status, elapsed_ms) = (status.as_u16(), elapsed.as_secs_f64() * 1000.0);
    let (queries, db_ms) = (cost.statements, cost.seconds * 1000.0);
    if status >= 500 || elapsed >= SLOW_REQUEST {
        tracing::event!(target: "relay::requests", tracing::Level::INFO, { http.route = route, http.status = status, elapsed_ms, db.queries = queries, db.ms = db_ms }, "answered");
    } else {
        tracing::event!(target: "relay::requests", tracing::Level::DEBUG, { http.route = route, http.status = status, elapsed_ms, db.queries = queries, db.ms = db_ms }, "answered");
    }
}

/// Records the metrics of a request. The label is the route template, not the path, which has too many values.
fn record_metrics(method: &Method, route: String, status: StatusCode, elapsed: Duration) {
    // Clients may send any text as the method.
    let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD];
    let method = known.iter().find(|known| *known == method).map_or("other", Method::as_str).to_owned();
    let status = status.as_str().to_owned();
    ::metrics::histogram!(name::HTTP_SECONDS, "route" => route.clone()).record(elapsed.as_secs_f64());
    ::metrics::counter!(name::HTTP_REQUESTS, "method" => method, "route" => route, "status" => status).increment(1);
}

/// Reads can be repeated. A change may have been committed, so its client must not be asked to repeat it.
fn timeout_response(method: &Method) -> Response {
    if method.is_safe() {
        ApiError::request_timeout().into_response()
    } else {
        tracing::error!("write request timed out, closing the connection without a status");
        ApiError::drop_connection().into_response()
    }
}

/// Returns the client's request id, or a new one.
fn request_id(request: &Request) -> HeaderValue {
    let given = request.headers().get(REQUEST_ID).or_else(|| request.headers().get(CORRELATION_ID));
    let fits = |value: &&HeaderValue| {
        (1..=MAX_REQUEST_ID_LENGTH).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    given.filter(fits).cloned().unwrap_or_else(new_request_id)
}

/// Ids of requests are no secrets, so they need no random bytes of the kernel.
fn new_request_id() -> HeaderValue {
    let id = uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
    HeaderValue::try_from(id.simple().to_string()).unwrap_or(HeaderValue::from_static("unknown"))
}

fn panic_response(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    relay_tasks::count_panic("request");
    tracing::error!(panic = text.unwrap_or("unknown"), "handler panicked");
    ApiError::internal().into_response()
}

/// Collapses leading slashes. Some clients join a base that ends in `/` with paths that start with one, and send
/// `//v1/…`.
pub fn collapse_leading_slashes(mut request: Request) -> Request {
    let path_and_query = request.uri().path_and_query().map_or("", PathAndQuery::as_str);
    if path_and_query.starts_with("//") {
        let collapsed = format!("/{}", path_and_query.trim_start_matches('/'));
        let mut parts = request.uri().clone().into_parts();
        if let Ok(path_and_query) = PathAndQuery::try_from(collapsed) {
            parts.path_and_query = Some(path_and_query);
            if let Ok(uri) = Uri::from_parts(parts) {
                *request.uri_mut() = uri;
            }
        }
    }
    request
}

/// Puts axum's own 404 into the envelope.
pub async fn fallback() -> ApiError {
    ApiError::route_not_found()
}

/// Puts axum's own 405 into the envelope.
pub async fn method_fallback() -> ApiError {
    ApiError::method_not_allowed()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;
    use crate::error::DropConnection;

    #[test]
    fn leading_slashes_collapse() {
        for (uri, expected) in
            [("//v1/agents?a=b", "/v1/agents?a=b"), ("///v1//x", "/v1//x"), ("/v1/agents", "/v1/agents"), ("/", "/")]
        {
            let request = Request::builder().uri(uri).body(Body::empty()).unwrap();
            assert_eq!(collapse_leading_slashes(request).uri().to_string(), expected);
        }
    }

    #[test]
    fn request_ids_are_echoed_when_harmless() {
        let id = |value: &str| {
            let request = Request::builder().header("X-Correlation-Id", value).body(Body::empty()).unwrap();
            request_id(&request)
        };
        assert_eq!(id("abc-1"), "abc-1");
        assert_ne!(id("a b"), "a b");
        assert_eq!(id(&"x".repeat(200)).len(), 32);
    }

    #[test]
    fn a_timed_out_change_gets_no_status() {
        assert_eq!(timeout_response(&Method::GET).status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(timeout_response(&Method::POST).extensions().get::<DropConnection>().is_some());
    }
}
