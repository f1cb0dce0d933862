//! The batch commit: messages, deliveries, mailbox heads, idempotency keys, events and the outbox row of
//! several sends commit in one transaction, or none of them does. The engine's committer calls
//! [`Store::commit_batch`] with a [`Batch`] and gets one [`SendOutcome`] per send.
//!
//! Statement order, and so lock order: outbox row with the facts (no locks), idempotency keys sorted,
//! heads sorted, event counters sorted. Two batches that share keys, mailboxes or workspaces therefore
//! wait for each other and never deadlock. Cursors are only read.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, BatchId, DeliveryId, GatewayId, MessageId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    events::kind,
    mailboxes::{
        delivery::{Mode, Reason},
        stream::Seq,
    },
    messages::Message,
};
use relay_wire::{
    events::recorded_data::{DeliveryAccepted, DeliveryNotWritten},
    field::ToValue as _,
};
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IDEMPOTENCY_RETENTION_HOURS, IdempotencyKey, PostRecord},
    connections::Transaction,
    events::{self, Event, EventBody, RecordedEvents},
    messages::{
        commit_at_once::commit_at_once,
        commit_facts::{BatchFacts, open_batch},
        commit_write,
    },
    statement_timeout::StatementTimeout as _,
};

/// Timeout of everything before the COMMIT, waits for locks (2 s each) included. Each process has one batch
/// transaction at a time, so a connection that hangs without an error must not block all later sends.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(15);

/// One recipient of a message.
#[derive(Debug, Clone)]
pub struct NewRecipient {
    pub agent_id: AgentId,
    pub mode: Mode,
    pub reason: Reason,
}

/// One request of a batch, with the facts that it was resolved with. The transaction checks them again.
#[derive(Debug, Clone)]
pub struct NewSend {
    pub scope: WorkspaceScope,
    /// Its id and `created_at` are assigned before the transaction, so that a resubmitted batch writes the same rows.
    pub message: Message,
    /// In any order, without the sender.
    pub recipients: Vec<NewRecipient>,
    /// The channel's membership version that `recipients` was resolved from.
    pub members_version: i64,
    /// The token generation that the sender was authenticated with; `None` for a post by a node.
    pub token_generation: Option<i64>,
    /// The sender is an internal agent, which is deleted from its creation on: its liveness is not checked.
    pub hidden_sender: bool,
    /// Present when the caller sent an idempotency key.
    pub key: Option<IdempotencyKey>,
    /// Lifetime of its deliveries in milliseconds; `None`: the workspace's delivery TTL.
    pub ttl_ms: Option<i64>,
    /// W3C trace context of the request; spans of later processing become its children.
    pub traceparent: Option<String>,
    /// Further events to record with the message's own. A `message.id` of null in one of them is replaced by
    /// the id of the message.
    pub events: Vec<Event>,
    /// Sends with the same number keep their order: one is written only if the earlier ones of its batch are current.
    pub sequence: Option<i64>,
}

/// A batch of sends. Its content is fixed before its transaction, so that it can be submitted again.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Unique key of the outbox row; identifies a resubmitted batch.
    pub id: BatchId,
    /// The gateway that publishes it after the commit.
    pub gateway_id: GatewayId,
    /// Recovery epoch in which it was built: its ids and times belong to that one.
    pub epoch: Option<i64>,
    /// W3C trace context of the batch.
    pub traceparent: Option<String>,
    pub sends: Vec<NewSend>,
}

/// A committed delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenDelivery {
    pub seq: Seq,
    /// The recipient's node at commit.
    pub node_id: NodeId,
    /// The provider that the recipient was bound to at commit.
    pub provider: Option<ProviderName>,
    pub expires_at: DateTime<Utc>,
}

/// Outcome of one request of a batch.
#[derive(Debug, Clone)]
pub enum SendOutcome {
    /// Committed. One entry per recipient, in the request's order; `None`: its mailbox is full.
    Committed(Vec<Option<WrittenDelivery>>),
    /// The key was used before for the same request; carries the first response.
    Replayed { response: serde_json::Value },
    /// The key was used before for another request.
    KeyReused,
    /// The facts that the request was resolved with have changed. Nothing was written; resolve it again.
    Stale,
}

/// Way in which a batch was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitPath {
    /// By one statement.
    AtOnce,
    /// By a transaction with a statement per step.
    InSteps,
}

#[derive(Debug)]
pub struct BatchOutcome {
    /// One per request, in order.
    pub sends: Vec<SendOutcome>,
    /// The recorded events. Empty for a batch that was committed by an earlier submission.
    pub events: Vec<RecordedEvents>,
    pub path: CommitPath,
}

