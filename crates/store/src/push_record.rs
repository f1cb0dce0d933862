//! What tries to hand deliveries over have come to, written for many mailboxes at once.
//!
//! One transaction: the tries, then the cursors in order (locked first), the rows that depart from them, then the
//! events. A delivery acknowledged right above its mailbox's ack floor moves the floor, as an ack over a socket
//! would; any other has a row of its own (docs/adr/0015-push-acks-move-the-floor.md).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, DeliveryId, MessageId, WorkspaceScope, dead_letter::DeadReason, session::Seq};
use sqlx::{PgTransaction, Row};

use crate::{
    Place, Store, StoreError, StoreResult, delivered_event,
    events::{self, NewEvent, Recorded},
    expiry::extend_settled_floors,
    push_attempts,
    push_floors::{Exceptions, State, move_floors},
    push_mailboxes::TakenMailbox,
    reads,
};

/// One try and what came of it.
#[derive(Debug, Clone)]
pub struct Tried {
    /// The mailbox, as taken.
    pub mailbox: TakenMailbox,
    /// The delivery.
    pub delivery_id: DeliveryId,
    /// Its place in the mailbox.
    pub seq: Seq,
    /// Where its message was posted, if it is a message.
    pub place: Option<Place>,
    /// The try itself.
    pub attempt: Attempt,
    /// What became of the delivery.
    pub outcome: Outcome,
    /// Everything up to here has been handed over; told where the floors do not tell it.
    pub pushed_seq: Option<Seq>,
    /// Who sent the message, if it is one.
    pub sender: Option<AgentId>,
    /// What is recorded besides, whether or not somebody looks.
    pub events: Vec<NewEvent>,
}

/// A try.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// A snowflake.
    pub id: i64,
    /// When it began.
    pub at: DateTime<Utc>,
    /// How long it took.
    pub latency_ms: i32,
    /// The HTTP status, if an answer came.
    pub status: Option<i16>,
    /// What began the answer.
    pub answer: Option<Vec<u8>>,
    /// What went wrong.
    pub error: Option<String>,
}

/// What became of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Handed over; not acknowledged yet.
    Delivered,
    /// Acknowledged.
    Acked,
    /// Comes back.
    Retry {
        /// When.
        at: DateTime<Utc>,
        /// Failures so far.
        retry_no: i16,
    },
    /// Given up: there is no further try.
    Dead {
        /// Why.
        reason: DeadReason,
    },
    /// Comes back when the agent is bound again: the endpoint is no more.
    Disabled {
        /// Failures so far.
        retry_no: i16,
        /// Why.
        reason: String,
    },
}

/// What has been written.
#[derive(Debug, Default)]
pub struct RecordedTries {
    /// What went into the event logs.
    pub recorded: Vec<Recorded>,
    /// Mailboxes that are no longer served by the one who tried.
    pub lost: HashSet<(WorkspaceScope, AgentId)>,
    /// Rows that depart from the floors since then. One that was settled in the meantime stays what it was.
    excepted: BTreeSet<(Key, Seq)>,
}

impl RecordedTries {
    /// Whether a try has made its delivery a dead letter.
    #[must_use]
    pub fn has_given_up(&self, tried: &Tried) -> bool {
        matches!(tried.outcome, Outcome::Dead { .. }) && self.excepted.contains(&(key_of(tried), tried.seq))
    }
}

pub(crate) type Key = (i64, i64);

/// A mailbox with its position, locked.
pub(crate) struct Locked {
    pub(crate) ack_floor: Seq,
    is_located: bool,
    is_ours: bool,
}

/// What changes in one mailbox.
#[derive(Default)]
pub(crate) struct Changes {
    pub(crate) acked: BTreeSet<Seq>,
    pub(crate) delivered: BTreeSet<Seq>,
    pushed_seq: Option<Seq>,
}

const LOCK: &str = "
SELECT c.workspace_id, c.agent_id, c.ack_floor,
       coalesce(a.node_id = k.node_id AND a.deleted_at IS NULL, false) AS located,
       coalesce(p.owner = $1 AND p.epoch = k.epoch, false) AS ours
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::text[]) AS k (workspace_id, agent_id, epoch, node_id)
  JOIN mailbox_cursors c ON c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id
  LEFT JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
  LEFT JOIN push_mailboxes p ON p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
 ORDER BY c.workspace_id, c.agent_id
   FOR UPDATE OF c";

