//! Positions of mailboxes after attempts: floors, and settlements of rows apart from the floors. Called by
//! [`crate::push::record`], which has locked the cursors.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, WorkspaceId,
    mailboxes::{dead_letter::DeadLetterReason, delivery::Settlement, stream::Seq},
};

use crate::{
    StoreError, StoreResult,
    codes::{ACKED, DEAD_LETTERED, DEFERRED, FAILED},
    connections::Transaction,
};

/// Workspace and agent of a mailbox.
pub(crate) type MailboxKey = (WorkspaceId, AgentId);

/// Position of a mailbox whose cursor is locked.
pub(crate) struct LockedMailbox {
    pub(crate) ack_floor: Seq,
    /// Highest assigned seq.
    pub(crate) last_seq: Seq,
    /// `true` while the agent is on the node that was called.
    pub(crate) is_located: bool,
    /// `true` while the worker holds the lease with the same epoch.
    pub(crate) is_leased: bool,
}

/// Changes of one mailbox.
#[derive(Default)]
pub(crate) struct MailboxChanges {
    pub(crate) acked: BTreeSet<Seq>,
    pub(crate) delivered: BTreeSet<Seq>,
    pub(crate) pushed_seq: Option<Seq>,
}

/// Maximum number of settled rows above an ack floor that one move passes. More rows wait for the next ack.
const MAX_SCANNED_ROWS: i64 = 256;

// Settled rows and runs of skipped seqs between a floor and the highest new ack: the floor may pass over both.
// States are filtered outside of the limit, which bounds the rows that are read.
const SETTLED_ABOVE: &str = formatcp!(
    "
WITH k AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])
                  AS k (workspace_id, agent_id, above, upto)
)
SELECT k.workspace_id, k.agent_id, e.seq, e.seq
  FROM k
 CROSS JOIN LATERAL (
       SELECT seq, state FROM delivery_exceptions e
        WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq > k.above AND e.seq < k.upto
        ORDER BY e.seq LIMIT $5) AS e
 WHERE e.state IN ({ACKED}, {DEAD_LETTERED})
 UNION ALL
SELECT k.workspace_id, k.agent_id, greatest(s.first_seq, k.above + 1), s.last_seq
  FROM k
  JOIN skipped_seqs s ON s.workspace_id = k.workspace_id AND s.agent_id = k.agent_id
   AND s.last_seq > k.above AND s.last_seq < k.upto"
);

// `greatest`, because a socket ack may have moved a floor further before the cursor was locked. The ack log keeps one
// row per mailbox and second.
const MOVE_FLOORS: &str = "
WITH moved AS (
    UPDATE mailbox_cursors c
       SET sent_seq = greatest(c.sent_seq, k.sent), ack_floor = greatest(c.ack_floor, k.acked),
           settled_floor = greatest(c.settled_floor, k.acked)
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, sent, acked)
     WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id
)
INSERT INTO ack_log (workspace_id, agent_id, acked_at, created_on, ack_floor)
SELECT workspace_id, agent_id, date_trunc('second', relay_now()), (relay_now() AT TIME ZONE 'UTC')::date, acked
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS k (workspace_id, agent_id, sent, acked)
 WHERE acked > 0
    ON CONFLICT (workspace_id, agent_id, acked_at, created_on)
    DO UPDATE SET ack_floor = greatest(ack_log.ack_floor, excluded.ack_floor)";

// Every writer of settlements locks the cursor first, so no row appears between the read and this upsert. The WHERE
// clause keeps acknowledged rows and dead letters as they are.
const WRITE_SETTLEMENTS: &str = formatcp!(
    "
INSERT INTO delivery_exceptions AS e
       (workspace_id, agent_id, seq, state, error, retryable, reason, available_at, retry_no, at)
SELECT workspace_id, agent_id, seq, state, error, CASE WHEN state = {DEAD_LETTERED} THEN false END, reason, available_at, retry_no,
       relay_now()
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[], $5::text[], $6::timestamptz[], $7::smallint[],
              $8::text[])
       AS k (workspace_id, agent_id, seq, state, error, available_at, retry_no, reason)
 ORDER BY workspace_id, agent_id, seq
    ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
       SET state = excluded.state, error = excluded.error, retryable = excluded.retryable, reason = excluded.reason,
           available_at = excluded.available_at, retry_no = excluded.retry_no, at = excluded.at
     WHERE (excluded.state = {ACKED} AND e.state IN ({FAILED}, {DEFERRED}))
        OR (excluded.state IN ({DEFERRED}, {DEAD_LETTERED}) AND e.state = {DEFERRED})
RETURNING e.workspace_id, e.agent_id, e.seq"
);

