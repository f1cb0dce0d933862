use std::time::Duration;

use chrono::TimeDelta;
use relay_domain::{
    SubscriptionDeliveryId,
    subscriptions::{
        DisabledReason,
        dispatch::{CallAttempt, CallOutcome, ClaimedHealth, SubscriptionClaim},
    },
};
use relay_store::subscriptions::dispatch::MatchedEvent;

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

fn id(id: i64) -> SubscriptionDeliveryId {
    SubscriptionDeliveryId::new(id)
}

/// Claim of up to ten healthy subscriptions.
fn claim_by(owner: &str) -> SubscriptionClaim<'_> {
    let health = ClaimedHealth::Healthy;
    SubscriptionClaim { owner, health, failing_from: 5, limit: 10, per_family: 10, lease: LEASE }
}

fn matched(db: &Database, event_seq: i64) -> MatchedEvent {
    let (kind, body) = ("message.created".to_owned(), "{}".to_owned());
    MatchedEvent {
        delivery_id: id(100 + event_seq),
        event_seq,
        kind,
        body,
        created_at: db.now,
        message_id: None,
        conversation_id: None,
    }
}

#[tokio::test]
async fn a_subscription_has_one_holder_and_an_earlier_one_changes_nothing() {
    let db = with_subscription().await;
    let claim = |owner: &'static str| db.store.claim_subscriptions(claim_by(owner));
    let (one, other) = tokio::join!(claim("one"), claim("other"));
    let mut leased = [one.unwrap().leased, other.unwrap().leased].concat();
    assert_eq!(leased.len(), 1, "one of them holds the lease");
    let first = leased.remove(0);
    assert!(db.store.queue_events(&first, 2, &[matched(&db, 1), matched(&db, 2)], LEASE).await.unwrap());

    db.run("UPDATE subscriptions SET lease_until = now() - interval '1 second'").await;
    let second = claim("other").await.unwrap().leased.remove(0);
    assert_eq!(second.event_cursor, Some(2));
    assert!(second.epoch > first.epoch);
    let attempt = CallAttempt {
        delivery_id: id(101),
        outcome: CallOutcome::Delivered,
        status: Some(200),
        error: None,
        blocked_until: None,
    };
    assert!(db.store.record_call_attempt(&first, &attempt, LEASE).await.unwrap().is_none(), "it has lost the lease");
    assert!(!db.store.queue_events(&first, 3, &[matched(&db, 3)], LEASE).await.unwrap());
    assert!(db.store.disable_subscription(&first, DisabledReason::Gone, db.now).await.unwrap().is_none());
    db.store.release_subscription(&first, None).await.unwrap();
    let waiting = db.store.pending_calls(&second, 10).await.unwrap();
    assert_eq!(waiting.iter().map(|call| call.delivery_id.get()).collect::<Vec<_>>(), [101, 102], "both are pending");
    assert!(claim("third").await.unwrap().leased.is_empty(), "the former holder released nothing");

    assert_eq!(db.store.record_call_attempt(&second, &attempt, LEASE).await.unwrap(), Some((0, None)));
    let later = db.now + TimeDelta::hours(1);
    let failed = CallAttempt {
        delivery_id: id(102),
        outcome: CallOutcome::Retry(later),
        status: None,
        error: Some("unavailable".to_owned()),
        blocked_until: Some(later),
    };
    assert_eq!(
        db.store.record_call_attempt(&second, &failed, LEASE).await.unwrap().map(|(failures, _)| failures),
        Some(1)
    );
    db.store.release_subscription(&second, None).await.unwrap();
    assert!(claim("third").await.unwrap().leased.is_empty(), "blocked for an hour");
}

/// A failover to a standby without the first lease, whose holder ends its call after the recovery.
#[tokio::test]
async fn the_epoch_of_a_lost_lease_is_given_to_no_other() {
    let db = with_subscription().await;
    let lost = db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased.remove(0);
    db.run("UPDATE subscriptions SET lease_owner = NULL, lease_until = NULL, lease_epoch = 0; SELECT pg_sleep(0.01)")
        .await;
    let held = db.store.claim_subscriptions(claim_by("other")).await.unwrap().leased.remove(0);
    assert!(held.epoch > lost.epoch);
    db.store.release_subscription(&lost, None).await.unwrap();
    assert!(db.store.claim_subscriptions(claim_by("third")).await.unwrap().leased.is_empty(), "it released nothing");
}

