//! Daily partitions: created in advance, dropped when their retention ends.
//!
//! Dropping can be interrupted at any line. A partition is detached without blocking readers, then the rows of other tables
//! that refer to it are removed, then it is dropped; the next run finds a detached partition by its name.

use chrono::{NaiveDate, TimeDelta};
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult};

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
    /// Creates the partitions from yesterday to `days_ahead` days from now. Returns the number of those that were missing.
    /// Aborts if the catalog is locked for longer than the lock timeout.
    pub async fn ensure_partitions(&self, days_ahead: i32) -> StoreResult<i32> {
        sqlx::query_scalar("SELECT relay_ensure_partitions($1)")
            .bind(days_ahead)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("creating daily partitions"))
    }

    /// Drops the partitions of days before `first_kept`, oldest first, and the rows that depend on theirs: settlements of
    /// deliveries, reads and reactions of messages. Returns the number of dropped days.
    ///
    /// Aborts if readers hold a partition for longer than the lock timeout. Dropped partitions stay dropped; the next run
    /// continues.
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
                self.drop_partition(table, Partition { name, day, attached, detach_pending }).await?;
                dropped += 1;
            }
        }
        Ok(dropped)
    }

    async fn drop_partition(&self, table: DailyTable, partition: Partition) -> StoreResult<()> {
        let Partition { name, day, attached, detach_pending } = partition;
        let parent = table.name();
        if attached {
            // CONCURRENTLY, so that readers and writers of other days are not blocked. It cannot run inside a transaction,
            // and an interrupted one must be completed with FINALIZE.
            let how = if detach_pending { "FINALIZE" } else { "CONCURRENTLY" };
            self.run(format!(r#"ALTER TABLE {parent} DETACH PARTITION "{name}" {how}"#)).await?;
        }
        match table {
            DailyTable::Deliveries => {
                self.run(format!(
                    r#"DELETE FROM delivery_exceptions e USING "{name}" d
                        WHERE e.workspace_id = d.workspace_id AND e.agent_id = d.agent_id AND e.seq = d.seq"#
                ))
                .await?;
            }
            DailyTable::Messages => self.remove_message_dependents(day + TimeDelta::days(1)).await?,
            DailyTable::AckLog
            | DailyTable::EventLog
            | DailyTable::MessageSearch
            | DailyTable::Attempts
            | DailyTable::Usage => {}
        }
        self.run(format!(r#"DROP TABLE "{name}""#)).await
    }

    /// Removes reads, reactions, sessions and statistics of messages created before `day`. The upper bits of a message id are its
    /// time.
    async fn remove_message_dependents(&self, day: NaiveDate) -> StoreResult<()> {
        let doing = "removing rows that depend on dropped messages";
        let midnight_ms = day.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
        let first_kept_id = (midnight_ms - relay_domain::snowflake::EPOCH_MS).max(0) << 22;
        for statement in [
            "DELETE FROM message_reads WHERE message_id < $1",
            "DELETE FROM message_reactions WHERE message_id < $1",
            "DELETE FROM session_messages WHERE message_id < $1",
        ] {
            sqlx::query(statement)
                .bind(first_kept_id)
                .execute(&self.pool)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        }
        sqlx::query("DELETE FROM message_stats WHERE created_on < $1")
            .bind(day)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(())
    }

    /// Runs one statement. Its names come from the catalog or are constants.
    async fn run(&self, statement: String) -> StoreResult<()> {
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("dropping a partition"))?;
        Ok(())
    }
}
