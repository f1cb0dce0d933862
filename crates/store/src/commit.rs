//! One batch of sends in one transaction: messages, deliveries, heads, idempotency keys and the
//! outbox row commit together (invariant 3), or not at all.
//!
//! Statement order, and so lock order: outbox row with the facts (no locks), idempotency keys sorted,
//! heads sorted, event counters sorted. Cursors are only read.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::{
    AgentId, BatchId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, session::Seq,
};
use sqlx::{PgConnection, Row};

use crate::{
    MessageRow, Store, StoreError, StoreResult,
    commit_events::message_events,
    commit_write,
    events::{self, NewEvent, Recorded},
    patience::Patient as _,
};

/// How long an idempotency key is kept (contract: 24 hours).
pub const IDEMPOTENCY_KEPT_HOURS: i32 = 24;

/// How long everything before the COMMIT may take, waits for locks (2 s each) included. One transaction at
/// a time is under way per process: a connection that died without a word must not hold it up.
const WRITTEN_WITHIN: Duration = Duration::from_secs(15);

/// One recipient of a message.
#[derive(Debug, Clone)]
pub struct NewRecipient {
    /// Who gets it.
    pub agent_id: AgentId,
    /// Code of [`relay_domain::delivery::Mode`].
    pub mode: i16,
    /// Code of [`relay_domain::delivery::Reason`].
    pub reason: i16,
}

/// The key under which a retry of the same request finds the first answer.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// SHA-256 over actor, operation, target and key.
    pub hash: Vec<u8>,
    /// SHA-256 over the request.
    pub fingerprint: Vec<u8>,
}

/// One request of a batch, with the facts that it was resolved with.
#[derive(Debug, Clone)]
pub struct NewSend {
    /// The tenant. Each item carries its own.
    pub scope: WorkspaceScope,
    /// What is written. Its id and instant are taken before the transaction.
    pub message: MessageRow,
    /// Who gets it, in any order, without the sender.
    pub recipients: Vec<NewRecipient>,
    /// The channel's membership version that `recipients` was resolved from.
    pub members_version: i64,
    /// The token generation that the sender was authenticated with; none for a post by a node.
    pub token_generation: Option<i64>,
    /// The sender is not an agent that anybody registered: whether it is alive is not asked.
    pub hidden_sender: bool,
    /// Present when the caller sent an idempotency key.
    pub key: Option<NewKey>,
    /// How long its deliveries live, in milliseconds; without it, as long as the workspace says.
    pub ttl_ms: Option<i64>,
    /// W3C trace context, if the request is traced: what workers do with the message goes below it.
    pub traceparent: Option<String>,
    /// Events that go into the log with the message's own. A `message.id` of null in one of them becomes the
    /// id of the message.
    pub events: Vec<NewEvent>,
}

/// A batch: fixed before its transaction, so that it can be submitted again.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Unique; the outbox row carries it.
    pub id: BatchId,
    /// Who publishes it after the commit.
    pub gateway_id: GatewayId,
    /// W3C trace context of the batch.
    pub traceparent: Option<String>,
    /// The requests.
    pub sends: Vec<NewSend>,
}

/// A delivery row that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Its place in the recipient's mailbox.
    pub seq: Seq,
    /// The recipient's node at commit.
    pub node_id: NodeId,
    /// The recipient's provider, if one is known.
    pub provider: Option<ProviderName>,
    /// When it expires.
    pub expires_at: DateTime<Utc>,
}

/// What became of one request.
#[derive(Debug, Clone)]
pub enum SendOutcome {
    /// Committed. One entry per recipient in the order given; `None`: its mailbox is full.
    Committed(Vec<Option<Written>>),
    /// The key was used before for the same request: this is the first answer.
    Replayed {
        /// The stored answer.
        response: serde_json::Value,
    },
    /// The key was used before for another request.
    KeyReused,
    /// What the request was resolved with no longer holds. Nothing was written.
    Moved,
}

/// What became of a batch.
#[derive(Debug)]
pub struct BatchOutcome {
    /// One per request, in order.
    pub sends: Vec<SendOutcome>,
    /// What went into the event logs. Empty for a batch that had been committed before.
    pub events: Vec<Recorded>,
}

