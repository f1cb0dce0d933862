//! Workers of http_push and a recovery: what they remember is of the database before it.

use std::time::Duration;

use relay_domain::{
    PushWorkerId,
    push::attempt::{PushAttempt, RecordingPass},
};
use relay_store::StoreError;
use serde_json::json;

use super::{no_events, push_attempt};
use crate::fixture::Database;

const ADA: i64 = 1;
const WORKER: PushWorkerId = PushWorkerId::new(5);
const LEASE: Duration = Duration::from_secs(60);

/// Worker's claim of ada's mailbox, from which `attempt` comes.
async fn attempt_of_claim(db: &Database, attempt: PushAttempt) -> PushAttempt {
    let mut claimed = db.store.claim_due_mailboxes(WORKER, 10).await.unwrap();
    PushAttempt { mailbox: claimed.remove(0), ..attempt }
}

#[tokio::test]
async fn attempts_from_before_a_recovery_move_no_position() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[60]).await;
    db.run(
        "INSERT INTO nodes (workspace_id, node_id, name, kind, created_at) VALUES (7, 'hook', 'hook', 'http_push', now());
         UPDATE agents SET node_id = 'hook' WHERE agent_id = 1;
         INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, pushed_seq, due_at) VALUES (7, 1, 'hook', 0, now())",
    )
    .await;
    db.store.open_epoch(db.store.database_state().await.unwrap().to_known());
    db.store.renew_push_worker(WORKER, LEASE).await.unwrap();
    let earlier = attempt_of_claim(&db, push_attempt(1, 1000, db.now)).await;
    let repair = db.store.for_recovery();
    repair.begin_recovery().await.unwrap();
    repair.adopt_database(Some(&json!({}))).await.unwrap();
    let record = async |attempt: &PushAttempt| {
        db.store.record_attempts(WORKER, std::slice::from_ref(attempt), no_events, RecordingPass::First, db.now).await
    };
    assert!(matches!(record(&earlier).await, Err(StoreError::OtherEpoch { .. })), "the process has not recovered");

    db.store.open_epoch(db.store.database_state().await.unwrap().to_known());
    assert!(record(&earlier).await.unwrap().lost.contains(&earlier.mailbox.key()));
    assert_eq!((db.settled_floor(ADA).await, db.number("SELECT count(*) FROM delivery_attempts").await), (0, 0));

    // The mailbox was released, so it is claimed again; no attempt counts above the head.
    let current = attempt_of_claim(&db, push_attempt(1, 2000, db.now)).await;
    let above = PushAttempt { seq: 2, ..current.clone() };
    assert!(record(&above).await.unwrap().lost.contains(&above.mailbox.key()));
    assert_eq!(db.settled_floor(ADA).await, 0);
    record(&current).await.unwrap();
    assert_eq!(db.settled_floor(ADA).await, 1);
}
