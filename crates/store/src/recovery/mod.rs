//! Recovery of a restored database: detects the restore and reconciles mailboxes with what had been sent (ADR 0017).
//! Main types: [`DatabaseState`], [`RecoveryLock`], [`LoggedDelivery`].
//!
//! Called by `relay_engine::recovery` only, under the recovery lock while no process serves clients. The exceptions are
//! [`reported_seqs`], which gateways call later for one mailbox at a time, and [`epoch`], which guards all writes.

pub(crate) mod epoch;
mod heads;
mod lock;
mod logged;
mod reported_seqs;

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq, recovery::LogMarks};
use serde_json::Value;
use sqlx::{FromRow, types::Json};
use tokio::time::Instant;

pub use epoch::KnownDatabase;
pub use heads::{BEFORE_ALL_MAILBOXES, HeadJump, MailboxKey};
pub use lock::RecoveryLock;
pub use logged::{LoggedDelivery, LoggedMessage, ReinsertOutcome};
pub use reported_seqs::{ReportOutcome, ReportedSeq};

use crate::{
    Store, StoreError, StoreResult, mailboxes::cursors::split_keys, push::mailboxes::RELEASE_ALL,
    statement_timeout::StatementTimeout as _,
};

/// Name of the advisory lock of recovery.
const LOCK: &str = "relay_recovery";

/// Adopted identity of a database under repair. It equals that of no database, so that an interrupted repair is
/// repeated.
const UNDER_REPAIR: &str = "under repair";

/// Milliseconds, so that two recoveries have different epochs even if they begin from copies of one state.
const BEGIN_RECOVERY: &str = "
UPDATE recovery_state
   SET identity = $1, epoch = greatest(epoch + 1, (extract(epoch FROM relay_now()) * 1000)::bigint)
RETURNING relay_database_identity(), epoch, confirmations";

/// Open transactions of gateways, workers and tools.
const OPEN_TRANSACTIONS: &str = "
SELECT pid, xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND usename = current_user AND application_name = current_setting('application_name')
   AND xact_start IS NOT NULL AND pid <> pg_backend_pid()";
/// No batch transaction is open for longer: its statements have 15 s, its COMMIT 8 s.
const OPEN_TRANSACTIONS_TIMEOUT: Duration = Duration::from_secs(25);
const OPEN_TRANSACTIONS_POLL: Duration = Duration::from_millis(20);

/// Identity and recovery history of the database.
#[derive(Debug, Clone, PartialEq)]
pub struct DatabaseState {
    /// Current identity, derived from the Postgres cluster.
    pub identity: String,
    /// Identity that the engine last adopted; `None` before the first start.
    pub adopted_identity: Option<String>,
    /// Epoch of the last recovery, also of one that has not ended; 0 before the first.
    pub epoch: i64,
    /// Confirmations by running processes so far.
    pub confirmations: i64,
    /// Ends of the logs that belong to the database, at the last confirmation; `None` before the first start.
    pub log_marks: Option<LogMarks>,
    /// The database is a standby, which takes no writes.
    pub is_standby: bool,
    /// Last confirmation of the adopted identity. In a restored database, the time of the restored state.
    pub seen_at: DateTime<Utc>,
    pub recovered_at: Option<DateTime<Utc>>,
    /// Report of the last recovery.
    pub report: Option<Value>,
}

impl DatabaseState {
    /// Returns true if the engine adopted another database than this one.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.adopted_identity.as_ref().is_some_and(|adopted| *adopted != self.identity)
    }

    /// Returns the values that a process remembers when it begins to serve this database.
    #[must_use]
    pub fn to_known(&self) -> KnownDatabase {
        KnownDatabase { identity: self.identity.clone(), epoch: self.epoch, confirmations: self.confirmations }
    }
}

#[derive(FromRow)]
struct DatabaseStateRow {
    identity: String,
    adopted_identity: Option<String>,
    epoch: i64,
    confirmations: i64,
    log_marks: Option<Json<LogMarks>>,
    is_standby: bool,
    seen_at: DateTime<Utc>,
    recovered_at: Option<DateTime<Utc>>,
    report: Option<Json<Value>>,
}