/// Why a batch has no outcome.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Nothing was committed.
    #[error("the batch was not committed")]
    NotCommitted(#[source] StoreError),
    /// The connection was lost while committing: submit the same batch again to find out.
    #[error("whether the batch was committed is unknown")]
    Unknown(#[source] StoreError),
}

/// What the transaction learnt about the world.
pub(crate) struct Facts {
    agents: HashMap<(WorkspaceId, AgentId), AgentFacts>,
    channels: HashMap<(WorkspaceId, ChannelId), i64>,
    workspaces: HashMap<WorkspaceId, WorkspaceFacts>,
}

#[derive(Clone, Copy)]
struct WorkspaceFacts {
    ttl_seconds: i32,
    depth: i32,
    watched: bool,
}

pub(crate) struct AgentFacts {
    pub(crate) generation: i64,
    pub(crate) node_id: NodeId,
    pub(crate) provider: Option<ProviderName>,
}

impl Facts {
    /// Whether everything that the request was resolved with still holds.
    fn hold_for(&self, send: &NewSend) -> bool {
        let workspace = send.scope.workspace_id();
        let agent = |id| self.agents.get(&(workspace, id));
        self.workspaces.contains_key(&workspace)
            && self.channels.get(&(workspace, ChannelId::new(send.message.channel_id))) == Some(&send.members_version)
            && (send.hidden_sender
                || agent(AgentId::new(send.message.agent_id)).is_some_and(|sender| {
                    send.token_generation.is_none_or(|generation| generation == sender.generation)
                }))
            && send.recipients.iter().all(|recipient| agent(recipient.agent_id).is_some())
    }

    pub(crate) fn agent(&self, scope: WorkspaceScope, agent: AgentId) -> Option<&AgentFacts> {
        self.agents.get(&(scope.workspace_id(), agent))
    }

    /// Delivery TTL in seconds and mailbox depth.
    pub(crate) fn workspace(&self, scope: WorkspaceScope) -> (i32, i32) {
        self.workspaces.get(&scope.workspace_id()).map_or((3600, 1000), |facts| (facts.ttl_seconds, facts.depth))
    }

    /// Whether the events of single deliveries are worth recording.
    pub(crate) fn watched(&self, scope: WorkspaceScope) -> bool {
        self.workspaces.get(&scope.workspace_id()).is_some_and(|facts| facts.watched)
    }
}

/// The UTC day that an instant belongs to: the partition key.
#[must_use]
pub fn day_of(at: DateTime<Utc>) -> NaiveDate {
    at.date_naive()
}

impl Store {
    /// Commits a batch. One outcome per request, in order.
    ///
    /// Submitting the same batch again after [`BatchError::Unknown`] never writes it twice: the unique
    /// `outbox.batch_id` tells, and waits for the first transaction if it is still under way.
    ///
    /// # Errors
    /// [`BatchError`]; `NotCommitted` with a refused statement means that some request carries data
    /// that Postgres does not take: submit them one at a time.
    pub async fn commit_batch(&self, batch: &Batch) -> Result<BatchOutcome, BatchError> {
        let doing = "writing the batch";
        let begun = async {
            let begin = self.pool.begin().await;
            let mut tx: sqlx::Transaction<'_, sqlx::Postgres> =
                begin.map_err(StoreError::from_sqlx("opening the batch transaction"))?;
            let outcomes = write_batch(&mut tx, batch).await?;
            StoreResult::Ok((tx, outcomes))
        };
        // A transaction given up here is rolled back by Postgres: its COMMIT was never sent.
        let begun = tokio::time::timeout(WRITTEN_WITHIN, begun).await;
        let (mut tx, outcomes) =
            begun.unwrap_or_else(|_| Err(StoreError::still_away(doing))).map_err(BatchError::NotCommitted)?;
        let Some(outcomes) = outcomes else {
            let outcomes = tokio::time::timeout(WRITTEN_WITHIN, commit_write::read_back(&mut tx, batch)).await;
            let sends = outcomes.unwrap_or_else(|_| Err(StoreError::still_away(doing))).map_err(BatchError::Unknown)?;
            return Ok(BatchOutcome { sends, events: Vec::new() });
        };
        tx.commit().patiently().await.map_err(StoreError::from_sqlx("committing the batch")).map_err(|error| {
            if error.is_unavailable() { BatchError::Unknown(error) } else { BatchError::NotCommitted(error) }
        })?;
        Ok(outcomes)
    }
}

/// Writes everything but the COMMIT. `None`: this batch was committed before.
async fn write_batch(tx: &mut PgConnection, batch: &Batch) -> StoreResult<Option<BatchOutcome>> {
    let Some(facts) = open_batch(tx, batch).await? else { return Ok(None) };
    let mut outcomes: Vec<Option<SendOutcome>> =
        batch.sends.iter().map(|send| (!facts.hold_for(send)).then_some(SendOutcome::Moved)).collect();
    settle_keys(tx, &batch.sends, &mut outcomes).await?;
    let open: Vec<usize> = (0..outcomes.len()).filter(|i| outcomes[*i].is_none()).collect();
    let written = commit_write::write(tx, &batch.sends, &open, &facts).await?;
    for (index, rows) in open.into_iter().zip(written) {
        outcomes[index] = Some(SendOutcome::Committed(rows));
    }
    let sends: Vec<SendOutcome> = outcomes.into_iter().map(|outcome| outcome.unwrap_or(SendOutcome::Moved)).collect();
    let events = record(tx, &batch.sends, &sends, &facts).await?;
    Ok(Some(BatchOutcome { sends, events }))
}

/// Records what the batch did, last of all: the counters of the event logs are shared by all senders.
async fn record(
    tx: &mut PgConnection,
    sends: &[NewSend],
    outcomes: &[SendOutcome],
    facts: &Facts,
) -> StoreResult<Vec<Recorded>> {
    let mut made: Vec<(WorkspaceScope, Vec<NewEvent>)> = Vec::new();
    let mut at = DateTime::UNIX_EPOCH;
    for (send, outcome) in sends.iter().zip(outcomes) {
        let SendOutcome::Committed(rows) = outcome else { continue };
        at = at.max(send.message.created_at);
        let events = message_events(send, rows, facts.watched(send.scope));
        match made.iter_mut().find(|(scope, _)| *scope == send.scope) {
            Some((_, all)) => all.extend(events),
            None => made.push((send.scope, events)),
        }
    }
    if made.is_empty() { Ok(Vec::new()) } else { events::append_all(tx, at, made).await }
}

/// Writes the batch's outbox row, whose unique id is what recognises a resubmitted batch, and reads what
/// the batch relies on. `None`: this batch was committed before.
async fn open_batch(tx: &mut PgConnection, batch: &Batch) -> StoreResult<Option<Facts>> {
    let sends = &batch.sends;
    // Numbers, as the outbox relay reads them: jsonb keeps all 63 bits.
    let sources: Vec<[i64; 2]> =
        sends.iter().map(|send| [send.scope.workspace_id().get(), send.message.message_id]).collect();
    let mut agents: Vec<(i64, i64)> = Vec::new();
    let mut channels: Vec<(i64, i64)> = Vec::new();
    for send in sends {
        let workspace = send.scope.workspace_id().get();
        channels.push((workspace, send.message.channel_id));
        agents.push((workspace, send.message.agent_id));
        agents.extend(send.recipients.iter().map(|r| (workspace, r.agent_id.get())));
    }
    for keys in [&mut agents, &mut channels] {
        keys.sort_unstable();
        keys.dedup();
    }
    let mut workspaces: Vec<i64> = channels.iter().map(|(workspace, _)| *workspace).collect();
    workspaces.dedup();
    let (agent_workspaces, agent_ids): (Vec<i64>, Vec<i64>) = agents.into_iter().unzip();
    let (channel_workspaces, channel_ids): (Vec<i64>, Vec<i64>) = channels.into_iter().unzip();
    let rows = sqlx::query(
        "WITH opened AS (
             INSERT INTO outbox (batch_id, gateway_id, sources, traceparent) VALUES ($6, $7, $8, $9)
             ON CONFLICT (batch_id) DO NOTHING RETURNING batch_id
         )
         SELECT 'batch' AS kind, 0::bigint AS workspace_id, batch_id AS id, 0::bigint AS version,
                NULL AS node_id, NULL AS provider, 0 AS ttl, 0 AS depth
           FROM opened
         UNION ALL
         SELECT 'agent', a.workspace_id, a.agent_id, a.token_generation,
                a.node_id, a.provider, 0, 0
           FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
           JOIN agents a USING (workspace_id, agent_id)
          WHERE a.deleted_at IS NULL
         UNION ALL
         SELECT 'channel', c.workspace_id, c.channel_id, c.members_version, NULL, NULL, 0, 0
           FROM unnest($3::bigint[], $4::bigint[]) AS k (workspace_id, channel_id)
           JOIN channels c USING (workspace_id, channel_id)
          WHERE c.archived_at IS NULL
         UNION ALL
         SELECT 'workspace', w.workspace_id, 0, (coalesce(h.watched_until, '-infinity') > now())::int, NULL, NULL,
                w.delivery_ttl_seconds, w.mailbox_depth
           FROM unnest($5::bigint[]) AS k (workspace_id)
           JOIN workspaces w USING (workspace_id)
           LEFT JOIN event_heads h USING (workspace_id)
          WHERE w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > now())",
    )
    .bind(agent_workspaces)
    .bind(agent_ids)
    .bind(channel_workspaces)
    .bind(channel_ids)
    .bind(workspaces)
    .bind(batch.id.get())
    .bind(batch.gateway_id.get())
    .bind(sqlx::types::Json(sources))
    .bind(&batch.traceparent)
    .fetch_all(tx)
    .await
    .map_err(StoreError::from_sqlx("opening a batch"))?;
    if !rows.iter().any(|row| row.get::<&str, _>("kind") == "batch") {
        return Ok(None);
    }
    let mut facts = Facts { agents: HashMap::new(), channels: HashMap::new(), workspaces: HashMap::new() };
    for row in rows {
        let workspace = WorkspaceId::new(row.get("workspace_id"));
        let id: i64 = row.get("id");
        match row.get::<&str, _>("kind") {
            "agent" => {
                facts.agents.insert(
                    (workspace, AgentId::new(id)),
                    AgentFacts {
                        generation: row.get("version"),
                        node_id: NodeId::new(row.get::<String, _>("node_id")),
                        provider: row.get::<Option<String>, _>("provider").map(ProviderName::new),
                    },
                );
            }
            "channel" => {
                facts.channels.insert((workspace, ChannelId::new(id)), row.get("version"));
            }
            "workspace" => {
                let watched = row.get::<i64, _>("version") == 1;
                let known = WorkspaceFacts { ttl_seconds: row.get("ttl"), depth: row.get("depth"), watched };
                facts.workspaces.insert(workspace, known);
            }
            _ => {}
        }
    }
    Ok(Some(facts))
}

