//! Outcomes of http_push attempts, written for many mailboxes in one transaction: attempts, then cursors (locked in key
//! order), settlements, and events. Called for the worker's dispatcher.
//!
//! A delivery acknowledged directly above its mailbox's ack floor moves the floor, as an ack over a socket does; any
//! other acknowledgement becomes a settlement (docs/adr/0015-push-acks-move-the-floor.md).

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, PushWorkerId, WorkspaceId, WorkspaceScope,
    mailboxes::stream::Seq,
    push::{
        attempt::{AttemptOutcome, PushAttempt, RecordingPass},
        mailbox::LeasedMailbox,
    },
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{ACKED, DEAD_LETTERED, DEFERRED},
    connections::Transaction,
    delivered_event,
    events::{self, Event, RecordedEvents},
    mailboxes::settled_floors::extend_settled_floors,
    messages::reads::record_read,
    push::{
        attempts,
        floors::{LockedMailbox, MailboxChanges, MailboxKey, NewSettlement, SettlementRows, move_floors},
    },
};

/// Result of [`Store::record_attempts`].
#[derive(Debug, Default)]
pub struct RecordedAttempts {
    pub recorded: Vec<RecordedEvents>,
    /// Mailboxes whose lease the worker has lost.
    pub lost: HashSet<(WorkspaceScope, AgentId)>,
    /// Rows whose settlement was written. A row that was settled during the attempt keeps its settlement.
    settled: BTreeSet<(MailboxKey, Seq)>,
}

impl RecordedAttempts {
    /// Returns whether the attempt made its delivery a dead letter.
    #[must_use]
    pub fn is_dead_lettered(&self, attempt: &PushAttempt) -> bool {
        matches!(attempt.outcome, AttemptOutcome::DeadLettered { .. })
            && self.settled.contains(&(mailbox_key(attempt), attempt.seq))
    }
}

// Locks cursors in key order, as every transaction does that locks several of them. Agents and push mailboxes are only
// read: an agent that moves after this read has acknowledged while it was located here.
const LOCK: &str = "
SELECT c.workspace_id, c.agent_id, c.ack_floor, h.next_seq - 1,
       coalesce(a.node_id = k.node_id AND a.deleted_at IS NULL, false) AS is_located,
       coalesce(p.owner = $1 AND p.epoch = k.epoch, false) AS is_leased
  FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::text[]) AS k (workspace_id, agent_id, epoch, node_id)
  JOIN mailbox_cursors c ON c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id
  JOIN mailbox_heads h ON h.workspace_id = k.workspace_id AND h.agent_id = k.agent_id
  LEFT JOIN agents a ON a.workspace_id = k.workspace_id AND a.agent_id = k.agent_id
  LEFT JOIN push_mailboxes p ON p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
 ORDER BY c.workspace_id, c.agent_id
   FOR UPDATE OF c";

