//! Search of messages.

use relay_domain::{
    ConversationId, MessageId,
    names::{MAX_AGENT_NAME_BYTES, MAX_SEARCH_BYTES, check_length, check_name, strip_hash},
    observers::MessageFacts,
    search::FoundMessage,
};
use relay_store::search::queries::{MAX_RANKED, Reader, SearchQuery};

use super::Search;
use crate::{EngineResult, access::callers::Credential, parts::Parts};

/// Default and maximum page size.
pub const SEARCH_PAGE: (i64, i64) = (20, 100);

#[derive(Debug)]
pub struct MessageSearch {
    /// Words, phrases in quotes, `or`, and `-` for excluded words.
    pub text: String,
    /// Only this channel.
    pub channel: Option<String>,
    /// Only this author.
    pub from: Option<String>,
    /// Only older messages than this.
    pub before: Option<MessageId>,
    /// Only newer messages than this.
    pub after: Option<MessageId>,
    pub limit: i64,
}

impl Search {
    /// Searches messages, best matches first. An agent finds those of channels and of its own conversations, an
    /// observer the visible ones of the newest 1000 matches.
    ///
    /// # Errors
    /// When the text is empty or too long, or other searches of the workspace take too long.
    pub async fn messages(&self, caller: &Credential, search: &MessageSearch) -> EngineResult<Parts<FoundMessage>> {
        let found = self.find(caller, search).await?;
        self.core.read_texts(caller.scope(), found, |row| Some((row.message_id, &mut row.text))).await
    }

    /// Finds the matches without their texts.
    async fn find(&self, caller: &Credential, search: &MessageSearch) -> EngineResult<Vec<(FoundMessage, usize)>> {
        let (scope, view) = (caller.scope(), caller.view());
        let reader = match caller {
            Credential::Agent(agent) => Reader::Agent(agent.agent_id),
            Credential::Workspace { .. } | Credential::Observer(_) | Credential::Node(_) => Reader::Workspace,
        };
        // Line breaks and tabs are allowed in a query, other control characters are not.
        check_name("q", &search.text.replace(['\t', '\n', '\r'], " "), MAX_SEARCH_BYTES)?;
        let from = search.from.as_deref().map(|name| name.strip_prefix('@').unwrap_or(name));
        if let Some(name) = from {
            check_length("from", name, MAX_AGENT_NAME_BYTES)?;
        }
        // No agent has such a name, and Postgres accepts no NUL.
        if from.is_some_and(|name| name.is_empty() || name.contains('\0')) {
            return Ok(Vec::new());
        }
        let channel = match search.channel.as_deref().map(strip_hash) {
            None => None,
            Some(name) if name.contains('\0') => return Ok(Vec::new()),
            Some(name) => match self.core.store.channel_id_by_name(scope, name).await? {
                Some(channel) => Some(channel),
                None => return Ok(Vec::new()),
            },
        };
        // After the checks: a refused search takes no permit from others.
        let _permit = self.core.acquire_scan_permit(scope).await?;
        self.core.store.want_index(scope).await?;
        let query = SearchQuery { text: &search.text, channel, from, before: search.before, after: search.after };
        let limit = usize::try_from(search.limit).unwrap_or(0);
        if !matches!(caller, Credential::Observer(_)) {
            return Ok(self.core.store.search(scope, &reader, &query, limit).await?);
        }
        // A view cannot be expressed in SQL, so more rows are read and filtered here.
        let mut found = self.core.store.search(scope, &reader, &query, MAX_RANKED).await?;
        found.retain(|(row, _)| {
            view.sees_message(&MessageFacts {
                channel_id: row.channel_id,
                channel_name: &row.channel_name,
                conversation_id: row.conversation_id.as_ref().map(ConversationId::as_str),
                agent_id: row.agent_id,
                created_at: row.created_at,
            })
        });
        found.truncate(limit);
        Ok(found)
    }
}
