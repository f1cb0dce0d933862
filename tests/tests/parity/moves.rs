//! Invocations of a node whose liveness has expired.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::calls::{CallScene, SOON, next_invocation, register, send_result, socket};
use relay_testkit::{client::NodeToken, shared, wait};
use serde_json::json;
use sqlx::PgPool;

/// Time within which workers notice an expired node and move its invocations, and some for a loaded machine.
const MOVED_WITHIN: Duration = Duration::from_secs(90);

/// Makes a node's heartbeats stop 46 s ago, and waits until the worker has noticed.
async fn expire(place: &CallScene, node: &NodeToken) -> Result<()> {
    let pool = PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE providers SET last_heartbeat_at = now() - interval '46 seconds' WHERE node_id = $1")
        .bind(&node.node_id)
        .execute(&pool)
        .await?;
    wait::until("its liveness to expire", MOVED_WITHIN, || async {
        place.key.get(&format!("/v1/nodes/{}", node.name)).await.is_ok_and(|reply| reply.data()["live"] == false)
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn an_invocation_of_an_expired_node_moves_at_once_even_if_it_was_addressed() -> Result<()> {
    let place = CallScene::new("moves").await?;
    let (first, second) = (place.node("first").await?, place.node("second").await?);
    let capabilities = json!([{ "name": "build", "kind": "action" }]);
    let mut former = socket(&first, 0).await?;
    former.request(register(&first, "tools", &capabilities, 0)).await?;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let path = "/v1/nodes/first/actions/build/invoke";
        let ack = place.ann().post(path, json!({})).await?.success()?;
        ids.push(ack["invocation_id"].as_str().unwrap_or_default().to_owned());
    }
    for id in &ids {
        assert_eq!(&next_invocation(&mut former, SOON).await?, id);
    }
    // The first has begun with one of them.
    former.request(json!({ "v": 1, "type": "action.accept", "invocation_id": ids[0] })).await?;
    let mut host = socket(&second, 1).await?;
    host.request(register(&second, "tools", &capabilities, 0)).await?;
    expire(&place, &first).await?;
    assert_eq!(next_invocation(&mut host, MOVED_WITHIN).await?, ids[1]);
    // A late result of the former node, over its old connection or a new one.
    let _ = send_result(&former, &ids[1], json!({ "late": true })).await;
    let mut back = socket(&first, 1).await?;
    back.request(register(&first, "tools", &capabilities, 0)).await?;
    send_result(&back, &ids[1], json!({ "late": true })).await?;
    back.request(json!({ "v": 1, "type": "inventory.sync", "agents": [] })).await?;
    assert_eq!(place.invocation("build", &ids[1]).await?["status"], "dispatched");
    send_result(&host, &ids[1], json!({ "built": true })).await?;
    let done = place.wait_for_outcome("build", &ids[1]).await?;
    assert_eq!((&done["output"], &done["dispatched_node_id"]), (&json!({ "built": true }), &json!(second.node_id)));
    // The accepted one waited for its node.
    assert_eq!(next_invocation(&mut back, MOVED_WITHIN).await?, ids[0]);
    send_result(&back, &ids[0], json!({ "built": 1 })).await?;
    assert_eq!(place.wait_for_outcome("build", &ids[0]).await?["output"], json!({ "built": 1 }));
    Ok(())
}

/// It waits for a node that is offline already, so it was never placed.
#[tokio::test]
async fn an_invocation_that_waits_for_an_expired_node_moves() -> Result<()> {
    let place = CallScene::new("moves-waiting").await?;
    let (first, second) = (place.node("first").await?, place.node("second").await?);
    let capabilities = json!([{ "name": "spawn:sh", "kind": "capacity" }]);
    let mut former = socket(&first, 0).await?;
    former.request(register(&first, "broker", &capabilities, 4)).await?;
    former.close().await?;
    expire(&place, &first).await?;
    let spawn = json!({ "name": "writer", "cli": "sh", "target_node": "first" });
    let asked = place.ann().post("/v1/agents/spawn", spawn).await?.success()?;
    assert_eq!((&asked["status"], &asked["dispatched_node_id"]), (&json!("pending"), &json!(null)));
    let mut host = socket(&second, 1).await?;
    host.request(register(&second, "broker", &capabilities, 4)).await?;
    assert_eq!(next_invocation(&mut host, MOVED_WITHIN).await?, asked["invocation_id"].as_str().unwrap_or_default());
    Ok(())
}

#[tokio::test]
async fn an_invocation_that_moved_fails_with_its_deleted_action() -> Result<()> {
    let place = CallScene::new("moves-deleted").await?;
    let (first, second) = (place.node("first").await?, place.node("second").await?);
    let capabilities = json!([{ "name": "build", "kind": "action" }]);
    let mut owner = socket(&first, 0).await?;
    owner.request(register(&first, "default", &capabilities, 0)).await?;
    let id = place.invoke("build", json!({})).await?;
    assert_eq!(next_invocation(&mut owner, SOON).await?, id);
    let mut host = socket(&second, 1).await?;
    host.request(register(&second, "tools", &capabilities, 0)).await?;
    expire(&place, &first).await?;
    assert_eq!(next_invocation(&mut host, MOVED_WITHIN).await?, id);
    assert_eq!(place.key.delete("/v1/actions/build").await?.status, 204);
    let failed = place.wait_for_outcome("build", &id).await?;
    assert_eq!((&failed["status"], &failed["error"]), (&json!("failed"), &json!("action_deleted")), "{failed}");
    Ok(())
}
