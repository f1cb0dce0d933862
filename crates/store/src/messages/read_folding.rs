//! Folds reads that are implied by ack floors into the tables of explicit reads. The worker calls both loops.
//!
//! [`Store::fold_read_pointers`] runs continuously and raises the last-read pointers of members to the ack floors, so
//! that inboxes count from a pointer. It reads the mailboxes that were acked from the change feed; a walk of all
//! mailboxes, once an hour and after a long pause, finds what the feed lost. [`Store::fold_receipts`] writes receipts
//! for a day of deliveries before retention drops the day. Both are idempotent: folding twice changes nothing.

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{AgentId, WorkspaceId, ids::as_number, mailboxes::stream::Seq};
use serde::{Deserialize, Serialize};
use sqlx::FromRow;

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    connections::DatabaseSession,
    mailboxes::changes::{FeedPosition, acked_since, current_position},
    maintenance::loop_state::{AgentPosition, LoopState, lock_state, read_state, save_state},
};

/// Not the name of the version before, whose state is a position of a walk without an end.
const POINTERS: &str = "read_pointers_feed";
const RECEIPTS: &str = "read_receipts";
/// Deliveries of one mailbox that one step folds; bounds the transaction when a mailbox has a long backlog.
const PER_MAILBOX: i64 = 2000;
/// Mailboxes of one statement.
const MAILBOXES_PER_STATEMENT: usize = 1000;
/// Repetitions of a statement for mailboxes with a long backlog; the next walk goes on.
const REPETITIONS: usize = 50;
/// The feed keeps records for twice as long.
const OLDEST_POSITION: TimeDelta = TimeDelta::minutes(5);
/// Interval between walks.
const WALK_INTERVAL: TimeDelta = TimeDelta::hours(1);

/// Progress of one step of either loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FoldStep {
    /// Deliveries read.
    pub worked: u64,
    /// True until the scan has reached the end.
    pub more: bool,
}

/// State of the loop of pointers.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct PointerState {
    position: FeedPosition,
    read_at: DateTime<Utc>,
    walked_at: DateTime<Utc>,
    /// Last mailbox of a walk that is not complete.
    walk: Option<AgentPosition>,
}

/// Position of the receipt loop in a day's deliveries.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ReceiptPosition {
    /// All days before this one are folded.
    day: NaiveDate,
    #[serde(with = "as_number")]
    workspace_id: WorkspaceId,
    #[serde(with = "as_number")]
    agent_id: AgentId,
    seq: Seq,
}

impl ReceiptPosition {
    /// Returns the position before the first delivery of a day.
    const fn start(day: NaiveDate) -> Self {
        Self { day, workspace_id: WorkspaceId::new(i64::MIN), agent_id: AgentId::new(0), seq: 0 }
    }
}

/// Row of [`WALKED`] and of [`ACKED`]: a mailbox, the seq up to which its acks are folded, and its ack floor.
#[derive(Debug, Clone, Copy, FromRow)]
struct MailboxFloors {
    workspace_id: WorkspaceId,
    agent_id: AgentId,
    folded_seq: Seq,
    ack_floor: Seq,
}

/// Condition: mailboxes were acked since the last step, a walk is under way, there was a recovery, or there was no step
/// yet. Walks that begin by time are left to the loop.
pub(crate) const HAS_UNFOLDED: &str = formatcp!(
    "coalesce((
    SELECT s.walks OR s.epoch <> (SELECT epoch FROM recovery_state WHERE only_row)
           OR (SELECT true FROM ack_changes
                WHERE xid >= pg_snapshot_xmin(s.snapshot) AND NOT pg_visible_in_snapshot(xid, s.snapshot)
                ORDER BY xid LIMIT 1) IS NOT NULL
      FROM (SELECT (value -> 'position' ->> 'snapshot')::pg_snapshot AS snapshot,
                   (value -> 'position' ->> 'epoch')::bigint AS epoch, value ->> 'walk' IS NOT NULL AS walks
              FROM loop_state WHERE loop = '{POINTERS}') AS s), true)"
);

