//! Newest messages of a whole workspace, for dashboards. Called by the activity route.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, ChannelId, ConversationId, JsonText, MessageId, WorkspaceScope};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    messages::{contents::decode_sized, days::day_of_id},
    sizes::MESSAGE_BYTES,
};

/// Newest messages that one list scans. The filters have no index of their own, so an unbounded scan of a rare match
/// would read every partition.
const MAX_SCANNED: i64 = 20_000;

/// Message anywhere in a workspace.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ActivityRow {
    pub message_id: MessageId,
    pub channel_id: ChannelId,
    pub channel_name: String,
    /// `None` in a channel.
    pub conversation_id: Option<ConversationId>,
    pub agent_id: AgentId,
    /// Name of the author when the message was written.
    pub agent_name: String,
    /// Root message of its thread.
    pub thread_id: Option<MessageId>,
    /// Empty until it is read.
    pub text: String,
    /// Free text set by the author.
    pub content_type: Option<String>,
    /// Object set by the author; empty until it is read.
    #[sqlx(json)]
    pub metadata: JsonText,
    pub attachment_count: i32,
    pub mention_count: i32,
    /// `latency_ms` of `metadata`, if it is a number.
    pub latency_ms: Option<f64>,
    pub created_at: DateTime<Utc>,
}

/// Conditions on the listed messages.
#[derive(Debug, Clone, Default)]
pub struct ActivityFilter {
    /// Exclusive upper bound.
    pub before: Option<MessageId>,
    pub agent: Option<AgentId>,
    pub channel: Option<ChannelId>,
    pub conversation: Option<ConversationId>,
    /// True for conversations only, false for channels only.
    pub direct: Option<bool>,
}

impl Store {
    /// Returns messages of a workspace without their contents, replies included, newest first, and upper bounds of the
    /// bytes of their contents. Filters apply to the newest 20 000 before
    /// `filter.before`.
    pub async fn activity(
        &self,
        scope: WorkspaceScope,
        filter: &ActivityFilter,
        limit: i64,
    ) -> StoreResult<Vec<(ActivityRow, usize)>> {
        let last_day = filter.before.map(|before| day_of_id(before.get()));
        // The day bounds the partitions that the inner query opens; the id alone does not prune.
        let rows = sqlx::query(formatcp!(
            "SELECT m.message_id, m.channel_id, c.name AS channel_name, c.conversation_id, m.agent_id, m.agent_name,
                    m.thread_id, '' AS text, m.content_type, '{{}}'::json AS metadata,
                    {MESSAGE_BYTES}::bigint AS content_bytes,
                    json_array_length(m.attachments) AS attachment_count, cardinality(m.mentions) AS mention_count,
                    relay_metric(m.metadata, 'latency_ms', 'latency_ms') AS latency_ms, m.created_at
               FROM (SELECT * FROM messages
                      WHERE workspace_id = $1 AND message_id < $2 AND created_on <= coalesce($3, 'infinity'::date)
                      ORDER BY message_id DESC LIMIT $4) AS m
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id
              WHERE ($5::bigint IS NULL OR m.agent_id = $5)
                AND ($6::bigint IS NULL OR m.channel_id = $6)
                AND ($7::text IS NULL OR c.conversation_id = $7)
                AND ($8::boolean IS NULL OR (c.type <> {CHANNEL}) = $8)
              ORDER BY m.message_id DESC LIMIT $9"
        ))
        .bind(scope.workspace_id())
        .bind(filter.before.unwrap_or(MessageId::new(i64::MAX)))
        .bind(last_day)
        .bind(MAX_SCANNED)
        .bind(filter.agent)
        .bind(filter.channel)
        .bind(&filter.conversation)
        .bind(filter.direct)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a workspace"))?;
        decode_sized("messages", &rows)
    }
}