impl Store {
    /// Writes the outcome of attempts. An acknowledgement counts while the agent is on the node that gave it; any other
    /// outcome counts only while `owner` holds the lease of the mailbox. Attempts on a mailbox that was claimed before
    /// the last recovery have no effect: their rows may be lost, and their numbers assigned to others. `own_events` are
    /// recorded with each attempt whether or not its workspace is watched.
    pub async fn record_attempts(
        &self,
        owner: PushWorkerId,
        attempts: &[PushAttempt],
        own_events: fn(&PushAttempt) -> Vec<Event>,
        pass: RecordingPass,
        at: DateTime<Utc>,
    ) -> StoreResult<RecordedAttempts> {
        let doing = "recording attempts";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The epoch of the transaction, not of the process, which may have recovered since the transaction began.
        let epoch = tx.epoch();
        let (current, earlier) = split_by_epoch(attempts, epoch);
        let attempts = &*current;
        // Before the locks, so that the bulk of the writing does not hold up other writers of these mailboxes.
        attempts::write_attempts(&mut tx, attempts, pass).await?;
        let locked = lock_mailboxes(&mut tx, owner, attempts).await?;
        let AttemptEffects { changes, mut settlements, disabled, lost } = collect_effects(attempts, &locked);
        let mut result = RecordedAttempts { lost, ..RecordedAttempts::default() };
        result.lost.extend(earlier);
        let above_gap = move_floors(&mut tx, &locked, &changes).await?;
        for (key, seq) in &above_gap {
            settlements.push(*key, *seq, NewSettlement::Acked, None);
        }
        // Floors first: a settlement that the floor has passed would never be read.
        result.settled = settlements.write(&mut tx).await?;
        remove_deferrals(&mut tx, &changes).await?;
        let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) = changes.keys().copied().unzip();
        extend_settled_floors(&mut tx, &workspaces, &agents).await?;
        // Floors imply read receipts; an acknowledgement above a gap needs one of its own.
        // A delivery without a location has no message to be read.
        for attempt in attempts.iter().filter(|attempt| attempt.location.is_some()) {
            if above_gap.contains(&(mailbox_key(attempt), attempt.seq)) {
                let message = attempt.delivery_id.source.message_id();
                record_read(&mut tx, attempt.mailbox.scope, message, attempt.mailbox.agent_id).await?;
            }
        }
        update_mailboxes(&mut tx, owner, attempts, &changes, &disabled).await?;
        let events = collect_events(&mut tx, (attempts, own_events), &changes, &above_gap, &result).await?;
        result.recorded = events::append_mixed(&mut tx, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(result)
    }
}

/// Splits attempts into those on mailboxes that were claimed under `epoch`, which are all of them in general, and the
/// mailboxes of the others.
fn split_by_epoch(
    attempts: &[PushAttempt],
    epoch: Option<i64>,
) -> (Cow<'_, [PushAttempt]>, HashSet<(WorkspaceScope, AgentId)>) {
    let is_current = |attempt: &&PushAttempt| attempt.mailbox.recovery_epoch == epoch;
    let earlier: HashSet<_> =
        attempts.iter().filter(|attempt| !is_current(attempt)).map(|attempt| attempt.mailbox.key()).collect();
    let current = if earlier.is_empty() {
        Cow::Borrowed(attempts)
    } else {
        Cow::Owned(attempts.iter().filter(is_current).cloned().collect())
    };
    (current, earlier)
}

/// Effects of attempts, before they are written.
#[derive(Default)]
struct AttemptEffects<'a> {
    changes: BTreeMap<MailboxKey, MailboxChanges>,
    settlements: SettlementRows<'a>,
    /// Reasons of mailboxes whose endpoint no longer exists.
    disabled: BTreeMap<MailboxKey, &'a str>,
    lost: HashSet<(WorkspaceScope, AgentId)>,
}

/// Decides the effect of each attempt on its locked mailbox. A row at or below the ack floor was acknowledged
/// meanwhile, and keeps that state.
fn collect_effects<'a>(
    attempts: &'a [PushAttempt],
    locked: &BTreeMap<MailboxKey, LockedMailbox>,
) -> AttemptEffects<'a> {
    let mut effects = AttemptEffects::default();
    for attempt in attempts {
        let key = mailbox_key(attempt);
        // The mailbox was erased with its workspace.
        let Some(position) = locked.get(&key) else { continue };
        // No floor exceeds the head, whatever a worker remembers.
        if attempt.seq > position.last_seq {
            effects.lost.insert(attempt.mailbox.key());
            continue;
        }
        let (is_located, is_leased) = (position.is_located, position.is_leased);
        let own = effects.changes.entry(key).or_default();
        if is_leased {
            own.pushed_seq = own.pushed_seq.max(attempt.pushed_seq);
        } else {
            effects.lost.insert((attempt.mailbox.scope, attempt.mailbox.agent_id));
        }
        let is_open = attempt.seq > position.ack_floor;
        let settlement = match &attempt.outcome {
            AttemptOutcome::Acked => {
                if is_located && is_open {
                    own.acked.insert(attempt.seq);
                }
                None
            }
            AttemptOutcome::Delivered => {
                if is_located {
                    own.delivered.insert(attempt.seq);
                }
                None
            }
            AttemptOutcome::Retry { at, retry_no } => Some(NewSettlement::Deferred(*at, *retry_no)),
            AttemptOutcome::Disabled { retry_no, reason } => {
                if is_leased {
                    effects.disabled.insert(key, reason);
                }
                // Due at once when the agent is bound to a node again.
                Some(NewSettlement::Deferred(attempt.http.started_at, *retry_no))
            }
            AttemptOutcome::DeadLettered { reason } => Some(NewSettlement::DeadLettered(*reason)),
        };
        if let Some(settlement) = settlement.filter(|_| is_leased && is_open) {
            effects.settlements.push(key, attempt.seq, settlement, attempt.http.error.as_deref());
        }
    }
    effects
}

