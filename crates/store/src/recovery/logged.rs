//! Deliveries that the log still holds and Postgres has lost: written again, or given up.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, WorkspaceScope, dead_letter::DeadReason, session::Seq};
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    commit::day_of,
    cursors::split,
    events::Recorded,
    expiry::{DeadLettered, record},
};

/// A delivery as the log tells it.
#[derive(Debug, Clone)]
pub struct LoggedDelivery {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The recipient.
    pub agent_id: AgentId,
    /// Its place in the mailbox.
    pub seq: Seq,
    /// Its id.
    pub delivery_id: DeliveryId,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Who sent it, if the log tells.
    pub sender: Option<AgentId>,
    /// Code of [`relay_domain::delivery::SourceKind`].
    pub kind: i16,
    /// Code of [`relay_domain::delivery::Mode`].
    pub mode: i16,
    /// The message; none when the log holds no more than its numbers, and for an outcome.
    pub message: Option<LoggedMessage>,
}

/// A message as a frame tells it.
#[derive(Debug, Clone)]
pub struct LoggedMessage {
    /// Its id.
    pub message_id: i64,
    /// Its channel, if the frame tells the number.
    pub channel_id: Option<i64>,
    /// Its conversation, if it is in one.
    pub conversation_id: Option<String>,
    /// Who sent it.
    pub agent_id: i64,
    /// The sender's name then.
    pub agent_name: String,
    /// The root of its thread.
    pub thread_id: Option<i64>,
    /// What it says.
    pub text: String,
    /// Blocks.
    pub blocks: Option<Value>,
    /// Metadata without the engine's own.
    pub metadata: Value,
    /// Attachments.
    pub attachments: Value,
    /// Who is named.
    pub mentions: Vec<String>,
    /// wait or steer.
    pub mode: String,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
}

/// What became of logged deliveries.
#[derive(Debug, Default)]
pub struct Reinserted {
    /// Places at or above their mailbox's head, whatever became of them.
    pub ahead: Vec<(WorkspaceScope, AgentId, Seq)>,
    /// How many were written again.
    pub recovered: u64,
    /// Those given up.
    pub dead: Vec<DeadLettered>,
    /// Their events.
    pub recorded: Vec<Recorded>,
}

const AHEAD: &str = "
SELECT k.ord, EXISTS (SELECT FROM deliveries d
                       WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id AND d.seq = k.seq)
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS k (workspace_id, agent_id, seq, ord)
  JOIN mailbox_heads h USING (workspace_id, agent_id)
  JOIN workspaces w USING (workspace_id)
 WHERE k.seq >= h.next_seq AND w.deleted_at IS NULL
 ORDER BY k.ord";

const MESSAGES: &str = "
INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, agent_type, thread_id,
                      text, blocks, metadata, attachments, mentions, mode, created_at)
SELECT DISTINCT ON (s.w, s.m) s.w, s.m, s.d, c.channel_id, s.a, s.n, a.type, s.h, s.x, s.b::json, s.e::json, s.f::json,
       string_to_array(s.p, ' '), s.o, s.z
  FROM unnest($1::bigint[], $2::bigint[], $3::date[], $4::bigint[], $5::text[], $6::bigint[], $7::text[], $8::bigint[],
              $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::timestamptz[])
       AS s (w, m, d, c, v, a, n, h, x, b, e, f, p, o, z)
  JOIN channels c ON c.workspace_id = s.w
   AND c.channel_id = coalesce((SELECT v.channel_id FROM channels v
                                 WHERE v.workspace_id = s.w AND v.conversation_id = s.v), s.c)
  JOIN agents a ON a.workspace_id = s.w AND a.agent_id = s.a
 ORDER BY s.w, s.m
    ON CONFLICT DO NOTHING";

/// What the sources of `k` have come back as.
const SOURCES: &str = "
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::bigint[], $6::smallint[], $7::smallint[],
              $8::timestamptz[], $9::bigint[])
       AS k (workspace_id, agent_id, seq, kind, source_id, redrive_no, mode, created_at, sender)
  JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
  JOIN workspaces w ON w.workspace_id = k.workspace_id
  LEFT JOIN messages m ON k.kind = 0 AND m.workspace_id = k.workspace_id AND m.message_id = k.source_id
        AND m.created_on = (to_timestamp(((k.source_id >> 22) + 1735689600000) / 1000.0) AT TIME ZONE 'UTC')::date
  LEFT JOIN channels c ON c.workspace_id = m.workspace_id AND c.channel_id = m.channel_id
  LEFT JOIN invocations i ON k.kind = 1 AND i.workspace_id = k.workspace_id AND i.invocation_id = k.source_id
        AND i.completed_at IS NOT NULL";

