use chrono::{Days, TimeDelta};
use relay_domain::{ChannelId, MessageId, observers::ObserverFilters};
use relay_store::{
    maintenance::partitions::DailyTable,
    search::{
        index::IndexedWorkspaces,
        queries::{Reader, SearchQuery},
    },
};

use crate::fixture::{Database, SENDER};

const ADA: i64 = 1;
const BOB: i64 = 2;

impl Database {
    /// Channel 1 with ada and bob in it.
    async fn room() -> Self {
        let db = Self::fresh().await;
        db.run(
            "INSERT INTO workspaces (workspace_id, name, created_at) VALUES (7, 'w', now());
             INSERT INTO channels (workspace_id, channel_id, name, created_at) VALUES (7, 1, 'room', now())",
        )
        .await;
        for (agent, name) in [(ADA, "ada"), (BOB, "bob")] {
            db.agent(agent, name).await;
            db.run(&format!(
                "INSERT INTO channel_members (workspace_id, channel_id, agent_id, joined_at) VALUES (7, 1, {agent}, now())"
            ))
            .await;
        }
        db
    }

    /// The id of the message that `deliveries` wrote as this seq.
    fn message(&self, seq: i64) -> i64 {
        ((self.now.timestamp_millis() - relay_domain::snowflake::EPOCH_MS) << 22) + seq
    }