#[tokio::test]
async fn an_event_is_queued_once_however_often_the_log_is_read() {
    let db = with_subscription().await;
    let claim = || db.store.claim_subscriptions(claim_by("one"));
    let leased = claim().await.unwrap().leased.remove(0);
    assert!(db.store.queue_events(&leased, 2, &[matched(&db, 1)], LEASE).await.unwrap());
    assert!(db.store.queue_events(&leased, 2, &[matched(&db, 1), matched(&db, 2)], LEASE).await.unwrap());
    let waiting = db.store.pending_calls(&leased, 10).await.unwrap();
    assert_eq!(waiting.iter().map(|call| call.delivery_id.get()).collect::<Vec<_>>(), [101, 102]);
}

/// Sizes in characters of all stored bodies: those of the events, and those of single deliveries.
async fn stored_bodies(db: &Database) -> (Option<i64>, Option<i64>) {
    sqlx::query_as(
        "SELECT (SELECT sum(length(body)) FROM subscription_bodies),
                (SELECT sum(length(body)) FROM subscription_deliveries)",
    )
    .fetch_one(&db.pool)
    .await
    .unwrap()
}

#[tokio::test]
async fn subscriptions_share_one_body_of_an_event() {
    let db = with_subscription().await;
    db.run(&format!(
        "INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at, event_cursor)
         SELECT {WORKSPACE}, 10 + n, '{{*}}', 'https://127.0.0.1:9', now(), 0 FROM generate_series(1, 8) AS n"
    ))
    .await;
    let leased = db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased;
    assert_eq!(leased.len(), 9);
    for (nth, leased) in (0..).zip(&leased) {
        // An edit in between does not change the body that later subscriptions send.
        let body = if nth == 0 { "first" } else { "other" }.to_owned();
        let matched = MatchedEvent { delivery_id: id(200 + nth), body, ..matched(&db, 1) };
        assert!(db.store.queue_events(leased, 1, &[matched], LEASE).await.unwrap());
    }
    assert_eq!(stored_bodies(&db).await, (Some(5), None));
    for leased in &leased {
        let pending = db.store.pending_calls(leased, 10).await.unwrap();
        assert_eq!(pending.iter().map(|call| call.body.as_str()).collect::<Vec<_>>(), ["first"]);
    }
    let none = Duration::ZERO;
    db.run("UPDATE subscription_deliveries SET created_at = created_at - interval '1 day'").await;
    db.run("UPDATE subscription_bodies SET created_at = created_at - interval '1 day'").await;
    assert_eq!(db.store.prune_subscription_bodies(none, 10).await.unwrap(), 0, "deliveries refer to it");
    db.run("DELETE FROM subscription_deliveries").await;
    assert_eq!(db.store.prune_subscription_bodies(none, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn each_delivery_has_its_body_while_a_worker_of_the_previous_version_runs() {
    let db = with_subscription().await;
    db.run("INSERT INTO push_workers (owner, lease_until) VALUES (1, now() + interval '1 minute')").await;
    let leased = db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased.remove(0);
    assert!(db.store.queue_events(&leased, 1, &[matched(&db, 1)], LEASE).await.unwrap());
    assert_eq!(stored_bodies(&db).await, (None, Some(2)));
    db.run("UPDATE push_workers SET lease_until = now() - interval '1 second'").await;
    assert!(db.store.queue_events(&leased, 2, &[matched(&db, 2)], LEASE).await.unwrap());
    assert_eq!(stored_bodies(&db).await, (Some(2), Some(2)));
    let pending = db.store.pending_calls(&leased, 10).await.unwrap();
    assert_eq!(pending.iter().map(|call| call.body.as_str()).collect::<Vec<_>>(), ["{}", "{}"]);
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
    let leased =
        db.store.claim_subscriptions(SubscriptionClaim { per_family: 3, ..claim_by("one") }).await.unwrap().leased;
    let of_one = leased.iter().filter(|leased| leased.scope.workspace_id().get() == WORKSPACE).count();
    assert_eq!((leased.len(), of_one), (4, 3));
    db.run("UPDATE subscriptions SET failures = 5, failing_since = now() WHERE lease_until IS NULL").await;
    assert!(db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased.is_empty());
    let failing = SubscriptionClaim { health: ClaimedHealth::Failing, ..claim_by("one") };
    assert_eq!(db.store.claim_subscriptions(failing).await.unwrap().leased.len(), 7);
}

#[tokio::test]
async fn one_workspace_takes_no_more_places_by_being_claimed_more_often() {
    let db = with_subscription().await;
    db.run(&format!(
        "INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at)
         SELECT {WORKSPACE}, 10 + n, '{{*}}', 'https://127.0.0.1:9', now() FROM generate_series(1, 39) AS n"
    ))
    .await;
    let claim = |owner: &'static str| {
        db.store.claim_subscriptions(SubscriptionClaim { limit: 64, per_family: 16, ..claim_by(owner) })
    };
    let served = claim("one").await.unwrap().leased;
    assert_eq!(served.len(), 16);
    assert!(claim("one").await.unwrap().leased.is_empty(), "those that are served count");
    assert_eq!(claim("other").await.unwrap().leased.len(), 16, "another worker has places of its own");
    db.store.release_subscription(&served[0], None).await.unwrap();
    assert_eq!(claim("one").await.unwrap().leased.len(), 1, "a place that is free again is taken");
}

#[tokio::test]
async fn child_workspaces_have_the_places_of_their_root() {
    let db = with_subscription().await;
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, created_at, created_by)
         SELECT {WORKSPACE} + n, 'w' || n, now(), CASE WHEN n IN (1, 2) THEN {WORKSPACE} END
           FROM generate_series(0, 3) AS n;
         INSERT INTO subscriptions (workspace_id, subscription_id, events, url, created_at)
         SELECT {WORKSPACE} + w, 10 + n, '{{*}}', 'https://127.0.0.1:9', now()
           FROM generate_series(0, 3) AS w, generate_series(1, 9) AS n"
    ))
    .await;
    let claim = || async {
        let claim = SubscriptionClaim { limit: 64, per_family: 3, ..claim_by("one") };
        let leased = db.store.claim_subscriptions(claim).await.unwrap().leased;
        let of_family = leased.iter().filter(|leased| leased.scope.workspace_id().get() < WORKSPACE + 3).count();
        for leased in &leased {
            let workspace = leased.scope.workspace_id().get();
            let root = if workspace < WORKSPACE + 3 { WORKSPACE } else { workspace };
            assert_eq!(leased.family.root().get(), root, "calls of {workspace} count for its root");
        }
        (of_family, leased.len() - of_family)
    };
    assert_eq!(claim().await, (3, 3));
    assert_eq!(claim().await, (0, 0), "those that are served count, whichever member has them");
}

