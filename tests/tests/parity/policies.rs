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

/// Routes that invoke the capacity by its own name.
const BY_CAPABILITY: [&str; 2] = ["/v1/actions/spawn:sh/invoke", "/v1/nodes/worker/actions/spawn:sh/invoke"];

async fn next_frame(policy: &mut NodeSocket) -> Result<Value> {
    policy.expect_where("an invocation", SOON, |frame| frame["type"] == "action.invoke").await
}

/// Posts a message that fires a trigger of the capacity; returns the trigger's id.
async fn fire(place: &CallScene, message: &str) -> Result<String> {
    let trigger = json!({ "pattern": format!("^{message}$"), "action_name": "spawn:sh" });
    let trigger = place.key.post("/v1/triggers", trigger).await?.success()?;
    place.ann().post_message("general", message).await?.success()?;
    Ok(text(&trigger["id"]).to_owned())
}

/// Waits until a trigger reports that it could not invoke its action, and returns the text.
async fn wait_for_error(place: &CallScene, trigger: &str) -> Result<String> {
    wait::until_ok("the error of a trigger", SOON, || async {
        let shown = place.key.get(&format!("/v1/triggers/{trigger}")).await?.success()?;
        anyhow::ensure!(shown["last_error"].is_string(), "{shown}");
        anyhow::Ok(text(&shown["last_error"]).to_owned())
    })
    .await
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
        for path in BY_CAPABILITY {
            let asked = place.ann().post(path, json!({ "input": { "name": "e" } })).await?.success()?;
            let frame = next_frame(&mut policy).await?;
            assert_eq!((&frame["invocation_id"], &frame["action"]), (&asked["invocation_id"], &json!(name)), "{path}");
            let capability = if name == "spawn" { json!("spawn:sh") } else { Value::Null };
            assert_eq!(frame["input"]["capability"], capability, "the frame names the policy: {frame}");
        }
        fire(&place, name).await?;
        assert_eq!(text(&next_frame(&mut policy).await?["input"]["text"]), name);
        policy.close().await?;
        goes_offline(&place, policy_node).await;
        for node in [None, Some("worker")] {
            place.ann().post("/v1/agents/spawn", spawn("e", node)).await?.refused(503, "handler_unavailable")?;
        }
        for path in BY_CAPABILITY {
            place.ann().post(path, json!({ "input": spawn("e", None) })).await?.refused(503, "handler_unavailable")?;
        }
        let trigger = fire(&place, "away").await?;
        wait_for_error(&place, &trigger).await?;
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

/// A policy of its workspace refuses at once by its own name as well, whether its invocations would queue or not.
#[tokio::test]
async fn an_unavailable_policy_queues_nothing() -> Result<()> {
    let place = CallScene::new("policy-queue").await?;
    for (node, provider, queue) in [("first", "rules", true), ("second", "default", false)] {
        let capability = json!([{ "name": "spawn:sh", "kind": "action", "global": true, "queue": queue }]);
        let policy = connect(&place, node, provider, capability).await?;
        policy.close().await?;
        goes_offline(&place, node).await;
        let spawn = json!({ "name": "a", "cli": "sh" });
        place.ann().post("/v1/agents/spawn", spawn.clone()).await?.refused(503, "handler_unavailable")?;
        let path = "/v1/actions/spawn:sh/invoke";
        place.ann().post(path, json!({ "input": spawn })).await?.refused(503, "handler_unavailable")?;
        assert_eq!(place.key.delete(&format!("/v1/nodes/{node}")).await?.status, 204);
    }
    Ok(())
}

/// Actions of named providers that own the name of a capacity on their nodes only, invoked by a trigger.
#[tokio::test]
async fn a_trigger_of_policies_of_nodes_needs_the_right_to_spawn_and_queues_nothing() -> Result<()> {
    let place = CallScene::new("policy-trigger").await?;
    let capability = json!([{ "name": "spawn:sh", "kind": "action", "queue": true }]);
    let mut policies = Vec::new();
    for node in ["first", "second"] {
        policies.push(connect(&place, node, "rules", capability.clone()).await?);
        // One node and several are addressed in different ways.
        place.key.patch("/v1/agents/ann", json!({ "rights": { "spawn": false } })).await?.success()?;
        let refused = fire(&place, &format!("without-right-{node}")).await?;
        assert_eq!(wait_for_error(&place, &refused).await?, "refused: spawn_denied");
        place.key.patch("/v1/agents/ann", json!({ "rights": { "spawn": null } })).await?.success()?;
    }
    let permitted = fire(&place, "with-right").await?;
    let (first, second) = policies.split_at_mut(1);
    let (frame, policy) = tokio::select! {
        frame = next_frame(&mut first[0]) => (frame?, &first[0]),
        frame = next_frame(&mut second[0]) => (frame?, &second[0]),
    };
    assert_eq!(text(&frame["input"]["text"]), "with-right", "nothing was invoked before: {frame}");
    assert_eq!(text(&frame["input"]["trigger_id"]), permitted);
    send_result(policy, text(&frame["invocation_id"]), json!({})).await?;
    for (policy, node) in policies.into_iter().zip(["first", "second"]) {
        policy.close().await?;
        goes_offline(&place, node).await;
    }
    for (node, message) in [("first", "both-away"), ("second", "one-away")] {
        let trigger = fire(&place, message).await?;
        let error = wait_for_error(&place, &trigger).await?;
        assert!(error.starts_with("no handler is available"), "{error}");
        assert_eq!(place.key.delete(&format!("/v1/nodes/{node}")).await?.status, 204);
    }
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
