//! Search of messages. Main type: [`FoundMessage`]; read by the store, shown by the search route.

use chrono::{DateTime, Utc};

use crate::{AgentId, ChannelId, ConversationId, MessageId};

/// Message that matches a search.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct FoundMessage {
    pub message_id: MessageId,
    pub channel_id: ChannelId,
    pub channel_name: String,
    /// Public id of the conversation; `None` for a channel.
    pub conversation_id: Option<ConversationId>,
    pub agent_id: AgentId,
    /// The author's name at that time.
    pub agent_name: String,
    /// Empty until it is read.
    pub text: String,
    pub created_at: DateTime<Utc>,
    /// Root of the thread.
    pub thread_id: Option<MessageId>,
    /// Rank: a greater score is a better match.
    #[cfg_attr(feature = "sqlx", sqlx(skip))]
    pub score: f32,
}
