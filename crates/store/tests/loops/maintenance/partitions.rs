use chrono::{Days, NaiveDate};
use relay_store::maintenance::partitions::DailyTable;

use crate::fixture::Database;

impl Database {
    pub(crate) async fn day(&self, parent: &str, day: NaiveDate) {
        let (name, next) = (format!("{parent}_{}", day.format("%Y%m%d")), day + Days::new(1));
        self.run(&format!("CREATE TABLE {name} PARTITION OF {parent} FOR VALUES FROM ('{day}') TO ('{next}')")).await;
    }

    async fn days(&self, parent: &str) -> i64 {
        self.number(&format!("SELECT count(*) FROM pg_inherits WHERE inhparent = '{parent}'::regclass")).await
    }

    async fn tables(&self, name: &str) -> i64 {
        self.number(&format!("SELECT count(*) FROM pg_class WHERE relname = '{name}'")).await
    }
}

#[tokio::test]
async fn partitions_are_made_ahead_once_with_keys_and_indexes() {
    let db = Database::fresh().await;
    assert_eq!(db.store.ensure_partitions(7).await.unwrap(), 0, "the migration made them");
    let tables = db.number("SELECT count(*) FROM pg_partitioned_table").await;
    assert!(tables >= 5);
    assert_eq!(i64::from(db.store.ensure_partitions(9).await.unwrap()), 2 * tables);
    let (a, b) = tokio::join!(db.store.ensure_partitions(11), db.store.ensure_partitions(11));
    assert_eq!(i64::from(a.unwrap() + b.unwrap()), 2 * tables, "two callers at once make each day once");
    assert_eq!(db.days("deliveries").await, 13);
    let last = db.now.date_naive() + Days::new(11);
    let indexes = db
        .number(&format!("SELECT count(*) FROM pg_indexes WHERE tablename = 'deliveries_{}'", last.format("%Y%m%d")))
        .await;
    assert_eq!(indexes, 3, "key, by source, by expiry");
}

#[tokio::test]
async fn old_days_are_dropped_with_their_dependent_rows() {
    let db = Database::fresh().await;
    let today = db.now.date_naive();
    let (old, kept) = (today - Days::new(9), today - Days::new(8));
    for parent in ["deliveries", "messages", "ack_log"] {
        db.day(parent, old).await;
        db.day(parent, kept).await;
    }
    db.agent(1, "ada").await;
    for (seq, day) in [(1, old), (2, kept)] {
        db.run(&format!(
            "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at, expires_at)
             VALUES (7, 1, {seq}, '{day}', {seq}, 'n', '{day}', '{day}')"
        ))
        .await;
        db.settlement(1, seq, 4).await;
        let midnight_ms = day.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
        let message = (midnight_ms - relay_domain::snowflake::EPOCH_MS) << 22;
        db.run(&format!("INSERT INTO message_reads VALUES (7, {message}, 1, '{day}')")).await;
    }

    for table in [DailyTable::Deliveries, DailyTable::AckLog, DailyTable::Messages] {
        assert_eq!(db.store.drop_partitions_before(table, kept).await.unwrap(), 1);
        assert_eq!(db.store.drop_partitions_before(table, kept).await.unwrap(), 0);
    }
    assert_eq!(db.number("SELECT count(*) FROM deliveries").await, 1);
    assert_eq!(db.settlements(1).await, [(2, 4)], "a dead letter lives as long as its row");
    assert_eq!(db.number("SELECT count(*) FROM message_reads").await, 1);
}

#[tokio::test]
async fn a_drop_that_was_cut_off_halfway_is_finished() {
    let db = Database::fresh().await;
    let old = db.now.date_naive() - Days::new(9);
    db.day("ack_log", old).await;
    let name = format!("ack_log_{}", old.format("%Y%m%d"));
    db.run(&format!("ALTER TABLE ack_log DETACH PARTITION {name}")).await;
    assert_eq!(db.store.drop_partitions_before(DailyTable::AckLog, old + Days::new(1)).await.unwrap(), 1);
    assert_eq!(db.tables(&name).await, 0);
}

#[tokio::test]
async fn rows_that_depend_on_a_day_are_removed_in_bounded_statements() {
    let db = Database::fresh().await;
    let today = db.now.date_naive();
    let (old, kept) = (today - Days::new(9), today - Days::new(8));
    for parent in ["deliveries", "messages"] {
        db.day(parent, old).await;
        db.day(parent, kept).await;
    }
    let midnight_ms = kept.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
    let first_kept = (midnight_ms - relay_domain::snowflake::EPOCH_MS) << 22;
    // More than two statements remove, of two workspaces, with rows to keep between them.
    db.run(&format!(
        "INSERT INTO message_reads SELECT w, {first_kept} - n, 1, now()
           FROM generate_series(7, 8) AS w, generate_series(-10, 6000) AS n;
         INSERT INTO session_messages SELECT 7, 's', {first_kept} - n, '{old}' FROM generate_series(-10, 6000) AS n;
         INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at, expires_at)
         SELECT 7, a, n, CASE WHEN n % 2 = 0 THEN '{old}'::date ELSE '{kept}' END, n, 'n', '{old}', '{old}'
           FROM generate_series(1, 2) AS a, generate_series(1, 6000) AS n;
         INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, at)
         SELECT 7, a, n, 4, now() FROM generate_series(1, 2) AS a, generate_series(1, 6000) AS n"
    ))
    .await;
    assert_eq!(db.store.drop_partitions_before(DailyTable::Deliveries, kept).await.unwrap(), 1);
    assert_eq!(db.number("SELECT count(*) FROM delivery_exceptions WHERE seq % 2 = 1").await, 6000);
    assert_eq!(db.number("SELECT count(*) FROM delivery_exceptions WHERE seq % 2 = 0").await, 0);
    assert_eq!(db.store.drop_partitions_before(DailyTable::Messages, kept).await.unwrap(), 1);
    assert_eq!(db.number("SELECT count(*) FROM message_reads").await, 2 * 11);
    assert_eq!(db.number("SELECT count(*) FROM session_messages").await, 11);
}
