//! Deliveries of the calling agent: listing, claiming, acking, failing, deferring.

use std::time::Duration;

use axum::extract::State;
use relay_domain::mailboxes::delivery::{DeliveryState, Settlement};
use relay_engine::{
    Engine,
    mailboxes::{
        claims,
        deliveries::{self, DeliveryReport, DeliveryRow},
    },
};
use relay_wire::mailboxes::delivery as wire;

use crate::{
    caller::Agent,
    envelope::Reply,
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// Route of claims, which has a longer timeout because claims wait.
pub(crate) const CLAIM_PATH: &str = "/v1/deliveries/claim";

/// Lists the caller's deliveries, oldest first: pending ones unless a status is given.
#[utoipa::path(
    get, path = "/v1/deliveries", tag = "deliveries",
    security(("agent_token" = [])), params(wire::DeliveriesQuery),
    responses((status = 200, body = Vec<wire::Delivery>)),
)]
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
    let limit = page::parse_limit(query.limit.as_deref(), deliveries::PAGE)?;
    let listed = engine.deliveries(&caller, state, limit).await?;
    Ok(Reply::ok(listed.into_iter().map(to_delivery).collect()))
}

/// Claims deliveries, lowest seq first. They are leased to the caller until it settles them or the lease expires.
///
/// For agents on nodes of kind poll. With `wait_ms` the request waits for the first delivery.
#[utoipa::path(
    post, path = "/v1/deliveries/claim", tag = "deliveries",
    security(("agent_token" = [])), request_body = wire::ClaimBody,
    responses(
        (status = 200, body = Vec<wire::ClaimedDelivery>),
        (status = 409, description = "agent_location_conflict"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.deliveries.claim", skip_all)]
pub async fn claim(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Body(body): Body<wire::ClaimBody>,
) -> Result<Reply<Vec<wire::ClaimedDelivery>>, ApiError> {
    let limit = body.limit.unwrap_or(claims::CLAIM_LIMIT.0);
    if !(1..=claims::CLAIM_LIMIT.1).contains(&limit) {
        return Err(ApiError::invalid_request("limit must be 1 to 200"));
    }
    let wait = Duration::from_millis(body.wait_ms.unwrap_or(0));
    if wait > claims::MAX_WAIT {
        return Err(ApiError::invalid_request("wait_ms must be at most 30000"));
    }
    let lease = body.lease_ms.map_or(claims::LEASE, Duration::from_millis);
    let claimed = engine.claim_deliveries(&caller, limit, lease, wait).await?;
    let deliveries = claimed.into_iter().map(|one| wire::ClaimedDelivery {
        delivery: to_delivery(one.delivery),
        leased_until: one.claim.leased_until.into(),
        claim_count: one.claim.claim_count,
    });
    Ok(Reply::ok(deliveries.collect()))
}

/// Lists the attempts to dispatch a delivery to an endpoint, oldest first. They are kept for 7 days.
#[utoipa::path(
    get, path = "/v1/deliveries/{id}/attempts", tag = "deliveries",
    security(("agent_token" = [])),
    responses(
        (status = 200, body = Vec<wire::DeliveryAttempt>),
        (status = 404, description = "delivery_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.deliveries.attempts", skip_all)]
pub async fn attempts(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<Reply<Vec<wire::DeliveryAttempt>>, ApiError> {
    let attempts = engine.attempts(&caller, &id).await?;
    Ok(Reply::ok(attempts.into_iter().map(to_attempt).collect()))
}

/// Acknowledges a delivery. A body is ignored.
#[utoipa::path(
    post, path = "/v1/deliveries/{id}/ack", tag = "deliveries",
    security(("agent_token" = [])),
    responses((status = 200, body = wire::Delivery), (status = 404, description = "delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.deliveries.ack", skip_all)]
pub async fn ack(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let settled = engine.report_delivery(&caller, &id, &DeliveryReport::Ack).await?;
    Ok(Reply::ok(to_delivery(settled)))
}

/// Reports that a delivery failed.
///
/// With `retryable: true` an agent on a node of kind poll or http_push receives it again after a delay; on a node with
/// a socket it is settled and redelivered as a new delivery, at most three times. With `retryable: false` it becomes a
/// dead letter and its sender is notified. Without `retryable` it is settled without consequences.
#[utoipa::path(
    post, path = "/v1/deliveries/{id}/fail", tag = "deliveries",
    security(("agent_token" = [])), request_body = wire::FailBody,
    responses((status = 200, body = wire::Delivery), (status = 404, description = "delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.deliveries.fail", skip_all)]
pub async fn fail(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::FailBody>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let report = DeliveryReport::Fail { error: body.error, retryable: body.retryable };
    Ok(Reply::ok(to_delivery(engine.report_delivery(&caller, &id, &report).await?)))
}

/// Defers a delivery until an instant in the future.
#[utoipa::path(
    post, path = "/v1/deliveries/{id}/defer", tag = "deliveries",
    security(("agent_token" = [])), request_body = wire::DeferBody,
    responses((status = 200, body = wire::Delivery), (status = 404, description = "delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.deliveries.defer", skip_all)]
pub async fn defer(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::DeferBody>,
) -> Result<Reply<wire::Delivery>, ApiError> {
    let report = DeliveryReport::Defer { available_at: body.available_at, reason: body.reason };
    Ok(Reply::ok(to_delivery(engine.report_delivery(&caller, &id, &report).await?)))
}

fn to_delivery(delivery: deliveries::Delivery) -> wire::Delivery {
    let reason = delivery.reason().map(str::to_owned);
    let (mode, channel_id) = (delivery.mode(), delivery.channel_id());
    let message_channel = channel_id.clone();
    let (is_retry, is_requeued) = (delivery.is_retry(), delivery.is_requeued());
    let redriven_as = delivery.redriven_as().map(|id| id.to_string());
    let deliveries::Delivery { row, id, state, exception } = delivery;
    // Details of a settlement apply while the settlement determines the state.
    let (failed, dead) = (state == DeliveryState::Failed, state == DeliveryState::DeadLettered);
    // A delay after a failed attempt is the engine's, not the recipient's.
    let (put_off, retried) = (state == DeliveryState::Queued && !is_retry, is_retry);
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
        dispatch_attempts: row.attempts.unwrap_or_else(|| i32::from(row.seq <= row.sent_seq)),
        next_attempt_at: if retried { row.available_at.map(Into::into) } else { None },
        last_dispatch_error: if retried { row.error.clone() } else { None },
        mode,
        reason,
        priority: "normal",
        retryable: if failed || dead || is_requeued { row.retryable } else { None },
        error: if failed || dead || is_requeued { row.error.clone() } else { None },
        available_at: if put_off { row.available_at.map(Into::into) } else { None },
        deadline: None,
        expires_at: Some(row.expires_at.into()),
        delivered_at: row.handed_over_at.map(Into::into),
        acked_at: if state == DeliveryState::Acked {
            acknowledgement_time(&row, exception).map(Into::into)
        } else {
            None
        },
        dead_lettered_at: if dead { row.settlement_at.map(Into::into) } else { None },
        created_at: row.created_at.into(),
        updated_at: row.settlement_at.or(row.floor_acked_at).map(Into::into),
        redriven_as,
        message: to_delivered_message(&row, message_channel),
        route_node_kind: row.node_kind,
        route_node_role: row.node_role,
        delivery_adapter: row.node_adapter,
    }
}

fn to_attempt(row: deliveries::AttemptRow) -> wire::DeliveryAttempt {
    wire::DeliveryAttempt {
        id: row.attempt_id.to_string(),
        node_id: row.node_id,
        attempted_at: row.attempted_at.into(),
        latency_ms: row.latency_ms,
        status: row.status,
        error: row.error,
        answer: row.answer.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
    }
}

fn acknowledgement_time(row: &DeliveryRow, exception: Option<Settlement>) -> Option<chrono::DateTime<chrono::Utc>> {
    if exception == Some(Settlement::Acked) { row.settlement_at } else { row.floor_acked_at }
}

fn to_delivered_message(row: &DeliveryRow, channel_id: Option<String>) -> Option<wire::DeliveredMessage> {
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
