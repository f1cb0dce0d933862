//! Endpoints that are unwell are left alone, at nobody else's cost; and calls by way of a proxy.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::push_scene::Scene;
use relay_testkit::{
    client::Api,
    receiver::{Receiver, Reply},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};

/// Pauses are half a minute; a loaded machine is given time.
const IN_THE_END: Duration = Duration::from_secs(120);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test]
async fn after_five_failures_an_endpoint_is_left_alone_and_then_tried_once() -> Result<()> {
    let schedule = json!({ "schedule": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1] });
    let scene = Scene::new("push-breaker", json!({ "ack_mode": "on_2xx", "retry": schedule })).await?;
    let fails = std::iter::repeat_n(Reply::Status(500), 5);
    scene.receiver.script("/hook", fails.chain([Reply::Status(200)]));
    for n in 0..3 {
        scene.send(&format!("message {n}")).await?;
    }
    wait::until("five failures", IN_THE_END, || async { scene.receiver.calls("/hook").len() >= 5 }).await;

    // A neighbour on another endpoint of the same workspace notices nothing.
    let well = Receiver::obliging().await?;
    let delivery = json!({ "url": well.url("/well"), "ack_mode": "on_2xx" });
    let node = json!({ "name": "well", "kind": "http_push", "delivery": delivery });
    scene.key.post("/v1/nodes", node).await?.success()?;
    scene.key.register_agent("cyd").await?;
    scene.key.bind("well", "cyd").await?;
    scene.ann.dm("cyd", "are you there").await?.success()?;
    wait::until("the neighbour's", IN_THE_END, || async { well.calls("/well").len() == 1 }).await;
    let answered = well.calls("/well")[0].at;

    wait::until("the rest", IN_THE_END, || async { scene.receiver.calls("/hook").len() >= 8 }).await;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 1, 1, 1, 1, 2, 3], "in order all the same");
    let calls = scene.receiver.calls("/hook");
    let alone = calls[5].at - calls[4].at;
    assert!(alone > Duration::from_secs(25), "the pauses of the schedule are of a second: {alone:?}");
    assert!(answered < calls[5].at, "the neighbour did not wait for it");
    Ok(())
}

#[tokio::test]
async fn an_endpoint_that_is_overrun_is_given_a_pause() -> Result<()> {
    let schedule = json!({ "schedule": [1, 1, 1, 1] });
    let delivery = json!({ "ack_mode": "on_2xx", "retry": schedule, "ordering": "none" });
    let scene = Scene::new("push-overrun", delivery).await?;
    let overrun = Reply::Full(502, "Retry-After: 8\r\n".to_owned(), String::new());
    scene.receiver.script("/hook", [overrun, Reply::Status(200)]);
    scene.send("one").await?;
    wait::until("the refusal", IN_THE_END, || async { scene.receiver.calls("/hook").len() == 1 }).await;
    let first = scene.until("it to be noted", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string()));
    first.await?;
    // Another message, which nothing is wrong with and no order holds up, waits as well: it is the endpoint that pauses.
    scene.send("two").await?;
    wait::until("both", IN_THE_END, || async { scene.receiver.calls("/hook").len() == 3 }).await;
    let calls = scene.receiver.calls("/hook");
    let pause = calls[1].at - calls[0].at;
    assert!(pause > Duration::from_secs(6), "called again after {pause:?}");
    Ok(())
}

#[tokio::test]
async fn calls_go_by_way_of_the_operators_proxy_if_the_node_says_so() -> Result<()> {
    let proxy = Receiver::obliging().await?;
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_PUSH_PROXY_URL", proxy.url("/proxy"))
        .env("RELAY_PUSH_PROXY_AUTH", "by-us")
        .start()
        .await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "push-proxy").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let url = "https://agents.example.org/hook?of=bob";
    let delivery = json!({ "url": url, "ack_mode": "on_2xx", "use_proxy": true });
    key.post("/v1/nodes", json!({ "name": "hook", "kind": "http_push", "delivery": delivery })).await?.success()?;
    key.bind("hook", "bob").await?;
    let sent = key.as_agent(&ann).dm("bob", "around the corner").await?.success()?;
    wait::until("the proxy's call", IN_THE_END, || async { proxy.calls("/proxy").len() == 1 }).await;
    let call = &proxy.calls("/proxy")[0];
    assert_eq!((call.header("x-forward-to"), call.header("x-proxy-auth")), (url, "by-us"));
    assert_eq!(text(&call.json()["message_id"]), text(&sent["id"]));
    let bob = key.as_agent(&bob);
    wait::until("the ack", IN_THE_END, || async {
        bob.get("/v1/deliveries?status=acked")
            .await
            .is_ok_and(|reply| reply.data().as_array().is_some_and(|r| r.len() == 1))
    })
    .await;
    Ok(())
}
