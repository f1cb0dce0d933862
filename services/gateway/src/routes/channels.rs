//! Channel routes.

use axum::extract::State;
use relay_domain::WorkspaceScope;
use relay_engine::{
    Engine,
    auth::AgentCaller,
    channels::{ChannelChange, ChannelRow, CreateChannel, MemberRow},
};
use relay_wire::channel as wire;
use serde_json::Value;

use crate::{
    caller::{ActingAgent, Agent, Caller, CallerOrNode},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
};

/// `POST /v1/channels`.
#[tracing::instrument(level = "debug", name = "http.channels.create", skip_all)]
pub async fn create(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Body(body): Body<wire::CreateChannelBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let request = CreateChannel { name: body.name, topic: body.topic, metadata: body.metadata.map(Value::Object) };
    let row = engine.create_channel(&caller, &request).await?;
    Ok(Reply::created(channel(caller.scope(), row)))
}

/// `GET /v1/channels`.
#[tracing::instrument(level = "debug", name = "http.channels.list", skip_all)]
pub async fn list(
    State(engine): State<Engine>,
    CallerOrNode(caller): CallerOrNode,
    Query(query): Query<wire::ChannelsQuery>,
) -> Result<Reply<Vec<wire::Channel>>, ApiError> {
    let with_archived = matches!(query.include_archived.as_deref(), Some("true" | "1"));
    let rows = engine.channels(caller.scope(), with_archived).await?;
    Ok(Reply::ok(rows.into_iter().map(|row| channel(caller.scope(), row)).collect()))
}

/// `GET /v1/channels/:name`.
#[tracing::instrument(level = "debug", name = "http.channels.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    CallerOrNode(caller): CallerOrNode,
    Path(name): Path<String>,
) -> Result<Reply<wire::ChannelDetails>, ApiError> {
    let row = engine.channel_by_name(caller.scope(), &name).await?;
    let members = engine.channel_members(caller.scope(), row.channel_id).await?;
    Ok(Reply::ok(wire::ChannelDetails {
        channel: channel(caller.scope(), row),
        members: members.into_iter().map(member).collect(),
    }))
}

/// `PATCH /v1/channels/:name`.
#[tracing::instrument(level = "debug", name = "http.channels.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    Body(body): Body<wire::UpdateChannelBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let change = ChannelChange { topic: body.topic, metadata: body.metadata.map(Value::Object) };
    let row = engine.update_channel(caller.scope(), &name, &change).await?;
    Ok(Reply::ok(channel(caller.scope(), row)))
}

/// `PATCH /v1/channels/:name/topic`.
#[tracing::instrument(level = "debug", name = "http.channels.set_topic", skip_all)]
pub async fn set_topic(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    Body(body): Body<wire::TopicBody>,
) -> Result<Reply<wire::Channel>, ApiError> {
    let change = ChannelChange { topic: Some(Some(body.topic)), metadata: None };
    let row = engine.update_channel(caller.scope(), &name, &change).await?;
    Ok(Reply::ok(channel(caller.scope(), row)))
}

/// `DELETE /v1/channels/:name` archives it.
#[tracing::instrument(level = "debug", name = "http.channels.archive", skip_all)]
pub async fn archive(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.archive_channel(caller.scope(), &name).await?;
    Ok(NoContent)
}

/// `POST /v1/channels/:name/join`.
#[tracing::instrument(level = "debug", name = "http.channels.join", skip_all)]
pub async fn join(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<Reply<wire::Joined>, ApiError> {
    let (channel, already_member) = engine.join_channel(&caller, &name).await?;
    Ok(Reply::ok(wire::Joined { channel, agent_id: caller.agent_id, already_member }))
}

/// `POST /v1/channels/:name/leave`.
#[tracing::instrument(level = "debug", name = "http.channels.leave", skip_all)]
pub async fn leave(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<NoContent, ApiError> {
    engine.leave_channel(&caller, &name).await?;
    Ok(NoContent)
}

/// `POST /v1/channels/:name/invite`.
#[tracing::instrument(level = "debug", name = "http.channels.invite", skip_all)]
pub async fn invite(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(name): Path<String>,
    Body(body): Body<wire::InviteBody>,
) -> Result<Reply<wire::Invited>, ApiError> {
    let channel = engine.invite(&caller, &name, &body.agent_name).await?;
    Ok(Reply::ok(wire::Invited { channel, agent: body.agent_name }))
}

/// `GET /v1/channels/:name/members`.
#[tracing::instrument(level = "debug", name = "http.channels.members", skip_all)]
pub async fn members(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
) -> Result<Reply<Vec<wire::Member>>, ApiError> {
    let row = engine.channel_by_name(caller.scope(), &name).await?;
    let members = engine.channel_members(caller.scope(), row.channel_id).await?;
    Ok(Reply::ok(members.into_iter().map(member).collect()))
}

/// `POST /v1/channels/:name/mute`.
#[tracing::instrument(level = "debug", name = "http.channels.mute", skip_all)]
pub async fn mute(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(name): Path<String>,
) -> Result<Reply<wire::Muted>, ApiError> {
    set_muted(&engine, &caller, &name, true).await
}

/// `POST /v1/channels/:name/unmute`.
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
    let channel = engine.set_muted(caller, name, muted).await?;
    Ok(Reply::ok(wire::Muted { channel, agent_id: caller.agent_id, muted }))
}

fn channel(scope: WorkspaceScope, row: ChannelRow) -> wire::Channel {
    wire::Channel {
        id: row.channel_id,
        workspace_id: scope.workspace_id(),
        name: row.name,
        channel_type: 0,
        topic: row.topic,
        metadata: row.metadata,
        created_by: row.created_by,
        created_at: row.created_at.into(),
        is_archived: row.archived_at.is_some(),
        member_count: row.member_count,
    }
}

fn member(row: MemberRow) -> wire::Member {
    wire::Member {
        agent_id: row.agent_id,
        agent_name: row.agent_name,
        role: row.role,
        joined_at: row.joined_at.into(),
        is_muted: row.muted,
    }
}
