//! Agents: registration, listing, presence, tokens. Answers are [`wire::Agent`] and [`wire::AgentDetails`]; spawn and
//! release are in [`spawn`], reports of sessions in [`session_events`].

pub mod session_events;
pub mod spawn;

use axum::extract::State;
use chrono::{DateTime, Utc};
use relay_domain::{
    WorkspaceScope,
    agents::{
        self, AgentKind, AgentPresence, AgentStatus,
        details::{AgentDetails, AgentKey},
    },
    channels::Membership,
    mailboxes::Delivery,
};
use relay_engine::{
    Engine,
    access::callers::Credential,
    agents::lifecycle::{ChangeAgent, RegisterAgent, SPAWN_KEY_PREFIX},
};
use relay_wire::agents as wire;
use serde_json::Value;

use crate::{
    caller::{Agent, Caller, ReaderOrAgent, WorkspaceKey, reads},
    envelope::{NoContent, Reply, acknowledged},
    error::ApiError,
    extract::{Body, KeyedBody, Path, Query},
    list_reply::ListReply,
    openapi::IdempotencyKey,
};

/// Registers an agent.
///
/// The token is returned only once. The agent joins `general` unless `auto_join_general` is false. An
/// `Idempotency-Key` counts here only if it begins with `relay-spawn:`.
#[utoipa::path(
    post, path = "/v1/agents", tag = "agents",
    security(("workspace_key" = [])), params(IdempotencyKey), request_body = wire::RegisterAgentBody,
    responses(
        (status = 201, body = wire::RegisteredAgent),
        (status = 409, description = "agent_already_exists"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.agents.register", skip_all)]
pub async fn register(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    KeyedBody { body, key }: KeyedBody<wire::RegisterAgentBody>,
) -> Result<Reply<wire::RegisteredAgent>, ApiError> {
    let request = RegisterAgent {
        name: body.name,
        kind: match body.kind {
            None | Some(wire::AgentType::Agent) => AgentKind::Agent,
            Some(wire::AgentType::Human) => AgentKind::Human,
            Some(wire::AgentType::System) => AgentKind::System,
        },
        persona: body.persona,
        metadata: body.metadata.map(Value::Object),
        capabilities: body.capabilities.map(Value::Object),
        skills: skills_to_json(body.skills),
        joins_general: body.auto_join_general.unwrap_or(true),
        direct_machine_prefix: body.direct_machine_prefix,
    };
    let registered = match key.filter(|key| key.text().starts_with(SPAWN_KEY_PREFIX)) {
        Some(key) => engine.agents().register_spawned(caller.scope, &request, &key).await?,
        None => engine.agents().register(caller.scope, &request).await?,
    };
    Ok(Reply::created(wire::RegisteredAgent {
        id: registered.agent_id,
        workspace_id: caller.scope.workspace_id(),
        handle: format!("@{}", request.name),
        address: registered.address,
        name: request.name,
        token: registered.token,
        status: AgentStatus::Active.presence(),
        capabilities: request.capabilities,
        created_at: registered.created_at.into(),
    })
    .replayed(registered.replayed))
}

/// Lists the agents.
#[utoipa::path(
    get, path = "/v1/agents", tag = "agents",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::AgentsQuery),
    responses((status = 200, body = Vec<wire::Agent>), (status = 403, description = "insufficient_scope")),
)]
#[tracing::instrument(level = "debug", name = "http.agents.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::AGENTS }>,
    Query(query): Query<wire::AgentsQuery>,
) -> Result<ListReply<wire::Agent>, ApiError> {
    let status = match query.status.as_deref() {
        None | Some("" | "all") => None,
        // Words of other engines for agents that this one does not keep.
        Some("released" | "unknown") => return ListReply::empty(),
        Some(word) => Some(parse_status(word)?),
    };
    let agents = engine.agents().list(&caller, status).await?;
    let (scope, now) = (caller.scope(), engine.now());
    ListReply::list(agents.map(move |agent| to_agent(scope, agent, now)))
}

/// Lists the presence of all agents.
#[utoipa::path(
    get, path = "/v1/agents/presence", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Presence>)),
)]
#[tracing::instrument(level = "debug", name = "http.agents.presence", skip_all)]
pub async fn presence(
    State(engine): State<Engine>,
    Caller(caller): Caller,
) -> Result<Reply<Vec<wire::Presence>>, ApiError> {
    let agents = engine.agents().statuses(caller.scope()).await?;
    let presence = |agent: AgentPresence| wire::Presence {
        agent_id: agent.agent_id,
        status: agent.status.presence(),
        agent_name: agent.name,
    };
    Ok(Reply::ok(agents.into_iter().map(presence).collect()))
}

/// Shows an agent.
#[utoipa::path(
    get, path = "/v1/agents/{name}", tag = "agents",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::AgentDetails), (status = 403, description = "insufficient_scope"), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.agents.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::AGENTS }>,
    Path(name): Path<String>,
) -> Result<Reply<wire::AgentDetails>, ApiError> {
    let details = engine.agents().details(&caller, AgentKey::Name(&name)).await?;
    Ok(Reply::ok(to_details(caller.scope(), details, engine.now())))
}

