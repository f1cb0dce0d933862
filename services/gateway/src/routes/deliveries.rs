//! Delivery routes: an agent's own deliveries, one by one.

use axum::extract::State;
use relay_domain::delivery::{DeliveryState, Exception};
use relay_engine::{
    Engine,
    deliveries::{self, DeliveryReport, DeliveryRow},
};
use relay_wire::delivery as wire;

use crate::{
    caller::Agent,
    envelope::Reply,
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// `GET /v1/deliveries`: the caller's own, oldest first.
#[tracing::instrument(level = "debug", name = "http.deliveries.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Query(query): Query<wire::DeliveriesQuery>,
) -> Result<Reply<Vec<wire::Delivery>>, ApiError> {
    let state: Option<DeliveryState> = query
        .status
        .map(|word| word.parse())
        .transpose()
        .map_err(|_| ApiError::invalid_request("Unknown delivery status"))?;
    let limit = page::limit(query.limit.as_deref(), deliveries::PAGE)?;
    let listed = engine.deliveries(&caller, state, limit).await?;
    Ok(Reply::ok(listed.into_iter().map(delivery).collect()))
}

/// `POST /v1/deliveries/:id/ack`. A body, if any, says nothing.
#[tracing::instrument(level = "debug", name = "http.deliveries.ack", skip_all)]
pub async fn ack(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let settled = engine.report_delivery(&caller, &id, &DeliveryReport::Ack).await?;
    Ok(Reply::ok(delivery(settled)))
}

/// `POST /v1/deliveries/:id/fail`.
#[tracing::instrument(level = "debug", name = "http.deliveries.fail", skip_all)]
pub async fn fail(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::FailBody>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let report = DeliveryReport::Fail { error: body.error, retryable: body.retryable };
    Ok(Reply::ok(delivery(engine.report_delivery(&caller, &id, &report).await?)))
}

/// `POST /v1/deliveries/:id/defer`.
#[tracing::instrument(level = "debug", name = "http.deliveries.defer", skip_all)]
pub async fn defer(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::DeferBody>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let report = DeliveryReport::Defer { available_at: body.available_at, reason: body.reason };
    Ok(Reply::ok(delivery(engine.report_delivery(&caller, &id, &report).await?)))
}

fn delivery(delivery: deliveries::Delivery) -> wire::Delivery {
    let reason = delivery.reason().map(str::to_owned);
    let (mode, channel_id) = (delivery.mode(), delivery.channel_id());
    let message_channel = channel_id.clone();
    let deliveries::Delivery { row, id, state, exception } = delivery;
    // Details of an exception count while the state is the exception's.
    let (failed, dead) = (state == DeliveryState::Failed, state == DeliveryState::DeadLettered);
    let located = row.node_kind.is_some();
    let node_id = located.then(|| row.node_id.clone());
    wire::Delivery {
        id: id.to_string(),
        message_id: row.source_id.to_string(),
        channel_id,
        agent_id: row.agent_id.to_string(),
        status: state.as_str(),
        seq: row.seq,
        location_type: if located { "via_node" } else { "self_connected" },
        location_node_id: node_id.clone(),
        route_node_id: node_id,
        dispatch_attempts: i32::from(row.seq <= row.sent_seq),
        next_attempt_at: None,
        last_dispatch_error: None,
        mode,
        reason,
        priority: "normal",
        retryable: if failed || dead { row.retryable } else { None },
        error: if failed || dead { row.error.clone() } else { None },
        available_at: if state == DeliveryState::Queued { row.available_at.map(Into::into) } else { None },
        deadline: None,
        expires_at: Some(row.expires_at.into()),
        delivered_at: None,
        acked_at: if state == DeliveryState::Acked { acked_at(&row, exception).map(Into::into) } else { None },
        dead_lettered_at: if dead { row.exception_at.map(Into::into) } else { None },
        created_at: row.created_at.into(),
        updated_at: row.exception_at.or(row.floor_acked_at).map(Into::into),
        message: message(&row, message_channel),
        route_node_kind: row.node_kind,
        route_node_role: row.node_role,
        delivery_adapter: row.node_adapter,
    }
}

fn acked_at(row: &DeliveryRow, exception: Option<Exception>) -> Option<chrono::DateTime<chrono::Utc>> {
    if exception == Some(Exception::Acked) { row.exception_at } else { row.floor_acked_at }
}

fn message(row: &DeliveryRow, channel_id: Option<String>) -> Option<wire::DeliveredMessage> {
    Some(wire::DeliveredMessage {
        id: row.source_id.to_string(),
        channel_id: channel_id?,
        agent_id: row.message_agent_id.map(|id| id.to_string()),
        agent_name: row.message_agent_name.clone(),
        text: row.message_text.clone()?,
        thread_id: row.message_thread_id.map(|id| id.to_string()),
        created_at: row.message_created_at?.into(),
    })
}
