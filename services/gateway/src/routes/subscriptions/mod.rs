//! Event subscriptions and their deliveries. Answers are [`wire::Subscription`] and [`wire::SubscriptionDelivery`].

use std::collections::BTreeMap;

use axum::extract::State;
use relay_domain::{
    SubscriptionDeliveryId, SubscriptionId,
    subscriptions::{Disabled, DisabledReason, SignatureScheme, Subscription, SubscriptionDelivery},
};
use relay_engine::{
    Engine, EngineError,
    error::Missing,
    subscriptions::definitions::{PAGE, SubscriptionRequest},
};
use relay_wire::{field::ToValue, subscriptions as wire};

use crate::{
    caller::Caller,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// Placeholder for header values, which may be secrets.
const REDACTED: &str = "[redacted]";

/// Subscribes a URL to events.
///
/// An agent's subscription shows what that agent may read, and only that agent and the workspace key see it.
#[utoipa::path(
    post, path = "/v1/subscriptions", operation_id = "create_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::SubscribeBody,
    responses((status = 201, body = wire::Subscription), (status = 403, description = "subscribe_denied"), (status = 429, description = "plan_limit_exceeded")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Body(body): Body<wire::SubscribeBody>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    let filter = body.filter.unwrap_or_default();
    let request = SubscriptionRequest {
        events: body.events,
        channel: filter.channel,
        mentions: filter.mentions,
        url: body.url,
        headers: body.headers.unwrap_or_default(),
        secret: body.secret,
        signature_scheme: body.signature_scheme,
    };
    Ok(Reply::created(to_subscription(engine.subscriptions().create(&caller, request).await?)))
}

/// Lists the event subscriptions; for an agent, its own.
#[utoipa::path(
    get, path = "/v1/subscriptions", operation_id = "list_subscriptions", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Subscription>)),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    Caller(caller): Caller,
) -> Result<Reply<Vec<wire::Subscription>>, ApiError> {
    let subscriptions = engine.subscriptions().list(&caller).await?;
    Ok(Reply::ok(subscriptions.into_iter().map(to_subscription).collect()))
}

/// Shows an event subscription. Its secret is never returned.
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}", operation_id = "get_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Subscription), (status = 403, description = "subscription_not_own"), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    Ok(Reply::ok(to_subscription(engine.subscriptions().get(&caller, parse_subscription_id(&id)?).await?)))
}

/// Deletes an event subscription; its pending deliveries are dropped.
#[utoipa::path(
    delete, path = "/v1/subscriptions/{id}", operation_id = "delete_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 204), (status = 403, description = "subscription_not_own"), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.subscriptions().delete(&caller, parse_subscription_id(&id)?).await?;
    Ok(NoContent)
}

/// Lists the deliveries of a subscription, newest first.
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}/deliveries", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), params(wire::DeliveriesQuery),
    responses((status = 200, body = Vec<wire::SubscriptionDelivery>), (status = 403, description = "subscription_not_own"), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.deliveries", skip_all)]
pub async fn deliveries(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    Query(query): Query<wire::DeliveriesQuery>,
) -> Result<Reply<Vec<wire::SubscriptionDelivery>>, ApiError> {
    let id = parse_subscription_id(&id)?;
    let limit = page::parse_limit(query.limit.as_deref(), PAGE)?;
    let status = query.status.as_deref().filter(|status| !status.is_empty());
    let deliveries = engine.subscriptions().deliveries(&caller, id, status, limit).await?;
    Ok(Reply::ok(deliveries.into_iter().map(|delivery| to_delivery(id, delivery)).collect()))
}

/// Redelivers an event.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/deliveries/{delivery}/replay", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::SubscriptionDelivery), (status = 404, description = "subscription_not_found, delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.replay", skip_all)]
pub async fn replay(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path((id, delivery)): Path<(String, String)>,
) -> Result<Reply<wire::SubscriptionDelivery>, ApiError> {
    let id = parse_subscription_id(&id)?;
    let delivery: SubscriptionDeliveryId = delivery.parse().map_err(|_| EngineError::NotFound(Missing::Delivery))?;
    let replayed = engine.subscriptions().replay_delivery(&caller, id, delivery).await?;
    Ok(Reply::ok(to_delivery(id, replayed)))
}

/// Delivers the events that a subscription missed since the given time, and enables it again. Events that it received
/// are not repeated.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/replay", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::ReplayBody,
    responses((status = 200, body = wire::Subscription), (status = 403, description = "subscription_not_own"), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.replay_since", skip_all)]
pub async fn replay_since(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    Body(body): Body<wire::ReplayBody>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    let id = parse_subscription_id(&id)?;
    Ok(Reply::ok(to_subscription(engine.subscriptions().replay(&caller, id, body.since).await?)))
}

fn parse_subscription_id(text: &str) -> Result<SubscriptionId, ApiError> {
    text.parse().map_err(|_| EngineError::NotFound(Missing::Subscription).into())
}

fn to_subscription(subscription: Subscription) -> wire::Subscription {
    let headers: BTreeMap<_, _> = subscription.header_names.into_iter().map(|name| (name, REDACTED)).collect();
    let (reason, at) = subscription.disabled.map(|Disabled { reason, at }| (reason, at)).unzip();
    wire::Subscription {
        id: subscription.id,
        events: subscription.events,
        filter: subscription.filter.map(|filter| filter.to_value()),
        url: subscription.url,
        headers: Some(headers).filter(|headers| !headers.is_empty()),
        signature_scheme: subscription.signature_scheme.map(SignatureScheme::as_str),
        is_active: at.is_none(),
        disabled_reason: reason.map(DisabledReason::as_str),
        disabled_at: at.map(Into::into),
        created_at: subscription.created_at.into(),
        created_by: subscription.created_by,
    }
}

fn to_delivery(subscription_id: SubscriptionId, delivery: SubscriptionDelivery) -> wire::SubscriptionDelivery {
    wire::SubscriptionDelivery {
        id: delivery.id.to_string(),
        subscription_id,
        event_type: delivery.event_kind,
        status: delivery.status.as_str(),
        attempts: delivery.attempts,
        last_status_code: delivery.last_status,
        last_error: delivery.last_error,
        next_attempt_at: delivery.next_attempt_at.map(Into::into),
        created_at: delivery.created_at.into(),
        updated_at: delivery.updated_at.map(Into::into),
    }
}