/// Shows the calling agent.
#[utoipa::path(
    get, path = "/v1/agent", tag = "agents",
    security(("agent_token" = [])),
    responses((status = 200, body = wire::AgentDetails), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.agents.me", skip_all)]
pub async fn me(State(engine): State<Engine>, Agent(caller): Agent) -> Result<Reply<wire::AgentDetails>, ApiError> {
    let (scope, key) = (caller.scope, AgentKey::Id(caller.agent_id));
    let details = engine.agents().details(&Credential::Agent(caller), key).await?;
    Ok(Reply::ok(to_details(scope, details, engine.now())))
}

/// Changes an agent.
#[utoipa::path(
    patch, path = "/v1/agents/{name}", tag = "agents",
    security(("workspace_key" = [])), request_body = wire::UpdateAgentBody,
    responses((status = 200, body = wire::Agent), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.agents.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(name): Path<String>,
    Body(body): Body<wire::UpdateAgentBody>,
) -> Result<Reply<wire::Agent>, ApiError> {
    let change = ChangeAgent {
        status: body.status.as_deref().map(parse_status).transpose()?,
        persona: body.persona,
        metadata: body.metadata.map(Value::Object),
        capabilities: body.capabilities.map(|capabilities| capabilities.map(Value::Object)),
        skills: skills_to_json(body.skills),
        rights: body.rights,
    };
    let agent = engine.agents().update(caller.scope, &name, &change).await?;
    Ok(Reply::ok(to_agent(caller.scope, agent, engine.now())))
}

/// Deletes an agent. Its name becomes available, its token is revoked.
///
/// An agent may delete the agents that it spawned.
#[utoipa::path(
    delete, path = "/v1/agents/{name}", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses((status = 204), (status = 403, description = "agent_not_spawned_by_caller"), (status = 404, description = "agent_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.agents.delete", skip_all)]
pub async fn delete(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.agents().delete(&caller, &name).await?;
    Ok(NoContent)
}

/// Rotates an agent's token, with the workspace key or with the agent's own token.
///
/// The old token is revoked at once.
#[utoipa::path(
    post, path = "/v1/agents/{name}/rotate-token", tag = "agents",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = wire::RotatedToken),
        (status = 403, description = "agent_recovery_not_authorized"),
        (status = 404, description = "agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.agents.rotate_token", skip_all)]
pub async fn rotate_token(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<Reply<wire::RotatedToken>, ApiError> {
    let token = engine.agents().rotate_token(&caller, &name).await?;
    Ok(Reply::ok(wire::RotatedToken { name, token }))
}

/// Reports that the calling agent is online.
#[utoipa::path(
    post, path = "/v1/agents/heartbeat", tag = "agents",
    security(("agent_token" = [])),
    responses((status = 200, body = ())),
)]
#[tracing::instrument(level = "debug", name = "http.agents.heartbeat", skip_all)]
pub async fn heartbeat(State(engine): State<Engine>, Agent(caller): Agent) -> Result<Reply<()>, ApiError> {
    engine.agents().mark_online(&caller).await?;
    Ok(acknowledged())
}

/// Reports that the calling agent goes offline, and with `deregister` leaves the node that it is bound to.
#[utoipa::path(
    post, path = "/v1/agents/disconnect", tag = "agents",
    security(("agent_token" = [])), request_body = wire::DisconnectBody,
    responses((status = 200, body = ())),
)]
#[tracing::instrument(level = "debug", name = "http.agents.disconnect", skip_all)]
pub async fn disconnect(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Body(body): Body<wire::DisconnectBody>,
) -> Result<Reply<()>, ApiError> {
    engine.agents().mark_offline(&caller).await?;
    if body.deregister == Some(true) {
        engine.agents().unbind_self(&caller).await?;
    }
    Ok(acknowledged())
}

fn to_details(scope: WorkspaceScope, details: AgentDetails, now: DateTime<Utc>) -> wire::AgentDetails {
    let channel = |membership: Membership| wire::AgentChannel {
        id: membership.channel_id,
        name: membership.name,
        role: membership.role.as_str(),
        joined_at: membership.joined_at.into(),
    };
    let pending_delivery = |delivery: Delivery| wire::PendingDelivery {
        id: delivery.id.to_string(),
        message_id: delivery.id.source.to_string(),
        mode: delivery.mode.delivery_word(),
        reason: delivery.reason().map(str::to_owned),
        status: delivery.state().as_str(),
        created_at: delivery.created_at.into(),
    };
    wire::AgentDetails {
        agent: to_agent(scope, details.agent, now),
        channels: details.channels.into_iter().map(channel).collect(),
        actions_provided: details.actions_provided,
        actions_available_to: details.actions_available,
        pending_deliveries: details.pending_deliveries.into_iter().map(pending_delivery).collect(),
    }
}

fn to_agent(scope: WorkspaceScope, agent: agents::Agent, now: DateTime<Utc>) -> wire::Agent {
    let status = agent.status_at(now);
    wire::Agent {
        id: agent.id,
        workspace_id: scope.workspace_id(),
        handle: format!("@{}", agent.name),
        address: agent.address(),
        name: agent.name,
        kind: agent.kind.as_str(),
        status: status.presence(),
        activity_status: status.as_str(),
        persona: agent.persona,
        capabilities: agent.capabilities,
        metadata: agent.metadata,
        created_at: agent.created_at.into(),
        last_seen: agent.last_seen_at.into(),
        token_hash: "",
        spawned_by: agent.spawned_by,
        rights: agent.rights,
    }
}

fn parse_status(word: &str) -> Result<AgentStatus, ApiError> {
    AgentStatus::parse(word).ok_or_else(|| {
        ApiError::invalid_request("status must be one of active, online, idle, away, blocked, waiting, offline")
    })
}

fn skills_to_json(skills: Option<Vec<wire::Skill>>) -> Option<Value> {
    // Decoded from JSON, so they encode.
    skills.and_then(|skills| serde_json::to_value(skills).ok())
}
