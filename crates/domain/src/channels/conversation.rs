//! Conversations: direct messages between two agents and groups, which are stored as channels of their own kinds.

use chrono::{DateTime, Utc};

use super::ChannelKind;
use crate::{AgentId, ChannelId, ConversationId, MessageId, agents::AgentKind};

/// Conversation of two agents or of a group.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Conversation {
    /// Id of the backing channel.
    pub channel_id: ChannelId,
    /// Name of the backing channel.
    pub name: String,
    #[cfg_attr(feature = "sqlx", sqlx(rename = "type"))]
    pub channel_kind: ChannelKind,
    pub conversation_id: ConversationId,
    /// Name of a group.
    pub title: Option<String>,
    /// Rises with every change of membership.
    pub members_version: i64,
    pub created_at: DateTime<Utc>,
}

/// A conversation in an agent's list.
#[derive(Debug, Clone)]
pub struct ListedConversation {
    pub conversation: Conversation,
    /// Ids of the participants in the order of `participant_names`, which is alphabetical.
    pub participant_ids: Vec<AgentId>,
    pub participant_names: Vec<String>,
    pub last_message: Option<LastMessage>,
    /// Root messages of other agents that the agent has neither read nor acked, counted up to
    /// [`MAX_UNREAD`](super::MAX_UNREAD).
    pub unread_count: i64,
}

/// A conversation as the workspace's list shows it.
#[derive(Debug, Clone)]
pub struct WorkspaceConversation {
    /// Id of the backing channel.
    pub channel_id: ChannelId,
    pub channel_kind: ChannelKind,
    pub conversation_id: ConversationId,
    /// Name of a group.
    pub title: Option<String>,
    pub created_at: DateTime<Utc>,
    /// Names in alphabetical order.
    pub participants: Vec<String>,
    /// Root messages, counted up to [`MAX_COUNTED_MESSAGES`](super::MAX_COUNTED_MESSAGES).
    pub message_count: i64,
    pub last_message: Option<LastMessage>,
}

/// The newest root message of a conversation, as lists show it.
#[derive(Debug, Clone)]
pub struct LastMessage {
    pub message_id: MessageId,
    pub agent_id: AgentId,
    pub agent_name: String,
    pub agent_kind: AgentKind,
    /// Empty until it is read.
    pub text: String,
    pub created_at: DateTime<Utc>,
}

impl LastMessage {
    /// Returns the id and the place of the text, which is read apart from the list.
    pub const fn text_slot(&mut self) -> (MessageId, &mut String) {
        (self.message_id, &mut self.text)
    }
}
