//! Deliveries that the NATS log still holds and the restored database lost: reinserted or dead-lettered.

use chrono::{DateTime, Utc};
use const_format::{concatcp, formatcp};
use relay_domain::{
    AgentId, ChannelId, ConversationId, DeliveryId, JsonText, MessageId, WorkspaceId, WorkspaceScope,
    mailboxes::{
        dead_letter::DeadLetterReason,
        delivery::{Mode, Reason, SourceKind},
        stream::Seq,
    },
};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::{ACTION_RESULT_SOURCE, CHANNEL, DEAD_LETTERED, MESSAGE_SOURCE},
    connections::DatabaseSession,
    decode::decode_rows,
    events::RecordedEvents,
    mailboxes::{
        cursors::split_keys,
        expiry::{DeadLetteredDelivery, record_dead_letters},
    },
    messages::days::day_of,
};

/// Delivery as read from the log.
#[derive(Debug, Clone)]
pub struct LoggedDelivery {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub seq: Seq,
    pub delivery_id: DeliveryId,
    pub created_at: DateTime<Utc>,
    /// `None` if the log entry has no sender.
    pub sender: Option<AgentId>,
    pub kind: SourceKind,
    pub mode: Mode,
    /// `None` for an invocation outcome, and if the log entry holds ids only.
    pub message: Option<LoggedMessage>,
}

/// Message as read from a frame.
#[derive(Debug, Clone)]
pub struct LoggedMessage {
    pub message_id: MessageId,
    /// `None` if the frame names the conversation only.
    pub channel_id: Option<ChannelId>,
    pub conversation_id: Option<ConversationId>,
    /// Sender.
    pub agent_id: AgentId,
    /// Name of the sender at that time.
    pub agent_name: String,
    pub thread_id: Option<MessageId>,
    pub text: String,
    pub blocks: Option<JsonText>,
    /// Metadata without the keys that the engine adds.
    pub metadata: JsonText,
    pub attachments: Value,
    pub mentions: Vec<String>,
    pub mode: Mode,
    pub created_at: DateTime<Utc>,
}

/// Outcome of reinserting logged deliveries.
#[derive(Debug, Default)]
pub struct ReinsertOutcome {
    /// Positions at or above their mailbox's head, whatever the outcome.
    pub ahead: Vec<(WorkspaceScope, AgentId, Seq)>,
    /// Deliveries reinserted.
    pub recovered: u64,
    /// Deliveries whose message is lost.
    pub dead_lettered: Vec<DeadLetteredDelivery>,
    pub recorded: Vec<RecordedEvents>,
}

const AHEAD: &str = "
SELECT k.ord, EXISTS (SELECT FROM deliveries d
                       WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id AND d.seq = k.seq)
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS k (workspace_id, agent_id, seq, ord)
  JOIN mailbox_heads h USING (workspace_id, agent_id)
  JOIN workspaces w USING (workspace_id)
 WHERE k.seq >= h.next_seq AND w.deleted_at IS NULL
 ORDER BY k.ord";

// DISTINCT ON: the log holds one entry per recipient of a message.
const MESSAGES: &str = "
INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, agent_type, thread_id,
                      text, blocks, metadata, attachments, mentions, mode, created_at)
SELECT DISTINCT ON (s.workspace_id, s.message_id)
       s.workspace_id, s.message_id, s.created_on, c.channel_id, s.agent_id, s.agent_name, a.type, s.thread_id,
       s.text, s.blocks::json, s.metadata::json, s.attachments::json, string_to_array(s.mentions, ' '), s.mode,
       s.created_at
  FROM unnest($1::bigint[], $2::bigint[], $3::date[], $4::bigint[], $5::text[], $6::bigint[], $7::text[], $8::bigint[],
              $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::timestamptz[])
       AS s (workspace_id, message_id, created_on, channel_id, conversation_id, agent_id, agent_name, thread_id,
             text, blocks, metadata, attachments, mentions, mode, created_at)
  JOIN channels c ON c.workspace_id = s.workspace_id
   AND c.channel_id = coalesce((SELECT v.channel_id FROM channels v
                                 WHERE v.workspace_id = s.workspace_id AND v.conversation_id = s.conversation_id),
                               s.channel_id)
  JOIN agents a ON a.workspace_id = s.workspace_id AND a.agent_id = s.agent_id
 ORDER BY s.workspace_id, s.message_id
    ON CONFLICT DO NOTHING";

