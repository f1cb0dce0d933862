//! The batch commit as a transaction with a statement per step, for a batch that the one statement refused
//! ([`crate::messages::commit_at_once`]): it finds an outcome for each send.
//!
//! Statement order, and so lock order: outbox row with the facts (no locks), idempotency keys sorted,
//! heads sorted, event counters sorted. Two batches that share keys, mailboxes or workspaces therefore
//! wait for each other and never deadlock. Cursors are only read.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use const_format::concatcp;
use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq};
use relay_wire::field::ToValue as _;

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IDEMPOTENCY_RETENTION_HOURS, IdempotencyKey, PostRecord},
    codes::MESSAGE_SOURCE,
    connections::{DatabaseSession, Transaction},
    events::{self, Event, RecordedEvents},
    messages::{
        batch::{
            Batch, BatchError, BatchOutcome, CommitPath, NewSend, SendOutcome, WRITE_TIMEOUT, WrittenDelivery,
            fanout_events, message_events,
        },
        commit_facts::{BatchFacts, connected_gateways, gateways_of_agent, open_batch},
        commit_write::write_rows,
        days::day_of,
        fanouts::{open_fanout, read_full},
    },
    statement_timeout::StatementTimeout as _,
};

impl Store {
    /// Reads the outcome of a batch that belongs to an earlier recovery epoch.
    pub(crate) async fn read_earlier_outcome(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let doing = "reading the outcome of a batch from before a recovery";
        // Without a connection the outcome of the earlier submission stays unknown.
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing)).map_err(BatchError::Unknown)?;
        read_outcome(&mut tx, batch).await
    }

    /// Commits a batch by a transaction with a statement per step, which finds an outcome for each request.
    pub(crate) async fn commit_in_steps(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let doing = "writing the batch";
        let begun = async {
            let begin = self.pool.begin().await;
            let mut tx: Transaction = begin.map_err(StoreError::from_sqlx("opening the batch transaction"))?;
            let outcomes = self.note_epoch(batch.epoch, write_batch(&mut tx, batch).await)?;
            StoreResult::Ok((tx, outcomes))
        };
        // Given up here, the outcome is known: the COMMIT was not sent, so Postgres rolls back.
        let begun = self.await_write(begun).await;
        let (mut tx, outcomes) =
            begun.unwrap_or_else(|| Err(StoreError::unavailable(doing))).map_err(BatchError::NotCommitted)?;
        // The conflicting insert has waited until the first transaction committed. Under READ COMMITTED the next
        // statements see its rows.
        let Some(outcomes) = outcomes else {
            return read_outcome(&mut tx, batch).await;
        };
        let committed = self.await_write(tx.commit().with_timeout()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut));
        committed.map_err(StoreError::from_sqlx("committing the batch")).map_err(|error| {
            // Without a reply the COMMIT may have succeeded; with an error reply it did not.
            if error.is_unavailable() { BatchError::Unknown(error) } else { BatchError::NotCommitted(error) }
        })?;
        Ok(outcomes)
    }
}

/// Reads the outcome of a batch that was submitted before. A failed read says nothing about the earlier commit, so it
/// leaves the outcome unknown.
async fn read_outcome(connection: &mut DatabaseSession, batch: &Batch) -> Result<BatchOutcome, BatchError> {
    let sends = tokio::time::timeout(WRITE_TIMEOUT, read_back(connection, batch)).await;
    let sends = sends.unwrap_or_else(|_| Err(StoreError::unavailable("reading back a batch")));
    let sends = sends.map_err(BatchError::Unknown)?;
    Ok(BatchOutcome { sends, events: Vec::new(), path: CommitPath::InSteps })
}

