//! Mailboxes of http_push: their lag, their sweep, and turns of families of workspaces. `mailbox` makes a due one.

mod attempts;
mod recovery;

use std::time::Duration;

use relay_domain::{
    NodeId, PushWorkerId, WorkspaceId, WorkspaceScope,
    push::{
        AckMode, PushOrdering,
        settings::{EndpointAuth, EndpointSettings},
    },
};
use serde_json::json;

use crate::fixture::{Database, WORKSPACE};

pub(crate) use attempts::{no_events, push_attempt};

const NODE: &str = "node_hook";

/// Adds a mailbox at an http_push node that has been due for `due_for` seconds.
async fn mailbox(db: &Database, agent: i64, due_for: i64) {
    db.agent(agent, &format!("agent-{agent}")).await;
    db.run(&format!(
        "UPDATE agents SET node_id = '{NODE}' WHERE agent_id = {agent};
         INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, due_at)
         VALUES ({WORKSPACE}, {agent}, '{NODE}', now() - interval '{due_for} seconds')"
    ))
    .await;
}

#[tokio::test]
async fn the_push_lag_is_the_longest_wait_of_a_due_mailbox() {
    let db = Database::fresh().await;
    db.run(&format!("INSERT INTO workspaces (workspace_id, name, created_at) VALUES ({WORKSPACE}, 'w', now())")).await;
    let minutes = async || Duration::from_secs_f64(db.store.push_lag().await.unwrap()).as_secs() / 60;
    assert_eq!(minutes().await, 0, "nothing is due");
    for (agent, due_for) in [(1, -3600), (2, 600), (3, 1200), (4, 1800), (5, 60)] {
        mailbox(&db, agent, due_for).await;
    }
    assert_eq!(minutes().await, 30);
    db.run("UPDATE push_mailboxes SET owner = 1 WHERE agent_id = 4").await;
    assert_eq!(minutes().await, 20, "a leased mailbox is not late");
    db.run("UPDATE push_mailboxes SET disabled_at = now(), disabled_reason = 'gone' WHERE agent_id = 3").await;
    assert_eq!(minutes().await, 10, "a disabled mailbox is not late");
    db.run("UPDATE workspaces SET suspended_at = now()").await;
    assert_eq!(minutes().await, 0, "a mailbox of a suspended workspace is not late");
    db.run("UPDATE workspaces SET suspended_at = NULL").await;
    let worker = PushWorkerId::new(7);
    db.store.renew_push_worker(worker, Duration::from_secs(60)).await.unwrap();
    assert_eq!(db.store.claim_due_mailboxes(worker, 10).await.unwrap().len(), 2);
    assert_eq!(minutes().await, 0, "all due mailboxes are leased");
}

#[tokio::test]
async fn the_sweep_removes_mailboxes_of_agents_that_moved_or_were_deleted_even_if_disabled() {
    let db = Database::fresh().await;
    for agent in 1..=3 {
        mailbox(&db, agent, 60).await;
    }
    db.run(
        "UPDATE push_mailboxes SET disabled_at = now(), disabled_reason = 'gone', due_at = NULL;
         UPDATE mailbox_heads SET next_seq = 5;
         UPDATE agents SET node_id = 'node_elsewhere' WHERE agent_id = 1;
         UPDATE agents SET deleted_at = now() WHERE agent_id = 2",
    )
    .await;
    db.store.sweep_push_mailboxes().await.unwrap();
    let left = "SELECT agent_id FROM push_mailboxes WHERE due_at IS NULL AND disabled_at IS NOT NULL";
    assert_eq!(db.number("SELECT count(*) FROM push_mailboxes").await, 1);
    assert_eq!(db.number(left).await, 3, "the mailbox of the present agent stays, disabled");
}

#[tokio::test]
async fn families_take_turns_with_due_mailboxes() {
    let db = Database::fresh().await;
    // Workspaces 1 to 4 of one family have been due longest, 5 is another tenant. Each has two mailboxes.
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, created_at, created_by)
         SELECT n, 'w' || n, now(), CASE WHEN n BETWEEN 2 AND 4 THEN 1 END FROM generate_series(1, 5) AS n;
         INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
         SELECT w, a, 'agent-' || a, '{NODE}', now(), now() FROM generate_series(1, 5) AS w, generate_series(1, 2) AS a;
         INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, due_at)
         SELECT w, a, '{NODE}', now() - make_interval(secs => 100 - w)
           FROM generate_series(1, 5) AS w, generate_series(1, 2) AS a"
    ))
    .await;
    let worker = PushWorkerId::new(1);
    db.store.renew_push_worker(worker, Duration::from_secs(60)).await.unwrap();
    let claimed = db.store.claim_due_mailboxes(worker, 4).await.unwrap();
    let of_other = claimed.iter().filter(|mailbox| mailbox.scope.workspace_id().get() == 5).count();
    assert_eq!((claimed.len(), of_other), (4, 2));
}

#[tokio::test]
async fn calls_to_an_endpoint_of_a_child_workspace_count_for_its_root() {
    let db = Database::fresh().await;
    let settings = EndpointSettings {
        url: "https://127.0.0.1:9".to_owned(),
        ack_mode: AckMode::Manual,
        auth: EndpointAuth::None,
        use_proxy: false,
        ordering: PushOrdering::Seq,
        retry: None,
    };
    db.run(&format!(
        "INSERT INTO workspaces (workspace_id, name, created_at, created_by)
         VALUES (1, 'root', now(), NULL), (2, 'child', now(), 1), (3, 'other', now(), NULL);
         INSERT INTO nodes (workspace_id, node_id, name, kind, created_at, delivery)
         SELECT n, '{NODE}', 'hook', 'http_push', now(), '{}' FROM generate_series(1, 3) AS n",
        json!(settings)
    ))
    .await;
    for (workspace, root) in [(1, 1), (2, 1), (3, 3)] {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
        let endpoint = db.store.push_endpoint(scope, &NodeId::new(NODE)).await.unwrap().unwrap();
        assert_eq!(endpoint.family.root().get(), root, "{workspace}");
    }
}
