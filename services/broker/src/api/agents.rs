//! Agents as drivers are shown them, and their channels.

use axum::Json;
use chrono::{DateTime, SecondsFormat};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    error::ApiResult,
    extract::{Body, Path, Ready},
};
use crate::{
    agents::{AgentHandle, join_or_create},
    api::types::Event,
    clock,
    engine::{EngineError, Request},
};

/// `GET /api/spawned`
pub(super) async fn list(ready: Ready) -> Json<Value> {
    let agents: Vec<Value> = ready.services.agents.list().iter().map(entry).collect();
    Json(json!({ "success": true, "agents": agents }))
}

/// An agent in lists. Unset fields are null.
pub(super) fn entry(agent: &AgentHandle) -> Value {
    let (spec, info) = (&agent.spec, agent.info.borrow());
    let now_ms = clock::unix_ms();
    let last_activity = DateTime::from_timestamp_millis(info.last_activity_ms);
    json!({
        "name": spec.name,
        "runtime": spec.runtime(),
        "provider": spec.provider,
        "cli": spec.cli,
        "model": spec.model,
        "sessionId": spec.session_id,
        "team": spec.team,
        "channels": agent.channels(),
        "parent": spec.parent,
        // Drivers read both names. Without worker processes they are the same (ADR 0021).
        "pid": info.pid(),
        "workerPid": info.pid(),
        "last_activity_ms": now_ms - info.last_activity_ms,
        "last_activity_at": last_activity.map(|at| at.to_rfc3339_opts(SecondsFormat::Millis, true)),
        "context_budget_pct": info.context_left_percent,
        "current_state": info.state.as_str(),
        "delivery_mode": info.mode.as_str(),
        "pending": info.pending_count,
        "harness": agent.harness,
    })
}

#[derive(Debug, Deserialize)]
struct ChannelsBody {
    channels: Vec<String>,
}

/// `POST /api/spawned/{name}/subscribe`
pub(super) async fn subscribe(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    change_channels(&ready, &name, &body, "join").await
}

/// `POST /api/spawned/{name}/unsubscribe`
pub(super) async fn unsubscribe(ready: Ready, Path(name): Path<String>, body: Body) -> ApiResult<Json<Value>> {
    change_channels(&ready, &name, &body, "leave").await
}

async fn change_channels(ready: &Ready, name: &str, body: &Body, verb: &str) -> ApiResult<Json<Value>> {
    let body: ChannelsBody = body.parse()?;
    let (services, agent) = (&ready.services, ready.services.agents.get(name)?);
    let channels: Vec<String> =
        body.channels.iter().map(|channel| channel.trim_start_matches('#').to_owned()).collect();
    for channel in &channels {
        if verb == "join" {
            join_or_create(&services.engine, &agent.token, channel).await?;
        } else {
            let path = ["channels", channel.as_str(), verb];
            services.engine.call(Request::post(&path, &agent.token, json!({}))).await?;
        }
    }
    let event =
        if verb == "join" { Event::ChannelSubscribed { channels } } else { Event::ChannelUnsubscribed { channels } };
    services.hub.publish(name, &event);
    let channels = joined_channels(ready, &agent).await?;
    agent.set_channels(channels.clone());
    let (roster, written, changed) = (services.roster.clone(), name.to_owned(), channels.clone());
    let written = tokio::task::spawn_blocking(move || roster.set_channels(&written, changed)).await;
    if let Ok(Err(error)) = written {
        tracing::warn!(
            error = format!("{error:#}"),
            "failed to store an agent's channels, a restart joins the earlier ones"
        );
    }
    Ok(Json(json!({ "name": name, "channels": channels })))
}

/// The agent's channels as the engine knows them.
async fn joined_channels(ready: &Ready, agent: &AgentHandle) -> Result<Vec<String>, EngineError> {
    let own = ready.services.engine.call(Request::get(&["agent"], &agent.token)).await?;
    let channels = own["channels"].as_array().cloned().unwrap_or_default();
    let name = |channel: &Value| channel["name"].as_str().or(channel.as_str()).map(str::to_owned);
    Ok(channels.iter().filter_map(name).collect())
}
