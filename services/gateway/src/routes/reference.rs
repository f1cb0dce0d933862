//! API reference: the OpenAPI document, and a page that renders it.

use axum::{
    http::{HeaderName, header},
    response::{Html, IntoResponse},
};

use crate::openapi as document;

/// The page runs its own script and fetches the document from this gateway; it reaches nothing else.
const REFERENCE_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns this document.
#[utoipa::path(get, path = "/openapi.json", tag = "service", responses((status = 200, body = Object)))]
pub async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-cache")], document::document_text())
}

/// Shows this document as an HTML page.
#[utoipa::path(
    get, path = "/docs", tag = "service",
    responses((status = 200, body = String, content_type = "text/html; charset=utf-8")),
)]
pub async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 2] =
        [(header::CONTENT_SECURITY_POLICY, REFERENCE_SECURITY_POLICY), (header::CACHE_CONTROL, "no-cache")];
    (headers, Html(include_str!("reference.html")))
}
