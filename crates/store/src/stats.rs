//! What was posted in a workspace, in numbers. Counted per author and day as messages are indexed.

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::WorkspaceScope;

use crate::{Store, StoreError, StoreResult};

/// Totals of a workspace.
#[derive(Debug, Clone, Default, sqlx::FromRow)]
pub struct WorkspaceStats {
    /// Messages in channels.
    pub channel_messages: i64,
    /// Messages in conversations.
    pub direct_messages: i64,
    /// Authors.
    pub unique_agents: i64,
    /// The mean of what authors stated as `latency_ms`; none if nobody did.
    pub avg_latency_ms: Option<f64>,
    /// The most of it.
    pub max_latency_ms: Option<f64>,
    /// Files.
    pub attachment_count: i64,
    /// Names mentioned.
    pub mention_count: i64,
    /// Messages of today (UTC).
    pub messages_today: i64,
}

/// What there is in a workspace now.
#[derive(Debug, Clone, Copy, sqlx::FromRow)]
pub struct WorkspaceCounts {
    /// Living agents.
    pub agents: i64,
    /// Those of them that are online.
    pub online: i64,
    /// Channels that are not archived.
    pub channels: i64,
    /// Messages ever counted.
    pub messages: i64,
}

/// One author's part.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AuthorStats {
    /// Who.
    pub agent_id: i64,
    /// Its name.
    pub agent_name: String,
    /// Messages in channels.
    pub channel_messages: i64,
    /// Messages in conversations.
    pub direct_messages: i64,
    /// The mean of what it stated as `latency_ms`; none if it did not.
    pub avg_latency_ms: Option<f64>,
    /// Its newest message.
    pub last_message_at: Option<DateTime<Utc>>,
    /// What it stated as `cost_usd`, in all; the same for the rest.
    pub cost_usd: f64,
    /// Tokens that went in.
    pub prompt_tokens: f64,
    /// Tokens that came out.
    pub completion_tokens: f64,
    /// Tokens in all.
    pub total_tokens: f64,
}

impl Store {
    /// Totals from a day (UTC) on.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn workspace_stats(
        &self,
        scope: WorkspaceScope,
        since: NaiveDate,
        today: NaiveDate,
    ) -> StoreResult<WorkspaceStats> {
        sqlx::query_as(
            "SELECT coalesce(sum(channel_messages), 0)::bigint AS channel_messages,
                    coalesce(sum(direct_messages), 0)::bigint AS direct_messages,
                    count(DISTINCT agent_id) AS unique_agents,
                    sum(latency_sum_ms) / nullif(sum(latency_count), 0)::double precision AS avg_latency_ms,
                    max(latency_max_ms) AS max_latency_ms,
                    coalesce(sum(attachment_count), 0)::bigint AS attachment_count,
                    coalesce(sum(mention_count), 0)::bigint AS mention_count,
                    coalesce(sum(channel_messages + direct_messages) FILTER (WHERE created_on = $3), 0)::bigint
                        AS messages_today
               FROM message_stats WHERE workspace_id = $1 AND created_on >= $2",
        )
        .bind(scope.workspace_id().get())
        .bind(since)
        .bind(today)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("adding up what was posted"))
    }

    /// What there is now. `online` means heard of since `live_since` and not offline.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn workspace_counts(
        &self,
        scope: WorkspaceScope,
        live_since: DateTime<Utc>,
    ) -> StoreResult<WorkspaceCounts> {
        sqlx::query_as(
            "SELECT (SELECT count(*) FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL) AS agents,
                    (SELECT count(*) FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL
                        AND status <> 'offline' AND last_seen_at >= $2) AS online,
                    (SELECT count(*) FROM channels WHERE workspace_id = $1 AND type = 0 AND archived_at IS NULL)
                        AS channels,
                    coalesce((SELECT indexed_count FROM search_progress WHERE workspace_id = $1), 0) AS messages",
        )
        .bind(scope.workspace_id().get())
        .bind(live_since)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting what is in a workspace"))
    }

    /// The authors since a day (UTC), the busiest first.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn author_stats(
        &self,
        scope: WorkspaceScope,
        since: NaiveDate,
        limit: i64,
    ) -> StoreResult<Vec<AuthorStats>> {
        sqlx::query_as(
            "SELECT s.agent_id, a.name AS agent_name, s.channel_messages, s.direct_messages, s.avg_latency_ms,
                    s.last_message_at, s.cost_usd, s.prompt_tokens, s.completion_tokens, s.total_tokens
               FROM (SELECT agent_id, sum(channel_messages)::bigint AS channel_messages,
                            sum(direct_messages)::bigint AS direct_messages,
                            sum(latency_sum_ms) / nullif(sum(latency_count), 0)::double precision AS avg_latency_ms,
                            max(last_message_at) AS last_message_at, sum(cost_usd) AS cost_usd,
                            sum(prompt_tokens) AS prompt_tokens, sum(completion_tokens) AS completion_tokens,
                            sum(total_tokens) AS total_tokens
                       FROM message_stats WHERE workspace_id = $1 AND created_on >= $2
                        -- The hidden agent that webhooks post as has the id of its workspace.
                        AND agent_id <> $1
                      GROUP BY agent_id
                      ORDER BY sum(channel_messages + direct_messages) DESC, agent_id LIMIT $3) AS s
               JOIN agents a ON a.workspace_id = $1 AND a.agent_id = s.agent_id
              ORDER BY s.channel_messages + s.direct_messages DESC, s.agent_id",
        )
        .bind(scope.workspace_id().get())
        .bind(since)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("adding up what authors posted"))
    }
}
