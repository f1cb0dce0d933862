//! Readers of messages and their positions in channels.

use chrono::{DateTime, Utc};

use crate::{AgentId, ChannelId, ConversationId, MessageId};

/// An agent that has read a message.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Reader {
    pub agent_id: AgentId,
    pub agent_name: String,
    /// The first time.
    pub read_at: DateTime<Utc>,
}

/// Read position of a member in a channel.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ReadPosition {
    pub agent_name: String,
    /// The newest message that the member has read.
    pub last_read_id: Option<MessageId>,
    pub last_read_at: Option<DateTime<Utc>>,
}

/// Channel or conversation of a message.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ReadLocation {
    pub channel_id: ChannelId,
    pub channel_name: String,
    /// Public id of the conversation; `None` for a channel.
    pub conversation_id: Option<ConversationId>,
}
