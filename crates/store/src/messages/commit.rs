//! The batch commit: messages, deliveries, mailbox heads, idempotency keys, events and the outbox row of
//! several sends commit in one transaction, or none of them does. The engine's committer calls
//! [`Store::commit_batch`] with a [`Batch`] and gets one [`SendOutcome`] per send.
//!
//! Statement order, and so lock order: outbox row with the facts (no locks), idempotency keys sorted,
//! heads sorted, event counters sorted. Two batches that share keys, mailboxes or workspaces therefore
//! wait for each other and never deadlock. Cursors are only read.

use std::time::Duration;

use chrono::DateTime;
use relay_domain::{WorkspaceId, WorkspaceScope};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    events::{self, Event, RecordedEvents},
    messages::{
        batch::{Batch, BatchError, BatchOutcome, NewKey, NewSend, SendOutcome},
        commit_events::message_events,
        commit_facts::{BatchFacts, open_batch},
        commit_write,
    },
    statement_timeout::StatementTimeout as _,
};

/// Retention of an idempotency key; published clients rely on 24 hours.
pub const IDEMPOTENCY_RETENTION_HOURS: i32 = 24;

/// Timeout of everything before the COMMIT, waits for locks (2 s each) included. Each process has one batch
/// transaction at a time, so a connection that hangs without an error must not block all later sends.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);

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
        let doing = "writing the batch";
        let begun = async {
            let begin = self.pool.begin().await;
            let mut tx: sqlx::Transaction<'_, sqlx::Postgres> =
                begin.map_err(StoreError::from_sqlx("opening the batch transaction"))?;
            let outcomes = write_batch(&mut tx, batch).await?;
            StoreResult::Ok((tx, outcomes))
        };
        // After a timeout here the outcome is known: the COMMIT was not sent, so Postgres rolls back.
        let begun = tokio::time::timeout(WRITE_TIMEOUT, begun).await;
        let (mut tx, outcomes) =
            begun.unwrap_or_else(|_| Err(StoreError::unavailable(doing))).map_err(BatchError::NotCommitted)?;
        let Some(outcomes) = outcomes else {
            // A failed read says nothing about the earlier commit, so it leaves the outcome unknown.
            let outcomes = tokio::time::timeout(WRITE_TIMEOUT, commit_write::read_back(&mut tx, batch)).await;
            let sends =
                outcomes.unwrap_or_else(|_| Err(StoreError::unavailable(doing))).map_err(BatchError::Unknown)?;
            return Ok(BatchOutcome { sends, events: Vec::new() });
        };
        tx.commit().with_timeout().await.map_err(StoreError::from_sqlx("committing the batch")).map_err(|error| {
            // Without a reply the COMMIT may have succeeded; with an error reply it did not.
            if error.is_unavailable() { BatchError::Unknown(error) } else { BatchError::NotCommitted(error) }
        })?;
        Ok(outcomes)
    }
}

/// Executes everything before the COMMIT. `None`: this batch was committed before.
async fn write_batch(tx: &mut PgConnection, batch: &Batch) -> StoreResult<Option<BatchOutcome>> {
    let Some(facts) = open_batch(tx, batch).await? else { return Ok(None) };
    let mut outcomes: Vec<Option<SendOutcome>> =
        batch.sends.iter().map(|send| (!facts.is_current(send)).then_some(SendOutcome::Stale)).collect();
    claim_keys(tx, &batch.sends, &mut outcomes).await?;
    let open: Vec<usize> = (0..outcomes.len()).filter(|i| outcomes[*i].is_none()).collect();
    let written = commit_write::write_rows(tx, &batch.sends, &open, &facts).await?;
    for (index, rows) in open.into_iter().zip(written) {
        outcomes[index] = Some(SendOutcome::Committed(rows));
    }
    let sends: Vec<SendOutcome> = outcomes.into_iter().map(|outcome| outcome.unwrap_or(SendOutcome::Stale)).collect();
    let events = record_events(tx, &batch.sends, &sends, &facts).await?;
    Ok(Some(BatchOutcome { sends, events }))
}

