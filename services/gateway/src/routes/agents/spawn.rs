//! Agents that nodes start and stop.

use axum::extract::State;
use relay_engine::{
    Engine, EngineError,
    actions::spawn::ReleaseAgent,
    error::{Conflict, InvalidInput},
};
use relay_wire::{actions::InvocationAck, agents::spawn as wire};
use serde_json::{Map, Value};

use crate::routes::actions::invocation_created;
use crate::{caller::Caller, envelope::Reply, error::ApiError, extract::KeyedBody, openapi::IdempotencyKey};

/// Starts an agent on a node.
///
/// A node with the capability `spawn:<cli>` is chosen unless one is named. The body is passed to the node unchanged.
/// The outcome is sent to the calling agent as `action.completed` or `action.failed` and can be read as an invocation
/// of `spawn`; the end of the agent is reported as `agent.exited`.
#[utoipa::path(
    post, path = "/v1/agents/spawn", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::SpawnBody,
    responses(
        (status = 201, body = InvocationAck),
        (status = 400, description = "placement_self_requires_agent"),
        (status = 403, description = "spawn_denied"),
        (status = 404, description = "node_not_found"),
        (status = 409, description = "capability_mismatch, placement_self_unavailable, idempotency_key_reused, idempotency_in_progress"),
        (status = 429, description = "too_many_invocations"),
        (status = 503, description = "handler_unavailable"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.agents.spawn", skip_all)]
pub async fn spawn(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    KeyedBody { body, key }: KeyedBody<Map<String, Value>>,
) -> Result<Reply<InvocationAck>, ApiError> {
    Ok(invocation_created(engine.actions().spawn(&caller, body, false, key.as_ref()).await?))
}

/// Stops an agent through the node that runs it.
///
/// An agent that runs on no node is stopped by the engine. With `delete_agent` it is deleted once it has stopped, or
/// at once if its node is unavailable.
#[utoipa::path(
    post, path = "/v1/agents/release", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::ReleaseBody,
    responses(
        (status = 201, body = InvocationAck),
        (status = 403, description = "agent_not_spawned_by_caller, release_denied"),
        (status = 404, description = "agent_not_found"),
        (status = 409, description = "agent_release_generation_conflict, idempotency_key_reused"),
        (status = 429, description = "too_many_invocations"),
        (status = 503, description = "agent_host_unavailable"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.agents.release", skip_all)]
pub async fn release(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    KeyedBody { body, key }: KeyedBody<wire::ReleaseBody>,
) -> Result<Reply<InvocationAck>, ApiError> {
    Ok(invocation_created(engine.actions().release(&caller, to_release_request(body), key.as_ref()).await?))
}

/// Stops an agent with this exact identity.
///
/// Like release, for the agent with this name and id. Requires an `Idempotency-Key`.
#[utoipa::path(
    post, path = "/v1/agents/release-exact", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::ReleaseExactBody,
    responses(
        (status = 201, body = InvocationAck),
        (status = 400, description = "invalid_idempotency_key"),
        (status = 403, description = "agent_not_spawned_by_caller, release_denied"),
        (status = 404, description = "agent_not_found"),
        (status = 409, description = "agent_identity_mismatch, agent_release_generation_conflict, idempotency_key_reused"),
        (status = 429, description = "too_many_invocations"),
        (status = 503, description = "agent_host_unavailable"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.agents.release_exact", skip_all)]
pub async fn release_exact(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    KeyedBody { body, key }: KeyedBody<wire::ReleaseExactBody>,
) -> Result<Reply<InvocationAck>, ApiError> {
    let key = key.ok_or(EngineError::Invalid(InvalidInput::IdempotencyKey))?;
    // A malformed id matches no agent.
    let mismatch = |_| EngineError::Conflict(Conflict::AgentIdentityMismatch(body.release.name.clone()));
    let expected = body.expected_agent_id.parse().map_err(mismatch)?;
    let request = ReleaseAgent { expected_agent_id: Some(expected), ..to_release_request(body.release) };
    Ok(invocation_created(engine.actions().release(&caller, request, Some(&key)).await?))
}

fn to_release_request(body: wire::ReleaseBody) -> ReleaseAgent {
    ReleaseAgent {
        name: body.name,
        reason: body.reason,
        delete_agent: body.delete_agent.unwrap_or_default(),
        expected_token_hash: body.expected_token_hash,
        expected_agent_id: None,
        durable: body.durable.unwrap_or_default(),
    }
}
