//! Connections through a pooler in transaction mode, which has one connection to Postgres for all of them.

use std::time::Duration;

use chrono::Days;
use futures::future::{join, join_all};
use relay_store::{
    DatabaseAddress, Pooler, Store, StoreError,
    maintenance::{grown_tables::AnalyzedTables, partitions::DailyTable},
    recovery::KnownDatabase,
};
use relay_testkit::servers::PgBouncer;

use crate::fixture::{Database, WORKSPACE};

const LIMIT: Duration = Duration::from_secs(10);
/// Far above every deadline.
const LATE: Duration = Duration::from_secs(60);
const ADA: i64 = 1;

struct Pooled {
    db: Database,
    stores: [Store; 2],
    // Stopped after its clients.
    _pooler: PgBouncer,
    _dir: tempfile::TempDir,
}

impl Pooled {
    /// Starts a pooler, and two processes that use it.
    async fn start() -> Self {
        let db = Database::fresh().await;
        let dir = tempfile::tempdir().unwrap();
        let pooler = PgBouncer::start(dir.path(), &db.url, 1).await.unwrap();
        let address = DatabaseAddress {
            url: pooler.through(&db.url).unwrap(),
            pooler: Pooler::Transaction,
            direct_url: Some(db.url.clone()),
        };
        let stores = [(), ()].map(|()| Store::serve(&address, 4, LIMIT).unwrap());
        Self { db, stores, _pooler: pooler, _dir: dir }
    }

    /// Lets both processes serve the database.
    async fn open(&self) -> KnownDatabase {
        let known = self.db.store.database_state().await.unwrap().to_known();
        self.stores.iter().for_each(|store| store.open_epoch(known.clone()));
        known
    }
}

#[tokio::test]
async fn statements_of_two_processes_share_one_connection_to_postgres() {
    let pooled = Pooled::start().await;
    let db = &pooled.db;
    db.agent(ADA, "ada").await;
    pooled.open().await;
    let (scope, _) = Database::mailbox(ADA);
    let [first, second] = &pooled.stores;
    // Different statements with as many parameters: a mixed-up one would be executed with those of the other.
    let indexed = join_all((0..100).map(|_| first.want_index(scope)));
    let found = join_all((0..100).map(|_| second.is_deleted(scope)));
    let (indexed, found) = tokio::time::timeout(LATE, join(indexed, found)).await.unwrap();
    indexed.into_iter().for_each(|done| done.unwrap());
    found.into_iter().for_each(|found| assert_eq!(found.unwrap(), None, "the workspace has no row"));
    assert_eq!(db.number(&format!("SELECT count(*) FROM search_progress WHERE workspace_id = {WORKSPACE}")).await, 1);
}

#[tokio::test]
async fn a_transaction_that_was_given_up_leaves_nothing_to_the_next_client() {
    let pooled = Pooled::start().await;
    let [first, second] = &pooled.stores;
    pooled.open().await;
    let mut lock = pooled.db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE search_progress").execute(&mut *lock).await.unwrap();
    let (scope, _) = Database::mailbox(ADA);
    let waits = tokio::time::timeout(Duration::from_millis(200), first.want_index(scope)).await;
    assert!(waits.is_err(), "the statement waits for the table");
    lock.rollback().await.unwrap();
    tokio::time::timeout(LATE, async { while second.ping().await.is_err() {} }).await.unwrap();
    assert_eq!(pooled.db.number("SELECT count(*) FROM search_progress").await, 0);
}

#[tokio::test]
async fn no_statement_meets_a_database_that_its_process_does_not_know() {
    let pooled = Pooled::start().await;
    let [first, second] = &pooled.stores;
    let known = pooled.open().await;
    first.ping().await.unwrap();

    // The pooler leads to another database, over connections that stay open.
    second.open_epoch(KnownDatabase { identity: "before the failover".to_owned(), ..known.clone() });
    assert!(matches!(second.ping().await, Err(StoreError::OtherEpoch { .. })));
    assert_eq!((first.served_epoch(), second.served_epoch()), (Some(known.epoch), None));
    tokio::time::timeout(LATE, second.met_other_epoch()).await.unwrap();

    // It was put back to an older state.
    second.open_epoch(KnownDatabase { confirmations: known.confirmations + 1, ..known.clone() });
    assert!(matches!(second.ping().await, Err(StoreError::OtherEpoch { .. })));

    // It was recovered by another process, past the pooler.
    second.for_recovery().begin_recovery().await.unwrap();
    assert!(matches!(first.ping().await, Err(StoreError::OtherEpoch { .. })));
    assert_eq!(first.served_epoch(), None);
}

#[tokio::test]
async fn tables_that_have_grown_are_analyzed_through_the_pooler() {
    let pooled = Pooled::start().await;
    pooled.open().await;
    pooled.db.keep_autovacuum_from("nodes").await;
    pooled.db.nodes(1, 5000).await;
    let [first, second] = &pooled.stores;
    assert_eq!(first.analyze_grown_tables(&mut AnalyzedTables::default()).await.unwrap(), 1);
    assert_eq!(pooled.db.known_rows("nodes").await, 5000);
    assert_eq!(second.analyze_grown_tables(&mut AnalyzedTables::default()).await.unwrap(), 0);
}

#[tokio::test]
async fn the_lock_of_recovery_is_held_past_the_pooler() {
    let pooled = Pooled::start().await;
    let [first, second] = &pooled.stores;
    let lock = first.try_recovery_lock().await.unwrap().expect("the lock is free");
    first.ping().await.unwrap();
    assert!(second.try_recovery_lock().await.unwrap().is_none());
    lock.release().await;
    assert!(second.try_recovery_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn old_partitions_are_dropped_past_the_pooler() {
    let pooled = Pooled::start().await;
    pooled.open().await;
    let [store, _] = &pooled.stores;
    let old = pooled.db.now.date_naive() - Days::new(9);
    pooled.db.day("ack_log", old).await;
    assert_eq!(store.drop_partitions_before(DailyTable::AckLog, old + Days::new(1)).await.unwrap(), 1);
    assert_eq!(
        pooled
            .db
            .number(&format!("SELECT count(*) FROM pg_class WHERE relname = 'ack_log_{}'", old.format("%Y%m%d")))
            .await,
        0
    );
}