/// Records the events of a batch. This comes last, because the counter row of an event log is shared by all
/// senders of a workspace and stays locked until the commit.
async fn record_events(
    tx: &mut PgConnection,
    sends: &[NewSend],
    outcomes: &[SendOutcome],
    facts: &BatchFacts,
) -> StoreResult<Vec<RecordedEvents>> {
    let mut made: Vec<(WorkspaceScope, Vec<Event>)> = Vec::new();
    let mut at = DateTime::UNIX_EPOCH;
    for (send, outcome) in sends.iter().zip(outcomes) {
        let SendOutcome::Committed(rows) = outcome else { continue };
        at = at.max(send.message.created_at);
        let events = message_events(send, rows, facts.is_watched(send.scope));
        match made.iter_mut().find(|(scope, _)| *scope == send.scope) {
            Some((_, all)) => all.extend(events),
            None => made.push((send.scope, events)),
        }
    }
    if made.is_empty() { Ok(Vec::new()) } else { events::append_all(tx, at, made).await }
}

/// Claims the idempotency keys of the open requests, and sets the outcome of requests whose key is in use.
async fn claim_keys(tx: &mut PgConnection, sends: &[NewSend], outcomes: &mut [Option<SendOutcome>]) -> StoreResult<()> {
    let mut keyed: Vec<(WorkspaceId, &NewKey, usize)> = sends
        .iter()
        .enumerate()
        .filter(|(index, _)| outcomes[*index].is_none())
        .filter_map(|(index, send)| Some((send.scope.workspace_id(), send.key.as_ref()?, index)))
        .collect();
    if keyed.is_empty() {
        return Ok(());
    }
    // Same order in every batch: an insert waits for a concurrent one with the same key.
    keyed.sort_by(|a, b| (a.0, &a.1.hash).cmp(&(b.0, &b.1.hash)));
    let workspaces: Vec<WorkspaceId> = keyed.iter().map(|k| k.0).collect();
    let hashes: Vec<&[u8]> = keyed.iter().map(|k| k.1.hash.as_slice()).collect();
    let fingerprints: Vec<&[u8]> = keyed.iter().map(|k| k.1.fingerprint.as_slice()).collect();
    let responses: Vec<String> =
        keyed.iter().map(|k| format!(r#"{{"message_id":"{}"}}"#, sends[k.2].message.id)).collect();
    // An expired key that pruning has not removed yet is overwritten.
    let claimed: Vec<(WorkspaceId, Vec<u8>)> = sqlx::query_as(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         SELECT w, h, f, 201, r::jsonb, relay_now()
           FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::text[]) AS n (w, h, f, r)
          ORDER BY w, h
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, response = excluded.response,
                status = excluded.status, created_at = excluded.created_at
          WHERE k.created_at < relay_now() - make_interval(hours => $5)
         RETURNING k.workspace_id, k.key_hash",
    )
    .bind(&workspaces)
    .bind(&hashes)
    .bind(&fingerprints)
    .bind(&responses)
    .bind(IDEMPOTENCY_RETENTION_HOURS)
    .fetch_all(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx("claiming idempotency keys"))?;
    if claimed.len() == keyed.len() {
        return Ok(());
    }
    let known: Vec<(WorkspaceId, Vec<u8>, Vec<u8>, serde_json::Value)> = sqlx::query_as(
        "SELECT k.workspace_id, k.key_hash, k.fingerprint, k.response
           FROM unnest($1::bigint[], $2::bytea[]) AS n (workspace_id, key_hash)
           JOIN idempotency_keys k USING (workspace_id, key_hash)",
    )
    .bind(&workspaces)
    .bind(&hashes)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("reading idempotency keys"))?;
    for (workspace, key, index) in keyed {
        if claimed.iter().any(|(w, h)| *w == workspace && *h == key.hash) {
            continue;
        }
        let first = known.iter().find(|(w, h, _, _)| *w == workspace && *h == key.hash);
        outcomes[index] = Some(match first {
            Some((_, _, fingerprint, response)) if *fingerprint == key.fingerprint => {
                SendOutcome::Replayed { response: response.clone() }
            }
            Some(_) => SendOutcome::KeyReused,
            // Pruned between the two statements: the retry in the next batch claims it.
            None => SendOutcome::Stale,
        });
    }
    Ok(())
}
