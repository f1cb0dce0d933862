//! Daily partitions: created in advance, dropped when their retention ends.
//!
//! Dropping can be interrupted at any line. A partition is detached without blocking readers, then the rows of other
//! tables that refer to it are removed, then it is dropped; the next run finds a detached partition by its name.

use chrono::{NaiveDate, TimeDelta};
use relay_domain::{AgentId, WorkspaceId, ids::as_number, mailboxes::stream::Seq};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use crate::{
    Store, StoreError, StoreResult,
    maintenance::loop_state::{LoopState, lock_state, save_state},
};

/// Rows that one statement removes, or settlements that it reads. Each takes milliseconds and holds no lock for longer;
/// what it removed stays removed when the run is interrupted.
const REMOVAL_BATCH_SIZE: u64 = 5000;
const WORKSPACE_BATCH_SIZE: u64 = 500;
const SETTLEMENTS: &str = "dropped_settlements";

/// Position of the removal of a partition's settlements.
#[derive(Debug, Serialize, Deserialize)]
struct SettlementScan {
    partition: String,
    #[serde(with = "as_number")]
    workspace_id: WorkspaceId,
    #[serde(with = "as_number")]
    agent_id: AgentId,
    seq: Seq,
}

impl SettlementScan {
    fn start(partition: &str) -> Self {
        Self { partition: partition.to_owned(), workspace_id: WorkspaceId::new(0), agent_id: AgentId::new(0), seq: 0 }
    }
}

/// Table partitioned by day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DailyTable {
    /// Retention of the workspace's history.
    Messages,
    /// Kept for two days longer than the longest TTL.
    Deliveries,
    /// Kept as long as the deliveries.
    AckLog,
    /// Search index; dropped with the messages.
    MessageSearch,
    /// Bounds how far back observers can resume.
    EventLog,
    /// Delivery attempts.
    Attempts,
    /// Usage per minute.
    Usage,
}

impl DailyTable {
    const fn name(self) -> &'static str {
        match self {
            Self::Messages => "messages",
            Self::Deliveries => "deliveries",
            Self::AckLog => "ack_log",
            Self::EventLog => "event_log",
            Self::Attempts => "delivery_attempts",
            Self::Usage => "usage_minutes",
            Self::MessageSearch => "message_search",
        }
    }
}

/// Partition of one day. `attached` is false for one that an interrupted run detached and did not drop.
#[derive(Debug)]
struct Partition {
    name: String,
    day: NaiveDate,
    attached: bool,
    detach_pending: bool,
}

const PARTITIONS: &str = r"
SELECT c.relname, to_date(right(c.relname, 8), 'YYYYMMDD'),
       i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = current_schema()
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
 WHERE c.relkind = 'r' AND c.relname ~ ('^' || $1 || '_[0-9]{8}$')
 ORDER BY c.relname";

