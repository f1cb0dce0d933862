//! An agent's inbox: unread messages, and reactions to its own.

use relay_domain::{
    MessageId, WorkspaceScope,
    mailboxes::inbox::{Mention, ReceivedReaction, UnreadChannel},
};
use relay_tasks::byte_budget::ByteLease;

use super::Mailboxes;
use crate::{EngineResult, access::callers::AgentCaller};

/// Default and maximum number of unread channels or conversations.
pub const INBOX_PAGE: (i64, i64) = (100, 500);
/// Bound of the mentions and reactions.
pub(super) const MAX_SHOWN: i64 = 20;
/// Bound of the texts that an inbox shows as a whole, those of mentions first. Of others it shows the beginning.
const WHOLE_TEXTS: usize = 1024 * 1024;
/// Characters of a beginning, of up to four bytes each.
const BEGINNING_CHARS: i32 = 1000;
const BEGINNING_BYTES: usize = 4000;

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
    /// Memory that the texts take until they are sent.
    pub memory: ByteLease,
}

impl Mailboxes {
    /// Returns the caller's inbox, with at most `limit` channels and as many conversations.
    pub async fn inbox(&self, caller: &AgentCaller, limit: i64) -> EngineResult<Inbox> {
        let state = self.read_unread(caller).await?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let first = |is_channel: bool| {
            let places = state.unread.iter().filter(move |place| place.conversation_id.is_none() == is_channel);
            places.take(limit).cloned().collect::<Vec<_>>()
        };
        let (channels, mut conversations) = (first(true), first(false));
        let mut mentions: Vec<_> = state.mentions.iter().take(limit).cloned().collect();
        let reactions = state.reactions.iter().take(limit).cloned().collect();
        let memory = self.read_inbox_texts(caller.scope, &mut mentions, &mut conversations).await?;
        Ok(Inbox { channels, conversations, mentions, reactions, memory })
    }

    async fn read_inbox_texts(
        &self,
        scope: WorkspaceScope,
        mentions: &mut [Mention],
        conversations: &mut [UnreadChannel],
    ) -> EngineResult<ByteLease> {
        // A message that was removed has an id and no size.
        let newest = |row: &UnreadChannel| Some((row.unread.newest_id?, row.unread.newest_bytes.unwrap_or(0)));
        let sizes = mentions.iter().map(|row| (row.message_id, row.text_bytes));
        let texts = divide_texts(sizes.chain(conversations.iter().filter_map(newest)));
        let memory = self.core.reserve_answer(scope, texts.bytes).await?;
        let store = &self.core.store;
        let mut found = store.beginnings_of_texts(scope, &texts.cut, BEGINNING_CHARS).await?;
        found.extend(store.message_texts(scope, &texts.whole).await?);
        // A message that was removed since the rows were read has no text.
        for row in mentions {
            // Copied: the message may also be the newest one of a conversation below.
            row.text = found.get(&row.message_id).cloned().unwrap_or_default();
        }
        for row in conversations {
            row.newest_text = row.unread.newest_id.and_then(|id| found.remove(&id)).unwrap_or_default();
        }
        Ok(memory)
    }
}

/// Messages whose texts an inbox shows.
#[derive(Debug, Default, PartialEq, Eq)]
struct InboxTexts {
    whole: Vec<MessageId>,
    /// Messages of which the beginning is shown.
    cut: Vec<MessageId>,
    /// Bytes of both.
    bytes: usize,
}

/// Decides which texts an inbox shows as a whole, given their sizes.
fn divide_texts(sizes: impl Iterator<Item = (MessageId, i32)>) -> InboxTexts {
    let mut texts = InboxTexts::default();
    let mut whole_bytes = 0;
    for (id, bytes) in sizes {
        // A length, which is never negative.
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // A short text is whole in any case: its beginning would save nothing.
        if bytes <= BEGINNING_BYTES || whole_bytes + bytes <= WHOLE_TEXTS {
            whole_bytes += bytes;
            texts.bytes += bytes;
            texts.whole.push(id);
        } else {
            texts.bytes += BEGINNING_BYTES;
            texts.cut.push(id);
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_texts_beyond_the_bound_are_cut() {
        let sizes = [600_000, 500_000, 400_000, 4000].into_iter().zip(1..).map(|(size, id)| (MessageId::new(id), size));
        let texts = divide_texts(sizes);
        assert_eq!(texts.whole, [1, 3, 4].map(MessageId::new));
        assert_eq!(texts.cut, [MessageId::new(2)]);
        assert_eq!(texts.bytes, 1_008_000);
    }
}
