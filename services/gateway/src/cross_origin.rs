//! Requests of pages of other origins. All are allowed: authorization depends on tokens, not on origins.
//!
//! The headers are constant, so each is inserted as it is. A layer of `tower-http` would be cloned for each request and
//! build them from lists.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, header},
    response::Response,
};

const METHODS: &str = "GET,POST,PUT,PATCH,DELETE,HEAD";
/// Headers of answers that a page may read.
const EXPOSED: &str = concat!(
    "x-request-id,x-correlation-id,retry-after,idempotency-replayed,",
    "x-ratelimit-limit,x-ratelimit-remaining,x-ratelimit-reset",
);
const VARIES_WITH: &str = "origin, access-control-request-method, access-control-request-headers";
/// Time for which a browser remembers that a request is allowed.
const MAX_AGE_SECONDS: &str = "600";

/// Answers the request by which a browser asks whether it may send another one.
pub(crate) fn answer_preflight(request: &Request) -> Response {
    let mut response = Response::default();
    let headers = response.headers_mut();
    allow_origin(headers);
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_SECONDS));
    if let Some(requested) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, requested.clone());
    }
    response
}

/// Lets pages of any origin read an answer.
pub(crate) fn expose_answer(headers: &mut HeaderMap) {
    allow_origin(headers);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
}

fn allow_origin(headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.append(header::VARY, HeaderValue::from_static(VARIES_WITH));
}
