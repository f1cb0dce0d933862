//! Removal of rows without further use: settlements below the ack floor, expired idempotency keys, published batches,
//! owners of worker ids.

use std::time::Duration;

use const_format::formatcp;
use relay_domain::{AgentId, WorkspaceId, ids::as_number, mailboxes::stream::Seq};
use serde::{Deserialize, Serialize};

use crate::{
    Store, StoreError, StoreResult,
    codes::{ACKED, DEAD_LETTERED, FAILED},
    mailboxes::{
        settled_floors::{extend_settled_floors, lock_cursors},
        skipped_seqs,
    },
    maintenance::loop_state::{LoopState, lock_state, save_state},
};

const COMPACTION: &str = "compaction";

/// Result of one step of the compaction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompactionStep {
    /// Removed settlements and runs of skipped seqs.
    pub removed: u64,
    /// Mailboxes whose settled floor was behind its settlements and was raised.
    pub extended: u64,
    /// Whether the scan continues; otherwise the next step starts over.
    pub more: bool,
}

/// Last settlement that the scan has read.
#[derive(Debug, Serialize, Deserialize)]
struct ScanPosition {
    #[serde(with = "as_number")]
    workspace_id: WorkspaceId,
    #[serde(with = "as_number")]
    agent_id: AgentId,
    seq: Seq,
}

impl ScanPosition {
    const START: Self = Self { workspace_id: WorkspaceId::new(0), agent_id: AgentId::new(0), seq: 0 };
}

// In primary key order, so that the scan's position is a key. $4 rows a step.
const PAGE: &str = formatcp!(
    "
SELECT e.workspace_id, e.agent_id, e.seq,
       (e.state <> {DEAD_LETTERED} AND e.redriven_seq IS NULL AND e.seq <= c.ack_floor) AS settled_by_the_floor,
       (e.state IN ({ACKED}, {FAILED}, {DEAD_LETTERED}) AND e.seq = c.settled_floor + 1) AS floor_is_behind
  FROM (SELECT workspace_id, agent_id, seq, state, redriven_seq FROM delivery_exceptions
         WHERE (workspace_id, agent_id, seq) > ($1, $2, $3)
         ORDER BY workspace_id, agent_id, seq LIMIT $4) AS e
  LEFT JOIN mailbox_cursors c USING (workspace_id, agent_id)
 ORDER BY e.workspace_id, e.agent_id, e.seq"
);

// The ack floor only rises, so what the page said about it still holds; the state may have changed.
const REMOVE: &str = formatcp!(
    "
DELETE FROM delivery_exceptions e
 USING unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, seq)
 WHERE e.workspace_id = k.workspace_id AND e.agent_id = k.agent_id AND e.seq = k.seq AND e.state <> {DEAD_LETTERED}
   AND e.redriven_seq IS NULL"
);

impl Store {
    /// Runs one step over up to `page` settlements: removes acked, failed and deferred ones at or below the ack floor
    /// of their mailbox. Dead letters, and settlements that name a redriven delivery, stay as long as their delivery.
    ///
    /// Also raises settled floors that a race left behind: an ack and an expiry that did not see each other's rows. The
    /// last step of a scan removes up to `page` runs of skipped seqs below the ack floor.
    pub async fn compact_settlements(&self, page: i64) -> StoreResult<CompactionStep> {
        let doing = "compacting settlements";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<ScanPosition>(&mut tx, COMPACTION).await? {
            LoopState::Busy => return Ok(CompactionStep::default()),
            LoopState::Locked(position) => position.unwrap_or(ScanPosition::START),
        };
        // Read without locks: the statements below check again what may have changed since.
        let rows: Vec<(WorkspaceId, AgentId, Seq, Option<bool>, Option<bool>)> = sqlx::query_as(PAGE)
            .bind(from.workspace_id)
            .bind(from.agent_id)
            .bind(from.seq)
            .bind(page)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;

        let mut settled = (vec![], vec![], vec![]);
        let mut behind = (vec![], vec![]);
        for &(workspace, agent, seq, settled_by_the_floor, floor_is_behind) in &rows {
            if settled_by_the_floor == Some(true) {
                settled.0.push(workspace);
                settled.1.push(agent);
                settled.2.push(seq);
            }
            if floor_is_behind == Some(true) {
                behind.0.push(workspace);
                behind.1.push(agent);
            }
        }
        let mut done = CompactionStep::default();
        if !behind.1.is_empty() {
            lock_cursors(&mut tx, &behind.0, &behind.1).await?;
            done.extended = extend_settled_floors(&mut tx, &behind.0, &behind.1).await?;
        }
        if !settled.1.is_empty() {
            let removed = sqlx::query(REMOVE).bind(settled.0).bind(settled.1).bind(settled.2);
            done.removed = removed.execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?.rows_affected();
        }
        done.more = usize::try_from(page).is_ok_and(|page| rows.len() >= page);
        // A transaction locks cursors by one ordered statement only; a second set could deadlock with another worker.
        if !done.more && behind.1.is_empty() {
            let (removed, extended) = skipped_seqs::compact_skipped(&mut tx, page).await?;
            done.removed += removed;
            done.extended += extended;
        }
        let next = match rows.last() {
            Some(&(workspace_id, agent_id, seq, ..)) if done.more => ScanPosition { workspace_id, agent_id, seq },
            _ => ScanPosition::START,
        };
        save_state(&mut tx, COMPACTION, &next).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }

    /// Removes up to `limit` idempotency keys older than `age`. Returns their number.
    pub async fn prune_idempotency_keys(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        // SKIP LOCKED: workers that prune at the same time take different rows, and an expired key that is being
        // claimed again stays.
        let done = sqlx::query(
            "DELETE FROM idempotency_keys k
              USING (SELECT workspace_id, key_hash FROM idempotency_keys
                      WHERE created_at < relay_now() - make_interval(secs => $1)
                      ORDER BY created_at LIMIT $2
                        FOR UPDATE SKIP LOCKED) AS old
              WHERE k.workspace_id = old.workspace_id AND k.key_hash = old.key_hash",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning idempotency keys"))?;
        Ok(done.rows_affected())
    }

    /// Removes up to `limit` batches published longer than `age` ago. Returns their number.
    pub async fn prune_outbox(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM outbox o
              USING (SELECT batch_id FROM outbox
                      WHERE published_at < relay_now() - make_interval(secs => $1)
                      ORDER BY published_at LIMIT $2
                        FOR UPDATE SKIP LOCKED) AS old
              WHERE o.batch_id = old.batch_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning the outbox"))?;
        Ok(done.rows_affected())
    }

    /// Releases the snowflake worker ids whose lease ended longer than `age` ago. Returns their number.
    pub async fn prune_worker_ids(&self, age: Duration) -> StoreResult<u64> {
        let done = sqlx::query(
            "UPDATE worker_ids SET owner = NULL
              WHERE owner IS NOT NULL AND lease_until < relay_now() - make_interval(secs => $1)",
        )
        .bind(age.as_secs_f64())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("releasing worker ids"))?;
        Ok(done.rows_affected())
    }
}
