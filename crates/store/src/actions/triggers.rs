//! Triggers, and the scan position of each workspace's event log.
//!
//! Messages are found in the event log after their commit, so triggers add no work to a commit. The position in the log
//! tells which messages were scanned; the idempotency key makes each of them invoke an action at most once. Called by
//! the engine's trigger use cases and its trigger worker.

use chrono::{DateTime, Utc};
use relay_domain::{
    MessageId, TriggerId, WorkspaceId, WorkspaceScope,
    actions::trigger::{Trigger, TriggerChange},
    events::EventSeq,
};

use crate::{Store, StoreError, StoreResult, connections::DatabaseSession};

/// Claimed part of a workspace's event log.
#[derive(Debug, Clone, Copy)]
pub struct TriggerScan {
    pub scope: WorkspaceScope,
    /// Seq of the last event that was scanned.
    pub reached_seq: EventSeq,
    /// Seq of the newest event.
    pub newest_seq: EventSeq,
}

/// Condition: a workspace has events that no trigger has seen, and no worker has claimed them.
pub(crate) const HAS_UNSCANNED: &str = "EXISTS (
    SELECT FROM trigger_progress p JOIN event_heads h USING (workspace_id)
     WHERE p.reached_seq < h.next_seq - 1 AND p.claimed_until < relay_now())";

macro_rules! columns {
    ($before:literal, $after:literal) => {
        concat!(
            $before,
            " trigger_id, channel, pattern, mention, action_name, enabled, after_seq, last_triggered_at, last_error,
              created_at, updated_at, created_by, min_interval_seconds ",
            $after
        )
    };
}

