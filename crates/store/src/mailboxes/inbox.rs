//! Inbox of an agent: unread channels, unread mentions and reactions to its messages.
//!
//! All reads are bounded, because membership and history are not.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, ChannelId, MessageId, WorkspaceScope,
    channels::MAX_UNREAD,
    events::EventSeq,
    mailboxes::{
        inbox::{Mention, ReadPointer, ReceivedReaction, Unread},
        stream::Seq,
    },
};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
    messages::{days::LAST_DAY, read_state::ACKED_IN_CHANNELS},
};

/// Memberships that an inbox reads at most.
const MEMBERSHIPS: i64 = 2000;
/// Messages above a last-read pointer that are read, newest first, to count those of others.
const COUNTED: i64 = 2000;
/// Messages with mentions above a last-read pointer that are read, newest first.
const MENTIONING: i64 = 500;
/// Reactions to an agent's messages that are read, newest first, to find those of others.
const REACTIONS: i64 = 200;

/// Values that decide what an agent has not read, at one instant. While they are the same, so is its inbox, apart from
/// messages that retention removes.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ReadMarks {
    /// Start of the Postgres server. Another server, or a restored state, may lack commits that were read, and assign
    /// their event seqs again before a recovery raises the epoch.
    pub server_started_at: DateTime<Utc>,
    /// Next seq of the workspace's event log. Each message, edit, reaction and archiving takes its event in its own
    /// transaction, and the head is locked until the commit.
    pub event_head: EventSeq,
    pub ack_floor: Seq,
    /// Memberships and the last-read pointers in their rows, which move without an event.
    pub channels: Vec<ChannelId>,
    pub read_ids: Vec<MessageId>,
}

impl ReadMarks {
    /// Returns whether all memberships of the agent are among the marks.
    #[must_use]
    pub fn are_complete(&self) -> bool {
        i64::try_from(self.channels.len()).is_ok_and(|count| count <= MEMBERSHIPS)
    }

    /// Returns the memory of the memberships and their pointers.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.channels.as_slice()) + size_of_val(self.read_ids.as_slice())
    }
}

/// Unread messages of an agent above its last-read pointer in a channel or conversation.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct CountedChannel {
    pub channel_id: ChannelId,
    pub read_id: MessageId,
    #[sqlx(flatten)]
    pub unread: Unread,
}

/// One row. It opens no partition, since an inbox reads it each time.
// One membership more than an inbox reads shows that the marks are incomplete. They are not sorted: equal marks in
// another order only cost another read of the inbox.
const MARKS: &str = "
    SELECT pg_postmaster_start_time() AS server_started_at,
           coalesce((SELECT next_seq FROM event_heads WHERE workspace_id = $1), 1) AS event_head,
           coalesce((SELECT ack_floor FROM mailbox_cursors WHERE workspace_id = $1 AND agent_id = $2), 0) AS ack_floor,
           coalesce(array_agg(channel_id), '{}') AS channels, coalesce(array_agg(read_id), '{}') AS read_ids
      FROM (SELECT channel_id, coalesce(last_read_id, 0) AS read_id FROM channel_members
             WHERE workspace_id = $1 AND agent_id = $2 LIMIT $3 + 1) AS mine";

const POINTERS: &str = formatcp!(
    "WITH acked AS MATERIALIZED ({ACKED_IN_CHANNELS})
     SELECT c.channel_id, c.name, c.conversation_id,
            greatest(coalesce(cm.last_read_id, 0), coalesce(acked.read_id, 0)) AS read_id
       FROM channel_members cm
       JOIN channels c ON c.workspace_id = cm.workspace_id AND c.channel_id = cm.channel_id
       LEFT JOIN acked ON acked.channel_id = cm.channel_id
      WHERE cm.workspace_id = $1 AND cm.agent_id = $2 AND c.archived_at IS NULL
      LIMIT $3"
);