impl Store {
    /// Writes what tries have come to. An acknowledgement counts as long as the agent is at the node that gave it;
    /// anything else only while `owner` still serves the mailbox.
    ///
    /// With `again`, the same tries may have been written before by a transaction whose outcome is unknown.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a race; nothing was written then, unless its outcome is unknown.
    pub async fn record_tries(
        &self,
        owner: i64,
        tries: &[Tried],
        again: bool,
        at: DateTime<Utc>,
    ) -> StoreResult<RecordedTries> {
        let doing = "recording tries";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        push_attempts::write(&mut tx, tries, again).await?;
        let locked = lock(&mut tx, owner, tries).await?;
        let mut changes: BTreeMap<Key, Changes> = BTreeMap::new();
        let mut exceptions = Exceptions::default();
        let mut result = RecordedTries::default();
        let mut disabled: Vec<&Tried> = Vec::new();
        for tried in tries {
            let key = key_of(tried);
            let Some(position) = locked.get(&key) else { continue };
            let (located, ours) = (position.is_located, position.is_ours);
            if !ours {
                result.lost.insert((tried.mailbox.scope, tried.mailbox.agent_id));
            }
            let own = changes.entry(key).or_default();
            if ours {
                own.pushed_seq = own.pushed_seq.max(tried.pushed_seq);
            }
            let error = tried.attempt.error.as_deref();
            match &tried.outcome {
                Outcome::Acked if located && tried.seq > position.ack_floor => {
                    own.acked.insert(tried.seq);
                }
                Outcome::Delivered if located => {
                    own.delivered.insert(tried.seq);
                }
                Outcome::Retry { at, retry_no } if ours && tried.seq > position.ack_floor => {
                    exceptions.push(key, tried.seq, State::Back(*at, *retry_no), error);
                }
                Outcome::Disabled { retry_no, .. } if ours => {
                    if tried.seq > position.ack_floor {
                        exceptions.push(key, tried.seq, State::Back(tried.attempt.at, *retry_no), error);
                    }
                    disabled.push(tried);
                }
                Outcome::Dead { reason } if ours && tried.seq > position.ack_floor => {
                    exceptions.push(key, tried.seq, State::Dead(*reason), error);
                }
                _ => {}
            }
        }
        let alone = move_floors(&mut tx, &locked, &changes).await?;
        for (key, seq) in &alone {
            exceptions.push(*key, *seq, State::Acked, None);
        }
        result.excepted = exceptions.write(&mut tx).await?;
        forget_delivered(&mut tx, &changes).await?;
        let (workspaces, agents): (Vec<i64>, Vec<i64>) = changes.keys().copied().unzip();
        extend_settled_floors(&mut tx, &workspaces, &agents).await?;
        for tried in tries.iter().filter(|tried| tried.place.is_some()) {
            if alone.contains(&(key_of(tried), tried.seq)) {
                let message = MessageId::new(tried.delivery_id.source);
                reads::record(&mut tx, tried.mailbox.scope, message, tried.mailbox.agent_id).await?;
            }
        }
        note_mailboxes(&mut tx, owner, tries, &changes, &disabled).await?;
        let events = events_of(&mut tx, tries, &changes, &alone, &result).await?;
        result.recorded = events::append_mixed(&mut tx, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(result)
    }
}

fn key_of(tried: &Tried) -> Key {
    (tried.mailbox.scope.workspace_id().get(), tried.mailbox.agent_id.get())
}

/// Locks the cursors of all mailboxes that were tried.
async fn lock(tx: &mut PgTransaction<'_>, owner: i64, tries: &[Tried]) -> StoreResult<BTreeMap<Key, Locked>> {
    let mailboxes: BTreeMap<Key, &TakenMailbox> = tries.iter().map(|t| (key_of(t), &t.mailbox)).collect();
    let rows = sqlx::query(LOCK)
        .bind(owner)
        .bind(mailboxes.keys().map(|key| key.0).collect::<Vec<_>>())
        .bind(mailboxes.keys().map(|key| key.1).collect::<Vec<_>>())
        .bind(mailboxes.values().map(|m| m.epoch).collect::<Vec<_>>())
        .bind(mailboxes.values().map(|m| m.node_id.as_str()).collect::<Vec<_>>())
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("locking mailboxes that were tried"))?;
    let locked = rows.iter().map(|row| {
        let position = Locked { ack_floor: row.get(2), is_located: row.get(3), is_ours: row.get(4) };
        ((row.get(0), row.get(1)), position)
    });
    Ok(locked.collect())
}

/// A row that was put off and is handed over now is delivered like any other.
async fn forget_delivered(tx: &mut PgTransaction<'_>, changes: &BTreeMap<Key, Changes>) -> StoreResult<()> {
    let rows = changes.iter().flat_map(|(key, own)| own.delivered.iter().map(|seq| (key.0, key.1, *seq)));
    let (mut workspaces, mut agents, mut seqs) = (vec![], vec![], vec![]);
    for (workspace, agent, seq) in rows {
        workspaces.push(workspace);
        agents.push(agent);
        seqs.push(seq);
    }
    if seqs.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "DELETE FROM delivery_exceptions e
          USING unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, seq)
          WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq = k.seq AND e.state = 3",
    )
    .bind(workspaces)
    .bind(agents)
    .bind(seqs)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("recording what was delivered"))
}

