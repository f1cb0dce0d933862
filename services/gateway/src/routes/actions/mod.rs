//! Actions and their invocations. Answers are [`wire::Action`] and [`wire::Invocation`]; triggers are in [`triggers`].

pub mod triggers;

use axum::extract::State;
use axum::http::StatusCode;
use chrono::DateTime;
use relay_domain::{
    InvocationId,
    actions::{Action, Invocation, PlacementRecord},
};
use relay_engine::{
    Engine, EngineError,
    actions::{CompletionRequest, InvocationReceipt, InvokeAction},
    error::Missing,
};
use relay_wire::{actions as wire, field::ToValue};

use crate::{
    caller::{ActingAgent, Caller},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path, Query},
    list_reply::ListReply,
    openapi::IdempotencyKey,
    origin_client::OriginClient,
};

/// Defines an action, or changes one of the same handler.
///
/// An agent defines actions that it handles itself. The status is 201 for a new action and 200 for a changed one.
#[utoipa::path(
    post, path = "/v1/actions", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    request_body = wire::ActionBody,
    responses((status = 201, body = wire::Action), (status = 200, body = wire::Action), (status = 400, description = "invalid_action_handler"), (status = 403, description = "forbidden"), (status = 404, description = "agent_not_found, node_not_found"), (status = 409, description = "action_name_conflict, capability_mismatch"), (status = 429, description = "too_many_actions")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.define", skip_all)]
pub async fn define(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    client: OriginClient,
    Body(body): Body<wire::ActionBody>,
) -> Result<Reply<wire::Action>, ApiError> {
    let (row, new) = engine.actions().define(&caller, body).await?;
    Ok(Reply::with_status(if new { StatusCode::CREATED } else { StatusCode::OK }, to_action(row, client)))
}

/// Lists the actions that the caller may invoke, by name.
///
/// A workspace key gets the actions that every agent may invoke.
#[utoipa::path(
    get, path = "/v1/actions", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Action>)),
)]
#[tracing::instrument(level = "debug", name = "http.actions.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    client: OriginClient,
) -> Result<ListReply<wire::Action>, ApiError> {
    let rows = engine.actions().list(&caller).await?;
    ListReply::list(rows.map(move |row| to_action(row, client)))
}

/// Shows an action.
#[utoipa::path(
    get, path = "/v1/actions/{name}", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Action), (status = 404, description = "action_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    client: OriginClient,
    Path(name): Path<String>,
) -> Result<Reply<wire::Action>, ApiError> {
    Ok(Reply::ok(to_action(engine.actions().visible(&caller, &name).await?, client)))
}

/// Deletes an action.
///
/// Allowed for the agent that handles it and for the workspace key. Its open invocations fail with
/// `action_deleted`, and their callers receive `action.failed`.
#[utoipa::path(
    delete, path = "/v1/actions/{name}", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 204), (status = 403, description = "forbidden"), (status = 404, description = "action_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.actions().delete(&caller, &name).await?;
    Ok(NoContent)
}

/// Invokes an action.
///
/// The response is sent once the invocation is recorded and a handler is available. The outcome is sent to the
/// caller's node as `action.completed` or `action.failed`, and can be read.
#[utoipa::path(
    post, path = "/v1/actions/{name}/invoke", tag = "actions",
    security(("agent_token" = [])), params(IdempotencyKey),
    request_body = wire::InvokeBody,
    responses((status = 201, body = wire::InvocationAck), (status = 400, description = "invalid_action_input, invalid_idempotency_key"), (status = 403, description = "action_denied, agent_token_required, spawn_denied, agent_not_spawned_by_caller"), (status = 404, description = "action_not_found"), (status = 409, description = "idempotency_key_reused, idempotency_in_progress"), (status = 429, description = "too_many_invocations"), (status = 503, description = "handler_unavailable")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.invoke", skip_all)]
pub async fn invoke(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(name): Path<String>,
    KeyedBody { body, key }: KeyedBody<wire::InvokeBody>,
) -> Result<Reply<wire::InvocationAck>, ApiError> {
    let request = InvokeAction { name, node: None, input: body.input, durable: body.durable.unwrap_or_default() };
    Ok(invocation_created(engine.actions().invoke(&caller, request, key.as_ref()).await?))
}

/// Invokes an action of a node.
#[utoipa::path(
    post, path = "/v1/nodes/{name}/actions/{action}/invoke", tag = "actions",
    security(("agent_token" = [])), params(IdempotencyKey),
    request_body = wire::InvokeBody,
    responses((status = 201, body = wire::InvocationAck), (status = 400, description = "invalid_action_input, invalid_idempotency_key"), (status = 403, description = "action_denied, agent_token_required, spawn_denied, agent_not_spawned_by_caller"), (status = 404, description = "action_not_found, node_not_found"), (status = 409, description = "idempotency_key_reused, idempotency_in_progress"), (status = 429, description = "too_many_invocations"), (status = 503, description = "handler_unavailable")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.invoke_on_node", skip_all)]
pub async fn invoke_on_node(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path((node, name)): Path<(String, String)>,
    KeyedBody { body, key }: KeyedBody<wire::InvokeBody>,
) -> Result<Reply<wire::InvocationAck>, ApiError> {
    let durable = body.durable.unwrap_or_default();
    let request = InvokeAction { name, node: Some(node), input: body.input, durable };
    Ok(invocation_created(engine.actions().invoke(&caller, request, key.as_ref()).await?))
}

/// Shows an invocation to its caller, to the agent that handles it, and to the workspace key.
#[utoipa::path(
    get, path = "/v1/actions/{name}/invocations/{id}", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])), params(wire::InvocationQuery),
    responses((status = 200, body = wire::Invocation), (status = 403, description = "invocation_not_own"), (status = 404, description = "invocation_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.invocation", skip_all)]