// Mailboxes in key order after the position. No lock is needed: the floor only rises, so a stale read folds less, never
// too much.
const WALKED: &str = "
SELECT page.workspace_id, page.agent_id, coalesce(r.folded_seq, 0) AS folded_seq, page.ack_floor
  FROM (SELECT workspace_id, agent_id, ack_floor FROM mailbox_cursors
         WHERE (workspace_id, agent_id) > ($1, $2)
         ORDER BY workspace_id, agent_id LIMIT $3) AS page
  LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
 ORDER BY page.workspace_id, page.agent_id";

const ACKED: &str = "
SELECT k.workspace_id, k.agent_id, coalesce(r.folded_seq, 0) AS folded_seq, c.ack_floor
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
  LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
 WHERE c.ack_floor > coalesce(r.folded_seq, 0)
 ORDER BY k.workspace_id, k.agent_id";

// Points each member at the newest read message of each channel among the next deliveries of each mailbox. A
// mailbox with fewer than $5 deliveries left is folded up to its floor. Member rows are locked in key order, as
// in every statement that updates several of them; the pointer moves forward only, because an explicit read
// may already have moved it further.
// LEFT JOIN: the folded seq also passes deliveries that were dropped with their partition.
const POINT: &str = formatcp!(
    "
WITH next AS MATERIALIZED (
    SELECT k.workspace_id, k.agent_id, k.ack_floor, d.seq, d.source_id, d.source_kind, d.channel_id, d.created_at,
           d.created_on
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])
           AS k (workspace_id, agent_id, folded_seq, ack_floor)
      LEFT JOIN LATERAL (
           SELECT * FROM deliveries
            WHERE workspace_id = k.workspace_id AND agent_id = k.agent_id
              AND seq > k.folded_seq AND seq <= k.ack_floor
            ORDER BY seq LIMIT $5) AS d ON true
), folded AS (
    INSERT INTO mailbox_reads AS r (workspace_id, agent_id, folded_seq)
    SELECT workspace_id, agent_id, CASE WHEN count(seq) < $5 THEN max(ack_floor) ELSE max(seq) END
      FROM next GROUP BY workspace_id, agent_id ORDER BY workspace_id, agent_id
    ON CONFLICT (workspace_id, agent_id) DO UPDATE SET folded_seq = greatest(r.folded_seq, excluded.folded_seq)
), read AS (
    SELECT DISTINCT ON (n.workspace_id, n.channel_id, n.agent_id)
           n.workspace_id, n.channel_id, n.agent_id, n.source_id, n.seq, n.created_at, n.created_on
      FROM next n
     WHERE n.source_kind = {MESSAGE_SOURCE} AND n.channel_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM delivery_exceptions x
                        WHERE x.workspace_id = n.workspace_id AND x.agent_id = n.agent_id AND x.seq = n.seq
                          AND x.state = {DEAD_LETTERED})
     ORDER BY n.workspace_id, n.channel_id, n.agent_id, n.source_id DESC
), locked AS MATERIALIZED (
    SELECT cm.workspace_id, cm.channel_id, cm.agent_id, r.source_id, r.seq, r.created_at, r.created_on
      FROM read r JOIN channel_members cm USING (workspace_id, channel_id, agent_id)
     WHERE coalesce(cm.last_read_id, -1) < r.source_id
     ORDER BY cm.workspace_id, cm.channel_id, cm.agent_id
       FOR UPDATE OF cm
), pointed AS (
    UPDATE channel_members cm
       SET last_read_id = l.source_id,
           last_read_at = coalesce((SELECT a.acked_at FROM ack_log a
                                     WHERE a.workspace_id = l.workspace_id AND a.agent_id = l.agent_id
                                       AND a.acked_at >= l.created_at - interval '1 second'
                                       AND a.created_on >= l.created_on - 1 AND a.ack_floor >= l.seq
                                     ORDER BY a.acked_at LIMIT 1), relay_now())
      FROM locked l
     WHERE cm.workspace_id = l.workspace_id AND cm.channel_id = l.channel_id AND cm.agent_id = l.agent_id
       AND coalesce(cm.last_read_id, -1) < l.source_id
)
SELECT count(seq), coalesce(bool_or(nth = $5), false)
  FROM (SELECT seq, row_number() OVER (PARTITION BY workspace_id, agent_id ORDER BY seq) AS nth FROM next) AS n"
);

