//! `POST /api/send`: messages through the engine, so that they have an order, a record and an ack like all others.

use axum::{Json, http::StatusCode};
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    UNKNOWN_WORKSPACE,
    error::{ApiError, ApiResult},
    extract::{Body, Ready},
};
use crate::{
    agents::AgentHandle,
    engine::{EngineError, Request},
};

/// Body of `POST /api/send`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct SendBody {
    to: String,
    message: Option<String>,
    text: Option<String>,
    body: Option<String>,
    content: Option<String>,
    from: Option<String>,
    #[serde(alias = "thread_id")]
    thread_id: Option<String>,
    #[serde(alias = "workspace_id")]
    workspace_id: Option<String>,
    #[serde(alias = "workspace_alias")]
    workspace_alias: Option<String>,
    mode: Option<String>,
    priority: Option<Value>,
    data: Option<Map<String, Value>>,
}

/// `POST /api/send`
pub(super) async fn send(ready: Ready, body: Body) -> ApiResult<Json<Value>> {
    let body: SendBody = body.parse().map_err(ApiError::flagged)?;
    let to = body.to.clone();
    post(&ready, body).await.map(Json).map_err(|error| error.flagged_with("to", &to))
}

/// Posts a message and returns the answer for drivers.
pub(super) async fn post(ready: &Ready, body: SendBody) -> ApiResult<Value> {
    let texts = [body.message, body.text, body.body, body.content];
    let text = texts.into_iter().flatten().find(|text| !text.trim().is_empty());
    let text = text.ok_or_else(|| ApiError::invalid("text must not be blank"))?;
    if body.to.trim().is_empty() {
        return Err(ApiError::invalid("to must not be blank"));
    }
    let mode = body.mode.unwrap_or_else(|| "wait".to_owned());
    if !matches!(mode.as_str(), "wait" | "steer") {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_mode", "mode is wait or steer"));
    }
    let author = body.from.as_deref().and_then(|from| ready.services.agents.get(from).ok());
    // An agent writes in its own workspace, unless another one is named: there it is no author.
    let own = author.as_ref().and_then(|author| author.spec.workspace.clone());
    let id = body.workspace_id.or_else(|| own.filter(|_| body.workspace_alias.is_none()));
    let member = ready.members.find(id.as_deref(), body.workspace_alias.as_deref());
    let services = member.ok_or_else(|| ApiError::invalid(UNKNOWN_WORKSPACE))?.services();
    let identity = &services.identity;
    let is_here = |author: &AgentHandle| author.spec.workspace.as_ref() == Some(&identity.workspace_id);
    let author = author.filter(is_here);
    let mut metadata = body.data.unwrap_or_default();
    if let Some(priority) = body.priority {
        metadata.insert("priority".to_owned(), priority);
    }
    // The broker's own agent posts for a sender outside of the workspace. Mailboxes of this broker show the name.
    if let (None, Some(from)) = (&author, &body.from) {
        metadata.insert("relay_from".to_owned(), json!(from));
    }
    let token = author.as_ref().map_or(identity.agent_token.as_str(), |author| author.token.as_str());
    let (path, to) = match (&body.thread_id, body.to.strip_prefix('#')) {
        (Some(thread), _) => (vec!["messages", thread.as_str(), "replies"], None),
        (None, Some(channel)) => (vec!["channels", channel, "messages"], None),
        (None, None) => (vec!["dm"], Some(body.to.strip_prefix('@').unwrap_or(&body.to))),
    };
    let mut message = json!({ "text": text, "mode": mode, "metadata": metadata });
    if let Some(to) = to {
        message["to"] = json!(to);
    }
    let request = Request {
        method: Method::POST,
        path: &path,
        token,
        body: Some(message),
        idempotency_key: Some(uuid::Uuid::new_v4().to_string()),
    };
    let posted = services.engine.call(request).await.map_err(|error| recipient_error(error, &body.to))?;
    let event_id = posted["message"]["id"].as_str().or(posted["id"].as_str()).unwrap_or_default();
    let is_local = to.is_some_and(|to| services.agents.get(to).is_ok_and(|agent| is_here(&agent)));
    Ok(json!({
        "success": true,
        "event_id": event_id,
        "local": is_local,
        // Published drivers read it. Always true: no message of this broker bypasses the engine.
        "relaycast_published": true,
        "workspace_id": identity.workspace_id,
        "workspace_alias": identity.workspace_alias,
    }))
}

fn recipient_error(error: EngineError, to: &str) -> ApiError {
    match error.refusal() {
        Some((404, _)) => {
            ApiError::new(StatusCode::NOT_FOUND, "agent_not_found", format!("\"{to}\" is not known to the engine"))
        }
        Some((400 | 422, _)) => ApiError::invalid(error.to_string()),
        Some(_) | None => error.into(),
    }
}