/// Joins logged deliveries (`k`) with their sources, as far as these exist after [`MESSAGES`].
const SOURCES: &str = formatcp!(
    "
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::bigint[], $6::smallint[], $7::smallint[],
              $8::timestamptz[], $9::bigint[])
       AS k (workspace_id, agent_id, seq, kind, source_id, redrive_no, mode, created_at, sender)
  JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
  JOIN workspaces w ON w.workspace_id = k.workspace_id
  LEFT JOIN messages m ON k.kind = {MESSAGE_SOURCE} AND m.workspace_id = k.workspace_id AND m.message_id = k.source_id
        AND m.created_on = (to_timestamp(((k.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
  LEFT JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
  LEFT JOIN invocations i ON k.kind = {ACTION_RESULT_SOURCE} AND i.workspace_id = k.workspace_id AND i.invocation_id = k.source_id
        AND i.completed_at IS NOT NULL"
);

// The log has no delivery reason; it follows from the message and its channel.
const REASON: &str = formatcp!(
    "CASE WHEN k.kind = {ACTION_RESULT_SOURCE} THEN {ACTION_RESULT}
          WHEN m.thread_id IS NOT NULL THEN {THREAD_REPLY}
          WHEN c.type <> {CHANNEL} THEN {DM}
          WHEN a.name = ANY (m.mentions) THEN {MENTION}
          ELSE {MESSAGE} END"
);
const ACTION_RESULT: i16 = Reason::ActionResult.code();
const THREAD_REPLY: i16 = Reason::ThreadReply.code();
const DM: i16 = Reason::Dm.code();
const MENTION: i16 = Reason::Mention.code();
const MESSAGE: i16 = Reason::Message.code();

// The end of a delivery's life is not read back from the log, so the lifetime of its workspace applies. DISTINCT ON:
// JetStream may hold a frame twice.
const INSERT_DELIVERIES: &str = concatcp!(
    "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no,
                             channel_id, node_id, mode, reason, created_at, expires_at)
     SELECT DISTINCT ON (k.workspace_id, k.agent_id, k.seq)
            k.workspace_id, k.agent_id, k.seq, (k.created_at AT TIME ZONE 'UTC')::date, k.kind, k.source_id,
            k.redrive_no, m.channel_id, a.node_id, k.mode, ",
    REASON,
    ", k.created_at, k.created_at + make_interval(secs => w.delivery_ttl_seconds)",
    SOURCES,
    " ORDER BY k.workspace_id, k.agent_id, k.seq
         ON CONFLICT DO NOTHING"
);

const DEAD_LETTER: &str = formatcp!(
    "WITH lost AS (
        SELECT DISTINCT ON (k.workspace_id, k.agent_id, k.seq) k.*, a.name
        {SOURCES}
         WHERE m.message_id IS NULL AND i.invocation_id IS NULL
         ORDER BY k.workspace_id, k.agent_id, k.seq
     ), dead_lettered AS (
        INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, error, retryable, reason, at)
        SELECT workspace_id, agent_id, seq, {DEAD_LETTERED}, $10, false, $11, $12 FROM lost
            ON CONFLICT DO NOTHING
        RETURNING workspace_id, agent_id, seq
     )
     SELECT l.* FROM dead_lettered JOIN lost l USING (workspace_id, agent_id, seq) ORDER BY 1, 2, 3"
);

