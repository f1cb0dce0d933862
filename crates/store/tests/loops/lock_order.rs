//! Rows are locked in one order, so that two transactions wait for each other in one direction only.

use relay_domain::{NodeId, ProviderName};
use relay_store::{StoreError, StoreResult, nodes::fence::Fence};
use sqlx::AssertSqlSafe;

use crate::fixture::Database;

const ADA: i64 = 1;
const BOB: i64 = 2;

/// Repeats a statement whose lock was not given within 2 s, as its callers do.
async fn patiently<T>(mut statement: impl AsyncFnMut() -> StoreResult<T>) -> T {
    loop {
        match statement().await {
            Err(StoreError::Aborted { .. }) => {}
            done => return done.unwrap(),
        }
    }
}

/// Runs a statement while another transaction holds the row `first`. Returns whether the row `second` is free while the
/// statement waits.
async fn leaves_free<T>(db: &Database, first: &str, second: &str, statement: impl Future<Output = T>) -> (T, bool) {
    let mut other = db.pool.begin().await.unwrap();
    let hold = format!("SELECT 1 FROM {first} FOR UPDATE");
    sqlx::query(AssertSqlSafe(hold)).execute(&mut *other).await.unwrap();
    let look = async {
        db.lock_is_awaited().await;
        let free = format!("SELECT count(*) FROM (SELECT 1 FROM {second} FOR UPDATE SKIP LOCKED) AS free");
        let is_free = db.number(&free).await == 1;
        other.rollback().await.unwrap();
        is_free
    };
    tokio::join!(statement, look)
}

#[tokio::test]
async fn an_agent_is_locked_after_the_provider_that_begins_to_host_it() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.provider("n1", "a", 5, 0).await;
    let (scope, ada) = Database::mailbox(ADA);
    let fence = Fence { scope, node_id: NodeId::new("n1"), provider: ProviderName::new("a"), epoch: 3 };
    let host = patiently(async || db.store.host_agent(&fence, db.hosting(ada, None)).await);
    let (hosted, is_free) = leaves_free(&db, "providers", "agents WHERE agent_id = 1", host).await;
    assert!(hosted.is_some() && is_free);
}

#[tokio::test]
async fn agents_whose_mailboxes_were_emptied_are_locked_in_the_order_of_their_keys() {
    let db = Database::fresh().await;
    db.agent(BOB, "bob").await;
    db.agent(ADA, "ada").await;
    db.run("UPDATE agents SET mailbox_orphaned = true").await;
    let emptied = [Database::mailbox(BOB), Database::mailbox(ADA)];
    let mark = patiently(async || db.store.mark_orphaned_mailboxes_emptied(&emptied).await);
    let (first, second) = ("agents WHERE agent_id = 1", "agents WHERE agent_id = 2");
    assert_eq!(leaves_free(&db, first, second, mark).await, ((), true));
    assert_eq!(db.number("SELECT count(*) FROM agents WHERE mailbox_orphaned AND agent_id < 3").await, 0);
}
