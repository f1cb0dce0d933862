//! Daily partitions: made ahead of time, dropped when nobody may read them any more.
//!
//! Every step can be interrupted at any line: a partition is detached without disturbing readers, then
//! emptied of what refers to it, then dropped, and the next run goes on where this one stopped.

use chrono::{NaiveDate, TimeDelta};
use sqlx::AssertSqlSafe;

use crate::{Store, StoreError, StoreResult};

/// A table partitioned by day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DailyTable {
    /// Messages: kept for history.
    Messages,
    /// Deliveries: kept for two days longer than the longest TTL.
    Deliveries,
    /// The ack log: kept as long as the deliveries it speaks of.
    AckLog,
    /// The search index: goes with the messages.
    MessageSearch,
    /// The event log: what observers may resume from.
    EventLog,
    /// Tries to hand deliveries over.
    Attempts,
    /// What workspaces used, by the minute.
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

/// One day of a table, as the catalog has it. `attached` is false for a partition that an earlier run
/// detached and did not get to drop.
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
    /// Makes the partitions from yesterday to `days_ahead` days from now. Returns how many were missing.
    ///
    /// # Errors
    /// When Postgres is away or the catalog was busy for longer than the lock timeout.
    pub async fn ensure_partitions(&self, days_ahead: i32) -> StoreResult<i32> {
        sqlx::query_scalar("SELECT relay_ensure_partitions($1)")
            .bind(days_ahead)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("creating daily partitions"))
    }

    /// Drops the table's partitions of days before `first_kept`, oldest first, and what hangs on their rows:
    /// a delivery's exception, a message's explicit reads and reactions. Returns how many days were dropped.
    ///
    /// # Errors
    /// When Postgres is away, or readers held a partition for longer than the lock timeout; what has been
    /// dropped stays dropped, the rest is for the next run.
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
            // CONCURRENTLY: readers and writers of the other days are not held up. It cannot run inside a
            // transaction, and when it is cut off halfway it must be finished.
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
            DailyTable::Messages => self.remove_what_hangs_on_messages(day + TimeDelta::days(1)).await?,
            DailyTable::AckLog
            | DailyTable::EventLog
            | DailyTable::MessageSearch
            | DailyTable::Attempts
            | DailyTable::Usage => {}
        }
        self.run(format!(r#"DROP TABLE "{name}""#)).await
    }

    /// Reads of and reactions to messages made before `day`, and what was counted of them: a message's time is
    /// in the upper bits of its id.
    async fn remove_what_hangs_on_messages(&self, day: NaiveDate) -> StoreResult<()> {
        let doing = "removing what hangs on dropped messages";
        let midnight_ms = day.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
        let first_kept_id = (midnight_ms - relay_domain::snowflake::EPOCH_MS).max(0) << 22;
        for statement in
            ["DELETE FROM message_reads WHERE message_id < $1", "DELETE FROM message_reactions WHERE message_id < $1"]
        {
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

    /// Runs one statement built from names that came from the catalog.
    async fn run(&self, statement: String) -> StoreResult<()> {
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("dropping a partition"))?;
        Ok(())
    }
}