pub async fn invocation(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path((name, id)): Path<(String, String)>,
    Query(query): Query<wire::InvocationQuery>,
    client: OriginClient,
) -> Result<Reply<wire::Invocation>, ApiError> {
    let row = engine.actions().invocation(&caller, &name, parse_invocation_id(&id)?).await?;
    let explain = query.explain.as_deref().is_some_and(|word| matches!(word, "true" | "1"));
    Ok(Reply::ok(to_invocation(row, explain, client)))
}

/// Completes an invocation.
///
/// Allowed for the agent that handles it and for the workspace key. A completed invocation is returned unchanged.
#[utoipa::path(
    post, path = "/v1/actions/{name}/invocations/{id}/complete", tag = "actions",
    security(("workspace_key" = []), ("agent_token" = [])),
    request_body = wire::CompleteBody,
    responses((status = 200, body = wire::Invocation), (status = 403, description = "forbidden, node_owned_invocation"), (status = 404, description = "invocation_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.actions.complete", skip_all)]
pub async fn complete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path((name, id)): Path<(String, String)>,
    client: OriginClient,
    Body(body): Body<wire::CompleteBody>,
) -> Result<Reply<wire::Invocation>, ApiError> {
    // Some clients send fractions.
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
    let duration_ms = body.duration_ms.map(|ms| ms.round() as i64);
    let complete = CompletionRequest { output: body.output, error: body.error, duration_ms };
    let row = engine.actions().complete(&caller, &name, parse_invocation_id(&id)?, complete).await?;
    Ok(Reply::ok(to_invocation(row, false, client)))
}

fn parse_invocation_id(text: &str) -> Result<InvocationId, ApiError> {
    text.parse().map_err(|_| EngineError::NotFound(Missing::Invocation).into())
}

fn to_action(row: Action, client: OriginClient) -> wire::Action {
    let no_agent = client.takes_no_null_handler().then(String::new);
    wire::Action {
        id: row.action_id,
        name: row.name,
        description: row.description,
        handler_agent: row.handler_agent.or(no_agent),
        handler_node: row.handler_node,
        handler_node_id: row.handler_node_id,
        input_schema: row.input_schema,
        output_schema: row.output_schema,
        available_to: row.available_to,
        is_active: true,
        created_at: row.created_at.into(),
    }
}

/// Builds the response of every route that invokes something.
pub(crate) fn invocation_created(ack: InvocationReceipt) -> Reply<wire::InvocationAck> {
    let replayed = ack.replayed;
    Reply::created(to_invocation_ack(ack)).replayed(replayed)
}

/// Builds the acknowledgement of an invocation, as in replies on sockets.
pub(crate) fn to_invocation_ack(ack: InvocationReceipt) -> wire::InvocationAck {
    wire::InvocationAck {
        invocation_id: ack.id,
        action_name: ack.action_name,
        handler_agent_id: ack.handler_agent_id,
        handler_node_id: ack.handler_node_id,
        dispatched_node_id: ack.dispatched_node_id,
        input: ack.input,
        status: ack.status.as_str(),
        created_at: ack.created_at.into(),
    }
}

fn to_invocation(row: Invocation, explain: bool, client: OriginClient) -> wire::Invocation {
    let placements = explain.then(|| row.placements.into_iter().map(to_placement_report).collect());
    wire::Invocation {
        invocation_id: row.invocation_id,
        action_name: row.action_name,
        caller_id: row.caller_id.map_or_else(|| "workspace".to_owned(), |id| id.to_string()),
        caller_name: row.caller_name,
        input: row.input,
        output: if client.takes_output_as_object() { wire::output_object(row.output.as_ref()) } else { row.output },
        status: row.status.as_str().to_owned(),
        error: row.error,
        duration_ms: row.duration_ms,
        dispatched_node_id: row.node_id.map(|node| node.to_string()),
        dispatched_at: row.dispatched_at.map(Into::into),
        accepted_at: row.accepted_at.map(Into::into),
        created_at: row.created_at.into(),
        completed_at: row.completed_at.map(Into::into),
        placements,
    }
}

fn to_placement_report(record: PlacementRecord) -> wire::PlacementReport {
    wire::PlacementReport {
        attempt: record.attempt.into(),
        at: DateTime::from_timestamp_millis(record.at).map(Into::into),
        capability: record.capability,
        target_node_id: record.target.map(|node| node.to_string()),
        chosen: record.chosen.to_value(),
        candidates: record.candidates,
        skipped: record.skipped.to_value(),
        skipped_unnamed: record.skipped_unnamed,
    }
}
