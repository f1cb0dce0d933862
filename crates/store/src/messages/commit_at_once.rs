//! The batch commit: messages, deliveries, mailbox heads, idempotency keys, events and the outbox row of several sends
//! commit together, or none of them does. The engine's committer calls [`Store::commit_batch`] with a [`Batch`] and
//! gets one [`SendOutcome`] per send.
//!
//! One statement, which is its own transaction: one round trip, and locks that are held for the length of the statement
//! instead of four round trips. It writes only if all facts hold that the sends were resolved with, no key was used
//! before, no workspace is watched, and no author has an open fan-out that precedes. That is the usual case. Otherwise
//! it writes nothing, and the batch takes the transaction with a statement per step
//! ([`crate::messages::commit_in_steps`]), which finds an outcome for each send.

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::{
    AgentId, ChannelId, MessageId, NodeId, ProviderName, WorkspaceId,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
};
use relay_wire::field::ToValue as _;
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError,
    access::idempotency::PostRecord,
    connections::Purpose,
    decode::decode_rows,
    events::{self, EventColumns, EventSeq},
    messages::{
        batch::{
            Batch, BatchError, BatchOutcome, CommitPath, NewSend, SendOutcome, WrittenDelivery, message_events,
            sort_and_dedup,
        },
        commit_facts::{connected_gateways, gateways_of_agent},
        commit_write::{AttachmentColumns, BatchQuery, MessageColumns, written_rows},
        days::day_of,
    },
};

