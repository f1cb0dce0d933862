//! Chunks of a fan-out: each writes the deliveries of the next recipients of its record, raises their heads, and
//! advances the record, in one transaction. [`crate::messages::fanouts`] opens the record.

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{
    AgentId, BatchId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
    messages::Message,
};
use sqlx::{FromRow, PgExecutor, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::MESSAGE_SOURCE,
    connections::Transaction,
    decode::decode_rows,
    events::{self, RecordedEvents},
    messages::{
        batch::{NewRecipient, WrittenDelivery, delivery_event},
        commit_facts::{connected_gateways, gateways_of_agent},
        commit_write::written_deliveries,
        days::day_of,
        fanouts::CLAIM,
    },
};

/// Recipients of a chunk. Its locks are held for some ten milliseconds.
const CHUNK_RECIPIENTS: i32 = 512;
const DOING: &str = "writing a chunk of a fan-out";

/// The lock order is that of a batch, after the record: outbox row, heads, event counters. `going` has a row only if no
/// other process has advanced the record, and, unless the caller records events ($9), the workspace is not watched.
///
/// `known`: a recovery may have restored deliveries of later chunks from the log. A delivery that is late does not
/// expire in the past, which the expiry loop has scanned, and none lives longer than the longest lifetime.
// The depth is unlimited: the record has decided which mailboxes are full, and names only the others.
const WRITE_CHUNK: &str = concatcp!(
    "
WITH fanout AS MATERIALIZED (
    SELECT f.*, cardinality(f.agents) AS total,
           coalesce((SELECT h.watched_until FROM event_heads h WHERE h.workspace_id = $1), '-infinity') > relay_now()
               AS watched
      FROM fanouts f
     WHERE f.workspace_id = $1 AND f.message_id = $2 AND f.written = $4 AND relay_require_epoch($8)
       FOR UPDATE
), going AS MATERIALIZED (
    SELECT * FROM fanout WHERE $9 OR NOT watched
), opened AS (
    INSERT INTO outbox (batch_id, gateway_id, sources, traceparent, first_agent, last_agent)
    SELECT $6, $7, jsonb_build_array(jsonb_build_array(workspace_id, message_id)), traceparent,
           agents[written + 1], agents[least(written + $5, total)]
      FROM going
    RETURNING first_agent, last_agent
), known AS MATERIALIZED (
    SELECT d.agent_id FROM opened o
     CROSS JOIN LATERAL (SELECT agent_id FROM deliveries
                          WHERE workspace_id = $1 AND source_id = $2 AND created_on = $3
                            AND agent_id BETWEEN o.first_agent AND o.last_agent
                            AND source_kind = ",
    MESSAGE_SOURCE,
    " AND redrive_no = 0) AS d
), want AS MATERIALIZED (
    SELECT f.workspace_id, r.agent_id, f.message_id AS source_id, f.created_on, f.channel_id, a.node_id, a.provider,
           ",
    gateways_of_agent!(),
    " AS gateways, r.mode, r.reason, f.created_at,
           least(greatest(f.expires_at, relay_now()), f.created_at + interval '6 days') AS expires_at, r.ord, 2147483647 AS depth
      FROM going f
     CROSS JOIN opened
     CROSS JOIN LATERAL unnest(f.agents[f.written + 1 : f.written + $5], f.modes[f.written + 1 : f.written + $5],
                               f.reasons[f.written + 1 : f.written + $5])
           WITH ORDINALITY AS r (agent_id, mode, reason, ord)
      JOIN workspaces w ON w.workspace_id = f.workspace_id
      JOIN agents a ON a.workspace_id = f.workspace_id AND a.agent_id = r.agent_id
     WHERE w.deleted_at IS NULL AND a.deleted_at IS NULL
       AND NOT EXISTS (SELECT FROM known k WHERE k.agent_id = r.agent_id)
), ",
    written_deliveries!(),
    ", advanced AS (
    UPDATE fanouts f SET written = f.written + $5, gateway_id = $7, claimed_until = relay_now() + make_interval(secs => $10)
      FROM going g
     WHERE f.workspace_id = $1 AND f.message_id = $2 AND g.written + $5 < g.total
), removed AS (
    DELETE FROM fanouts f USING going g
     WHERE f.workspace_id = $1 AND f.message_id = $2 AND g.written + $5 >= g.total
)
SELECT NULL::bigint AS agent_id, NULL::bigint AS seq, NULL::text AS node_id, NULL::text AS provider,
       NULL::bigint[] AS gateways, NULL::smallint AS mode, NULL::smallint AS reason, NULL::timestamptz AS expires_at,
       watched, written + $5 >= total AS is_last
  FROM fanout
 UNION ALL
SELECT agent_id, next_seq + rank - 1, node_id, provider, gateways, mode, reason, expires_at, NULL, NULL FROM fitted"
);

/// Next chunk of a fan-out.
#[derive(Debug)]
pub struct FanoutChunk<'a> {
    pub scope: WorkspaceScope,
    pub message: &'a Message,
    /// Recipients that earlier chunks have dealt with, as far as the caller knows.
    pub written: i32,
    /// Identifies the chunk's outbox row.
    pub batch_id: BatchId,
    /// The gateway that publishes it after the commit.
    pub gateway_id: GatewayId,
    /// Time of its events.
    pub at: DateTime<Utc>,
}

/// Outcome of a chunk.
#[derive(Debug)]
pub enum ChunkOutcome {
    Written(WrittenChunk),
    /// Another process has advanced the record, or completed it. Nothing was written.
    Overtaken,
}