fn mailbox_key(attempt: &PushAttempt) -> MailboxKey {
    (attempt.mailbox.scope.workspace_id(), attempt.mailbox.agent_id)
}

async fn lock_mailboxes(
    tx: &mut Transaction,
    owner: PushWorkerId,
    attempts: &[PushAttempt],
) -> StoreResult<BTreeMap<MailboxKey, LockedMailbox>> {
    let mailboxes: BTreeMap<MailboxKey, &LeasedMailbox> =
        attempts.iter().map(|t| (mailbox_key(t), &t.mailbox)).collect();
    let rows: Vec<(WorkspaceId, AgentId, Seq, Seq, bool, bool)> = sqlx::query_as(LOCK)
        .bind(owner)
        .bind(mailboxes.keys().map(|key| key.0).collect::<Vec<_>>())
        .bind(mailboxes.keys().map(|key| key.1).collect::<Vec<_>>())
        .bind(mailboxes.values().map(|m| m.epoch).collect::<Vec<_>>())
        .bind(mailboxes.values().map(|m| &m.node_id).collect::<Vec<_>>())
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("locking attempted mailboxes"))?;
    let locked = rows.into_iter().map(|(workspace, agent, ack_floor, last_seq, is_located, is_leased)| {
        ((workspace, agent), LockedMailbox { ack_floor, last_seq, is_located, is_leased })
    });
    Ok(locked.collect())
}

/// Removes the deferral of rows that were delivered now; a delivered row above the floors has no settlement.
async fn remove_deferrals(tx: &mut Transaction, changes: &BTreeMap<MailboxKey, MailboxChanges>) -> StoreResult<()> {
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
    sqlx::query(formatcp!(
        "DELETE FROM delivery_exceptions e
          USING unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, seq)
          WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq = k.seq AND e.state = {DEFERRED}"
    ))
    .bind(workspaces)
    .bind(agents)
    .bind(seqs)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("removing deferrals of delivered rows"))
}

/// Moves push positions, and disables mailboxes whose endpoint no longer exists. The lease is checked again, because
/// the push mailboxes are not locked.
async fn update_mailboxes(
    tx: &mut Transaction,
    owner: PushWorkerId,
    attempts: &[PushAttempt],
    changes: &BTreeMap<MailboxKey, MailboxChanges>,
    disabled: &BTreeMap<MailboxKey, &str>,
) -> StoreResult<()> {
    let epochs: BTreeMap<MailboxKey, i64> = attempts.iter().map(|t| (mailbox_key(t), t.mailbox.epoch)).collect();
    let rows: Vec<(MailboxKey, Option<Seq>)> = changes
        .iter()
        .filter(|(key, own)| own.pushed_seq.is_some() || disabled.contains_key(key))
        .map(|(key, own)| (*key, own.pushed_seq))
        .collect();
    if rows.is_empty() {
        return Ok(());
    }
    // `greatest` passes over a null: a mailbox that is disabled without a new position keeps its own.
    sqlx::query(
        "UPDATE push_mailboxes p
            SET pushed_seq = greatest(p.pushed_seq, k.pushed_seq),
                disabled_at = CASE WHEN k.reason IS NULL THEN p.disabled_at ELSE relay_now() END,
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
    // Every row has an epoch here. 0 would match no lease, so nothing would be written.
    .bind(rows.iter().map(|(key, _)| epochs.get(key).copied().unwrap_or(0)).collect::<Vec<_>>())
    .bind(rows.iter().map(|(_, seq)| *seq).collect::<Vec<_>>())
    .bind(rows.iter().map(|(key, _)| disabled.get(key).copied()).collect::<Vec<_>>())
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("moving push positions"))
}

