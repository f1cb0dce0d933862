//! An agent's inbox: what it has not read, and what others thought of what it wrote.

pub use relay_store::inbox::{Mention, ReceivedReaction, UnreadPlace};

use crate::{Engine, EngineResult, auth::AgentCaller};

/// What a list of unread channels or conversations holds unless a limit is given, and at most.
pub const INBOX_PAGE: (i64, i64) = (100, 500);
/// Mentions and reactions shown at most.
const SHOWN: i64 = 20;

/// An inbox. It changes by reading messages and acknowledging deliveries only.
#[derive(Debug)]
pub struct Inbox {
    /// Channels with unread messages, the newest first.
    pub channels: Vec<UnreadPlace>,
    /// Conversations with unread messages, the newest first.
    pub conversations: Vec<UnreadPlace>,
    /// Unread messages in channels that name the agent, the newest first.
    pub mentions: Vec<Mention>,
    /// Reactions of others to the agent's messages, the newest first.
    pub reactions: Vec<ReceivedReaction>,
}

impl Engine {
    /// The caller's inbox, with at most `limit` channels and as many conversations.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn inbox(&self, caller: &AgentCaller, limit: i64) -> EngineResult<Inbox> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        let places = self.store().unread_places(scope, agent).await?;
        let channels: Vec<(i64, i64)> = places
            .iter()
            .filter(|place| place.conversation_id.is_none())
            .map(|place| (place.channel_id, place.read_id))
            .collect();
        let shown = SHOWN.min(limit);
        let mentions = self.store().unread_mentions(scope, (agent, &caller.name), &channels, shown).await?;
        let reactions = self.store().received_reactions(scope, agent, shown).await?;
        let unread = places.into_iter().filter(|place| place.unread_count > 0);
        let (mut channels, mut conversations): (Vec<_>, Vec<_>) =
            unread.partition(|place| place.conversation_id.is_none());
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        channels.truncate(limit);
        conversations.truncate(limit);
        Ok(Inbox { channels, conversations, mentions, reactions })
    }
}
