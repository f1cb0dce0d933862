//! Bodies of the inbox, of reactions, and of who has read what.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::field::{Timestamp, present};

/// `GET /v1/inbox`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct InboxQuery {
    /// Channels, and conversations, at most: 100 unless given, never more than 500.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Answer to `GET /v1/inbox`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Inbox {
    /// Channels with unread messages, the newest first.
    pub unread_channels: Vec<UnreadChannel>,
    /// Unread messages in channels that name the agent, the newest first.
    pub mentions: Vec<Mention>,
    /// Conversations with unread messages, the newest first.
    pub unread_dms: Vec<UnreadConversation>,
    /// Reactions of others to the agent's messages, the newest first.
    pub recent_reactions: Vec<ReceivedReaction>,
}

/// A channel with unread messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadChannel {
    /// Its name.
    pub channel_name: String,
    /// Messages of others, counted up to 1000.
    pub unread_count: i64,
}

/// An unread message that names the agent.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mention {
    /// The message.
    pub id: String,
    /// Its channel.
    pub channel_name: String,
    /// Who wrote it.
    pub agent_name: String,
    /// Its text.
    pub text: String,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// A conversation with unread messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadConversation {
    /// The conversation.
    pub conversation_id: String,
    /// Who wrote the newest of them: the other one, where there are two.
    pub from: String,
    /// Messages of others, counted up to 1000.
    pub unread_count: i64,
    /// The newest of them.
    pub last_message: Option<ShownUnread>,
}

/// The newest unread message of a conversation, as the client understands it (`X-Relaycast-Origin-Client`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ShownUnread {
    /// An object, for all but one.
    Message(UnreadMessage),
    /// The text alone, for `@relaycast/sdk-rust`.
    Text(String),
}

/// An unread message.
#[derive(Debug, Serialize, ToSchema)]
pub struct UnreadMessage {
    /// The message.
    pub id: String,
    /// Its text.
    pub text: String,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// A reaction to one of the agent's messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReceivedReaction {
    /// The message.
    pub message_id: String,
    /// Its channel.
    pub channel_name: String,
    /// The reaction.
    pub emoji: String,
    /// Whose.
    pub agent_name: String,
    /// When.
    pub created_at: Timestamp,
}

/// `POST /v1/messages/:id/reactions`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReactBody {
    /// A shortcode or an emoji.
    pub emoji: String,
}

/// Answer to `POST /v1/messages/:id/reactions`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reaction {
    /// Its id.
    pub id: String,
    /// The message.
    pub message_id: String,
    /// Who reacted.
    pub agent_name: String,
    /// With what.
    pub emoji: String,
    /// Since when.
    pub created_at: Timestamp,
}

/// Somebody who has read a message.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reader {
    /// Who.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// When it first did.
    pub read_at: Timestamp,
}

/// How far a member has read a channel.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadPosition {
    /// The member.
    pub agent_name: String,
    /// The newest message that it has read.
    pub last_read_id: Option<String>,
    /// When it did.
    pub last_read_at: Option<Timestamp>,
}

/// `PATCH /v1/messages/:id`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateMessageBody {
    /// The text.
    #[serde(default)]
    pub text: Option<String>,
    /// Rich blocks; null removes them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Vec<Value>>)]
    pub blocks: Option<Option<Vec<Value>>>,
    /// Replaces the metadata; null empties it.
    #[serde(default, alias = "metadata", deserialize_with = "present")]
    #[schema(value_type = Option<Object>)]
    pub data: Option<Option<Map<String, Value>>>,
}