impl Store {
    /// Reinserts logged deliveries at or above the heads of their mailboxes, with their messages. A delivery whose
    /// message cannot be reinserted becomes a dead letter. Heads do not move, so that a repeated call finds the same
    /// deliveries; [`Store::raise_heads`] follows when all are written.
    pub async fn reinsert_logged(&self, logged: &[LoggedDelivery], now: DateTime<Utc>) -> StoreResult<ReinsertOutcome> {
        let doing = "reinserting logged deliveries";
        let keys: Vec<_> = logged.iter().map(|one| (one.scope, one.agent_id)).collect();
        let (workspaces, agents) = split_keys(&keys);
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Without locks: no process serves during a repair, and transactions of the epoch before have ended.
        let ahead: Vec<(i64, bool)> = sqlx::query_as(AHEAD)
            .bind(workspaces)
            .bind(agents)
            .bind(logged.iter().map(|one| one.seq).collect::<Vec<_>>())
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let one = |ord: i64| usize::try_from(ord - 1).ok().and_then(|nth| logged.get(nth));
        let all: Vec<&LoggedDelivery> = ahead.iter().filter_map(|(ord, _)| one(*ord)).collect();
        let lost: Vec<&LoggedDelivery> =
            ahead.iter().filter(|(_, known)| !known).filter_map(|(ord, _)| one(*ord)).collect();
        let mut done = ReinsertOutcome {
            ahead: all.iter().map(|one| (one.scope, one.agent_id, one.seq)).collect(),
            ..ReinsertOutcome::default()
        };
        if !lost.is_empty() {
            write_messages(&mut tx, &lost).await?;
            let written = write_deliveries(&mut tx, &lost).await?;
            done.dead_lettered = dead_letter_lost(&mut tx, &lost, now).await?;
            // A dead letter has a delivery row, too.
            done.recovered = written.saturating_sub(done.dead_lettered.len() as u64);
            done.recorded = record_dead_letters(&mut tx, &done.dead_lettered, now).await?;
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }
}

async fn write_messages(tx: &mut DatabaseSession, lost: &[&LoggedDelivery]) -> StoreResult<()> {
    let of: Vec<(&LoggedDelivery, &LoggedMessage)> =
        lost.iter().filter_map(|one| Some((*one, one.message.as_ref()?))).collect();
    sqlx::query(MESSAGES)
        .bind(of.iter().map(|(one, _)| one.scope.workspace_id()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.message_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| day_of(m.created_at)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.channel_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.conversation_id.as_ref().map(ConversationId::as_str)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.agent_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.agent_name.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.thread_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.text.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.blocks.as_ref().map(JsonText::get)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.metadata.get()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.attachments.to_string()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.mentions.join(" ")).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.mode.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.created_at).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("reinserting logged messages"))?;
    Ok(())
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn bind_deliveries<'q>(query: Query<'q>, lost: &[&LoggedDelivery]) -> Query<'q> {
    query
        .bind(lost.iter().map(|one| one.scope.workspace_id()).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.agent_id).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.seq).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.kind).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.delivery_id.source).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.delivery_id.redrive_no).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.mode).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.created_at).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.sender).collect::<Vec<_>>())
}

async fn write_deliveries(tx: &mut DatabaseSession, lost: &[&LoggedDelivery]) -> StoreResult<u64> {
    let written = bind_deliveries(sqlx::query(INSERT_DELIVERIES), lost)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("reinserting logged deliveries"))?;
    Ok(written.rows_affected())
}

async fn dead_letter_lost(
    tx: &mut DatabaseSession,
    lost: &[&LoggedDelivery],
    now: DateTime<Utc>,
) -> StoreResult<Vec<DeadLetteredDelivery>> {
    let reason = DeadLetterReason::LostInRestore;
    let rows = bind_deliveries(sqlx::query(DEAD_LETTER), lost)
        .bind(reason.default_error())
        .bind(reason.as_str())
        .bind(now)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("dead-lettering lost deliveries"))?;
    let dead_lettered: Vec<LostDelivery> = decode_rows("delivery_exceptions", &rows)?;
    Ok(dead_lettered.into_iter().map(|lost| lost.0).collect())
}

struct LostDelivery(DeadLetteredDelivery);

impl FromRow<'_, PgRow> for LostDelivery {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(DeadLetteredDelivery {
            scope: WorkspaceScope::from_engine_row(row.try_get::<WorkspaceId, _>("workspace_id")?),
            delivery_id: DeliveryId {
                source: row.try_get("source_id")?,
                agent: row.try_get("agent_id")?,
                redrive_no: row.try_get("redrive_no")?,
            },
            seq: row.try_get("seq")?,
            reason: DeadLetterReason::LostInRestore,
            error: None,
            agent_name: row.try_get("name")?,
            sender: row.try_get("sender")?,
            place: None,
        }))
    }
}
