use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use relay_domain::{
    WorkspaceId, WorkspaceScope, snowflake,
    workspaces::usage::{Granularity, UsageBucket},
};

use crate::fixture::{Database, WORKSPACE};

const ALL: i64 = 100;

/// A workspace that is older than the counting of usage, and one round, which begins it.
async fn counting() -> (Database, DateTime<Utc>) {
    begun("now() - interval '1 hour'").await
}

async fn begun(created_at: &str) -> (Database, DateTime<Utc>) {
    let db = Database::fresh().await;
    workspace(&db, WORKSPACE, created_at).await;
    db.agent(1, "ada").await;
    db.ack_floor(1, 40).await;
    let begin = db.now.duration_trunc(TimeDelta::minutes(1)).unwrap();
    let begun = db.store.roll_up_usage(begin + TimeDelta::seconds(20), ALL).await.unwrap();
    assert_eq!((begun.workspaces, begun.more), (1, false));
    (db, begin)
}

async fn workspace(db: &Database, id: i64, created_at: &str) {
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({id}, 'w', {created_at})")).await;
}

/// A message with two deliveries, one of them sent again, at an instant.
async fn message(db: &Database, at: DateTime<Utc>, nth: i64) {
    let id = ((at.timestamp_millis() - snowflake::EPOCH_MS) << 22) + nth;
    let (at, day) = (at.to_rfc3339(), at.date_naive());
    db.run(&format!(
        "INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, text, created_at)
         VALUES (7, {id}, '{day}', 1, 99, 'sender', 'hi', '{at}');
         INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, redrive_no, node_id, created_at, expires_at)
         SELECT 7, agent, {nth}, '{day}', {id}, redrive, 'n', '{at}', '{at}'
           FROM (VALUES (1, 0), (2, 0), (3, 1)) AS v (agent, redrive)"
    ))
    .await;
}

async fn usage(db: &Database, granularity: Granularity) -> Vec<UsageBucket> {
    let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(WORKSPACE));
    let (since, until) = (db.now - TimeDelta::days(10), db.now + TimeDelta::days(10));
    db.store.usage(scope, since, until, granularity).await.unwrap().0
}

fn used(at: DateTime<Utc>, messages: i64, deliveries: i64, acked: i64) -> UsageBucket {
    UsageBucket { at, messages, deliveries, acked, settled: acked, dead_letters: 0, invocations: 0, push_attempts: 0 }
}

#[tokio::test]
async fn minutes_are_counted_when_they_end_and_again_until_they_are_final() {
    let (db, minute) = counting().await;
    let after = |seconds| minute + TimeDelta::seconds(seconds);
    message(&db, after(10), 1).await;
    message(&db, after(59), 2).await;
    message(&db, after(60), 3).await;
    db.ack_floor(1, 43).await;
    let early = db.store.roll_up_usage(after(59), ALL).await.unwrap();
    assert_eq!((early.workspaces, usage(&db, Granularity::Minute).await.len()), (0, 0), "the minute is not over");

    db.store.roll_up_usage(after(61), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, [used(minute, 2, 4, 3)], "what was acked before is not counted");
    let idle = db.store.roll_up_usage(after(62), ALL).await.unwrap();
    assert_eq!((idle.workspaces, idle.behind), (0, Some(TimeDelta::seconds(2))));

    // One that was committed late.
    message(&db, after(20), 4).await;
    db.ack_floor(1, 44).await;
    db.store.roll_up_usage(after(121), ALL).await.unwrap();
    let expected = [used(minute, 3, 6, 3), used(after(60), 1, 2, 1)];
    assert_eq!(usage(&db, Granularity::Minute).await, expected);
    db.store.roll_up_usage(after(185), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, expected, "counted again, and the same");

    // Nothing of the first minute can become visible any more: it is not looked at again.
    message(&db, after(30), 5).await;
    db.store.roll_up_usage(after(245), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, expected);
    let hours = usage(&db, Granularity::Day).await;
    assert_eq!(hours.iter().map(|usage| usage.messages).sum::<i64>(), 4);
}

