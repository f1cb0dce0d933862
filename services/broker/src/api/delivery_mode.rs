//! Modes of delivery and messages that wait.

use axum::{Json, http::StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    error::{ApiError, ApiResult},
    extract::{Body, Path, Ready},
};
use crate::{agents::AgentCommand, injection::DeliveryMode};

/// `GET /api/spawned/{name}/delivery-mode`
pub(super) async fn show(ready: Ready, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let mode = ready.services.agents.get(&name)?.info.borrow().mode;
    Ok(Json(json!({ "mode": mode.as_str() })))
}

#[derive(Debug, Deserialize)]
struct ModeBody {
    mode: String,
}

/// `PUT /api/spawned/{name}/delivery-mode`
pub(super) async fn set(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    let body: ModeBody = body.parse()?;
    let mode = [DeliveryMode::AutoInject, DeliveryMode::ManualFlush];
    let mode = mode.into_iter().find(|mode| mode.as_str() == body.mode);
    let unknown = || ApiError::new(StatusCode::BAD_REQUEST, "invalid_mode", "mode is auto_inject or manual_flush");
    let mode = mode.ok_or_else(unknown)?;
    let agent = ready.services.agents.get(&name)?;
    let drained = agent.ask(|reply| AgentCommand::SetMode { mode, reply }).await?;
    Ok(Json(json!({ "mode": drained.mode.as_str(), "flushed": drained.count })))
}

/// `GET /api/spawned/{name}/pending`
pub(super) async fn pending(ready: Ready, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let agent = ready.services.agents.get(&name)?;
    let pending = agent.ask(|reply| AgentCommand::Pending { reply }).await?;
    Ok(Json(json!({ "pending": pending })))
}

/// `POST /api/spawned/{name}/flush`
pub(super) async fn flush(ready: Ready, Path(name): Path<String>) -> ApiResult<Json<Value>> {
    let agent = ready.services.agents.get(&name)?;
    let flushed = agent.ask(|reply| AgentCommand::Flush { reply }).await?;
    Ok(Json(json!({ "flushed": flushed })))
}