/// Moves the position of the mailboxes, and disables those whose endpoint is no more.
async fn note_mailboxes(
    tx: &mut PgTransaction<'_>,
    owner: i64,
    tries: &[Tried],
    changes: &BTreeMap<Key, Changes>,
    disabled: &[&Tried],
) -> StoreResult<()> {
    let epochs: BTreeMap<Key, i64> = tries.iter().map(|t| (key_of(t), t.mailbox.epoch)).collect();
    let reasons: BTreeMap<Key, &str> = disabled
        .iter()
        .filter_map(|tried| match &tried.outcome {
            Outcome::Disabled { reason, .. } => Some((key_of(tried), reason.as_str())),
            _ => None,
        })
        .collect();
    let rows: Vec<(Key, Option<Seq>)> = changes
        .iter()
        .filter(|(key, own)| own.pushed_seq.is_some() || reasons.contains_key(key))
        .map(|(key, own)| (*key, own.pushed_seq))
        .collect();
    if rows.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "UPDATE push_mailboxes p
            SET pushed_seq = greatest(p.pushed_seq, k.pushed_seq),
                disabled_at = CASE WHEN k.reason IS NULL THEN p.disabled_at ELSE now() END,
                disabled_reason = coalesce(k.reason, p.disabled_reason),
                due_at = CASE WHEN k.reason IS NULL THEN p.due_at END,
                owner = CASE WHEN k.reason IS NULL THEN p.owner END
           FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[])
                AS k (workspace_id, agent_id, epoch, pushed_seq, reason)
          WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id AND p.owner = $1 AND p.epoch = k.epoch",
    )
    .bind(owner)
    .bind(rows.iter().map(|(key, _)| key.0).collect::<Vec<_>>())
    .bind(rows.iter().map(|(key, _)| key.1).collect::<Vec<_>>())
    .bind(rows.iter().map(|(key, _)| epochs.get(key).copied().unwrap_or(0)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, seq)| *seq).collect::<Vec<_>>())
    .bind(rows.iter().map(|(key, _)| reasons.get(key).copied()).collect::<Vec<_>>())
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("noting where mailboxes stand"))
}

// Where somebody may be looking, and which of the rows below the floors there were settled by others.
const WATCHED: &str = "
WITH watched AS MATERIALIZED (
    SELECT k.workspace_id FROM unnest($1::bigint[]) AS k (workspace_id)
      JOIN event_heads h USING (workspace_id) WHERE h.watched_until > now()
)
SELECT workspace_id, NULL::bigint, NULL::bigint FROM watched
UNION ALL
SELECT k.workspace_id, k.agent_id, k.seq
  FROM watched
  JOIN unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, seq) USING (workspace_id)
 CROSS JOIN LATERAL (
       SELECT FROM delivery_exceptions e
        WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq = k.seq AND e.state IN (1, 4)
        LIMIT 1) AS settled";

/// What goes into the event logs: that deliveries were acknowledged, where somebody may be looking, and what the
/// tries bring along. A delivery that somebody else has settled during the try is told of by them alone.
async fn events_of(
    tx: &mut PgTransaction<'_>,
    tries: &[Tried],
    changes: &BTreeMap<Key, Changes>,
    alone: &BTreeSet<(Key, Seq)>,
    result: &RecordedTries,
) -> StoreResult<Vec<(WorkspaceScope, NewEvent)>> {
    let mut workspaces: Vec<i64> = tries.iter().map(|t| t.mailbox.scope.workspace_id().get()).collect();
    workspaces.sort_unstable();
    workspaces.dedup();
    let mut acked: BTreeSet<(Key, Seq)> =
        changes.iter().flat_map(|(key, own)| own.acked.iter().map(|seq| (*key, *seq))).collect();
    let by_floor: Vec<(Key, Seq)> = acked.difference(alone).copied().collect();
    let rows: Vec<(i64, Option<i64>, Option<Seq>)> = sqlx::query_as(WATCHED)
        .bind(workspaces)
        .bind(by_floor.iter().map(|row| row.0.0).collect::<Vec<_>>())
        .bind(by_floor.iter().map(|row| row.0.1).collect::<Vec<_>>())
        .bind(by_floor.iter().map(|row| row.1).collect::<Vec<_>>())
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("reading who looks"))?;
    let mut watched = HashSet::new();
    for (workspace, agent, seq) in rows {
        match agent.zip(seq) {
            Some((agent, seq)) => acked.remove(&((workspace, agent), seq)),
            None => watched.insert(workspace),
        };
    }
    acked.retain(|row| !alone.contains(row) || result.excepted.contains(row));
    let mut events = Vec::new();
    for tried in tries {
        let (scope, agent) = (tried.mailbox.scope, tried.mailbox.agent_id);
        let is_acked = acked.contains(&(key_of(tried), tried.seq));
        if is_acked && watched.contains(&scope.workspace_id().get()) {
            events.push((scope, delivered_event(tried.delivery_id, tried.place.as_ref())));
        }
        let is_dead = matches!(tried.outcome, Outcome::Dead { .. });
        if !result.lost.contains(&(scope, agent)) && (!is_dead || result.has_given_up(tried)) {
            events.extend(tried.events.iter().map(|event| (scope, event.clone())));
        }
    }
    Ok(events)
}
