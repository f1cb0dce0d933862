//! http_push nodes: settings, calls, and the effects of answers.

use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use relay_acceptance::push_scene::Scene;
use relay_acceptance::signature::standard_signature;
use relay_testkit::client::Api;
use relay_testkit::receiver::{Receiver, Reply};
use relay_testkit::{shared, wait};
use ring::hmac;
use serde_json::{Value, json};

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test]
async fn deliveries_are_posted_in_order_and_acknowledged_by_a_2xx() -> Result<()> {
    let scene = Scene::new("push-order", json!({ "ack_mode": "on_2xx" })).await?;
    let mut sent = Vec::new();
    for n in 0..30 {
        sent.push(scene.send(&format!("message {n}")).await?);
    }
    let acked = scene.wait_for_deliveries("all to be acked", "?status=acked", |rows| rows.len() == 30).await?;
    assert_eq!(scene.receiver.seqs("/hook"), (1..=30).collect::<Vec<_>>());
    let calls = scene.receiver.calls("/hook");
    for (call, id) in calls.iter().zip(&sent) {
        let body = call.json();
        let delivery_id = format!("del_{id}_{}", scene.bob.id);
        assert_eq!((text(&body["type"]), text(&body["message_id"])), ("dm.received", id.as_str()));
        assert_eq!(
            (text(&body["delivery_id"]), text(&body["agent_id"])),
            (delivery_id.as_str(), scene.bob.id.as_str())
        );
        assert_eq!((text(&body["agent_name"]), text(&body["mode"])), ("bob", "wait"));
        assert_eq!(text(&body["data"]["from_name"]), "ann");
        assert_eq!(call.headers["content-type"], "application/json");
        assert_eq!(call.headers["x-relaycast-event"], "dm.received");
        assert_eq!(call.headers["x-relaycast-delivery"], delivery_id);
        assert_eq!(call.headers["webhook-id"], delivery_id);
        assert!(!call.headers.contains_key("authorization"));
    }
    let row = &acked[0];
    assert_eq!((text(&row["route_node_kind"]), text(&row["delivery_adapter"])), ("http_push", "http.basic.v1"));
    assert_eq!((&row["dispatch_attempts"], row["acked_at"].is_string()), (&json!(1), true));
    assert!(scene.deliveries("").await?.is_empty());
    // Acknowledged messages count as read.
    let readers = scene.ann.get(&format!("/v1/messages/{}/readers", sent[0])).await?.success()?;
    assert_eq!(text(&readers[0]["agent_name"]), "bob", "{readers}");
    let path = format!("/v1/deliveries/{}/attempts", text(&row["id"]));
    let attempts = scene.key.as_agent(&scene.bob).get(&path).await?.success()?;
    assert_eq!((&attempts[0]["status"], &attempts[0]["error"]), (&json!(200), &Value::Null));
    scene.ann.get(&path).await?.refused(404, "delivery_not_found")?;
    Ok(())
}

#[tokio::test]
async fn a_failed_attempt_blocks_later_deliveries_and_is_retried_with_the_same_id() -> Result<()> {
    let scene =
        Scene::new("push-retry", json!({ "ack_mode": "on_2xx", "retry": { "schedule": [8, 1, 1, 1] } })).await?;
    let failing = Reply::Full(500, String::new(), "out of order".to_owned());
    scene.receiver.script("/hook", [failing, Reply::Reset, Reply::Status(200)]);
    let first = scene.send("message 0").await?;
    for n in 1..3 {
        scene.send(&format!("message {n}")).await?;
    }
    let waiting = scene
        .wait_for_deliveries("a retry", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string()))
        .await?;
    let head = &waiting[0];
    assert_eq!((text(&head["status"]), &head["available_at"]), ("queued", &Value::Null), "{head}");
    assert!(!text(&head["last_dispatch_error"]).is_empty(), "{head}");
    scene.wait_for_deliveries("all to be acked", "?status=acked", |rows| rows.len() == 3).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 1, 1, 2, 3]);
    let calls = scene.receiver.calls("/hook");
    assert!(calls[..3].iter().all(|call| call.json()["delivery_id"] == calls[0].json()["delivery_id"]));
    assert_eq!(scene.receiver.max_concurrency(), 1);
    let path = format!("/v1/deliveries/{}/attempts", text(&head["id"]));
    let attempts = scene.key.as_agent(&scene.bob).get(&path).await?.success()?;
    let shown: Vec<_> = attempts.as_array().into_iter().flatten().map(|a| (&a["status"], text(&a["error"]))).collect();
    let reset = text(&attempts[1]["error"]).to_owned();
    assert_eq!(shown, [(&json!(500), "HTTP 500"), (&Value::Null, &*reset), (&json!(200), "")]);
    assert_eq!(text(&attempts[0]["answer"]), "out of order");
    // The message trace contains each attempt.
    let trace = scene.key.get(&format!("/v1/messages/{first}/trace")).await?.success()?;
    let steps = trace["deliveries"][0]["steps"].as_array().cloned().unwrap_or_default();
    let attempt_steps: Vec<_> = steps.iter().filter(|step| step["step"] == "attempted").collect();
    let reported: Vec<_> = attempt_steps.iter().map(|step| (&step["status"], text(&step["reason"]))).collect();
    assert_eq!(reported, shown, "{trace}");
    assert!(attempt_steps.iter().all(|step| step["at"].is_string() && step["latency_ms"].is_i64()), "{trace}");
    assert_eq!((&steps[0]["step"], &steps[steps.len() - 1]["step"]), (&json!("accepted"), &json!("acked")), "{trace}");
    assert!(steps.iter().all(|step| step["step"] != "sent"), "no socket was written to: {trace}");
    Ok(())
}

