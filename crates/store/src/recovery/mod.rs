//! A database that was restored: noticing it, and bringing it into line with what had been sent (ADR 0017).
//!
//! Called by recovery only, under its lock, while no process serves anybody; `told` afterwards, for one mailbox.

mod heads;
mod logged;
mod told;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, session::Seq};
use serde_json::Value;
use sqlx::{Connection as _, PgConnection, types::Json};

pub use heads::Jumped;
pub use logged::{LoggedDelivery, LoggedMessage, Reinserted};
pub use told::Told;

use crate::{Store, StoreError, StoreResult, cursors::split, patience::Patient as _};

/// Of all locks of the installation, the one of whoever recovers.
const LOCK: &str = "relay_recovery";

/// What the database says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct DatabaseState {
    /// What it is now.
    pub identity: String,
    /// What it was when the engine last agreed; `None` before the first start.
    pub known: Option<String>,
    /// When it was last seen to be that. In a restored database, when the restored state was.
    pub seen_at: DateTime<Utc>,
    /// When it was last recovered.
    pub recovered_at: Option<DateTime<Utc>>,
    /// What came of that.
    pub report: Option<Value>,
}

impl DatabaseState {
    /// Whether this is not the database that the engine knew.
    #[must_use]
    pub fn is_another(&self) -> bool {
        self.known.as_ref().is_some_and(|known| *known != self.identity)
    }
}

/// The right to recover, until it is dropped or released.
#[derive(Debug)]
pub struct RecoveryLock {
    connection: PgConnection,
}

impl RecoveryLock {
    /// Lets the next one recover.
    pub async fn release(self) {
        // The lock ends with its session, whatever comes of saying goodbye.
        let _ = self.connection.close().await;
    }
}

impl Store {
    /// What the database says of itself.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn database_state(&self) -> StoreResult<DatabaseState> {
        type Row = (String, Option<String>, DateTime<Utc>, Option<DateTime<Utc>>, Option<Json<Value>>);
        let row: Row = sqlx::query_as(
            "SELECT relay_database_identity(), identity, seen_at, recovered_at, report FROM recovery_state",
        )
        .fetch_one(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("asking the database what it is"))?;
        let (identity, known, seen_at, recovered_at, report) = row;
        Ok(DatabaseState { identity, known, seen_at, recovered_at, report: report.map(|json| json.0) })
    }

    /// Notes that the database is the one that the engine knows. `false` when it is not.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn see_database(&self) -> StoreResult<bool> {
        let seen = sqlx::query("UPDATE recovery_state SET seen_at = now() WHERE identity = relay_database_identity()")
            .execute(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("noting that the database is the known one"))?;
        Ok(seen.rows_affected() == 1)
    }

    /// Takes the right to recover; `None` while another process has it.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn try_recovery_lock(&self) -> StoreResult<Option<RecoveryLock>> {
        let doing = "taking the lock of recovery";
        // A connection of its own: the lock must not go back to the pool with it.
        let mut connection = PgConnection::connect_with(&self.pool.connect_options())
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let ours: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock(hashtext($1))")
            .bind(LOCK)
            .fetch_one(&mut connection)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(ours.then_some(RecoveryLock { connection }))
    }

    /// Whether some process has the right to recover just now.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn recovery_is_under_way(&self) -> StoreResult<bool> {
        // A lock by one number shows its upper half as classid, its lower half as objid.
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM pg_locks
                             WHERE locktype = 'advisory' AND objsubid = 1 AND granted
                               AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                               AND (classid::bigint << 32) | objid::bigint = hashtext($1)::bigint)",
        )
        .bind(LOCK)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for the lock of recovery"))
    }

    /// Mailboxes that hold something unsettled.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn count_busy_mailboxes(&self) -> StoreResult<i64> {
        sqlx::query_scalar(
            "SELECT count(*) FROM mailbox_cursors c JOIN mailbox_heads h USING (workspace_id, agent_id)
              WHERE c.settled_floor < h.next_seq - 1",
        )
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("counting mailboxes that hold something"))
    }

    /// From now on the engine knows this database; with what came of recovering it, if that was done.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn know_database(&self, report: Option<&Value>) -> StoreResult<()> {
        sqlx::query(
            "UPDATE recovery_state
                SET identity = relay_database_identity(), seen_at = now(),
                    recovered_at = CASE WHEN $1::jsonb IS NULL THEN recovered_at ELSE now() END,
                    report = coalesce($1::jsonb, report)",
        )
        .bind(report.map(Json))
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("noting what the database is"))?;
        Ok(())
    }

    /// How many of these places are not below their mailbox's head, though they were given away. A mailbox that is not
    /// there in a workspace that is there counts where `unknown_too` says so: agents are removed with their workspace
    /// only, so it was made after the state of this database. A workspace that is not there may have been erased.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn ahead_of_heads(
        &self,
        of: &[(WorkspaceScope, AgentId, Seq)],
        unknown_too: &[bool],
    ) -> StoreResult<u64> {
        let keys: Vec<_> = of.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
        let (workspaces, agents) = split(&keys);
        let ahead: i64 = sqlx::query_scalar(
            "SELECT count(*)
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[])
                    AS k (workspace_id, agent_id, seq, unknown_too)
               LEFT JOIN mailbox_heads h USING (workspace_id, agent_id)
              WHERE k.seq >= h.next_seq
                 OR (h.agent_id IS NULL AND k.unknown_too
                     AND EXISTS (SELECT FROM workspaces w
                                  WHERE w.workspace_id = k.workspace_id AND w.deleted_at IS NULL))",
        )
        .bind(workspaces)
        .bind(agents)
        .bind(of.iter().map(|(_, _, seq)| *seq).collect::<Vec<_>>())
        .bind(unknown_too)
        .fetch_one(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("comparing the log with mailbox heads"))?;
        Ok(ahead.unsigned_abs())
    }

    /// Mailboxes that hold something, behind `after`, with their settled floors.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn busy_mailboxes(
        &self,
        after: (i64, i64),
        limit: i64,
    ) -> StoreResult<Vec<(WorkspaceScope, AgentId, Seq)>> {
        let rows: Vec<(i64, i64, Seq)> = sqlx::query_as(
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
        .map_err(StoreError::from_sqlx("finding mailboxes that hold something"))?;
        let scoped = |(workspace, agent, floor)| {
            (WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)), AgentId::new(agent), floor)
        };
        Ok(rows.into_iter().map(scoped).collect())
    }
}
