//! Newest messages of a whole workspace, for dashboards. Called by the activity route.

use const_format::formatcp;
use relay_domain::{
    MessageId, WorkspaceScope,
    workspaces::activity::{ActivityFilter, ActivityMessage},
};

use crate::{
    Store, StoreError, StoreResult,
    codes::CHANNEL,
    messages::{contents::decode_sized, days::day_of_id},
    sizes::MESSAGE_BYTES,
};

/// Newest messages that one list scans. The filters have no index of their own, so an unbounded scan of a rare match
/// would read every partition.
const MAX_SCANNED: i64 = 20_000;

impl Store {
    /// Returns messages of a workspace without their contents, replies included, newest first, and upper bounds of the
    /// bytes of their contents. Filters apply to the newest 20 000 before
    /// `filter.before`.
    pub async fn activity(
        &self,
        scope: WorkspaceScope,
        filter: &ActivityFilter,
        limit: i64,
    ) -> StoreResult<Vec<(ActivityMessage, usize)>> {
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
