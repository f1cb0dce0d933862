//! Circuit breakers of failing endpoints, isolation of other endpoints, and calls through a proxy.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future::try_join_all;
use relay_acceptance::push_scene::Scene;
use relay_testkit::{
    client::Api,
    receiver::{Receiver, Reply},
    shared,
    stack::Stack,
    wait,
};
use serde_json::{Value, json};

/// Breakers stay open for half a minute; the limit allows for a loaded machine.
const EVENTUALLY: Duration = Duration::from_secs(120);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test]
async fn the_breaker_opens_after_five_failures_and_then_lets_one_attempt_through() -> Result<()> {
    let schedule = json!({ "schedule": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1] });
    let scene = Scene::new("push-breaker", json!({ "ack_mode": "on_2xx", "retry": schedule })).await?;
    let fails = std::iter::repeat_n(Reply::Status(500), 5);
    // The single attempt fails, but it shows that the endpoint is reachable.
    scene.receiver.script("/hook", fails.chain([Reply::Status(404), Reply::Status(200)]));
    for n in 0..3 {
        scene.send(&format!("message {n}")).await?;
    }
    wait::until("five failures", EVENTUALLY, || async { scene.receiver.calls("/hook").len() >= 5 }).await;

    // Another endpoint of the same workspace is unaffected.
    let well = Receiver::accepting_all().await?;
    let delivery = json!({ "url": well.url("/well"), "ack_mode": "on_2xx" });
    let node = json!({ "name": "well", "kind": "http_push", "delivery": delivery });
    scene.key.post("/v1/nodes", node).await?.success()?;
    scene.key.register_agent("cyd").await?;
    scene.key.bind("well", "cyd").await?;
    scene.ann.dm("cyd", "are you there").await?.success()?;
    wait::until("the neighbour's", EVENTUALLY, || async { well.calls("/well").len() == 1 }).await;
    let answered = well.calls("/well")[0].at;

    wait::until("the rest", EVENTUALLY, || async { scene.receiver.calls("/hook").len() >= 9 }).await;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 1, 1, 1, 1, 1, 2, 3], "in order all the same");
    let calls = scene.receiver.calls("/hook");
    let alone = calls[5].at - calls[4].at;
    assert!(alone > Duration::from_secs(25), "the pauses of the schedule are of a second: {alone:?}");
    assert!(answered < calls[5].at, "the neighbour did not wait for it");
    let back = calls[6].at - calls[5].at;
    assert!(back < Duration::from_secs(12), "left alone for no longer once it answers: {back:?}");
    Ok(())
}

#[tokio::test]
async fn a_throttling_endpoint_is_given_a_pause() -> Result<()> {
    let schedule = json!({ "schedule": [1, 1, 1, 1] });
    let delivery = json!({ "ack_mode": "on_2xx", "retry": schedule, "ordering": "none" });
    let scene = Scene::new("push-overrun", delivery).await?;
    let overrun = Reply::Full(502, "Retry-After: 8\r\n".to_owned(), String::new());
    scene.receiver.script("/hook", [overrun, Reply::Status(200)]);
    scene.send("one").await?;
    wait::until("the refusal", EVENTUALLY, || async { scene.receiver.calls("/hook").len() == 1 }).await;
    let first = scene
        .wait_for_deliveries("it to be noted", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string()));
    first.await?;
    // Another message without any ordering constraint waits too, because the endpoint is paused.
    scene.send("two").await?;
    wait::until("both", EVENTUALLY, || async { scene.receiver.calls("/hook").len() == 3 }).await;
    let calls = scene.receiver.calls("/hook");
    let pause = calls[1].at - calls[0].at;
    assert!(pause > Duration::from_secs(6), "called again after {pause:?}");
    Ok(())
}