/// The parts run in the order in which they need each other's rows, which is the lock order of a batch: the outbox row,
/// keys, heads, and event counters after everything else is written. `ready` has a row only if all facts hold; it
/// fails, and the statement with it, if another transaction has claimed a key since they were read.
///
/// `stored_rows` expands its arrays in the select list, in lockstep: in FROM, each of them has a table of its own,
/// which takes 3 to 5 % of the statement. The other lists are joined with tables, and a plan may read them once for
/// each row of these.
// A sender without a generation, as for a post by a node, is compared with itself: only its existence counts. An
// expired key counts as known, because the steps alone overwrite it. A watched workspace takes the steps, because its
// events name the seqs that this statement assigns. The counts in `made` are never below zero: the comparison only
// makes `made`, and so the event counters, wait for the last write.
const COMMIT_AT_ONCE: &str = const_format::concatcp!(
    "
WITH placed AS MATERIALIZED (
    SELECT k.workspace_id, k.agent_id, k.source_id, k.created_on, k.channel_id, k.mode, k.reason, k.created_at, k.ord,
           a.node_id, a.provider, w.mailbox_depth AS depth, ",
    gateways_of_agent!(),
    " AS gateways,
           k.created_at + coalesce(k.ttl_ms * interval '1 millisecond',
                                   w.delivery_ttl_seconds * interval '1 second') AS expires_at
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::date[], $5::bigint[], $6::smallint[], $7::smallint[],
                  $8::timestamptz[], $9::bigint[])
           WITH ORDINALITY AS k (workspace_id, agent_id, source_id, created_on, channel_id, mode, reason,
                                 created_at, ttl_ms, ord)
      JOIN agents a USING (workspace_id, agent_id)
      JOIN workspaces w USING (workspace_id)
     WHERE a.deleted_at IS NULL
), holding AS MATERIALIZED (
    SELECT FROM relay_require_epoch($51)
     WHERE (SELECT count(*) FROM placed) = cardinality($1)
       AND cardinality($10::bigint[]) = (
           SELECT count(*) FROM unnest($10::bigint[], $11::bigint[], $12::bigint[]) AS k (workspace_id, agent_id, generation)
             JOIN agents a USING (workspace_id, agent_id)
            WHERE a.deleted_at IS NULL AND a.token_generation = coalesce(k.generation, a.token_generation))
       AND cardinality($13::bigint[]) = (
           SELECT count(*) FROM unnest($13::bigint[], $14::bigint[], $15::bigint[]) AS k (workspace_id, channel_id, version)
             JOIN channels c USING (workspace_id, channel_id)
            WHERE c.archived_at IS NULL AND c.members_version = k.version)
       AND cardinality($16::bigint[]) = (
           SELECT count(*) FROM unnest($16::bigint[]) AS k (workspace_id)
             JOIN workspaces w USING (workspace_id)
             LEFT JOIN event_heads h USING (workspace_id)
            WHERE w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > relay_now())
              AND coalesce(h.watched_until, '-infinity') <= relay_now())
       AND NOT EXISTS (
           SELECT FROM unnest($17::bigint[], $18::bytea[]) AS k (workspace_id, key_hash)
             JOIN idempotency_keys i USING (workspace_id, key_hash))
       AND NOT EXISTS (
           SELECT FROM unnest($25::bigint[], $29::bigint[], $52::bigint[]) AS k (workspace_id, sender_id, arrived)
             JOIN fanouts f USING (workspace_id, sender_id) WHERE f.message_id < k.arrived)
), opened AS (
    INSERT INTO outbox (batch_id, gateway_id, sources, traceparent) SELECT $21, $22, $23, $24 FROM holding
    ON CONFLICT (batch_id) DO NOTHING RETURNING batch_id
), claimed AS (
    INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
    SELECT workspace_id, key_hash, fingerprint, 201, response::jsonb, relay_now()
      FROM unnest($17::bigint[], $18::bytea[], $19::bytea[], $20::text[])
           AS k (workspace_id, key_hash, fingerprint, response)
     CROSS JOIN opened
     ORDER BY workspace_id, key_hash
    ON CONFLICT (workspace_id, key_hash) DO NOTHING RETURNING 1
), ready AS MATERIALIZED (
    SELECT 1 / ((SELECT count(*) FROM claimed) = cardinality($17))::int AS ready FROM opened
), want AS MATERIALIZED (
    SELECT p.* FROM placed p CROSS JOIN ready
), stored_rows AS (
    SELECT s.*
      FROM (SELECT unnest($25::bigint[]) AS workspace_id, unnest($26::bigint[]) AS message_id,
                   unnest($27::date[]) AS created_on, unnest($28::bigint[]) AS channel_id,
                   unnest($29::bigint[]) AS agent_id, unnest($30::text[]) AS agent_name,
                   unnest($31::text[]) AS agent_type, unnest($32::bigint[]) AS thread_id,
                   unnest($33::text[]) AS text, unnest($34::text[]) AS blocks, unnest($35::text[]) AS metadata,
                   unnest($36::text[]) AS attachments, unnest($37::text[]) AS mentions,
                   unnest($38::text[]) AS mode, unnest($39::text[]) AS content_type,
                   unnest($40::timestamptz[]) AS created_at, unnest($41::text[]) AS traceparent) AS s
     CROSS JOIN ready
), attached_rows AS (
    SELECT f.*
      FROM unnest($42::bigint[], $43::bigint[], $44::bigint[], $45::date[])
           AS f (workspace_id, file_id, message_id, created_on)
     CROSS JOIN ready
), ",
    written_rows!(),
    ", made AS MATERIALIZED (
    SELECT e.* FROM unnest($46::bigint[], $47::bigint[], $48::text[]) AS e (workspace_id, event_count, events) CROSS JOIN ready
     WHERE (SELECT count(*) FROM bumped) + (SELECT count(*) FROM delivered)
           + (SELECT count(*) FROM stored) + (SELECT count(*) FROM attached)
           + (SELECT count(*) FROM in_session) >= 0
), ",
    events::appended_events!("$49", "$50"),
    "
SELECT ord, CASE WHEN fits THEN next_seq + rank - 1 END AS seq, node_id, provider, gateways, expires_at,
       NULL::bigint AS workspace_id, NULL::bigint AS first_seq, NULL::boolean AS watched
  FROM fitted
 UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, workspace_id, next_seq - event_count, watched FROM made JOIN raised USING (workspace_id)"
);

