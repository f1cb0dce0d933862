//! Triggers, and how far each workspace's event log was looked through for them.
//!
//! Messages are found in the event log behind their commit, so a commit does nothing for triggers. Which message
//! was looked at is a position in the log; that one of them invokes an action once is the idempotency key's work.

use chrono::{DateTime, Utc};
use relay_domain::{TriggerId, WorkspaceId, WorkspaceScope};
use sqlx::PgConnection;

use crate::{Store, StoreError, StoreResult};

/// A trigger.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TriggerRow {
    /// The trigger.
    pub trigger_id: i64,
    /// Only messages in this channel.
    pub channel: Option<String>,
    /// Only texts that this is found in.
    pub pattern: Option<String>,
    /// Only messages that mention this agent.
    pub mention: Option<String>,
    /// What is invoked.
    pub action_name: String,
    /// Whether it is.
    pub enabled: bool,
    /// Events up to here are not its own.
    pub after_seq: i64,
    /// When a message last matched.
    pub last_triggered_at: Option<DateTime<Utc>>,
    /// Why that invoked nothing, if so.
    pub last_error: Option<String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was last changed.
    pub updated_at: Option<DateTime<Utc>>,
}

/// What is to be another way. `None` stays as it is.
#[derive(Debug, Default)]
pub struct TriggerChange {
    /// The channel.
    pub channel: Option<Option<String>>,
    /// The pattern.
    pub pattern: Option<Option<String>>,
    /// The mention.
    pub mention: Option<Option<String>>,
    /// The action.
    pub action_name: Option<String>,
    /// Whether it is enabled.
    pub enabled: Option<bool>,
}

/// A part of a workspace's event log that a worker looks through.
#[derive(Debug, Clone, Copy)]
pub struct ClaimedEvents {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Events up to here were looked at.
    pub reached_seq: i64,
    /// The newest event there is.
    pub newest_seq: i64,
}

macro_rules! columns {
    ($before:literal, $after:literal) => {
        concat!(
            $before,
            " trigger_id, channel, pattern, mention, action_name, enabled, after_seq, last_triggered_at, last_error,
              created_at, updated_at ",
            $after
        )
    };
}

