//! Statistics of tables that have just grown, and the plans that follow from them.

use chrono::Days;
use relay_store::maintenance::grown_tables::AnalyzedTables;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::fixture::{Database, WORKSPACE};

impl Database {
    /// Autovacuum would analyze the table at any time.
    pub(crate) async fn keep_autovacuum_from(&self, table: &str) {
        self.run(&format!("ALTER TABLE {table} SET (autovacuum_enabled = false)")).await;
    }

    pub(crate) async fn nodes(&self, from: i64, to: i64) {
        self.run(&format!(
            "INSERT INTO nodes (workspace_id, node_id, name, created_at)
             SELECT {WORKSPACE}, 'node_' || n, 'name ' || n, now() FROM generate_series({from}, {to}) AS n"
        ))
        .await;
    }

    /// Rows of the table by its statistics; -1 without any.
    pub(crate) async fn known_rows(&self, table: &str) -> i64 {
        self.number(&format!("SELECT reltuples::bigint FROM pg_class WHERE oid = '{table}'::regclass")).await
    }
}

#[tokio::test]
async fn a_plan_made_for_an_empty_table_is_replaced_once_the_table_has_grown() {
    let db = Database::fresh().await;
    db.keep_autovacuum_from("nodes").await;
    // The settings of the engine's connections.
    let mut session = PgConnection::connect(&db.url).await.unwrap();
    sqlx::raw_sql(
        "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET jit = off;
         PREPARE find (bigint, text) AS SELECT kind FROM nodes WHERE workspace_id = $1 AND node_id = $2",
    )
    .execute(&mut session)
    .await
    .unwrap();
    let mut plan = async || {
        let explain = format!("EXPLAIN (COSTS off) EXECUTE find ({WORKSPACE}, 'node_1')");
        let lines: Vec<String> =
            sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut session).await.unwrap().iter().map(line).collect();
        lines.join("\n")
    };
    let reads_the_workspace = plan().await;
    assert!(!reads_the_workspace.contains("nodes_pkey"), "nothing to repair: {reads_the_workspace}");
    db.nodes(1, 5000).await;
    assert_eq!(plan().await, reads_the_workspace, "rows alone replace no plan");

    let mut analyzed = AnalyzedTables::default();
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 1);
    assert_eq!(db.known_rows("nodes").await, 5000);
    let by_key = plan().await;
    assert!(by_key.contains("using nodes_pkey") && !by_key.contains("Filter"), "{by_key}");
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 0);
    assert_eq!(db.store.analyze_grown_tables(&mut AnalyzedTables::default()).await.unwrap(), 0, "by another worker");
}

fn line(row: &sqlx::postgres::PgRow) -> String {
    sqlx::Row::get(row, 0)
}

#[tokio::test]
async fn a_table_is_analyzed_again_when_it_has_grown_fourfold_even_if_that_had_no_result() {
    let db = Database::fresh().await;
    db.keep_autovacuum_from("nodes").await;
    let mut analyzed = AnalyzedTables::default();
    let mut lock = db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE nodes IN SHARE UPDATE EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
    db.nodes(1, 2000).await;
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 1, "without waiting for the lock");
    lock.rollback().await.unwrap();
    assert_eq!(db.known_rows("nodes").await, -1);
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 0, "not repeated");
    db.nodes(2001, 6000).await;
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 0, "three times the size");
    db.nodes(6001, 10_000).await;
    assert_eq!(db.store.analyze_grown_tables(&mut analyzed).await.unwrap(), 1);
    assert_eq!(db.known_rows("nodes").await, 10_000);
}

#[tokio::test]
async fn of_the_daily_partitions_that_of_today_is_analyzed() {
    let db = Database::fresh().await;
    let today = db.now.date_naive();
    let partitions = [today, today - Days::new(1)].map(|day| (day, format!("deliveries_{}", day.format("%Y%m%d"))));
    for (day, partition) in &partitions {
        db.keep_autovacuum_from(partition).await;
        db.run(&format!(
            "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at,
                                     expires_at)
             SELECT {WORKSPACE}, 1, n, '{day}', n, 'n', now(), now() FROM generate_series(1, 2000) AS n"
        ))
        .await;
    }
    assert_eq!(db.store.analyze_grown_tables(&mut AnalyzedTables::default()).await.unwrap(), 1);
    let [(_, of_today), (_, of_yesterday)] = &partitions;
    assert_eq!((db.known_rows(of_today).await, db.known_rows(of_yesterday).await), (2000, -1));
}