#[tokio::test]
async fn rows_of_all_kinds_are_counted_in_their_minute() {
    let (db, minute) = counting().await;
    let at = minute + TimeDelta::seconds(5);
    let id = (at.timestamp_millis() - snowflake::EPOCH_MS) << 22;
    let (time, day) = (at.to_rfc3339(), at.date_naive());
    db.run(&format!(
        "INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, at)
         VALUES (7, 1, 1, 4, '{time}'), (7, 1, 2, 4, '{time}'), (7, 1, 3, 2, '{time}');
         INSERT INTO invocations (workspace_id, invocation_id, action_name, capability, caller_name, input, status, due_at, created_at)
         VALUES (7, {id}, 'build', 'build', 'ada', '{{}}', 'pending', now(), '{time}');
         INSERT INTO delivery_attempts (workspace_id, agent_id, seq, attempt_id, created_on, node_id, attempted_at, latency_ms)
         SELECT 7, 1, 1, n, '{day}', 'n', '{time}', 5 FROM generate_series(1, 3) AS n"
    ))
    .await;
    db.store.roll_up_usage(minute + TimeDelta::seconds(61), ALL).await.unwrap();
    let expected = UsageBucket { dead_letters: 2, invocations: 1, push_attempts: 3, ..used(minute, 0, 0, 0) };
    assert_eq!(usage(&db, Granularity::Minute).await, [expected]);
}

#[tokio::test]
async fn stopped_workers_catch_up_and_younger_workspaces_count_from_nothing() {
    let (db, minute) = counting().await;
    let after = |minutes| minute + TimeDelta::minutes(minutes);
    for nth in 0..3 {
        message(&db, after(50 * nth), nth + 1).await;
    }
    workspace(&db, 8, "now() + interval '1 minute'").await;
    db.run("INSERT INTO mailbox_cursors VALUES (8, 5, 9, 9, 9)").await;
    let mut steps = 0;
    loop {
        steps += 1;
        // One workspace a step, so that a round takes several.
        if !db.store.roll_up_usage(after(101), 1).await.unwrap().more {
            break;
        }
    }
    assert!(steps > 4, "two rounds over two workspaces, {steps} steps");
    let expected = [used(minute, 1, 2, 0), used(after(50), 1, 2, 0), used(after(100), 1, 2, 0)];
    assert_eq!(usage(&db, Granularity::Minute).await, expected);
    assert_eq!(db.number("SELECT sum(acked)::bigint FROM usage_minutes WHERE workspace_id = 8").await, 9);
}

#[tokio::test]
async fn a_workspace_that_is_made_in_the_first_minute_counts_from_nothing() {
    let (db, minute) = begun("now()").await;
    db.store.roll_up_usage(minute + TimeDelta::seconds(61), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, [used(minute, 0, 0, 40)]);
}

#[tokio::test]
async fn floors_that_recovery_has_moved_are_not_counted() {
    let (db, minute) = counting().await;
    let after = |seconds| minute + TimeDelta::seconds(seconds);
    db.ack_floor(1, 10_043).await;
    db.run("UPDATE recovery_state SET recovered_at = now()").await;
    db.store.roll_up_usage(after(61), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, []);
    db.ack_floor(1, 10_045).await;
    db.store.roll_up_usage(after(121), ALL).await.unwrap();
    assert_eq!(usage(&db, Granularity::Minute).await, [used(after(60), 0, 0, 2)]);
}

#[tokio::test]
async fn minutes_that_become_final_during_a_read_are_not_final_in_its_result() {
    let (db, _) = counting().await;
    let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(WORKSPACE));
    let (since, until) = (db.now - TimeDelta::days(1), db.now + TimeDelta::days(1));
    let read = async || db.store.usage(scope, since, until, Granularity::Minute).await.unwrap().1;
    let before = read().await;
    let mut round = db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE usage_minutes IN ACCESS EXCLUSIVE MODE").execute(&mut *round).await.unwrap();
    let advance = async {
        // The counts are not read yet.
        db.lock_is_awaited().await;
        let later =
            "UPDATE loop_state SET value = value || '{\"from\": \"2100-01-01T00:00:00Z\"}' WHERE loop = 'usage'";
        assert_eq!(sqlx::query(later).execute(&mut *round).await.unwrap().rows_affected(), 1);
        round.commit().await.unwrap();
    };
    let (during, ()) = tokio::join!(read(), advance);
    assert_eq!(during, before);
    assert_ne!(read().await, before);
}
