//! `GET /v1/workspace/events`: the event log in pages.

use axum::{extract::State, http::request::Parts};
use relay_engine::events::{LogEvent, MAX_EVENTS_PAGE};
use relay_wire::{
    events::{EventsPage, LoggedEvent},
    field::Timestamp,
};
use serde::Deserialize;

use super::access::{self, ObserverCredentials};
use crate::{connections::Client, envelope::Reply, error::ApiError, extract::Query, rate_limits, state::AppState};

/// Default page size.
const DEFAULT_PAGE: i64 = 200;

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Only events after this number: 0, or `next_since` of the previous page.
    #[serde(default)]
    #[param(minimum = 0)]
    since: Option<i64>,
    /// Maximum number of events: 200 by default; more than 500 are refused.
    #[serde(default)]
    #[param(minimum = 1, maximum = 500)]
    limit: Option<i64>,
}

/// Reads the workspace's event log, oldest first.
///
/// An observer token needs the scope `stream:read`; events that its scopes and filters hide are omitted. `next_since`
/// advances even over pages without visible events.
#[utoipa::path(
    get, path = "/v1/workspace/events", tag = "observers",
    security(("workspace_key" = []), ("observer_token" = [])), params(EventsQuery),
    responses((status = 200, body = EventsPage), (status = 403, description = "insufficient_scope")),
)]
pub(crate) async fn page(
    State(state): State<AppState>,
    Query(query): Query<EventsQuery>,
    client: Client,
    parts: Parts,
) -> Result<Reply<EventsPage>, ApiError> {
    let engine = &state.engine;
    let token = ObserverCredentials { token: None }.token(&parts.headers)?;
    let access = access::authorize(&state, &token, &client).await?;
    rate_limits::charge_request(&parts, &state, access.scope, access.rate_limit_subject()).await?;
    let (since, limit) = (query.since.unwrap_or(0), query.limit.unwrap_or(DEFAULT_PAGE));
    if since < 0 || !(1..=MAX_EVENTS_PAGE).contains(&limit) {
        return Err(ApiError::invalid_request(format!(
            "since must not be negative, and limit must be from 1 to {MAX_EVENTS_PAGE}"
        )));
    }
    let page = engine.events().page(access.scope, &access.view, since, limit).await?;
    Ok(Reply::ok(EventsPage {
        events: page.events.iter().filter_map(to_logged_event).collect(),
        latest_seq: page.latest_seq,
        next_since: page.next_since,
    })
    .holding(page.memory))
}

fn to_logged_event(event: &LogEvent) -> Option<LoggedEvent> {
    Some(LoggedEvent {
        seq: event.seq,
        kind: event.kind.clone(),
        channel_id: event.channel_id.map(|id| id.to_string()),
        payload: event.payload()?.to_owned(),
        created_at: Timestamp(event.created_at).to_string(),
    })
}
