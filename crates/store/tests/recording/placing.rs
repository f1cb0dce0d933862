//! Whose invocations wait for whom.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, WorkspaceId, WorkspaceScope, actions::InvocationStatus};
use relay_store::{
    IdempotencyKey,
    actions::{
        invoke::InvokeOutcome,
        new_invocation::{Handler, Invoker, NewInvocation},
    },
};
use relay_testkit::wait;
use serde_json::json;

use crate::fixture::{Database, SENDER, WORKSPACE};

const OTHER: i64 = WORKSPACE + 1;

fn invocation(workspace: i64, id: i64, key: Option<u8>, at: DateTime<Utc>) -> NewInvocation {
    NewInvocation {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)),
        id: InvocationId::new(id),
        action_name: "count".to_owned(),
        handler: Handler::Agent(AgentId::new(SENDER)),
        caller: Invoker { agent_id: None, name: "workspace".to_owned() },
        input: json!({}),
        durable: false,
        key: key.map(|byte| IdempotencyKey { hash: [byte; 32], fingerprint: [0; 32] }),
        entropy: 0,
        at,
    }
}

fn words(outcomes: &[InvokeOutcome]) -> Vec<&'static str> {
    let word = |outcome: &InvokeOutcome| {
        if matches!(outcome, InvokeOutcome::Created(InvocationStatus::Invoked, _)) {
            "made"
        } else {
            assert!(matches!(outcome, InvokeOutcome::Busy), "{outcome:?}");
            "busy"
        }
    };
    outcomes.iter().map(word).collect()
}

#[tokio::test]
async fn no_workspace_waits_for_placements_of_another() {
    let db = Database::fresh().await;
    let mut placing = db.pool.begin().await.unwrap();
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('placement', $1))")
        .bind(OTHER)
        .execute(&mut *placing)
        .await
        .unwrap();
    let of = |workspace: i64, id: i64, key: Option<u8>| invocation(workspace, id, key, db.now);
    let mixed = [of(WORKSPACE, 1, None), of(OTHER, 2, Some(2)), of(WORKSPACE, 3, Some(3))];
    let (outcomes, _) = db.store.invoke(&mixed).await.unwrap();
    assert_eq!(words(&outcomes), ["made", "busy", "made"]);

    // Alone it waits for its turn, and nothing of the earlier attempt is in its way.
    let alone = [of(OTHER, 2, Some(2))];
    let frees = async {
        wait::until("it to wait", Duration::from_secs(30), || async {
            let waiting = "SELECT count(*) FROM pg_locks
                            WHERE locktype = 'advisory' AND NOT granted
                              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            db.number(waiting).await == 1
        })
        .await;
        placing.rollback().await.unwrap();
    };
    let (made, ()) = tokio::join!(db.store.invoke(&alone), frees);
    assert_eq!(words(&made.unwrap().0), ["made"]);
    let free = [of(WORKSPACE, 4, None), of(OTHER, 5, None)];
    assert_eq!(words(&db.store.invoke(&free).await.unwrap().0), ["made", "made"]);
    assert_eq!(db.number("SELECT count(*) FROM invocations").await, 5);
}
