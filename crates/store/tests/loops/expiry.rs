use chrono::TimeDelta;
use relay_store::{
    StoreError,
    mailboxes::expiry::{ExpiryPass, MAX_DEAD_LETTERED},
};

use crate::fixture::{Database, SENDER};

const ADA: i64 = 1;
const BOB: i64 = 2;

#[tokio::test]
async fn expired_rows_become_dead_letters_once_and_name_their_sender() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-10, -5, 3600]).await;

    let expired = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    let reported: Vec<_> = expired
        .dead_lettered
        .iter()
        .map(|d| (d.seq, d.agent_name.as_deref(), d.sender.map(relay_domain::AgentId::get)))
        .collect();
    assert_eq!(reported, [(1, Some("ada"), Some(SENDER)), (2, Some("ada"), Some(SENDER))]);
    assert!(expired.dead_lettered[0].delivery_id.to_string().ends_with("_1"));
    assert!(!expired.more);
    assert_eq!(db.settlements(ADA).await, [(1, 4), (2, 4)]);
    assert_eq!(db.settled_floor(ADA).await, 2, "the floor runs on over dead letters");

    let (again, events) = db.store.dead_letter_expired(&[Database::mailbox(ADA)], db.now).await.unwrap();
    assert!(again.is_empty() && events.is_empty(), "a dead letter is made once");
    let reported: Vec<_> = expired.recorded.iter().flat_map(|r| &r.events).map(|e| (&*e.kind, e.agent_id)).collect();
    let ada = Some(relay_domain::AgentId::new(ADA));
    assert_eq!(reported, [("delivery.failed", ada), ("delivery.failed", ada)]);
}

#[tokio::test]
async fn settled_rows_are_left_alone_and_a_deferred_one_expires() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-9, -8, -7, -6, -5, 3600]).await;
    db.ack_floor(ADA, 1).await;
    db.settlement(ADA, 2, 1).await;
    db.settlement(ADA, 3, 2).await;
    db.settlement(ADA, 5, 3).await;

    let (dead_lettered, _) = db.store.dead_letter_expired(&[Database::mailbox(ADA)], db.now).await.unwrap();
    assert_eq!(dead_lettered.iter().map(|d| d.seq).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(db.settlements(ADA).await, [(2, 1), (3, 2), (4, 4), (5, 4)]);
    assert_eq!(db.settled_floor(ADA).await, 5);
}

#[tokio::test]
async fn an_ack_that_commits_first_wins_over_the_expiry() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-10, -5]).await;

    let mut ack = db.pool.begin().await.unwrap();
    sqlx::query("UPDATE mailbox_cursors SET ack_floor = 2, settled_floor = 2 WHERE agent_id = $1")
        .bind(ADA)
        .execute(&mut *ack)
        .await
        .unwrap();
    let store = db.store.clone();
    let now = db.now;
    let expiry = tokio::spawn(async move {
        loop {
            // A lock that is not given for 2 s is asked for again, as the worker does.
            match store.dead_letter_expired(&[Database::mailbox(ADA)], now).await {
                Err(StoreError::Aborted { .. }) => {}
                done => return done,
            }
        }
    });
    // The expiry waits for the cursor row; only then does the ack commit.
    relay_testkit::wait::until("the expiry to wait for the ack", std::time::Duration::from_secs(30), async || {
        db.number(
            "SELECT count(*) FROM pg_stat_activity
              WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .await
            > 0
    })
    .await;
    ack.commit().await.unwrap();
    assert!(expiry.await.unwrap().unwrap().0.is_empty(), "what is acked does not expire");
    assert!(db.settlements(ADA).await.is_empty());
}

#[tokio::test]
async fn the_scan_goes_on_where_it_stopped_and_takes_rows_of_one_instant_together() {
    let db = Database::fresh().await;
    // 1500 rows that expire at one instant, and one a second later: more than a step holds.
    db.agent(ADA, "ada").await;
    db.agent(BOB, "bob").await;
    db.run(
        "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, node_id, created_at, expires_at)
         SELECT 7, 1000 + n, 1, (now() AT TIME ZONE 'UTC')::date, 1, 'n', now(), '2020-01-01'::timestamptz
           FROM generate_series(1, 1500) AS n;
         INSERT INTO mailbox_cursors SELECT 7, 1000 + n, 0, 0, 0 FROM generate_series(1, 1500) AS n;
         UPDATE deliveries SET expires_at = now() - interval '10 seconds'",
    )
    .await;
    db.deliveries(BOB, &[-1]).await;

    let first = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert_eq!((first.dead_lettered.len(), first.more), (1500, true));
    let second = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert_eq!((second.dead_lettered.len(), second.more), (1, false));
    let third = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert!(third.dead_lettered.is_empty() && !third.more);
}

