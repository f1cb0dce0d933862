//! Signs of life.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};

use crate::{error::ApiError, state::AppState};

/// `GET /health`: the process lives. Not in the data envelope.
pub async fn health() -> Json<Value> {
    let version = env!("CARGO_PKG_VERSION");
    Json(json!({ "ok": true, "version": version, "build": { "name": env!("CARGO_PKG_NAME"), "version": version } }))
}

/// `GET /ready`: new work may be sent here.
pub async fn ready(State(state): State<AppState>) -> Response {
    if state.is_ready() {
        (StatusCode::OK, Json(json!({ "ok": true, "data": { "ready": true } }))).into_response()
    } else {
        ApiError::unavailable("not_ready", "Not ready").into_response()
    }
}
