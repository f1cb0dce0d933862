//! What happens to every request: its id, its span, its time limit, panics, cross-origin headers.

use std::{
    any::Any,
    panic::resume_unwind,
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header, uri::PathAndQuery},
    middleware::Next,
    response::{IntoResponse, Response},
};
use relay_domain::metric_names as name;
use relay_engine::recovery::Standing;
use relay_runtime::{
    cost::{self, Cost},
    metrics,
};
use tower_http::cors::{AllowHeaders, Any as AnyOrigin, CorsLayer};
use tracing::Instrument as _;

use crate::{
    envelope::IDEMPOTENCY_REPLAYED,
    error::{ApiError, HangUp},
    routes::{deliveries::CLAIM_PATH, files::TRANSFER_PATH},
    state::AppState,
};

/// A request without an answer for this long is given up.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// A request that takes this long is worth a line in the log.
const SLOW: Duration = Duration::from_secs(1);
/// The bytes of a file may take longer; what stops coming is noticed by whoever takes them.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3660);
/// A claim may wait for 30 s before it does anything.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(60);
/// Longer request ids are replaced.
const MAX_REQUEST_ID_LENGTH: usize = 128;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");

/// Everything that must see a request first: id, span, time limit.
///
/// The query string is neither logged nor put into the span, because sockets carry tokens in it.
pub async fn around(request: Request, next: Next) -> Response {
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
        relay_engine::trace::set_parent(&span, parent);
    }
    let limit = match &*path {
        TRANSFER_PATH => TRANSFER_TIMEOUT,
        CLAIM_PATH => CLAIM_TIMEOUT,
        _ => REQUEST_TIMEOUT,
    };
    let started_at = Instant::now();
    let inner = async {
        if has_nul {
            return ApiError::invalid_request("The character U+0000 cannot be looked for").into_response();
        }
        match tokio::time::timeout(limit, next.run(request)).await {
            Ok(response) => response,
            Err(_) => timed_out(&method),
        }
    };
    let (mut response, cost) = cost::measured(inner.instrument(span.clone())).await;
    let (status, elapsed) = (response.status(), started_at.elapsed());
    span.record("http.status", status.as_u16());
    span.in_scope(|| tell(&route, status, elapsed, cost));
    if let Some(trace) = relay_engine::trace::id_of(&span) {
        metrics::note_exemplar(&route, elapsed.as_secs_f64(), trace);
    }
    count(&method, route, status, elapsed);
    response.headers_mut().insert(CORRELATION_ID, id.clone());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Refuses whatever needs the database while it is not known to be the one that it was: numbers would be given away
/// twice.
pub async fn only_when_recovered(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if let (Standing::Closed(reason), true) = (state.engine.standing(), request.uri().path().starts_with("/v1/")) {
        return ApiError::unavailable("not_ready", format!("Not ready: {reason}")).into_response();
    }
    next.run(request).await
}

/// The line of a request in the log. Those that failed or took long are told always, the others on demand:
/// `RUST_LOG=info,relay::requests=debug`.
fn tell(route: &str, status: StatusCode, elapsed: Duration, cost: Cost) {
    let (status, elapsed_ms) = (status.as_u16(), elapsed.as_secs_f64() * 1000.0);
    let (queries, db_ms) = (cost.statements, cost.seconds * 1000.0);
    if status >= 500 || elapsed >= SLOW {
        tracing::event!(target: "relay::requests", tracing::Level::INFO, { http.route = route, http.status = status, elapsed_ms, db.queries = queries, db.ms = db_ms }, "answered");
    } else {
        tracing::event!(target: "relay::requests", tracing::Level::DEBUG, { http.route = route, http.status = status, elapsed_ms, db.queries = queries, db.ms = db_ms }, "answered");
    }
}

/// The route template is a label, never the path: it has few values.
fn count(method: &Method, route: String, status: StatusCode, elapsed: Duration) {
    // Methods are the client's choice of text.
    let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD];
    let method = known.iter().find(|known| *known == method).map_or("other", Method::as_str).to_owned();
    let status = status.as_str().to_owned();
    ::metrics::histogram!(name::HTTP_SECONDS, "route" => route.clone()).record(elapsed.as_secs_f64());
    ::metrics::counter!(name::HTTP_REQUESTS, "method" => method, "route" => route, "status" => status).increment(1);
}

/// Reading again is safe; a change may have been committed, so its client must not be told to repeat it.
fn timed_out(method: &Method) -> Response {
    if method.is_safe() {
        ApiError::unavailable("request_timeout", "The request took too long").into_response()
    } else {
        tracing::error!("a change took too long: connection closed without a status");
        ApiError::hang_up().into_response()
    }
}

/// The client's id for the request, or a fresh one.
fn request_id(request: &Request) -> HeaderValue {
    let given = request.headers().get(REQUEST_ID).or_else(|| request.headers().get(CORRELATION_ID));
    let fits = |value: &&HeaderValue| {
        (1..=MAX_REQUEST_ID_LENGTH).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    match given.filter(fits) {
        Some(value) => value.clone(),
        None => HeaderValue::from_str(&uuid::Uuid::new_v4().simple().to_string())
            .unwrap_or(HeaderValue::from_static("unknown")),
    }
}

/// A panic in a handler costs that request only.
pub fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("unknown"), "a handler panicked");
    ApiError::internal().into_response()
}

/// Open to every origin: tokens, not origins, are what is trusted.
pub fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AnyOrigin)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([
            REQUEST_ID,
            CORRELATION_ID,
            header::RETRY_AFTER,
            IDEMPOTENCY_REPLAYED,
            HeaderName::from_static("x-ratelimit-limit"),
            HeaderName::from_static("x-ratelimit-remaining"),
            HeaderName::from_static("x-ratelimit-reset"),
        ])
        .max_age(Duration::from_secs(600))
}

/// Some clients join a base that ends in `/` with paths that start with one: `//v1/…` means `/v1/…`.
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

/// Closes the connection instead of sending a response marked [`HangUp`]. Must be outside of everything
/// that catches panics: unwinding ends the connection's task, and with it the connection.
pub fn hang_up_if_marked(response: Response) -> Response {
    if response.extensions().get::<HangUp>().is_some() {
        resume_unwind(Box::new(HangUp));
    }
    response
}

/// What axum answers by itself without the envelope gets it here.
pub async fn fallback() -> ApiError {
    ApiError::route_not_found()
}

/// A path that exists, with another method.
pub async fn method_fallback() -> ApiError {
    ApiError::method_not_allowed()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

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
        assert_eq!(timed_out(&Method::GET).status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(timed_out(&Method::POST).extensions().get::<HangUp>().is_some());
    }
}