#[tokio::test]
async fn an_endpoint_that_throttles_events_is_given_a_pause() -> Result<()> {
    let scene = Scene::new("push-overrun-events", json!({ "ack_mode": "on_2xx" })).await?;
    let busy = Receiver::start(|_, call| {
        if call.is_delivery() {
            return Reply::Status(200);
        }
        Reply::Full(429, "Retry-After: 8\r\n".to_owned(), String::new())
    })
    .await?;
    scene.neighbour("cyd", &busy).await?;
    let sent = scene.ann.dm("cyd", "one").await?.success()?;
    wait::until("the delivery", EVENTUALLY, || async { busy.calls("/hook").len() == 1 }).await;
    let path = format!("/v1/messages/{}/reactions", text(&sent["id"]));
    // The worker learns of a moved agent later: earlier events are dropped.
    for nth in 0.. {
        assert!(nth < 20, "no event comes");
        scene.ann.post(&path, json!({ "emoji": format!("nth-{nth}") })).await?.success()?;
        let heard = wait::until("the event", EVENTUALLY, || async { !busy.events("/hook").is_empty() });
        if tokio::time::timeout(Duration::from_secs(2), heard).await.is_ok() {
            break;
        }
    }
    let id = scene.workspace_id().await?;
    let pool = sqlx::PgPool::connect(&shared().await.database_url).await?;
    let sql = "SELECT count(*) FROM push_endpoints WHERE workspace_id = $1 AND paused_until IS NOT NULL";
    wait::until("it to be noted", EVENTUALLY, || async {
        sqlx::query_scalar::<_, i64>(sql).bind(id).fetch_one(&pool).await.ok() == Some(1)
    })
    .await;
    scene.ann.dm("cyd", "two").await?.success()?;
    wait::until("the second", EVENTUALLY, || async { busy.calls("/hook").len() == 2 }).await;
    let pause = busy.calls("/hook")[1].at - busy.events("/hook")[0].at;
    assert!(pause > Duration::from_secs(6), "called again after {pause:?}");
    Ok(())
}

/// Two workspaces could occupy all concurrent calls and queue slots.
#[tokio::test]
async fn slow_endpoints_of_one_workspace_leave_capacity_for_others() -> Result<()> {
    const NODES: usize = 4;
    const AGENTS: usize = 20;
    // Sequentially, these deliveries would take minutes.
    let slow = Receiver::start(|_, _| Reply::After(Duration::from_secs(8), Box::new(Reply::Status(200)))).await?;
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_PUSH_CONCURRENCY", "16")
        .env("RELAY_PUSH_ENDPOINT_CONCURRENCY", "2")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let scene = Scene::on_gateway(gateway, "push-share", json!({ "ack_mode": "on_2xx" })).await?;
    for name in ["push-share-slow", "push-share-slower"] {
        let key = Api::create_workspace(gateway, name).await?;
        let ann = key.as_agent(&key.register_agent("ann").await?);
        for node in 0..NODES {
            let delivery = json!({ "url": slow.url(&format!("/{name}/{node}")), "ack_mode": "on_2xx" });
            let node = format!("slow-{node}");
            let body = json!({ "name": node, "kind": "http_push", "max_agents": AGENTS, "delivery": delivery });
            key.post("/v1/nodes", body).await?.success()?;
            let (key, ann, node) = (&key, &ann, &node);
            let all = (0..AGENTS).map(|agent| async move {
                let agent = format!("{node}-{agent}");
                key.register_agent(&agent).await?;
                key.bind(node, &agent).await?;
                ann.dm(&agent, "take your time").await?.success()
            });
            try_join_all(all).await?;
        }
    }
    wait::until("both to be busy", EVENTUALLY, || async {
        let calls = slow.received();
        ["/push-share-slow/", "/push-share-slower/"].iter().all(|of| calls.iter().any(|call| call.path.starts_with(of)))
    })
    .await;
    let mut sent_at = Vec::new();
    for n in 0..20 {
        sent_at.push(Instant::now());
        scene.send(&format!("message {n}")).await?;
    }
    scene.wait_for_deliveries("all to be acked", "?status=acked", |rows| rows.len() == 20).await?;
    let calls = scene.receiver.calls("/hook");
    let took: Vec<Duration> = calls.iter().zip(sent_at).map(|(call, sent)| call.at - sent).collect();
    let prompt = took.iter().filter(|took| **took < Duration::from_secs(5)).count();
    assert!(prompt >= 10, "{took:?}");
    assert!(slow.count() < 2 * NODES * AGENTS, "they were busy all the time");
    Ok(())
}

#[tokio::test]
async fn calls_use_the_operators_proxy_if_the_node_requests_it() -> Result<()> {
    let proxy = Receiver::accepting_all().await?;
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
    wait::until("the proxy's call", EVENTUALLY, || async { proxy.calls("/proxy").len() == 1 }).await;
    let call = &proxy.calls("/proxy")[0];
    assert_eq!((call.header("x-forward-to"), call.header("x-proxy-auth")), (url, "by-us"));
    assert_eq!(text(&call.json()["message_id"]), text(&sent["id"]));
    let bob = key.as_agent(&bob);
    wait::until("the ack", EVENTUALLY, || async {
        bob.get("/v1/deliveries?status=acked")
            .await
            .is_ok_and(|reply| reply.data().as_array().is_some_and(|r| r.len() == 1))
    })
    .await;
    Ok(())
}