// Workspaces that are watched, and the rows below the new floors that were settled before by another writer.
const WATCHED: &str = formatcp!(
    "
WITH watched AS MATERIALIZED (
    SELECT k.workspace_id FROM unnest($1::bigint[]) AS k (workspace_id)
      JOIN event_heads h USING (workspace_id) WHERE h.watched_until > relay_now()
)
SELECT workspace_id, NULL::bigint, NULL::bigint FROM watched
UNION ALL
SELECT k.workspace_id, k.agent_id, k.seq
  FROM watched
  JOIN unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, seq) USING (workspace_id)
 CROSS JOIN LATERAL (
       SELECT FROM delivery_exceptions e
        WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq = k.seq AND e.state IN ({ACKED}, {DEAD_LETTERED})
        LIMIT 1) AS settled"
);

/// Collects the events of the attempts: acknowledgements in watched workspaces, and the events that attempts carry. A
/// delivery that another writer settled during the attempt has no event here; that writer has recorded it.
async fn collect_events(
    tx: &mut Transaction,
    (attempts, own_events): (&[PushAttempt], fn(&PushAttempt) -> Vec<Event>),
    changes: &BTreeMap<MailboxKey, MailboxChanges>,
    above_gap: &BTreeSet<(MailboxKey, Seq)>,
    result: &RecordedAttempts,
) -> StoreResult<Vec<(WorkspaceScope, Event)>> {
    let mut workspaces: Vec<WorkspaceId> = attempts.iter().map(|t| t.mailbox.scope.workspace_id()).collect();
    workspaces.sort_unstable();
    workspaces.dedup();
    let mut acked: BTreeSet<(MailboxKey, Seq)> =
        changes.iter().flat_map(|(key, own)| own.acked.iter().map(|seq| (*key, *seq))).collect();
    let by_floor: Vec<(MailboxKey, Seq)> = acked.difference(above_gap).copied().collect();
    let rows: Vec<(WorkspaceId, Option<AgentId>, Option<Seq>)> = sqlx::query_as(WATCHED)
        .bind(workspaces)
        .bind(by_floor.iter().map(|row| row.0.0).collect::<Vec<_>>())
        .bind(by_floor.iter().map(|row| row.0.1).collect::<Vec<_>>())
        .bind(by_floor.iter().map(|row| row.1).collect::<Vec<_>>())
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("reading watched workspaces"))?;
    let mut watched = HashSet::new();
    for (workspace, agent, seq) in rows {
        match agent.zip(seq) {
            Some((agent, seq)) => acked.remove(&((workspace, agent), seq)),
            None => watched.insert(workspace),
        };
    }
    acked.retain(|row| !above_gap.contains(row) || result.settled.contains(row));
    let mut events = Vec::new();
    for attempt in attempts {
        let (scope, agent) = (attempt.mailbox.scope, attempt.mailbox.agent_id);
        let is_acked = acked.contains(&(mailbox_key(attempt), attempt.seq));
        if is_acked && watched.contains(&scope.workspace_id()) {
            events.push((scope, delivered_event(attempt.delivery_id, attempt.location.as_ref())));
        }
        let is_dead = matches!(attempt.outcome, AttemptOutcome::DeadLettered { .. });
        if !result.lost.contains(&(scope, agent)) && (!is_dead || result.is_dead_lettered(attempt)) {
            events.extend(own_events(attempt).into_iter().map(|event| (scope, event)));
        }
    }
    Ok(events)
}
