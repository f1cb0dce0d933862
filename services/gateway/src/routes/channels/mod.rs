//! Channels: definition, membership, muting. Answers are [`wire::Channel`] and [`wire::Member`]; direct messages are in
//! [`conversations`].

pub mod conversations;

use axum::{extract::State, http::StatusCode};
use relay_domain::{
    WorkspaceScope,
    channels::{Channel, ChannelKind, Member},
};
use relay_engine::{Engine, access::callers::AgentCaller};
use relay_wire::channels as wire;

use crate::{
    caller::{ActingAgent, Agent, Caller, ReaderOrAgent, ReaderOrAgentOrNode, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    list_reply::ListReply,
};

/// Creates a channel. An agent that creates one owns it.
#[utoipa::path(
    post, path = "/v1/channels", tag = "channels",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::CreateChannelBody,
    responses(
        (status = 201, body = wire::Channel),
        (status = 400, description = "invalid_channel_name"),
        (status = 409, description = "channel_already_exists"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Body(body): Body<wire::CreateChannelBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let row = engine.channels().create(&caller, body).await?;
    Ok(Reply::created(to_channel(caller.scope(), row)))
}

/// Returns the channel whose only recipient is an agent, and creates it on the first call.
///
/// Webhooks, triggers and agents that post there reach this agent and no other. An agent gets its own channel only.
#[utoipa::path(
    post, path = "/v1/agents/{name}/subscription-channel", tag = "channels",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 201, body = wire::SubscriptionChannel),
        (status = 200, body = wire::SubscriptionChannel),
        (status = 400, description = "channel_archived"),
        (status = 403, description = "forbidden"),
        (status = 404, description = "agent_not_found"),
        (status = 429, description = "plan_limit_exceeded"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.subscription", skip_all)]
pub async fn subscription(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<Reply<wire::SubscriptionChannel>, ApiError> {
    let (row, agent, is_new) = engine.channels().of_recipient(&caller, &name).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    let channel = to_channel(caller.scope(), row);
    let data =
        wire::SubscriptionChannel { channel, agent_id: agent.id, address: agent.address(), agent_name: agent.name };
    Ok(Reply::with_status(status, data))
}

/// Lists the channels.
#[utoipa::path(
    get, path = "/v1/channels", tag = "channels",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = []), ("node_token" = [])), params(wire::ChannelsQuery),
    responses((status = 200, body = Vec<wire::Channel>), (status = 403, description = "insufficient_scope")),
)]
#[tracing::instrument(level = "debug", name = "http.channels.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    ReaderOrAgentOrNode(caller): ReaderOrAgentOrNode<{ reads::CHANNELS }>,
    Query(query): Query<wire::ChannelsQuery>,
) -> Result<ListReply<wire::Channel>, ApiError> {
    let with_archived = matches!(query.include_archived.as_deref(), Some("true" | "1"));
    let (channels, scope) = (engine.channels().list(&caller, with_archived).await?, caller.scope());
    ListReply::list(channels.map(move |row| to_channel(scope, row)))
}

