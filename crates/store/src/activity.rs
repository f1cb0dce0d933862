//! The newest messages of a whole workspace, for people who look at it.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, MessageId, WorkspaceScope};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult, messages_read::day_of};

/// Messages that a filtered list looks at, newest first.
const LOOKED_AT: i64 = 20_000;

/// A message anywhere in a workspace.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ActivityRow {
    /// The message.
    pub message_id: i64,
    /// Its channel.
    pub channel_id: i64,
    /// The channel's name.
    pub channel_name: String,
    /// What clients call its conversation; `None` in a channel.
    pub conversation_id: Option<String>,
    /// Its author.
    pub agent_id: i64,
    /// The author's name when it was written.
    pub agent_name: String,
    /// The root of its thread.
    pub thread_id: Option<i64>,
    /// The text.
    pub text: String,
    /// Free text of the client's.
    pub content_type: Option<String>,
    /// What the author put there.
    pub metadata: Value,
    /// How many files.
    pub attachment_count: i32,
    /// How many names.
    pub mention_count: i32,
    /// The number that the author put there as `latency_ms`.
    pub latency_ms: Option<f64>,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
}

/// Which messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActivityFilter<'a> {
    /// Only older ones than this.
    pub before: Option<MessageId>,
    /// Only of this author.
    pub agent: Option<AgentId>,
    /// Only in this channel.
    pub channel: Option<ChannelId>,
    /// Only in this conversation.
    pub conversation: Option<&'a str>,
    /// Only in conversations, or only in channels.
    pub direct: Option<bool>,
}

impl Store {
    /// Messages of a workspace, replies included, newest first. With a filter, among the newest 20 000.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn activity(
        &self,
        scope: WorkspaceScope,
        filter: &ActivityFilter<'_>,
        limit: i64,
    ) -> StoreResult<Vec<ActivityRow>> {
        let last_day = filter.before.map(|before| day_of(before.get()));
        sqlx::query_as(
            "SELECT m.message_id, m.channel_id, c.name AS channel_name, c.conversation_id, m.agent_id, m.agent_name,
                    m.thread_id, m.text, m.content_type, m.metadata,
                    json_array_length(m.attachments) AS attachment_count, cardinality(m.mentions) AS mention_count,
                    relay_metric(m.metadata, 'latency_ms', 'latency_ms') AS latency_ms, m.created_at
               FROM (SELECT * FROM messages
                      WHERE workspace_id = $1 AND message_id < $2 AND created_on <= coalesce($3, 'infinity'::date)
                      ORDER BY message_id DESC LIMIT $4) AS m
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id
              WHERE ($5::bigint IS NULL OR m.agent_id = $5)
                AND ($6::bigint IS NULL OR m.channel_id = $6)
                AND ($7::text IS NULL OR c.conversation_id = $7)
                AND ($8::boolean IS NULL OR (c.type <> 0) = $8)
              ORDER BY m.message_id DESC LIMIT $9",
        )
        .bind(scope.workspace_id().get())
        .bind(filter.before.map_or(i64::MAX, MessageId::get))
        .bind(last_day)
        .bind(LOOKED_AT)
        .bind(filter.agent.map(AgentId::get))
        .bind(filter.channel.map(ChannelId::get))
        .bind(filter.conversation)
        .bind(filter.direct)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a workspace"))
    }
}
