//! Messages of workspaces that keep them for a shorter time than the installation does.
//!
//! The installation's own retention drops whole days of all workspaces ([`crate::partitions`]). This removes the days of
//! single workspaces before that, row by row, with the same that hangs on them.

use chrono::NaiveDate;
use sqlx::PgConnection;

use crate::{Store, StoreError, StoreResult};

/// Workspaces that one step looks at.
const WORKSPACES_AT_ONCE: usize = 50;
const DOING: &str = "removing a workspace's old messages";

/// What one step removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OldMessages {
    /// Messages.
    pub removed: u64,
    /// Whether there are more.
    pub more: bool,
}

// $2: what deliveries refer to stays, whatever a workspace wants.
const NEXT: &str = "
SELECT workspace_id, $1::date - greatest(message_days, $2::int) AS first_kept
  FROM workspaces
 WHERE message_days IS NOT NULL AND messages_kept_from + message_days < $1::date
   AND messages_kept_from + greatest(message_days, $2::int) < $1::date
 ORDER BY messages_kept_from + message_days
 LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED";

// One look at the key of each day that is left.
const OLDEST: &str = "
SELECT created_on FROM messages
 WHERE workspace_id = $1 AND created_on < $2
 ORDER BY message_id LIMIT 1";

// One day, so one partition. What hangs on a message goes with it.
const REMOVE: &str = "
WITH old AS MATERIALIZED (
    SELECT message_id FROM messages
     WHERE workspace_id = $1 AND created_on = $2
     ORDER BY message_id LIMIT $3
), reads AS (
    DELETE FROM message_reads WHERE workspace_id = $1 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
), reactions AS (
    DELETE FROM message_reactions WHERE workspace_id = $1 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
), searched AS (
    DELETE FROM message_search
     WHERE workspace_id = $1 AND created_on = $2 AND message_id = ANY (ARRAY(SELECT message_id FROM old))
)
DELETE FROM messages
 WHERE workspace_id = $1 AND created_on = $2 AND message_id = ANY (ARRAY(SELECT message_id FROM old))";

impl Store {
    /// Removes up to about `limit` messages that their workspaces keep no longer as of `today`. `least_days` are kept of
    /// every workspace.
    ///
    /// # Errors
    /// When Postgres is away or a transaction lost a lock race; what was removed before it stays removed.
    pub async fn prune_old_messages(&self, today: NaiveDate, least_days: i32, limit: i64) -> StoreResult<OldMessages> {
        let mut done = OldMessages::default();
        let wanted = limit.unsigned_abs();
        for _ in 0..WORKSPACES_AT_ONCE {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(DOING))?;
            let next: Option<(i64, NaiveDate)> = sqlx::query_as(NEXT)
                .bind(today)
                .bind(least_days)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(DOING))?;
            let Some((workspace, first_kept)) = next else { return Ok(done) };
            let removed = remove_of(&mut tx, workspace, first_kept, limit).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(DOING))?;
            done.removed += removed;
            if done.removed >= wanted {
                break;
            }
        }
        Ok(OldMessages { more: true, ..done })
    }
}

/// Removes some of a workspace's messages of days before `first_kept`, and takes down when none are left.
async fn remove_of(tx: &mut PgConnection, workspace: i64, first_kept: NaiveDate, limit: i64) -> StoreResult<u64> {
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
