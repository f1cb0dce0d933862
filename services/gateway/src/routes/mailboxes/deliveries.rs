//! Deliveries of the calling agent: listing, claiming, acking, failing, deferring.

use std::time::Duration;

use axum::extract::State;
use relay_domain::{
    mailboxes::{Delivery, DeliveryReport, delivery::DeliveryState},
    push::attempt::DeliveryAttempt,
};
use relay_engine::{
    Engine,
    mailboxes::{claims, deliveries},
};
use relay_wire::mailboxes::delivery as wire;

use crate::{
    caller::Agent,
    envelope::Reply,
    error::ApiError,
    extract::{Body, Path, Query},
    list_reply::ListReply,
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
) -> Result<ListReply<wire::Delivery>, ApiError> {
    let state: Option<DeliveryState> = query
        .status
        .map(|word| word.parse())
        .transpose()
        .map_err(|_| ApiError::invalid_request("Unknown delivery status"))?;
    let limit = page::parse_limit(query.limit.as_deref(), deliveries::PAGE)?;
    let listed = engine.mailboxes().deliveries(&caller, state, limit).await?;
    ListReply::list(listed.map(to_delivery))
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
) -> Result<ListReply<wire::ClaimedDelivery>, ApiError> {
    let limit = body.limit.unwrap_or(claims::CLAIM_LIMIT.0);
    if !(1..=claims::CLAIM_LIMIT.1).contains(&limit) {
        return Err(ApiError::invalid_request("limit must be 1 to 200"));
    }
    let wait = Duration::from_millis(body.wait_ms.unwrap_or(0));
    if wait > claims::MAX_WAIT {
        return Err(ApiError::invalid_request("wait_ms must be at most 30000"));
    }
    let lease = body.lease_ms.map_or(claims::LEASE, Duration::from_millis);
    let claimed = engine.mailboxes().claim(&caller, limit, lease, wait).await?;
    ListReply::list(claimed.map(|one| wire::ClaimedDelivery {
        delivery: to_delivery(one.delivery),
        leased_until: one.claim.leased_until.into(),
        claim_count: one.claim.claim_count,
    }))
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
    let attempts = engine.mailboxes().attempts(&caller, &id).await?;
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
    let settled = engine.mailboxes().report_delivery(&caller, &id, &DeliveryReport::Ack).await?;
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
    Ok(Reply::ok(to_delivery(engine.mailboxes().report_delivery(&caller, &id, &report).await?)))
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
    Ok(Reply::ok(to_delivery(engine.mailboxes().report_delivery(&caller, &id, &report).await?)))
}

fn to_delivery(delivery: Delivery) -> wire::Delivery {
    let state = delivery.state();
    let (is_retry, is_requeued) = (delivery.is_retry(), delivery.is_requeued());
    let node_id = delivery.node.is_some().then(|| delivery.node_id.to_string());
    let settlement = delivery.settlement.as_ref();
    // Details of a settlement apply while the settlement determines the state.
    let reported =
        settlement.filter(|_| is_requeued || matches!(state, DeliveryState::Failed | DeliveryState::DeadLettered));
    // A delay after a failed attempt is the engine's, not the recipient's.
    let (retried, deferred) = (settlement.filter(|_| is_retry), settlement.filter(|_| !is_retry));
    let deferred = deferred.filter(|_| state == DeliveryState::Queued);
    let dead = settlement.filter(|_| state == DeliveryState::DeadLettered);
    wire::Delivery {
        id: delivery.id.to_string(),
        message_id: delivery.id.source.to_string(),
        channel_id: delivery.client_channel_id(),
        agent_id: delivery.id.agent.to_string(),
        status: state.as_str(),
        seq: delivery.seq,
        location_type: if node_id.is_some() { "via_node" } else { "self_connected" },
        location_node_id: node_id.clone(),
        route_node_id: node_id,
        route_node_kind: delivery.node.as_ref().map(|node| node.kind.as_str()),
        route_node_role: delivery.node.as_ref().map(|node| node.role.as_str()),
        delivery_adapter: delivery.node.as_ref().map(|node| node.adapter.clone()),
        dispatch_attempts: delivery.attempt_count.unwrap_or_else(|| i32::from(delivery.seq <= delivery.sent_seq)),
        next_attempt_at: retried.and_then(|retried| retried.available_at).map(Into::into),
        last_dispatch_error: retried.and_then(|retried| retried.error.clone()),
        mode: delivery.mode.delivery_word(),
        reason: delivery.reason().map(str::to_owned),
        // Always the same: deliveries have no priorities, and strict clients require the field.
        priority: "normal",
        retryable: reported.and_then(|reported| reported.retryable),
        error: reported.and_then(|reported| reported.error.clone()),
        available_at: deferred.and_then(|deferred| deferred.available_at).map(Into::into),
        deadline: None,
        expires_at: Some(delivery.expires_at.into()),
        delivered_at: delivery.handed_over_at.map(Into::into),
        acked_at: delivery.acked_at().map(Into::into),
        dead_lettered_at: dead.map(|dead| dead.at.into()),
        created_at: delivery.created_at.into(),
        updated_at: settlement.map(|settlement| settlement.at).or(delivery.floor_acked_at).map(Into::into),
        redriven_as: delivery.redriven_as().map(|id| id.to_string()),
        message: to_delivered_message(&delivery),
    }
}

fn to_attempt(row: DeliveryAttempt) -> wire::DeliveryAttempt {
    wire::DeliveryAttempt {
        id: row.attempt_id.to_string(),
        node_id: row.node_id.to_string(),
        attempted_at: row.attempted_at.into(),
        latency_ms: row.latency_ms,
        status: row.status,
        error: row.error,
        answer: row.answer.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
    }
}

fn to_delivered_message(delivery: &Delivery) -> Option<wire::DeliveredMessage> {
    let message = delivery.message.as_ref()?;
    Some(wire::DeliveredMessage {
        id: delivery.id.source.to_string(),
        channel_id: delivery.client_channel_id()?,
        agent_id: Some(message.agent_id.to_string()),
        agent_name: Some(message.agent_name.clone()),
        from_address: message.from_address.clone(),
        text: message.text.clone(),
        thread_id: message.thread_id.map(|id| id.to_string()),
        created_at: message.created_at.into(),
    })
}
