use chrono::TimeDelta;
use relay_domain::{AgentId, RedriveId, mailboxes::dead_letter::DeadLetterReason};
use relay_store::mailboxes::{
    dead_letters::DeadLetterFilter,
    expiry::ExpiryPass,
    redrives::{NewRedrive, RedriveOutcome},
};

use crate::fixture::{Database, WORKSPACE};

const ADA: i64 = 1;
const BOB: i64 = 2;
const REDRIVE: RedriveId = RedriveId::new(1);

/// ada has two dead letters, seq 1 and 2, and one living delivery, seq 3.
async fn with_letters() -> Database {
    let db = Database::fresh().await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    db.agent(ADA, "ada").await;
    db.deliveries(ADA, &[-10, -5, 3600]).await;
    db.store.expire_step(ExpiryPass::First, db.now).await.unwrap();
    db
}

#[tokio::test]
async fn two_redrives_of_one_letter_at_once_make_one_delivery() {
    let db = with_letters().await;
    let (scope, ada) = Database::mailbox(ADA);
    let redrive = || db.store.redrive_dead_letter(scope, ada, 1, db.now);
    let (one, other, third) = tokio::join!(redrive(), redrive(), redrive());
    let outcomes = [one.unwrap().0, other.unwrap().0, third.unwrap().0];
    let made = |now| RedriveOutcome::Redriven { seq: 4, redrive_no: 1, now };
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == made(true)).count(), 1, "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == made(false)).count(), 2, "{outcomes:?}");
    assert_eq!(db.number("SELECT count(*) FROM deliveries WHERE redrive_no = 1").await, 1);
    assert_eq!(db.number("SELECT next_seq FROM mailbox_heads WHERE agent_id = 1").await, 5);
    assert_eq!(
        db.store.redrive_dead_letter(scope, ada, 3, db.now).await.unwrap().0,
        RedriveOutcome::NotFound,
        "it lives"
    );
}

#[tokio::test]
async fn a_dead_letter_that_cannot_be_redriven_says_why_and_leaves_no_gap() {
    let db = with_letters().await;
    let (scope, ada) = Database::mailbox(ADA);
    db.run("UPDATE workspaces SET mailbox_depth = 1").await;
    assert_eq!(db.store.redrive_dead_letter(scope, ada, 1, db.now).await.unwrap().0, RedriveOutcome::MailboxFull);
    db.run("UPDATE workspaces SET mailbox_depth = 2; UPDATE deliveries SET redrive_no = 3 WHERE seq = 1").await;
    assert_eq!(db.store.redrive_dead_letter(scope, ada, 1, db.now).await.unwrap().0, RedriveOutcome::Exhausted);
    let (outcome, _) = db.store.redrive_dead_letter(scope, ada, 2, db.now).await.unwrap();
    assert_eq!(outcome, RedriveOutcome::Redriven { seq: 4, redrive_no: 1, now: true });
    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 1; UPDATE deliveries SET redrive_no = 0").await;
    assert_eq!(db.store.redrive_dead_letter(scope, ada, 1, db.now).await.unwrap().0, RedriveOutcome::AgentDeleted);
}

#[tokio::test]
async fn a_redrive_by_filter_goes_on_where_it_stopped_and_ends() {
    let db = with_letters().await;
    db.agent(BOB, "bob").await;
    let (scope, ada) = Database::mailbox(ADA);
    let later = db.now + TimeDelta::seconds(1);
    let filter = DeadLetterFilter { agent: Some(ada), ..DeadLetterFilter::default() };
    assert_eq!(db.store.count_dead_letters(scope, &filter, true).await.unwrap(), [(DeadLetterReason::TtlExpired, 2)]);
    db.store
        .begin_redrive(scope, &NewRedrive { id: REDRIVE, filter: &filter, rate: 4, matched: 2 }, later)
        .await
        .unwrap();
    // At 4 a second, a quarter of a second is one letter. Several workers at once share the steps.
    let step = || db.store.redrive_step(TimeDelta::milliseconds(250), later);
    let (one, other) = tokio::join!(step(), step());
    assert!([one.unwrap(), other.unwrap()].iter().flatten().all(|step| step.redriven == 1));
    for _ in 0..5 {
        db.run("UPDATE redrives SET next_at = now() WHERE next_at IS NOT NULL").await;
        step().await.unwrap();
    }
    let through = db.store.redrive(scope, REDRIVE).await.unwrap().unwrap();
    assert_eq!((through.redriven, through.refused, through.finished_at.is_some()), (2, 0, true));
    assert_eq!(db.number("SELECT count(*) FROM deliveries WHERE redrive_no = 1").await, 2);
    assert_eq!(db.store.count_dead_letters(scope, &filter, true).await.unwrap(), []);
    assert_eq!(db.store.count_dead_letters(scope, &filter, false).await.unwrap(), [(DeadLetterReason::TtlExpired, 2)]);
}

