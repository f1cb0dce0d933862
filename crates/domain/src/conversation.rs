//! Direct-message conversations: what they are called.

use sha2::{Digest, Sha256};

use crate::{AgentId, ConversationId, WorkspaceId};

/// Participants that a group conversation can have, its creator included.
pub const MAX_PARTICIPANTS: usize = 256;
/// Conversations that a list answers with, the liveliest first.
pub const MAX_LISTED_CONVERSATIONS: i64 = 500;
/// Unread messages are counted up to here.
pub const MAX_UNREAD: i64 = 1_000;

/// Messages of a conversation are counted up to here where all conversations are listed.
pub const MAX_COUNTED_MESSAGES: i64 = 1_000;

/// The names of the one conversation that two agents can have with each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectNames {
    /// What clients call the conversation.
    pub conversation: ConversationId,
    /// The name of the backing channel.
    pub channel_name: String,
}

/// Follows from the two agents alone, in either order, so that two gateways cannot make two of them.
#[must_use]
pub fn direct_names(workspace: WorkspaceId, a: AgentId, b: AgentId) -> DirectNames {
    let (low, high) = (a.min(b), a.max(b));
    let digest = hex::encode(Sha256::digest(format!("{workspace}:{low}:{high}")));
    let short = &digest[..24];
    DirectNames { conversation: ConversationId::new(format!("dm_{short}")), channel_name: format!("dm-{short}") }
}

/// The public id of the channel behind a one-to-one conversation; `None` if it is not one.
#[must_use]
pub fn public_channel_id(conversation: &str) -> Option<String> {
    conversation.strip_prefix("dm_").map(|hex| format!("dmch_{hex}"))
}

/// The name of the channel behind a group conversation.
#[must_use]
pub fn group_channel_name(conversation: &ConversationId) -> String {
    format!("group-dm-{conversation}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_has_one_name_whoever_begins_it() {
        let (w, a, b) = (WorkspaceId::new(1), AgentId::new(10), AgentId::new(9));
        let names = direct_names(w, a, b);
        assert_eq!(names, direct_names(w, b, a));
        // sha256("1:9:10")
        assert_eq!(names.conversation.as_str().len(), 27);
        assert_eq!(public_channel_id(names.conversation.as_str()).map(|c| c.len()), Some(29));
        assert_ne!(names, direct_names(WorkspaceId::new(2), a, b));
    }
}
