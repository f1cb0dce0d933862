//! Direct-message conversations: listing, reading, groups and participants. `messages::posting` posts to them.

use axum::{extract::State, http::StatusCode};
use relay_domain::channels::{
    ChannelKind, ListedConversation, MAX_CONVERSATION_LIMIT, MAX_LISTED_CONVERSATIONS, WorkspaceConversation,
    client_channel_id,
};
use relay_engine::{
    Engine,
    channels::{all_conversations::ALL_CONVERSATIONS_PAGE, conversations::CreatedGroup},
};
use relay_wire::{
    channels::conversation as wire,
    envelope::{Paged, Success},
    messages::{ConversationMessage, PageQuery},
};

use crate::{
    caller::{ActingAgent, Agent, Reader, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, KeyedBody, Path, Query},
    list_reply::ListReply,
    openapi::IdempotencyKey,
    origin_client::OriginClient,
    routes::page,
};

/// Lists the caller's conversations, most recently active first.
#[utoipa::path(
    get, path = "/v1/dm/conversations", tag = "direct messages",
    security(("agent_token" = [])), params(wire::ConversationsQuery),
    responses((status = 200, body = Vec<wire::Conversation>)),
)]
#[tracing::instrument(level = "debug", name = "http.dms.conversations", skip_all)]
pub async fn conversations(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Query(query): Query<wire::ConversationsQuery>,
    client: OriginClient,
) -> Result<ListReply<wire::Conversation>, ApiError> {
    let names_only = client.takes_conversations_as_names();
    let limit = match query.limit.as_deref() {
        None => MAX_LISTED_CONVERSATIONS,
        given => page::parse_strict_limit(given, (MAX_CONVERSATION_LIMIT, MAX_CONVERSATION_LIMIT))?,
    };
    let listed = engine.channels().conversations(&caller, limit).await?;
    ListReply::list(listed.map(move |row| to_conversation(row, names_only)))
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
) -> Result<ListReply<ConversationMessage>, ApiError> {
    let messages = engine.channels().conversation_messages(&caller, &id, page::parse_message_page(&query)?).await?;
    ListReply::list(messages.map(Into::into))
}

/// Creates a group conversation of the caller and others.
///
/// A non-empty `text` becomes its first message.
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
) -> Result<Reply<wire::StoredGroup>, ApiError> {
    match engine.messages().create_group(&caller, &body, key.as_ref()).await? {
        CreatedGroup::Created(data) => Ok(Reply::created(data)),
        CreatedGroup::Replayed(replay) => {
            let status = StatusCode::from_u16(replay.status).unwrap_or(StatusCode::CREATED);
            Ok(Reply::with_status(status, wire::StoredGroup(replay.data)).replayed(true))
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
    let already_member = engine.channels().add_participant(&caller, &id, &body.agent_name).await?;
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
    engine.channels().remove_participant(&caller, &id, &name).await?;
    Ok(NoContent)
}

/// Lists all conversations of the workspace, newest first.
///
/// The response has `cursor {next, has_more}` beside `data`: pass `next` as `cursor` to get the next page.
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
) -> Result<ListReply<wire::AnyConversation>, ApiError> {
    let limit = page::parse_limit(query.limit.as_deref(), ALL_CONVERSATIONS_PAGE)?;
    let page = engine.channels().all_conversations(&caller, query.cursor.as_deref(), limit).await?;
    let empty = Paged::<wire::AnyConversation>::new(Vec::new(), page.next);
    ListReply::framed(&empty, page.items.map(to_any_conversation))
}

/// Lists the messages of any conversation, newest first.
///
/// With `page=1` the response is `{messages, next_before, exhausted}` instead.
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
) -> Result<ListReply<ConversationMessage>, ApiError> {
    let paged = query.page.is_some_and(|page| page == "1" || page == "true");
    let page = page::parse_message_page(&PageQuery { limit: query.limit, before: query.before, after: query.after })?;
    let (messages, next_before) = engine.channels().any_conversation_messages(&caller, &id, page).await?;
    let messages = messages.map(ConversationMessage::from);
    if !paged {
        return ListReply::list(messages);
    }
    let next_before = next_before.map(|id| id.to_string());
    let page = wire::MessagesPage { messages: Vec::new(), exhausted: next_before.is_none(), next_before };
    ListReply::framed(&Success::new(page), messages)
}

fn to_any_conversation(row: WorkspaceConversation) -> wire::AnyConversation {
    wire::AnyConversation {
        channel_id: client_channel_id(row.channel_id, Some(row.conversation_id.as_str())),
        id: row.conversation_id.to_string(),
        kind: conversation_type(row.channel_kind),
        name: row.title,
        participants: row.participants,
        last_message: row.last_message.map(|last| wire::AnyLastMessage {
            text: last.text,
            agent_id: last.agent_id.to_string(),
            agent_name: last.agent_name,
            created_at: last.created_at.into(),
        }),
        message_count: row.message_count,
        created_at: row.created_at.into(),
    }
}

const fn conversation_type(kind: ChannelKind) -> &'static str {
    match kind {
        ChannelKind::Direct => "1:1",
        ChannelKind::Channel | ChannelKind::Group => "group",
    }
}

fn to_conversation(row: ListedConversation, names_only: bool) -> wire::Conversation {
    let participants = row.participant_ids.iter().zip(row.participant_names).map(|(id, agent_name)| {
        if names_only {
            wire::ShownParticipant::Name(agent_name)
        } else {
            wire::ShownParticipant::Agent(wire::Participant { agent_id: id.to_string(), agent_name })
        }
    });
    let last_message = row.last_message.map(|last| {
        if names_only {
            return wire::ShownLastMessage::Text(last.text);
        }
        wire::ShownLastMessage::Message(wire::LastMessage {
            id: last.message_id.to_string(),
            text: last.text,
            agent_id: Some(last.agent_id.to_string()),
            agent_name: Some(last.agent_name),
            agent_type: Some(last.agent_kind.into()),
            created_at: last.created_at.into(),
        })
    });
    let own = row.conversation;
    wire::Conversation {
        channel_id: client_channel_id(own.channel_id, Some(own.conversation_id.as_str())),
        id: own.conversation_id.to_string(),
        kind: conversation_type(own.channel_kind),
        name: own.title,
        participants: participants.collect(),
        last_message,
        unread_count: row.unread_count,
        created_at: own.created_at.into(),
    }
}
