//! Status, figures and crashes.

use std::sync::atomic::Ordering;

use axum::{
    Json,
    http::header,
    response::{IntoResponse, Response},
};
use futures::future::join_all;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Duration, timeout};

use super::{
    agents::entry,
    error::ApiResult,
    extract::{Query, Ready},
    types::CrashInsights,
};
use crate::{
    agents::{AgentCommand, AgentError},
    clock,
};

/// Time after which an agent that does not answer is shown without pending deliveries.
const AGENT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default, Deserialize)]
pub(super) struct MetricsQuery {
    agent: Option<String>,
}

/// `GET /api/metrics`
pub(super) async fn metrics(ready: Ready, Query(query): Query<MetricsQuery>) -> ApiResult<Json<Value>> {
    let services = &ready.services;
    let agents = match &query.agent {
        Some(name) => vec![services.agents.get(name)?],
        None => services.agents.list(),
    };
    let usage = services.host.usage().await.map_err(|error| AgentError::State(error.to_string()))?;
    let shown = agents.iter().map(|agent| {
        let info = agent.info.borrow();
        // There is none between two programs, and for an agent without a terminal.
        let identity = info.terminal.as_ref().map(relay_pty::Terminal::identity);
        let memory = identity.and_then(|identity| usage.get(&identity)).map_or(0, |usage| usage.resident_bytes);
        let uptime_ms = clock::unix_ms() - info.started_ms;
        json!({ "name": agent.spec.name, "pid": info.pid(), "memory_bytes": memory, "uptime_secs": uptime_ms / 1000 })
    });
    Ok(Json(json!({
        "agents": shown.collect::<Vec<_>>(),
        "broker": {
            "uptime_secs": clock::uptime().as_secs(),
            "total_agents_spawned": services.counters.spawned.load(Ordering::Relaxed),
            "total_crashes": services.crashes.total(),
            "total_restarts": services.counters.restarts.load(Ordering::Relaxed),
            "active_agents": services.agents.list().len(),
        },
    })))
}

/// `GET /api/status`
pub(super) async fn status(ready: Ready) -> Json<Value> {
    let services = &ready.services;
    let agents = services.agents.list();
    let now_ms = clock::unix_ms();
    let answers = join_all(agents.iter().map(|agent| async move {
        // An agent that is ending takes no commands and has nothing pending; its end must not delay the others.
        let answer = timeout(AGENT_TIMEOUT, agent.ask(|reply| AgentCommand::Undelivered { reply })).await;
        (&agent.spec.name, answer.ok().and_then(Result::ok).unwrap_or_default())
    }));
    let mut pending = Vec::new();
    for (name, undelivered) in answers.await {
        pending.extend(undelivered.into_iter().map(|message| {
            json!({
                "delivery_id": message.delivery_id,
                "worker_name": name,
                "event_id": message.event_id,
                "from": message.from,
                "to": message.target,
                "attempts": message.attempts,
                "queued_at_ms": message.queued_at_ms,
                "age_ms": now_ms - message.queued_at_ms,
            })
        }));
    }
    let workspaces = ready.members.identities().enumerate().map(|(index, identity)| {
        json!({
            "workspace_id": identity.workspace_id,
            "workspace_alias": identity.workspace_alias,
            "self_name": identity.agent_name,
            "self_agent_id": identity.agent_id,
            "authenticated": true,
            "default": index == 0,
        })
    });
    let workspaces = workspaces.collect::<Vec<_>>();
    Json(json!({
        "agent_count": agents.len(),
        "agents": agents.iter().map(entry).collect::<Vec<_>>(),
        "pending_delivery_count": pending.len(),
        "pending_deliveries": pending,
        "auth": {
            "authenticated": true,
            "workspace_count": workspaces.len(),
            "default_workspace_id": services.identity.workspace_id,
            "workspaces": workspaces,
        },
    }))
}

/// `GET /api/crash-insights`
pub(super) async fn crash_insights(ready: Ready) -> Json<CrashInsights> {
    Json(ready.services.crashes.insights(clock::unix_ms()))
}

/// `GET /api/verification`: figures of all agent programs, or of one running agent.
pub(super) async fn verification(ready: Ready, Query(query): Query<MetricsQuery>) -> ApiResult<Json<Value>> {
    let services = &ready.services;
    let Some(name) = &query.agent else {
        return Ok(Json(json!({ "programs": services.verification.report() })));
    };
    let agent = services.agents.get(name)?;
    let figures = services.verification.report_agent(name);
    Ok(Json(json!({ "name": name, "harness": agent.harness, "figures": figures })))
}

#[derive(Debug, Deserialize)]
pub(super) struct ResetQuery {
    harness: Option<String>,
}

/// `DELETE /api/verification`: forgets what was learned of one agent program, or of all.
pub(super) async fn reset_verification(ready: Ready, Query(query): Query<ResetQuery>) -> Json<Value> {
    Json(json!({ "success": true, "forgotten": ready.services.verification.reset(query.harness.as_deref()) }))
}

/// `GET /metrics`: Prometheus text.
pub(super) async fn prometheus(ready: Ready) -> Response {
    let text = ready.0.inner.metrics.render();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