impl Store {
    /// Reads the marks of an agent.
    pub async fn read_marks(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<ReadMarks> {
        let row = sqlx::query(MARKS)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(MEMBERSHIPS)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading the marks of an inbox"))?;
        decode_row("channel_members", &row)
    }

    /// Reads the last-read pointers of an agent in its channels and conversations that are not archived. Deliveries
    /// that are acked but not folded yet count as read.
    pub async fn read_pointers(&self, scope: WorkspaceScope, agent: AgentId) -> StoreResult<Vec<ReadPointer>> {
        sqlx::query_as(POINTERS)
            .bind(scope.workspace_id())
            .bind(agent)
            .bind(MEMBERSHIPS)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading an agent's last-read pointers"))
    }

    /// Counts the unread messages of an agent above each of these pointers.
    pub async fn count_unread(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        pointers: &[(ChannelId, MessageId)],
    ) -> StoreResult<Vec<CountedChannel>> {
        if pointers.is_empty() {
            return Ok(Vec::new());
        }
        let (channels, reads): (Vec<ChannelId>, Vec<MessageId>) = pointers.iter().copied().unzip();
        let rows = sqlx::query(formatcp!(
            "SELECT k.channel_id, k.read_id, u.count, u.oldest_id, u.newest_id, n.agent_name AS newest_from,
                    octet_length(n.text) AS newest_bytes, n.created_at AS newest_at
               FROM unnest($3::bigint[], $4::bigint[]) AS k (channel_id, read_id)
              CROSS JOIN LATERAL (
                    SELECT count(*) AS count, min(message_id) AS oldest_id, max(message_id) AS newest_id,
                           max(created_on) AS newest_on
                      FROM (SELECT message_id, created_on
                              FROM (SELECT message_id, created_on, agent_id FROM messages
                                     WHERE workspace_id = $1 AND channel_id = k.channel_id AND thread_id IS NULL
                                       AND message_id > k.read_id
                                       AND created_on >= DATE '2025-01-01' + ((k.read_id >> 22) / 86400000)::integer
                                       AND created_on <= {LAST_DAY}
                                     ORDER BY message_id DESC LIMIT $5) AS above
                             WHERE agent_id <> $2 ORDER BY message_id DESC LIMIT $6) AS counted) AS u
               LEFT JOIN messages n
                      ON n.workspace_id = $1 AND n.message_id = u.newest_id AND n.created_on = u.newest_on
                     AND n.created_on <= {LAST_DAY}"
        ))
        .bind(scope.workspace_id())
        .bind(agent)
        .bind(channels)
        .bind(reads)
        .bind(COUNTED)
        .bind(MAX_UNREAD)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting an agent's unread messages"))?;
        decode_rows("messages", &rows)
    }

    /// Lists the newest messages of others above the given (channel, last-read) pointers that mention the agent.
    pub async fn unread_mentions(
        &self,
        scope: WorkspaceScope,
        agent: (AgentId, &str),
        pointers: &[(ChannelId, MessageId)],
        limit: i64,
    ) -> StoreResult<Vec<Mention>> {
        let (channels, reads): (Vec<ChannelId>, Vec<MessageId>) = pointers.iter().copied().unzip();
        sqlx::query_as(formatcp!(
            "SELECT m.message_id, c.name AS channel_name, m.agent_name, octet_length(m.text) AS text_bytes, m.created_at
               FROM unnest($3::bigint[], $4::bigint[]) AS k (channel_id, read_id)
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = k.channel_id
              CROSS JOIN LATERAL (
                    SELECT * FROM (
                        SELECT * FROM messages
                         WHERE workspace_id = $1 AND channel_id = k.channel_id AND mentions <> '{{}}'
                           AND message_id > k.read_id
                           AND created_on >= DATE '2025-01-01' + ((k.read_id >> 22) / 86400000)::integer
                           AND created_on <= {LAST_DAY}
                         ORDER BY message_id DESC LIMIT $6) AS above
                     WHERE above.agent_id <> $2 AND $5 = ANY (above.mentions)
                     LIMIT $7) AS m
              ORDER BY m.message_id DESC LIMIT $7",
        ))
        .bind(scope.workspace_id().get())
        .bind(agent.0.get())
        .bind(channels)
        .bind(reads)
        .bind(agent.1)
        .bind(MENTIONING)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding mentions of an agent"))
    }

    /// Lists the newest reactions of others to the agent's messages in channels that are not archived.
    pub async fn received_reactions(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        limit: i64,
    ) -> StoreResult<Vec<ReceivedReaction>> {
        sqlx::query_as(formatcp!(
            "SELECT r.message_id, c.name AS channel_name, r.emoji, a.name AS agent_name, r.created_at
               FROM (SELECT * FROM message_reactions WHERE workspace_id = $1 AND author_id = $2
                      ORDER BY reaction_id DESC LIMIT $3) AS r
               JOIN messages m ON m.workspace_id = $1 AND m.message_id = r.message_id
                              AND m.created_on = DATE '2025-01-01' + ((r.message_id >> 22) / 86400000)::integer
                              AND m.created_on <= {LAST_DAY}
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id AND c.archived_at IS NULL
               JOIN agents a ON a.workspace_id = $1 AND a.agent_id = r.agent_id
              WHERE r.agent_id <> $2
              ORDER BY r.reaction_id DESC LIMIT $4",
        ))
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(REACTIONS)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing reactions to an agent's messages"))
    }
}
