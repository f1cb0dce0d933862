//! Messages as they were when an event was told: what an edit replaced is kept as long as events are.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use relay_domain::{MessageId, WorkspaceScope};
use sqlx::PgConnection;

use crate::{MessageRow, Store, StoreError, StoreResult, messages_read::day_of};

/// What an edit replaces. JSON as it is stored.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Replaced {
    text: String,
    mentions: Vec<String>,
    blocks: Option<String>,
    metadata: String,
}

/// Locks a message of an author, and reads what an edit is about to replace.
pub(crate) async fn lock(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    (message, author): (MessageId, i64),
) -> StoreResult<Option<Replaced>> {
    sqlx::query_as(
        "SELECT text, mentions, blocks::text AS blocks, metadata::text AS metadata FROM messages
          WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3 AND agent_id = $4
            FOR UPDATE",
    )
    .bind(scope.workspace_id().get())
    .bind(message.get())
    .bind(day_of(message.get()))
    .bind(author)
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("locking a message"))
}

/// Keeps what a message said until this event.
pub(crate) async fn keep(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    message: MessageId,
    until_seq: i64,
    replaced: &Replaced,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO message_edits (workspace_id, message_id, until_seq, text, mentions, blocks, metadata, edited_at)
         VALUES ($1, $2, $3, $4, $5, $6::json, $7::json, $8)",
    )
    .bind(scope.workspace_id().get())
    .bind(message.get())
    .bind(until_seq)
    .bind(&replaced.text)
    .bind(&replaced.mentions)
    .bind(&replaced.blocks)
    .bind(&replaced.metadata)
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("keeping what a message said"))?;
    Ok(())
}

/// The message of an event.
#[derive(sqlx::FromRow)]
struct Told {
    event_seq: i64,
    #[sqlx(flatten)]
    message: MessageRow,
}

impl Store {
    /// The messages of these events (number, message), as they were when the event was told, by the event's number.
    /// Messages that are gone are left out.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn messages_of_events(
        &self,
        scope: WorkspaceScope,
        events: &[(i64, i64)],
    ) -> StoreResult<HashMap<i64, MessageRow>> {
        if events.is_empty() {
            return Ok(HashMap::new());
        }
        let (seqs, ids): (Vec<i64>, Vec<i64>) = events.iter().copied().unzip();
        let days: Vec<chrono::NaiveDate> = ids.iter().map(|id| day_of(*id)).collect();
        // The first edit after the event kept what the message said until then; without one it says it still.
        let told: Vec<Told> = sqlx::query_as(
            "SELECT k.event_seq, m.message_id, m.channel_id, m.agent_id, m.agent_name, m.agent_type, m.thread_id,
                    coalesce(e.text, m.text) AS text,
                    CASE WHEN e.text IS NULL THEN m.blocks ELSE e.blocks END AS blocks,
                    coalesce(e.metadata, m.metadata) AS metadata, m.attachments,
                    coalesce(e.mentions, m.mentions) AS mentions, m.mode, m.content_type, m.created_at,
                    c.name AS channel_name, c.type AS channel_type, c.conversation_id
               FROM unnest($2::bigint[], $3::bigint[], $4::date[]) AS k (event_seq, message_id, created_on)
               JOIN messages m ON m.workspace_id = $1 AND m.message_id = k.message_id AND m.created_on = k.created_on
               JOIN channels c ON c.workspace_id = $1 AND c.channel_id = m.channel_id
               LEFT JOIN LATERAL (
                    SELECT v.text, v.mentions, v.blocks, v.metadata FROM message_edits v
                     WHERE v.workspace_id = $1 AND v.message_id = k.message_id AND v.until_seq > k.event_seq
                     ORDER BY v.until_seq LIMIT 1) AS e ON true",
        )
        .bind(scope.workspace_id().get())
        .bind(seqs)
        .bind(ids)
        .bind(days)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the messages of events"))?;
        Ok(told.into_iter().map(|told| (told.event_seq, told.message)).collect())
    }

    /// Removes up to `limit` earlier texts that were replaced `age` ago. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_message_edits(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM message_edits e
              USING (SELECT workspace_id, message_id, until_seq FROM message_edits
                      WHERE edited_at < now() - make_interval(secs => $1)
                      ORDER BY edited_at LIMIT $2
                        FOR UPDATE SKIP LOCKED) AS old
              WHERE e.workspace_id = old.workspace_id AND e.message_id = old.message_id
                AND e.until_seq = old.until_seq",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning what messages said"))?;
        Ok(done.rows_affected())
    }
}