/// Committed chunk.
#[derive(Debug)]
pub struct WrittenChunk {
    /// Recovery epoch in which it was committed.
    pub epoch: Option<i64>,
    /// Deliveries, in the order of their agents. Agents that were deleted since the message was accepted have none.
    pub deliveries: Vec<(NewRecipient, WrittenDelivery)>,
    /// Recipients that the chunks up to this one have dealt with.
    pub written: i32,
    /// The fan-out is complete.
    pub is_last: bool,
    /// The recorded events, if the workspace is watched.
    pub events: Vec<RecordedEvents>,
}

/// One row of [`WRITE_CHUNK`].
enum ChunkRow {
    Record { watched: bool, is_last: bool },
    Delivery(NewRecipient, WrittenDelivery),
}

impl FromRow<'_, PgRow> for ChunkRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let Some(agent_id) = row.try_get::<Option<AgentId>, _>("agent_id")? else {
            return Ok(Self::Record { watched: row.try_get("watched")?, is_last: row.try_get("is_last")? });
        };
        let (mode, reason): (Mode, Reason) = (row.try_get("mode")?, row.try_get("reason")?);
        let (seq, node_id): (Seq, NodeId) = (row.try_get("seq")?, row.try_get("node_id")?);
        let (provider, gateways): (Option<ProviderName>, Vec<GatewayId>) =
            (row.try_get("provider")?, connected_gateways(row.try_get("gateways")?));
        let expires_at = row.try_get("expires_at")?;
        let recipient = NewRecipient { agent_id, mode, reason };
        Ok(Self::Delivery(recipient, WrittenDelivery { seq, node_id, provider, gateways, expires_at }))
    }
}

/// Rows that the statement of a chunk has written.
struct ChunkRows {
    deliveries: Vec<(NewRecipient, WrittenDelivery)>,
    watched: bool,
    is_last: bool,
}

impl Store {
    /// Writes the next chunk of a fan-out.
    ///
    /// # Errors
    /// With [`StoreError::Unavailable`] it may have been committed: the record tells. After any other error it was not.
    pub async fn write_fanout_chunk(&self, chunk: &FanoutChunk<'_>) -> StoreResult<ChunkOutcome> {
        let epoch = self.epoch(DOING)?;
        let done = self.await_write(self.write_chunk(chunk, epoch)).await;
        self.note_epoch(epoch, done.unwrap_or_else(|| Err(StoreError::unavailable(DOING))))
    }

    async fn write_chunk(&self, chunk: &FanoutChunk<'_>, epoch: Option<i64>) -> StoreResult<ChunkOutcome> {
        // Most workspaces are not watched, and take one statement without a transaction around it. In a watched one
        // it writes nothing.
        let Some(rows) = chunk.write(&self.pool, epoch, false).await? else { return Ok(ChunkOutcome::Overtaken) };
        if !rows.watched {
            return Ok(ChunkOutcome::Written(chunk.written_as(epoch, rows, Vec::new())));
        }
        // The events name the seqs, so they follow in a statement of their own.
        let mut tx: Transaction = self.pool.begin().await.map_err(StoreError::from_sqlx(DOING))?;
        let Some(rows) = chunk.write(&mut *tx, epoch, true).await? else { return Ok(ChunkOutcome::Overtaken) };
        let accepted = rows.deliveries.iter().map(|(to, row)| delivery_event(chunk.message, to, Some(row)));
        let made = accepted.map(|event| (chunk.scope, event)).collect();
        let recorded = events::append_mixed(&mut tx, chunk.at, made).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(DOING))?;
        Ok(ChunkOutcome::Written(chunk.written_as(epoch, rows, recorded)))
    }
}

impl FanoutChunk<'_> {
    /// Executes the statement. `None`: the record was advanced or completed. In a watched workspace it writes only if
    /// events are recorded in the same transaction.
    async fn write(
        &self,
        executor: impl PgExecutor<'_>,
        epoch: Option<i64>,
        records_events: bool,
    ) -> StoreResult<Option<ChunkRows>> {
        let rows = sqlx::query(WRITE_CHUNK)
            .bind(self.scope.workspace_id())
            .bind(self.message.id)
            .bind(day_of(self.message.created_at))
            .bind(self.written)
            .bind(CHUNK_RECIPIENTS)
            .bind(self.batch_id)
            .bind(self.gateway_id)
            .bind(epoch)
            .bind(records_events)
            .bind(CLAIM.as_secs_f64())
            .fetch_all(executor)
            .await
            .map_err(StoreError::from_sqlx(DOING))?;
        let mut record = None;
        let mut deliveries = Vec::with_capacity(rows.len());
        for row in decode_rows::<ChunkRow>("deliveries", &rows)? {
            match row {
                ChunkRow::Record { watched, is_last } => record = Some((watched, is_last)),
                ChunkRow::Delivery(recipient, delivery) => deliveries.push((recipient, delivery)),
            }
        }
        Ok(record.map(|(watched, is_last)| ChunkRows { deliveries, watched, is_last }))
    }

    fn written_as(&self, epoch: Option<i64>, rows: ChunkRows, events: Vec<RecordedEvents>) -> WrittenChunk {
        let ChunkRows { deliveries, is_last, .. } = rows;
        // After the last chunk this may exceed the number of recipients, which does no harm: no chunk follows.
        WrittenChunk { epoch, deliveries, written: self.written + CHUNK_RECIPIENTS, is_last, events }
    }
}
