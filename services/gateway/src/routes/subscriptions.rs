//! Event subscriptions and what is on its way to them.

use axum::extract::State;
use relay_domain::{MessageId, SubscriptionId};
use relay_engine::{
    Engine, EngineError,
    subscriptions::{PAGE, Subscribe, SubscriptionDeliveryRow, SubscriptionRow},
};
use relay_wire::subscription as wire;

use crate::{
    caller::Caller,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    routes::page,
};

/// What is shown in the place of a header's value.
const REDACTED: &str = "[redacted]";

/// Asks for events to be sent to an address.
#[utoipa::path(
    post, path = "/v1/subscriptions", operation_id = "create_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::SubscribeBody,
    responses((status = 201, body = wire::Subscription), (status = 429, description = "plan_limit_exceeded")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Body(body): Body<wire::SubscribeBody>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    let filter = body.filter.unwrap_or_default();
    let request = Subscribe {
        events: body.events,
        channel: filter.channel,
        mentions: filter.mentions,
        url: body.url,
        headers: body.headers.unwrap_or_default(),
        secret: body.secret,
        signature_scheme: body.signature_scheme,
    };
    let row = engine.subscribe(caller.scope(), request).await?;
    Ok(Reply::created(subscription(row)))
}

/// Lists the event subscriptions.
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
    let rows = engine.subscriptions(caller.scope()).await?;
    Ok(Reply::ok(rows.into_iter().map(subscription).collect()))
}

/// Shows an event subscription. Its secret is never shown.
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}", operation_id = "get_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Subscription), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    let row = engine.subscription(caller.scope(), subscription_id(&id)?).await?;
    Ok(Reply::ok(subscription(row)))
}

/// Ends an event subscription; what was on its way is dropped.
#[utoipa::path(
    delete, path = "/v1/subscriptions/{id}", operation_id = "delete_subscription", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 204), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.unsubscribe(caller.scope(), subscription_id(&id)?).await?;
    Ok(NoContent)
}

/// Lists what is on its way to a subscription's address, newest first.
#[utoipa::path(
    get, path = "/v1/subscriptions/{id}/deliveries", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), params(wire::DeliveriesQuery),
    responses((status = 200, body = Vec<wire::SubscriptionDelivery>), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.deliveries", skip_all)]
pub async fn deliveries(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    Query(query): Query<wire::DeliveriesQuery>,
) -> Result<Reply<Vec<wire::SubscriptionDelivery>>, ApiError> {
    let id = subscription_id(&id)?;
    let limit = page::limit(query.limit.as_deref(), PAGE)?;
    let status = query.status.as_deref().filter(|status| !status.is_empty());
    let rows = engine.subscription_deliveries(caller.scope(), id, status, limit).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| delivery(id, row)).collect()))
}

/// Sends an event once more.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/deliveries/{delivery}/replay", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::SubscriptionDelivery), (status = 404, description = "subscription_not_found, delivery_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.replay", skip_all)]
pub async fn replay(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path((id, event)): Path<(String, String)>,
) -> Result<Reply<wire::SubscriptionDelivery>, ApiError> {
    let id = subscription_id(&id)?;
    let event: MessageId = event.parse().map_err(|_| EngineError::DeliveryNotFound)?;
    let row = engine.replay_subscription_delivery(caller.scope(), id, event.get()).await?;
    Ok(Reply::ok(delivery(id, row)))
}

/// Sends what a subscription has missed since then, and switches it on again. What it has had it does not get again.
#[utoipa::path(
    post, path = "/v1/subscriptions/{id}/replay", tag = "webhooks",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::ReplayBody,
    responses((status = 200, body = wire::Subscription), (status = 404, description = "subscription_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.subscriptions.replay_since", skip_all)]
pub async fn replay_since(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    Body(body): Body<wire::ReplayBody>,
) -> Result<Reply<wire::Subscription>, ApiError> {
    let id = subscription_id(&id)?;
    let row = engine.replay_subscription(caller.scope(), id, body.since).await?;
    Ok(Reply::ok(subscription(row)))
}

fn subscription_id(text: &str) -> Result<SubscriptionId, ApiError> {
    text.parse().map_err(|_| EngineError::SubscriptionNotFound.into())
}

fn subscription(row: SubscriptionRow) -> wire::Subscription {
    let headers = row.header_names.into_iter().map(|name| (name, REDACTED)).collect();
    wire::Subscription {
        id: SubscriptionId::new(row.subscription_id),
        events: row.events,
        filter: row.filter,
        url: row.url,
        headers: Some(headers).filter(|headers: &std::collections::BTreeMap<_, _>| !headers.is_empty()),
        signature_scheme: row.signature_scheme,
        is_active: row.disabled_at.is_none(),
        disabled_reason: row.disabled_reason,
        disabled_at: row.disabled_at.map(Into::into),
        created_at: row.created_at.into(),
    }
}

fn delivery(subscription_id: SubscriptionId, row: SubscriptionDeliveryRow) -> wire::SubscriptionDelivery {
    wire::SubscriptionDelivery {
        id: row.delivery_id.to_string(),
        subscription_id,
        event_type: row.event_kind,
        status: row.status,
        attempts: row.attempts,
        last_status_code: row.last_status,
        last_error: row.last_error,
        next_attempt_at: row.next_attempt_at.map(Into::into),
        created_at: row.created_at.into(),
        updated_at: row.updated_at.map(Into::into),
    }
}
