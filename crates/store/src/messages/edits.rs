//! Earlier contents of edited messages. An event shows its message as it was when the event was recorded, so
//! replaced contents are kept as long as events are. Used by message updates, the event log and retention.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, MessageId, WorkspaceScope, events::EventSeq, messages::Message};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    connections::DatabaseSession,
    decode::decode_rows,
    messages::{
        days::{MESSAGES_BY_KEY, day_of_id},
        row::MessageRow,
    },
    sizes::{EDIT_BYTES, MESSAGE_BYTES},
};

/// Content that an edit replaces. JSON columns are carried as text, so that they are stored again unchanged.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct ReplacedContent {
    text: String,
    mentions: Vec<String>,
    blocks: Option<String>,
    metadata: String,
}

/// Locks a message of an author, and reads the content that an edit is about to replace. The lock serialises
/// edits of one message, so that their events and replaced contents have the same order.
pub(crate) async fn lock_message(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    (message, author): (MessageId, AgentId),
) -> StoreResult<Option<ReplacedContent>> {
    sqlx::query_as(
        "SELECT text, mentions, blocks::text AS blocks, metadata::text AS metadata FROM messages
          WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3 AND agent_id = $4
            FOR UPDATE",
    )
    .bind(scope.workspace_id())
    .bind(message)
    .bind(day_of_id(message.get()))
    .bind(author)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("locking a message"))
}

/// Stores the content that a message had until this event.
pub(crate) async fn record_replaced(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    message: MessageId,
    until_seq: EventSeq,
    replaced: &ReplacedContent,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO message_edits (workspace_id, message_id, until_seq, text, mentions, blocks, metadata, edited_at)
         VALUES ($1, $2, $3, $4, $5, $6::json, $7::json, $8)",
    )
    .bind(scope.workspace_id())
    .bind(message)
    .bind(until_seq)
    .bind(&replaced.text)
    .bind(&replaced.mentions)
    .bind(&replaced.blocks)
    .bind(&replaced.metadata)
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("recording replaced content"))?;
    Ok(())
}

struct EventMessage {
    event_seq: EventSeq,
    message: Message,
}

impl FromRow<'_, PgRow> for EventMessage {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self { event_seq: row.try_get("event_seq")?, message: MessageRow::from_row(row)?.0 })
    }
}

impl Store {
    /// Returns the number of these events (event seq, message id), in order, whose messages have `bytes` bytes
    /// together, as [`Store::messages_of_events`] reads them. The first one counts whatever its size.
    pub async fn count_fitting_messages(
        &self,
        scope: WorkspaceScope,
        events: &[(EventSeq, MessageId)],
        bytes: usize,
    ) -> StoreResult<usize> {
        if events.len() < 2 {
            return Ok(events.len());
        }
        let ids: Vec<MessageId> = events.iter().map(|(_, id)| *id).collect();
        // An earlier version may be larger than the present one.
        let sizes: Vec<(MessageId, i64)> = sqlx::query_as(formatcp!(
            "SELECT m.message_id,
                    greatest({MESSAGE_BYTES}, (SELECT max({EDIT_BYTES}) FROM message_edits v
                              WHERE v.workspace_id = $1 AND v.message_id = m.message_id))::bigint
               FROM unnest($2::bigint[], $3::date[]) AS k (message_id, created_on)
               {MESSAGES_BY_KEY}"
        ))
        .bind(scope.workspace_id())
        .bind(&ids)
        .bind(ids.iter().map(|id| day_of_id(id.get())).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("measuring the messages of events"))?;
        let sizes: HashMap<MessageId, i64> = sizes.into_iter().collect();
        let mut left = i64::try_from(bytes).unwrap_or(i64::MAX);
        let fitting = ids.iter().take_while(|id| {
            // A removed message has no row, and takes no memory.
            left -= sizes.get(id).copied().unwrap_or(0);
            left >= 0
        });
        Ok(fitting.count().max(1))
    }

    /// Reads the messages of these events (event seq, message id) as they were when the event was recorded, by
    /// event seq. Removed messages are left out.
    pub async fn messages_of_events(
        &self,
        scope: WorkspaceScope,
        events: &[(EventSeq, MessageId)],
    ) -> StoreResult<HashMap<EventSeq, Message>> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        let (seqs, ids): (Vec<EventSeq>, Vec<MessageId>) = events.iter().copied().unzip();
        let days: Vec<chrono::NaiveDate> = ids.iter().map(|id| day_of_id(id.get())).collect();
        // The first edit after the event holds the content at the event; without one the content is unchanged.
        // Blocks may be null before an edit, so the presence of the edit decides about them, not their value.
        let rows = sqlx::query(formatcp!(
            "SELECT k.event_seq, m.message_id, m.channel_id, m.agent_id AS author_id, m.agent_name AS author_name,
                    m.agent_type, m.thread_id,
                    coalesce(e.text, m.text) AS text,
                    CASE WHEN e.text IS NULL THEN m.blocks ELSE e.blocks END AS blocks,
                    coalesce(e.metadata, m.metadata) AS metadata, m.attachments,
                    coalesce(e.mentions, m.mentions) AS mentions, m.mode, m.content_type, m.created_at,
                    c.name AS channel_name, c.type AS channel_type, c.conversation_id
               FROM unnest($2::bigint[], $3::bigint[], $4::date[]) AS k (event_seq, message_id, created_on)
               {MESSAGES_BY_KEY}
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id
               LEFT JOIN LATERAL (
                    SELECT v.text, v.mentions, v.blocks, v.metadata FROM message_edits v
                     WHERE v.workspace_id = $1 AND v.message_id = k.message_id AND v.until_seq > k.event_seq
                     ORDER BY v.until_seq LIMIT 1) AS e ON true"
        ))
        .bind(scope.workspace_id())
        .bind(seqs)
        .bind(ids)
        .bind(days)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the messages of events"))?;
        let found: Vec<EventMessage> = decode_rows("messages", &rows)?;
        Ok(found.into_iter().map(|row| (row.event_seq, row.message)).collect())
    }

    /// Removes up to `limit` earlier contents that were replaced more than `age` ago. Returns the number removed.
    pub async fn prune_message_edits(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        // SKIP LOCKED: workers that prune at the same time take different rows.
        let done = sqlx::query(
            "DELETE FROM message_edits e
              USING (SELECT workspace_id, message_id, until_seq FROM message_edits
                      WHERE edited_at < relay_now() - make_interval(secs => $1)
                      ORDER BY edited_at LIMIT $2
                        FOR UPDATE SKIP LOCKED) AS old
              WHERE e.workspace_id = old.workspace_id AND e.message_id = old.message_id
                AND e.until_seq = old.until_seq",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning replaced content"))?;
        Ok(done.rows_affected())
    }
}
