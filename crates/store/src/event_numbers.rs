//! Events get their numbers: after the commit of the transaction that made them, by whoever comes first.
//!
//! The counter of a workspace is locked for one short transaction that numbers all that waits, in the order
//! of cause. Whoever sees number n can read all before it, since a number and its record commit together.

use chrono::{DateTime, Utc};
use relay_domain::{WorkspaceId, WorkspaceScope};
use sqlx::{PgConnection, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    events::{Kept, LogRecord, NewEvent},
    message_edits,
    patience::Patient as _,
};

/// Records that one transaction numbers at most.
const RECORDS_AT_ONCE: i64 = 1000;

/// A record that has just got its numbers.
#[derive(Debug)]
pub struct Numbered {
    /// The record. Its events were read only if somebody may be looking.
    pub record: LogRecord,
    /// Whether somebody may be looking.
    pub watched: bool,
}

/// What one transaction numbered.
#[derive(Debug)]
pub struct NumberedBatch {
    /// In order, workspace by workspace.
    pub records: Vec<Numbered>,
    /// Whether more may be waiting.
    pub more: bool,
}

#[derive(sqlx::FromRow)]
struct NumberedRow {
    workspace_id: i64,
    first_seq: i64,
    created_at: DateTime<Utc>,
    watched: bool,
    events: Option<Json<Vec<Kept>>>,
}

impl Store {
    /// Numbers what these workspaces have recorded, and moves it into the log: what was committed before the
    /// call has its number after it, unless `more` says otherwise.
    ///
    /// # Errors
    /// When Postgres is away. What was not numbered waits.
    pub async fn number_events(&self, of: &[WorkspaceScope]) -> StoreResult<NumberedBatch> {
        let doing = "numbering events";
        let mut workspaces: Vec<i64> = of.iter().map(|scope| scope.workspace_id().get()).collect();
        workspaces.sort_unstable();
        workspaces.dedup();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if lock_heads(&mut tx, &workspaces).await? < workspaces.len() {
            tx.rollback().await.map_err(StoreError::from_sqlx(doing))?;
            self.make_heads(&workspaces).await?;
            tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            lock_heads(&mut tx, &workspaces).await?;
        }
        // A statement of its own: it sees what those have done who held the lock before.
        let rows: Vec<NumberedRow> = sqlx::query_as(
            "WITH taken AS (
                 DELETE FROM event_inbox i USING (
                        SELECT workspace_id, record_id FROM event_inbox WHERE workspace_id = ANY ($1)
                         ORDER BY workspace_id, record_id LIMIT $2) AS next
                  WHERE i.workspace_id = next.workspace_id AND i.record_id = next.record_id
                 RETURNING i.*
             ), placed AS (
                 SELECT *, (sum(event_count) OVER (PARTITION BY workspace_id ORDER BY record_id))::bigint AS upto
                   FROM taken
             ), bumped AS (
                 UPDATE event_heads h SET next_seq = h.next_seq + made.n
                   FROM (SELECT workspace_id, sum(event_count)::bigint AS n FROM taken GROUP BY 1) AS made
                  WHERE h.workspace_id = made.workspace_id
                 RETURNING h.workspace_id, h.next_seq - made.n AS base, h.watched_until > now() AS watched
             ), numbered AS (
                 SELECT p.*, b.base + p.upto - p.event_count AS first_seq, b.base + p.upto - 1 AS last_seq, b.watched
                   FROM placed p JOIN bumped b USING (workspace_id)
             ), logged AS (
                 -- Under the day of its number: partitions of days long gone may be gone too.
                 INSERT INTO event_log (workspace_id, last_seq, created_on, first_seq, created_at, events)
                 SELECT workspace_id, last_seq, (now() AT TIME ZONE 'UTC')::date, first_seq, created_at, events
                   FROM numbered
             ), told AS (
                 UPDATE message_edits e SET until_seq = n.first_seq
                   FROM numbered n
                  WHERE n.edited_message_id IS NOT NULL AND e.workspace_id = n.workspace_id
                    AND e.message_id = n.edited_message_id AND e.until_seq = $3 + n.record_id
             )
             SELECT workspace_id, first_seq, created_at, watched, CASE WHEN watched THEN events END AS events
               FROM numbered ORDER BY workspace_id, first_seq",
        )
        .bind(&workspaces)
        .bind(RECORDS_AT_ONCE)
        .bind(message_edits::NOT_NUMBERED)
        .fetch_all(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().patiently().await.map_err(StoreError::from_sqlx(doing))?;
        let more = i64::try_from(rows.len()).is_ok_and(|n| n == RECORDS_AT_ONCE);
        Ok(NumberedBatch { records: rows.into_iter().map(NumberedRow::into_numbered).collect(), more })
    }

    /// Makes the counters of workspaces whose first events wait.
    async fn make_heads(&self, workspaces: &[i64]) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO event_heads (workspace_id)
             SELECT DISTINCT workspace_id FROM event_inbox WHERE workspace_id = ANY ($1) ORDER BY 1
             ON CONFLICT (workspace_id) DO NOTHING",
        )
        .bind(workspaces)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("making event counters"))?;
        Ok(())
    }

    /// The workspaces with records that have waited for their numbers for `seconds`, at most `limit` of them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn unnumbered_workspaces(&self, seconds: f64, limit: i64) -> StoreResult<Vec<WorkspaceScope>> {
        let found: Vec<i64> = sqlx::query_scalar(
            "SELECT DISTINCT workspace_id FROM event_inbox
              WHERE created_at < now() - make_interval(secs => $1) LIMIT $2",
        )
        .bind(seconds)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for events without numbers"))?;
        Ok(found.into_iter().map(|id| WorkspaceScope::from_engine_row(WorkspaceId::new(id))).collect())
    }

    /// Whether the workspace has records without numbers.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn has_unnumbered_events(&self, scope: WorkspaceScope) -> StoreResult<bool> {
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM event_inbox WHERE workspace_id = $1)")
            .bind(scope.workspace_id().get())
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for events without numbers"))
    }
}

/// Locks the counters in order. Returns how many there are.
async fn lock_heads(tx: &mut PgConnection, workspaces: &[i64]) -> StoreResult<usize> {
    let locked =
        sqlx::query("SELECT FROM event_heads WHERE workspace_id = ANY ($1) ORDER BY workspace_id FOR NO KEY UPDATE")
            .bind(workspaces)
            .execute(tx)
            .await
            .map_err(StoreError::from_sqlx("locking event numbers"))?;
    Ok(usize::try_from(locked.rows_affected()).unwrap_or(usize::MAX))
}

impl NumberedRow {
    fn into_numbered(self) -> Numbered {
        let events = self.events.map(|events| events.0.into_iter().map(NewEvent::from).collect());
        Numbered {
            record: LogRecord {
                scope: WorkspaceScope::from_engine_row(WorkspaceId::new(self.workspace_id)),
                first_seq: self.first_seq,
                created_at: self.created_at,
                events: events.unwrap_or_default(),
            },
            watched: self.watched,
        }
    }
}