// A day's deliveries in key order. All of them expired or were settled long ago, so their reads are final. A
// read time comes from the first ack that covered the delivery; one second of tolerance covers clocks that differ.
const DAY: &str = formatcp!(
    "
WITH page AS MATERIALIZED (
    SELECT workspace_id, agent_id, seq, source_id, source_kind, created_at FROM deliveries
     WHERE created_on = $1 AND (workspace_id, agent_id, seq) > ($2, $3, $4)
     ORDER BY workspace_id, agent_id, seq LIMIT $5
), written AS (
    INSERT INTO message_reads (workspace_id, message_id, agent_id, read_at)
    SELECT p.workspace_id, p.source_id, p.agent_id,
           coalesce((SELECT a.acked_at FROM ack_log a
                      WHERE a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                        AND a.acked_at >= p.created_at - interval '1 second'
                        AND a.created_on >= $1 - 1 AND a.ack_floor >= p.seq
                      ORDER BY a.acked_at LIMIT 1), p.created_at)
      FROM page p
      JOIN mailbox_cursors k ON k.workspace_id = p.workspace_id AND k.agent_id = p.agent_id AND p.seq <= k.ack_floor
     WHERE p.source_kind = {MESSAGE_SOURCE}
       AND NOT EXISTS (SELECT FROM delivery_exceptions x
                        WHERE x.workspace_id = p.workspace_id AND x.agent_id = p.agent_id AND x.seq = p.seq
                          AND x.state = {DEAD_LETTERED})
     ORDER BY p.workspace_id, p.source_id, p.agent_id
    ON CONFLICT DO NOTHING
)
SELECT workspace_id, agent_id, seq FROM page ORDER BY workspace_id, agent_id, seq"
);

impl Store {
    /// Raises the last-read pointers of agents to their ack floors: of all that acked since the last step, and, while a
    /// walk is under way, of the next `page` mailboxes. A walk ends the step, so that it takes one page per period.
    pub async fn fold_read_pointers(&self, page: i64, at: DateTime<Utc>) -> StoreResult<FoldStep> {
        let doing = "folding read pointers";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let known = match lock_state::<PointerState>(&mut tx, POINTERS).await? {
            LoopState::Busy => return Ok(FoldStep::default()),
            // The feed may have dropped records behind an older position.
            LoopState::Locked(state) => state.filter(|state| at - state.read_at < OLDEST_POSITION),
        };
        let mut worked = 0;
        let mut walk = known.as_ref().and_then(|state| state.walk);
        let is_due = known.as_ref().is_none_or(|state| state.walk.is_none() && at - state.walked_at >= WALK_INTERVAL);
        let (position, is_complete) = match &known {
            Some(state) => {
                let acked = acked_since(&mut tx, &state.position).await?;
                let mailboxes: Vec<_> = acked.mailboxes.into_iter().collect();
                for keys in mailboxes.chunks(MAILBOXES_PER_STATEMENT) {
                    worked += fold_acked(&mut tx, keys).await?;
                }
                (acked.position, acked.is_complete)
            }
            // Before the walk begins: acks during the walk are read from the feed behind this position.
            None => (current_position(&mut tx).await?, false),
        };
        let starts = is_due || !is_complete;
        // An incomplete read may have missed any mailbox, also one that a walk in progress has passed.
        if starts {
            walk = Some(AgentPosition::START);
        }
        if let Some(from) = walk {
            let (deliveries, next) = walk_page(&mut tx, from, page).await?;
            worked += deliveries;
            walk = next;
        }
        let walked_at = known.filter(|_| !starts).map_or(at, |state| state.walked_at);
        save_state(&mut tx, POINTERS, &PointerState { position, read_at: at, walked_at, walk }).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(FoldStep { worked, more: false })
    }