impl From<DatabaseStateRow> for DatabaseState {
    fn from(row: DatabaseStateRow) -> Self {
        Self {
            identity: row.identity,
            adopted_identity: row.adopted_identity,
            epoch: row.epoch,
            confirmations: row.confirmations,
            log_marks: row.log_marks.map(|json| json.0),
            is_standby: row.is_standby,
            seen_at: row.seen_at,
            recovered_at: row.recovered_at,
            report: row.report.map(|json| json.0),
        }
    }
}

impl Store {
    /// Reads the identity and recovery history of the database.
    pub async fn database_state(&self) -> StoreResult<DatabaseState> {
        let row: DatabaseStateRow = sqlx::query_as(
            "SELECT relay_database_identity() AS identity, identity AS adopted_identity, epoch,
                    confirmations, log_marks, pg_is_in_recovery() AS is_standby, seen_at, recovered_at, report
               FROM recovery_state",
        )
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("reading the identity of the database"))?;
        Ok(row.into())
    }

    /// Confirms that this is the adopted database, not recovered since this process opened it and not in an older
    /// state, and records the time, and the ends of the logs if they are known. Returns false if it is another one.
    pub async fn confirm_database(&self, marks: Option<LogMarks>) -> StoreResult<bool> {
        let confirmations: Option<i64> = sqlx::query_scalar(
            "UPDATE recovery_state SET seen_at = relay_now(), confirmations = confirmations + 1,
                    log_marks = coalesce($3, log_marks)
              WHERE identity = relay_database_identity() AND epoch = coalesce($1, epoch) AND confirmations >= $2
          RETURNING confirmations",
        )
        .bind(self.known_epoch())
        .bind(self.fence.confirmations())
        .bind(marks.map(Json))
        .fetch_optional(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("confirming the identity of the database"))?;
        if let Some(confirmations) = confirmations {
            self.fence.confirm(confirmations);
        }
        Ok(confirmations.is_some())
    }

    /// Records which logs belong to the database.
    pub async fn record_logs(&self, marks: LogMarks) -> StoreResult<()> {
        sqlx::query("UPDATE recovery_state SET log_marks = $1")
            .bind(Json(marks))
            .execute(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("recording the logs of the database"))?;
        Ok(())
    }

    /// Begins a recovery: raises the epoch, and marks the database as one that must be repaired, which remains until
    /// [`Store::adopt_database`] if this process ends. Then waits for the transactions that began under the epoch
    /// before, so that none of them commits a number while the repair decides which ones were used, and releases the
    /// mailboxes of http_push.
    ///
    /// # Errors
    /// Also if one of those transactions has not ended after 25 s.
    pub async fn begin_recovery(&self) -> StoreResult<()> {
        let doing = "beginning a recovery";
        let (identity, epoch, confirmations) = sqlx::query_as(BEGIN_RECOVERY)
            .bind(UNDER_REPAIR)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // If another process begins it again, because this one has lost the lock, the transactions of this one fail.
        self.pool.opening().fence().open(KnownDatabase { identity, epoch, confirmations });
        let began = Instant::now();
        let open: Vec<(i32, DateTime<Utc>)> = self.read_open_transactions(doing).await?;
        let mut left = open.clone();
        while !left.is_empty() && began.elapsed() < OPEN_TRANSACTIONS_TIMEOUT {
            tokio::time::sleep(OPEN_TRANSACTIONS_POLL).await;
            left = self.read_open_transactions(doing).await?;
            left.retain(|transaction| open.contains(transaction));
        }
        if !left.is_empty() {
            return Err(StoreError::unavailable(doing));
        }
        // Workers of http_push remember positions of lost deliveries.
        // After the wait, so that no claim of the epoch before commits behind it.
        sqlx::query(RELEASE_ALL).execute(&self.pool).await.map_err(StoreError::from_sqlx(doing))?;
        Ok(())
    }

    async fn read_open_transactions(&self, doing: &'static str) -> StoreResult<Vec<(i32, DateTime<Utc>)>> {
        sqlx::query_as(OPEN_TRANSACTIONS)
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))
    }

    /// Takes the lock of recovery; `None` while another process holds it.
    pub async fn try_recovery_lock(&self) -> StoreResult<Option<RecoveryLock>> {
        let doing = "taking the lock of recovery";
        // Past a pooler, because the lock belongs to the session.
        let mut connection = lock::connect(&self.direct).await.map_err(StoreError::from_sqlx(doing))?;
        let ours: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock(hashtext($1))")
            .bind(LOCK)
            .fetch_one(&mut connection)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(ours.then(|| RecoveryLock::keep(connection)))
    }

    /// Returns true while some process holds the lock of recovery.
    pub async fn is_recovery_running(&self) -> StoreResult<bool> {
        // pg_locks shows the upper half of a 64-bit key as classid and the lower half as objid.
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_locks
                             WHERE locktype = 'advisory' AND objsubid = 1 AND granted
                               AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                               AND (classid::bigint << 32) | objid::bigint = hashtext($1)::bigint)",
        )
        .bind(LOCK)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding the lock of recovery"))
    }

    /// Counts the mailboxes with unsettled deliveries.
    pub async fn count_busy_mailboxes(&self) -> StoreResult<i64> {
        sqlx::query_scalar(
            "SELECT count(*) FROM mailbox_cursors c JOIN mailbox_heads h USING (workspace_id, agent_id)
              WHERE c.settled_floor < h.next_seq - 1",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting non-empty mailboxes"))
    }

    /// Adopts the identity of this database. A `report` also marks it as recovered now, by the recovery that this
    /// handle has begun.
    pub async fn adopt_database(&self, report: Option<&Value>) -> StoreResult<()> {
        let doing = "adopting the database";
        // Without a report nothing was repaired, so there is no epoch to be compared.
        let begun = report.and_then(|_| self.pool.opening().fence().served_database()).map(|known| known.epoch);
        let adopted = sqlx::query(
            "UPDATE recovery_state
                SET identity = relay_database_identity(), seen_at = relay_now(),
                    recovered_at = CASE WHEN $1::jsonb IS NULL THEN recovered_at ELSE relay_now() END,
                    report = coalesce($1::jsonb, report)
              WHERE epoch = coalesce($2, epoch)",
        )
        .bind(report.map(Json))
        .bind(begun)
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if adopted.rows_affected() == 0 { Err(StoreError::OtherEpoch { doing }) } else { Ok(()) }
    }

    /// Counts the positions, all of which were allotted, that are not below the head of their mailbox.
    ///
    /// A missing mailbox of an existing workspace counts if its entry in `count_missing` is true: agents are removed
    /// with their workspace only, so the mailbox was created after the state of this database. A missing workspace may
    /// have been erased and never counts.
    pub async fn count_ahead_of_heads(
        &self,
        positions: &[(WorkspaceScope, AgentId, Seq)],
        count_missing: &[bool],
    ) -> StoreResult<u64> {
        let keys: Vec<_> = positions.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
        let (workspaces, agents) = split_keys(&keys);
        let ahead: i64 = sqlx::query_scalar(
            "SELECT count(*)
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[])
                    AS k (workspace_id, agent_id, seq, count_missing)
               LEFT JOIN mailbox_heads h USING (workspace_id, agent_id)
              WHERE k.seq >= h.next_seq
                 OR (h.agent_id IS NULL AND k.count_missing
                     AND EXISTS (SELECT FROM workspaces w
                                  WHERE w.workspace_id = k.workspace_id AND w.deleted_at IS NULL))",
        )
        .bind(workspaces)
        .bind(agents)
        .bind(positions.iter().map(|(_, _, seq)| *seq).collect::<Vec<_>>())
        .bind(count_missing)
        .fetch_one(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("comparing the log with mailbox heads"))?;
        Ok(ahead.unsigned_abs())
    }

    /// Lists up to `limit` mailboxes with unsettled deliveries behind `after`, with their settled floors.
    pub async fn busy_mailboxes(
        &self,
        after: MailboxKey,
        limit: i64,
    ) -> StoreResult<Vec<(WorkspaceScope, AgentId, Seq)>> {
        let rows: Vec<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(
            "SELECT c.workspace_id, c.agent_id, c.settled_floor
               FROM mailbox_cursors c JOIN mailbox_heads h USING (workspace_id, agent_id)
              WHERE (c.workspace_id, c.agent_id) > ($1, $2) AND c.settled_floor < h.next_seq - 1
              ORDER BY c.workspace_id, c.agent_id LIMIT $3",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding non-empty mailboxes"))?;
        let scoped = |(workspace, agent, floor)| (WorkspaceScope::from_engine_row(workspace), agent, floor);
        Ok(rows.into_iter().map(scoped).collect())
    }
}
