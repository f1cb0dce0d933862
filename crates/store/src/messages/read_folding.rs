//! Folds reads that are implied by ack floors into the tables of explicit reads. The worker calls both loops.
//!
//! [`Store::fold_read_pointers`] runs continuously and raises the last-read pointers of members to the ack
//! floors, so that inboxes count from a pointer. [`Store::fold_receipts`] writes receipts for a day of
//! deliveries before retention drops the day. Both are idempotent: folding twice changes nothing.

use chrono::NaiveDate;
use const_format::formatcp;
use serde::{Deserialize, Serialize};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, MESSAGE_SOURCE},
    maintenance::loop_state::{LoopState, lock_state, read_state, save_state},
};

const POINTERS: &str = "read_pointers";
const RECEIPTS: &str = "read_receipts";
/// Deliveries of one mailbox that one step folds; bounds the transaction when a mailbox has a long backlog.
const PER_MAILBOX: i64 = 2000;

/// Progress of one step of either loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FoldStep {
    /// Deliveries read.
    pub worked: u64,
    /// True until the scan has reached the end.
    pub more: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct ScanPosition {
    workspace_id: i64,
    agent_id: i64,
}

/// Position of the receipt loop in a day's deliveries.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ReceiptPosition {
    /// All days before this one are folded.
    day: NaiveDate,
    workspace_id: i64,
    agent_id: i64,
    seq: i64,
}

// Mailboxes in key order after the position, with their folded seq and ack floor. No lock is needed: the floor
// only rises, so a stale read folds less, never too much.
const MOVED: &str = "
SELECT page.workspace_id, page.agent_id, coalesce(r.folded_seq, 0), page.ack_floor
  FROM (SELECT workspace_id, agent_id, ack_floor FROM mailbox_cursors
         WHERE (workspace_id, agent_id) > ($1, $2)
         ORDER BY workspace_id, agent_id LIMIT $3) AS page
  LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
 ORDER BY page.workspace_id, page.agent_id";

// Points each member at the newest read message of each channel among the next deliveries of each mailbox. A
// mailbox with fewer than $5 deliveries left is folded up to its floor. Member rows are locked in key order, as
// in every statement that updates several of them; the pointer moves forward only, because an explicit read
// may already have moved it further.
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
    /// Raises the last-read pointers of the agents of the next `page` mailboxes to their ack floors.
    pub async fn fold_read_pointers(&self, page: i64) -> StoreResult<FoldStep> {
        let doing = "folding read pointers";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<ScanPosition>(&mut tx, POINTERS).await? {
            LoopState::Busy => return Ok(FoldStep::default()),
            LoopState::Locked(position) => position.unwrap_or_default(),
        };
        let rows: Vec<(i64, i64, i64, i64)> = sqlx::query_as(MOVED)
            .bind(from.workspace_id)
            .bind(from.agent_id)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // A page that is not full ends the scan; the next step starts over.
        let full = rows.len() as i64 == page;
        let next = rows.last().filter(|_| full).map(|row| ScanPosition { workspace_id: row.0, agent_id: row.1 });
        let (mut workspaces, mut agents, mut folded, mut floors) = (vec![], vec![], vec![], vec![]);
        for (workspace, agent, from, floor) in rows.into_iter().filter(|row| row.3 > row.2) {
            workspaces.push(workspace);
            agents.push(agent);
            folded.push(from);
            floors.push(floor);
        }
        let mut done = FoldStep { worked: 0, more: full };
        if !agents.is_empty() {
            let (deliveries, left): (i64, bool) = sqlx::query_as(POINT)
                .bind(workspaces)
                .bind(agents)
                .bind(folded)
                .bind(floors)
                .bind(PER_MAILBOX)
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            done = FoldStep { worked: deliveries.unsigned_abs(), more: full || left };
        }
        save_state(&mut tx, POINTERS, &next.unwrap_or_default()).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }

    /// Writes receipts for the next `page` acked deliveries of the days before `first_unfolded`, oldest day
    /// first. `more` until all these days are done.
    pub async fn fold_receipts(&self, first_unfolded: NaiveDate, page: i64) -> StoreResult<FoldStep> {
        let doing = "folding read receipts";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let start = |day| ReceiptPosition { day, workspace_id: i64::MIN, agent_id: 0, seq: 0 };
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
                start(oldest.unwrap_or(first_unfolded).min(first_unfolded))
            }
        };
        // Younger days still have deliveries that may be settled.
        if from.day >= first_unfolded {
            return Ok(FoldStep::default());
        }
        let rows: Vec<(i64, i64, i64)> = sqlx::query_as(DAY)
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
            _ => start(from.day.succ_opt().unwrap_or(first_unfolded)),
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
