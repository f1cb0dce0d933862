//! Inbox of an agent, reactions, and read positions.

use axum::extract::State;
use relay_domain::mailboxes::inbox::UnreadChannel;
use relay_engine::{Engine, mailboxes::inbox::INBOX_PAGE};
use relay_wire::{mailboxes::inbox as wire, messages::ReactionGroup};

use crate::{
    caller::{Agent, Caller, ReaderOrAgent, reads},
    envelope::{NoContent, Reply},
    error::ApiError,
    extract::{Body, Path, Query},
    origin_client::OriginClient,
    routes::page,
};

/// Shows the caller's unread messages, and the newest reactions to its messages.
///
/// Derived from last-read pointers, which advance when messages are read or deliveries are acked.
#[utoipa::path(
    get, path = "/v1/inbox", operation_id = "inbox", tag = "messages",
    security(("agent_token" = [])), params(wire::InboxQuery),
    responses(
        (status = 200, body = wire::Inbox),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.inbox.get", skip_all)]
pub async fn get(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    client: OriginClient,
    Query(query): Query<wire::InboxQuery>,
) -> Result<Reply<wire::Inbox>, ApiError> {
    let inbox = engine.mailboxes().inbox(&caller, page::parse_limit(query.limit.as_deref(), INBOX_PAGE)?).await?;
    let shown = wire::Inbox {
        unread_channels: inbox
            .channels
            .into_iter()
            .map(|place| wire::UnreadChannel { channel_name: place.name, unread_count: place.unread.count })
            .collect(),
        mentions: inbox
            .mentions
            .into_iter()
            .map(|row| wire::Mention {
                id: row.message_id.to_string(),
                channel_name: row.channel_name,
                agent_name: row.agent_name,
                text: row.text,
                created_at: row.created_at.into(),
            })
            .collect(),
        unread_dms: inbox.conversations.into_iter().filter_map(|place| to_unread_conversation(place, client)).collect(),
        recent_reactions: inbox
            .reactions
            .into_iter()
            .map(|row| wire::ReceivedReaction {
                message_id: row.message_id.to_string(),
                channel_name: row.channel_name,
                emoji: row.emoji,
                agent_name: row.agent_name,
                created_at: row.created_at.into(),
            })
            .collect(),
    };
    Ok(Reply::ok(shown).holding(inbox.memory))
}

fn to_unread_conversation(place: UnreadChannel, client: OriginClient) -> Option<wire::UnreadConversation> {
    let unread = place.unread;
    let last_message = unread.newest_id.map(|id| {
        let text = place.newest_text;
        if client.takes_last_unread_as_text() {
            return wire::ShownUnread::Text(text);
        }
        let created_at = unread.newest_at.unwrap_or_default().into();
        wire::ShownUnread::Message(wire::UnreadMessage { id: id.to_string(), text, created_at })
    });
    Some(wire::UnreadConversation {
        conversation_id: place.conversation_id?.to_string(),
        from: unread.newest_from.unwrap_or_default(),
        unread_count: unread.count,
        last_message,
    })
}

/// Adds a reaction to a message. Repeating it has no effect.
#[utoipa::path(
    post, path = "/v1/messages/{id}/reactions", tag = "messages",
    security(("agent_token" = [])), request_body = wire::ReactBody,
    responses(
        (status = 201, body = wire::Reaction),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.add", skip_all)]
pub async fn react(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path(id): Path<String>,
    Body(body): Body<wire::ReactBody>,
) -> Result<Reply<wire::Reaction>, ApiError> {
    let reaction = engine.messages().add_reaction(&caller, &id, &body.emoji).await?;
    Ok(Reply::created(wire::Reaction {
        id: reaction.id.to_string(),
        message_id: reaction.message_id.to_string(),
        agent_name: caller.name.to_string(),
        emoji: reaction.emoji,
        created_at: reaction.created_at.into(),
    }))
}

/// Removes the caller's reaction; a missing one is not an error.
#[utoipa::path(
    delete, path = "/v1/messages/{id}/reactions/{emoji}", tag = "messages",
    security(("agent_token" = [])),
    responses(
        (status = 204),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.remove", skip_all)]
pub async fn unreact(
    State(engine): State<Engine>,
    Agent(caller): Agent,
    Path((id, emoji)): Path<(String, String)>,
) -> Result<NoContent, ApiError> {
    engine.messages().remove_reaction(&caller, &id, &emoji).await?;
    Ok(NoContent)
}

/// Lists the reactions to a message, the earliest emoji first.
#[utoipa::path(
    get, path = "/v1/messages/{id}/reactions", tag = "messages",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<ReactionGroup>),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.reactions.list", skip_all)]
pub async fn reactions(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::REACTIONS }>,
    Path(id): Path<String>,
) -> Result<Reply<Vec<ReactionGroup>>, ApiError> {
    let counts = engine.messages().reactions(&caller, &id).await?;
    Ok(Reply::ok(
        counts
            .into_iter()
            .map(|row| ReactionGroup { emoji: row.emoji, count: row.count, agents: row.agents })
            .collect(),
    ))
}

/// Lists the readers of a message, each once, in the order of reading.
#[utoipa::path(
    get, path = "/v1/messages/{id}/readers", tag = "messages",
    security(("workspace_key" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<wire::Reader>),
        (status = 404, description = "message_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.messages.readers", skip_all)]
pub async fn readers(
    State(engine): State<Engine>,
    Caller(caller): Caller,
    Path(id): Path<String>,
) -> Result<Reply<Vec<wire::Reader>>, ApiError> {
    let readers = engine.messages().readers(&caller, &id).await?;
    Ok(Reply::ok(
        readers
            .into_iter()
            .map(|row| wire::Reader {
                agent_id: row.agent_id.to_string(),
                agent_name: row.agent_name,
                read_at: row.read_at.into(),
            })
            .collect(),
    ))
}

/// Lists the read position of each member of a channel.
#[utoipa::path(
    get, path = "/v1/channels/{name}/read-status", tag = "channels",
    security(("workspace_key" = []), ("observer_token" = []), ("agent_token" = [])),
    responses(
        (status = 200, body = Vec<wire::ReadPosition>),
        (status = 404, description = "channel_not_found"),
    ),
)]
#[tracing::instrument(level = "debug", name = "http.channels.read_status", skip_all)]
pub async fn read_status(
    State(engine): State<Engine>,
    ReaderOrAgent(caller): ReaderOrAgent<{ reads::MESSAGES }>,
    Path(name): Path<String>,
) -> Result<Reply<Vec<wire::ReadPosition>>, ApiError> {
    let positions = engine.messages().read_status(&caller, &name).await?;
    Ok(Reply::ok(
        positions
            .into_iter()
            .map(|row| wire::ReadPosition {
                agent_name: row.agent_name,
                last_read_id: row.last_read_id.map(|id| id.to_string()),
                last_read_at: row.last_read_at.map(Into::into),
            })
            .collect(),
    ))
}