/// Moves each ack floor up to the first row that is neither acknowledged nor a dead letter. Returns the acknowledged
/// rows that remain above such a gap.
pub(crate) async fn move_floors(
    tx: &mut Transaction,
    locked: &BTreeMap<MailboxKey, LockedMailbox>,
    changes: &BTreeMap<MailboxKey, MailboxChanges>,
) -> StoreResult<BTreeSet<(MailboxKey, Seq)>> {
    let passable = read_passable_runs(tx, locked, changes).await?;
    let mut above_gap = BTreeSet::new();
    let (mut workspaces, mut agents, mut sent, mut acked) = (vec![], vec![], vec![], vec![]);
    for (key, own) in changes {
        let Some(position) = locked.get(key) else { continue };
        let mut floor = position.ack_floor;
        // Without acks the floor stays.
        let top = own.acked.last().copied().unwrap_or(floor);
        while floor < top {
            let next = floor + 1;
            floor = match passable.get(&(*key, next)) {
                Some(last) => *last,
                None if own.acked.contains(&next) => next,
                None => break,
            };
        }
        above_gap.extend(own.acked.range(floor + 1..).map(|seq| (*key, *seq)));
        // Without deliveries the acks alone say how far the mailbox was sent.
        let reached = top.max(own.delivered.last().copied().unwrap_or(0));
        if floor > position.ack_floor || !own.acked.is_empty() || !own.delivered.is_empty() {
            workspaces.push(key.0);
            agents.push(key.1);
            sent.push(reached);
            // 0 leaves the floors as they are, and writes no row to the ack log.
            acked.push(if floor > position.ack_floor { floor } else { 0 });
        }
    }
    if !agents.is_empty() {
        sqlx::query(MOVE_FLOORS)
            .bind(workspaces)
            .bind(agents)
            .bind(sent)
            .bind(acked)
            .execute(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx("moving mailbox cursors after attempts"))?;
    }
    Ok(above_gap)
}

/// Reads the runs of settled and skipped seqs between the floors and the highest new acks: the first seq of each run,
/// with its last. A mailbox whose acks continue its floor without a gap, which is the common case, needs no read.
async fn read_passable_runs(
    tx: &mut Transaction,
    locked: &BTreeMap<MailboxKey, LockedMailbox>,
    changes: &BTreeMap<MailboxKey, MailboxChanges>,
) -> StoreResult<BTreeMap<(MailboxKey, Seq), Seq>> {
    let gap = |(key, own): (&MailboxKey, &MailboxChanges)| {
        let (floor, last) = (locked.get(key)?.ack_floor, *own.acked.last()?);
        let count = Seq::try_from(own.acked.len()).ok()?;
        (last - floor != count).then_some((*key, floor, last))
    };
    let gaps: Vec<(MailboxKey, Seq, Seq)> = changes.iter().filter_map(gap).collect();
    if gaps.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows: Vec<(WorkspaceId, AgentId, Seq, Seq)> = sqlx::query_as(SETTLED_ABOVE)
        .bind(gaps.iter().map(|gap| gap.0.0).collect::<Vec<_>>())
        .bind(gaps.iter().map(|gap| gap.0.1).collect::<Vec<_>>())
        .bind(gaps.iter().map(|gap| gap.1).collect::<Vec<_>>())
        .bind(gaps.iter().map(|gap| gap.2).collect::<Vec<_>>())
        .bind(MAX_SCANNED_ROWS)
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx("reading settled rows above the ack floors"))?;
    Ok(rows.into_iter().map(|(workspace, agent, first, last)| (((workspace, agent), first), last)).collect())
}

/// Settlement to be written for one row.
#[derive(Clone, Copy)]
pub(crate) enum NewSettlement {
    Acked,
    /// Deferred until the instant, after this many failures.
    Deferred(DateTime<Utc>, i16),
    DeadLettered(DeadLetterReason),
}

/// Settlements to be written, as columns of one statement.
#[derive(Default)]
pub(crate) struct SettlementRows<'a> {
    seen: HashSet<(MailboxKey, Seq)>,
    workspaces: Vec<WorkspaceId>,
    agents: Vec<AgentId>,
    seqs: Vec<Seq>,
    states: Vec<Settlement>,
    errors: Vec<Option<&'a str>>,
    reasons: Vec<Option<&'static str>>,
    available: Vec<Option<DateTime<Utc>>>,
    retries: Vec<i16>,
}

impl<'a> SettlementRows<'a> {
    pub(crate) fn push(&mut self, key: MailboxKey, seq: Seq, settlement: NewSettlement, error: Option<&'a str>) {
        // Postgres refuses an upsert that touches one row twice.
        if self.seen.insert((key, seq)) {
            let (state, reason, available_at, retry_no) = match settlement {
                NewSettlement::Acked => (Settlement::Acked, None, None, 0),
                NewSettlement::Deferred(at, retry_no) => (Settlement::Deferred, None, Some(at), retry_no),
                NewSettlement::DeadLettered(reason) => (Settlement::DeadLettered, Some(reason.as_str()), None, 0),
            };
            self.workspaces.push(key.0);
            self.agents.push(key.1);
            self.seqs.push(seq);
            self.states.push(state);
            self.reasons.push(reason);
            self.errors.push(error);
            self.available.push(available_at);
            self.retries.push(retry_no);
        }
    }

    /// Writes the settlements and returns the rows that changed; a row that was settled before keeps its settlement.
    pub(crate) async fn write(self, tx: &mut Transaction) -> StoreResult<BTreeSet<(MailboxKey, Seq)>> {
        if self.seqs.is_empty() {
            return Ok(BTreeSet::new());
        }
        let rows: Vec<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(WRITE_SETTLEMENTS)
            .bind(self.workspaces)
            .bind(self.agents)
            .bind(self.seqs)
            .bind(self.states)
            .bind(self.errors)
            .bind(self.available)
            .bind(self.retries)
            .bind(self.reasons)
            .fetch_all(&mut **tx)
            .await
            .map_err(StoreError::from_sqlx("recording settlements of attempts"))?;
        Ok(rows.into_iter().map(|(workspace, agent, seq)| ((workspace, agent), seq)).collect())
    }
}
