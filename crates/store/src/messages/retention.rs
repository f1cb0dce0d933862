//! Retention of messages in workspaces that keep them for a shorter time than the installation does. Called by
//! the worker.
//!
//! The retention of the installation drops whole days of all workspaces ([`crate::maintenance::partitions`]).
//! This one removes the days of single workspaces before that, row by row, with their dependent rows.

use chrono::NaiveDate;
use relay_domain::WorkspaceId;

use crate::{Store, StoreError, StoreResult, connections::DatabaseSession};

/// Transactions of one step, each over one workspace.
const WORKSPACES_PER_STEP: usize = 50;
const DOING: &str = "removing a workspace's old messages";

/// Progress of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetentionStep {
    pub removed: u64,
    /// True if messages may be left to remove.
    pub more: bool,
}

// $2: messages younger than the retention of deliveries stay, because deliveries refer to them. The row lock
// keeps two workers from the same workspace; SKIP LOCKED sends the second one to the next.
// The first condition on the days is that of the index, the second adds $2.
const NEXT: &str = "
SELECT workspace_id, $1::date - greatest(message_days, $2::int) AS first_kept
  FROM workspaces
 WHERE message_days IS NOT NULL AND messages_kept_from + message_days < $1::date
   AND messages_kept_from + greatest(message_days, $2::int) < $1::date
 ORDER BY messages_kept_from + message_days
 LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED";

// One index lookup per remaining partition.
const OLDEST: &str = "
SELECT created_on FROM messages
 WHERE workspace_id = $1 AND created_on < $2
 ORDER BY message_id LIMIT 1";

// One day, so one partition. Dependent rows have no foreign keys and are removed by the same statement.
const REMOVE: &str = "
WITH old AS MATERIALIZED (
    SELECT message_id FROM messages
     WHERE workspace_id = $1 AND created_on = $2
     ORDER BY message_id LIMIT $3
), reads AS (
    DELETE FROM message_reads WHERE workspace_id = $1 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
), reactions AS (
    DELETE FROM message_reactions WHERE workspace_id = $1 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
), in_sessions AS (
    DELETE FROM session_messages WHERE workspace_id = $1 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
), searched AS (
    DELETE FROM message_search
     WHERE workspace_id = $1 AND created_on = $2 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
)
DELETE FROM messages
 WHERE workspace_id = $1 AND created_on = $2 AND message_id = ANY (ARRAY(SELECT message_id FROM old))";

impl Store {
    /// Removes about `limit` messages that are past their workspace's retention as of `today`. The last
    /// `least_days` days are kept in every workspace. After an error earlier removals stay committed.
    pub async fn prune_old_messages(
        &self,
        today: NaiveDate,
        least_days: i32,
        limit: i64,
    ) -> StoreResult<RetentionStep> {
        let mut done = RetentionStep::default();
        let wanted = limit.unsigned_abs();
        for _ in 0..WORKSPACES_PER_STEP {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(DOING))?;
            let next: Option<(WorkspaceId, NaiveDate)> = sqlx::query_as(NEXT)
                .bind(today)
                .bind(least_days)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(DOING))?;
            let Some((workspace, first_kept)) = next else { return Ok(done) };
            let removed = remove_old_messages(&mut tx, workspace, first_kept, limit).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(DOING))?;
            done.removed += removed;
            // Each workspace commits on its own, so an error or a stop keeps the progress so far.
            if done.removed >= wanted {
                break;
            }
        }
        Ok(RetentionStep { more: true, ..done })
    }
}

/// Removes some of a workspace's messages of days before `first_kept`. Without any left, moves
/// `messages_kept_from`, so that the workspace is not selected again before the next day.
async fn remove_old_messages(
    tx: &mut DatabaseSession,
    workspace: WorkspaceId,
    first_kept: NaiveDate,
    limit: i64,
) -> StoreResult<u64> {
    let oldest: Option<NaiveDate> = sqlx::query_scalar(OLDEST)
        .bind(workspace)
        .bind(first_kept)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(DOING))?;
    if let Some(day) = oldest {
        let removed = sqlx::query(REMOVE).bind(workspace).bind(day).bind(limit).execute(tx).await;
        return Ok(removed.map_err(StoreError::from_sqlx(DOING))?.rows_affected());
    }
    for statement in [
        "DELETE FROM message_stats WHERE workspace_id = $1 AND created_on < $2",
        "UPDATE workspaces SET messages_kept_from = $2 WHERE workspace_id = $1",
    ] {
        sqlx::query(statement)
            .bind(workspace)
            .bind(first_kept)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(DOING))?;
    }
    Ok(0)
}
