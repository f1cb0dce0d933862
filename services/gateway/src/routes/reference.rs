//! The reference: the OpenAPI document, and a page that shows it.

use axum::{
    http::{HeaderName, header},
    response::{Html, IntoResponse},
};

use crate::openapi as document;

/// The page runs its own script and asks this gateway for the document; it reaches nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "service", responses((status = 200, body = Object)))]
pub async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-cache")], document::text())
}

/// This document for people.
#[utoipa::path(
    get, path = "/docs", tag = "service",
    responses((status = 200, body = String, content_type = "text/html; charset=utf-8")),
)]
pub async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 2] =
        [(header::CONTENT_SECURITY_POLICY, POLICY), (header::CACHE_CONTROL, "no-cache")];
    (headers, Html(include_str!("reference.html")))
}