impl Store {
    /// Commits a batch. Returns one outcome per request, in order.
    ///
    /// Submitting the same batch again after [`BatchError::Unknown`] never writes it twice: the insert of the
    /// unique `outbox.batch_id` conflicts, and waits for the first transaction if it is still open.
    ///
    /// # Errors
    /// [`BatchError`]; `NotCommitted` with a refused statement means that one of the requests carries data
    /// that Postgres rejects: submit the requests one at a time to find it.
    pub async fn commit_batch(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let epoch = self.epoch("committing the batch").map_err(BatchError::NotCommitted)?;
        if epoch != batch.epoch {
            // It can be committed no more; after an unknown outcome it may have been, before the recovery.
            return self.read_earlier_outcome(batch).await;
        }
        // The record of a fan-out has a statement of its own.
        let has_fanout = batch.sends.iter().any(NewSend::is_fanout);
        match if has_fanout { None } else { commit_at_once(self, batch).await? } {
            Some(outcome) => Ok(outcome),
            None => self.commit_in_steps(batch).await,
        }
    }
}

/// One row of [`COMMIT_AT_ONCE`].
enum CommittedRow {
    /// Delivery by its place among the deliveries, from 1; without a row if its mailbox is full.
    Delivery(i64, Option<WrittenDelivery>),
    /// Workspace, the seq of its first event, and true if it is watched.
    Events(WorkspaceId, EventSeq, bool),
}

impl FromRow<'_, PgRow> for CommittedRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let Some(ord) = row.try_get::<Option<i64>, _>("ord")? else {
            return Ok(Self::Events(row.try_get("workspace_id")?, row.try_get("first_seq")?, row.try_get("watched")?));
        };
        let Some(seq) = row.try_get::<Option<Seq>, _>("seq")? else { return Ok(Self::Delivery(ord, None)) };
        let (node_id, provider): (NodeId, Option<ProviderName>) = (row.try_get("node_id")?, row.try_get("provider")?);
        let (gateways, expires_at) = (connected_gateways(row.try_get("gateways")?), row.try_get("expires_at")?);
        Ok(Self::Delivery(ord, Some(WrittenDelivery { seq, node_id, provider, gateways, expires_at })))
    }
}

/// Commits a batch whose facts all hold. `None`: nothing was written, and the transaction with a statement per step has
/// to find an outcome for each send. Without an answer of Postgres the outcome is unknown, as with a lost COMMIT. An
/// error of Postgres is an answer.
async fn commit_at_once(store: &Store, batch: &Batch) -> Result<Option<BatchOutcome>, BatchError> {
    let doing = "committing the batch";
    let columns = StatementColumns::collect(batch);
    // Without a connection nothing was sent.
    let taken = store.pool.for_statement(Purpose::Commits).await;
    let mut connection = taken.map_err(StoreError::from_sqlx(doing)).map_err(BatchError::NotCommitted)?;
    let statement = async {
        let rows = columns.query(batch).fetch_all(&mut *connection).await?;
        // Behind a pooler this is the COMMIT, which belongs to the same deadline.
        connection.finish().await?;
        Ok(rows)
    };
    let done = store.await_write(statement).await;
    let done = done.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(StoreError::from_sqlx(doing));
    let rows = match store.note_epoch(batch.epoch, done) {
        // Committed by now: a row that does not decode leaves the outcome to the next submission.
        Ok(rows) => decode_rows::<CommittedRow>("deliveries", &rows).map_err(BatchError::Unknown)?,
        // A key that was claimed meanwhile (division by zero), or data that Postgres rejects: the steps tell which.
        Err(StoreError::Refused { .. }) => return Ok(None),
        // Before the next arm, which would take it for unknown: the statement has failed as a whole.
        Err(error @ StoreError::OtherEpoch { .. }) => return Err(BatchError::NotCommitted(error)),
        Err(error) if error.is_unavailable() && !error.ended_before_commit() => {
            return Err(BatchError::Unknown(error));
        }
        Err(error) => return Err(BatchError::NotCommitted(error)),
    };
    Ok(columns.outcome(batch, rows))
}

