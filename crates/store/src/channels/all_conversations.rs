//! List of all conversations of a workspace, for callers that take part in none of them: the workspace's key and
//! observers.

use const_format::formatcp;
use relay_domain::{
    ChannelId, WorkspaceScope,
    channels::{MAX_COUNTED_MESSAGES, WorkspaceConversation},
    observers::ObserverFilters,
};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult, channels::conversations::decode_last_message, codes::CHANNEL,
    messages::contents::decode_sized, observers::filters,
};

struct WorkspaceConversationRow(WorkspaceConversation);

impl FromRow<'_, PgRow> for WorkspaceConversationRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(WorkspaceConversation {
            channel_id: row.try_get("channel_id")?,
            channel_kind: row.try_get("type")?,
            conversation_id: row.try_get("conversation_id")?,
            title: row.try_get("title")?,
            created_at: row.try_get("created_at")?,
            participants: row.try_get("participants")?,
            message_count: row.try_get("message_count")?,
            last_message: decode_last_message(row)?,
        }))
    }
}

// The page of channels is cut first, so that the three lateral reads run once per listed conversation.
const LIST: &str = formatcp!(
    "
SELECT c.channel_id, c.type, c.conversation_id, c.title, c.created_at, p.names AS participants,
       n.message_count, l.message_id AS last_message_id, l.agent_id AS last_agent_id, l.agent_name AS last_agent_name,
       l.agent_type AS last_agent_type, octet_length(l.text)::bigint AS content_bytes, l.created_at AS last_created_at
  FROM (SELECT * FROM channels
         WHERE workspace_id = $1 AND channel_id < $2 AND type <> {CHANNEL}
         ORDER BY channel_id DESC LIMIT $3) AS c
 CROSS JOIN LATERAL (
       SELECT coalesce(array_agg(a.name ORDER BY a.name), '{{}}') AS names
         FROM channel_members o
         JOIN agents a ON a.workspace_id = o.workspace_id AND a.agent_id = o.agent_id
        WHERE o.workspace_id = $1 AND o.channel_id = c.channel_id
          AND ($5::bigint[] IS NULL OR o.agent_id = ANY ($5))) AS p
 CROSS JOIN LATERAL (
       SELECT count(*) AS message_count
         FROM (SELECT FROM messages
                WHERE workspace_id = $1 AND channel_id = c.channel_id AND thread_id IS NULL
                  AND ($5::bigint[] IS NULL OR agent_id = ANY ($5))
                  AND message_id > $7 AND created_at >= $6
                LIMIT $4) AS counted) AS n
  LEFT JOIN LATERAL (
       SELECT * FROM messages
        WHERE workspace_id = $1 AND channel_id = c.channel_id AND thread_id IS NULL
          AND ($5::bigint[] IS NULL OR agent_id = ANY ($5))
          AND message_id > $7 AND created_at >= $6
        ORDER BY message_id DESC LIMIT 1) AS l ON true
 ORDER BY c.channel_id DESC"
);

impl Store {
    /// Lists at most `limit` conversations of a workspace, the newest first, starting after the one with the
    /// backing channel `before`. The texts of their newest messages are left out; their bytes are returned. Messages
    /// and participants hidden by the filters are neither listed nor counted.
    pub async fn all_conversations(
        &self,
        scope: WorkspaceScope,
        before: Option<ChannelId>,
        limit: i64,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<(WorkspaceConversation, usize)>> {
        let (not_before, above_id) = filters::not_before(filters);
        let rows = sqlx::query(LIST)
            .bind(scope.workspace_id())
            .bind(before.map_or(i64::MAX, ChannelId::get))
            .bind(limit)
            .bind(MAX_COUNTED_MESSAGES)
            .bind(filters::agent_ids(filters))
            .bind(not_before)
            .bind(above_id)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing all conversations"))?;
        let listed = decode_sized::<WorkspaceConversationRow>("channels", &rows)?;
        Ok(listed.into_iter().map(|(row, bytes)| (row.0, bytes)).collect())
    }
}
