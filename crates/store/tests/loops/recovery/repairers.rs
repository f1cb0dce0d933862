//! Processes that recover a database: one that froze during its repair neither stops the others nor writes afterwards.

use std::time::Duration;

use relay_store::{Store, StoreError, recovery::BEFORE_ALL_MAILBOXES};
use relay_testkit::{proxy::TcpProxy, wait};
use serde_json::json;

use crate::fixture::Database;

const ADA: i64 = 1;
/// The session of a frozen process ends after 10 s.
const SOON: Duration = Duration::from_secs(40);

#[tokio::test]
async fn a_repair_that_another_process_repeats_writes_nothing_more() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    let (frozen, other) = (db.store.for_recovery(), db.store.for_recovery());
    frozen.begin_recovery().await.unwrap();
    other.begin_recovery().await.unwrap();
    let jumped = frozen.jump_heads(BEFORE_ALL_MAILBOXES, 10, 1000, db.now, || 1).await;
    assert!(matches!(jumped, Err(StoreError::OtherEpoch { .. })), "{jumped:?}");
    let adopted = frozen.adopt_database(Some(&json!({}))).await;
    assert!(matches!(adopted, Err(StoreError::OtherEpoch { .. })), "{adopted:?}");
    assert!(db.store.database_state().await.unwrap().is_replaced());
    other.jump_heads(BEFORE_ALL_MAILBOXES, 10, 1000, db.now, || 1).await.unwrap();
    other.adopt_database(Some(&json!({}))).await.unwrap();
    assert!(!db.store.database_state().await.unwrap().is_replaced());
}

#[tokio::test]
async fn the_lock_of_a_process_that_is_cut_off_ends() {
    let db = Database::fresh().await;
    let options = db.pool.connect_options();
    let proxy = TcpProxy::start(&format!("{}:{}", options.get_host(), options.get_port())).unwrap();
    let frozen = Store::connect(&proxy.through(&db.url).unwrap(), 1).unwrap();
    let _lock = frozen.try_recovery_lock().await.unwrap().expect("the lock is free");
    assert!(db.store.try_recovery_lock().await.unwrap().is_none());
    proxy.blackhole();
    wait::until("the lock to be free", SOON, || async {
        db.store.try_recovery_lock().await.is_ok_and(|lock| lock.is_some())
    })
    .await;
}
