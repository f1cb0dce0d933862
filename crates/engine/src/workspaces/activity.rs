//! Activity of a workspace for people: its newest messages and its statistics.

use chrono::{DateTime, Days, NaiveDate, TimeDelta, Utc};
use relay_domain::{
    AgentId, ChannelId, ConversationId, MessageId, WorkspaceScope,
    agents::LIVENESS_TTL,
    observers::MessageFacts,
    workspaces::activity::{ActivityFilter, ActivityMessage, AuthorStats, WorkspaceCounts, WorkspaceStats},
};

use super::Workspaces;
use crate::{EngineResult, access::callers::Credential, parts::Parts};

/// Default and maximum page size of the activity. Limits of up to 500 are accepted.
pub const ACTIVITY_PAGE: (i64, i64) = (20, 100);
/// Default and maximum page size of the console's messages.
pub const CONSOLE_PAGE: (i64, i64) = (50, 100);
/// Default and maximum page size of the console's agents.
pub const CONSOLE_AGENTS_PAGE: (i64, i64) = (20, 100);
/// Newest messages that are filtered for an observer.
const MAX_OBSERVED: i64 = 500;
const MAX_COST_AUTHORS: i64 = 1000;
/// Recent messages that a statistics request counts itself, because the worker has not yet.
const INDEX_TAIL_LIMIT: i64 = 2000;

/// Statistics of a number of days, including today (UTC).
#[derive(Debug)]
pub struct Stats {
    pub since: DateTime<Utc>,
    pub posted: WorkspaceStats,
    pub now: WorkspaceCounts,
}

impl Workspaces {
    /// Lists the messages of a workspace, newest first. An observer gets the visible ones of the newest 500.
    pub async fn activity(
        &self,
        caller: &Credential,
        filter: &ActivityFilter,
        limit: i64,
    ) -> EngineResult<Parts<ActivityMessage>> {
        let (scope, store) = (caller.scope(), self.core.store.clone());
        let rows = self.activity_rows(caller, filter, limit).await?;
        let read = move |rows: Vec<ActivityMessage>| {
            let store = store.clone();
            async move {
                let ids: Vec<MessageId> = rows.iter().map(|row| row.message_id).collect();
                let mut found = store.message_texts_and_metadata(scope, &ids).await?;
                let with_contents = rows.into_iter().filter_map(|row| {
                    // Retention may have dropped the message since the rows were listed.
                    let (text, metadata) = found.remove(&row.message_id)?;
                    Some(ActivityMessage { text, metadata, ..row })
                });
                Ok(with_contents.collect())
            }
        };
        self.core.read_in_parts(scope, rows, read).await
    }

    /// Lists the messages without their contents.
    async fn activity_rows(
        &self,
        caller: &Credential,
        filter: &ActivityFilter,
        limit: i64,
    ) -> EngineResult<Vec<(ActivityMessage, usize)>> {
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        let Credential::Observer(observer) = caller else {
            return Ok(self.core.store.activity(caller.scope(), filter, limit).await?);
        };
        // A view cannot be expressed in SQL, so more rows are read and filtered here.
        let mut rows = self.core.store.activity(caller.scope(), filter, MAX_OBSERVED).await?;
        rows.retain(|(row, _)| {
            observer.view.sees_message(&MessageFacts {
                channel_id: row.channel_id,
                channel_name: &row.channel_name,
                conversation_id: row.conversation_id.as_ref().map(ConversationId::as_str),
                agent_id: row.agent_id,
                created_at: row.created_at,
            })
        });
        rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(rows)
    }

    /// Parses a filter of ids as clients write them; `None` when one of them is invalid.
    #[must_use]
    pub fn parse_activity_filter(
        before: Option<MessageId>,
        agent: Option<&str>,
        channel: Option<&str>,
        conversation: Option<&str>,
        direct: Option<bool>,
    ) -> Option<ActivityFilter> {
        // Postgres accepts no NUL in text, and no conversation has such an id.
        if conversation.is_some_and(|id| id.contains('\0')) {
            return None;
        }
        Some(ActivityFilter {
            before,
            agent: agent.map(str::parse::<AgentId>).transpose().ok()?,
            channel: channel.map(str::parse::<ChannelId>).transpose().ok()?,
            conversation: conversation.map(ConversationId::new),
            direct,
        })
    }

    /// Returns totals of the last `days` days.
    pub async fn stats(&self, scope: WorkspaceScope, days: u32) -> EngineResult<Stats> {
        let _permit = self.core.acquire_scan_permit(scope).await?;
        // Only workspaces with readers are indexed. What the worker has not counted yet is counted now, so that the
        // totals include the messages of this moment.
        self.core.store.want_index(scope).await?;
        self.core.store.index_newest(scope, INDEX_TAIL_LIMIT).await?;
        let (today, since) = self.window(days);
        let posted = self.core.store.workspace_stats(scope, since, today).await?;
        // A constant of seconds, which fits.
        let live_since = self.core.now() - TimeDelta::from_std(LIVENESS_TTL).unwrap_or_default();
        let now = self.core.store.workspace_counts(scope, live_since).await?;
        Ok(Stats { since: since.and_time(chrono::NaiveTime::MIN).and_utc(), posted, now })
    }

    /// Lists the authors of the last `days` days with the most messages first.
    pub async fn author_stats(&self, scope: WorkspaceScope, days: u32, limit: i64) -> EngineResult<Vec<AuthorStats>> {
        let _permit = self.core.acquire_scan_permit(scope).await?;
        self.core.store.want_index(scope).await?;
        self.core.store.index_newest(scope, INDEX_TAIL_LIMIT).await?;
        Ok(self.core.store.author_stats(scope, self.window(days).1, limit).await?)
    }

    /// Lists all authors, up to 1000, with the costs that their messages report.
    pub async fn costs(&self, scope: WorkspaceScope, days: u32) -> EngineResult<Vec<AuthorStats>> {
        self.author_stats(scope, days, MAX_COST_AUTHORS).await
    }

    fn window(&self, days: u32) -> (NaiveDate, NaiveDate) {
        let today = self.core.now().date_naive();
        (today, today - Days::new(u64::from(days.max(1)) - 1))
    }
}
