//! An agent's inbox: unread messages, and reactions to its own.

pub use relay_store::mailboxes::inbox::{Mention, ReceivedReaction, UnreadChannel};

use super::Mailboxes;
use crate::{EngineResult, access::authentication::AgentCaller};

/// Default and maximum number of unread channels or conversations.
pub const INBOX_PAGE: (i64, i64) = (100, 500);
/// Bound of the mentions and reactions.
const MAX_SHOWN: i64 = 20;

/// Changes only by reading messages and acknowledging deliveries.
#[derive(Debug)]
pub struct Inbox {
    /// Channels with unread messages, newest first.
    pub channels: Vec<UnreadChannel>,
    /// Conversations with unread messages, newest first.
    pub conversations: Vec<UnreadChannel>,
    /// Unread messages that mention the agent, in channels and conversations, newest first.
    pub mentions: Vec<Mention>,
    /// Reactions of others to the agent's messages, newest first.
    pub reactions: Vec<ReceivedReaction>,
}

impl Mailboxes {
    /// Returns the caller's inbox, with at most `limit` channels and as many conversations.
    pub async fn inbox(&self, caller: &AgentCaller, limit: i64) -> EngineResult<Inbox> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        let places = self.core.store.unread_channels(scope, agent).await?;
        let pointers: Vec<(i64, i64)> = places.iter().map(|place| (place.channel_id, place.read_id)).collect();
        let shown = MAX_SHOWN.min(limit);
        let mentions = self.core.store.unread_mentions(scope, (agent, &caller.name), &pointers, shown).await?;
        let reactions = self.core.store.received_reactions(scope, agent, shown).await?;
        let unread = places.into_iter().filter(|place| place.unread_count > 0);
        let (mut channels, mut conversations): (Vec<_>, Vec<_>) =
            unread.partition(|place| place.conversation_id.is_none());
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        channels.truncate(limit);
        conversations.truncate(limit);
        Ok(Inbox { channels, conversations, mentions, reactions })
    }
}
