//! Posting: to channels, threads and conversations.

use axum::extract::State;
use relay_domain::{MessageId, mailboxes::delivery::Mode, messages::ListedMessage};
use relay_engine::{
    Engine, EngineError,
    error::{InvalidInput, Missing},
    messages::posting::{Draft, Target},
};
use relay_wire::{
    channels::conversation,
    messages::{Message, PostBody, PostMode},
};

use crate::{
    caller::{ActingAgent, Sender},
    envelope::Reply,
    error::ApiError,
    extract::{KeyedBody, Path},
    openapi::IdempotencyKey,
};

/// Posts a message to a channel, as an agent or as a node for one of its agents.
///
/// Each member except the sender gets a delivery. The sender need not be a member. A node names in `from` the agent it
/// posts for.
#[utoipa::path(
    post, path = "/v1/channels/{name}/messages", tag = "messages",
    security(("agent_token" = []), ("node_token" = [])), params(IdempotencyKey), request_body = PostBody,
    responses(
        (status = 201, body = Message),
        (status = 400, description = "channel_archived, from_required, from_not_allowed, invalid_attachments"),
        (status = 403, description = "agent_token_required"),
        (status = 404, description = "channel_not_found, agent_not_found"),
        (status = 413, description = "payload_too_large"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.post", skip_all)]
pub async fn to_channel(
    State(engine): State<Engine>,
    caller: Sender,
    Path(name): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Message>, ApiError> {
    let from = body.from.clone();
    let posted = match caller {
        Sender::Agent(_) if from.is_some() => return Err(EngineError::Invalid(InvalidInput::FromNotAllowed).into()),
        Sender::Agent(agent) => engine.messages().post(&agent, Target::Channel(name), to_draft(body), key).await?,
        Sender::Node(node) => {
            let from = from.ok_or(EngineError::Invalid(InvalidInput::FromRequired))?;
            engine.messages().post_as_node(&node, &from, &name, to_draft(body), key).await?
        }
    };
    Ok(Reply::created(ListedMessage::from(posted.message).into()).replayed(posted.replayed))
}

/// Replies in the thread of a message.
///
/// A reply to a reply goes to the root of the thread.
#[utoipa::path(
    post, path = "/v1/messages/{id}/replies", tag = "messages",
    security(("agent_token" = [])), params(IdempotencyKey), request_body = PostBody,
    responses(
        (status = 201, body = Message),
        (status = 400, description = "channel_archived, invalid_attachments"),
        (status = 403, description = "agent_token_required"),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.reply", skip_all)]
pub async fn reply(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<Message>, ApiError> {
    let parent: MessageId = id.parse().map_err(|_| EngineError::NotFound(Missing::Message))?;
    let posted = engine.messages().post(&caller, Target::Thread(parent), to_draft(body), key).await?;
    Ok(Reply::created(ListedMessage::from(posted.message).into()).replayed(posted.replayed))
}

/// Sends a direct message.
///
/// `to` or `address` is required. `to` is the name of an agent, with or without `@`; `@self` keeps a note without a
/// delivery.
#[utoipa::path(
    post, path = "/v1/dm", tag = "direct messages",
    security(("agent_token" = [])), params(IdempotencyKey),
    request_body(content = PostBody, example = json!({ "to": "bob", "text": "the build is green" })),
    responses(
        (status = 201, body = conversation::SentMessage),
        (status = 400, description = "invalid_attachments, invalid_address, ambiguous_address"),
        (status = 403, description = "agent_token_required"),
        (status = 404, description = "agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.send", skip_all)]
pub async fn dm(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<conversation::SentMessage>, ApiError> {
    let posted = match (body.to.clone(), body.address.clone()) {
        (Some(to), None) => engine.messages().post(&caller, Target::Agent(to), to_draft(body), key).await?,
        (None, Some(address)) => engine.messages().send_to_address(&caller, &address, to_draft(body), key).await?,
        _ => return Err(ApiError::invalid_request("exactly one of to and address is required")),
    };
    Ok(Reply::created(conversation::SentMessage::new(posted.message, posted.to)).replayed(posted.replayed))
}

/// Sends a direct message to an address.
///
/// An address is `name@machine`, as agents show it. The body has neither `to` nor `address`.
#[utoipa::path(
    post, path = "/v1/to/{address}", tag = "direct messages",
    security(("agent_token" = [])), params(IdempotencyKey),
    request_body(content = PostBody, example = json!({ "text": "the build is green" })),
    responses(
        (status = 201, body = conversation::SentMessage),
        (status = 400, description = "invalid_attachments, invalid_address, ambiguous_address"),
        (status = 403, description = "agent_token_required"),
        (status = 404, description = "address_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.send_to_address", skip_all)]
pub async fn to_address(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(address): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<conversation::SentMessage>, ApiError> {
    if body.to.is_some() || body.address.is_some() {
        return Err(ApiError::invalid_request("the recipient is in the path: leave out to and address"));
    }
    let posted = engine.messages().send_to_address(&caller, &address, to_draft(body), key).await?;
    Ok(Reply::created(conversation::SentMessage::new(posted.message, posted.to)).replayed(posted.replayed))
}

/// Posts a message to a conversation of the caller.
#[utoipa::path(
    post, path = "/v1/dm/{id}/messages", tag = "direct messages",
    security(("agent_token" = [])), params(IdempotencyKey), request_body = PostBody,
    responses(
        (status = 201, body = conversation::SentMessage),
        (status = 400, description = "invalid_attachments"),
        (status = 403, description = "agent_token_required, forbidden"),
        (status = 404, description = "dm_conversation_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.post", skip_all)]
pub async fn to_conversation(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    KeyedBody { body, key }: KeyedBody<PostBody>,
) -> Result<Reply<conversation::SentMessage>, ApiError> {
    let posted = engine.messages().post(&caller, Target::Conversation(id), to_draft(body), key).await?;
    Ok(Reply::created(conversation::SentMessage::new(posted.message, posted.to)).replayed(posted.replayed))
}

pub(super) fn to_draft(body: PostBody) -> Draft {
    Draft {
        text: body.text,
        // Some clients send null for an absent field, and a repetition under the same key may differ in that.
        blocks: body.blocks.filter(|blocks| !blocks.is_null()),
        data: body.data.filter(|data| !data.is_null()),
        attachments: body.attachments.unwrap_or_default(),
        mode: match body.mode {
            Some(PostMode::Steer) => Mode::Steer,
            Some(PostMode::Wait) | None => Mode::Wait,
        },
        content_type: body.content_type,
        ttl_ms: body.ttl_ms,
    }
}