/// Parameters of [`COMMIT_AT_ONCE`].
struct StatementColumns<'a> {
    deliveries: PlacedColumns,
    /// Request and recipient of each delivery, in the order of the columns.
    places: Vec<(usize, usize)>,
    senders: FactColumns<AgentId, Option<i64>>,
    channels: FactColumns<ChannelId, i64>,
    workspaces: Vec<WorkspaceId>,
    keys: KeyColumns<'a>,
    messages: MessageColumns<'a>,
    attachments: AttachmentColumns,
    events: EventColumns,
    /// One per message.
    arrived: Vec<MessageId>,
}

impl<'a> StatementColumns<'a> {
    fn collect(batch: &'a Batch) -> Self {
        let mut deliveries = PlacedColumns::default();
        let mut places = Vec::with_capacity(batch.sends.len());
        let (mut messages, mut attachments) = (MessageColumns::default(), AttachmentColumns::default());
        let (mut senders, mut channels, mut recorded) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = DateTime::UNIX_EPOCH;
        for (nth, send) in batch.sends.iter().enumerate() {
            let workspace = send.scope.workspace_id();
            channels.push((workspace, send.message.channel_id, send.members_version));
            if !send.hidden_sender {
                senders.push((workspace, send.message.agent_id, send.token_generation));
            }
            messages.push(send);
            attachments.push(send);
            deliveries.push(send);
            places.extend((0..send.recipients.len()).map(|position| (nth, position)));
            at = at.max(send.message.created_at);
            // Nothing is written in a watched workspace, so there are no events of single deliveries.
            recorded.extend(message_events(send, &[], false).into_iter().map(|event| (send.scope, event)));
        }
        sort_and_dedup(&mut senders);
        sort_and_dedup(&mut channels);
        // `dedup` suffices: the channels are sorted by workspace.
        let mut workspaces: Vec<WorkspaceId> = channels.iter().map(|(workspace, ..)| *workspace).collect();
        workspaces.dedup();
        Self {
            deliveries,
            places,
            senders: FactColumns::from_rows(senders),
            channels: FactColumns::from_rows(channels),
            workspaces,
            keys: KeyColumns::collect(&batch.sends),
            messages,
            attachments,
            events: EventColumns::collect(at, recorded),
            arrived: batch.sends.iter().map(|send| send.arrived).collect(),
        }
    }

    fn query<'q>(&'q self, batch: &'q Batch) -> BatchQuery<'q> {
        let d = &self.deliveries;
        let query = sqlx::query(COMMIT_AT_ONCE)
            .bind(&d.workspace)
            .bind(&d.agent)
            .bind(&d.source)
            .bind(&d.day)
            .bind(&d.channel)
            .bind(&d.mode)
            .bind(&d.reason)
            .bind(&d.created_at)
            .bind(&d.ttl_ms)
            .bind(&self.senders.workspace)
            .bind(&self.senders.id)
            .bind(&self.senders.version)
            .bind(&self.channels.workspace)
            .bind(&self.channels.id)
            .bind(&self.channels.version)
            .bind(&self.workspaces)
            .bind(&self.keys.workspace)
            .bind(&self.keys.hash)
            .bind(&self.keys.fingerprint)
            .bind(&self.keys.response)
            .bind(batch.id)
            .bind(batch.gateway_id)
            .bind(Json(batch.sources()))
            .bind(&batch.traceparent);
        self.events.bind(self.attachments.bind(self.messages.bind(query))).bind(batch.epoch).bind(&self.arrived)
    }

    /// Returns the outcome of the rows; `None` if there are none: each send that is written has an event.
    fn outcome(self, batch: &Batch, rows: Vec<CommittedRow>) -> Option<BatchOutcome> {
        let mut sends: Vec<Vec<Option<WrittenDelivery>>> =
            batch.sends.iter().map(|send| vec![None; send.recipients.len()]).collect();
        let mut numbered = Vec::new();
        for row in rows {
            match row {
                CommittedRow::Delivery(ord, written) => {
                    let place = usize::try_from(ord - 1).ok().and_then(|index| self.places.get(index));
                    if let Some((nth, position)) = place {
                        sends[*nth][*position] = written;
                    }
                }
                CommittedRow::Events(workspace, first_seq, watched) => numbered.push((workspace, first_seq, watched)),
            }
        }
        if numbered.is_empty() {
            return None;
        }
        let events = self.events.recorded(&numbered);
        let sends = sends.into_iter().map(SendOutcome::Committed).collect();
        Some(BatchOutcome { sends, events, path: CommitPath::AtOnce })
    }
}

