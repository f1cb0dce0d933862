//! Messages: reading, editing, marking as read. Answers are [`wire::Message`]; posts are in [`posting`] and [`batch`],
//! reactions in [`reactions`], readers in [`reading`], inbound webhooks in [`webhooks`].

pub mod batch;
pub mod posting;
pub mod reactions;
pub mod reading;
pub mod webhooks;

use axum::extract::State;
use relay_engine::{Engine, messages::edits::MessageUpdate};
use relay_wire::{envelope::Success, messages as wire};

use crate::{
    caller::{ActingAgent, Agent, ReaderOrAgent, WorkspaceKey, reads},
    envelope::Reply,
    error::ApiError,
    extract::{Body, Path, Query},
    list_reply::ListReply,
    routes::page,
};

/// Lists the messages of a channel, newest first, without replies.
#[utoipa::path(
    get, path = "/v1/channels/{name}/messages", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::PageQuery),
    responses((status = 200, body = Vec<wire::Message>), (status = 403, description = "insufficient_scope"), (status = 404, description = "channel_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.messages.of_channel", skip_all)]
pub async fn of_channel(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::MESSAGES }>,
    Path(name): Path<String>,
    Query(query): Query<wire::PageQuery>,
) -> Result<ListReply<wire::Message>, ApiError> {
    let messages = engine.messages().channel_messages(&caller, &name, page::parse_message_page(&query)?).await?;
    ListReply::list(messages.map(Into::into))
}

/// Lists the messages of a session, newest first.
///
/// A message belongs to the session that its author's binding to a node had when it was written, in channels and in
/// conversations.
#[utoipa::path(
    get, path = "/v1/sessions/{session_ref}/messages", tag = "messages",
    security(("workspace_key" = [])), params(wire::PageQuery),
    responses((status = 200, body = Vec<wire::Message>)),
)]
#[tracing::instrument(level = "debug", name = "http.messages.of_session", skip_all)]
pub async fn of_session(
    State(engine): State<Engine>,
    caller: WorkspaceKey,
    Path(session_ref): Path<String>,
    Query(query): Query<wire::PageQuery>,
) -> Result<ListReply<wire::Message>, ApiError> {
    let page = page::parse_message_page(&query)?;
    let messages = engine.messages().of_session(caller.scope, &session_ref, page).await?;
    ListReply::list(messages.map(Into::into))
}

/// Shows a message. A message of a conversation is visible to its participants only.
#[utoipa::path(
    get, path = "/v1/messages/{id}", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses((status = 200, body = wire::Message), (status = 403, description = "insufficient_scope"), (status = 404, description = "message_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.messages.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::MESSAGE }>,
    Path(id): Path<String>,
) -> Result<Reply<wire::Message>, ApiError> {
    let (message, memory) = engine.messages().message(&caller, &id).await?;
    Ok(Reply::ok(message.into()).holding(memory))
}

/// Shows a thread, its replies oldest first.
#[utoipa::path(
    get, path = "/v1/messages/{id}/replies", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])), params(wire::PageQuery),
    responses((status = 200, body = wire::Thread), (status = 403, description = "insufficient_scope"), (status = 404, description = "message_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.messages.replies", skip_all)]
pub async fn replies(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::THREADS }>,
    Path(id): Path<String>,
    Query(query): Query<wire::PageQuery>,
) -> Result<ListReply<wire::Message>, ApiError> {
    let thread = engine.messages().thread(&caller, &id, page::parse_message_page(&query)?).await?;
    let mut messages = thread.map(wire::Message::from);
    // The engine returns the message before its replies.
    let parent = messages.first.rows.remove(0);
    ListReply::framed(&Success::new(wire::Thread { parent, replies: Vec::new() }), messages)
}

/// Edits a message of the caller. Its recipients stay the same.
#[utoipa::path(
    patch, path = "/v1/messages/{id}", tag = "messages",
    security(("agent_token" = [])), request_body = wire::UpdateMessageBody,
    responses(
        (status = 200, body = wire::Message),
        (status = 403, description = "agent_token_required, forbidden"),
        (status = 404, description = "message_not_found"),
        (status = 413, description = "payload_too_large"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.update", skip_all)]
pub async fn update(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    Body(body): Body<wire::UpdateMessageBody>,
) -> Result<Reply<wire::Message>, ApiError> {
    let update = MessageUpdate { text: body.text, blocks: body.blocks, data: body.data };
    Ok(Reply::ok(engine.messages().update(&caller, &id, &update).await?.into()))
}

/// Marks a message as read by the caller, and its delivery as acknowledged.
///
/// Brokers call it for everything they display, whether it is a message or not.
#[utoipa::path(
    post, path = "/v1/messages/{id}/read", tag = "messages",
    security(("agent_token" = [])),
    responses((status = 200, body = wire::Read), (status = 404, description = "message_not_found")),
)]
#[tracing::instrument(level = "debug", name = "http.messages.read", skip_all)]
pub async fn read(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<Reply<wire::Read>, ApiError> {
    let (message, receipt) = engine.messages().mark_read(&caller, &id).await?;
    Ok(Reply::ok(wire::Read {
        message_id: message.to_string(),
        agent_id: caller.agent_id.to_string(),
        read_at: receipt.read_at.into(),
    }))
}
