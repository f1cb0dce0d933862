//! Workspaces: creation, lookup, settings, deletion. Answers are [`wire::Workspace`]; activity and statistics are in
//! [`activity`], use in [`usage`], routes of operators in [`operator`].

pub mod activity;
pub mod operator;
pub mod usage;

use axum::{extract::State, http::StatusCode};
use relay_domain::{WorkspaceId, workspaces::Workspace};
use relay_engine::{
    Engine, EngineError,
    access::callers::Credential,
    error::Missing,
    workspaces::lifecycle::{CreateWorkspace, WorkspaceChange},
};
use relay_wire::{field::ToValue as _, workspaces as wire};

use crate::{
    caller::{Creator, Reader, WorkspaceKey, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path},
    openapi::IdempotencyKey,
    origin_client::OriginHeaders,
    rate_limits::PublicLookup,
};

/// Creates a workspace.
///
/// Names are not unique. With the key of a workspace of that name, that workspace is returned with 200. The
/// `Idempotency-Key` of an anonymous caller must have at least 32 characters, because a repetition returns the
/// workspace key. The workspace starts with the channel `general`. A hosted installation accepts no anonymous callers:
/// they send the header `X-Workspace-Bootstrap-Secret` or an operator's JWT.
#[utoipa::path(
    post, path = "/v1/workspaces", tag = "workspaces",
    security((), ("workspace_key" = []), ("operator" = [])), params(IdempotencyKey), request_body = wire::CreateWorkspaceBody,
    responses(
        (status = 201, body = wire::CreatedWorkspace),
        (status = 200, body = wire::CreatedWorkspace),
        (status = 400, description = "workspace_create_idempotency_key_too_weak"),
        (status = 401, description = "workspace_create_bootstrap_secret_invalid"),
        (status = 409, description = "workspace_create_idempotency_conflict, workspace_create_idempotency_terminalized"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Creator(owner): Creator,
    OriginHeaders(origin): OriginHeaders,
    KeyedBody { body, key }: KeyedBody<wire::CreateWorkspaceBody>,
) -> Result<Reply<wire::CreatedWorkspace>, ApiError> {
    let request = CreateWorkspace {
        name: body.name,
        metadata: body.metadata,
        expires_in_seconds: body.expires_in_seconds,
        provenance: wire::Attribution::of_request(body.provenance, origin).map(|attribution| attribution.to_value()),
    };
    let owner = owner.as_ref().map(|owner| (owner.scope, owner.token.as_str()));
    let created = engine.workspaces().create(&request, owner, key.as_ref()).await?;
    let status = if created.is_new { StatusCode::CREATED } else { StatusCode::OK };
    let data = wire::CreatedWorkspace {
        workspace_id: created.workspace_id,
        api_key: created.api_key,
        created_at: created.created_at.into(),
        expires_at: created.expires_at.map(Into::into),
    };
    // Without an Idempotency-Key, 200 means that the caller's key belongs to a workspace of that name. It is no replay.
    Ok(Reply::with_status(status, data).replayed(!created.is_new && key.is_some()))
}

/// Finds the oldest workspace with a name.
#[utoipa::path(
    get, path = "/v1/workspaces/by-name/{name}", tag = "workspaces",
    responses(
        (status = 200, body = wire::WorkspaceName),
        (status = 404, description = "workspace_not_found"), (status = 429, description = "rate_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.by_name", skip_all)]
pub async fn by_name(
    State(engine): State<Engine>,
    _: PublicLookup,
    Path(name): Path<String>,
) -> Result<Reply<wire::WorkspaceName>, ApiError> {
    let row = engine.workspaces().by_name(&name).await?;
    Ok(Reply::ok(wire::WorkspaceName { id: row.workspace_id, name: row.name, created_at: row.created_at.into() }))
}

/// Shows the caller's workspace.
#[utoipa::path(
    get, path = "/v1/workspace", tag = "workspaces",
    security(("workspace_key" = []), ("observer_token" = [])),
    responses((status = 200, body = wire::Workspace), (status = 404, description = "workspace_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.info", skip_all)]
pub async fn info(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::ANYTHING }>,
) -> Result<Reply<wire::Workspace>, ApiError> {
    let mut info = to_workspace(engine.workspaces().by_scope(caller.scope()).await?);
    info.observer_token_id = match caller {
        Credential::Observer(observer) => observer.token_id,
        Credential::Workspace { .. } | Credential::Agent(_) | Credential::Node(_) => None,
    };
    Ok(Reply::ok(info))
}

/// Changes the caller's workspace.
#[utoipa::path(
    patch, path = "/v1/workspace", tag = "workspaces",
    security(("workspace_key" = [])), request_body = wire::UpdateWorkspaceBody,
    responses((status = 200, body = wire::Workspace), (status = 404, description = "workspace_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::UpdateWorkspaceBody>,
) -> Result<Reply<wire::Workspace>, ApiError> {
    let change = WorkspaceChange {
        name: body.name,
        system_prompt: body.system_prompt,
        metadata: body.metadata,
        delivery_ttl_seconds: body.delivery_ttl_seconds,
        agent_token_grace_seconds: body.agent_token_grace_seconds,
        policy: body.policy,
    };
    Ok(Reply::ok(to_workspace(engine.workspaces().update(caller.scope, &change).await?)))
}

/// Deletes the caller's workspace. All of its tokens are revoked.
#[utoipa::path(
    delete, path = "/v1/workspace", tag = "workspaces",
    security(("workspace_key" = [])),
    responses((status = 204)),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.delete", skip_all)]
pub async fn delete(State(engine): State<Engine>, caller: WorkspaceKey) -> Result<NoContent, ApiError> {
    engine.workspaces().delete(caller.scope).await?;
    Ok(NoContent)
}

/// Deletes the caller's workspace, by its id.
#[utoipa::path(
    delete, path = "/v1/workspaces/{id}", tag = "workspaces",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "workspace_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.workspaces.delete_by_id", skip_all)]
pub async fn delete_by_id(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    if id.parse::<WorkspaceId>() != Ok(caller.scope.workspace_id()) {
        return Err(EngineError::NotFound(Missing::Workspace).into());
    }
    engine.workspaces().delete(caller.scope).await?;
    Ok(NoContent)
}

fn to_workspace(row: Workspace) -> wire::Workspace {
    wire::Workspace {
        id: row.workspace_id,
        name: row.name,
        plan: row.plan.as_str().to_owned(),
        system_prompt: row.system_prompt,
        created_at: row.created_at.into(),
        expires_at: row.expires_at.map(Into::into),
        metadata: row.metadata,
        provenance: row.provenance,
        delivery_ttl_seconds: row.delivery_ttl_seconds,
        agent_token_grace_seconds: row.agent_token_grace_seconds,
        policy: row.policy,
        api_key_hash: "",
        observer_token_id: None,
    }
}
