//! Health and readiness for clients and load balancers.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use relay_wire::workspaces::health as wire;

use crate::{envelope::Reply, error::ApiError, state::AppState};

/// Returns 200 while the process runs.
///
/// Does not use the envelope of the other responses.
#[utoipa::path(
    get, path = "/health", tag = "service",
    responses((status = 200, body = wire::Health)),
)]
pub async fn health() -> Json<wire::Health> {
    let version = env!("CARGO_PKG_VERSION");
    Json(wire::Health { ok: true, version, build: wire::Build { name: env!("CARGO_PKG_NAME"), version } })
}

/// Returns whether this gateway accepts new work.
#[utoipa::path(
    get, path = "/ready", tag = "service",
    responses((status = 200, body = wire::Ready), (status = 503, description = "not_ready")),
)]
pub async fn ready(State(state): State<AppState>) -> Response {
    match state.unready_reason() {
        None => Reply::ok(wire::Ready { ready: true }).into_response(),
        Some(reason) => ApiError::not_ready(reason).into_response(),
    }
}
