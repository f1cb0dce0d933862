//! Delivery metrics and traces of a workspace, for its tenant.

use axum::{extract::State, http::header::CONTENT_TYPE, response::IntoResponse};
use relay_engine::Engine;
use relay_wire::mailboxes::insight as wire;

use crate::{
    caller::{Reader, reads},
    envelope::Reply,
    error::ApiError,
    extract::Path,
};

/// Returns the workspace's metrics in the Prometheus format.
///
/// Scrape it with an observer token that has `activity:read`. If it names agents, the metrics cover their mailboxes.
#[utoipa::path(
    get, path = "/v1/workspace/metrics", tag = "workspaces",
    security(("workspace_key" = []), ("observer_token" = [])),
    responses(
        (status = 200, body = String, content_type = "text/plain; version=0.0.4; charset=utf-8"),
        (status = 403, description = "insufficient_scope"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspace.metrics", skip_all)]
pub async fn metrics(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::ACTIVITY }>,
) -> Result<impl IntoResponse, ApiError> {
    let numbers = engine.mailboxes().workspace_metrics(&caller).await?;
    let mut text = String::new();
    for (name, kind, help, value) in [
        ("messages_accepted_total", "counter", "Messages accepted.", numbers.accepted),
        ("deliveries_written_total", "counter", "Deliveries of them, one for each recipient.", numbers.written),
        ("deliveries_delivered_total", "counter", "Deliveries written to a socket.", numbers.sent),
        ("deliveries_acked_total", "counter", "Deliveries acknowledged over a socket.", numbers.acked),
        ("deliveries_settled_total", "counter", "Deliveries settled by any means.", numbers.settled),
        ("dead_letters", "gauge", "Dead letters that are kept.", numbers.dead_letters),
        ("deliveries_waiting", "gauge", "Deliveries that are not settled.", numbers.written - numbers.settled),
        ("mailbox_lag_max", "gauge", "The most unsettled deliveries of one agent.", numbers.largest_lag),
        ("agents", "gauge", "Agents.", numbers.agents),
        ("nodes_connected", "gauge", "Nodes that are connected.", numbers.nodes_connected),
    ] {
        text.push_str(&format!(
            "# HELP relay_workspace_{name} {help}\n# TYPE relay_workspace_{name} {kind}\nrelay_workspace_{name} {value}\n"
        ));
    }
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

/// Shows all steps of all deliveries of a message, without its text.
///
/// Each call of an http_push endpoint is a step with its time, status and latency. Sending a frame over a socket is a
/// step without a time, because none is stored. An observer whose token names agents gets the deliveries to those.
#[utoipa::path(
    get, path = "/v1/messages/{id}/trace", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = [])),
    responses(
        (status = 200, body = wire::MessageTrace),
        (status = 403, description = "insufficient_scope"),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.trace", skip_all)]
pub async fn trace(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::ACTIVITY }>,
    Path(id): Path<String>,
) -> Result<Reply<wire::MessageTrace>, ApiError> {
    Ok(Reply::ok(engine.mailboxes().message_trace(&caller, &id).await?))
}