/// One row per delivery, as columns.
#[derive(Default)]
struct PlacedColumns {
    workspace: Vec<WorkspaceId>,
    agent: Vec<AgentId>,
    source: Vec<MessageId>,
    day: Vec<NaiveDate>,
    channel: Vec<ChannelId>,
    mode: Vec<Mode>,
    reason: Vec<Reason>,
    created_at: Vec<DateTime<Utc>>,
    /// `None`: the workspace's lifetime of deliveries.
    ttl_ms: Vec<Option<i64>>,
}

impl PlacedColumns {
    fn push(&mut self, send: &NewSend) {
        let message = &send.message;
        for recipient in &send.recipients {
            self.workspace.push(send.scope.workspace_id());
            self.agent.push(recipient.agent_id);
            self.source.push(message.id);
            self.day.push(day_of(message.created_at));
            self.channel.push(message.channel_id);
            self.mode.push(recipient.mode);
            self.reason.push(recipient.reason);
            self.created_at.push(message.created_at);
            self.ttl_ms.push(send.ttl_ms);
        }
    }
}

/// Rows that sends rely on, with the version that each must have, as columns.
struct FactColumns<I, V> {
    workspace: Vec<WorkspaceId>,
    id: Vec<I>,
    version: Vec<V>,
}

impl<I, V> FactColumns<I, V> {
    fn from_rows(rows: Vec<(WorkspaceId, I, V)>) -> Self {
        let mut columns = Self { workspace: Vec::new(), id: Vec::new(), version: Vec::new() };
        for (workspace, id, version) in rows {
            columns.workspace.push(workspace);
            columns.id.push(id);
            columns.version.push(version);
        }
        columns
    }
}

/// One row per idempotency key, as columns.
#[derive(Default)]
struct KeyColumns<'a> {
    workspace: Vec<WorkspaceId>,
    hash: Vec<&'a [u8]>,
    fingerprint: Vec<&'a [u8]>,
    response: Vec<String>,
}

impl<'a> KeyColumns<'a> {
    fn collect(sends: &'a [NewSend]) -> Self {
        let mut columns = Self::default();
        for send in sends {
            let Some(key) = &send.key else { continue };
            columns.workspace.push(send.scope.workspace_id());
            columns.hash.push(&key.hash);
            columns.fingerprint.push(&key.fingerprint);
            columns.response.push(PostRecord { message_id: send.message.id }.to_value().to_string());
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{BatchId, GatewayId};

    use super::*;
    use crate::messages::batch::tests::send;

    #[test]
    fn a_delivery_without_a_seq_found_a_full_mailbox_and_without_an_event_nothing_was_written() {
        let (id, gateway_id, sends) = (BatchId::new(1), GatewayId::new(1), vec![send(), send()]);
        let batch = Batch { id, gateway_id, epoch: None, traceparent: None, sends };
        let (node_id, expires_at) = (NodeId::new("n1"), DateTime::UNIX_EPOCH);
        let written = Some(WrittenDelivery { seq: 8, node_id, provider: None, gateways: Vec::new(), expires_at });
        let rows = || vec![CommittedRow::Delivery(1, None), CommittedRow::Delivery(4, written.clone())];
        assert!(StatementColumns::collect(&batch).outcome(&batch, rows()).is_none());
        let numbered = CommittedRow::Events(send().scope.workspace_id(), 5, false);
        let rows = rows().into_iter().chain([numbered]).collect();
        let outcome = StatementColumns::collect(&batch).outcome(&batch, rows).expect("written");
        let [SendOutcome::Committed(first), SendOutcome::Committed(second)] = &outcome.sends[..] else { panic!() };
        assert_eq!((first, second), (&vec![None, None], &vec![None, written]));
        assert_eq!((outcome.events.len(), outcome.events[0].first_seq, outcome.events[0].events.len()), (1, 5, 2));
    }
}