/// Claims the idempotency keys of the open requests; those used before get their outcome.
async fn settle_keys(
    tx: &mut PgConnection,
    sends: &[NewSend],
    outcomes: &mut [Option<SendOutcome>],
) -> StoreResult<()> {
    let mut keyed: Vec<(i64, &NewKey, usize)> = sends
        .iter()
        .enumerate()
        .filter(|(index, _)| outcomes[*index].is_none())
        .filter_map(|(index, send)| Some((send.scope.workspace_id().get(), send.key.as_ref()?, index)))
        .collect();
    if keyed.is_empty() {
        return Ok(());
    }
    keyed.sort_by(|a, b| (a.0, &a.1.hash).cmp(&(b.0, &b.1.hash)));
    let workspaces: Vec<i64> = keyed.iter().map(|k| k.0).collect();
    let hashes: Vec<&[u8]> = keyed.iter().map(|k| k.1.hash.as_slice()).collect();
    let fingerprints: Vec<&[u8]> = keyed.iter().map(|k| k.1.fingerprint.as_slice()).collect();
    let responses: Vec<String> =
        keyed.iter().map(|k| format!(r#"{{"message_id":"{}"}}"#, sends[k.2].message.message_id)).collect();
    // A key past its day that pruning has not met yet is as good as gone.
    let claimed: Vec<(i64, Vec<u8>)> = sqlx::query_as(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         SELECT w, h, f, 201, r::jsonb, now()
           FROM unnest($1::bigint[], $2::bytea[], $3::bytea[], $4::text[]) AS n (w, h, f, r)
          ORDER BY w, h
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, response = excluded.response,
                status = excluded.status, created_at = excluded.created_at
          WHERE k.created_at < now() - make_interval(hours => $5)
         RETURNING k.workspace_id, k.key_hash",
    )
    .bind(&workspaces)
    .bind(&hashes)
    .bind(&fingerprints)
    .bind(&responses)
    .bind(IDEMPOTENCY_KEPT_HOURS)
    .fetch_all(&mut *tx)
    .await
    .map_err(StoreError::from_sqlx("claiming idempotency keys"))?;
    if claimed.len() == keyed.len() {
        return Ok(());
    }
    let known: Vec<(i64, Vec<u8>, Vec<u8>, serde_json::Value)> = sqlx::query_as(
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
            // Pruned between the two statements: the next batch claims it.
            None => SendOutcome::Moved,
        });
    }
    Ok(())
}
