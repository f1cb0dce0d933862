//! Channels and their members: [`Channel`], [`Member`] and [`Conversation`], and the names and limits of direct-message
//! conversations.

mod conversation;

use chrono::{DateTime, Utc};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{AgentId, ChannelId, ConversationId, WorkspaceId};

pub use conversation::{Conversation, LastMessage, ListedConversation, WorkspaceConversation};

/// Maximum number of participants of a group conversation, its creator included.
pub const MAX_PARTICIPANTS: usize = 256;
/// Maximum number of conversations in a list, most recently active first.
pub const MAX_LISTED_CONVERSATIONS: i64 = 500;
/// Largest `limit` of a list of conversations.
pub const MAX_CONVERSATION_LIMIT: i64 = 100;
/// Upper bound of unread counts.
pub const MAX_UNREAD: i64 = 1_000;

/// Upper bound of message counts in the list of all conversations.
pub const MAX_COUNTED_MESSAGES: i64 = 1_000;

/// Kind of a channel. Conversations are backed by channels that no list of channels shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type))]
#[repr(i16)]
pub enum ChannelKind {
    /// A named channel.
    Channel = 0,
    /// The one-to-one conversation of two agents.
    Direct = 1,
    /// A group conversation.
    Group = 2,
}

impl ChannelKind {
    /// Returns the code stored in Postgres and sent as `channel_type`.
    #[must_use]
    pub const fn code(self) -> i16 {
        self as i16
    }

    /// Returns true for a conversation of two agents or of a group.
    #[must_use]
    pub const fn is_conversation(self) -> bool {
        match self {
            Self::Channel => false,
            Self::Direct | Self::Group => true,
        }
    }
}

/// Role of an agent in a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum MemberRole {
    /// Creator of the channel.
    Owner,
    /// Any other member.
    Member,
}

crate::columns::stored_name!(MemberRole);

/// Names of the one-to-one conversation of two agents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectNames {
    /// Public id of the conversation.
    pub conversation: ConversationId,
    /// Name of the backing channel.
    pub channel_name: String,
}

/// Returns the names of the conversation of two agents. They depend only on the unordered pair, so two gateways that
/// create the conversation concurrently create the same one.
#[must_use]
pub fn direct_names(workspace: WorkspaceId, a: AgentId, b: AgentId) -> DirectNames {
    let (low, high) = (a.min(b), a.max(b));
    let digest = hex::encode(Sha256::digest(format!("{workspace}:{low}:{high}")));
    let short = &digest[..24];
    DirectNames { conversation: ConversationId::new(format!("dm_{short}")), channel_name: format!("dm-{short}") }
}

/// Returns the public channel id of a one-to-one conversation, or `None` for other conversations.
fn public_channel_id(conversation: &str) -> Option<String> {
    conversation.strip_prefix("dm_").map(|hex| format!("dmch_{hex}"))
}

/// Returns the channel id that clients see: the public id of a one-to-one conversation, else the id of the channel.
#[must_use]
pub fn client_channel_id(channel: ChannelId, conversation: Option<&str>) -> String {
    conversation.and_then(public_channel_id).unwrap_or_else(|| channel.to_string())
}

/// Returns the name of the channel that backs a group conversation.
#[must_use]
pub fn group_channel_name(conversation: &ConversationId) -> String {
    format!("group-dm-{conversation}")
}

/// Channel that is not a conversation.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Channel {
    pub channel_id: ChannelId,
    pub name: String,
    pub topic: Option<String>,
    /// JSON object of the client.
    pub metadata: Value,
    /// `None` for a channel created with the workspace's key.
    pub created_by: Option<AgentId>,
    pub created_at: DateTime<Utc>,
    /// An archived channel accepts no messages.
    pub archived_at: Option<DateTime<Utc>>,
    pub member_count: i64,
}

/// Member of a channel.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Member {
    pub agent_id: AgentId,
    pub agent_name: String,
    pub role: MemberRole,
    pub joined_at: DateTime<Utc>,
    /// Receives mentions only.
    pub muted: bool,
}

/// A channel as one of its members sees it.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Membership {
    pub channel_id: ChannelId,
    pub name: String,
    pub role: MemberRole,
    pub joined_at: DateTime<Utc>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_has_one_name_in_either_order() {
        let (w, a, b) = (WorkspaceId::new(1), AgentId::new(10), AgentId::new(9));
        let names = direct_names(w, a, b);
        assert_eq!(names, direct_names(w, b, a));
        // sha256("1:9:10")
        assert_eq!(names.conversation.as_str().len(), 27);
        assert_eq!(public_channel_id(names.conversation.as_str()).map(|c| c.len()), Some(29));
        assert_ne!(names, direct_names(WorkspaceId::new(2), a, b));
    }
}