impl Store {
    /// Creates the partitions from yesterday to `days_ahead` days from now. Returns the number of those that were
    /// missing. Aborts if the catalog is locked for longer than the lock timeout.
    pub async fn ensure_partitions(&self, days_ahead: i32) -> StoreResult<i32> {
        sqlx::query_scalar("SELECT relay_ensure_partitions($1)")
            .bind(days_ahead)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("creating daily partitions"))
    }

    /// Drops the partitions of days before `first_kept`, oldest first, and the rows that depend on theirs: settlements
    /// of deliveries, reads and reactions of messages, a bounded number per statement. Returns the number of dropped
    /// days.
    ///
    /// Aborts if readers hold a partition for longer than the lock timeout. Dropped partitions stay dropped; the next
    /// run continues.
    pub async fn drop_partitions_before(&self, table: DailyTable, first_kept: NaiveDate) -> StoreResult<u32> {
        let doing = "dropping old partitions";
        let rows: Vec<(String, NaiveDate, bool, bool)> = sqlx::query_as(PARTITIONS)
            .bind(table.name())
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut dropped = 0;
        for (name, day, attached, detach_pending) in rows {
            if day < first_kept {
                let is_dropped = self.drop_partition(table, Partition { name, day, attached, detach_pending }).await?;
                dropped += u32::from(is_dropped);
            }
        }
        Ok(dropped)
    }

    /// Returns false if another worker removes the rows that depend on the partition.
    async fn drop_partition(&self, table: DailyTable, partition: Partition) -> StoreResult<bool> {
        let Partition { name, day, attached, detach_pending } = partition;
        let parent = table.name();
        if attached {
            // CONCURRENTLY, so that readers and writers of other days are not blocked. It cannot run inside a
            // transaction, and an interrupted one must be completed with FINALIZE.
            let how = if detach_pending { "FINALIZE" } else { "CONCURRENTLY" };
            self.run(format!(r#"ALTER TABLE {parent} DETACH PARTITION "{name}" {how}"#)).await?;
        }
        // Before the table is dropped: its rows show which settlements to remove, and while it exists the next run
        // continues an interrupted one.
        match table {
            DailyTable::Deliveries => {
                if !self.remove_settlements(&name).await? {
                    return Ok(false);
                }
            }
            DailyTable::Messages => self.remove_message_dependents(day + TimeDelta::days(1)).await?,
            DailyTable::AckLog
            | DailyTable::EventLog
            | DailyTable::MessageSearch
            | DailyTable::Attempts
            | DailyTable::Usage => {}
        }
        self.run(format!(r#"DROP TABLE "{name}""#)).await?;
        Ok(true)
    }

    /// Removes the settlements of a detached partition's deliveries, a page of all settlements per transaction. Goes on
    /// where an interrupted run stopped. Returns false if another worker does this.
    async fn remove_settlements(&self, partition: &str) -> StoreResult<bool> {
        let doing = "removing settlements of dropped deliveries";
        let page = format!(
            r#"WITH page AS MATERIALIZED (
                   SELECT workspace_id, agent_id, seq FROM delivery_exceptions
                    WHERE (workspace_id, agent_id, seq) > ($1, $2, $3)
                    ORDER BY workspace_id, agent_id, seq LIMIT {REMOVAL_BATCH_SIZE}
               ), removed AS (
                   DELETE FROM delivery_exceptions e USING page p JOIN "{partition}" d USING (workspace_id, agent_id, seq)
                    WHERE e.workspace_id = p.workspace_id AND e.agent_id = p.agent_id AND e.seq = p.seq
               )
               SELECT workspace_id, agent_id, seq FROM page
                ORDER BY workspace_id DESC, agent_id DESC, seq DESC LIMIT 1"#
        );
        loop {
            let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
            let from = match lock_state::<SettlementScan>(&mut tx, SETTLEMENTS).await? {
                LoopState::Busy => return Ok(false),
                LoopState::Locked(state) => state
                    // A position in the removal of another partition says nothing about this one.
                    .filter(|state| state.partition == partition)
                    .unwrap_or_else(|| SettlementScan::start(partition)),
            };
            let last: Option<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(AssertSqlSafe(page.clone()))
                .bind(from.workspace_id)
                .bind(from.agent_id)
                .bind(from.seq)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
            // The state stays at the end: if the drop is interrupted, the next run finds nothing left to remove.
            let Some((workspace_id, agent_id, seq)) = last else { return Ok(true) };
            let scan = SettlementScan { partition: partition.to_owned(), workspace_id, agent_id, seq };
            save_state(&mut tx, SETTLEMENTS, &scan).await?;
            tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        }
    }

    /// Removes reads, reactions, sessions and statistics of messages created before `day`. The upper bits of a message
    /// id are its time.
    async fn remove_message_dependents(&self, day: NaiveDate) -> StoreResult<()> {
        let midnight_ms = day.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
        let first_kept_id = (midnight_ms - relay_domain::snowflake::EPOCH_MS).max(0) << 22;
        self.remove_by_workspace("message_reads", "message_id", &first_kept_id.to_string()).await?;
        self.remove_by_workspace("message_reactions", "message_id", &first_kept_id.to_string()).await?;
        self.remove_by_workspace("message_stats", "created_on", &format!("'{day}'")).await?;
        let sessions = format!(
            "DELETE FROM session_messages WHERE ctid = ANY (ARRAY(
                 SELECT ctid FROM session_messages WHERE message_id < {first_kept_id}
                  ORDER BY message_id LIMIT {REMOVAL_BATCH_SIZE}))"
        );
        while self.remove(&sessions, &[]).await? >= REMOVAL_BATCH_SIZE {}
        Ok(())
    }

    /// Removes the rows of a table whose `column` is below `first_kept`, a bounded number per statement. The key of the
    /// table begins with the workspace and the column; a condition on the second alone would read the whole index.
    async fn remove_by_workspace(&self, table: &str, column: &str, first_kept: &str) -> StoreResult<()> {
        // One look-up in the index for each workspace, instead of a scan of all rows for their distinct workspaces.
        let page = format!(
            "WITH RECURSIVE w AS (
                 (SELECT workspace_id FROM {table} WHERE workspace_id > $1 ORDER BY workspace_id LIMIT 1)
                 UNION ALL
                 SELECT (SELECT n.workspace_id FROM {table} n WHERE n.workspace_id > w.workspace_id
                          ORDER BY n.workspace_id LIMIT 1) FROM w WHERE w.workspace_id IS NOT NULL
             )
             SELECT workspace_id FROM w WHERE workspace_id IS NOT NULL LIMIT {WORKSPACE_BATCH_SIZE}"
        );
        let remove = format!(
            "DELETE FROM {table} WHERE ctid = ANY (ARRAY(
                 SELECT old.ctid FROM unnest($1::bigint[]) AS k (workspace_id)
                  CROSS JOIN LATERAL (SELECT t.ctid FROM {table} t
                                       WHERE t.workspace_id = k.workspace_id AND t.{column} < {first_kept}
                                       ORDER BY t.{column} LIMIT {REMOVAL_BATCH_SIZE}) AS old
                  LIMIT {REMOVAL_BATCH_SIZE}))"
        );
        let mut after = WorkspaceId::new(i64::MIN);
        loop {
            let workspaces: Vec<WorkspaceId> = sqlx::query_scalar(AssertSqlSafe(page.clone()))
                .bind(after)
                .fetch_all(&self.pool)
                .await
                .map_err(StoreError::from_sqlx("listing the workspaces of a table"))?;
            let Some(last) = workspaces.last() else { return Ok(()) };
            after = *last;
            while self.remove(&remove, &workspaces).await? >= REMOVAL_BATCH_SIZE {}
        }
    }

    /// Runs one statement that removes rows of these workspaces. Returns the number of rows.
    async fn remove(&self, statement: &str, workspaces: &[WorkspaceId]) -> StoreResult<u64> {
        let query = sqlx::query(AssertSqlSafe(statement.to_owned()));
        // The statement about sessions has no parameter.
        let query = if workspaces.is_empty() { query } else { query.bind(workspaces) };
        let done = query.execute(&self.pool).await;
        Ok(done.map_err(StoreError::from_sqlx("removing rows that depend on dropped messages"))?.rows_affected())
    }

    /// Runs a statement whose names are those of the catalog. A pooler would run it within a transaction, in which
    /// partitions cannot be detached concurrently, so that it is passed by; the new connection compares the database.
    async fn run(&self, statement: String) -> StoreResult<()> {
        let doing = "dropping a partition";
        let statement = sqlx::raw_sql(AssertSqlSafe(statement));
        let done = match self.past_pooler() {
            None => statement.execute(&self.pool).await,
            Some(direct) => {
                let done = statement.execute(&direct.pool).await;
                direct.pool.driver().close().await;
                done
            }
        };
        done.map(|_| ()).map_err(StoreError::from_sqlx(doing))
    }
}
