//! The clock that all processes share: statements read it, and a test moves it.

use std::time::Duration;

use relay_domain::PushWorkerId;

use crate::fixture::Database;

const OWNER: PushWorkerId = PushWorkerId::new(5);
const OTHER: PushWorkerId = PushWorkerId::new(6);

#[tokio::test]
async fn leases_end_by_the_clock_that_all_processes_share() {
    let db = Database::fresh().await;
    let lease = Duration::from_secs(15);
    let renew = async |owner| db.store.renew_push_worker(owner, lease).await.unwrap();
    assert_eq!(renew(OWNER).await, [OWNER]);
    db.advance(14).await;
    assert_eq!(renew(OTHER).await, [OWNER, OTHER]);
    db.advance(16).await;
    assert_eq!(renew(OTHER).await, [OTHER]);
    renew(OWNER).await;
    db.advance(30).await;
    assert_eq!(renew(OTHER).await, [OWNER, OTHER], "renewed by the clock that was moved");
}

#[tokio::test]
async fn the_engine_reads_the_clock_that_was_moved() {
    let db = Database::fresh().await;
    let ahead = |now: chrono::DateTime<chrono::Utc>| (now - db.now).num_seconds();
    assert!((0..600).contains(&ahead(db.store.now().await.unwrap())));
    db.advance(3600).await;
    assert!((3600..4200).contains(&ahead(db.store.now().await.unwrap())));
}

/// The function must cost what `now()` costs: the planner replaces the call with its body.
#[tokio::test]
async fn the_clock_is_inlined() {
    let db = Database::fresh().await;
    let plan: Vec<String> = sqlx::query_scalar("EXPLAIN SELECT FROM gateways WHERE lease_until < relay_now()")
        .fetch_all(&db.pool)
        .await
        .unwrap();
    let plan = plan.join("\n");
    assert!(plan.contains("< now()") && !plan.contains("relay_now"), "{plan}");
}
