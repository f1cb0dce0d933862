//! Inbox of an agent: unread channels, unread mentions and reactions to its messages. Read by the store, shown by the
//! inbox route.

use chrono::{DateTime, Utc};

use crate::{ChannelId, ConversationId, MessageId};

/// Unread state of a channel or conversation for one member.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct UnreadChannel {
    pub channel_id: ChannelId,
    pub name: String,
    /// `None` for a channel.
    pub conversation_id: Option<ConversationId>,
    /// Last-read pointer: id of the newest message read.
    pub read_id: MessageId,
    /// Messages of others above it, at most [`MAX_UNREAD`](crate::channels::MAX_UNREAD).
    pub unread_count: i64,
    /// The newest unread message of others; the fields below are its own.
    pub newest_id: Option<MessageId>,
    pub newest_from: Option<String>,
    /// Empty until it is read.
    #[cfg_attr(feature = "sqlx", sqlx(skip))]
    pub newest_text: String,
    /// Bytes of that text.
    pub newest_bytes: Option<i32>,
    pub newest_at: Option<DateTime<Utc>>,
}

/// Unread message that mentions the agent.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Mention {
    pub message_id: MessageId,
    pub channel_name: String,
    pub agent_name: String,
    /// Empty until it is read.
    #[cfg_attr(feature = "sqlx", sqlx(skip))]
    pub text: String,
    /// Bytes of the text.
    pub text_bytes: i32,
    pub created_at: DateTime<Utc>,
}

/// Reaction of another agent to one of the agent's messages.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ReceivedReaction {
    pub message_id: MessageId,
    pub channel_name: String,
    pub emoji: String,
    pub agent_name: String,
    pub created_at: DateTime<Utc>,
}
