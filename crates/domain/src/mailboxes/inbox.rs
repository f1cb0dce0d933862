//! Inbox of an agent: unread channels, unread mentions and reactions to its messages. Read by the store, shown by the
//! inbox route.

use chrono::{DateTime, Utc};

use crate::{ChannelId, ConversationId, MessageId};

/// Channel or conversation of a member, unless it is archived, with the member's last-read pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ReadPointer {
    pub channel_id: ChannelId,
    pub name: String,
    /// `None` for a channel.
    pub conversation_id: Option<ConversationId>,
    /// Id of the newest message read.
    pub read_id: MessageId,
}

/// Unread messages in a channel or conversation: those of others above a last-read pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Unread {
    /// At most [`MAX_UNREAD`](crate::channels::MAX_UNREAD).
    pub count: i64,
    /// The oldest one that is counted.
    pub oldest_id: Option<MessageId>,
    /// The newest one; the fields below are its own.
    pub newest_id: Option<MessageId>,
    pub newest_from: Option<String>,
    /// Bytes of its text.
    pub newest_bytes: Option<i32>,
    pub newest_at: Option<DateTime<Utc>>,
}

/// Channel or conversation with unread messages.
#[derive(Debug, Clone)]
pub struct UnreadChannel {
    pub name: String,
    /// `None` for a channel.
    pub conversation_id: Option<ConversationId>,
    pub unread: Unread,
    /// Text of the newest one. Empty until it is read.
    pub newest_text: String,
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