/// Failure of a batch.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Nothing was committed.
    #[error("the batch was not committed")]
    NotCommitted(#[source] StoreError),
    /// The connection was lost during the COMMIT. Submitting the same batch again gives the outcome.
    #[error("commit outcome of the batch unknown")]
    Unknown(#[source] StoreError),
}

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
        match commit_at_once(self, batch).await? {
            Some(outcome) => Ok(outcome),
            None => self.commit_in_steps(batch).await,
        }
    }

    async fn read_earlier_outcome(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let doing = "reading the outcome of a batch from before a recovery";
        let connection = self.pool.acquire().await;
        let mut connection = connection.map_err(StoreError::from_sqlx(doing)).map_err(BatchError::Unknown)?;
        read_outcome(&mut connection, batch).await
    }

    /// Commits a batch by a transaction with a statement per step, which finds an outcome for each request.
    async fn commit_in_steps(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let doing = "writing the batch";
        let begun = async {
            let begin = self.pool.begin().await;
            let mut tx: Transaction = begin.map_err(StoreError::from_sqlx("opening the batch transaction"))?;
            let outcomes = self.note_epoch(batch.epoch, write_batch(&mut tx, batch).await)?;
            StoreResult::Ok((tx, outcomes))
        };
        // After a timeout here the outcome is known: the COMMIT was not sent, so Postgres rolls back.
        let begun = tokio::time::timeout(WRITE_TIMEOUT, begun).await;
        let (mut tx, outcomes) =
            begun.unwrap_or_else(|_| Err(StoreError::unavailable(doing))).map_err(BatchError::NotCommitted)?;
        let Some(outcomes) = outcomes else {
            return read_outcome(&mut tx, batch).await;
        };
        tx.commit().with_timeout().await.map_err(StoreError::from_sqlx("committing the batch")).map_err(|error| {
            // Without a reply the COMMIT may have succeeded; with an error reply it did not.
            if error.is_unavailable() { BatchError::Unknown(error) } else { BatchError::NotCommitted(error) }
        })?;
        Ok(outcomes)
    }
}

/// Reads the outcome of a batch that was submitted before. A failed read says nothing about the earlier commit, so it leaves
/// the outcome unknown.
async fn read_outcome(connection: &mut PgConnection, batch: &Batch) -> Result<BatchOutcome, BatchError> {
    let sends = tokio::time::timeout(WRITE_TIMEOUT, commit_write::read_back(connection, batch)).await;
    let sends = sends.unwrap_or_else(|_| Err(StoreError::unavailable("reading back a batch")));
    let sends = sends.map_err(BatchError::Unknown)?;
    Ok(BatchOutcome { sends, events: Vec::new(), path: CommitPath::InSteps })
}

/// Executes everything before the COMMIT. `None`: this batch was committed before.
async fn write_batch(tx: &mut PgConnection, batch: &Batch) -> StoreResult<Option<BatchOutcome>> {
    let Some(facts) = open_batch(tx, batch).await? else { return Ok(None) };
    let mut outcomes: Vec<Option<SendOutcome>> =
        facts.find_current(&batch.sends).into_iter().map(|holds| (!holds).then_some(SendOutcome::Stale)).collect();
    claim_keys(tx, &batch.sends, &mut outcomes).await?;
    let open: Vec<usize> = (0..outcomes.len()).filter(|i| outcomes[*i].is_none()).collect();
    let written = commit_write::write_rows(tx, &batch.sends, &open, &facts).await?;
    for (index, rows) in open.into_iter().zip(written) {
        outcomes[index] = Some(SendOutcome::Committed(rows));
    }
    let sends: Vec<SendOutcome> = outcomes.into_iter().map(|outcome| outcome.unwrap_or(SendOutcome::Stale)).collect();
    let events = record_events(tx, &batch.sends, &sends, &facts).await?;
    Ok(Some(BatchOutcome { sends, events, path: CommitPath::InSteps }))
}

/// Records the events of a batch. This comes last, because the counter row of an event log is shared by all
/// senders of a workspace and stays locked until the commit.
async fn record_events(
    tx: &mut PgConnection,
    sends: &[NewSend],
    outcomes: &[SendOutcome],
    facts: &BatchFacts,
) -> StoreResult<Vec<RecordedEvents>> {
    let mut made: Vec<(WorkspaceScope, Event)> = Vec::new();
    let mut at = DateTime::UNIX_EPOCH;
    for (send, outcome) in sends.iter().zip(outcomes) {
        let SendOutcome::Committed(rows) = outcome else { continue };
        at = at.max(send.message.created_at);
        let events = message_events(send, rows, facts.is_watched(send.scope));
        made.extend(events.into_iter().map(|event| (send.scope, event)));
    }
    events::append_mixed(tx, at, made).await
}