#[tokio::test]
async fn letters_that_a_full_mailbox_refuses_are_sent_once_it_has_room() {
    let db = with_letters().await;
    let (scope, ada) = Database::mailbox(ADA);
    // One letter can never be sent again: each pass meets it, and it counts once.
    db.run("UPDATE workspaces SET mailbox_depth = 1; UPDATE deliveries SET redrive_no = 3 WHERE seq = 2").await;
    let later = db.now + TimeDelta::seconds(1);
    let filter = DeadLetterFilter { agent: Some(ada), ..DeadLetterFilter::default() };
    db.store
        .begin_redrive(scope, &NewRedrive { id: REDRIVE, filter: &filter, rate: 100, matched: 2 }, later)
        .await
        .unwrap();
    let pass = async || {
        db.run("UPDATE redrives SET next_at = now() WHERE next_at IS NOT NULL").await;
        db.store.redrive_step(TimeDelta::milliseconds(250), later).await.unwrap();
        let through = db.store.redrive(scope, REDRIVE).await.unwrap().unwrap();
        (through.redriven, through.refused, through.finished_at.is_some())
    };
    assert_eq!(pass().await, (0, 1, false));
    let pause = "SELECT extract(epoch FROM next_at - now())::bigint FROM redrives WHERE position_at IS NULL";
    assert!((25..=30).contains(&db.number(pause).await), "not at once");
    assert_eq!(pass().await, (0, 1, false), "still full");
    db.run("UPDATE workspaces SET mailbox_depth = 2").await;
    assert_eq!(pass().await, (1, 1, true));
    assert_eq!(db.number("SELECT count(*) FROM deliveries WHERE redrive_no = 1").await, 1);
}

#[tokio::test]
async fn a_mailbox_that_stays_full_for_an_hour_refuses_its_letters() {
    let db = with_letters().await;
    let (scope, ada) = Database::mailbox(ADA);
    db.run("UPDATE workspaces SET mailbox_depth = 1").await;
    let later = db.now + TimeDelta::seconds(1);
    let filter = DeadLetterFilter { agent: Some(ada), ..DeadLetterFilter::default() };
    db.store
        .begin_redrive(scope, &NewRedrive { id: REDRIVE, filter: &filter, rate: 100, matched: 2 }, later)
        .await
        .unwrap();
    for (age, redriven, refused, is_finished) in [(59, 0, 0, false), (61, 0, 2, true)] {
        db.run(&format!("UPDATE redrives SET next_at = now(), created_at = now() - interval '{age} minutes'")).await;
        db.store.redrive_step(TimeDelta::milliseconds(250), later).await.unwrap();
        let through = db.store.redrive(scope, REDRIVE).await.unwrap().unwrap();
        assert_eq!((through.redriven, through.refused), (redriven, refused), "{age} minutes");
        assert_eq!(through.finished_at.is_some(), is_finished, "{age} minutes");
    }
}

#[tokio::test]
async fn deliveries_of_a_deleted_agent_are_found_and_dead_lettered() {
    let db = with_letters().await;
    assert!(db.store.mailboxes_of_deleted_agents(10).await.unwrap().is_empty());
    db.run("UPDATE agents SET deleted_at = now() WHERE agent_id = 1").await;
    let found = db.store.mailboxes_of_deleted_agents(10).await.unwrap();
    assert_eq!(found, [Database::mailbox(ADA)]);
    let (dead_lettered, _) =
        db.store.dead_letter_mailboxes(&found, DeadLetterReason::AgentDeleted, db.now).await.unwrap();
    assert_eq!(
        dead_lettered.iter().map(|letter| (letter.seq, letter.reason)).collect::<Vec<_>>(),
        [(3, DeadLetterReason::AgentDeleted)]
    );
    assert_eq!(dead_lettered[0].delivery_id.agent, AgentId::new(ADA));
    assert_eq!(db.settled_floor(ADA).await, 3);
    assert!(db.store.mailboxes_of_deleted_agents(10).await.unwrap().is_empty());
}
