//! Inbound webhooks: administration, and the URL that external systems call.

use axum::extract::State;
use relay_domain::{JsonText, WorkspaceScope, messages::Webhook};
use relay_engine::{Engine, EngineError, error::Missing, messages::webhooks::WebhookCall};
use relay_wire::messages::webhook as wire;
use serde_json::Value;

use crate::{
    caller::{WebhookToken, WorkspaceKey},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path},
};

/// Creates an inbound webhook that posts to a channel.
#[utoipa::path(
    post, path = "/v1/webhooks", tag = "webhooks",
    security(("workspace_key" = [])), request_body = wire::CreateWebhookBody,
    responses((status = 201, body = wire::CreatedWebhook), (status = 400, description = "channel_archived"), (status = 404, description = "channel_not_found"), (status = 429, description = "plan_limit_exceeded")),
)]
#[tracing::instrument(level = "debug", name = "http.webhooks.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::CreateWebhookBody>,
) -> Result<Reply<wire::CreatedWebhook>, ApiError> {
    let created = engine.messages().create_webhook(caller.scope, body.name.as_deref(), &body.channel).await?;
    let webhook = to_webhook(caller.scope, created.row);
    Ok(Reply::created(wire::CreatedWebhook { webhook, token: created.token }))
}

/// Lists the inbound webhooks.
#[utoipa::path(
    get, path = "/v1/webhooks", tag = "webhooks",
    security(("workspace_key" = [])),
    responses((status = 200, body = Vec<wire::Webhook>)),
)]
#[tracing::instrument(level = "debug", name = "http.webhooks.list", skip_all)]
pub async fn list(State(engine): State<Engine>, caller: WorkspaceKey) -> Result<Reply<Vec<wire::Webhook>>, ApiError> {
    let rows = engine.messages().webhooks(caller.scope).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| to_webhook(caller.scope, row)).collect()))
}

/// Deletes an inbound webhook. Its token is revoked at once.
#[utoipa::path(
    delete, path = "/v1/webhooks/{id}", tag = "webhooks",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "webhook_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.webhooks.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    let id = id.parse().map_err(|_| EngineError::NotFound(Missing::Webhook))?;
    engine.messages().delete_webhook(caller.scope, id).await?;
    Ok(NoContent)
}

/// Posts to the webhook's channel.
///
/// Without a text the message shows the payload; a body with none of these fields counts as the payload.
#[utoipa::path(
    post, path = "/v1/hooks/{id}", tag = "webhooks",
    security(("webhook_token" = [])), request_body = wire::HookBody,
    responses((status = 201, body = wire::HookAnswer), (status = 400, description = "channel_archived")),
)]
#[tracing::instrument(level = "debug", name = "http.hooks.receive", skip_all)]
pub async fn receive(
    State(engine): State<Engine>,
    WebhookToken(caller): WebhookToken,
    Body(body): Body<wire::HookBody>,
) -> Result<Reply<wire::HookAnswer>, ApiError> {
    let webhook_id = caller.webhook.webhook_id;
    let channel = caller.webhook.channel_name.clone();
    let answer = engine.messages().receive_webhook_call(&caller, to_hook_call(body)).await?;
    Ok(Reply::created(wire::HookAnswer {
        message_id: answer.message_id.to_string(),
        webhook_id,
        channel,
        text: answer.text,
        source: answer.source,
        author: answer.author,
        created_at: answer.created_at.into(),
    }))
}

fn to_hook_call(body: wire::HookBody) -> WebhookCall {
    let text = body.text.or(body.message).filter(|text| !text.is_empty());
    let payload = body.payload.filter(|payload| !payload.is_null());
    // A system that uses none of our fields sends its payload as the whole body.
    let whole = text.is_none() && payload.is_none() && !body.rest.is_empty();
    let named = body.rest.get("invocation_id").or_else(|| body.rest.get("metadata")?.get("invocation_id"));
    WebhookCall {
        invocation: named.and_then(Value::as_str).and_then(|id| id.parse().ok()),
        text,
        blocks: body.blocks.filter(|blocks| !blocks.is_null()),
        source: body.source,
        author: body.author,
        payload: if whole { Some(JsonText::encode(&body.rest)) } else { payload },
    }
}

fn to_webhook(scope: WorkspaceScope, row: Webhook) -> wire::Webhook {
    wire::Webhook {
        id: row.webhook_id,
        webhook_id: row.webhook_id,
        workspace_id: scope.workspace_id(),
        name: row.name,
        channel: row.channel_name.clone(),
        channel_name: row.channel_name,
        channel_id: row.channel_id,
        url: format!("/v1/hooks/{}", row.webhook_id),
        is_active: true,
        created_at: row.created_at.into(),
    }
}
