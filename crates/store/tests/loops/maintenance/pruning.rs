use std::time::Duration;

use chrono::Days;
use relay_store::messages::retention::RetentionStep;

use crate::fixture::Database;

const DAY: Duration = Duration::from_secs(86400);
const QUARTER: Duration = Duration::from_secs(900);
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn old_rows_go_and_young_ones_stay() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
         SELECT 7, decode(lpad(n::text, 4, '0'), 'hex'), '', 201, '{}', now() - make_interval(hours => n)
           FROM generate_series(20, 29) AS n;
         INSERT INTO outbox (batch_id, gateway_id, sources, created_at, published_at)
         SELECT n, 1, '[]', now() - interval '1 day', now() - make_interval(mins => n)
           FROM generate_series(10, 19) AS n;
         INSERT INTO outbox (batch_id, gateway_id, sources, created_at) VALUES (1, 1, '[]', now() - interval '9 days');
         UPDATE worker_ids SET owner = 'a', lease_until = now() - interval '2 hours' WHERE worker_id = 1;
         UPDATE worker_ids SET owner = 'b', lease_until = now() - interval '1 minute' WHERE worker_id = 2",
    )
    .await;
    assert_eq!(db.store.prune_idempotency_keys(DAY, 3).await.unwrap(), 3, "bounded");
    assert_eq!(db.store.prune_idempotency_keys(DAY, 100).await.unwrap(), 3);
    assert_eq!(db.store.prune_outbox(QUARTER, 100).await.unwrap(), 5);
    assert_eq!(db.number("SELECT count(*) FROM outbox WHERE published_at IS NULL").await, 1, "never the unpublished");
    assert_eq!(db.store.prune_worker_ids(HOUR).await.unwrap(), 1);
    assert_eq!(db.store.prune_worker_ids(HOUR).await.unwrap(), 0);
}

#[tokio::test]
async fn a_revoked_token_goes_when_no_string_of_it_could_verify() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO observer_tokens (workspace_id, token_id, name, scopes, signed_until, created_at, revoked_at)
         SELECT 7, id, id::text, '{stream:read}', until, now() - interval '90 days', revoked
           FROM (VALUES (1, now() - interval '9 days', now() - interval '40 days'),
                        (2, now() - interval '9 days', now() - interval '20 days'),
                        (3, now() + interval '9 days', now() - interval '40 days'),
                        (4, 'infinity', now() - interval '40 days'),
                        (5, now() - interval '9 days', NULL)) AS t (id, until, revoked);
         INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters)
         SELECT token_id, 7, 'revoked', 1, scopes, '{}' FROM observer_tokens;
         INSERT INTO signing_keys (kid, public_key, created_at) VALUES ('old', '', now() - interval '80 days'),
                                                                       ('new', '', now() - interval '35 days')",
    )
    .await;
    let kept = "SELECT sum(token_id)::bigint FROM observer_tokens";
    assert_eq!(db.store.prune_observer_tokens(30 * DAY, 100).await.unwrap(), 1);
    assert_eq!(db.number(kept).await, 2 + 3 + 4 + 5);
    assert_eq!(db.number("SELECT sum(token_id)::bigint FROM observer_overrides").await, 2 + 3 + 4 + 5);
    // Every key that could have signed them is retired.
    db.run("UPDATE signing_keys SET retired_at = now() WHERE kid = 'old'").await;
    assert_eq!(db.store.prune_observer_tokens(30 * DAY, 1).await.unwrap(), 1, "bounded");
    assert_eq!(db.store.prune_observer_tokens(30 * DAY, 100).await.unwrap(), 1);
    assert_eq!(db.number(kept).await, 2 + 5);
}