/// The next attempt of the first would be an hour away; later deliveries wait only until it expires.
#[tokio::test]
async fn an_expired_or_settled_delivery_no_longer_blocks_later_ones() -> Result<()> {
    let delivery = json!({ "ack_mode": "on_2xx", "retry": { "schedule": [3600, 3600, 3600] } });
    let scene = Scene::new("push-unblocked", delivery).await?;
    let refused = Reply::Status(500);
    scene.receiver.script("/hook", [refused.clone(), Reply::Status(200), refused, Reply::Status(200)]);
    scene.ann.post("/v1/dm", json!({ "to": "bob", "text": "one", "ttl_ms": 8000 })).await?.success()?;
    scene.send("two").await?;
    scene.wait_for_deliveries("the second to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2]);
    assert_eq!(scene.deliveries("?status=dead_lettered").await?.len(), 1);

    scene.send("three").await?;
    scene.send("four").await?;
    let waiting = scene
        .wait_for_deliveries("a retry", "", |rows| rows.iter().any(|row| row["next_attempt_at"].is_string()))
        .await?;
    let path = format!("/v1/deliveries/{}/ack", text(&waiting[0]["id"]));
    scene.key.as_agent(&scene.bob).post_empty(&path).await?.success()?;
    scene.wait_for_deliveries("all others to be acked", "?status=acked", |rows| rows.len() == 3).await?;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2, 3, 4]);
    Ok(())
}

