//! Triggers: rules that invoke actions for matching messages.

use axum::extract::State;
use relay_domain::{
    TriggerId,
    actions::trigger::{Trigger, TriggerChange},
};
use relay_engine::{Engine, EngineError, actions::triggers::NewTrigger, error::Missing};
use relay_wire::actions::trigger as wire;

use crate::{
    caller::Caller,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path},
    origin_client::OriginClient,
};

/// Creates a trigger, which invokes an action for each matching message from now on.
///
/// Messages of channels and their threads count, direct messages do not. The action is invoked on behalf of the
/// message's author, with the message as its input. The agent that creates the trigger must be permitted the action
/// itself, now and whenever it fires.
#[utoipa::path(
    post, path = "/v1/triggers", operation_id = "create_trigger", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::CreateTriggerBody,
    responses((status = 201, body = wire::Trigger), (status = 400, description = "invalid_channel_name"), (status = 403, description = "trigger_denied, action_denied"), (status = 409, description = "too_many_triggers")),
)]
#[tracing::instrument(level = "debug", name = "http.triggers.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    client: OriginClient,
    Body(body): Body<wire::CreateTriggerBody>,
) -> Result<Reply<wire::Trigger>, ApiError> {
    let request = NewTrigger {
        channel: body.channel,
        pattern: body.pattern,
        mention: body.mention.and_then(wire::MentionFilter::into_condition),
        action_name: body.action_name,
        enabled: body.enabled.unwrap_or(true),
        min_interval_seconds: body.min_interval_seconds.unwrap_or(0),
    };
    Ok(Reply::created(to_trigger(engine.actions().create_trigger(&caller, request).await?, client)))
}

/// Lists the triggers.
#[utoipa::path(
    get, path = "/v1/triggers", operation_id = "list_triggers", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Trigger>)),
)]
#[tracing::instrument(level = "debug", name = "http.triggers.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    client: OriginClient,
) -> Result<Reply<Vec<wire::Trigger>>, ApiError> {
    let rows = engine.actions().triggers(caller.scope()).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| to_trigger(row, client)).collect()))
}

/// Shows a trigger.
#[utoipa::path(
    get, path = "/v1/triggers/{id}", operation_id = "get_trigger", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Trigger), (status = 404, description = "trigger_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.triggers.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    client: OriginClient,
) -> Result<Reply<wire::Trigger>, ApiError> {
    Ok(Reply::ok(to_trigger(engine.actions().trigger(caller.scope(), parse_trigger_id(&id)?).await?, client)))
}

/// Changes a trigger.
#[utoipa::path(
    patch, path = "/v1/triggers/{id}", operation_id = "update_trigger", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::UpdateTriggerBody,
    responses((status = 200, body = wire::Trigger), (status = 400, description = "invalid_channel_name"), (status = 403, description = "trigger_not_own, action_denied"), (status = 404, description = "trigger_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.triggers.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    client: OriginClient,
    Body(body): Body<wire::UpdateTriggerBody>,
) -> Result<Reply<wire::Trigger>, ApiError> {
    let change = TriggerChange {
        channel: body.channel,
        pattern: body.pattern,
        mention: body.mention.map(|mention| mention.and_then(wire::MentionFilter::into_condition)),
        action_name: body.action_name,
        enabled: body.enabled,
        min_interval_seconds: body.min_interval_seconds,
    };
    let changed = engine.actions().update_trigger(&caller, parse_trigger_id(&id)?, change).await?;
    Ok(Reply::ok(to_trigger(changed, client)))
}

/// Deletes a trigger.
#[utoipa::path(
    delete, path = "/v1/triggers/{id}", operation_id = "delete_trigger", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 204), (status = 403, description = "trigger_not_own"), (status = 404, description = "trigger_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.triggers.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.actions().delete_trigger(&caller, parse_trigger_id(&id)?).await?;
    Ok(NoContent)
}

fn parse_trigger_id(text: &str) -> Result<TriggerId, ApiError> {
    text.parse().map_err(|_| EngineError::NotFound(Missing::Trigger).into())
}

fn to_trigger(row: Trigger, client: OriginClient) -> wire::Trigger {
    let mention = row.mention.map(wire::MentionFilter::from).map(|mention| {
        let is_name = matches!(mention, wire::MentionFilter::Agent(_));
        if is_name && client.takes_mention_as_flag() { wire::MentionFilter::Any(true) } else { mention }
    });
    wire::Trigger {
        id: row.trigger_id,
        channel: row.channel,
        pattern: row.pattern,
        mention,
        action_name: row.action_name,
        enabled: row.enabled,
        min_interval_seconds: row.min_interval_seconds,
        last_triggered_at: row.last_triggered_at.map(Into::into),
        last_error: row.last_error,
        created_at: row.created_at.into(),
        updated_at: row.updated_at.map(Into::into),
        created_by: row.created_by,
    }
}
