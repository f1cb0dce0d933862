//! Reading messages, and marking them as read.

use axum::extract::State;
use relay_engine::Engine;
use relay_wire::message as wire;
use serde_json::Value;

use crate::{
    caller::{Agent, Caller},
    envelope::Reply,
    error::ApiError,
    extract::{Path, Query},
    routes::page,
};

/// `GET /v1/channels/:name/messages`: root messages, newest first.
#[tracing::instrument(level = "debug", name = "http.messages.of_channel", skip_all)]
pub async fn of_channel(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(name): Path<String>,
    Query(query): Query<wire::PageQuery>,
) -> Result<Reply<Vec<Value>>, ApiError> {
    Ok(Reply::ok(engine.channel_messages(caller.scope(), &name, page::messages(&query)?).await?))
}

/// `GET /v1/messages/:id`.
#[tracing::instrument(level = "debug", name = "http.messages.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<Reply<Value>, ApiError> {
    Ok(Reply::ok(engine.message(&caller, &id).await?))
}

/// `GET /v1/messages/:id/replies`: the thread, oldest first.
#[tracing::instrument(level = "debug", name = "http.messages.replies", skip_all)]
pub async fn replies(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
    Query(query): Query<wire::PageQuery>,
) -> Result<Reply<wire::Thread>, ApiError> {
    let thread = engine.thread(&caller, &id, page::messages(&query)?).await?;
    Ok(Reply::ok(wire::Thread { parent: thread.parent, replies: thread.replies }))
}

/// `POST /v1/messages/:id/read`. Brokers send it for everything they show, whether it is a message or not.
#[tracing::instrument(level = "debug", name = "http.messages.read", skip_all)]
pub async fn read(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
) -> Result<Reply<wire::Read>, ApiError> {
    let (message, receipt) = engine.mark_read(&caller, &id).await?;
    Ok(Reply::ok(wire::Read {
        message_id: message.to_string(),
        agent_id: caller.agent_id.to_string(),
        read_at: receipt.read_at.into(),
    }))
}
