//! Posting: to channels, threads and conversations.

use axum::extract::State;
use relay_domain::{MessageId, delivery::Mode};
use relay_engine::{
    Engine, EngineError, render,
    send::{Draft, Posted},
};
use relay_wire::message::{PostBody, PostMode};
use serde_json::{Value, json};

use crate::{
    caller::{ActingAgent, Sender},
    envelope::Reply,
    error::ApiError,
    extract::{KeyedBody, Path},
};

/// `POST /v1/channels/:name/messages`: by an agent, or by a node for one of its agents.
#[tracing::instrument(level = "debug", name = "http.messages.post", skip_all)]
pub async fn to_channel(
    State(engine): State<Engine>,
    caller: Sender,
    Path(name): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Value>, ApiError> {
    let from = body.from.clone();
    let posted = match caller {
        Sender::Agent(_) if from.is_some() => return Err(EngineError::FromNotAllowed.into()),
        Sender::Agent(agent) => engine.post_to_channel(&agent, &name, draft(body), key).await?,
        Sender::Node(node) => {
            let from = from.ok_or(EngineError::FromRequired)?;
            engine.post_as_node(&node, &from, &name, draft(body), key).await?
        }
    };
    Ok(Reply::created(render::fresh(&posted.message)).replayed(posted.replayed))
}

/// `POST /v1/messages/:id/replies`.
#[tracing::instrument(level = "debug", name = "http.messages.reply", skip_all)]
pub async fn reply(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Value>, ApiError> {
    let parent: MessageId = id.parse().map_err(|_| EngineError::MessageNotFound)?;
    let posted = engine.reply(&caller, parent, draft(body), key).await?;
    Ok(Reply::created(render::fresh(&posted.message)).replayed(posted.replayed))
}

/// `POST /v1/dm`.
#[tracing::instrument(level = "debug", name = "http.dms.send", skip_all)]
pub async fn dm(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Value>, ApiError> {
    let to = body.to.clone().ok_or_else(|| ApiError::invalid_request("to is required"))?;
    let posted = engine.send_dm(&caller, &to, draft(body), key).await?;
    Ok(Reply::created(in_conversation(&posted)).replayed(posted.replayed))
}

/// `POST /v1/dm/:conversation_id/messages`.
#[tracing::instrument(level = "debug", name = "http.dms.post", skip_all)]
pub async fn to_conversation(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Value>, ApiError> {
    let posted = engine.post_to_conversation(&caller, &id, draft(body), key).await?;
    Ok(Reply::created(in_conversation(&posted)).replayed(posted.replayed))
}

fn draft(body: PostBody) -> Draft {
    Draft {
        text: body.text,
        blocks: body.blocks.filter(|blocks| !blocks.is_null()),
        data: body.data.filter(|data| !data.is_null()),
        attachments: body.attachments.unwrap_or_default(),
        mode: match body.mode {
            Some(PostMode::Steer) => Mode::Steer,
            Some(PostMode::Wait) | None => Mode::Wait,
        },
        content_type: body.content_type,
    }
}

/// The nested message, and the flat copies that older clients read.
fn in_conversation(posted: &Posted) -> Value {
    let message = &posted.message;
    let mut answer = json!({
        "conversation_id": message.conversation_id,
        "message": render::in_conversation(message),
        "created_at": render::timestamp(message.created_at),
        "id": message.message_id.to_string(),
        "agent_id": message.agent_id.to_string(),
        "from_agent_id": message.agent_id.to_string(),
        "text": message.text,
        "injection_mode": message.mode,
        "attachments": message.attachments,
    });
    if let (Some(to), Some(answer)) = (&posted.to, answer.as_object_mut()) {
        answer.insert("to".to_owned(), json!(to));
    }
    answer
}
