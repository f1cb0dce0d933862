//! Reads of messages for lists, single messages and threads. Only the batch commit writes messages. Pages of channels
//! are in `pages.rs`.
//!
//! A list is read in two steps: the ids and the sizes of its messages, then a few messages at a time.

use std::collections::HashMap;

use chrono::{DateTime, NaiveDate, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{
    AgentId, ChannelId, ConversationId, MessageId, WorkspaceScope,
    channels::ChannelKind,
    messages::{ListedMessage, MessagePage},
    observers::{MessageFacts, ObserverFilters},
};
use sqlx::AssertSqlSafe;

use crate::{
    Store, StoreError, StoreResult,
    codes::{CHANNEL, DEAD_LETTERED, MESSAGE_SOURCE},
    decode::decode_row,
    messages::{
        contents::days_of,
        days::{LAST_DAY, day_of_id},
        read_state::MAX_COUNTED_READERS,
        row::ListedMessageRow,
    },
    observers::filters,
    sizes::MESSAGE_BYTES,
};

/// Message without its contents.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct MessageHead {
    pub message_id: MessageId,
    /// Channel, or the backing channel of the conversation.
    pub channel_id: ChannelId,
    pub channel_name: String,
    pub channel_kind: ChannelKind,
    /// `None` in a channel.
    pub conversation_id: Option<ConversationId>,
    /// Author.
    pub agent_id: AgentId,
    /// Root of the thread; `None` for a root.
    pub thread_id: Option<MessageId>,
    pub created_at: DateTime<Utc>,
    /// Upper bound of the bytes of its contents.
    #[sqlx(try_from = "i64")]
    pub content_bytes: usize,
}

impl MessageHead {
    /// Returns the properties that decide which observers see the message.
    #[must_use]
    pub fn facts(&self) -> MessageFacts<'_> {
        MessageFacts {
            channel_id: self.channel_id,
            channel_name: &self.channel_name,
            conversation_id: self.conversation_id.as_ref().map(ConversationId::as_str),
            agent_id: self.agent_id,
            created_at: self.created_at,
        }
    }
}

/// Returns the statement that reads messages of workspace `$1` with the keys `$2` and `$3`, as [`ListedMessageRow`].
///
/// The days of the messages are part of the text: the planner leaves out the partitions of all others. With bound days
/// alone, each execution would lock and open those of all days, which takes longer than the read.
///
/// Replies, readers and reactions are counted for all messages together and joined: most messages have none, and a
/// subquery for each message and count would take longer than reading the messages. `OFFSET 0`: every row is read by
/// its key, also while the tables have no statistics.
fn listed_messages(first_day: NaiveDate, last_day: NaiveDate) -> String {
    let (replies, readers) = (count_replies(first_day), count_readers(first_day, last_day));
    format!(
        "SELECT m.message_id, m.channel_id, m.agent_id AS author_id, m.agent_name AS author_name, m.agent_type,
                m.thread_id, m.text, m.blocks, m.metadata, m.attachments, m.mentions, m.mode, m.content_type, m.created_at,
                c.name AS channel_name, c.type AS channel_type, c.conversation_id,
                coalesce(replies.count, 0) AS reply_count, coalesce(readers.count, 0) AS read_by_count,
                coalesce(reactions.reactions, '[]') AS reactions
           FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
          CROSS JOIN LATERAL (SELECT * FROM messages
                               WHERE workspace_id = $1 AND message_id = k.message_id AND created_on = k.created_on
                                 AND created_on BETWEEN DATE '{first_day}' AND DATE '{last_day}' OFFSET 0) AS m
          CROSS JOIN LATERAL (SELECT * FROM channels
                               WHERE workspace_id = m.workspace_id AND channel_id = m.channel_id OFFSET 0) AS c
           LEFT JOIN ({replies}) AS replies ON replies.message_id = k.message_id
           LEFT JOIN ({readers}) AS readers ON readers.message_id = k.message_id
           LEFT JOIN ({REACTIONS}) AS reactions ON reactions.message_id = k.message_id"
    )
}

/// Counts the replies to each of the messages `$2`, the oldest of which is of this day.
pub(super) fn count_replies(first_day: NaiveDate) -> String {
    format!(
        "SELECT k.message_id, count(*) AS count
           FROM unnest($2::bigint[]) AS k (message_id)
          CROSS JOIN LATERAL (SELECT FROM messages
                               WHERE workspace_id = $1 AND thread_id = k.message_id
                                 AND created_on BETWEEN DATE '{first_day}' AND {LAST_DAY} OFFSET 0) AS r
          GROUP BY k.message_id"
    )
}

/// Counts the readers of each of the messages `$2` of the days `$3`: those that read it explicitly, or acked it before
/// it expired.
pub(super) fn count_readers(first_day: NaiveDate, last_day: NaiveDate) -> String {
    format!(
        "SELECT k.message_id, least(count(DISTINCT r.agent_id), {MAX_COUNTED_READERS}) AS count
           FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
          CROSS JOIN LATERAL (
                (SELECT agent_id FROM message_reads
                  WHERE workspace_id = $1 AND message_id = k.message_id
                  LIMIT {MAX_COUNTED_READERS})
                UNION ALL
                (SELECT d.agent_id FROM deliveries d
                  CROSS JOIN LATERAL (SELECT ack_floor FROM mailbox_cursors
                                       WHERE workspace_id = $1 AND agent_id = d.agent_id OFFSET 0) AS c
                  WHERE d.workspace_id = $1 AND d.source_id = k.message_id AND d.created_on = k.created_on
                    AND d.created_on BETWEEN DATE '{first_day}' AND DATE '{last_day}'
                    AND d.source_kind = {MESSAGE_SOURCE} AND d.seq <= c.ack_floor
                    AND NOT EXISTS (SELECT FROM delivery_exceptions x
                                     WHERE x.workspace_id = d.workspace_id AND x.agent_id = d.agent_id
                                       AND x.seq = d.seq AND x.state = {DEAD_LETTERED})
                  LIMIT {MAX_COUNTED_READERS})) AS r
          GROUP BY k.message_id"
    )
}

