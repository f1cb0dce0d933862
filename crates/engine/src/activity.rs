//! What happens in a workspace, for people who look at it: its newest messages and its numbers.

use chrono::{DateTime, Days, NaiveDate, TimeDelta, Utc};
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceScope, agent::LIVENESS_TTL, observer::MessageFacts};
pub use relay_store::{
    activity::{ActivityFilter, ActivityRow},
    stats::{AuthorStats, WorkspaceCounts, WorkspaceStats},
};

use crate::{Engine, EngineResult, auth::Credential};

/// What the activity answers with unless a limit is given, and at most. A limit of up to 500 is understood.
pub const ACTIVITY_PAGE: (i64, i64) = (20, 100);
/// The same for the console's messages.
pub const CONSOLE_PAGE: (i64, i64) = (50, 100);
/// The same for the console's agents.
pub const CONSOLE_AGENTS_PAGE: (i64, i64) = (20, 100);
/// Messages that are looked at for an observer, who sees some of them.
const OBSERVED: i64 = 500;
/// Authors whose costs are listed.
const COST_AUTHORS: i64 = 1000;
/// Messages that a request for numbers counts itself, because the worker has not yet.
const COUNTED_NOW: i64 = 2000;

/// Numbers of a number of days, today (UTC) included.
#[derive(Debug)]
pub struct Stats {
    /// Since when.
    pub since: DateTime<Utc>,
    /// What was posted since.
    pub posted: WorkspaceStats,
    /// What there is now.
    pub now: WorkspaceCounts,
}

impl Engine {
    /// Messages of a workspace, newest first. An observer gets what it may see of the newest 500.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn activity(
        &self,
        caller: &Credential,
        filter: &ActivityFilter<'_>,
        limit: i64,
    ) -> EngineResult<Vec<ActivityRow>> {
        let Credential::Observer(observer) = caller else {
            return Ok(self.store().activity(caller.scope(), filter, limit).await?);
        };
        let mut rows = self.store().activity(caller.scope(), filter, OBSERVED).await?;
        rows.retain(|row| {
            observer.view.sees_message(&MessageFacts {
                channel_id: ChannelId::new(row.channel_id),
                channel_name: &row.channel_name,
                conversation_id: row.conversation_id.as_deref(),
                agent_id: AgentId::new(row.agent_id),
                created_at: row.created_at,
            })
        });
        rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(rows)
    }

    /// A filter from ids as clients write them; `None` when one of them is nobody's.
    #[must_use]
    pub fn activity_filter<'a>(
        before: Option<MessageId>,
        agent: Option<&str>,
        channel: Option<&str>,
        conversation: Option<&'a str>,
        direct: Option<bool>,
    ) -> Option<ActivityFilter<'a>> {
        if conversation.is_some_and(|id| id.contains('\0')) {
            return None;
        }
        Some(ActivityFilter {
            before,
            agent: agent.map(str::parse::<AgentId>).transpose().ok()?,
            channel: channel.map(str::parse::<ChannelId>).transpose().ok()?,
            conversation,
            direct,
        })
    }

    /// Totals of the last `days` days.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn stats(&self, scope: WorkspaceScope, days: u32) -> EngineResult<Stats> {
        self.store().index_tail(scope, COUNTED_NOW).await?;
        let (today, since) = self.window(days);
        let posted = self.store().workspace_stats(scope, since, today).await?;
        let live_since = self.now() - TimeDelta::from_std(LIVENESS_TTL).unwrap_or_default();
        let now = self.store().workspace_counts(scope, live_since).await?;
        Ok(Stats { since: since.and_time(chrono::NaiveTime::MIN).and_utc(), posted, now })
    }

    /// The busiest authors of the last `days` days, the busiest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn author_stats(&self, scope: WorkspaceScope, days: u32, limit: i64) -> EngineResult<Vec<AuthorStats>> {
        self.store().index_tail(scope, COUNTED_NOW).await?;
        Ok(self.store().author_stats(scope, self.window(days).1, limit).await?)
    }

    /// The same with all authors, up to 1000: what their messages cost by their own account.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn costs(&self, scope: WorkspaceScope, days: u32) -> EngineResult<Vec<AuthorStats>> {
        self.author_stats(scope, days, COST_AUTHORS).await
    }

    fn window(&self, days: u32) -> (NaiveDate, NaiveDate) {
        let today = self.now().date_naive();
        (today, today - Days::new(u64::from(days.max(1)) - 1))
    }
}
