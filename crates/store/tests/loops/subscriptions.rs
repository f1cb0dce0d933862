use std::time::Duration;

use chrono::TimeDelta;
use relay_store::subscription_dispatch::{CallOutcome, CallTried, WantedEvent};

use crate::fixture::{Database, WORKSPACE};

const LEASE: Duration = Duration::from_secs(15);

async fn with_subscription() -> Database {
    let db = Database::fresh().await;
    db.run(&format!(
        "INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at, event_cursor)
         VALUES ({WORKSPACE}, 1, '{{*}}', 'https://127.0.0.1:9', now(), 0);
         INSERT INTO event_heads (workspace_id, next_seq) VALUES ({WORKSPACE}, 3)
         ON CONFLICT (workspace_id) DO UPDATE SET next_seq = 3"
    ))
    .await;
    db
}

fn wanted(db: &Database, event_seq: i64) -> WantedEvent {
    let (kind, body) = ("message.created".to_owned(), "{}".to_owned());
    WantedEvent { delivery_id: 100 + event_seq, event_seq, kind, body, created_at: db.now, message_id: None }
}

#[tokio::test]
async fn a_subscription_has_one_holder_and_an_earlier_one_changes_nothing() {
    let db = with_subscription().await;
    let claim = |owner: &'static str| db.store.claim_subscriptions(owner, false, 5, 10, 10, LEASE);
    let (one, other) = tokio::join!(claim("one"), claim("other"));
    let mut leased = [one.unwrap(), other.unwrap()].concat();
    assert_eq!(leased.len(), 1, "only one has it");
    let first = leased.remove(0);
    assert!(db.store.queue_wanted(&first, 2, &[wanted(&db, 1), wanted(&db, 2)], LEASE).await.unwrap());

    db.run("UPDATE subscriptions SET lease_until = now() - interval '1 second'").await;
    let second = claim("other").await.unwrap().remove(0);
    assert_eq!((second.event_cursor, second.epoch), (Some(2), first.epoch + 1));
    let tried = CallTried {
        delivery_id: 101,
        outcome: CallOutcome::Delivered,
        status: Some(200),
        error: None,
        blocked_until: None,
    };
    assert!(db.store.note_call(&first, &tried, LEASE).await.unwrap().is_none(), "it has lost it");
    assert!(!db.store.queue_wanted(&first, 3, &[wanted(&db, 3)], LEASE).await.unwrap());
    assert!(db.store.disable_subscription(&first, "gone", db.now).await.unwrap().is_none());
    db.store.release_subscription(&first, None).await.unwrap();
    let waiting = db.store.waiting_calls(&second, 10).await.unwrap();
    assert_eq!(waiting.iter().map(|call| call.delivery_id).collect::<Vec<_>>(), [101, 102], "all of it waits");
    assert!(claim("third").await.unwrap().is_empty(), "the earlier holder gave nothing back");

    assert_eq!(db.store.note_call(&second, &tried, LEASE).await.unwrap(), Some((0, None)));
    let later = db.now + TimeDelta::hours(1);
    let failed = CallTried {
        delivery_id: 102,
        outcome: CallOutcome::Retry(later),
        status: None,
        error: Some("away".to_owned()),
        blocked_until: Some(later),
    };
    assert_eq!(db.store.note_call(&second, &failed, LEASE).await.unwrap().map(|(failures, _)| failures), Some(1));
    db.store.release_subscription(&second, None).await.unwrap();
    assert!(claim("third").await.unwrap().is_empty(), "blocked for an hour");
}

#[tokio::test]
async fn an_event_is_queued_once_however_often_the_log_is_read() {
    let db = with_subscription().await;
    let claim = || db.store.claim_subscriptions("one", false, 5, 10, 10, LEASE);
    let leased = claim().await.unwrap().remove(0);
    assert!(db.store.queue_wanted(&leased, 2, &[wanted(&db, 1)], LEASE).await.unwrap());
    assert!(db.store.queue_wanted(&leased, 2, &[wanted(&db, 1), wanted(&db, 2)], LEASE).await.unwrap());
    let waiting = db.store.waiting_calls(&leased, 10).await.unwrap();
    assert_eq!(waiting.iter().map(|call| call.delivery_id).collect::<Vec<_>>(), [101, 102]);
}