impl Store {
    /// Makes a trigger; its `after_seq` is set here. False when the workspace has `limit` of them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_trigger(&self, scope: WorkspaceScope, row: &TriggerRow, limit: i64) -> StoreResult<bool> {
        let doing = "making a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        follow_events(&mut tx, scope).await?;
        let made = sqlx::query(
            "INSERT INTO triggers (workspace_id, trigger_id, channel, pattern, mention, action_name, enabled, after_seq,
                                   created_at)
             SELECT $1, $2, $3, $4, $5, $6, $7,
                    coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0), $8
              WHERE (SELECT count(*) FROM triggers WHERE workspace_id = $1) < $9",
        )
        .bind(scope.workspace_id().get())
        .bind(row.trigger_id)
        .bind(&row.channel)
        .bind(&row.pattern)
        .bind(&row.mention)
        .bind(&row.action_name)
        .bind(row.enabled)
        .bind(row.created_at)
        .bind(limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        stop_following(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(made.rows_affected() == 1)
    }

    /// The triggers of a workspace, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn triggers(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<TriggerRow>> {
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 ORDER BY trigger_id LIMIT $2"))
            .bind(scope.workspace_id().get())
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing triggers"))
    }

    /// A trigger.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn trigger(&self, scope: WorkspaceScope, trigger: TriggerId) -> StoreResult<Option<TriggerRow>> {
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 AND trigger_id = $2"))
            .bind(scope.workspace_id().get())
            .bind(trigger.get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a trigger"))
    }

    /// Changes a trigger. One that is switched on begins with the next message. `None` when there is none of that
    /// id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn update_trigger(
        &self,
        scope: WorkspaceScope,
        trigger: TriggerId,
        change: &TriggerChange,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<TriggerRow>> {
        let doing = "changing a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        follow_events(&mut tx, scope).await?;
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
                    updated_at = $11
              WHERE workspace_id = $1 AND trigger_id = $2
             RETURNING",
            ""
        ))
        .bind(scope.workspace_id().get())
        .bind(trigger.get())
        .bind(change.channel.is_some())
        .bind(change.channel.clone().flatten())
        .bind(change.pattern.is_some())
        .bind(change.pattern.clone().flatten())
        .bind(change.mention.is_some())
        .bind(change.mention.clone().flatten())
        .bind(&change.action_name)
        .bind(change.enabled)
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        stop_following(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(changed)
    }

    /// Deletes a trigger. False when there is none of that id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_trigger(&self, scope: WorkspaceScope, trigger: TriggerId) -> StoreResult<bool> {
        let doing = "deleting a trigger";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        follow_events(&mut tx, scope).await?;
        let gone = sqlx::query("DELETE FROM triggers WHERE workspace_id = $1 AND trigger_id = $2")
            .bind(scope.workspace_id().get())
            .bind(trigger.get())
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        stop_following(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(gone.rows_affected() == 1)
    }

    /// The enabled triggers of a workspace, oldest first.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn enabled_triggers(&self, scope: WorkspaceScope) -> StoreResult<Vec<TriggerRow>> {
        sqlx::query_as(columns!("SELECT", "FROM triggers WHERE workspace_id = $1 AND enabled ORDER BY trigger_id"))
            .bind(scope.workspace_id().get())
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading enabled triggers"))
    }

    /// Takes up to `limit` workspaces whose event log has grown, away from other workers for `seconds`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn claim_triggering(&self, limit: i64, seconds: i32) -> StoreResult<Vec<ClaimedEvents>> {
        let rows: Vec<(i64, i64, i64)> = sqlx::query_as(
            "WITH due AS (
                 SELECT p.workspace_id, h.next_seq - 1 AS newest_seq
                   FROM trigger_progress p JOIN event_heads h USING (workspace_id)
                  WHERE p.reached_seq < h.next_seq - 1 AND p.claimed_until < now()
                  ORDER BY p.claimed_until, p.workspace_id LIMIT $1
                    FOR UPDATE OF p SKIP LOCKED
             )
             UPDATE trigger_progress p SET claimed_until = now() + make_interval(secs => $2)
               FROM due WHERE p.workspace_id = due.workspace_id
             RETURNING p.workspace_id, p.reached_seq, due.newest_seq",
        )
        .bind(limit)
        .bind(seconds)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("claiming events for triggers"))?;
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        let claimed = rows.into_iter();
        Ok(claimed
            .map(|(id, reached_seq, newest_seq)| ClaimedEvents { scope: scope(id), reached_seq, newest_seq })
            .collect())
    }

    /// Says that a claimed part was looked through up to `seq`, and gives the workspace back. A worker whose claim
    /// ran out changes nothing that another has done meanwhile.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn finish_triggering(&self, claimed: &ClaimedEvents, seq: i64) -> StoreResult<()> {
        sqlx::query(
            "UPDATE trigger_progress SET reached_seq = $3, claimed_until = '-infinity'
              WHERE workspace_id = $1 AND reached_seq = $2",
        )
        .bind(claimed.scope.workspace_id().get())
        .bind(claimed.reached_seq)
        .bind(seq)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finishing events for triggers"))?;
        Ok(())
    }

    /// Says that a claimed part was looked through up to `seq`. What follows waits until the claim runs out.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn note_triggering(&self, claimed: &ClaimedEvents, seq: i64) -> StoreResult<()> {
        sqlx::query("UPDATE trigger_progress SET reached_seq = $3 WHERE workspace_id = $1 AND reached_seq = $2")
            .bind(claimed.scope.workspace_id().get())
            .bind(claimed.reached_seq)
            .bind(seq)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("noting events for triggers"))?;
        Ok(())
    }

    /// Notes that a message matched, and why it invoked nothing if so.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn mark_triggered(
        &self,
        scope: WorkspaceScope,
        trigger: TriggerId,
        error: Option<&str>,
        at: DateTime<Utc>,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE triggers SET last_triggered_at = greatest(last_triggered_at, $4), last_error = $3
              WHERE workspace_id = $1 AND trigger_id = $2",
        )
        .bind(scope.workspace_id().get())
        .bind(trigger.get())
        .bind(error)
        .bind(at)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("noting that a trigger fired"))?;
        Ok(())
    }
}

/// Makes the workspace's row of progress unless it is there, and locks it: who adds the first trigger and who removes
/// the last one wait for each other.
async fn follow_events(tx: &mut PgConnection, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO trigger_progress AS p (workspace_id, reached_seq)
         SELECT $1, coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0)
         ON CONFLICT (workspace_id) DO UPDATE SET reached_seq = p.reached_seq",
    )
    .bind(scope.workspace_id().get())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("following events for triggers"))?;
    Ok(())
}

/// Removes that row if no trigger is enabled any more.
async fn stop_following(tx: &mut PgConnection, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "DELETE FROM trigger_progress
          WHERE workspace_id = $1
            AND NOT EXISTS (SELECT 1 FROM triggers WHERE workspace_id = $1 AND enabled)",
    )
    .bind(scope.workspace_id().get())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("following events for triggers no more"))?;
    Ok(())
}
