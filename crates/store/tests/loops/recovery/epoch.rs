//! The recovery epoch: a process that does not know the last recovery, or is connected to another database, writes
//! nothing.

use std::time::Duration;

use relay_domain::{NodeId, ProviderName};
use relay_store::{
    StoreError, StoreResult,
    mailboxes::cursors::{CursorMove, LockedCursors},
    recovery::KnownDatabase,
};
use serde_json::json;
use sqlx::PgPool;

use crate::fixture::Database;

const ADA: i64 = 1;
/// Longer than a recovery without open transactions takes.
const A_WHILE: Duration = Duration::from_millis(500);

/// Database with an agent that has two deliveries, opened by a process.
async fn opened() -> (Database, KnownDatabase) {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60, 60]).await;
    let known = db.store.database_state().await.unwrap().to_known();
    db.store.open_epoch(known.clone());
    (db, known)
}

async fn ack(db: &Database, acked_seq: i64) -> StoreResult<()> {
    let (scope, agent_id) = Database::mailbox(ADA);
    let (node_id, provider) = (NodeId::direct(agent_id), ProviderName::new("default"));
    let ack = CursorMove { scope, agent_id, node_id, provider, sent_seq: acked_seq, acked_seq, epoch: None };
    db.store.flush_cursors(&[ack], LockedCursors::Wait, db.now).await.map(drop)
}

async fn ack_floor(db: &Database) -> i64 {
    db.number(&format!("SELECT ack_floor FROM mailbox_cursors WHERE agent_id = {ADA}")).await
}

#[tokio::test]
async fn after_a_recovery_by_another_process_an_ack_changes_nothing() {
    let (db, known) = opened().await;
    ack(&db, 1).await.unwrap();
    // A handle of its own, as another process has.
    db.store.for_recovery().begin_recovery().await.unwrap();
    assert!(matches!(ack(&db, 2).await, Err(StoreError::OtherEpoch { .. })));
    assert_eq!((db.store.served_epoch(), ack_floor(&db).await), (None, 1));
    assert!(db.store.database_state().await.unwrap().is_replaced(), "an interrupted repair is repeated");
    assert!(!db.store.confirm_database(None).await.unwrap());

    db.store.for_recovery().adopt_database(Some(&json!({}))).await.unwrap();
    assert!(!db.store.confirm_database(None).await.unwrap(), "also a process that looks later finds the recovery");
    let recovered = db.store.database_state().await.unwrap().to_known();
    assert!(recovered.epoch > known.epoch && recovered.identity == known.identity);
    db.store.open_epoch(recovered);
    ack(&db, 2).await.unwrap();
    assert_eq!(ack_floor(&db).await, 2);
}

#[tokio::test]
async fn no_ack_raises_a_floor_above_the_head() {
    let (db, _) = opened().await;
    ack(&db, 99).await.unwrap();
    let sent = db.number(&format!("SELECT sent_seq FROM mailbox_cursors WHERE agent_id = {ADA}")).await;
    assert_eq!((ack_floor(&db).await, db.settled_floor(ADA).await, sent), (2, 2, 2));
}

#[tokio::test]
async fn a_connection_to_another_database_waits_until_the_process_has_recovered() {
    let (db, known) = opened().await;
    let before = KnownDatabase { identity: "before the failover".to_owned(), ..known.clone() };
    db.store.open_epoch(before);
    let connection = db.store.with_dedicated_connection();
    let asked = tokio::spawn(async move { connection.ping().await });
    db.store.met_other_epoch().await;
    assert_eq!(db.store.served_epoch(), None);
    assert!(matches!(ack(&db, 1).await, Err(StoreError::OtherEpoch { .. })), "on connections from before, too");
    assert!(!asked.is_finished());
    db.store.open_epoch(known);
    asked.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirmation_while_connections_open_shows_no_older_state() {
    let (db, _) = opened().await;
    db.store.adopt_database(None).await.unwrap();
    for _ in 0..30 {
        let opening = [(); 4].map(|()| {
            let connection = db.store.with_dedicated_connection();
            tokio::spawn(async move { connection.ping().await })
        });
        while opening.iter().any(|one| !one.is_finished()) {
            assert!(db.store.confirm_database(None).await.unwrap());
            assert!(db.store.served_epoch().is_some(), "a connection read the count before this confirmation");
        }
    }
}

#[tokio::test]
async fn a_finding_from_before_the_recovery_does_not_close_what_was_opened_after_it() {
    let (db, known) = opened().await;
    db.store.open_epoch(KnownDatabase { identity: "before the failover".to_owned(), ..known.clone() });
    let ask = || {
        let connection = db.store.with_dedicated_connection();
        tokio::spawn(async move { connection.ping().await })
    };
    let first = ask();
    db.store.met_other_epoch().await;
    // The process is recovering now, and a second connection meets the same failover.
    let second = ask();
    let compared = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'
                       AND query LIKE 'SELECT relay_database_identity(), epoch%'";
    while db.number(compared).await < 2 {
        tokio::task::yield_now().await;
    }
    db.store.open_epoch(known);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert!(db.store.served_epoch().is_some());
    assert!(tokio::time::timeout(A_WHILE, db.store.met_other_epoch()).await.is_err(), "it would be closed again");
}

#[tokio::test]
async fn a_recovery_waits_for_transactions_that_began_before_it() {
    let (db, _) = opened().await;
    // Transactions of other programs do not count.
    let mut foreign = db.pool.begin().await.unwrap();
    sqlx::query("SELECT 1").execute(&mut *foreign).await.unwrap();
    let options = (*db.pool.connect_options()).clone().application_name("relay");
    let processes = PgPool::connect_with(options).await.unwrap();
    let mut open = processes.begin().await.unwrap();
    sqlx::query("SELECT 1").execute(&mut *open).await.unwrap();
    let store = db.store.for_recovery();
    let mut begun = tokio::spawn(async move { store.begin_recovery().await });
    assert!(tokio::time::timeout(A_WHILE, &mut begun).await.is_err(), "a transaction is open");
    open.commit().await.unwrap();
    begun.await.unwrap().unwrap();
}
