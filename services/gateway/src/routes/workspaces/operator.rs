//! Operator routes: administration of all workspaces of the installation.

use axum::extract::State;
use relay_domain::workspaces::plan::{LimitOverrides, Plan};
use relay_engine::{Engine, access::limits::Quotas, observers, workspaces::lifecycle::CreateWorkspace};
use relay_wire::{
    field::ToValue as _,
    workspaces::{self as workspace_wire, operator as wire},
};
use serde_json::Value;

use crate::{
    caller::Operator,
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path},
    origin_client::OriginHeaders,
};

/// Creates a workspace, also on a hosted installation.
#[utoipa::path(
    post, path = "/v1/operator/workspaces", tag = "operators",
    security(("operator" = [])), request_body = workspace_wire::CreateWorkspaceBody,
    responses((status = 201, body = workspace_wire::CreatedWorkspace)),
)]
#[tracing::instrument(level = "debug", name = "http.operator.create_workspace", skip_all)]
pub async fn create_workspace(
    State(engine): State<Engine>,
    _: Operator,
    OriginHeaders(origin): OriginHeaders,
    Body(body): Body<workspace_wire::CreateWorkspaceBody>,
) -> Result<Reply<workspace_wire::CreatedWorkspace>, ApiError> {
    let request = CreateWorkspace {
        name: body.name,
        metadata: body.metadata,
        expires_in_seconds: body.expires_in_seconds,
        provenance: workspace_wire::Attribution::of_request(body.provenance, origin)
            .map(|attribution| attribution.to_value()),
    };
    let created = engine.workspaces().create(&request, None, None).await?;
    Ok(Reply::created(workspace_wire::CreatedWorkspace {
        workspace_id: created.workspace_id,
        api_key: created.api_key,
        created_at: created.created_at.into(),
        expires_at: created.expires_at.map(Into::into),
    }))
}

/// Shows the quotas of a workspace.
#[utoipa::path(
    get, path = "/v1/operator/workspaces/{id}/quotas", tag = "operators",
    security(("operator" = [])),
    responses((status = 200, body = wire::Quotas), (status = 404, description = "workspace_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.operator.quotas", skip_all)]
pub async fn quotas(
    State(engine): State<Engine>,
    _: Operator,
    Path(id): Path<String>,
) -> Result<Reply<wire::Quotas>, ApiError> {
    Ok(Reply::ok(to_quotas(engine.quotas().for_operator(&id).await?)))
}

/// Sets the quotas of a workspace. `own` replaces all differences from the plan.
#[utoipa::path(
    put, path = "/v1/operator/workspaces/{id}/quotas", tag = "operators",
    security(("operator" = [])), request_body = wire::SetQuotasBody,
    responses((status = 200, body = wire::Quotas), (status = 404, description = "workspace_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.operator.set_quotas", skip_all)]
pub async fn set_quotas(
    State(engine): State<Engine>,
    _: Operator,
    Path(id): Path<String>,
    Body(body): Body<wire::SetQuotasBody>,
) -> Result<Reply<wire::Quotas>, ApiError> {
    let plan = body
        .plan
        .as_deref()
        .map(|name| Plan::parse(name).ok_or_else(|| ApiError::invalid_request("plan must be free, pro or enterprise")));
    let own: LimitOverrides = serde_json::from_value(Value::Object(body.own.unwrap_or_default()))
        .map_err(|error| ApiError::invalid_request(format!("Invalid own: {error}")))?;
    Ok(Reply::ok(to_quotas(engine.quotas().set_for_operator(&id, plan.transpose()?, &own).await?)))
}

/// Lists the keys that sign observer tokens, newest first.
#[utoipa::path(
    get, path = "/v1/operator/signing-keys", tag = "operators",
    security(("operator" = [])),
    responses((status = 200, body = Vec<wire::SigningKey>)),
)]
#[tracing::instrument(level = "debug", name = "http.operator.signing_keys", skip_all)]
pub async fn signing_keys(State(engine): State<Engine>, _: Operator) -> Result<Reply<Vec<wire::SigningKey>>, ApiError> {
    Ok(Reply::ok(engine.observers().signing_keys().await?.into_iter().map(to_signing_key).collect()))
}

/// Creates a new signing key. Tokens signed by older keys stay valid.
#[utoipa::path(
    post, path = "/v1/operator/signing-keys", tag = "operators",
    security(("operator" = [])),
    responses((status = 201, body = wire::SigningKey), (status = 409, description = "too_many_signing_keys")),
)]
#[tracing::instrument(level = "debug", name = "http.operator.rotate_signing_key", skip_all)]
pub async fn rotate_signing_key(
    State(engine): State<Engine>,
    _: Operator,
) -> Result<Reply<wire::SigningKey>, ApiError> {
    Ok(Reply::created(to_signing_key(engine.observers().rotate_signing_key().await?)))
}

/// Retires a signing key. Every observer token that it signed becomes invalid.
#[utoipa::path(
    delete, path = "/v1/operator/signing-keys/{kid}", tag = "operators",
    security(("operator" = [])),
    responses(
        (status = 204),
        (status = 404, description = "signing_key_not_found"),
        (status = 409, description = "signing_key_in_use"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.operator.retire_signing_key", skip_all)]
pub async fn retire_signing_key(
    State(engine): State<Engine>,
    _: Operator,
    Path(kid): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.observers().retire_signing_key(&kid).await?;
    Ok(NoContent)
}

fn to_quotas(quotas: Quotas) -> wire::Quotas {
    wire::Quotas {
        plan: quotas.plan.as_str(),
        // Numbers always encode.
        own: serde_json::to_value(quotas.overrides).unwrap_or_default(),
        limits: serde_json::to_value(quotas.limits).unwrap_or_default(),
    }
}

fn to_signing_key(key: observers::SigningKey) -> wire::SigningKey {
    wire::SigningKey {
        kid: key.kid,
        public_key: key.public_key.iter().map(|byte| format!("{byte:02x}")).collect(),
        sealed: key.sealed,
        signs: key.signs,
        created_at: key.created_at.into(),
        retired_at: key.retired_at.map(Into::into),
    }
}