#[tokio::test]
async fn a_mailbox_with_more_than_one_step_takes_is_finished() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-1; 620]).await;
    let first = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert_eq!((first.dead_lettered.len(), first.more), (500, true));
    let second = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert_eq!((second.dead_lettered.len(), second.more), (120, false));
    assert_eq!(db.settled_floor(ADA).await, 620);
}

#[tokio::test]
async fn a_backlog_of_many_mailboxes_is_dead_lettered_in_bounded_steps() {
    let db = Database::fresh().await;
    for agent in 1..=10 {
        db.agent(agent, &format!("agent-{agent}")).await;
        db.deliveries(agent, &[-1; 250]).await;
    }
    let mut steps = Vec::new();
    loop {
        let step = db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
        steps.push(step.dead_lettered.len());
        if !step.more {
            break;
        }
    }
    assert_eq!(steps.iter().sum::<usize>(), 2500);
    assert!(steps.iter().all(|dead_lettered| *dead_lettered <= MAX_DEAD_LETTERED) && steps.len() > 1, "{steps:?}");
    for agent in 1..=10 {
        assert_eq!(db.settled_floor(agent).await, 250);
    }
}

#[tokio::test]
async fn a_row_that_became_visible_late_is_found_by_the_second_pass() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    db.deliveries(ADA, &[-3]).await;
    let missed = db.store.expire_step(ExpiryPass::First, db.now + TimeDelta::seconds(1)).await.unwrap();
    assert!(missed.dead_lettered.is_empty(), "the first pass is past it");
    let later = db.now + TimeDelta::minutes(11);
    let found = db.store.expire_step(ExpiryPass::Second, later).await.unwrap();
    assert_eq!(found.dead_lettered.len(), 1);
}

#[tokio::test]
async fn two_workers_at_once_dead_letter_a_row_once() {
    let db = Database::fresh().await;
    for agent in 1..=40 {
        db.agent(agent, &format!("a{agent}")).await;
        db.deliveries(agent, &[-2, -1]).await;
    }
    let mailboxes: Vec<_> = (1..=40).map(Database::mailbox).collect();
    let reversed: Vec<_> = mailboxes.iter().rev().copied().collect();
    let (a, b, c) = tokio::join!(
        db.store.dead_letter_expired(&mailboxes, db.now),
        db.store.dead_letter_expired(&reversed, db.now),
        db.store.expire_step(ExpiryPass::First, db.now),
    );
    assert_eq!(a.unwrap().0.len() + b.unwrap().0.len() + c.unwrap().dead_lettered.len(), 80);
}

#[tokio::test]
async fn days_behind_the_slower_pass_are_not_finished() {
    let db = Database::fresh().await;
    assert_eq!(db.store.first_unexpired_day().await.unwrap(), None, "nothing is known before the first step");
    db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    assert_eq!(db.store.first_unexpired_day().await.unwrap(), None);
    db.store.expire_step(ExpiryPass::Second, db.now).await.unwrap();
    let first = (db.now - TimeDelta::minutes(10) - TimeDelta::days(6)).date_naive();
    assert_eq!(db.store.first_unexpired_day().await.unwrap(), Some(first));
    db.run("UPDATE loop_state SET value = '{\"until\": \"2026-01-20T10:00:00Z\"}' WHERE loop = 'expiry'").await;
    let stuck = db.store.first_unexpired_day().await.unwrap().unwrap();
    assert_eq!(stuck.to_string(), "2026-01-14", "a delivery of that day may still expire");
}

#[tokio::test]
async fn the_expiry_loop_has_work_when_a_delivery_expires_or_its_position_is_old() {
    let db = Database::fresh().await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[30, 3600]).await;
    let at = |seconds| db.now + TimeDelta::seconds(seconds);
    let has_work = async |seconds| db.store.has_expired_deliveries(at(seconds)).await.unwrap();
    let step = async |seconds| {
        for pass in [ExpiryPass::First, ExpiryPass::Second] {
            db.store.expire_step(pass, at(seconds)).await.unwrap();
        }
    };
    assert!(has_work(0).await, "no pass has a position");
    step(0).await;
    assert!(!has_work(29).await);
    assert!(has_work(30).await);
    step(30).await;
    assert_eq!(db.settlements(ADA).await, [(1, 4)]);
    assert!(!has_work(90).await);
    assert!(has_work(91).await, "retention waits for the position");
    step(620).await;
    assert!(!has_work(629).await);
    assert!(has_work(630).await, "the second pass reads what expired ten minutes ago");
    step(630).await;
    assert!(!has_work(630).await);

    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 1").await;
    assert!(has_work(630).await, "a deleted agent has a delivery");
}