#[tokio::test]
async fn one_workspace_does_not_take_all_places() {
    let db = with_subscription().await;
    db.run(&format!(
        "INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at)
         SELECT {WORKSPACE}, 10 + n, '{{*}}', 'https://127.0.0.1:9', now() FROM generate_series(1, 9) AS n;
         INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at)
         VALUES ({WORKSPACE} + 1, 1, '{{*}}', 'https://127.0.0.1:9', now())"
    ))
    .await;
    let leased = db.store.claim_subscriptions("one", false, 5, 10, 3, LEASE).await.unwrap();
    let of_one = leased.iter().filter(|leased| leased.scope.workspace_id().get() == WORKSPACE).count();
    assert_eq!((leased.len(), of_one), (4, 3));
    db.run("UPDATE subscriptions SET failures = 5, failing_since = now() WHERE lease_until IS NULL").await;
    assert!(db.store.claim_subscriptions("one", false, 5, 10, 10, LEASE).await.unwrap().is_empty());
    assert_eq!(db.store.claim_subscriptions("one", true, 5, 10, 10, LEASE).await.unwrap().len(), 7);
}

#[tokio::test]
async fn one_workspace_takes_no_more_places_by_being_claimed_more_often() {
    let db = with_subscription().await;
    db.run(&format!(
        "INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at)
         SELECT {WORKSPACE}, 10 + n, '{{*}}', 'https://127.0.0.1:9', now() FROM generate_series(1, 39) AS n"
    ))
    .await;
    let claim = |owner: &'static str| db.store.claim_subscriptions(owner, false, 5, 64, 16, LEASE);
    let served = claim("one").await.unwrap();
    assert_eq!(served.len(), 16);
    assert!(claim("one").await.unwrap().is_empty(), "those that are served count");
    assert_eq!(claim("other").await.unwrap().len(), 16, "another worker has places of its own");
    db.store.release_subscription(&served[0], None).await.unwrap();
    assert_eq!(claim("one").await.unwrap().len(), 1, "a place that is free again is taken");
}

#[tokio::test]
async fn what_waits_for_a_subscription_that_was_switched_off_is_not_late_and_goes_with_age() {
    let db = with_subscription().await;
    let leased = db.store.claim_subscriptions("one", false, 5, 10, 10, LEASE).await.unwrap().remove(0);
    assert!(db.store.queue_wanted(&leased, 2, &[wanted(&db, 1), wanted(&db, 2)], LEASE).await.unwrap());
    db.run(
        "UPDATE subscription_deliveries SET next_attempt_at = now() - interval '1 hour',
                                            created_at = now() - interval '1 day'",
    )
    .await;
    assert!(db.store.subscription_lag().await.unwrap() > 3000.0);
    let hour = Duration::from_secs(3600);
    assert_eq!(db.store.prune_subscription_deliveries(hour, 10).await.unwrap(), 0, "they are still to be sent");
    assert!(db.store.disable_subscription(&leased, "gone", db.now).await.unwrap().is_some());
    assert!(db.store.subscription_lag().await.unwrap() < 1.0);
    assert_eq!(db.store.prune_subscription_deliveries(hour, 10).await.unwrap(), 2);
}

#[tokio::test]
async fn nobody_serves_a_workspace_that_is_suspended_or_over() {
    let db = with_subscription().await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    for held in ["suspended_at", "expires_at", "deleted_at"] {
        db.run(&format!("UPDATE workspaces SET {held} = now() - interval '1 second'")).await;
        let claimed = db.store.claim_subscriptions("one", false, 5, 10, 10, LEASE).await.unwrap();
        assert!(claimed.is_empty(), "{held}");
        db.run(&format!("UPDATE workspaces SET {held} = NULL")).await;
    }
    assert_eq!(db.store.claim_subscriptions("one", false, 5, 10, 10, LEASE).await.unwrap().len(), 1);
}
