//! Inbox of an agent.

use axum::extract::State;
use relay_domain::mailboxes::inbox::UnreadChannel;
use relay_engine::{Engine, mailboxes::inbox::INBOX_PAGE};
use relay_wire::mailboxes::inbox as wire;

use crate::{
    caller::Agent, envelope::Reply, error::ApiError, extract::Query, origin_client::OriginClient, routes::page,
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
    // Author and time are those of the newest message, which a conversation with unread messages has.
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
