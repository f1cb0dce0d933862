//! Observer tokens: administration with the workspace key. Answers are [`wire::ObserverToken`].

use axum::extract::State;
use relay_domain::observers::{ObserverFilters, ObserverToken};
use relay_engine::{
    Engine,
    observers::{NewObserver, ObserverChange},
};
use relay_wire::observers as wire;
use serde_json::{Map, Value};

use crate::{
    caller::WorkspaceKey,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path},
};

/// Creates an observer token. The token is returned only once.
#[utoipa::path(
    post, path = "/v1/observer-tokens", tag = "observers",
    security(("workspace_key" = [])), request_body = wire::CreateObserverTokenBody,
    responses(
        (status = 201, body = wire::ObserverToken),
        (status = 409, description = "observer_token_name_conflict"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Body(body): Body<wire::CreateObserverTokenBody>,
) -> Result<Reply<wire::ObserverToken>, ApiError> {
    let new = NewObserver {
        name: body.name,
        description: body.description,
        scopes: body.scopes,
        filters: parse_filters(body.filters)?,
        expires_at: body.expires_at,
    };
    let issued = engine.observers().create_token(caller.scope, new).await?;
    Ok(Reply::created(to_observer_token(issued.row, Some(issued.text))))
}

/// Lists observer tokens: active ones, then revoked ones, newest first.
#[utoipa::path(
    get, path = "/v1/observer-tokens", tag = "observers",
    security(("workspace_key" = [])),
    responses((status = 200, body = Vec<wire::ObserverToken>)),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
) -> Result<Reply<Vec<wire::ObserverToken>>, ApiError> {
    let rows = engine.observers().tokens(caller.scope).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| to_observer_token(row, None)).collect()))
}

/// Shows an observer token, revoked or not.
#[utoipa::path(
    get, path = "/v1/observer-tokens/{id}", tag = "observers",
    security(("workspace_key" = [])),
    responses((status = 200, body = wire::ObserverToken), (status = 404, description = "observer_token_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<Reply<wire::ObserverToken>, ApiError> {
    Ok(Reply::ok(to_observer_token(engine.observers().token(caller.scope, &id).await?, None)))
}

/// Changes an observer token. The token stays; its scopes and filters change at once.
#[utoipa::path(
    patch, path = "/v1/observer-tokens/{id}", tag = "observers",
    security(("workspace_key" = [])), request_body = wire::UpdateObserverTokenBody,
    responses(
        (status = 200, body = wire::ObserverToken),
        (status = 404, description = "observer_token_not_found"),
        (status = 409, description = "observer_token_name_conflict"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
    Body(body): Body<wire::UpdateObserverTokenBody>,
) -> Result<Reply<wire::ObserverToken>, ApiError> {
    let change = ObserverChange {
        name: body.name,
        description: body.description,
        scopes: body.scopes,
        filters: body.filters.map(parse_filters).transpose()?,
        expires_at: body.expires_at,
    };
    Ok(Reply::ok(to_observer_token(engine.observers().update_token(caller.scope, &id, change).await?, None)))
}

/// Rotates an observer token. The old one is revoked at once.
#[utoipa::path(
    post, path = "/v1/observer-tokens/{id}/rotate", tag = "observers",
    security(("workspace_key" = [])),
    responses((status = 200, body = wire::ObserverToken), (status = 404, description = "observer_token_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.rotate", skip_all)]
pub async fn rotate(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<Reply<wire::ObserverToken>, ApiError> {
    let issued = engine.observers().rotate_token(caller.scope, &id).await?;
    Ok(Reply::ok(to_observer_token(issued.row, Some(issued.text))))
}

/// Revokes an observer token.
#[utoipa::path(
    delete, path = "/v1/observer-tokens/{id}", tag = "observers",
    security(("workspace_key" = [])),
    responses((status = 204), (status = 404, description = "observer_token_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.observer_tokens.revoke", skip_all)]
pub async fn revoke(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(id): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.observers().revoke_token(caller.scope, &id).await?;
    Ok(NoContent)
}

fn parse_filters(filters: Option<Map<String, Value>>) -> Result<ObserverFilters, ApiError> {
    serde_json::from_value(Value::Object(filters.unwrap_or_default()))
        .map_err(|error| ApiError::invalid_request(format!("Invalid filters: {error}")))
}

fn to_observer_token(row: ObserverToken, text: Option<String>) -> wire::ObserverToken {
    wire::ObserverToken {
        id: row.token_id,
        name: row.name,
        description: row.description,
        scopes: row.scopes,
        filters: wire::show_filters(row.filters),
        status: if row.revoked_at.is_none() { "active" } else { "revoked" },
        expires_at: row.expires_at.map(Into::into),
        created_at: row.created_at.into(),
        updated_at: row.updated_at.map(Into::into),
        revoked_at: row.revoked_at.map(Into::into),
        last_used_at: row.last_used_at.map(Into::into),
        token: text,
    }
}