/// Reads the outcomes that an earlier submission of this batch committed.
///
/// A request without a message was not written by it: it is `Stale`, so that the caller resolves it again
/// and, if it carries a key, gets the first response.
async fn read_back(tx: &mut DatabaseSession, batch: &Batch) -> StoreResult<Vec<SendOutcome>> {
    // Not the redrives since then, which have the same source.
    const DELIVERIES: &str = concatcp!(
        "SELECT d.agent_id, d.seq, d.node_id, a.provider, ",
        gateways_of_agent!(),
        " AS gateways, d.expires_at
           FROM deliveries d JOIN agents a USING (workspace_id, agent_id)
          WHERE d.workspace_id = $1 AND d.source_id = $2 AND d.created_on = $3
            AND d.source_kind = ",
        MESSAGE_SOURCE,
        " AND d.redrive_no = 0"
    );
    let mut outcomes = Vec::with_capacity(batch.sends.len());
    for send in &batch.sends {
        let workspace = send.scope.workspace_id();
        let found: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM messages
              WHERE workspace_id = $1 AND message_id = $2 AND created_on = $3)",
        )
        .bind(workspace)
        .bind(send.message.id)
        .bind(day_of(send.message.created_at))
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("reading back a message"))?;
        if !found {
            outcomes.push(SendOutcome::Stale);
            continue;
        }
        if send.is_fanout() {
            outcomes.push(SendOutcome::FanoutOpened { full: read_full(tx, send).await? });
            continue;
        }
        let rows: Vec<(AgentId, Seq, NodeId, Option<ProviderName>, Vec<Option<GatewayId>>, DateTime<Utc>)> =
            sqlx::query_as(DELIVERIES)
                .bind(workspace)
                .bind(send.message.id)
                .bind(day_of(send.message.created_at))
                .fetch_all(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx("reading back deliveries"))?;
        let mut written: HashMap<AgentId, WrittenDelivery> = rows
            .into_iter()
            .map(|(agent_id, seq, node_id, provider, gateways, expires_at)| {
                let gateways = connected_gateways(gateways);
                (agent_id, WrittenDelivery { seq, node_id, provider, gateways, expires_at })
            })
            .collect();
        let deliveries = send.recipients.iter().map(|recipient| written.remove(&recipient.agent_id));
        outcomes.push(SendOutcome::Committed(deliveries.collect()));
    }
    Ok(outcomes)
}

/// Executes everything before the COMMIT. `None`: this batch was committed before.
async fn write_batch(tx: &mut DatabaseSession, batch: &Batch) -> StoreResult<Option<BatchOutcome>> {
    let Some(facts) = open_batch(tx, batch).await? else { return Ok(None) };
    // Refusals first: a send that is not written must not claim its key, or its next submission would be answered as a
    // replay of a message that does not exist.
    let mut outcomes = facts.find_refused(&batch.sends);
    claim_keys(tx, &batch.sends, &mut outcomes).await?;
    let open: Vec<usize> = (0..outcomes.len()).filter(|i| outcomes[*i].is_none()).collect();
    let written = write_rows(tx, &batch.sends, &open, &facts).await?;
    for (index, rows) in open.into_iter().zip(written) {
        let send = &batch.sends[index];
        outcomes[index] = Some(if send.is_fanout() {
            SendOutcome::FanoutOpened { full: open_fanout(tx, batch, send, &facts).await? }
        } else {
            SendOutcome::Committed(rows)
        });
    }
    // Every send has an outcome by now. `Stale` would only have one resolved again.
    let sends: Vec<SendOutcome> = outcomes.into_iter().map(|outcome| outcome.unwrap_or(SendOutcome::Stale)).collect();
    let events = record_events(tx, &batch.sends, &sends, &facts).await?;
    Ok(Some(BatchOutcome { sends, events, path: CommitPath::InSteps }))
}

/// Records the events of a batch. This comes last, because the counter row of an event log is shared by all
/// senders of a workspace and stays locked until the commit.
async fn record_events(
    tx: &mut DatabaseSession,
    sends: &[NewSend],
    outcomes: &[SendOutcome],
    facts: &BatchFacts,
) -> StoreResult<Vec<RecordedEvents>> {
    let mut made: Vec<(WorkspaceScope, Event)> = Vec::new();
    let mut at = DateTime::UNIX_EPOCH;
    for (send, outcome) in sends.iter().zip(outcomes) {
        let watched = facts.is_watched(send.scope);
        let events = match outcome {
            SendOutcome::Committed(rows) => message_events(send, rows, watched),
            SendOutcome::FanoutOpened { full } => fanout_events(send, full, watched),
            SendOutcome::Replayed { .. }
            | SendOutcome::KeyReused
            | SendOutcome::Stale
            | SendOutcome::Preceded
            | SendOutcome::SenderBusy => continue,
        };
        at = at.max(send.message.created_at);
        made.extend(events.into_iter().map(|event| (send.scope, event)));
    }
    events::append_mixed(tx, at, made).await
}

/// Claims the idempotency keys of the open requests, and sets the outcome of requests whose key is in use.
async fn claim_keys(
    tx: &mut DatabaseSession,
    sends: &[NewSend],
    outcomes: &mut [Option<SendOutcome>],
) -> StoreResult<()> {
    let mut keyed: Vec<(WorkspaceId, &IdempotencyKey, usize)> = sends
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
        keyed.iter().map(|k| PostRecord { message_id: sends[k.2].message.id }.to_value().to_string()).collect();
    // An expired key that pruning has not removed yet is overwritten.
    let claimed: Vec<(WorkspaceId, Vec<u8>)> = sqlx::query_as(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         SELECT workspace_id, key_hash, fingerprint, 201, response::jsonb, relay_now()
           FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::text[])
                AS n (workspace_id, key_hash, fingerprint, response)
          ORDER BY workspace_id, key_hash
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