#[tokio::test]
async fn texts_of_active_tokens_are_renewed_before_they_end() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO workspaces (workspace_id, name, created_at) VALUES (7, 'w', now());
         INSERT INTO observer_tokens (workspace_id, token_id, name, scopes, signed_until, created_at, expires_at, revoked_at)
         SELECT 7, id, id::text, '{stream:read}', until, now(), expiry, revoked
           FROM (VALUES (1, now() + interval '9 days', NULL, NULL),
                        (2, now() + interval '9 days', now() + interval '40 days', NULL),
                        (4, now() + interval '9 days', now() + interval '9 days', NULL),
                        (8, now() + interval '40 days', NULL, NULL),
                        (16, now() - interval '1 day', NULL, NULL),
                        (32, 'infinity', NULL, NULL),
                        (64, now() + interval '9 days', NULL, now())) AS t (id, until, expiry, revoked)",
    )
    .await;
    assert_eq!(db.store.renew_observer_tokens(30 * DAY, 1).await.unwrap(), 1, "bounded");
    assert_eq!(db.store.renew_observer_tokens(30 * DAY, 100).await.unwrap(), 1);
    assert_eq!(db.store.renew_observer_tokens(30 * DAY, 100).await.unwrap(), 0, "once");
    let renewed = "SELECT sum(token_id)::bigint FROM observer_overrides WHERE state = 'live'";
    assert_eq!(db.number(renewed).await, 1 + 2);
    assert_eq!(db.number("SELECT count(*) FROM observer_overrides WHERE expires_at IS NULL").await, 1);
}

#[tokio::test]
async fn former_texts_are_pruned_after_the_events_that_refer_to_them() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO message_edits (workspace_id, message_id, until_seq, text, mentions, metadata, edited_at)
         SELECT 7, 1, n, '', '{}', '{}', now() - make_interval(days => n) FROM generate_series(1, 12) AS n",
    )
    .await;
    assert_eq!(db.store.prune_message_edits(9 * DAY, 2).await.unwrap(), 2, "bounded");
    assert_eq!(db.store.prune_message_edits(9 * DAY, 100).await.unwrap(), 2);
    assert_eq!(db.number("SELECT count(*) FROM message_edits").await, 8);
}

#[tokio::test]
async fn a_workspace_may_keep_its_messages_for_a_shorter_time() {
    let db = Database::fresh().await;
    let today = db.now.date_naive();
    db.run(
        "INSERT INTO workspaces (workspace_id, name, message_days, created_at)
         VALUES (7, 'short', 10, now()), (8, 'as the installation', NULL, now()), (9, 'too short', 8, now())
         ON CONFLICT (workspace_id) DO UPDATE SET message_days = excluded.message_days",
    )
    .await;
    for age in [9, 10, 11, 12] {
        let day = today - Days::new(age);
        db.day("messages", day).await;
        db.day("message_search", day).await;
        let midnight_ms = day.and_time(chrono::NaiveTime::MIN).and_utc().timestamp_millis();
        let first = (midnight_ms - relay_domain::snowflake::EPOCH_MS) << 22;
        db.run(&format!(
            "INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, text, created_at)
             SELECT w, {first} + n, '{day}', 1, 99, 'sender', 'hi', '{day}'
               FROM unnest(ARRAY[7, 8, 9]) AS w, generate_series(1, 3) AS n;
             INSERT INTO message_search (workspace_id, message_id, created_on, channel_id, direct, block, document)
             SELECT workspace_id, message_id, created_on, 1, false, 0, '' FROM messages WHERE created_on = '{day}';
             INSERT INTO message_reads SELECT workspace_id, message_id, 99, now() FROM messages WHERE created_on = '{day}';
             INSERT INTO message_reactions (workspace_id, message_id, emoji, agent_id, reaction_id, author_id, created_at)
             SELECT workspace_id, message_id, 'x', 99, message_id, 99, now() FROM messages WHERE created_on = '{day}'"
        ))
        .await;
    }

    let some = db.store.prune_old_messages(today, 9, 2).await.unwrap();
    assert_eq!(some, RetentionStep { removed: 2, more: true }, "bounded");
    let rest = db.store.prune_old_messages(today, 9, 100).await.unwrap();
    // Two days of one, and three of the other, which may not have less than its deliveries.
    assert_eq!(rest, RetentionStep { removed: 2 * 3 + 3 * 3 - 2, more: false });
    for table in ["messages", "message_search", "message_reads", "message_reactions"] {
        for (workspace, left) in [(7, 2 * 3), (8, 4 * 3), (9, 3)] {
            let kept = format!("SELECT count(*) FROM {table} WHERE workspace_id = {workspace}");
            assert_eq!(db.number(&kept).await, left, "{table} of {workspace}");
        }
    }
    assert_eq!(db.store.prune_old_messages(today, 9, 100).await.unwrap(), RetentionStep::default(), "nothing is due");
    let tomorrow = today + Days::new(1);
    assert_eq!(db.store.prune_old_messages(tomorrow, 9, 100).await.unwrap().removed, 3 + 3, "a day later a day is");
}