/// Shows a channel and its members.
#[utoipa::path(
    get, path = "/v1/channels/{name}", tag = "channels",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = []), ("node_token" = [])),
    responses(
        (status = 200, body = wire::ChannelDetails),
        (status = 403, description = "insufficient_scope"), (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    ReaderOrAgentOrNode(caller): ReaderOrAgentOrNode<{ reads::CHANNELS }>,
    Path(name): Path<String>,
) -> Result<Reply<wire::ChannelDetails>, ApiError> {
    let row = engine.channels().visible(&caller, &name).await?;
    let members = engine.channels().members(&caller, row.channel_id).await?;
    Ok(Reply::ok(wire::ChannelDetails {
        channel: to_channel(caller.scope(), row),
        members: members.into_iter().map(to_member).collect(),
    }))
}

/// Changes a channel.
#[utoipa::path(
    patch, path = "/v1/channels/{name}", tag = "channels",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::UpdateChannelBody,
    responses(
        (status = 200, body = wire::Channel),
        (status = 404, description = "channel_not_found"),
        (status = 400, description = "channel_archived"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    Body(body): Body<wire::UpdateChannelBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let row = engine.channels().update(caller.scope(), &name, body).await?;
    Ok(Reply::ok(to_channel(caller.scope(), row)))
}

/// Sets the topic of a channel.
#[utoipa::path(
    patch, path = "/v1/channels/{name}/topic", tag = "channels",
    security(("workspace_key" = []), ("agent_token" = [])), request_body = wire::TopicBody,
    responses(
        (status = 200, body = wire::Channel),
        (status = 404, description = "channel_not_found"),
        (status = 400, description = "channel_archived"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.set_topic", skip_all)]
pub async fn set_topic(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    Body(body): Body<wire::TopicBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let change = wire::UpdateChannelBody { topic: Some(Some(body.topic)), metadata: None };
    let row = engine.channels().update(caller.scope(), &name, change).await?;
    Ok(Reply::ok(to_channel(caller.scope(), row)))
}

/// Archives a channel. It stays readable and accepts no more messages.
#[utoipa::path(
    delete, path = "/v1/channels/{name}", tag = "channels",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 204),
        (status = 400, description = "cannot_archive_general"),
        (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.archive", skip_all)]
pub async fn archive(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.channels().archive(caller.scope(), &name).await?;
    Ok(NoContent)
}

/// Adds the caller to a channel.
#[utoipa::path(
    post, path = "/v1/channels/{name}/join", tag = "channels",
    security(("agent_token" = [])),
    responses(
        (status = 200, body = wire::Joined),
        (status = 400, description = "channel_archived"),
        (status = 404, description = "channel_not_found, agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.join", skip_all)]
pub async fn join(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<Reply<wire::Joined>, ApiError> {
    let (channel, already_member) = engine.channels().join(&caller, &name).await?;
    Ok(Reply::ok(wire::Joined { channel, agent_id: caller.agent_id, already_member }))
}

/// Removes the caller from a channel.
#[utoipa::path(
    post, path = "/v1/channels/{name}/leave", tag = "channels",
    security(("agent_token" = [])),
    responses((status = 204), (status = 404, description = "channel_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.channels.leave", skip_all)]
pub async fn leave(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.channels().leave(&caller, &name).await?;
    Ok(NoContent)
}

/// Adds another agent to a channel. The caller must be a member.
#[utoipa::path(
    post, path = "/v1/channels/{name}/invite", tag = "channels",
    security(("agent_token" = [])), request_body = wire::InviteBody,
    responses(
        (status = 200, body = wire::Invited),
        (status = 400, description = "channel_archived"),
        (status = 403, description = "agent_token_required, not_a_member"),
        (status = 404, description = "channel_not_found, agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.invite", skip_all)]
pub async fn invite(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(name): Path<String>,
    Body(body): Body<wire::InviteBody>,
) -> Result<Reply<wire::Invited>, ApiError> {
    let channel = engine.channels().invite(&caller, &name, &body.agent_name).await?;
    Ok(Reply::ok(wire::Invited { channel, agent: body.agent_name }))
}

/// Lists the members of a channel.
#[utoipa::path(
    get, path = "/v1/channels/{name}/members", tag = "channels",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Member>), (status = 403, description = "insufficient_scope"), (status = 404, description = "channel_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.channels.members", skip_all)]
pub async fn members(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::CHANNELS }>,
    Path(name): Path<String>,
) -> Result<Reply<Vec<wire::Member>>, ApiError> {
    let row = engine.channels().visible(&caller, &name).await?;
    let members = engine.channels().members(&caller, row.channel_id).await?;
    Ok(Reply::ok(members.into_iter().map(to_member).collect()))
}

/// Mutes a channel for the caller: only messages that mention it are delivered.
#[utoipa::path(
    post, path = "/v1/channels/{name}/mute", tag = "channels",
    security(("agent_token" = [])),
    responses(
        (status = 200, body = wire::Muted),
        (status = 403, description = "not_a_member"),
        (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.mute", skip_all)]
pub async fn mute(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<Reply<wire::Muted>, ApiError> {
    set_muted(&engine, &caller, &name, true).await
}

/// Unmutes a channel for the caller.
#[utoipa::path(
    post, path = "/v1/channels/{name}/unmute", tag = "channels",
    security(("agent_token" = [])),
    responses(
        (status = 200, body = wire::Muted),
        (status = 403, description = "not_a_member"),
        (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.unmute", skip_all)]
pub async fn unmute(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<Reply<wire::Muted>, ApiError> {
    set_muted(&engine, &caller, &name, false).await
}

async fn set_muted(
    engine: &Engine,
    caller: &AgentCaller,
    name: &str,
    muted: bool,
) -> Result<Reply<wire::Muted>, ApiError> {
    let channel = engine.channels().set_muted(caller, name, muted).await?;
    Ok(Reply::ok(wire::Muted { channel, agent_id: caller.agent_id, muted }))
}

fn to_channel(scope: WorkspaceScope, row: Channel) -> wire::Channel {
    wire::Channel {
        id: row.channel_id,
        workspace_id: scope.workspace_id(),
        name: row.name,
        channel_type: ChannelKind::Channel.code(),
        topic: row.topic,
        metadata: row.metadata,
        created_by: row.created_by,
        created_at: row.created_at.into(),
        is_archived: row.archived_at.is_some(),
        member_count: row.member_count,
    }
}

fn to_member(row: Member) -> wire::Member {
    wire::Member {
        agent_id: row.agent_id,
        agent_name: row.agent_name,
        role: row.role.as_str().to_owned(),
        joined_at: row.joined_at.into(),
        is_muted: row.muted,
    }
}
