//! Outcomes of deliveries by the answers of their endpoint.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future::try_join_all;
use relay_acceptance::push_scene::Scene;
use relay_testkit::receiver::{Received, Receiver, Reply};
use relay_testkit::wait;
use serde_json::{Value, json};

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Uses a short schedule, because the default of half a minute would take too long.
fn quick(ack_mode: &str) -> Value {
    json!({ "ack_mode": ack_mode, "retry": { "schedule": [1, 1, 1] } })
}

/// The first attempt fails with `first`, the second succeeds with the same id, and both are listed.
async fn check_recovery(name: &str, ack_mode: &str, first: Reply, status: Value, error: &str) -> Result<Vec<Value>> {
    let scene = Scene::new(name, quick(ack_mode)).await?;
    scene.receiver.script("/hook", [first, Reply::json(200, r#"{"ack":true}"#)]);
    scene.send("one").await?;
    let acked = scene.wait_for_deliveries("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    let attempts = scene.attempts(&acked[0]).await?;
    assert_eq!(attempts.len(), 2, "{attempts:?}");
    assert_eq!((&attempts[0]["status"], text(&attempts[0]["error"])), (&status, error), "{attempts:?}");
    let ids: Vec<_> =
        scene.receiver.calls("/hook").iter().map(|call| text(&call.json()["delivery_id"]).to_owned()).collect();
    assert!(ids.iter().all(|id| *id == text(&acked[0]["id"])), "{ids:?}");
    Ok(attempts)
}

#[tokio::test]
async fn errors_and_redirects_are_failures() -> Result<()> {
    let redirect = Reply::Full(301, "Location: http://10.0.0.1/\r\n".into(), String::new());
    let huge = Reply::Full(500, String::new(), "x".repeat(300_000));
    for (name, behaviour, status) in [
        ("push-500", Reply::Status(500), 500),
        ("push-404", Reply::Status(404), 404),
        ("push-301", redirect, 301),
        ("push-huge", huge, 500),
    ] {
        let attempts = check_recovery(name, "on_2xx", behaviour, json!(status), &format!("HTTP {status}")).await?;
        let kept = attempts[0]["answer"].as_str().map_or(0, str::len);
        assert!(kept <= 1024, "{kept} bytes are kept");
    }
    Ok(())
}

#[tokio::test]
async fn in_response_mode_the_body_must_declare_the_ack() -> Result<()> {
    let unsignalled = "response ack not signaled";
    for (name, body) in [("push-bad-json", "{\"ack\":tru"), ("push-no-ack", "{\"ack\":false}"), ("push-text", "ok")] {
        check_recovery(name, "response", Reply::json(200, body), json!(200), unsignalled).await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_attempt_times_out_after_ten_seconds() -> Result<()> {
    let (hang, drip) = tokio::join!(
        check_recovery("push-hang", "on_2xx", Reply::Hang(Vec::new()), Value::Null, "no complete answer in time"),
        check_recovery("push-drip", "on_2xx", Reply::Drip, Value::Null, "no complete answer in time"),
    );
    for attempts in [hang?, drip?] {
        let latency = attempts[0]["latency_ms"].as_i64().unwrap_or_default();
        assert!((9_900..15_000).contains(&latency), "{latency} ms");
    }
    Ok(())
}

#[tokio::test]
async fn retry_after_is_honoured() -> Result<()> {
    // Without the header the next attempt would be half a minute away.
    let scene = Scene::new("push-429", json!({ "ack_mode": "on_2xx" })).await?;
    let busy = Reply::Full(429, "Retry-After: 2\r\n".into(), String::new());
    scene.receiver.script("/hook", [busy, Reply::Status(200)]);
    scene.send("one").await?;
    scene.wait_for_deliveries("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    let calls = scene.receiver.calls("/hook");
    let pause = calls[1].at - calls[0].at;
    assert!((Duration::from_millis(1900)..Duration::from_secs(20)).contains(&pause), "{pause:?}");
    Ok(())
}

#[tokio::test]
async fn an_endpoint_that_answers_410_gets_nothing_until_the_agent_is_bound_again() -> Result<()> {
    let scene = Scene::new("push-410", json!({ "ack_mode": "on_2xx" })).await?;
    scene.receiver.script("/hook", [Reply::Status(410), Reply::Status(200)]);
    let owner = json!({ "events": ["node.binding.disabled"], "url": scene.receiver.url("/owner") });
    scene.key.post("/v1/subscriptions", owner).await?.success()?;
    scene.send("one").await?;
    scene
        .wait_for_deliveries("the answer", "", |rows| {
            rows.iter().any(|row| text(&row["last_dispatch_error"]) == "HTTP 410")
        })
        .await?;
    let bindings = scene.key.get("/v1/nodes/hook/agents").await?.success()?;
    assert_eq!(text(&bindings[0]["status"]), "disabled", "{bindings}");
    let events = scene.key.get("/v1/workspace/events").await?.body;
    assert!(events.to_string().contains("node.binding.disabled"), "observers are told: {events}");
    let to_owner = || scene.receiver.received().into_iter().find(|call| call.path == "/owner");
    wait::until("the owner to be told", Duration::from_secs(40), || async { to_owner().is_some() }).await;
    let reported = to_owner().map(|call| call.json()).unwrap_or_default();
    assert_eq!(
        (text(&reported["type"]), text(&reported["data"]["agent_name"])),
        ("node.binding.disabled", "bob"),
        "{reported}"
    );
    assert_eq!(text(&reported["data"]["reason"]), "HTTP 410", "{reported}");
    scene.send("two").await?;
    scene.key.bind("hook", "bob").await?;
    scene.wait_for_deliveries("both to be acked", "?status=acked", |rows| rows.len() == 2).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 2]);
    let bindings = scene.key.get("/v1/nodes/hook/agents").await?.success()?;
    assert_eq!(text(&bindings[0]["status"]), "active", "{bindings}");
    Ok(())
}

#[tokio::test]
async fn an_exhausted_schedule_ends_the_delivery_and_notifies_the_sender() -> Result<()> {
    let delivery = json!({ "ack_mode": "on_2xx", "retry": { "schedule": [1] } });
    let scene = Scene::new("push-exhausted", delivery).await?;
    let mut socket = scene.ann.direct_socket().await?;
    let refused = Reply::Status(403);
    scene.receiver.script("/hook", [refused.clone(), refused, Reply::Status(200)]);
    scene.send("one").await?;
    scene.send("two").await?;
    let dead = scene.wait_for_deliveries("a dead letter", "?status=dead_lettered", |rows| rows.len() == 1).await?;
    assert_eq!(text(&dead[0]["error"]), "delivery attempts exhausted", "{}", dead[0]);
    scene.wait_for_deliveries("the next to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 2]);
    let reported =
        socket.expect_where("the notice", Duration::from_secs(15), |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!(text(&reported["data"]["reason"]), "attempts_exhausted", "{reported}");
    let letters = scene.key.get("/v1/dead-letters").await?.success()?;
    assert_eq!(
        (letters.as_array().map(Vec::len), text(&letters[0]["reason"]), text(&letters[0]["sender_name"])),
        (Some(1), "attempts_exhausted", "ann"),
        "{letters}"
    );
    Ok(())
}

#[tokio::test]
async fn in_response_mode_the_body_may_reject_the_delivery() -> Result<()> {
    let scene = Scene::new("push-rejected", quick("response")).await?;
    let mut socket = scene.ann.direct_socket().await?;
    let refused = Reply::json(200, r#"{"delivery_status":"rejected","error":"no such room"}"#);
    scene.receiver.script("/hook", [refused, Reply::json(200, r#"{"ack":true}"#)]);
    scene.send("one").await?;
    scene.send("two").await?;
    scene.wait_for_deliveries("the next to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2], "there is no second attempt");
    let letters = scene.key.get("/v1/dead-letters?reason=rejected").await?.success()?;
    assert_eq!((letters[0]["seq"].as_i64(), text(&letters[0]["error"])), (Some(1), "no such room"), "{letters}");
    let failed = scene.deliveries("?status=failed").await?;
    assert_eq!((failed.len(), text(&failed[0]["error"])), (1, "no such room"), "{failed:?}");
    let attempts = scene.attempts(&failed[0]).await?;
    assert_eq!((&attempts[0]["status"], text(&attempts[0]["error"])), (&json!(200), "no such room"), "{attempts:?}");
    let reported =
        socket.expect_where("the notice", Duration::from_secs(15), |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!(text(&reported["data"]["reason"]), "rejected", "{reported}");
    Ok(())
}

#[tokio::test]
async fn a_retryable_failure_is_redelivered_until_the_nodes_schedule_ends() -> Result<()> {
    let scene = Scene::new("push-consumer", json!({ "ack_mode": "manual", "retry": { "schedule": [1] } })).await?;
    scene.send("one").await?;
    let rows = scene.wait_for_deliveries("it to be delivered", "?status=delivered", |rows| rows.len() == 1).await?;
    let bob = scene.key.as_agent(&scene.bob);
    let path = format!("/v1/deliveries/{}/fail", text(&rows[0]["id"]));
    let fail = || bob.post(&path, json!({ "error": "busy", "retryable": true }));
    let back = fail().await?.success()?;
    assert_eq!((text(&back["status"]), back["available_at"].is_string()), ("queued", true), "{back}");
    scene.wait_for_calls(2).await;
    scene.wait_for_deliveries("it to be delivered again", "?status=delivered", |rows| rows.len() == 1).await?;
    assert_eq!(text(&fail().await?.success()?["status"]), "dead_lettered");
    let letters = scene.key.get("/v1/dead-letters").await?.success()?;
    assert_eq!((text(&letters[0]["reason"]), text(&letters[0]["error"])), ("attempts_exhausted", "busy"), "{letters}");
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1]);
    Ok(())
}

#[tokio::test]
async fn unordered_deliveries_do_not_wait_for_one_that_fails() -> Result<()> {
    // The delay leaves room for the others even if sending them takes seconds.
    let delivery = json!({ "ack_mode": "on_2xx", "ordering": "none", "retry": { "schedule": [10] } });
    let scene = Scene::new("push-unordered", delivery).await?;
    scene.receiver.script("/hook", [Reply::Status(400), Reply::Status(200)]);
    for n in 0..10 {
        scene.send(&format!("message {n}")).await?;
    }
    scene.wait_for_deliveries("all to be acked", "?status=acked", |rows| rows.len() == 10).await?;
    let mut seqs = scene.receiver.seqs("/hook");
    assert_eq!(seqs.len(), 11, "one came twice: {seqs:?}");
    let attempts: Vec<usize> = (0..seqs.len()).filter(|at| seqs[*at] == seqs[0]).collect();
    assert!(attempts.len() == 2 && attempts[1] > 1, "the first one came again, with others in between: {seqs:?}");
    seqs.sort_unstable();
    seqs.dedup();
    assert_eq!(seqs, (1..=10).collect::<Vec<_>>());
    assert!(scene.deliveries("").await?.is_empty(), "nothing is left");
    Ok(())
}

#[tokio::test]
async fn a_hung_endpoint_does_not_slow_others() -> Result<()> {
    let scene = Scene::new("push-bulkhead", quick("on_2xx")).await?;
    let hung = Receiver::start(|_, _| Reply::Status(200)).await?;
    hung.script("/hook", [Reply::Hang(Vec::new())]);
    let delivery = json!({ "url": hung.url("/hook"), "ack_mode": "on_2xx" });
    let node = json!({ "name": "hung", "kind": "http_push", "max_agents": 40, "delivery": delivery });
    scene.key.post("/v1/nodes", node).await?.success()?;
    let names: Vec<String> = (0..30).map(|n| format!("stuck-{n}")).collect();
    for name in &names {
        scene.key.register_agent(name).await?;
        scene.key.bind("hung", name).await?;
    }
    for sent in try_join_all(names.iter().map(|name| scene.ann.dm(name, "into the void"))).await? {
        sent.success()?;
    }
    hung.wait_for(1, Duration::from_secs(40)).await;
    let mut sent_at = Vec::new();
    for n in 0..20 {
        sent_at.push(Instant::now());
        scene.send(&format!("message {n}")).await?;
    }
    scene.wait_for_deliveries("all to be acked", "?status=acked", |rows| rows.len() == 20).await?;
    assert_eq!(scene.receiver.seqs("/hook"), (1..=20).collect::<Vec<_>>());
    // Waiting for the hung ones, which time out after 10 s, would have delayed all of them.
    let calls = scene.receiver.calls("/hook");
    let took: Vec<Duration> = calls.iter().zip(sent_at).map(|(call, sent)| call.at - sent).collect();
    let prompt = took.iter().filter(|took| **took < Duration::from_secs(5)).count();
    assert!(prompt >= 10, "{took:?}");
    Ok(())
}

#[tokio::test]
async fn events_without_a_delivery_are_posted_once() -> Result<()> {
    let scene = Scene::new("push-events", json!({ "ack_mode": "on_2xx" })).await?;
    let id = scene.send("one").await?;
    scene.wait_for_deliveries("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    scene.ann.post(&format!("/v1/messages/{id}/reactions"), json!({ "emoji": "+1" })).await?.success()?;
    let found = || {
        let calls = scene.receiver.events("/hook");
        calls.into_iter().filter(|call| call.json()["type"] == "message.reacted").collect::<Vec<_>>()
    };
    wait::until("the reaction", Duration::from_secs(20), || async { !found().is_empty() }).await;
    let calls = found();
    assert_eq!(calls.len(), 1, "{calls:?}");
    let call = &calls[0];
    assert!(call.headers["webhook-id"].starts_with("whd_") && !call.headers.contains_key("x-relaycast-delivery"));
    assert_eq!(call.headers["x-relaycast-event"], "message.reacted");
    assert_eq!(
        (text(&call.json()["data"]["emoji"]), text(&call.json()["topic"])),
        ("+1", "channel"),
        "{}",
        call.json()
    );
    assert_eq!(call.json()["agent_ids"], json!([scene.bob.id]));
    Ok(())
}

/// Attempts of others are recorded in the same transaction, which must not fail.
#[tokio::test]
async fn a_nul_in_an_answer_is_dropped_and_blocks_nothing() -> Result<()> {
    let scene = Scene::new("push-nul", quick("response")).await?;
    let failing = Reply::Full(500, String::new(), "out of\0order".to_owned());
    let refused = Reply::json(200, r#"{"delivery_status":"rejected","error":"no such\u0000 room"}"#);
    scene.receiver.script("/hook", [failing, refused, Reply::json(200, r#"{"ack":true}"#)]);
    scene.send("one").await?;
    scene.send("two").await?;
    scene.wait_for_deliveries("the next to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 2], "nothing came again");
    let failed = scene.deliveries("?status=failed").await?;
    assert_eq!((failed.len(), text(&failed[0]["error"])), (1, "no such room"), "{failed:?}");
    let attempts = scene.attempts(&failed[0]).await?;
    let shown: Vec<_> = attempts.iter().map(|attempt| text(&attempt["error"])).collect();
    assert_eq!(shown, ["HTTP 500", "no such room"], "{attempts:?}");
    Ok(())
}

#[tokio::test]
async fn an_ack_during_the_last_attempt_prevents_a_failure_notice() -> Result<()> {
    let scene =
        Scene::new("push-acked-meanwhile", json!({ "ack_mode": "manual", "retry": { "schedule": [1] } })).await?;
    let mut socket = scene.ann.direct_socket().await?;
    let failing = Reply::Status(500);
    let late = Reply::After(Duration::from_secs(4), Box::new(failing.clone()));
    scene.receiver.script("/hook", [failing.clone(), late, failing]);
    scene.send("one").await?;
    scene.wait_for_calls(2).await;
    let rows = scene.deliveries("").await?;
    let bob = scene.key.as_agent(&scene.bob);
    bob.post_empty(&format!("/v1/deliveries/{}/ack", text(&rows[0]["id"]))).await?.success()?;
    wait::until_ok("the last attempt to be recorded", Duration::from_secs(40), || async {
        let attempts = scene.attempts(&rows[0]).await?;
        anyhow::ensure!(attempts.len() == 2, "{attempts:?}");
        Ok(())
    })
    .await?;
    // The next one does fail: its notice is the first.
    let second = scene.send("two").await?;
    let reported =
        socket.expect_where("the notice", Duration::from_secs(40), |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!(text(&reported["data"]["message_id"]), second, "{reported}");
    let acked = scene.deliveries("?status=acked").await?;
    assert_eq!((acked.len(), &acked[0]["id"]), (1, &rows[0]["id"]), "{acked:?}");
    let log = scene.key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    let failed = log["events"].as_array().into_iter().flatten().filter(|event| event["type"] == "delivery.failed");
    assert_eq!(failed.count(), 1, "{log}");
    Ok(())
}

#[tokio::test]
async fn an_ack_during_an_attempt_is_announced_once() -> Result<()> {
    let scene = Scene::new("push-acked-twice", json!({ "ack_mode": "on_2xx" })).await?;
    let late = Reply::After(Duration::from_secs(4), Box::new(Reply::Status(200)));
    scene.receiver.script("/hook", [late, Reply::Status(200)]);
    // Acks are announced while an observer watches.
    let log = async || scene.key.get("/v1/workspace/events?since=0&limit=500").await?.success();
    log().await?;
    let sent = [scene.send("one").await?, scene.send("two").await?];
    scene.wait_for_calls(1).await;
    let rows = scene.deliveries("").await?;
    let bob = scene.key.as_agent(&scene.bob);
    bob.post_empty(&format!("/v1/deliveries/{}/ack", text(&rows[0]["id"]))).await?.success()?;
    scene.wait_for_deliveries("both to be acked", "?status=acked", |rows| rows.len() == 2).await?;
    let reported = async || {
        let log = log().await?;
        let events = log["events"].as_array().into_iter().flatten();
        let delivered = events.filter(|event| event["type"] == "delivery.delivered");
        anyhow::Ok(delivered.map(|event| text(&event["payload"]["message_id"]).to_owned()).collect::<Vec<_>>())
    };
    wait::until_ok("the second's event", Duration::from_secs(20), || async {
        let reported = reported().await?;
        anyhow::ensure!(reported.contains(&sent[1]), "{reported:?}");
        Ok(())
    })
    .await?;
    assert_eq!(reported().await?, sent, "each once");
    Ok(())
}

#[tokio::test]
async fn a_hung_endpoint_does_not_block_events_of_others() -> Result<()> {
    let scene = Scene::new("push-events-hung", json!({ "ack_mode": "on_2xx" })).await?;
    // The older node is notified first where notification is sequential.
    let hung = Receiver::start(|_, _| Reply::Hang(Vec::new())).await?;
    let cyd = scene.neighbour("cyd", &hung).await?;
    let well = Receiver::accepting_all().await?;
    let dee = scene.neighbour("dee", &well).await?;
    scene.ann.create_channel("room").await?;
    for agent in [&cyd, &dee] {
        scene.key.as_agent(agent).join("room").await?;
    }
    let posted = scene.ann.post_message("room", "hello").await?.success()?;
    let path = format!("/v1/messages/{}/reactions", text(&posted["id"]));
    let react = |emoji: String| {
        let (ann, path) = (scene.ann.clone(), path.clone());
        async move { ann.post(&path, json!({ "emoji": emoji })).await?.success() }
    };
    // The worker learns of moved agents later: until then it posts to the nodes that it knows.
    hung.wait_for(1, Duration::from_secs(40)).await;
    for nth in 0.. {
        assert!(nth < 10, "no event comes to both nodes");
        react(format!("first-{nth}")).await?;
        let heard = |receiver: &Receiver| {
            receiver.received().iter().any(|call| call.json()["data"]["emoji"] == format!("first-{nth}"))
        };
        let both = wait::until("the event", Duration::from_secs(60), || async { heard(&hung) && heard(&well) });
        if tokio::time::timeout(Duration::from_secs(2), both).await.is_ok() {
            break;
        }
    }
    let is_it = |call: &Received| call.json()["data"]["emoji"] == "+1";
    let hung_calls = || hung.received().iter().filter(|call| is_it(call)).count();
    let well_calls = || {
        let calls = well.events("/hook").into_iter();
        calls.filter(|call| is_it(call)).map(|call| call.at).collect::<Vec<_>>()
    };
    let reacted_at = Instant::now();
    react("+1".to_owned()).await?;
    wait::until("the reaction", Duration::from_secs(40), || async { hung_calls() == 1 && well_calls().len() == 1 })
        .await;
    // A call that hangs times out after 10 s.
    let took = well_calls()[0] - reacted_at;
    assert!(took < Duration::from_secs(8), "{took:?}");
    Ok(())
}
