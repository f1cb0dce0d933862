//! Access control of the API.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use subtle::ConstantTimeEq as _;
use tokio::time::timeout;

use super::{
    Api, ROUTE_TIMEOUT,
    error::{ApiError, unauthorized},
};

/// Routes with secrets of their own.
const OWN_SECRETS: [&str; 2] = ["/api/agent-result", "/api/delivery-ack"];

/// The broker's key, from either header.
pub(super) async fn require_key(State(api): State<Api>, request: Request, next: Next) -> Response {
    if OWN_SECRETS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    // An absent key is compared like a wrong one; the broker's own is never empty.
    let given = secret(request.headers(), "x-api-key").unwrap_or_default();
    if bool::from(given.as_bytes().ct_eq(api.inner.key.as_bytes())) { next.run(request).await } else { unauthorized() }
}

/// Value of a header, else the bearer token.
pub(super) fn secret<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let own = headers.get(name).and_then(|value| value.to_str().ok());
    own.or_else(|| {
        let authorization = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, token) = authorization.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    })
}

/// Published drivers repeat a call only if its error says `503` or the standard reason, so the body is no JSON.
pub(super) async fn require_ready(State(api): State<Api>, request: Request, next: Next) -> Response {
    if api.broker().is_some() {
        next.run(request).await
    } else {
        let body = "Service Unavailable: the broker is joining the engine\n";
        (StatusCode::SERVICE_UNAVAILABLE, [(header::CONTENT_TYPE, "text/plain")], body).into_response()
    }
}

/// No page of another origin may use the API, whatever it knows. Drivers send no origin.
pub(super) async fn refuse_browsers(State(api): State<Api>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN);
    if origin.is_some_and(|origin| origin.as_bytes() != api.inner.url.as_bytes()) {
        return ApiError::new(StatusCode::FORBIDDEN, "forbidden_origin", "requests of web pages are refused")
            .into_response();
    }
    next.run(request).await
}

/// No call takes longer than a client waits.
pub(super) async fn limit_time(request: Request, next: Next) -> Response {
    match timeout(ROUTE_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", "the request took too long").into_response(),
    }
}
