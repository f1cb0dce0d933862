//! Conversations as somebody sees them who takes part in none: all of a workspace.

use chrono::{DateTime, Utc};
use relay_domain::{ChannelId, WorkspaceScope, conversation::MAX_COUNTED_MESSAGES, observer::ObserverFilters};

use crate::{Store, StoreError, StoreResult, filters};

/// A conversation of a workspace.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AnyConversation {
    /// The backing channel.
    pub channel_id: i64,
    /// 1 one-to-one, 2 group.
    #[sqlx(rename = "type")]
    pub channel_type: i16,
    /// What clients call it.
    pub conversation_id: String,
    /// A group's own name.
    pub title: Option<String>,
    /// When it began.
    pub created_at: DateTime<Utc>,
    /// Names of those who take part.
    pub participants: Vec<String>,
    /// Messages in it, replies not counted; counted up to [`MAX_COUNTED_MESSAGES`].
    pub message_count: i64,
    /// The author of the newest message, if there is one; the same for the rest.
    pub last_agent_id: Option<i64>,
    /// The author's name.
    pub last_agent_name: Option<String>,
    /// Its text.
    pub last_text: Option<String>,
    /// When it was accepted.
    pub last_created_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Conversations of a workspace, the youngest first: those begun before the one whose backing channel is
    /// given, at most `limit`. Messages and participants that the filters hide are neither named nor counted.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn all_conversations(
        &self,
        scope: WorkspaceScope,
        before: Option<ChannelId>,
        limit: i64,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<AnyConversation>> {
        let (not_before, above_id) = filters::not_before(filters);
        sqlx::query_as(
            "SELECT c.channel_id, c.type, c.conversation_id, c.title, c.created_at, p.names AS participants,
                    n.message_count, l.agent_id AS last_agent_id, l.agent_name AS last_agent_name,
                    l.text AS last_text, l.created_at AS last_created_at
               FROM (SELECT * FROM channels
                      WHERE workspace_id = $1 AND channel_id < $2 AND type <> 0
                      ORDER BY channel_id DESC LIMIT $3) AS c
              CROSS JOIN LATERAL (
                    SELECT coalesce(array_agg(a.name ORDER BY a.name), '{}') AS names
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
              ORDER BY c.channel_id DESC",
        )
        .bind(scope.workspace_id().get())
        .bind(before.map_or(i64::MAX, ChannelId::get))
        .bind(limit)
        .bind(MAX_COUNTED_MESSAGES)
        .bind(filters::agent_ids(filters))
        .bind(not_before)
        .bind(above_id)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing all conversations"))
    }
}
