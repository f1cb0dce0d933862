//! Claims of trigger scans: workspaces and families take turns.

use relay_store::actions::triggers::TriggerScan;

use crate::fixture::Database;

/// Workspaces 1 to 5 of one family and 6 of another, each with a hundred events that no trigger has seen.
async fn six_workspaces() -> Database {
    let database = Database::fresh().await;
    database
        .run(
            "INSERT INTO workspaces (workspace_id, name, created_at, created_by)
             SELECT n, 'w' || n, now(), CASE WHEN n BETWEEN 2 AND 5 THEN 1 END FROM generate_series(1, 6) AS n;
             INSERT INTO event_heads (workspace_id, next_seq) SELECT n, 101 FROM generate_series(1, 6) AS n;
             INSERT INTO trigger_progress (workspace_id, reached_seq) SELECT n, 0 FROM generate_series(1, 6) AS n",
        )
        .await;
    database
}

async fn claim(database: &Database, limit: i64, of_family: i64) -> Vec<TriggerScan> {
    let mut claimed = database.store.claim_trigger_scans(limit, of_family, 10).await.unwrap();
    claimed.sort_unstable_by_key(|part| part.scope.workspace_id());
    claimed
}

fn ids(claimed: &[TriggerScan]) -> Vec<i64> {
    claimed.iter().map(|part| part.scope.workspace_id().get()).collect()
}

#[tokio::test]
async fn workspaces_that_were_scanned_wait_for_the_others() {
    let database = six_workspaces().await;
    let first = claim(&database, 4, 6).await;
    assert_eq!(ids(&first), [1, 2, 3, 4]);
    for part in &first {
        database.store.finish_trigger_scan(part, 1).await.unwrap();
    }
    let next = claim(&database, 2, 6).await;
    assert_eq!(ids(&next), [5, 6], "those with a backlog are not scanned again before the others");
    for part in &next {
        database.store.finish_trigger_scan(part, 1).await.unwrap();
    }
    assert_eq!(ids(&claim(&database, 6, 6).await), [1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn a_family_leaves_places_to_others() {
    let database = six_workspaces().await;
    assert_eq!(ids(&claim(&database, 4, 2).await), [1, 2, 6]);
}