/// Returns the message's event, then the events of its deliveries if the workspace is watched.
pub(crate) fn message_events(send: &NewSend, rows: &[Option<WrittenDelivery>], watched: bool) -> Vec<Event> {
    let message = &send.message;
    let mut events = vec![Event::for_message(message.event_kind(), message)];
    events.extend(send.events.iter().cloned().map(|event| with_message_id(event, message.id)));
    if watched {
        events.extend(send.recipients.iter().zip(rows).map(|(recipient, row)| delivery_event(send, recipient, row)));
    }
    events
}

/// Fills in the id of the message, which was not known when the event was made.
fn with_message_id(mut event: Event, message_id: MessageId) -> Event {
    if let EventBody::Data(data) = &mut event.body
        && let Some(id) = data.pointer_mut("/message/id").filter(|id| id.is_null())
    {
        *id = message_id.to_value();
    }
    event
}

fn delivery_event(send: &NewSend, recipient: &NewRecipient, row: &Option<WrittenDelivery>) -> Event {
    let message = &send.message;
    let (kind, data) = match row {
        Some(row) => {
            let id = DeliveryId { source: message.id.get(), agent: recipient.agent_id, redrive_no: 0 };
            let data = DeliveryAccepted {
                delivery_id: id,
                message_id: message.id,
                channel_id: message.client_channel_id(),
                agent_id: recipient.agent_id,
                reason: recipient.reason.as_str(),
                seq: row.seq,
            };
            (kind::DELIVERY_ACCEPTED, data.to_value())
        }
        None => {
            let data = DeliveryNotWritten {
                delivery_id: None,
                message_id: message.id,
                target_agent_id: recipient.agent_id,
                reason: "depth_cap",
                error: "mailbox depth cap exceeded",
                retryable: false,
            };
            (kind::DELIVERY_FAILED, data.to_value())
        }
    };
    let event = Event { kind: kind.into(), ..Event::for_message("", message) };
    Event { body: EventBody::Data(data), ..event.by_agent(recipient.agent_id) }
}

/// Claims the idempotency keys of the open requests, and sets the outcome of requests whose key is in use.
async fn claim_keys(tx: &mut PgConnection, sends: &[NewSend], outcomes: &mut [Option<SendOutcome>]) -> StoreResult<()> {
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

#[cfg(test)]
pub(crate) mod tests {
    use relay_domain::{ChannelId, agents::AgentKind, channels::ChannelKind};
    use serde_json::{Map, Value, json};

    use super::*;

    /// Send of agent 1 to agents 2 and 3 in channel 10.
    pub(crate) fn send() -> NewSend {
        let recipient = |id| NewRecipient { agent_id: AgentId::new(id), mode: Mode::Wait, reason: Reason::Message };
        NewSend {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            message: Message {
                id: MessageId::new(5),
                channel_id: ChannelId::new(10),
                channel_name: "general".to_owned(),
                channel_kind: ChannelKind::Channel,
                conversation_id: None,
                agent_id: AgentId::new(1),
                agent_name: "ada".to_owned(),
                agent_kind: AgentKind::Agent,
                thread_id: None,
                text: "text".to_owned(),
                blocks: None,
                metadata: Value::Object(Map::new()).into(),
                attachments: Value::Array(Vec::new()),
                mentions: Vec::new(),
                mode: Mode::Wait,
                content_type: None,
                created_at: DateTime::UNIX_EPOCH,
            },
            recipients: vec![recipient(2), recipient(3)],
            members_version: 4,
            token_generation: Some(1),
            hidden_sender: false,
            key: None,
            ttl_ms: None,
            traceparent: None,
            events: Vec::new(),
            sequence: None,
        }
    }

    #[test]
    fn a_watched_workspace_records_each_delivery_and_events_learn_the_id_of_their_message() {
        let received = Event::new(kind::WEBHOOK_RECEIVED, json!({ "message": { "id": null, "text": "text" } }));
        let send = NewSend { events: vec![received], ..send() };
        let written =
            WrittenDelivery { seq: 8, node_id: NodeId::new("n1"), provider: None, expires_at: DateTime::UNIX_EPOCH };
        let rows = [Some(written), None];
        let kinds = |events: &[Event]| events.iter().map(|event| event.kind.to_string()).collect::<Vec<_>>();
        let unwatched = message_events(&send, &rows, false);
        assert_eq!(kinds(&unwatched), [kind::MESSAGE_CREATED, kind::WEBHOOK_RECEIVED]);
        assert_eq!(unwatched[0].body, EventBody::Message(send.message.id));
        assert_eq!(unwatched[1].body, EventBody::Data(json!({ "message": { "id": "5", "text": "text" } })));
        let watched = message_events(&send, &rows, true);
        assert_eq!(kinds(&watched)[2..], [kind::DELIVERY_ACCEPTED, kind::DELIVERY_FAILED]);
        assert_eq!(watched[2].agent_id, Some(AgentId::new(2)));
        let EventBody::Data(refused) = &watched[3].body else { panic!("{watched:?}") };
        assert_eq!(refused["reason"], "depth_cap");
    }
}
