//! Searching messages.

use relay_domain::{
    AgentId, ChannelId, MessageId,
    names::{MAX_AGENT_NAME_BYTES, MAX_SEARCH_BYTES, check_length, check_name, strip_hash},
    observer::MessageFacts,
};
pub use relay_store::search::FoundMessage;
use relay_store::search::{RANKED, Reader, SearchQuery};

use crate::{Engine, EngineResult, auth::Credential};

/// What a search answers with unless a limit is given, and at most.
pub const SEARCH_PAGE: (i64, i64) = (20, 100);

/// A search.
#[derive(Debug)]
pub struct Search {
    /// Words, phrases in quotes, `or`, and `-` for what must be absent.
    pub text: String,
    /// Only this channel.
    pub channel: Option<String>,
    /// Only this author.
    pub from: Option<String>,
    /// Only older messages than this.
    pub before: Option<MessageId>,
    /// Only newer messages than this.
    pub after: Option<MessageId>,
    /// How many at most.
    pub limit: i64,
}

impl Engine {
    /// The best matches, best first. An agent finds what is in channels and in its own conversations, an
    /// observer what it may see of the newest 1000 matches.
    ///
    /// # Errors
    /// When the text is empty or too long.
    pub async fn search(&self, caller: &Credential, search: &Search) -> EngineResult<Vec<FoundMessage>> {
        let (scope, view) = (caller.scope(), caller.view());
        let reader = match caller {
            Credential::Agent(agent) => Reader::Agent(agent.agent_id),
            _ => Reader::Workspace,
        };
        check_name("q", &search.text.replace(['\t', '\n', '\r'], " "), MAX_SEARCH_BYTES)?;
        let from = search.from.as_deref().map(|name| name.strip_prefix('@').unwrap_or(name));
        if let Some(name) = from {
            check_length("from", name, MAX_AGENT_NAME_BYTES)?;
        }
        // What nobody is called finds nothing; a name that cannot be stored is no name.
        if from.is_some_and(|name| name.is_empty() || name.contains('\0')) {
            return Ok(Vec::new());
        }
        let channel = match search.channel.as_deref().map(strip_hash) {
            None => None,
            Some(name) if name.contains('\0') => return Ok(Vec::new()),
            Some(name) => match self.store().channel_of_name(scope, name).await? {
                Some(channel) => Some(channel),
                None => return Ok(Vec::new()),
            },
        };
        let query = SearchQuery { text: &search.text, channel, from, before: search.before, after: search.after };
        let limit = usize::try_from(search.limit).unwrap_or(0);
        if !matches!(caller, Credential::Observer(_)) {
            return Ok(self.store().search(scope, &reader, &query, limit).await?);
        }
        let mut found = self.store().search(scope, &reader, &query, RANKED).await?;
        found.retain(|row| {
            view.sees_message(&MessageFacts {
                channel_id: ChannelId::new(row.channel_id),
                channel_name: &row.channel_name,
                conversation_id: row.conversation_id.as_deref(),
                agent_id: AgentId::new(row.agent_id),
                created_at: row.created_at,
            })
        });
        found.truncate(limit);
        Ok(found)
    }
}
