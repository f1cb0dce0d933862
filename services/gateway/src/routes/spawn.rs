//! Agents that nodes bring up and end.

use axum::extract::State;
use relay_engine::{Engine, EngineError, spawn::ReleaseAgent};
use relay_wire::{action::InvocationAck, spawn as wire};
use serde_json::{Map, Value};

use super::actions::acknowledged;
use crate::{caller::Caller, envelope::Reply, error::ApiError, extract::KeyedBody, openapi::IdempotencyKey};

/// Has an agent brought up by a node.
///
/// A node with the capability `spawn:<cli>` is chosen unless one is named. The whole body goes to the node as it is.
/// The outcome comes to the calling agent as `action.completed` or `action.failed` and can be read as an invocation of
/// `spawn`; the end of the agent comes as `agent.exited`.
#[utoipa::path(
    post, path = "/v1/agents/spawn", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::SpawnBody,
    responses(
        (status = 201, body = InvocationAck),
        (status = 400, description = "placement_self_requires_agent"),
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
    Ok(acknowledged(engine.spawn(&caller, body, false, key.as_ref()).await?))
}

/// Ends an agent through the node that runs it.
///
/// One that runs on no node is ended by the engine. With `delete_agent` it is deleted once it has ended, or at once if
/// its node is away.
#[utoipa::path(
    post, path = "/v1/agents/release", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::ReleaseBody,
    responses(
        (status = 201, body = InvocationAck),
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
    Ok(acknowledged(engine.release(&caller, request(body), key.as_ref()).await?))
}

/// Ends exactly this agent.
///
/// As release, for an agent of this name and id. Needs an `Idempotency-Key`.
#[utoipa::path(
    post, path = "/v1/agents/release-exact", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])), params(IdempotencyKey), request_body = wire::ReleaseExactBody,
    responses(
        (status = 201, body = InvocationAck),
        (status = 400, description = "invalid_idempotency_key"),
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
    let key = key.ok_or(EngineError::InvalidIdempotencyKey)?;
    // What is no id is nobody's.
    let mismatch = |_| EngineError::AgentIdentityMismatch(body.release.name.clone());
    let expected = body.expected_agent_id.parse().map_err(mismatch)?;
    let request = ReleaseAgent { expected_agent_id: Some(expected), ..request(body.release) };
    Ok(acknowledged(engine.release(&caller, request, Some(&key)).await?))
}

fn request(body: wire::ReleaseBody) -> ReleaseAgent {
    ReleaseAgent {
        name: body.name,
        reason: body.reason,
        delete_agent: body.delete_agent.unwrap_or_default(),
        expected_token_hash: body.expected_token_hash,
        expected_agent_id: None,
        durable: body.durable.unwrap_or_default(),
    }
}
