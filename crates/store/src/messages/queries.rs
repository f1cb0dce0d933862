//! Reads of messages for lists, single messages and threads. Only the batch commit writes messages.

use const_format::{concatcp, formatcp};
use relay_domain::{ChannelId, MessageId, WorkspaceScope, messages::ListedMessage, observers::ObserverFilters};
use sqlx::postgres::PgRow;

use crate::{
    Store, StoreError, StoreResult,
    codes::{CHANNEL, DEAD_LETTERED, MESSAGE_SOURCE},
    decode::{decode_row, decode_rows},
    messages::{days::day_of_id, read_state::MAX_COUNTED_READERS, row::ListedMessageRow},
    observers::filters,
};

/// A page of messages: ids strictly between `after` and `before`, at most `limit`.
#[derive(Debug, Clone, Copy)]
pub struct MessagePage {
    pub before: Option<MessageId>,
    pub after: Option<MessageId>,
    pub limit: i64,
}

/// Wraps a selection of `m` (messages) into the columns of [`ListedMessageRow`], in a given order.
macro_rules! listed_messages {
    ($selection:literal, $order:literal) => {
        concatcp!(
            "SELECT m.message_id, m.channel_id, m.agent_id AS author_id, m.agent_name AS author_name, m.agent_type,
                    m.thread_id, m.text, m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type, m.created_at,
                    c.name AS channel_name, c.type AS channel_type, c.conversation_id,
                    (SELECT count(*) FROM messages r
                      WHERE r.workspace_id = m.workspace_id AND r.thread_id = m.message_id
                        AND r.created_on >= m.created_on) AS reply_count,
                    -- Read explicitly, or acked before it expired.
                    (SELECT least(count(*), ", MAX_COUNTED_READERS, ") FROM (
                        (SELECT s.agent_id FROM message_reads s
                          WHERE s.workspace_id = m.workspace_id AND s.message_id = m.message_id
                          LIMIT ", MAX_COUNTED_READERS, ")
                        UNION
                        (SELECT d.agent_id FROM deliveries d
                           JOIN mailbox_cursors k ON k.workspace_id = d.workspace_id AND k.agent_id = d.agent_id
                          WHERE d.workspace_id = m.workspace_id AND d.source_id = m.message_id
                            AND d.created_on = m.created_on AND d.source_kind = ", MESSAGE_SOURCE, "
                            AND d.seq <= k.ack_floor
                            AND NOT EXISTS (SELECT FROM delivery_exceptions x
                                             WHERE x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id
                                               AND x.seq = d.seq AND x.state = ", DEAD_LETTERED, ")
                          LIMIT ", MAX_COUNTED_READERS, ")) AS readers) AS read_by_count,
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

// The selections bind a day or an id range besides the key: replies are never older than their root, and a message has
// the day of its id, so older partitions stay closed.
impl Store {
    /// Lists the root messages of a channel or conversation whose author and age pass the filters, newest first.
    pub async fn channel_messages(
        &self,
        scope: WorkspaceScope,
        channel: ChannelId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ListedMessage>> {
        let (not_before, above) = filters::not_before(filters);
        let rows = sqlx::query(listed_messages!(
            "SELECT * FROM messages
              WHERE workspace_id = $1 AND channel_id = $2 AND thread_id IS NULL
                AND message_id < $3 AND message_id > $4 AND created_at >= $6
                AND ($7::bigint[] IS NULL OR agent_id = ANY ($7))
              ORDER BY message_id DESC LIMIT $5",
            "ORDER BY m.message_id DESC"
        ))
        .bind(scope.workspace_id())
        .bind(channel)
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get).max(above))
        .bind(page.limit)
        .bind(not_before)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a channel"))?;
        decode_listed(&rows)
    }

    /// Lists the replies of a thread whose author and age pass the filters, oldest first.
    pub async fn replies(
        &self,
        scope: WorkspaceScope,
        root: MessageId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<ListedMessage>> {
        let (not_before, above) = filters::not_before(filters);
        let rows = sqlx::query(listed_messages!(
            "SELECT * FROM messages
              WHERE workspace_id = $1 AND thread_id = $2 AND message_id < $3 AND message_id > $4
                AND created_on >= $6 AND created_at >= $7
                AND ($8::bigint[] IS NULL OR agent_id = ANY ($8))
              ORDER BY message_id LIMIT $5",
            "ORDER BY m.message_id"
        ))
        .bind(scope.workspace_id())
        .bind(root)
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get).max(above))
        .bind(page.limit)
        .bind(day_of_id(root.get()))
        .bind(not_before)
        .bind(filters::agent_ids(filters))
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the replies of a thread"))?;
        decode_listed(&rows)
    }

    /// Lists the messages whose authors were bound with a session when they wrote them, newest first.
    pub async fn session_messages(
        &self,
        scope: WorkspaceScope,
        session_ref: &str,
        page: MessagePage,
    ) -> StoreResult<Vec<ListedMessage>> {
        let rows = sqlx::query(listed_messages!(
            "SELECT written.* FROM session_messages s
               JOIN messages written USING (workspace_id, message_id, created_on)
              WHERE s.workspace_id = $1 AND s.session_ref = $2 AND s.message_id < $3 AND s.message_id > $4
              ORDER BY s.message_id DESC LIMIT $5",
            "ORDER BY m.message_id DESC"
        ))
        .bind(scope.workspace_id())
        .bind(session_ref)
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get))
        .bind(page.limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a session"))?;
        decode_listed(&rows)
    }

    /// Reads one message.
    pub async fn message(&self, scope: WorkspaceScope, id: MessageId) -> StoreResult<Option<ListedMessage>> {
        let row = sqlx::query(listed_messages!(
            "SELECT * FROM messages WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3",
            ""
        ))
        .bind(scope.workspace_id())
        .bind(id)
        .bind(day_of_id(id.get()))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading a message"))?;
        row.map(|row| Ok(decode_row::<ListedMessageRow>("messages", &row)?.0)).transpose()
    }

    /// Finds a channel by name, archived or not. Conversations cannot be addressed by name.
    pub async fn channel_id_by_name(&self, scope: WorkspaceScope, name: &str) -> StoreResult<Option<ChannelId>> {
        const FIND: &str =
            formatcp!("SELECT channel_id FROM channels WHERE workspace_id = $1 AND name = $2 AND type = {CHANNEL}");
        sqlx::query_scalar(FIND)
            .bind(scope.workspace_id())
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking up a channel by name"))
    }
}

fn decode_listed(rows: &[PgRow]) -> StoreResult<Vec<ListedMessage>> {
    let rows: Vec<ListedMessageRow> = decode_rows("messages", rows)?;
    Ok(rows.into_iter().map(|row| row.0).collect())
}