impl Store {
    /// Writes deliveries of the log again that are at or above the heads of their mailboxes, with their messages.
    /// Those whose message cannot be written again become dead letters. Heads stay where they are, so that a call
    /// that is repeated finds the same: [`Store::raise_heads`] comes last.
    ///
    /// # Errors
    /// When Postgres is away; nothing has changed then.
    pub async fn reinsert(&self, logged: &[LoggedDelivery], now: DateTime<Utc>) -> StoreResult<Reinserted> {
        let doing = "writing logged deliveries again";
        let keys: Vec<_> = logged.iter().map(|one| (one.scope, one.agent_id)).collect();
        let (workspaces, agents) = split(&keys);
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
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
        let mut done = Reinserted {
            ahead: all.iter().map(|one| (one.scope, one.agent_id, one.seq)).collect(),
            ..Reinserted::default()
        };
        if !lost.is_empty() {
            write_messages(&mut tx, &lost).await?;
            let written = write_deliveries(&mut tx, &lost).await?;
            done.dead = give_up(&mut tx, &lost, now).await?;
            done.recovered = written.saturating_sub(done.dead.len() as u64);
            done.recorded = record(&mut tx, &done.dead, now).await?;
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }
}

async fn write_messages(tx: &mut PgConnection, lost: &[&LoggedDelivery]) -> StoreResult<()> {
    let of: Vec<(&LoggedDelivery, &LoggedMessage)> =
        lost.iter().filter_map(|one| Some((*one, one.message.as_ref()?))).collect();
    let text = |value: &Value| value.to_string();
    sqlx::query(MESSAGES)
        .bind(of.iter().map(|(one, _)| one.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.message_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| day_of(m.created_at)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.channel_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.conversation_id.as_deref()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.agent_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.agent_name.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.thread_id).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.text.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.blocks.as_ref().map(text)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| text(&m.metadata)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| text(&m.attachments)).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.mentions.join(" ")).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.mode.as_str()).collect::<Vec<_>>())
        .bind(of.iter().map(|(_, m)| m.created_at).collect::<Vec<_>>())
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("writing logged messages again"))?;
    Ok(())
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn bind<'q>(query: Query<'q>, lost: &[&LoggedDelivery]) -> Query<'q> {
    query
        .bind(lost.iter().map(|one| one.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.agent_id.get()).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.seq).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.kind).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.delivery_id.source).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.delivery_id.redrive_no).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.mode).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.created_at).collect::<Vec<_>>())
        .bind(lost.iter().map(|one| one.sender.map(AgentId::get)).collect::<Vec<_>>())
}

async fn write_deliveries(tx: &mut PgConnection, lost: &[&LoggedDelivery]) -> StoreResult<u64> {
    // Why the recipient got it follows from what the message is.
    let query = format!(
        "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no,
                                 channel_id, node_id, mode, reason, created_at, expires_at)
         SELECT DISTINCT ON (k.workspace_id, k.agent_id, k.seq)
                k.workspace_id, k.agent_id, k.seq, (k.created_at AT TIME ZONE 'UTC')::date, k.kind, k.source_id,
                k.redrive_no, m.channel_id, a.node_id, k.mode,
                CASE WHEN k.kind = 1 THEN 4 WHEN m.thread_id IS NOT NULL THEN 3 WHEN c.type <> 0 THEN 2
                     WHEN a.name = ANY (m.mentions) THEN 1 ELSE 0 END,
                k.created_at, k.created_at + make_interval(secs => w.delivery_ttl_seconds)
         {SOURCES}
          ORDER BY k.workspace_id, k.agent_id, k.seq
             ON CONFLICT DO NOTHING"
    );
    let written = bind(sqlx::query(sqlx::AssertSqlSafe(query)), lost)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("writing logged deliveries again"))?;
    Ok(written.rows_affected())
}

async fn give_up(
    tx: &mut PgConnection,
    lost: &[&LoggedDelivery],
    now: DateTime<Utc>,
) -> StoreResult<Vec<DeadLettered>> {
    use sqlx::Row as _;
    let reason = DeadReason::LostInRestore;
    let query = format!(
        "WITH gone AS (
            SELECT DISTINCT ON (k.workspace_id, k.agent_id, k.seq) k.*, a.name
            {SOURCES}
             WHERE m.message_id IS NULL AND i.invocation_id IS NULL
             ORDER BY k.workspace_id, k.agent_id, k.seq
         ), dead AS (
            INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, error, retryable, reason, at)
            SELECT workspace_id, agent_id, seq, 4, $10, false, $11, $12 FROM gone
                ON CONFLICT DO NOTHING
            RETURNING workspace_id, agent_id, seq
         )
         SELECT g.* FROM dead JOIN gone g USING (workspace_id, agent_id, seq) ORDER BY 1, 2, 3"
    );
    let rows = bind(sqlx::query(sqlx::AssertSqlSafe(query)), lost)
        .bind(reason.error())
        .bind(reason.as_str())
        .bind(now)
        .fetch_all(tx)
        .await
        .map_err(StoreError::from_sqlx("giving up lost deliveries"))?;
    let scope = |id| WorkspaceScope::from_engine_row(relay_domain::WorkspaceId::new(id));
    let dead = rows.iter().map(|row| DeadLettered {
        scope: scope(row.get("workspace_id")),
        delivery_id: DeliveryId {
            source: row.get("source_id"),
            agent: AgentId::new(row.get("agent_id")),
            redrive_no: row.get("redrive_no"),
        },
        seq: row.get("seq"),
        reason,
        error: None,
        agent_name: row.get("name"),
        sender: row.get::<Option<i64>, _>("sender").map(AgentId::new),
        place: None,
    });
    Ok(dead.collect())
}