impl Store {
    /// Creates a trigger and sets its `after_seq`. Returns `false` if the workspace already has `limit` triggers.
    pub async fn create_trigger(&self, scope: WorkspaceScope, row: &Trigger, limit: i64) -> StoreResult<bool> {
        let doing = "creating a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        lock_progress(&mut tx, scope).await?;
        // Only messages from now on count. A workspace without events has no head.
        let created = sqlx::query(
            "INSERT INTO triggers (workspace_id, trigger_id, channel, pattern, mention, action_name, enabled, after_seq,
                                   created_at, created_by, min_interval_seconds)
             SELECT $1, $2, $3, $4, $5, $6, $7,
                    coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0), $8, $10, $11
              WHERE (SELECT count(*) FROM triggers WHERE workspace_id = $1) < $9",
        )
        .bind(scope.workspace_id())
        .bind(row.trigger_id)
        .bind(&row.channel)
        .bind(&row.pattern)
        .bind(&row.mention)
        .bind(&row.action_name)
        .bind(row.enabled)
        .bind(row.created_at)
        .bind(limit)
        .bind(row.created_by)
        .bind(row.min_interval_seconds)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // The trigger may be disabled, or refused by the limit, and `lock_progress` has made a row nevertheless.
        remove_unused_progress(&mut tx, scope).await?;
        // A repetition would create a second trigger.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(created.rows_affected() == 1)
    }

    /// Returns the triggers of a workspace, oldest first, at most `limit`.
    pub async fn triggers(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<Trigger>> {
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 ORDER BY trigger_id LIMIT $2"))
            .bind(scope.workspace_id())
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing triggers"))
    }

    pub async fn trigger(&self, scope: WorkspaceScope, trigger: TriggerId) -> StoreResult<Option<Trigger>> {
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 AND trigger_id = $2"))
            .bind(scope.workspace_id())
            .bind(trigger)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a trigger"))
    }

    /// Changes a trigger; one that becomes enabled starts with the next message. Returns `None` if it does not exist.
    pub async fn update_trigger(
        &self,
        scope: WorkspaceScope,
        trigger: TriggerId,
        change: &TriggerChange,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Trigger>> {
        let doing = "changing a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        lock_progress(&mut tx, scope).await?;
        let changed = sqlx::query_as(columns!(
            "UPDATE triggers t
                SET channel = CASE WHEN $3 THEN $4 ELSE channel END,
                    pattern = CASE WHEN $5 THEN $6 ELSE pattern END,
                    mention = CASE WHEN $7 THEN $8 ELSE mention END,
                    action_name = coalesce($9, action_name),
                    enabled = coalesce($10, enabled),
                    after_seq = CASE WHEN NOT enabled AND $10
                                     THEN coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0)
                                     ELSE after_seq END,
                    min_interval_seconds = coalesce($12, min_interval_seconds), updated_at = $11
              WHERE workspace_id = $1 AND trigger_id = $2
             RETURNING",
            ""
        ))
        .bind(scope.workspace_id())
        .bind(trigger)
        .bind(change.channel.is_some())
        .bind(change.channel.clone().flatten())
        .bind(change.pattern.is_some())
        .bind(change.pattern.clone().flatten())
        .bind(change.mention.is_some())
        .bind(change.mention.clone().flatten())
        .bind(&change.action_name)
        .bind(change.enabled)
        .bind(at)
        .bind(change.min_interval_seconds)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        remove_unused_progress(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }

    /// Deletes a trigger. Returns `false` if it does not exist.
    pub async fn delete_trigger(&self, scope: WorkspaceScope, trigger: TriggerId) -> StoreResult<bool> {
        let doing = "deleting a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        lock_progress(&mut tx, scope).await?;
        let deleted = sqlx::query("DELETE FROM triggers WHERE workspace_id = $1 AND trigger_id = $2")
            .bind(scope.workspace_id())
            .bind(trigger)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        remove_unused_progress(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(deleted.rows_affected() == 1)
    }

    /// Returns the enabled triggers of a workspace, oldest first.
    pub async fn enabled_triggers(&self, scope: WorkspaceScope) -> StoreResult<Vec<Trigger>> {
        // Without a limit: creation bounds the triggers of a workspace.
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 AND enabled ORDER BY trigger_id"))
            .bind(scope.workspace_id())
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading enabled triggers"))
    }

    /// Claims up to `limit` workspaces with unscanned events, for `seconds`: those that were scanned least recently,
    /// and `of_family` of one family at most.
    pub async fn claim_trigger_scans(&self, limit: i64, of_family: i64, seconds: i32) -> StoreResult<Vec<TriggerScan>> {
        // The rank is computed apart, because FOR UPDATE allows no window function. The claim is therefore checked
        // again on the row that is locked: another worker may have taken it since.
        let rows: Vec<(WorkspaceId, EventSeq, EventSeq)> = sqlx::query_as(
            "WITH behind AS (
                 SELECT p.workspace_id, h.next_seq - 1 AS newest_seq,
                        row_number() OVER (PARTITION BY coalesce(w.created_by, p.workspace_id)
                                           ORDER BY p.claimed_until, p.workspace_id) AS nth
                   FROM trigger_progress p JOIN event_heads h USING (workspace_id) JOIN workspaces w USING (workspace_id)
                  WHERE p.reached_seq < h.next_seq - 1 AND p.claimed_until < relay_now()
             ), due AS (
                 SELECT p.workspace_id, b.newest_seq
                   FROM trigger_progress p JOIN behind b USING (workspace_id)
                  WHERE b.nth <= $3 AND p.claimed_until < relay_now()
                  ORDER BY p.claimed_until, p.workspace_id LIMIT $1
                    FOR UPDATE OF p SKIP LOCKED
             )
             UPDATE trigger_progress p SET claimed_until = relay_now() + make_interval(secs => $2)
               FROM due WHERE p.workspace_id = due.workspace_id
             RETURNING p.workspace_id, p.reached_seq, due.newest_seq",
        )
        .bind(limit)
        .bind(seconds)
        .bind(of_family)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("claiming trigger scans"))?;
        let scan = |(workspace, reached_seq, newest_seq)| TriggerScan {
            scope: WorkspaceScope::from_engine_row(workspace),
            reached_seq,
            newest_seq,
        };
        Ok(rows.into_iter().map(scan).collect())
    }

    /// Records the scan position `seq` and ends the claim now, so that the workspace queues behind the others. The
    /// update requires the claimed position: a worker whose claim expired cannot move the position of its successor.
    pub async fn finish_trigger_scan(&self, claimed: &TriggerScan, seq: EventSeq) -> StoreResult<()> {
        sqlx::query(
            "UPDATE trigger_progress SET reached_seq = $3, claimed_until = relay_now()
              WHERE workspace_id = $1 AND reached_seq = $2",
        )
        .bind(claimed.scope.workspace_id())
        .bind(claimed.reached_seq)
        .bind(seq)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finishing a trigger scan"))?;
        Ok(())
    }

    /// Records the scan position `seq` and keeps the claim, so that the rest waits until the claim expires.
    pub async fn record_trigger_progress(&self, claimed: &TriggerScan, seq: EventSeq) -> StoreResult<()> {
        sqlx::query("UPDATE trigger_progress SET reached_seq = $3 WHERE workspace_id = $1 AND reached_seq = $2")
            .bind(claimed.scope.workspace_id())
            .bind(claimed.reached_seq)
            .bind(seq)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("recording the progress of a trigger scan"))?;
        Ok(())
    }

    /// Claims the interval of a trigger for a message. Returns `false` if another message has claimed it and its
    /// minimum interval is not over. The claiming message may claim it again: its invocation may have failed to start.
    pub async fn claim_trigger_interval(
        &self,
        scope: WorkspaceScope,
        trigger: TriggerId,
        message: MessageId,
    ) -> StoreResult<bool> {
        // Concurrent claims wait for each other at the row, and the later one is then judged by the new values.
        let claimed = sqlx::query(
            "UPDATE triggers
                SET interval_claimed_by = $3,
                    interval_claimed_at = CASE WHEN interval_claimed_by = $3 THEN interval_claimed_at ELSE relay_now() END
              WHERE workspace_id = $1 AND trigger_id = $2
                AND (interval_claimed_at IS NULL OR interval_claimed_by = $3
                     OR interval_claimed_at <= relay_now() - make_interval(secs => min_interval_seconds))",
        )
        .bind(scope.workspace_id())
        .bind(trigger)
        .bind(message)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("claiming the interval of a trigger"))?;
        Ok(claimed.rows_affected() == 1)
    }

    /// Records a match, and the reason if it invoked nothing.
    pub async fn mark_triggered(
        &self,
        scope: WorkspaceScope,
        trigger: TriggerId,
        error: Option<&str>,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        // Two workers may scan the same events after a claim expired: the later time stays, in whichever order they
        // write. The error is that of the last write.
        sqlx::query(
            "UPDATE triggers SET last_triggered_at = greatest(last_triggered_at, $4), last_error = $3
              WHERE workspace_id = $1 AND trigger_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(trigger)
        .bind(error)
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("recording a match of a trigger"))?;
        Ok(())
    }

    /// Records why triggers were not matched with a message. Repetitions write nothing.
    pub async fn record_unmatched_triggers(
        &self,
        scope: WorkspaceScope,
        triggers: &[TriggerId],
        reason: &str,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE triggers SET last_error = $3
              WHERE workspace_id = $1 AND trigger_id = ANY ($2) AND last_error IS DISTINCT FROM $3",
        )
        .bind(scope.workspace_id())
        .bind(triggers)
        .bind(reason)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("recording triggers without a match"))?;
        Ok(())
    }
}

/// Creates the workspace's progress row if it is missing, and locks it. The lock serialises adding the first trigger
/// with removing the last one. The `DO UPDATE` changes nothing: it takes the lock, which `DO NOTHING` would not.
async fn lock_progress(tx: &mut DatabaseSession, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO trigger_progress AS p (workspace_id, reached_seq)
         SELECT $1, coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0)
         ON CONFLICT (workspace_id) DO UPDATE SET reached_seq = p.reached_seq",
    )
    .bind(scope.workspace_id())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("locking the trigger progress"))?;
    Ok(())
}

/// Removes the progress row if the workspace has no enabled trigger.
async fn remove_unused_progress(tx: &mut DatabaseSession, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "DELETE FROM trigger_progress
          WHERE workspace_id = $1
            AND NOT EXISTS (SELECT 1 FROM triggers WHERE workspace_id = $1 AND enabled)",
    )
    .bind(scope.workspace_id())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("removing the trigger progress"))?;
    Ok(())
}
