//! The change feed: every commit leaves a record, and no reader passes one whose transaction was still open.

use std::time::Duration;

use relay_domain::{NodeId, ProviderName};
use relay_store::mailboxes::changes::{FeedPosition, FeedRead, MailboxChange};
use sqlx::{AssertSqlSafe, Executor as _};

use crate::fixture::{Database, WORKSPACE};

impl Database {
    /// Changes since `position`, which moves on.
    async fn changes(&self, position: &mut FeedPosition) -> Vec<MailboxChange> {
        match self.store.mailbox_changes_since(position).await.unwrap() {
            FeedRead::Changes { changes, position: next } => {
                *position = next;
                changes
            }
            FeedRead::Everything { .. } => panic!("the feed has few records and one epoch"),
        }
    }

    async fn raise_head(&self, agent: i64) {
        self.run(&raise_head(agent)).await;
    }
}

fn raise_head(agent: i64) -> String {
    format!("UPDATE mailbox_heads SET next_seq = next_seq + 1 WHERE agent_id = {agent}")
}

fn written(agent: i64, next_seq: i64) -> MailboxChange {
    let (scope, agent_id) = Database::mailbox(agent);
    MailboxChange::Written(vec![(scope, agent_id, next_seq)])
}

#[tokio::test]
async fn a_record_of_an_open_transaction_is_read_when_it_commits() {
    let db = Database::fresh().await;
    for agent in 1..=3 {
        db.agent(agent, &format!("agent-{agent}")).await;
    }
    let mut position = db.store.feed_position().await.unwrap();
    assert_eq!(db.changes(&mut position).await, [], "nothing has changed since");

    let mut held = db.pool.begin().await.unwrap();
    held.execute(AssertSqlSafe(raise_head(1))).await.unwrap();
    // Other transactions commit meanwhile, with later numbers. None waits, and each is read once.
    for (agent, next_seq) in [(2, 2), (3, 2), (2, 3)] {
        db.raise_head(agent).await;
        assert_eq!(db.changes(&mut position).await, [written(agent, next_seq)]);
    }
    // An hour later by the clock of Postgres, and with its numbers far ahead.
    db.advance(3600).await;
    for _ in 0..100 {
        db.raise_head(3).await;
    }
    assert_eq!(db.changes(&mut position).await.len(), 100);
    assert_eq!(db.changes(&mut position).await, []);

    held.commit().await.unwrap();
    assert_eq!(db.changes(&mut position).await, [written(1, 2)]);
    assert_eq!(db.changes(&mut position).await, []);
}

#[tokio::test]
async fn a_transaction_that_is_rolled_back_leaves_nothing() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let mut position = db.store.feed_position().await.unwrap();
    let mut held = db.pool.begin().await.unwrap();
    held.execute(AssertSqlSafe(raise_head(1))).await.unwrap();
    assert_eq!(db.changes(&mut position).await, []);
    held.rollback().await.unwrap();
    assert_eq!(db.changes(&mut position).await, []);
}

#[tokio::test]
async fn moves_of_agents_and_providers_leave_records() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let (scope, agent_id) = Database::mailbox(1);
    let (node_id, provider) = (NodeId::new("node_broker"), ProviderName::new("p"));
    let mut position = db.store.feed_position().await.unwrap();

    db.run("UPDATE agents SET node_id = 'node_broker', provider = 'p' WHERE agent_id = 1").await;
    let came = MailboxChange::Moved { scope, agent_id, node_id: node_id.clone(), provider: Some(provider.clone()) };
    assert_eq!(db.changes(&mut position).await, std::slice::from_ref(&came));
    db.run("UPDATE agents SET node_id = 'node_broker', provider = 'p', last_seen_at = now() WHERE agent_id = 1").await;
    db.run("UPDATE agents SET last_seen_at = now(), status = 'idle' WHERE agent_id = 1").await;
    assert_eq!(db.changes(&mut position).await, [], "the agent stayed where it was");
    db.agent(2, "bob").await;
    assert_eq!(db.changes(&mut position).await, [], "nothing serves the own node of a new agent yet");
    db.run(&format!(
        "INSERT INTO agents (workspace_id, agent_id, name, node_id, provider, created_at, last_seen_at)
         VALUES ({WORKSPACE}, 3, 'eve', 'node_broker', 'p', now(), now())"
    ))
    .await;
    let eve = Database::mailbox(3).1;
    let new = MailboxChange::Moved { scope, agent_id: eve, node_id: node_id.clone(), provider: Some(provider.clone()) };
    assert_eq!(db.changes(&mut position).await, [new]);

    for node in ["node_broker", "node_direct_1"] {
        db.run(&format!(
            "INSERT INTO providers (workspace_id, node_id, provider, instance_id, epoch, registered_at, last_heartbeat_at)
             VALUES ({WORKSPACE}, '{node}', 'p', 'i', 1, now(), now())"
        ))
        .await;
    }
    let changed = MailboxChange::ProviderChanged { scope, node_id, provider };
    assert_eq!(db.changes(&mut position).await, std::slice::from_ref(&changed));
    db.run("UPDATE providers SET gateway_id = 4, epoch = 2").await;
    assert_eq!(db.changes(&mut position).await, [changed]);
    db.run("UPDATE providers SET last_heartbeat_at = now(), load = 0.5").await;
    assert_eq!(db.changes(&mut position).await, []);
}

#[tokio::test]
async fn a_reader_that_cannot_go_on_compares_everything() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    let position = db.store.feed_position().await.unwrap();
    db.run("UPDATE recovery_state SET epoch = epoch + 1").await;
    let read = db.store.mailbox_changes_since(&position).await.unwrap();
    assert!(matches!(read, FeedRead::Everything { .. }), "after a recovery: {read:?}");

    let position = db.store.feed_position().await.unwrap();
    db.run("INSERT INTO mailbox_changes (workspaces, agents) SELECT '{7}', '{1}' FROM generate_series(1, 10001)").await;
    let read = db.store.mailbox_changes_since(&position).await.unwrap();
    let FeedRead::Everything { mut position } = read else { panic!("too many changes: {read:?}") };
    db.raise_head(1).await;
    assert_eq!(db.changes(&mut position).await, [written(1, 2)]);
}

#[tokio::test]
async fn records_are_pruned_by_age() {
    let db = Database::fresh().await;
    db.agent(1, "ada").await;
    for _ in 0..3 {
        db.raise_head(1).await;
    }
    let age = Duration::from_secs(600);
    assert_eq!(db.store.prune_changes(age, 2).await.unwrap(), 0);
    db.advance(601).await;
    db.raise_head(1).await;
    assert_eq!(db.store.prune_changes(age, 2).await.unwrap(), 2);
    assert_eq!(db.store.prune_changes(age, 2).await.unwrap(), 1);
    assert_eq!(db.store.prune_changes(age, 2).await.unwrap(), 0, "the last one is young");
}