    /// Writes receipts for the next `page` acked deliveries of the days before `first_unfolded`, oldest day
    /// first. `more` until all these days are done.
    pub async fn fold_receipts(&self, first_unfolded: NaiveDate, page: i64) -> StoreResult<FoldStep> {
        let doing = "folding read receipts";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<ReceiptPosition>(&mut tx, RECEIPTS).await? {
            LoopState::Busy => return Ok(FoldStep::default()),
            LoopState::Locked(Some(position)) => position,
            LoopState::Locked(None) => {
                // The first run starts at the oldest partition, whose name carries its day.
                let oldest: Option<NaiveDate> = sqlx::query_scalar(
                    "SELECT min(to_date(right(c.relname, 8), 'YYYYMMDD'))
                       FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                      WHERE i.inhparent = 'deliveries'::regclass AND c.relname ~ '_[0-9]{8}$'",
                )
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
                // Without a partition there is nothing to fold before that day.
                ReceiptPosition::start(oldest.unwrap_or(first_unfolded).min(first_unfolded))
            }
        };
        // Younger days still have deliveries that may be settled.
        if from.day >= first_unfolded {
            return Ok(FoldStep::default());
        }
        let rows: Vec<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(DAY)
            .bind(from.day)
            .bind(from.workspace_id)
            .bind(from.agent_id)
            .bind(from.seq)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let next = match rows.last() {
            Some(&(workspace_id, agent_id, seq)) if rows.len() as i64 == page => {
                ReceiptPosition { day: from.day, workspace_id, agent_id, seq }
            }
            _ => ReceiptPosition::start(from.day.succ_opt().unwrap_or(first_unfolded)),
        };
        save_state(&mut tx, RECEIPTS, &next).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(FoldStep { worked: rows.len() as u64, more: next.day < first_unfolded })
    }

    /// Returns the first day whose deliveries are not folded, which retention must not drop. `None` before the
    /// first fold.
    pub async fn first_unfolded_day(&self) -> StoreResult<Option<NaiveDate>> {
        let position: Option<ReceiptPosition> = read_state(&self.pool, RECEIPTS).await?;
        Ok(position.map(|position| position.day))
    }
}

/// Folds the next `page` mailboxes of a walk. Returns the deliveries read, and the position if the walk goes on.
async fn walk_page(
    tx: &mut DatabaseSession,
    from: AgentPosition,
    page: i64,
) -> StoreResult<(u64, Option<AgentPosition>)> {
    let rows: Vec<MailboxFloors> = sqlx::query_as(WALKED)
        .bind(from.workspace_id)
        .bind(from.agent_id)
        .bind(page)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("walking mailboxes"))?;
    let last = rows.last().map(|row| AgentPosition { workspace_id: row.workspace_id, agent_id: row.agent_id });
    let behind = rows.iter().filter(|row| row.ack_floor > row.folded_seq);
    let behind: Vec<_> = behind.map(|row| (row.workspace_id, row.agent_id)).collect();
    let mut worked = 0;
    for keys in behind.chunks(MAILBOXES_PER_STATEMENT) {
        worked += fold_acked(tx, keys).await?;
    }
    let is_full = i64::try_from(rows.len()).is_ok_and(|read| read >= page);
    Ok((worked, last.filter(|_| is_full)))
}

/// Folds the acks of these mailboxes. Returns the deliveries read.
async fn fold_acked(tx: &mut DatabaseSession, keys: &[(WorkspaceId, AgentId)]) -> StoreResult<u64> {
    let doing = "folding acked deliveries";
    let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) = keys.iter().copied().unzip();
    let mut worked = 0;
    for _ in 0..REPETITIONS {
        // Read again in each round, because the last one has moved the folded seqs.
        let rows: Vec<MailboxFloors> = sqlx::query_as(ACKED)
            .bind(&workspaces)
            .bind(&agents)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if rows.is_empty() {
            break;
        }
        let (deliveries, is_left): (i64, bool) = sqlx::query_as(POINT)
            .bind(rows.iter().map(|row| row.workspace_id).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.agent_id).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.folded_seq).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.ack_floor).collect::<Vec<_>>())
            .bind(PER_MAILBOX)
            .fetch_one(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        worked += deliveries.unsigned_abs();
        if !is_left {
            break;
        }
    }
    Ok(worked)
}
