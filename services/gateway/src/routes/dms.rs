//! Direct-message conversations: listing, reading, groups and who takes part. Posting is in `send`.

use axum::{Json, extract::State, http::StatusCode};
use relay_domain::conversation::public_channel_id;
use relay_engine::{
    Engine,
    all_dms::{ALL_CONVERSATIONS_PAGE, AnyConversation},
    dms::{CreateGroup, CreatedGroup, ListedConversation},
    render,
};
use relay_wire::{
    dm as wire,
    envelope::Paged,
    field::Timestamp,
    message::{ConversationMessage, PageQuery},
};
use serde_json::{Value, json};

use crate::{
    caller::{ActingAgent, Agent, Reader, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path, Query},
    openapi::IdempotencyKey,
    origin_client::OriginClient,
    routes::page,
};

/// Lists the caller's conversations, the liveliest first.
#[utoipa::path(
    get, path = "/v1/dm/conversations", tag = "direct messages",
    security(("agent_token" = [])),
    responses((status = 200, body = Vec<wire::Conversation>)),
)]
#[tracing::instrument(level = "debug", name = "http.dms.conversations", skip_all)]
pub async fn conversations(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    client: OriginClient,
) -> Result<Reply<Vec<wire::Conversation>>, ApiError> {
    let names_only = client.takes_conversations_as_names();
    let listed = engine.conversations(&caller).await?;
    Ok(Reply::ok(listed.into_iter().map(|row| conversation(row, names_only)).collect()))
}

/// Lists the messages of a conversation of the caller, newest first.
#[utoipa::path(
    get, path = "/v1/dm/{id}/messages", tag = "direct messages",
    security(("agent_token" = [])), params(PageQuery),
    responses(
        (status = 200, body = Vec<ConversationMessage>),
        (status = 403, description = "forbidden"),
        (status = 404, description = "dm_conversation_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.messages", skip_all)]
pub async fn messages(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Query(query): Query<PageQuery>,
) -> Result<Reply<Vec<Value>>, ApiError> {
    Ok(Reply::ok(engine.conversation_messages(&caller, &id, page::messages(&query)?).await?))
}

/// Makes a group conversation of the caller and others.
///
/// A `text` that is not empty becomes its first message.
#[utoipa::path(
    post, path = "/v1/dm/group", tag = "direct messages",
    security(("agent_token" = [])), params(IdempotencyKey), request_body = wire::CreateGroupBody,
    responses(
        (status = 201, body = wire::Group),
        (status = 403, description = "agent_token_required"),
        (status = 404, description = "agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.create_group", skip_all)]
pub async fn create_group(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    KeyedBody { body, key }: KeyedBody<wire::CreateGroupBody>,
) -> Result<Reply<Value>, ApiError> {
    let request = CreateGroup { participants: body.participants, title: body.name, text: body.text };
    match engine.create_group(&caller, &request, key.as_ref()).await? {
        CreatedGroup::Made(data) => Ok(Reply::created(data)),
        CreatedGroup::Replayed(replay) => {
            let status = StatusCode::from_u16(replay.status).unwrap_or(StatusCode::CREATED);
            Ok(Reply::with_status(status, replay.data).replayed(true))
        }
    }
}

/// Adds an agent to a group conversation of the caller.
#[utoipa::path(
    post, path = "/v1/dm/{id}/participants", tag = "direct messages",
    security(("agent_token" = [])), request_body = wire::AddParticipantBody,
    responses(
        (status = 200, body = wire::AddedParticipant),
        (status = 403, description = "agent_token_required, forbidden"),
        (status = 404, description = "dm_conversation_not_found, agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.add_participant", skip_all)]
pub async fn add_participant(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path(id): Path<String>,
    Body(body): Body<wire::AddParticipantBody>,
) -> Result<Reply<wire::AddedParticipant>, ApiError> {
    let already_member = engine.add_participant(&caller, &id, &body.agent_name).await?;
    Ok(Reply::ok(wire::AddedParticipant { conversation_id: id, agent: body.agent_name, already_member }))
}

/// Removes an agent from a group conversation of the caller.
#[utoipa::path(
    delete, path = "/v1/dm/{id}/participants/{name}", tag = "direct messages",
    security(("agent_token" = [])),
    responses(
        (status = 204),
        (status = 403, description = "agent_token_required, forbidden"),
        (status = 404, description = "dm_conversation_not_found, agent_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.remove_participant", skip_all)]
