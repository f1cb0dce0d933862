use std::time::Duration;

use relay_domain::{WorkspaceId, WorkspaceScope};
use relay_store::admin::EraseStep;

use crate::fixture::{Database, WORKSPACE};

const MONTH: Duration = Duration::from_secs(30 * 86400);

async fn next(db: &Database) -> Option<(i64, bool)> {
    let ended = db.store.find_ended_workspace(MONTH).await.unwrap()?;
    Some((ended.scope.workspace_id().get(), ended.expired_at.is_some()))
}

fn scope(workspace: i64) -> WorkspaceScope {
    WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
}

#[tokio::test]
async fn workspaces_that_ended_long_ago_go_and_others_keep_everything() {
    let db = Database::fresh().await;
    db.agent(1, "agent-1").await;
    db.deliveries(1, &[60, 60]).await;
    db.run(
        "INSERT INTO workspaces (workspace_id, name, created_at, deleted_at, expires_at, suspended_at)
         SELECT id, id::text, now() - interval '90 days', now() - deleted, now() - expired, now() - suspended
           FROM (VALUES (7, interval '31 days', NULL::interval, NULL::interval),
                        (8, interval '29 days', interval '60 days', NULL),
                        (9, NULL, interval '32 days', NULL),
                        (10, NULL, interval '40 days', interval '50 days'),
                        (11, NULL, interval '29 days', NULL),
                        (12, NULL, NULL, NULL)) AS t (id, deleted, expired, suspended);
         INSERT INTO agents (workspace_id, agent_id, name, node_id, created_at, last_seen_at)
         SELECT id, 100 + id, 'neighbour', 'n', now(), now() FROM generate_series(8, 12) AS id;
         INSERT INTO tokens (token_hash, kind, workspace_id, created_at) VALUES ('9', 'workspace', 9, now())",
    )
    .await;

    // What expired is deleted first, as of then.
    assert_eq!(next(&db).await, Some((9, true)), "the one that ended first");
    let expired_at = db.store.find_ended_workspace(MONTH).await.unwrap().unwrap().expired_at.unwrap();
    assert_eq!(db.store.delete_workspace(scope(9), expired_at).await.unwrap(), 1, "its token is revoked");
    assert_eq!(db.number("SELECT count(*) FROM tokens").await, 0);
    assert_eq!(next(&db).await, Some((9, false)));
    let some = EraseStep { removed: 1, complete: false };
    assert_eq!(db.store.erase_rows(scope(9), 1000).await.unwrap(), some, "its agent");
    assert_eq!(db.number("SELECT count(*) FROM workspaces WHERE workspace_id = 9").await, 1, "its own row goes last");
    let last = EraseStep { removed: 1, complete: true };
    assert_eq!(db.store.erase_rows(scope(9), 1000).await.unwrap(), last);
    assert!(!db.store.erase_rows(scope(9), 1000).await.unwrap().complete, "once only");

    assert_eq!(next(&db).await, Some((WORKSPACE, false)));
    let mut steps = 0;
    while !db.store.erase_rows(scope(WORKSPACE), 1).await.unwrap().complete {
        steps += 1;
        assert!(steps < 100, "it comes to no end");
    }
    assert!(steps > 3, "a step is bounded, {steps} were enough");
    assert!(db.store.count_rows_left(scope(WORKSPACE)).await.unwrap().iter().all(|table| table.rows == 0));
    assert_eq!(next(&db).await, None);
    assert_eq!(db.number("SELECT sum(workspace_id)::bigint FROM workspaces").await, 8 + 10 + 11 + 12);
    assert_eq!(db.number("SELECT sum(workspace_id)::bigint FROM agents").await, 8 + 10 + 11 + 12);
}

#[tokio::test]
async fn a_living_workspace_is_never_erased_to_the_end() {
    let db = Database::fresh().await;
    db.run("INSERT INTO workspaces (workspace_id, name, created_at) VALUES (12, 'alive', now())").await;
    assert_eq!(db.store.erase_own_row(scope(12)).await.unwrap(), 0);
    assert_eq!(db.number("SELECT count(*) FROM workspaces").await, 1);
}

#[tokio::test]
async fn files_and_signatures_are_waited_for() {
    let db = Database::fresh().await;
    db.run(
        "INSERT INTO workspaces (workspace_id, name, created_at, deleted_at)
         SELECT id, id::text, now() - interval '90 days', now() - interval '40 days' FROM generate_series(8, 9) AS id;
         INSERT INTO file_objects (workspace_id, file_id, object_id, remove_after) VALUES (8, 1, 1, now());
         INSERT INTO observer_tokens (workspace_id, token_id, name, scopes, signed_until, created_at)
         VALUES (9, 1, 'watcher', '{stream:read}', 'infinity', now() - interval '90 days');
         INSERT INTO signing_keys (kid, public_key, created_at) VALUES ('old', '', now() - interval '80 days'),
                                                                       ('new', '', now() - interval '35 days')",
    )
    .await;
    assert_eq!(next(&db).await, None);
    // Every key that could have signed for it is retired.
    db.run("UPDATE signing_keys SET retired_at = now() WHERE kid = 'old'").await;
    assert_eq!(next(&db).await, Some((9, false)));
    assert!(!db.store.erase_rows(scope(9), 1000).await.unwrap().complete);
    assert!(db.store.erase_rows(scope(9), 1000).await.unwrap().complete);
    db.run("DELETE FROM file_objects").await;
    assert_eq!(next(&db).await, Some((8, false)));
}
