//! What agents' sessions report.

use axum::extract::State;
use relay_domain::{AgentId, SessionEventId};
use relay_engine::{
    Engine,
    session_events::{PAGE, ReportEvent, SessionEventRow},
};
use relay_wire::session_event as wire;
use serde_json::Value;

use crate::{
    caller::{Caller, ReaderOrAgent, reads},
    envelope::Reply,
    error::ApiError,
    extract::{KeyedBody, Path, Query},
    openapi::IdempotencyKey,
    routes::page,
};

/// Records what happened in an agent's session.
///
/// An agent reports for itself; the workspace's key reports for every agent. `status.*` sets the agent's status.
#[utoipa::path(
    post, path = "/v1/agents/{name}/events", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey),
    request_body = wire::ReportBody,
    responses((status = 201, body = wire::SessionEvent), (status = 400, description = "invalid_event_type, invalid_idempotency_key"), (status = 403, description = "forbidden"), (status = 404, description = "agent_not_found"), (status = 409, description = "idempotency_key_reused")),
)]
#[tracing::instrument(level = "debug", name = "http.session_events.report", skip_all)]
pub async fn report(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    KeyedBody { body, key }: KeyedBody<wire::ReportBody>,
) -> Result<Reply<wire::SessionEvent>, ApiError> {
    let request = ReportEvent { event_type: body.event_type, payload: body.payload.map(Value::Object) };
    let reported = engine.report_session_event(&caller, &name, request, key.as_ref()).await?;
    Ok(Reply::created(wire::SessionEvent {
        id: reported.event_id,
        agent_id: reported.agent_id,
        event_type: reported.event_type,
        payload: reported.payload,
        sequence: reported.sequence,
        created_at: reported.created_at.into(),
    })
    .replayed(reported.replayed))
}

/// Lists what happened in an agent's session, newest first.
#[utoipa::path(
    get, path = "/v1/agents/{name}/events", operation_id = "list_events", tag = "agents",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::EventsQuery),
    responses((status = 403, description = "insufficient_scope"), (status = 200, body = Vec<wire::SessionEvent>), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.session_events.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::ACTIVITY }>,
    Path(name): Path<String>,
    Query(query): Query<wire::EventsQuery>,
) -> Result<Reply<Vec<wire::SessionEvent>>, ApiError> {
    let limit = page::limit(query.limit.as_deref(), PAGE)?;
    let event_type = query.event_type.as_deref().filter(|event_type| !event_type.is_empty());
    let rows = engine.session_events(&caller, &name, event_type, limit).await?;
    let event = |row: SessionEventRow| wire::SessionEvent {
        id: SessionEventId::new(row.event_id),
        agent_id: AgentId::new(row.agent_id),
        event_type: row.event_type,
        payload: row.payload,
        sequence: row.sequence,
        created_at: row.created_at.into(),
    };
    Ok(Reply::ok(rows.into_iter().map(event).collect()))
}
