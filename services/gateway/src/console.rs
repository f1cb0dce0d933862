//! `GET /console`: a page that shows one workspace to holders of an observer token.
//!
//! Static files, compiled into the gateway. The page uses the same routes as every other client and its policy allows
//! only its own files and this origin.

use axum::{
    Router,
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
    routing::get,
};

use crate::{error::ApiError, extract::Path, state::AppState};

/// No inline code, no other origin, no framing.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! file {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_str!(concat!("../console/", $name)))
    };
}

/// Name, media type and content of the files of the page.
const FILES: &[(&str, &str, &str)] = &[
    file!("console.css", "text/css; charset=utf-8"),
    file!("icon.svg", "image/svg+xml"),
    file!("api.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("channels.js", SCRIPT),
    file!("dom.js", SCRIPT),
    file!("feed.js", SCRIPT),
    file!("follower.js", SCRIPT),
    file!("tables.js", SCRIPT),
];

pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/console", get(console)).route("/console/{file}", get(console_file))
}

/// The console.
///
/// An HTML page: the holder of an observer token sees what the token allows of its workspace.
#[utoipa::path(
    get, path = "/console", tag = "service",
    responses((status = 200, body = String, content_type = "text/html; charset=utf-8")),
)]
pub(crate) async fn console() -> Response {
    asset_response(HTML, include_str!("../console/index.html"))
}

/// A file of the console.
#[utoipa::path(
    get, path = "/console/{file}", tag = "service",
    responses(
        (status = 200, content(
            (String = "text/javascript; charset=utf-8"), (String = "text/css; charset=utf-8"), (String = "image/svg+xml"),
        )),
        (status = 404, description = "not_found"),
    ),
)]
pub(crate) async fn console_file(Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|(file, ..)| *file == name);
    let (_, kind, content) = found.ok_or_else(ApiError::route_not_found)?;
    Ok(asset_response(kind, content))
}

fn asset_response(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // Files of different versions must not be mixed after an update.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    ];
    (headers, content).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_referenced_file_exists() {
        let page = include_str!("../console/index.html");
        for source in FILES.iter().map(|(.., content)| *content).chain([page]) {
            for part in source.split("\"/console/").skip(1) {
                let name = part.split('"').next().unwrap_or_default();
                assert!(FILES.iter().any(|(file, ..)| *file == name), "{name}");
            }
            for part in source.split("from './").skip(1) {
                let name = part.split('\'').next().unwrap_or_default();
                assert!(FILES.iter().any(|(file, ..)| *file == name), "{name}");
            }
        }
    }

    #[test]
    fn scripts_never_parse_markup_or_code() {
        for (name, _, source) in FILES {
            for forbidden in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"]
            {
                assert!(!source.contains(forbidden), "{name}: {forbidden}");
            }
        }
        let page = include_str!("../console/index.html");
        assert!(!page.contains(" style=") && !page.contains(" onclick=") && page.matches("<script").count() == 1);
    }
}