#[tokio::test]
async fn a_redriven_dead_letter_is_posted_under_a_new_id() -> Result<()> {
    let delivery = json!({ "ack_mode": "on_2xx", "retry": { "schedule": [3600, 3600, 3600] } });
    let scene = Scene::new("push-redrive", delivery).await?;
    scene.receiver.script("/hook", [Reply::Status(500), Reply::Status(200)]);
    // A redriven delivery has the same TTL.
    scene.ann.post("/v1/dm", json!({ "to": "bob", "text": "one", "ttl_ms": 8000 })).await?.success()?;
    let dead = scene.wait_for_deliveries("a dead letter", "?status=dead_lettered", |rows| rows.len() == 1).await?;
    let id = text(&dead[0]["id"]).to_owned();
    let again = scene.key.post("/v1/dead-letters/redrive", json!({ "delivery_id": id })).await?.success()?;
    assert_eq!((text(&again["redriven_as"]), &again["seq"]), (&*format!("{id}_r1"), &json!(2)));
    let acked = scene.wait_for_deliveries("it to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!(text(&acked[0]["id"]), format!("{id}_r1"));
    let posted: Vec<String> =
        scene.receiver.calls("/hook").iter().map(|call| text(&call.json()["delivery_id"]).to_owned()).collect();
    assert_eq!(posted, [id.clone(), format!("{id}_r1")]);
    Ok(())
}

#[tokio::test]
async fn suspended_and_deleted_workspaces_make_no_calls() -> Result<()> {
    let delivery = json!({ "ack_mode": "on_2xx", "retry": { "schedule": vec![1; 32] } });
    let scene = Scene::new("push-held", delivery).await?;
    // She gets the notice of the dead letter as an event without a delivery.
    let hers = Receiver::accepting_all().await?;
    let ann = scene.neighbour("cyd", &hers).await?;
    let ann = scene.key.as_agent(&ann);
    // Retried soon and without opening the breaker, so that calls continue until they are stopped.
    scene.receiver.script("/hook", [Reply::Full(429, "Retry-After: 1\r\n".to_owned(), String::new())]);
    scene.send("one").await?;
    scene.wait_for_calls(2).await;
    // Behind the first one, and expired before it.
    let short = json!({ "to": "bob", "text": "soon over", "ttl_ms": 8000 });
    let mut given_up = vec![text(&ann.post("/v1/dm", short.clone()).await?.success()?["id"]).to_owned()];
    let id = scene.workspace_id().await?;
    let pool = sqlx::PgPool::connect(&shared().await.database_url).await?;
    let suspend = async |on: bool| {
        let query = "UPDATE workspaces SET suspended_at = CASE WHEN $2 THEN now() END WHERE workspace_id = $1";
        sqlx::query(query).bind(id).bind(on).execute(&pool).await
    };
    let calls = || scene.receiver.calls("/hook").len();
    for deleted in [false, true] {
        if deleted {
            // The gateways learn of the end of the suspension later.
            let delete = || async { scene.key.delete("/v1/workspace").await.is_ok_and(|reply| reply.status == 204) };
            wait::until("the workspace to be deleted", Duration::from_secs(30), delete).await;
        } else {
            suspend(true).await?;
        }
        // One call may be in progress.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = calls();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(calls(), before, "deleted: {deleted}");
        if !deleted {
            let sql = "SELECT count(*) FROM delivery_exceptions WHERE workspace_id = $1 AND state = 4";
            let over = || async { sqlx::query_scalar::<_, i64>(sql).bind(id).fetch_one(&pool).await.ok() == Some(1) };
            wait::until("it to be given up", Duration::from_secs(40), over).await;
            suspend(false).await?;
            scene.wait_for_calls(before + 1).await;
            let sent = wait::until_ok("the gateways to hear of it", Duration::from_secs(30), || async {
                ann.post("/v1/dm", short.clone()).await?.success()
            });
            given_up.push(text(&sent.await?["id"]).to_owned());
            let reported = || {
                let events = hers.events("/hook").into_iter().map(|call| call.json());
                let failed = events.filter(|event| event["type"] == "delivery.failed");
                failed.map(|event| text(&event["data"]["message_id"]).to_owned()).collect::<Vec<_>>()
            };
            wait::until("the second's end", Duration::from_secs(40), || async { !reported().is_empty() }).await;
            assert_eq!(reported(), given_up[1..], "of the first one she was not told, as the workspace was held");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_manual_delivery_waits_for_its_recipient_and_is_not_posted_twice() -> Result<()> {
    let scene = Scene::new("push-manual", json!({})).await?;
    scene.send("one").await?;
    scene.send("two").await?;
    let rows = scene.wait_for_deliveries("both to be delivered", "?status=delivered", |rows| rows.len() == 2).await?;
    assert!(rows[0]["delivered_at"].is_string(), "{}", rows[0]);
    let bob = scene.key.as_agent(&scene.bob);
    bob.post_empty(&format!("/v1/deliveries/{}/ack", text(&rows[1]["id"]))).await?.success()?;
    // The third one is sent; neither of the first two is repeated.
    scene.send("three").await?;
    scene.wait_for_calls(3).await;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2, 3]);
    let later = chrono_in(10);
    let deferred = bob
        .post(&format!("/v1/deliveries/{}/defer", text(&rows[0]["id"])), json!({ "available_at": later }))
        .await?
        .success()?;
    assert_eq!((text(&deferred["status"]), &deferred["available_at"]), ("queued", &json!(later)));
    scene.wait_for_calls(4).await;
    assert_eq!(scene.receiver.seqs("/hook"), [1, 2, 3, 1], "what was put off has come back");
    scene.wait_for_deliveries("it to be delivered again", "?status=delivered", |rows| rows.len() == 2).await?;
    Ok(())
}

/// Returns a later instant, as clients format it.
fn chrono_in(seconds: u64) -> String {
    let at = std::time::SystemTime::now() + Duration::from_secs(seconds);
    let since = at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let (days, rest) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(i64::try_from(days).unwrap_or_default());
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.000Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Returns the date of a day since 1970.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[tokio::test]
async fn calls_use_the_nodes_authentication() -> Result<()> {
    let scene = Scene::new("push-auth", json!({ "ack_mode": "on_2xx" })).await?;
    let change = |auth: Value| {
        let key = scene.key.clone();
        async move { key.patch("/v1/nodes/hook", json!({ "delivery": { "auth": auth } })).await?.success() }
    };
    let node = change(json!({ "type": "bearer", "token": "tok-secret" })).await?;
    assert_eq!(node["delivery"]["auth"], json!({ "type": "bearer", "token": "[redacted]" }));
    assert_eq!((text(&node["delivery_adapter"]), text(&node["delivery"]["ack_mode"])), ("http.bearer.v1", "on_2xx"));
    scene.send("one").await?;
    scene.wait_for_calls(1).await;
    change(json!({ "type": "static_headers", "headers": { "X-Key": "k-secret" } })).await?;
    scene.send("two").await?;
    scene.wait_for_calls(2).await;
    let node = change(json!({ "type": "hmac_sha256", "secret": "h-secret" })).await?;
    assert!(!node.to_string().contains("-secret"), "{node}");
    scene.send("three").await?;
    scene.wait_for_calls(3).await;
    let standard = STANDARD.encode([7; 32]);
    let node = change(json!({
        "type": "hmac_sha256", "secret": format!("whsec_{standard}"), "signature_scheme": "standard-webhooks",
    }))
    .await?;
    assert_eq!(text(&node["delivery"]["auth"]["signature_scheme"]), "standard-webhooks", "{node}");
    let read = scene.key.get("/v1/nodes/hook").await?.success()?;
    for shown in [node, read] {
        assert_eq!(text(&shown["delivery"]["auth"]["secret"]), "[redacted]", "{shown}");
        assert!(!shown.to_string().contains(&standard), "{shown}");
    }
    scene.send("four").await?;
    scene.wait_for_calls(4).await;
    let calls = scene.receiver.calls("/hook");
    assert_eq!(calls[0].headers["authorization"], "Bearer tok-secret");
    assert_eq!((&*calls[1].headers["x-key"], calls[1].headers.get("authorization")), ("k-secret", None));
    let sent_at = calls[2].headers["x-relaycast-timestamp"].clone();
    assert_eq!(sent_at, text(&calls[2].json()["timestamp"]));
    let signed = [sent_at.as_bytes(), b".", &calls[2].body].concat();
    let signature = calls[2].headers["x-relaycast-signature"].strip_prefix("sha256=").context("no prefix")?.to_owned();
    let tag: Vec<u8> = (0..signature.len() / 2)
        .map(|i| u8::from_str_radix(&signature[2 * i..2 * i + 2], 16))
        .collect::<Result<_, _>>()?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, b"h-secret");
    assert!(hmac::verify(&key, &signed, &tag).is_ok(), "signed over timestamp and body");
    assert_eq!(calls[3].header("webhook-signature"), standard_signature(&[7; 32], &calls[3]));
    assert_eq!(calls[3].header("webhook-id"), text(&calls[3].json()["delivery_id"]));
    assert!(!calls[3].headers.contains_key("x-relaycast-signature"), "{:?}", calls[3].headers);
    assert!(!calls[2].headers.contains_key("webhook-signature"), "{:?}", calls[2].headers);
    Ok(())
}

#[tokio::test]
async fn a_node_with_an_invalid_url_is_refused() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "push-bad").await?;
    let with = |delivery: Value| json!({ "name": "hook", "kind": "http_push", "delivery": delivery });
    for (delivery, code) in [
        (Value::Null, "invalid_node_delivery"),
        (json!({}), "invalid_node_delivery"),
        (json!({ "url": "nonsense" }), "invalid_node_delivery"),
        (json!({ "url": "http://10.0.0.1/" }), "unsafe_node_delivery_url"),
        (json!({ "url": "https://169.254.169.254/" }), "unsafe_node_delivery_url"),
        (json!({ "url": "http://example.org/" }), "unsafe_node_delivery_url"),
        (json!({ "url": "https://example.org/", "auth": { "type": "bearer" } }), "invalid_node_delivery"),
        (
            json!({ "url": "https://example.org/", "auth": { "type": "bearer", "token": "[redacted]" } }),
            "invalid_node_delivery",
        ),
    ] {
        key.post("/v1/nodes", with(delivery)).await?.refused(400, code)?;
    }
    let made = key.post("/v1/nodes", with(json!({ "url": "https://example.org/" }))).await?.success()?;
    assert_eq!((text(&made["kind"]), text(&made["role"]), &made["max_agents"]), ("http_push", "direct", &json!(1)));
    assert_eq!((text(&made["status"]), &made["live"]), ("online", &json!(true)));
    key.post("/v1/nodes", json!({ "name": "hook", "kind": "ws" })).await?.refused(400, "invalid_node_delivery")?;
    let again = key.post("/v1/nodes", json!({ "name": "hook" })).await?.success()?;
    assert_eq!(again["delivery"], made["delivery"], "a name alone keeps everything");
    let many =
        json!({ "name": "many", "kind": "http_push", "max_agents": 5, "delivery": { "url": "https://example.org/" } });
    assert_eq!(text(&key.post("/v1/nodes", many).await?.success()?["role"]), "broker");
    let poll = key.post("/v1/nodes", json!({ "name": "poll", "kind": "poll" })).await?.success()?;
    assert_eq!((text(&poll["delivery_adapter"]), text(&poll["role"])), ("poll.v1", "direct"));
    Ok(())
}