#[tokio::test]
async fn deliveries_of_a_disabled_subscription_are_not_late_and_are_pruned() {
    let db = with_subscription().await;
    let leased = db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased.remove(0);
    assert!(db.store.queue_events(&leased, 2, &[matched(&db, 1), matched(&db, 2)], LEASE).await.unwrap());
    db.run(
        "UPDATE subscription_deliveries SET next_attempt_at = now() - interval '1 hour',
                                            created_at = now() - interval '1 day'",
    )
    .await;
    assert!(db.store.subscription_lag().await.unwrap() > 3000.0);
    let hour = Duration::from_secs(3600);
    assert_eq!(db.store.prune_subscription_deliveries(hour, 10).await.unwrap(), 0, "they are still to be sent");
    assert!(db.store.disable_subscription(&leased, DisabledReason::Gone, db.now).await.unwrap().is_some());
    assert!(db.store.subscription_lag().await.unwrap() < 1.0);
    assert_eq!(db.store.prune_subscription_deliveries(hour, 10).await.unwrap(), 2);
}

#[tokio::test]
async fn subscriptions_of_a_suspended_or_ended_workspace_are_not_claimed() {
    let db = with_subscription().await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    for column in ["suspended_at", "expires_at", "deleted_at"] {
        db.run(&format!("UPDATE workspaces SET {column} = now() - interval '1 second'")).await;
        let claimed = db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased;
        assert!(claimed.is_empty(), "{column}");
        db.run(&format!("UPDATE workspaces SET {column} = NULL")).await;
    }
    assert_eq!(db.store.claim_subscriptions(claim_by("one")).await.unwrap().leased.len(), 1);
}
