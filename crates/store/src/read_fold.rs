//! Folding reads that follow from acknowledgements into the tables of explicit reads.
//!
//! Two loops: one moves the last-read pointers of members up behind the ack floors, all the time, so that
//! inboxes count from a pointer; the other writes receipts for a whole day of deliveries before retention
//! drops it. Both are idempotent: what is folded twice stays as it is.

use chrono::NaiveDate;
use serde::{Deserialize, Serialize};

use crate::{
    Store, StoreError, StoreResult,
    loop_state::{Remembered, recall, remember},
};

const POINTERS: &str = "read_pointers";
const RECEIPTS: &str = "read_receipts";
/// Deliveries of one mailbox that one step folds.
const PER_MAILBOX: i64 = 2000;

/// What one step of either loop did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Folded {
    /// Deliveries that were looked at, or receipts written.
    pub worked: u64,
    /// Whether the scan goes on; otherwise it has reached the end.
    pub more: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Position {
    workspace_id: i64,
    agent_id: i64,
}

/// Where the receipts of a day are.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Receipts {
    /// All days before this one are folded.
    day: NaiveDate,
    workspace_id: i64,
    agent_id: i64,
    seq: i64,
}

// Mailboxes in key order, behind the position, whose ack floor has moved. No lock: the floor only rises.
const MOVED: &str = "
SELECT page.workspace_id, page.agent_id, coalesce(r.folded_seq, 0), page.ack_floor
  FROM (SELECT workspace_id, agent_id, ack_floor FROM mailbox_cursors
         WHERE (workspace_id, agent_id) > ($1, $2)
         ORDER BY workspace_id, agent_id LIMIT $3) AS page
  LEFT JOIN mailbox_reads r USING (workspace_id, agent_id)
 ORDER BY page.workspace_id, page.agent_id";

// The newest read message of each channel in the next deliveries of each mailbox. A mailbox with fewer than
// $5 left is folded up to its floor.
const POINT: &str = "
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
     WHERE n.source_kind = 0 AND n.channel_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM delivery_exceptions x
                        WHERE x.workspace_id = n.workspace_id AND x.agent_id = n.agent_id AND x.seq = n.seq
                          AND x.state = 4)
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
                                     ORDER BY a.acked_at LIMIT 1), now())
      FROM locked l
     WHERE cm.workspace_id = l.workspace_id AND cm.channel_id = l.channel_id AND cm.agent_id = l.agent_id
       AND coalesce(cm.last_read_id, -1) < l.source_id
)
SELECT count(seq), coalesce(bool_or(nth = $5), false)
  FROM (SELECT seq, row_number() OVER (PARTITION BY workspace_id, agent_id ORDER BY seq) AS nth FROM next) AS n";

// A day's deliveries in key order. All of them have expired or been settled long ago.
const DAY: &str = "
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
     WHERE p.source_kind = 0
       AND NOT EXISTS (SELECT FROM delivery_exceptions x
                        WHERE x.workspace_id = p.workspace_id AND x.agent_id = p.agent_id AND x.seq = p.seq
                          AND x.state = 4)
     ORDER BY p.workspace_id, p.source_id, p.agent_id
    ON CONFLICT DO NOTHING
)
SELECT workspace_id, agent_id, seq FROM page ORDER BY workspace_id, agent_id, seq";

impl Store {
    /// One step over `page` mailboxes: moves the last-read pointers of their agents up to what their ack
    /// floors say, forward only.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn fold_read_pointers(&self, page: i64) -> StoreResult<Folded> {
        let doing = "folding read pointers";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match recall::<Position>(&mut tx, POINTERS).await? {
            Remembered::Busy => return Ok(Folded::default()),
            Remembered::Ours(position) => position.unwrap_or_default(),
        };
        let rows: Vec<(i64, i64, i64, i64)> = sqlx::query_as(MOVED)
            .bind(from.workspace_id)
            .bind(from.agent_id)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let full = rows.len() as i64 == page;
        let next = rows.last().filter(|_| full).map(|row| Position { workspace_id: row.0, agent_id: row.1 });
        let (mut workspaces, mut agents, mut folded, mut floors) = (vec![], vec![], vec![], vec![]);
        for (workspace, agent, from, floor) in rows.into_iter().filter(|row| row.3 > row.2) {
            workspaces.push(workspace);
            agents.push(agent);
            folded.push(from);
            floors.push(floor);
        }
        let mut done = Folded { worked: 0, more: full };
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
            done = Folded { worked: deliveries.unsigned_abs(), more: full || left };
        }
        remember(&mut tx, POINTERS, &next.unwrap_or_default()).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }

    /// One step over the deliveries of the days before `first_unfolded`, oldest day first: writes a receipt
    /// for each that was acknowledged over a socket. `more` until all these days are done.
    ///
    /// # Errors
    /// When Postgres is away; nothing has changed then.
    pub async fn fold_receipts(&self, first_unfolded: NaiveDate, page: i64) -> StoreResult<Folded> {
        let doing = "folding read receipts";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let start = |day| Receipts { day, workspace_id: i64::MIN, agent_id: 0, seq: 0 };
        let from = match recall::<Receipts>(&mut tx, RECEIPTS).await? {
            Remembered::Busy => return Ok(Folded::default()),
            Remembered::Ours(Some(position)) => position,
            Remembered::Ours(None) => {
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
        if from.day >= first_unfolded {
            return Ok(Folded::default());
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
                Receipts { day: from.day, workspace_id, agent_id, seq }
            }
            _ => start(from.day.succ_opt().unwrap_or(first_unfolded)),
        };
        remember(&mut tx, RECEIPTS, &next).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Folded { worked: rows.len() as u64, more: next.day < first_unfolded })
    }

    /// The first day whose deliveries have not been folded: retention must leave it alone. `None` before the
    /// first fold.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn first_unfolded_day(&self) -> StoreResult<Option<NaiveDate>> {
        let value: Option<serde_json::Value> = sqlx::query_scalar("SELECT value FROM loop_state WHERE loop = $1")
            .bind(RECEIPTS)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading how far receipts are folded"))?;
        Ok(value.and_then(|value| serde_json::from_value::<Receipts>(value).ok()).map(|position| position.day))
    }
}