/// Reactions to each of the messages `$2`, as a JSON array for each message.
// The count is exact, the names are cut: every member of a channel may react with the same emoji.
pub(super) const REACTIONS: &str = "
    SELECT g.message_id,
           json_agg(json_build_object('emoji', g.emoji, 'count', g.count, 'agents', g.agents)
                    ORDER BY g.first) AS reactions
      FROM (SELECT r.message_id, r.emoji, count(*) AS count, min(r.reaction_id) AS first,
                   (array_agg(a.name ORDER BY r.reaction_id))[1:100] AS agents
              FROM unnest($2::bigint[]) AS k (message_id)
             CROSS JOIN LATERAL (SELECT * FROM message_reactions
                                  WHERE workspace_id = $1 AND message_id = k.message_id OFFSET 0) AS r
             CROSS JOIN LATERAL (SELECT name FROM agents
                                  WHERE workspace_id = $1 AND agent_id = r.agent_id OFFSET 0) AS a
             GROUP BY r.message_id, r.emoji) AS g
     GROUP BY g.message_id";

// The selections bind a day or an id range besides the key: replies are never older than their root, and a message has
// the day of its id, so older partitions stay closed.
impl Store {
    /// Lists the replies of a thread whose author and age pass the filters, oldest first, with upper bounds of their
    /// bytes.
    pub async fn replies(
        &self,
        scope: WorkspaceScope,
        root: MessageId,
        page: MessagePage,
        filters: &ObserverFilters,
    ) -> StoreResult<Vec<(MessageId, usize)>> {
        let (not_before, above) = filters::not_before(filters);
        let rows = sqlx::query_as(concatcp!(
            "SELECT m.message_id, ",
            MESSAGE_BYTES,
            "::bigint FROM messages m
              WHERE m.workspace_id = $1 AND m.thread_id = $2 AND m.message_id < $3 AND m.message_id > $4
                AND m.created_on >= $6 AND m.created_at >= $7
                AND ($8::bigint[] IS NULL OR m.agent_id = ANY ($8))
              ORDER BY m.message_id LIMIT $5"
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
        Ok(with_sizes(rows))
    }

    /// Lists the messages whose authors were bound with a session when they wrote them, newest first, with upper bounds
    /// of their bytes.
    pub async fn session_messages(
        &self,
        scope: WorkspaceScope,
        session_ref: &str,
        page: MessagePage,
    ) -> StoreResult<Vec<(MessageId, usize)>> {
        let rows = sqlx::query_as(concatcp!(
            "SELECT m.message_id, ",
            MESSAGE_BYTES,
            "::bigint FROM session_messages s JOIN messages m USING (workspace_id, message_id, created_on)
              WHERE s.workspace_id = $1 AND s.session_ref = $2 AND s.message_id < $3 AND s.message_id > $4
              ORDER BY s.message_id DESC LIMIT $5"
        ))
        .bind(scope.workspace_id())
        .bind(session_ref)
        .bind(page.before.map_or(i64::MAX, MessageId::get))
        .bind(page.after.map_or(-1, MessageId::get))
        .bind(page.limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the messages of a session"))?;
        Ok(with_sizes(rows))
    }

    /// Reads these messages, in this order. Removed messages are left out.
    pub async fn listed_messages(&self, scope: WorkspaceScope, ids: &[MessageId]) -> StoreResult<Vec<ListedMessage>> {
        let days = days_of(ids);
        let (Some(first), Some(last)) = (days.iter().min(), days.iter().max()) else { return Ok(Vec::new()) };
        let rows = sqlx::query(AssertSqlSafe(listed_messages(*first, *last)))
            .bind(scope.workspace_id())
            .bind(ids)
            .bind(&days)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading listed messages"))?;
        // Each row is freed as it is decoded, since both copies of all messages together would be large.
        let decoded = rows.into_iter().map(|row| decode_row::<ListedMessageRow>("messages", &row).map(|row| row.0));
        let mut found: HashMap<MessageId, ListedMessage> =
            decoded.map(|listed| listed.map(|listed| (listed.message.id, listed))).collect::<StoreResult<_>>()?;
        Ok(ids.iter().filter_map(|id| found.remove(id)).collect())
    }

    /// Reads a message without its contents.
    pub async fn message_head(&self, scope: WorkspaceScope, id: MessageId) -> StoreResult<Option<MessageHead>> {
        sqlx::query_as(concatcp!(
            "SELECT m.message_id, m.channel_id, c.name AS channel_name, c.type AS channel_kind, c.conversation_id,
                    m.agent_id, m.thread_id, m.created_at, ",
            MESSAGE_BYTES,
            "::bigint AS content_bytes
               FROM messages m JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
              WHERE m.workspace_id = $1 AND m.message_id = $2 AND m.created_on = $3"
        ))
        .bind(scope.workspace_id())
        .bind(id)
        .bind(day_of_id(id.get()))
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the head of a message"))
    }

    /// Reads one message.
    pub async fn message(&self, scope: WorkspaceScope, id: MessageId) -> StoreResult<Option<ListedMessage>> {
        Ok(self.listed_messages(scope, &[id]).await?.pop())
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

pub(super) fn with_sizes(rows: Vec<(MessageId, i64)>) -> Vec<(MessageId, usize)> {
    // Sums of lengths, which are never negative.
    rows.into_iter().map(|(id, bytes)| (id, usize::try_from(bytes).unwrap_or(0))).collect()
}
