//! Statistics of posted messages, read from daily counters of each author that the search indexer maintains.

use chrono::{DateTime, NaiveDate, Utc};
use const_format::formatcp;
use relay_domain::{
    WorkspaceScope,
    workspaces::activity::{AuthorStats, WorkspaceCounts, WorkspaceStats},
};

use crate::{Store, StoreError, StoreResult, agents::presence::last_seen_at, codes::CHANNEL};

impl Store {
    /// Returns the totals since a day (UTC).
    pub async fn workspace_stats(
        &self,
        scope: WorkspaceScope,
        since: NaiveDate,
        today: NaiveDate,
    ) -> StoreResult<WorkspaceStats> {
        // Without a measured latency the average is null, because a division by null is no error.
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
        .bind(scope.workspace_id())
        .bind(since)
        .bind(today)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("summing the statistics of a workspace"))
    }

    /// Returns the current counts. Agents are online if they were seen since `live_since` and are not offline.
    pub async fn workspace_counts(
        &self,
        scope: WorkspaceScope,
        live_since: DateTime<Utc>,
    ) -> StoreResult<WorkspaceCounts> {
        sqlx::query_as(formatcp!(
            "SELECT (SELECT count(*) FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL) AS agents,
                    (SELECT count(*) FROM agents WHERE workspace_id = $1 AND deleted_at IS NULL
                        AND status <> 'offline' AND {} >= $2) AS online,
                    (SELECT count(*) FROM channels WHERE workspace_id = $1 AND type = {CHANNEL} AND archived_at IS NULL)
                        AS channels,
                    coalesce((SELECT indexed_count FROM search_progress WHERE workspace_id = $1), 0) AS messages",
            last_seen_at!("agents")
        ))
        .bind(scope.workspace_id())
        .bind(live_since)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting the rows of a workspace"))
    }

    /// Returns the totals of the authors since a day (UTC), most messages first.
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
        .bind(scope.workspace_id())
        .bind(since)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("summing the statistics of authors"))
    }
}