    async fn pointer(&self, agent: i64) -> Option<i64> {
        sqlx::query_scalar("SELECT last_read_id FROM channel_members WHERE channel_id = 1 AND agent_id = $1")
            .bind(agent)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// Returns the last-read pointer as the API shows it, before and after folding.
    async fn read_position(&self, name: &str) -> Option<i64> {
        let (scope, _) = Self::mailbox(ADA);
        let rows = self.store.read_status(scope, ChannelId::new(1), &ObserverFilters::default()).await.unwrap();
        rows.into_iter().find(|row| row.agent_name == name).unwrap().last_read_id.map(MessageId::get)
    }

    async fn in_channel(&self) {
        self.run("UPDATE deliveries SET channel_id = 1").await;
    }

    async fn readers_of(&self, message: i64) -> Vec<String> {
        let (scope, _) = Self::mailbox(ADA);
        let rows = self.store.readers(scope, MessageId::new(message)).await.unwrap();
        rows.into_iter().map(|row| row.agent_name).collect()
    }

    async fn post(&self, id: i64, text: &str) {
        self.run(&format!(
            "INSERT INTO messages (workspace_id, message_id, created_on, channel_id, agent_id, agent_name, text, created_at)
             VALUES (7, {id}, DATE '2025-01-01' + (({id} >> 22) / 86400000)::integer, 1, {SENDER}, 'sender', '{text}', now())"
        ))
        .await;
    }

    async fn search(&self, text: &str) -> Vec<i64> {
        let (scope, _) = Self::mailbox(ADA);
        let query = SearchQuery { text, channel: None, from: None, before: None, after: None };
        let found = self.store.search(scope, &Reader::Workspace, &query, 100).await.unwrap();
        found.into_iter().map(|(row, _)| row.message_id.get()).collect()
    }

    /// The record that a flush writes with an ack floor.
    async fn acked(&self, agent: i64, floor: i64) {
        self.run(&format!(
            "INSERT INTO ack_log (workspace_id, agent_id, acked_at, created_on, ack_floor)
             VALUES (7, {agent}, '{at}', '{day}', {floor})
             ON CONFLICT (workspace_id, agent_id, acked_at, created_on) DO UPDATE SET ack_floor = excluded.ack_floor",
            at = self.now,
            day = self.now.date_naive(),
        ))
        .await;
    }

    async fn indexed(&self) -> i64 {
        self.number("SELECT count(*) FROM message_search").await
    }
}

#[tokio::test]
async fn an_acknowledged_message_is_read_before_and_after_it_is_folded() {
    let db = Database::room().await;
    db.deliveries(ADA, &[60; 5]).await;
    db.deliveries(BOB, &[60; 5]).await;
    db.in_channel().await;
    // Bob's third has expired: his floor has passed it, but he did not read it.
    db.settlement(BOB, 3, 4).await;
    for agent in [ADA, BOB] {
        db.ack_floor(agent, 3).await;
    }
    let (ada, bob) = (Some(db.message(3)), Some(db.message(2)));
    assert_eq!((db.read_position("ada").await, db.read_position("bob").await), (ada, bob), "not folded yet");
    assert_eq!((db.pointer(ADA).await, db.pointer(BOB).await), (None, None));
    assert_eq!(db.readers_of(db.message(3)).await, ["ada"]);

    assert_eq!(db.store.fold_read_pointers(100, db.now).await.unwrap().worked, 6);
    assert_eq!(db.store.fold_read_pointers(100, db.now).await.unwrap().worked, 0, "once");
    assert_eq!((db.pointer(ADA).await, db.pointer(BOB).await), (ada, bob));
    assert_eq!((db.read_position("ada").await, db.read_position("bob").await), (ada, bob));
    assert_eq!(db.readers_of(db.message(3)).await, ["ada"], "and nobody twice");

    // A pointer that an explicit read has moved further stays there.
    db.run(&format!("UPDATE channel_members SET last_read_id = {} WHERE agent_id = 1", db.message(5))).await;
    db.ack_floor(ADA, 4).await;
    db.store.fold_read_pointers(100, db.now).await.unwrap();
    assert_eq!(db.pointer(ADA).await, Some(db.message(5)));
}

#[tokio::test]
async fn pages_of_mailboxes_are_all_folded() {
    let db = Database::room().await;
    for agent in [ADA, BOB] {
        db.deliveries(agent, &[60; 2]).await;
        db.ack_floor(agent, 2).await;
    }
    db.in_channel().await;
    // The first walk: ada, bob and the sender in pages of one, a page a step.
    for _ in 0..3 {
        db.store.fold_read_pointers(1, db.now).await.unwrap();
    }
    assert_eq!((db.pointer(ADA).await, db.pointer(BOB).await), (Some(db.message(2)), Some(db.message(2))));
}

#[tokio::test]
async fn only_acked_mailboxes_are_folded_between_walks() {
    let db = Database::room().await;
    db.deliveries(ADA, &[60; 3]).await;
    db.deliveries(BOB, &[60; 3]).await;
    db.in_channel().await;
    db.store.fold_read_pointers(100, db.now).await.unwrap();

    // Without a record, as if the feed had lost it.
    db.ack_floor(BOB, 1).await;
    db.ack_floor(ADA, 1).await;
    db.acked(ADA, 1).await;
    assert_eq!(db.store.fold_read_pointers(100, db.now).await.unwrap().worked, 1);
    assert_eq!((db.pointer(ADA).await, db.pointer(BOB).await), (Some(db.message(1)), None));
    // A later ack within the same second.
    db.ack_floor(ADA, 2).await;
    db.acked(ADA, 2).await;
    db.store.fold_read_pointers(100, db.now).await.unwrap();
    assert_eq!((db.pointer(ADA).await, db.pointer(BOB).await), (Some(db.message(2)), None));

    // A worker that was down for longer than the feed is kept walks all mailboxes.
    db.store.fold_read_pointers(100, db.now + TimeDelta::minutes(6)).await.unwrap();
    assert_eq!(db.pointer(BOB).await, Some(db.message(1)));
    // So does one that has not done so for an hour.
    db.ack_floor(BOB, 2).await;
    for minutes in (10..=62).step_by(4) {
        assert_eq!(db.pointer(BOB).await, Some(db.message(1)));
        db.store.fold_read_pointers(100, db.now + TimeDelta::minutes(minutes)).await.unwrap();
    }
    db.store.fold_read_pointers(100, db.now + TimeDelta::minutes(66)).await.unwrap();
    assert_eq!(db.pointer(BOB).await, Some(db.message(2)));
}

#[tokio::test]
async fn receipts_outlive_the_deliveries_that_prove_them() {
    let db = Database::room().await;
    let today = db.now.date_naive();
    let (old, kept) = (today - Days::new(9), today - Days::new(2));
    let mut messages = Vec::new();
    for day in [old, kept] {
        let next = day + Days::new(1);
        for parent in ["deliveries", "messages", "ack_log"] {
            db.run(&format!(
                "CREATE TABLE {parent}_{} PARTITION OF {parent} FOR VALUES FROM ('{day}') TO ('{next}')",
                day.format("%Y%m%d")
            ))
            .await;
        }
        let noon = day.and_hms_opt(12, 0, 0).unwrap().and_utc();
        let message = (noon.timestamp_millis() - relay_domain::snowflake::EPOCH_MS) << 22;
        messages.push(message);
        db.post(message, "hi").await;
        for agent in [ADA, BOB] {
            db.run(&format!(
                "INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_id, channel_id, node_id, created_at, expires_at)
                 SELECT 7, {agent}, 1 + coalesce(max(seq), 0), '{day}', {message}, 1, 'n', '{noon}', '{noon}'
                   FROM deliveries WHERE agent_id = {agent}"
            ))
            .await;
        }
        db.run(&format!(
            "INSERT INTO ack_log VALUES (7, 1, '{}', '{day}', {})",
            noon + TimeDelta::seconds(7),
            messages.len()
        ))
        .await;
    }
    db.ack_floor(ADA, 2).await;
    // Bob let the old one expire.
    db.settlement(BOB, 1, 4).await;
    db.ack_floor(BOB, 2).await;
    let first_unfolded = today - Days::new(7);
    assert_eq!(db.store.first_unfolded_day().await.unwrap(), None);

    let mut steps = 0;
    while db.store.fold_receipts(first_unfolded, 1).await.unwrap().more {
        steps += 1;
        assert!(steps < 50);
    }
    assert_eq!(db.store.first_unfolded_day().await.unwrap(), Some(first_unfolded));
    assert_eq!(db.store.fold_receipts(first_unfolded, 1).await.unwrap().worked, 0, "nothing is left");
    let receipts: Vec<(i64, i64, i64)> = sqlx::query_as(
        "SELECT message_id, agent_id, extract(epoch FROM read_at - read_at::date)::bigint FROM message_reads",
    )
    .fetch_all(&db.pool)
    .await
    .unwrap();
    assert_eq!(receipts, [(messages[0], ADA, 12 * 3600 + 7)], "ada's, when she acknowledged it");

    for table in [DailyTable::Deliveries, DailyTable::AckLog] {
        assert_eq!(db.store.drop_partitions_before(table, today - Days::new(8)).await.unwrap(), 1);
    }
    assert_eq!(db.readers_of(messages[0]).await, ["ada"]);
    assert_eq!(db.readers_of(messages[1]).await, ["bob", "ada"], "of a day that is still there");
}

#[tokio::test]
async fn a_message_is_found_from_its_commit_on_and_indexed_once() {
    let db = Database::room().await;
    let now = db.now;
    for n in 1..=5 {
        db.post(db.message(n * 10), "the quick fox").await;
    }
    assert_eq!(db.search("quick").await.len(), 5, "without the index");
    assert_eq!(db.store.index_messages(IndexedWorkspaces::All, now, 3).await.unwrap().added, 3);
    assert_eq!(db.search("quick").await.len(), 5, "with half of it");
    while db.store.index_messages(IndexedWorkspaces::All, now, 3).await.unwrap().more {}
    assert_eq!((db.indexed().await, db.search("quick").await.len()), (5, 5));

    // Its id is smaller, it became visible later.
    db.post(db.message(15), "the quick cat").await;
    assert_eq!(db.search("cat").await, [db.message(15)], "at once");
    db.store.index_messages(IndexedWorkspaces::All, now, 100).await.unwrap();
    assert_eq!(db.indexed().await, 5, "there was time enough for it to come");
    let later = now + TimeDelta::seconds(200);
    while db.store.index_messages(IndexedWorkspaces::All, later, 4).await.unwrap().more {}
    assert_eq!(db.indexed().await, 6);
    assert_eq!(db.search("cat").await, [db.message(15)]);
    assert_eq!(db.number("SELECT settled_id FROM search_progress").await, db.message(50));
    assert_eq!(db.number("SELECT indexed_count FROM search_progress").await, 6);
    assert_eq!(db.number("SELECT sum(channel_messages)::bigint FROM message_stats").await, 6, "each counted once");
    assert_eq!(db.store.index_messages(IndexedWorkspaces::All, later, 4).await.unwrap().added, 0);
}

#[tokio::test]
async fn a_workspace_that_searches_is_indexed_before_the_others() {
    let db = Database::room().await;
    db.post(db.message(10), "the quick fox").await;
    let wanted = async || db.store.index_messages(IndexedWorkspaces::Wanted, db.now, 100).await.unwrap().added;
    assert_eq!(wanted().await, 0, "it has never searched");
    let (scope, _) = Database::mailbox(ADA);
    db.store.want_index(scope).await.unwrap();
    assert_eq!(wanted().await, 1);
    db.store.want_index(scope).await.unwrap();
    db.run("UPDATE search_progress SET wanted_until = now()").await;
    db.post(db.message(20), "the quick cat").await;
    assert_eq!(wanted().await, 0, "its last search was long ago");
    assert_eq!(db.search("quick").await.len(), 2, "and it is found without the index");
}

#[tokio::test]
async fn dropped_messages_leave_the_index_and_the_counts() {
    let db = Database::room().await;
    let old = db.now.date_naive() - Days::new(100);
    let next = old + Days::new(1);
    for parent in ["messages", "message_search"] {
        db.run(&format!(
            "CREATE TABLE {parent}_{} PARTITION OF {parent} FOR VALUES FROM ('{old}') TO ('{next}')",
            old.format("%Y%m%d")
        ))
        .await;
    }
    let noon = old.and_hms_opt(12, 0, 0).unwrap().and_utc();
    let message = (noon.timestamp_millis() - relay_domain::snowflake::EPOCH_MS) << 22;
    db.post(message, "ancient words").await;
    db.post(db.message(1), "fresh words").await;
    db.run(&format!("INSERT INTO message_reactions VALUES (7, {message}, '+1', 1, 5, 99, now())")).await;
    while db.store.index_messages(IndexedWorkspaces::All, db.now + TimeDelta::seconds(200), 100).await.unwrap().more {}
    assert_eq!(db.search("words").await, [db.message(1), message]);
    let (scope, _) = Database::mailbox(ADA);
    let accepted = async || db.store.workspace_metrics(scope, None).await.unwrap().accepted;
    assert_eq!(accepted().await, 2);
    for table in [DailyTable::Messages, DailyTable::MessageSearch] {
        assert_eq!(db.store.drop_partitions_before(table, next).await.unwrap(), 1);
    }
    assert_eq!(db.search("words").await, [db.message(1)]);
    assert_eq!(db.number("SELECT count(*) FROM message_reactions").await, 0);
    assert_eq!(db.number("SELECT sum(channel_messages)::bigint FROM message_stats").await, 1);
    assert_eq!(accepted().await, 2, "a counter does not fall");
}
