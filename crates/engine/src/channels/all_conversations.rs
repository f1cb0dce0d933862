//! Conversations for the workspace key, which takes part in none of them.

use relay_domain::{
    ChannelId, MessageId,
    channels::{LastMessage, WorkspaceConversation},
    messages::{Message, MessagePage},
};

use super::Channels;
use crate::{EngineError, EngineResult, access::callers::Credential, error::Missing, parts::Parts};

/// Default and maximum page size.
pub const ALL_CONVERSATIONS_PAGE: (i64, i64) = (500, 500);

/// Page of a list with the cursor of the next one.
pub struct Page<T> {
    pub items: Parts<T>,
    /// `None` on the last page.
    pub next: Option<String>,
}

impl Channels {
    /// Lists the conversations of a workspace, newest first.
    pub async fn all_conversations(
        &self,
        caller: &Credential,
        cursor: Option<&str>,
        limit: i64,
    ) -> EngineResult<Page<WorkspaceConversation>> {
        let before = cursor.map(read_cursor).transpose()?;
        let view = caller.view();
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        let mut items = self.core.store.all_conversations(caller.scope(), before, limit + 1, &view.filters).await?;
        let more = items.len() as i64 > limit;
        if more {
            items.pop();
        }
        let next = items.last().filter(|_| more).map(|(last, _)| format!("c{:x}", last.channel_id.get()));
        if matches!(caller, Credential::Observer(_)) {
            // A page may be shorter after this; the cursor continues behind the unfiltered page.
            // The lists have only participants and messages that pass the filters.
            let concerns_visible = |row: &WorkspaceConversation| {
                view.filters.agent_ids.is_none() || !row.participants.is_empty() || row.last_message.is_some()
            };
            items.retain(|(row, _)| view.sees_conversation(row.conversation_id.as_str()) && concerns_visible(row));
        }
        let items = self
            .core
            .read_texts(caller.scope(), items, |row| row.last_message.as_mut().map(LastMessage::text_slot))
            .await?;
        Ok(Page { items, next })
    }

    /// Lists the messages of any conversation, newest first, and the `before` of the next page if there is one.
    ///
    /// # Errors
    /// When the id is unknown or not visible to the caller.
    pub async fn any_conversation_messages(
        &self,
        caller: &Credential,
        id: &str,
        page: MessagePage,
    ) -> EngineResult<(Parts<Message>, Option<MessageId>)> {
        let (scope, view) = (caller.scope(), caller.view());
        let hidden = matches!(caller, Credential::Observer(_)) && !view.sees_conversation(id);
        // Postgres accepts no NUL in text, and no conversation has such an id.
        if hidden || id.contains('\0') {
            return Err(EngineError::NotFound(Missing::Conversation));
        }
        let conversation =
            self.core.store.conversation(scope, id).await?.ok_or(EngineError::NotFound(Missing::Conversation))?;
        // One more row shows whether there is a next page.
        let with_next = MessagePage { limit: page.limit + 1, ..page };
        let mut listed =
            self.core.store.channel_messages(scope, conversation.channel_id, with_next, &view.filters).await?;
        let more = listed.len() as i64 > page.limit;
        if more {
            listed.pop();
        }
        let next_before = listed.last().filter(|_| more).map(|(id, _)| *id);
        Ok((self.core.read_messages(scope, listed).await?.map(|listed| listed.message), next_before))
    }
}

fn read_cursor(cursor: &str) -> EngineResult<ChannelId> {
    let id = cursor.strip_prefix('c').and_then(|hex| i64::from_str_radix(hex, 16).ok());
    id.filter(|id| *id >= 0)
        .map(ChannelId::new)
        .ok_or_else(|| EngineError::invalid_request("cursor is none that this list gave"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_back_and_others_are_refused() {
        let id = 243_812_004_871_278_592;
        assert_eq!(read_cursor(&format!("c{id:x}")).ok(), Some(ChannelId::new(id)));
        for other in ["", "c", "cx", "12", "c-1", "cffffffffffffffffff"] {
            assert!(read_cursor(other).is_err(), "{other}");
        }
    }
}
