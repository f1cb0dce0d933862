//! Reading messages. They are written by the committer only.

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::{ChannelId, MessageId, WorkspaceScope, observer::ObserverFilters, snowflake};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult, filters};

/// A message with what is needed of its channel: everything that an answer or a frame shows.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct MessageRow {
    /// The message.
    pub message_id: i64,
    /// Its channel, or the channel behind its conversation.
    pub channel_id: i64,
    /// Its author.
    pub agent_id: i64,
    /// The author's name when it was written.
    pub agent_name: String,
    /// The author's type when it was written.
    pub agent_type: String,
    /// The root of the thread; `None` for a root.
    pub thread_id: Option<i64>,
    /// The text.
    pub text: String,
    /// Rich blocks, passed through.
    pub blocks: Option<Value>,
    /// An object, passed through.
    pub metadata: Value,
    /// An array of file descriptions.
    pub attachments: Value,
    /// Names mentioned in the text.
    pub mentions: Vec<String>,
    /// `wait` or `steer`.
    pub mode: String,
    /// Free text of the client's.
    pub content_type: Option<String>,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
    /// The channel's name.
    pub channel_name: String,
    /// 0 channel, 1 one-to-one conversation, 2 group conversation.
    pub channel_type: i16,
    /// What clients call the conversation; `None` for a channel.
    pub conversation_id: Option<String>,
}

/// A message as lists show it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ListedMessage {
    /// The message.
    #[sqlx(flatten)]
    pub message: MessageRow,
    /// Replies to it.
    pub reply_count: i64,
    /// Agents that read it, counted up to [`crate::read_state::MAX_COUNTED_READERS`].
    pub read_by_count: i64,
    /// The reactions to it: `[{emoji, count, agents: [names]}]`, the earliest first, with at most 100 names each.
    pub reactions: Value,
}

/// A page of messages: ids strictly between the two, at most `limit`.
#[derive(Debug, Clone, Copy)]
pub struct MessagePage {
    /// Only older ones than this.
    pub before: Option<MessageId>,
    /// Only newer ones than this.
    pub after: Option<MessageId>,
    /// How many at most.
    pub limit: i64,
}

/// The day of a message, which is part of its key, follows from its id.
pub(crate) fn day_of(id: i64) -> NaiveDate {
    DateTime::from_timestamp_millis(snowflake::made_at_ms(id)).unwrap_or_default().date_naive()
}

/// Wraps a selection of `m` (messages) into the columns of [`ListedMessage`], in a given order.
macro_rules! listed {
    ($selection:literal, $order:literal) => {
        concat!(
            "SELECT m.message_id, m.channel_id, m.agent_id, m.agent_name, m.agent_type, m.thread_id, m.text,
                    m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type, m.created_at,
                    c.name AS channel_name, c.type AS channel_type, c.conversation_id,
                    (SELECT count(*) FROM messages r
                      WHERE r.workspace_id = m.workspace_id AND r.thread_id = m.message_id
                        AND r.created_on >= m.created_on) AS reply_count,
                    -- Read explicitly, or acknowledged before it expired.
                    (SELECT least(count(*), 1000) FROM (
                        (SELECT s.agent_id FROM message_reads s
                          WHERE s.workspace_id = m.workspace_id AND s.message_id = m.message_id LIMIT 1000)
                        UNION
                        (SELECT d.agent_id FROM deliveries d
                           JOIN mailbox_cursors k ON k.workspace_id = d.workspace_id AND k.agent_id = d.agent_id
                          WHERE d.workspace_id = m.workspace_id AND d.source_id = m.message_id
                            AND d.created_on = m.created_on AND d.source_kind = 0 AND d.seq <= k.ack_floor
                            AND NOT EXISTS (SELECT FROM delivery_exceptions x
                                             WHERE x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id
                                               AND x.seq = d.seq AND x.state = 4)
                          LIMIT 1000)) AS readers) AS read_by_count,
                    (SELECT coalesce(json_agg(json_build_object('emoji', g.emoji, 'count', g.count, 'agents', g.agents)
                                              ORDER BY g.first), '[]')
                       FROM (SELECT r.emoji, count(*) AS count, min(r.reaction_id) AS first,
                                    (array_agg(a.name ORDER BY r.reaction_id))[1:100] AS agents
                               FROM message_reactions r
                               JOIN agents a ON a.workspace_id = r.workspace_id AND a.agent_id = r.agent_id
                              WHERE r.workspace_id = m.workspace_id AND r.message_id = m.message_id
                              GROUP BY r.emoji) AS g) AS reactions
               FROM (",
            $selection,
            ") m JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id ",
            $order
        )
    };
}

impl Store {
    /// The root messages of a channel or conversation, newest first; of them, those whose author and age
    /// the filters let pass.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn channel_messages(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ListedMessage>> {
        let (not_before, above) = filters::not_before(filters);
        sqlx::query_as(listed!(
            "SELECT * FROM messages
              WHERE workspace_id = $1 AND channel_id = $2 AND thread_id IS NULL
                AND message_id < $3 AND message_id > $4 AND created_at >= $6
                AND ($7::bigint[] IS NULL OR agent_id = ANY ($7))
              ORDER BY message_id DESC LIMIT $5",
            "ORDER BY m.message_id DESC"
        ))
        .bind(scope.workspace_id().get())
        .bind(channel.get())
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get).max(above))
        .bind(page.limit)
        .bind(not_before)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a channel"))
    }

    /// The replies of a thread, oldest first; of them, those whose author and age the filters let pass.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn replies(
        &self,
        scope: WorkspaceScope,
        root: MessageId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ListedMessage>> {
        let (not_before, above) = filters::not_before(filters);
        sqlx::query_as(listed!(
            "SELECT * FROM messages
              WHERE workspace_id = $1 AND thread_id = $2 AND message_id < $3 AND message_id > $4
                AND created_on >= $6 AND created_at >= $7
                AND ($8::bigint[] IS NULL OR agent_id = ANY ($8))
              ORDER BY message_id LIMIT $5",
            "ORDER BY m.message_id"
        ))
        .bind(scope.workspace_id().get())
        .bind(root.get())
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get).max(above))
        .bind(page.limit)
        .bind(day_of(root.get()))
        .bind(not_before)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the replies of a thread"))
    }

    /// One message.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn message(&self, scope: WorkspaceScope, id: MessageId) -> StoreResult<Option<ListedMessage>> {
        sqlx::query_as(listed!(
            "SELECT * FROM messages WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3",
            ""
        ))
        .bind(scope.workspace_id().get())
        .bind(id.get())
        .bind(day_of(id.get()))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a message"))
    }

    /// The channel of a name, archived ones included; conversations have no name here.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn channel_of_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<ChannelId>> {
        sqlx::query_scalar("SELECT channel_id FROM channels WHERE workspace_id = $1 AND name = $2 AND type = 0")
            .bind(scope.workspace_id().get())
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map(|id: Option<i64>| id.map(ChannelId::new))
            .map_err(StoreError::from_sqlx("looking up a channel by name"))
    }
}
