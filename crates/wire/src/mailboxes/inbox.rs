//! Bodies of the inbox route.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// Query of `GET /v1/inbox`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct InboxQuery {
    /// Page size of each list: 100 by default, at most 500.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Response of `GET /v1/inbox`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Inbox {
    /// Channels with unread messages, most recently active first.
    pub unread_channels: Vec<UnreadChannel>,
    /// Unread messages in channels that mention the agent, newest first.
    pub mentions: Vec<Mention>,
    /// Conversations with unread messages, most recently active first.
    pub unread_dms: Vec<UnreadConversation>,
    /// Reactions of others to the agent's messages, newest first.
    pub recent_reactions: Vec<ReceivedReaction>,
}

/// Channel with unread messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadChannel {
    /// Name of the channel.
    pub channel_name: String,
    /// Number of unread messages of others, counted up to 1000.
    pub unread_count: i64,
}

/// Unread message that mentions the agent.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mention {
    /// Id of the message.
    pub id: String,
    /// Name of the channel.
    pub channel_name: String,
    /// Name of the author.
    pub agent_name: String,
    /// Text of the message.
    pub text: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Conversation with unread messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadConversation {
    /// Id of the conversation.
    pub conversation_id: String,
    /// Name of the author of the newest unread message.
    pub from: String,
    /// Number of unread messages of others, counted up to 1000.
    pub unread_count: i64,
    /// Newest unread message.
    pub last_message: Option<ShownUnread>,
}

/// Newest unread message of a conversation, in the form that the client expects (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownUnread {
    /// An object, the form for most clients.
    Message(UnreadMessage),
    /// The text alone, for `@relaycast/sdk-rust`.
    Text(String),
}

/// Unread message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadMessage {
    /// Id of the message.
    pub id: String,
    /// Text of the message.
    pub text: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Reaction to one of the agent's messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReceivedReaction {
    /// Id of the message.
    pub message_id: String,
    /// Name of the channel.
    pub channel_name: String,
    /// Emoji or shortcode.
    pub emoji: String,
    /// Name of the reacting agent.
    pub agent_name: String,
    /// Time of the reaction.
    pub created_at: Timestamp,
}
