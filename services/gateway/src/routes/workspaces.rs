//! Workspace routes.

use axum::{extract::State, http::StatusCode};
use relay_domain::WorkspaceId;
use relay_engine::{
    Engine, EngineError,
    workspaces::{CreateWorkspace, WorkspaceChange, WorkspaceRow},
};
use relay_wire::workspace as wire;
use serde_json::Value;

use crate::{
    caller::{MaybeWorkspaceKey, WorkspaceKey},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path},
};

/// `POST /v1/workspaces`: without a token, or with the key of a workspace that may be the one asked for.
#[tracing::instrument(level = "debug", name = "http.workspaces.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    MaybeWorkspaceKey(owner): MaybeWorkspaceKey,
    KeyedBody { body, key }: KeyedBody<wire::CreateWorkspaceBody>,
) -> Result<Reply<wire::CreatedWorkspace>, ApiError> {
    let request = CreateWorkspace {
        name: body.name,
        metadata: body.metadata.map(Value::Object),
        expires_in_seconds: body.expires_in_seconds,
        provenance: body.provenance.and_then(|provenance| serde_json::to_value(provenance).ok()),
    };
    let owner = owner.as_ref().map(|owner| (owner.scope, owner.token.as_str()));
    let created = engine.create_workspace(&request, owner, key.as_ref()).await?;
    let status = if created.made_now { StatusCode::CREATED } else { StatusCode::OK };
    let data = wire::CreatedWorkspace {
        workspace_id: created.workspace_id,
        api_key: created.api_key,
        created_at: created.created_at.into(),
        expires_at: created.expires_at.map(Into::into),
    };
    Ok(Reply::with_status(status, data).replayed(!created.made_now && key.is_some()))
}

/// `GET /v1/workspaces/by-name/:name`.
#[tracing::instrument(level = "debug", name = "http.workspaces.by_name", skip_all)]
pub async fn by_name(
    State(engine): State<Engine>,
    Path(name): Path<String>,
) -> Result<Reply<wire::WorkspaceName>, ApiError> {
    let row = engine.workspace_by_name(&name).await?;
    Ok(Reply::ok(wire::WorkspaceName { id: row.workspace_id, name: row.name, created_at: row.created_at.into() }))
}

/// `GET /v1/workspace`.
#[tracing::instrument(level = "debug", name = "http.workspaces.info", skip_all)]
pub async fn info(State(engine): State<Engine>, caller: WorkspaceKey) -> Result<Reply<wire::Workspace>, ApiError> {
    Ok(Reply::ok(workspace(engine.workspace(caller.scope).await?)))
}

/// `PATCH /v1/workspace`.
#[tracing::instrument(level = "debug", name = "http.workspaces.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::UpdateWorkspaceBody>,
) -> Result<Reply<wire::Workspace>, ApiError> {
    let change = WorkspaceChange {
        name: body.name,
        system_prompt: body.system_prompt,
        metadata: body.metadata.map(Value::Object),
    };
    Ok(Reply::ok(workspace(engine.update_workspace(caller.scope, &change).await?)))
}

/// `DELETE /v1/workspace`.
#[tracing::instrument(level = "debug", name = "http.workspaces.delete", skip_all)]
pub async fn delete(State(engine): State<Engine>, caller: WorkspaceKey) -> Result<NoContent, ApiError> {
    engine.delete_workspace(caller.scope).await?;
    Ok(NoContent)
}

/// `DELETE /v1/workspaces/:id`: the caller's own, by its id.
#[tracing::instrument(level = "debug", name = "http.workspaces.delete_by_id", skip_all)]
pub async fn delete_by_id(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    if id.parse::<WorkspaceId>() != Ok(caller.scope.workspace_id()) {
        return Err(EngineError::WorkspaceNotFound.into());
    }
    engine.delete_workspace(caller.scope).await?;
    Ok(NoContent)
}

fn workspace(row: WorkspaceRow) -> wire::Workspace {
    wire::Workspace {
        id: row.workspace_id,
        name: row.name,
        plan: row.plan,
        system_prompt: row.system_prompt,
        created_at: row.created_at.into(),
        expires_at: row.expires_at.map(Into::into),
        metadata: row.metadata,
        provenance: row.provenance,
        api_key_hash: "",
    }
}
