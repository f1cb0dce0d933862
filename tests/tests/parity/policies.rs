//! Policies: actions of providers that are invoked instead of a native capacity.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::{
    calls::{CallScene, SOON, next_invocation, register, send_result, socket},
    room::text,
};
use relay_testkit::{client::NodeSocket, wait};
use serde_json::{Value, json};

async fn connect(place: &CallScene, name: &str, provider: &str, capabilities: Value) -> Result<NodeSocket> {
    let node = place.node(name).await?;
    let mut socket = socket(&node, 1).await?;
    socket.request(register(&node, provider, &capabilities, 4)).await?;
    Ok(socket)
}

async fn goes_offline(place: &CallScene, node: &str) {
    wait::until("the node to be offline", SOON, || async {
        place.key.get(&format!("/v1/nodes/{node}")).await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
}

async fn gets_nothing(socket: &mut NodeSocket) {
    let invoked = socket
        .expect_where("an invocation", Duration::from_millis(500), |frame| frame["type"] == "action.invoke")
        .await;
    assert!(invoked.is_err(), "{invoked:?}");
}

#[tokio::test]
async fn a_policy_for_spawns_is_never_bypassed() -> Result<()> {
    let place = CallScene::new("policy-spawn").await?;
    let mut worker = connect(&place, "worker", "broker", json!([{ "name": "spawn:sh", "kind": "capacity" }])).await?;
    let spawn = |name: &str, node: Option<&str>| json!({ "name": name, "cli": "sh", "target_node": node });
    let native = place.ann().post("/v1/agents/spawn", spawn("a", None)).await?.success()?;
    assert_eq!(next_invocation(&mut worker, SOON).await?, text(&native["invocation_id"]));
    // Otherwise it would be sent again.
    send_result(&worker, text(&native["invocation_id"]), json!({ "spawned": true })).await?;
    for (policy_node, name) in [("guard", "spawn:sh"), ("warden", "spawn")] {
        let capability = json!([{ "name": name, "kind": "action", "global": true }]);
        let mut policy = connect(&place, policy_node, "rules", capability).await?;
        for (agent, node) in [("b", None), ("c", Some("worker"))] {
            let asked = place.ann().post("/v1/agents/spawn", spawn(agent, node)).await?.success()?;
            assert_eq!(text(&asked["action_name"]), "spawn");
            let frame = policy.expect("action.invoke").await?;
            assert_eq!((&frame["invocation_id"], &frame["action"]), (&asked["invocation_id"], &json!(name)));
            assert_eq!((text(&frame["input"]["name"]), text(&frame["input"]["cli"])), (agent, "sh"));
            send_result(&policy, text(&asked["invocation_id"]), json!({ "refused": true })).await?;
            place.wait_for_outcome("spawn", text(&asked["invocation_id"])).await?;
        }
        let by_name = json!({ "input": spawn("d", None) });
        place.ann().post("/v1/actions/spawn/invoke", by_name).await?.success()?;
        policy.expect("action.invoke").await?;
        policy.close().await?;
        goes_offline(&place, policy_node).await;
        for node in [None, Some("worker")] {
            place.ann().post("/v1/agents/spawn", spawn("e", node)).await?.refused(503, "handler_unavailable")?;
        }
        gets_nothing(&mut worker).await;
        assert_eq!(place.key.delete(&format!("/v1/nodes/{policy_node}")).await?.status, 204);
    }
    let native = place.ann().post("/v1/agents/spawn", spawn("f", None)).await?.success()?;
    assert_eq!(next_invocation(&mut worker, SOON).await?, text(&native["invocation_id"]));
    Ok(())
}

/// A provider beside the broker guards the capacity of their node only, and calls it itself.
#[tokio::test]
async fn a_policy_of_one_node_guards_its_capacity() -> Result<()> {
    let place = CallScene::new("policy-node").await?;
    let node = place.node("box").await?;
    let mut broker = socket(&node, 0).await?;
    broker.request(register(&node, "broker", &json!([{ "name": "spawn:sh", "kind": "capacity" }]), 4)).await?;
    let mut policy = socket(&node, 1).await?;
    policy.request(register(&node, "rules", &json!([{ "name": "spawn:sh", "kind": "action" }]), 0)).await?;
    let spawn = json!({ "name": "a", "cli": "sh" });
    for body in [spawn.clone(), json!({ "name": "a", "cli": "sh", "target_node": "box" })] {
        let asked = place.ann().post("/v1/agents/spawn", body).await?.success()?;
        assert_eq!(next_invocation(&mut policy, SOON).await?, text(&asked["invocation_id"]));
    }
    // Invoked by the name of the capacity as well.
    let asked = place.invoke("spawn:sh", json!({ "input": spawn })).await?;
    assert_eq!(next_invocation(&mut policy, SOON).await?, asked);
    gets_nothing(&mut broker).await;
    let own = policy.request(json!({ "v": 1, "type": "node.spawn", "input": spawn })).await?;
    assert_eq!(next_invocation(&mut broker, SOON).await?, text(&own["invocation_id"]));
    policy.close().await?;
    wait::until("the policy to be unavailable", SOON, || async {
        let asked = place.ann().post("/v1/agents/spawn", spawn.clone()).await;
        asked.is_ok_and(|reply| reply.code() == "handler_unavailable")
    })
    .await;
    gets_nothing(&mut broker).await;
    Ok(())
}

#[tokio::test]
async fn a_policy_for_releases_is_never_bypassed() -> Result<()> {
    let place = CallScene::new("policy-release").await?;
    let mut broker = connect(&place, "box", "broker", json!([{ "name": "release", "kind": "capacity" }])).await?;
    let born = broker.register_agent("writer").await?;
    broker.inventory(&[(text(&born["agent_id"]), "writer")]).await?;
    let capability = json!([{ "name": "release", "kind": "action", "global": true }]);
    let mut policy = connect(&place, "guard", "rules", capability).await?;
    let release = json!({ "name": "writer", "reason": "done" });
    let asked = place.key.post("/v1/agents/release", release.clone()).await?.success()?;
    let frame = policy.expect("action.invoke").await?;
    assert_eq!((&frame["invocation_id"], &frame["action"]), (&asked["invocation_id"], &json!("release")));
    assert_eq!(text(&frame["input"]["name"]), "writer");
    // The hash stays in the input of a user's action of this name.
    send_result(&policy, text(&asked["invocation_id"]), json!({ "refused": true })).await?;
    let hash = relay_acceptance::spawning::token_hash(text(&born["token"]));
    let with_hash = json!({ "name": "writer", "expected_token_hash": hash });
    let asked = place.key.post("/v1/agents/release", with_hash).await?.success()?;
    let frame = policy.expect_where("a release", SOON, |frame| frame["type"] == "action.invoke").await?;
    assert_eq!(
        (&frame["invocation_id"], &frame["input"]["expected_token_hash"]),
        (&asked["invocation_id"], &json!(hash))
    );
    let wrong = json!({ "name": "writer", "expected_token_hash": "0".repeat(64) });
    place.key.post("/v1/agents/release", wrong).await?.refused(409, "agent_release_generation_conflict")?;
    policy.close().await?;
    goes_offline(&place, "guard").await;
    for deletes in [false, true] {
        let release = json!({ "name": "writer", "delete_agent": deletes });
        place.key.post("/v1/agents/release", release).await?.refused(503, "handler_unavailable")?;
    }
    gets_nothing(&mut broker).await;
    place.key.get("/v1/agents/writer").await?.success()?;
    Ok(())
}
