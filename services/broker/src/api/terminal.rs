//! Terminals: keys, size, screen.

use axum::{Json, http::StatusCode};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use relay_pty::{Injection, SnapshotFormat, TerminalSize};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::{
    error::{ApiError, ApiResult},
    extract::{Body, Path, Query, Ready},
};
use crate::agents::{AgentError, wait_written, write_error};

/// Default time for a change of the model to be typed.
const MODEL_TIMEOUT_MS: u64 = 10_000;

#[derive(Debug, Deserialize)]
struct InputBody {
    data: String,
}

/// `POST /api/input/{name}`: answers when the terminal has taken the keys.
pub(super) async fn input(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    let body: InputBody = body.parse()?;
    let agent = ready.services.agents.get(&name)?;
    let bytes_written = agent.type_keys(body.data.into()).await?;
    Ok(Json(json!({ "name": name, "bytes_written": bytes_written })))
}

#[derive(Debug, Deserialize)]
struct SizeBody {
    rows: u16,
    cols: u16,
}

/// `POST /api/resize/{name}`
pub(super) async fn resize(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    let body: SizeBody = body.parse()?;
    let size = TerminalSize::new(body.rows, body.cols).map_err(|error| ApiError::invalid(error.to_string()))?;
    let terminal = ready.services.agents.get(&name)?.terminal()?;
    terminal.resize(size).map_err(|_| AgentError::Disappeared)?;
    Ok(Json(json!({ "name": name, "rows": body.rows, "cols": body.cols, "applied": true })))
}

#[derive(Debug, Deserialize)]
pub(super) struct SnapshotQuery {
    #[serde(default)]
    format: String,
}

/// `GET /api/spawned/{name}/snapshot`
pub(super) async fn snapshot(
    ready: Ready,
    Path(name): Path<String>,
    Query(query): Query<SnapshotQuery>,
) -> ApiResult<Json<Value>> {
    let format = match query.format.as_str() {
        "" | "plain" | "text" => SnapshotFormat::Plain,
        "ansi" => SnapshotFormat::Ansi,
        _ => return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_format", "format is plain or ansi")),
    };
    let snapshot = ready.services.agents.get(&name)?.terminal()?.snapshot(format);
    let (word, screen) = match format {
        SnapshotFormat::Plain => ("plain", snapshot.contents),
        SnapshotFormat::Ansi => ("ansi", BASE64_STANDARD.encode(snapshot.contents)),
    };
    Ok(Json(json!({
        "format": word,
        "rows": snapshot.rows,
        "cols": snapshot.cols,
        "cursor": snapshot.cursor,
        "screen": screen,
    })))
}

#[derive(Debug, Deserialize)]
struct ModelBody {
    #[serde(default)]
    model: String,
    #[serde(default, alias = "timeoutMs")]
    timeout_ms: Option<u64>,
}

/// `POST /api/spawned/{name}/model`: types the command that changes the model.
pub(super) async fn set_model(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    let flagged = |error: ApiError| error.flagged_with("name", &name);
    let body: ModelBody = body.parse().map_err(flagged)?;
    // The name is typed: a control character in it would press a key.
    if body.model.trim().is_empty() || body.model.contains(char::is_control) {
        return Err(flagged(ApiError::invalid("model must be one line and not blank")));
    }
    let agent = ready.services.agents.get(&name).map_err(|error| flagged(error.into()))?;
    // 20 s at most, since the route itself is answered after 25 s.
    let limit = Duration::from_millis(body.timeout_ms.unwrap_or(MODEL_TIMEOUT_MS).min(MODEL_TIMEOUT_MS * 2));
    let typed = async {
        let injected = agent.terminal()?.inject(Injection::new(format!("/model {}", body.model)));
        wait_written(injected.map_err(write_error)?, Instant::now() + limit).await
    };
    typed.await.map_err(|error| flagged(error.into()))?;
    Ok(Json(json!({ "success": true, "name": name, "model": body.model })))
}
