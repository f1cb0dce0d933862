//! Session events of agents.

use axum::extract::State;
use relay_domain::agents::session_event::SessionEvent;
use relay_engine::{Engine, agents::session_events::PAGE};
use relay_wire::agents::session_event as wire;

use crate::{
    caller::{Caller, ReaderOrAgent, reads},
    envelope::Reply,
    error::ApiError,
    extract::{KeyedBody, Path, Query},
    list_reply::ListReply,
    openapi::IdempotencyKey,
    routes::page,
};

/// Records an event of an agent's session.
///
/// An agent reports its own events; the workspace key reports events of every agent. `status.*` sets the agent's
/// status.
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
    let reported = engine.agents().report_session_event(&caller, &name, body, key.as_ref()).await?;
    Ok(Reply::created(to_session_event(reported.event)).replayed(reported.replayed))
}

/// Lists the events of an agent's session, newest first.
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
) -> Result<ListReply<wire::SessionEvent>, ApiError> {
    let limit = page::parse_strict_limit(query.limit.as_deref(), PAGE)?;
    let event_type = query.event_type.as_deref().filter(|event_type| !event_type.is_empty());
    let events = engine.agents().session_events(&caller, &name, event_type, limit).await?;
    ListReply::list(events.map(to_session_event))
}

fn to_session_event(event: SessionEvent) -> wire::SessionEvent {
    wire::SessionEvent {
        id: event.id,
        agent_id: event.agent_id,
        event_type: event.event_type,
        payload: event.payload,
        sequence: event.sequence,
        created_at: event.created_at.into(),
    }
}
