//! Connections that are used again without a test.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use relay_store::{Store, recovery::KnownDatabase};
use relay_testkit::proxy::{Direction, TcpProxy, Verdict};
use tokio::time::Instant;

use crate::fixture::{Database, WORKSPACE};

/// Statement limit of these tests.
const LIMIT: Duration = Duration::from_secs(2);
/// Far above every deadline.
const LATE: Duration = Duration::from_secs(20);
const ADA: i64 = 1;

/// Executes one statement that has no deadline but the pool's.
async fn statement(store: &Store) -> relay_store::StoreResult<()> {
    store.want_index(Database::mailbox(ADA).0).await
}

fn proxy_of(db: &Database) -> TcpProxy {
    let options = db.pool.connect_options();
    TcpProxy::start(&format!("{}:{}", options.get_host(), options.get_port())).unwrap()
}

/// Counts how often a connection drops its plans.
fn count_drops(proxy: &TcpProxy) -> Arc<AtomicUsize> {
    let dropped = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&dropped);
    proxy.set_filter(Direction::ToServer, move |_, chunk| {
        let statement = b"DISCARD PLANS";
        seen.fetch_add(usize::from(chunk.windows(statement.len()).any(|part| part == statement)), Ordering::Relaxed);
        Verdict::Forward
    });
    dropped
}

#[tokio::test]
async fn callers_take_turns_on_one_connection() {
    let db = Database::fresh().await;
    let store = db.store.with_statement_limit(LIMIT).with_dedicated_connection();
    let callers = (0..50).map(|_| statement(&store));
    for done in tokio::time::timeout(LATE, futures::future::join_all(callers)).await.unwrap() {
        done.unwrap();
    }
    let connections = store.connections();
    assert_eq!((connections.used, connections.max), (0, 1));
}

#[tokio::test]
async fn a_transaction_that_was_given_up_changes_nothing_and_leaves_its_connection_usable() {
    let db = Database::fresh().await;
    let store = db.store.with_statement_limit(LATE).with_dedicated_connection();
    let page = async |store: &Store| {
        store.index_messages(relay_store::search::index::IndexedWorkspaces::All, db.now, 100).await
    };
    page(&store).await.unwrap();
    let before = db.number("SELECT count(*) FROM loop_state").await;
    let mut lock = db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE workspaces").execute(&mut *lock).await.unwrap();
    let waits = tokio::time::timeout(Duration::from_millis(200), page(&store)).await;
    assert!(waits.is_err(), "the transaction waits for the table");
    lock.rollback().await.unwrap();
    tokio::time::timeout(LATE, statement(&store)).await.unwrap().unwrap();
    assert_eq!(db.number("SELECT count(*) FROM loop_state").await, before);
    page(&store).await.unwrap();
}

#[tokio::test]
async fn a_statement_on_a_dead_network_ends_at_its_deadline() {
    let db = Database::fresh().await;
    let options = db.pool.connect_options();
    let proxy = TcpProxy::start(&format!("{}:{}", options.get_host(), options.get_port())).unwrap();
    let store = Store::connect(&proxy.through(&db.url).unwrap(), 4).unwrap();
    let store = store.with_statement_limit(LIMIT);
    statement(&store).await.unwrap();
    proxy.blackhole();
    let lost = tokio::time::timeout(LATE, statement(&store)).await.expect("the deadline is 3 s");
    assert!(lost.is_err_and(|error| error.is_unavailable()));
    proxy.restore();
    tokio::time::timeout(LATE, async { while statement(&store).await.is_err() {} }).await.unwrap();
}

#[tokio::test]
async fn a_connection_that_postgres_ended_fails_one_statement_at_most() {
    let db = Database::fresh().await;
    let store = db.store.with_statement_limit(LIMIT);
    statement(&store).await.unwrap();
    let ended = db
        .number(
            "SELECT count(*) FROM (SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
              WHERE datname = current_database() AND application_name = 'relay') AS ended",
        )
        .await;
    assert!(ended > 0);
    if let Err(error) = statement(&store).await {
        assert!(error.is_unavailable(), "{error}");
    }
    statement(&store).await.unwrap();
    assert_eq!(db.number(&format!("SELECT count(*) FROM search_progress WHERE workspace_id = {WORKSPACE}")).await, 1);
}

/// The tables of a young process grow, and plans made for the empty ones do not suit them.
#[tokio::test]
async fn connections_to_the_database_before_are_not_used_again() {
    let db = Database::fresh().await;
    let store = db.store.with_statement_limit(LIMIT).with_dedicated_connection();
    let known = store.database_state().await.unwrap().to_known();
    store.open_epoch(KnownDatabase { identity: "before the failover".to_owned(), ..known.clone() });
    statement(&store).await.unwrap();
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()";
    assert!(db.number(end).await > 0);
    store.open_epoch(known);
    statement(&store).await.expect("over a new connection");
}

#[tokio::test]
async fn a_used_connection_drops_its_plans_now_and_then() {
    let db = Database::fresh().await;
    let proxy = proxy_of(&db);
    let dropped = count_drops(&proxy);
    let store = Store::connect(&proxy.through(&db.url).unwrap(), 4).unwrap();
    let store = store.with_statement_limit(LIMIT).with_dedicated_connection();
    let (began, mut statements) = (Instant::now(), 0);
    while dropped.load(Ordering::Relaxed) < 3 {
        assert!(began.elapsed() < LATE, "{} times", dropped.load(Ordering::Relaxed));
        statement(&store).await.unwrap();
        statements += 1;
    }
    assert!(began.elapsed() >= Duration::from_secs(2), "three times after {:?}", began.elapsed());
    assert!(statements > 10, "before one in {} statements", statements / 3);
}

/// Connections that pass through the driver's pool, because callers wait for it, keep their plans as long as others.
#[tokio::test]
async fn connections_that_callers_wait_for_keep_their_plans() {
    let db = Database::fresh().await;
    let proxy = proxy_of(&db);
    let dropped = count_drops(&proxy);
    let store = Store::connect(&proxy.through(&db.url).unwrap(), 4).unwrap().with_statement_limit(LIMIT);
    let began = Instant::now();
    let callers = (0..16).map(|_| async {
        for _ in 0..200 {
            statement(&store).await.unwrap();
        }
    });
    futures::future::join_all(callers).await;
    // At least a second lies between two drops of a connection, whether the age of its plans is known or not.
    let most = 8 * (1 + usize::try_from(began.elapsed().as_secs()).unwrap());
    let dropped = dropped.load(Ordering::Relaxed);
    assert!(dropped <= most, "{dropped} times, at most {most}");
}