pub async fn remove_participant(
    State(engine): State<Engine>,
    ActingAgent(caller): ActingAgent,
    Path((id, name)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.remove_participant(&caller, &id, &name).await?;
    Ok(NoContent)
}

/// Lists all conversations of the workspace, the youngest first.
///
/// The answer has `cursor {next, has_more}` beside `data`: give `next` as `cursor` to get the next page.
#[utoipa::path(
    get, path = "/v1/dm/conversations/all", tag = "direct messages",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::AllConversationsQuery),
    responses(
        (status = 200, body = Vec<wire::AnyConversation>),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.all", skip_all)]
pub async fn all(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::DMS }>,
    Query(query): Query<wire::AllConversationsQuery>,
) -> Result<Json<Paged<wire::AnyConversation>>, ApiError> {
    let limit = page::limit(query.limit.as_deref(), ALL_CONVERSATIONS_PAGE)?;
    let page = engine.all_conversations(&caller, query.cursor.as_deref(), limit).await?;
    Ok(Json(Paged::new(page.items.into_iter().map(any_conversation).collect(), page.next)))
}

/// Lists the messages of any conversation, newest first.
///
/// With `page=1` the answer is `{messages, next_before, exhausted}` instead.
#[utoipa::path(
    get, path = "/v1/dm/conversations/{id}/messages", tag = "direct messages",
    security(("workspace_key" = []), ("observer_token" = [])), params(wire::AnyMessagesQuery),
    responses(
        (status = 200, body = Vec<ConversationMessage>),
        (status = 404, description = "dm_conversation_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.dms.any_messages", skip_all)]
pub async fn any_messages(
    State(engine): State<Engine>,
    Reader(caller): Reader<{ reads::DMS }>,
    Path(id): Path<String>,
    Query(query): Query<wire::AnyMessagesQuery>,
) -> Result<Reply<Value>, ApiError> {
    let paged = query.page.is_some_and(|page| page == "1" || page == "true");
    let mut page = page::messages(&PageQuery { limit: query.limit, before: query.before, after: query.after })?;
    let limit = usize::try_from(page.limit).unwrap_or(usize::MAX);
    // One more tells whether there is a next page.
    page.limit += i64::from(paged);
    let mut rows = engine.any_conversation_messages(&caller, &id, page).await?;
    let exhausted = rows.len() <= limit;
    rows.truncate(limit);
    let messages: Vec<Value> = rows.iter().map(render::in_conversation).collect();
    if !paged {
        return Ok(Reply::ok(Value::Array(messages)));
    }
    let next_before = rows.last().filter(|_| !exhausted).map(|row| row.message_id.to_string());
    let page = wire::MessagesPage { messages, next_before, exhausted };
    // Strings, numbers and JSON values always encode.
    Ok(Reply::ok(serde_json::to_value(page).unwrap_or_default()))
}

fn any_conversation(row: AnyConversation) -> wire::AnyConversation {
    let last = row.last_text.zip(row.last_agent_id).zip(row.last_agent_name).zip(row.last_created_at);
    wire::AnyConversation {
        channel_id: public_channel_id(&row.conversation_id).unwrap_or_else(|| row.channel_id.to_string()),
        id: row.conversation_id,
        kind: if row.channel_type == 1 { "1:1" } else { "group" },
        name: row.title,
        participants: row.participants,
        last_message: last.map(|(((text, agent), agent_name), at)| wire::AnyLastMessage {
            text,
            agent_id: agent.to_string(),
            agent_name,
            created_at: at.into(),
        }),
        message_count: row.message_count,
        created_at: row.created_at.into(),
    }
}

fn conversation(row: ListedConversation, names_only: bool) -> wire::Conversation {
    let participants = row
        .participant_ids
        .iter()
        .zip(&row.participant_names)
        .map(
            |(id, name)| {
                if names_only { json!(name) } else { json!({ "agent_id": id.to_string(), "agent_name": name }) }
            },
        )
        .collect();
    let last_message = row.last_message_id.map(|id| {
        if names_only {
            return json!(row.last_text);
        }
        json!({
            "id": id.to_string(),
            "text": row.last_text,
            "agent_id": row.last_agent_id.map(|id| id.to_string()),
            "agent_name": row.last_agent_name,
            "agent_type": row.last_agent_type,
            "created_at": row.last_created_at.map(|at| Timestamp(at).to_string()),
        })
    });
    let own = row.conversation;
    wire::Conversation {
        channel_id: public_channel_id(&own.conversation_id).unwrap_or_else(|| own.channel_id.to_string()),
        id: own.conversation_id,
        kind: if own.channel_type == 1 { "1:1" } else { "group" },
        name: own.title,
        participants,
        last_message,
        unread_count: row.unread_count,
        created_at: own.created_at.into(),
    }
}
