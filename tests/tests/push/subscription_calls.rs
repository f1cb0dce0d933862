//! Calls of event subscriptions, as their receivers see them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use relay_acceptance::signature::{hmac_sha256, standard_signature};
use relay_testkit::client::Api;
use relay_testkit::receiver::{Received, Receiver, Reply};
use relay_testkit::stack::Stack;
use relay_testkit::{shared, wait};
use serde_json::{Value, json};
use sqlx::PgPool;

const SOON: Duration = Duration::from_secs(40);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Creates a workspace with an agent that posts into `general`.
async fn workspace(name: &str) -> Result<(Api, Api)> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let ann = key.register_agent("ann").await?;
    let ann = key.as_agent(&ann);
    Ok((key, ann))
}

async fn subscribe(key: &Api, body: Value) -> Result<String> {
    let made = key.post("/v1/subscriptions", body).await?.success()?;
    Ok(format!("/v1/subscriptions/{}", text(&made["id"])))
}

async fn post(ann: &Api, words: &str) -> Result<()> {
    ann.post_message("general", words).await?.success()?;
    Ok(())
}

/// Returns the id of a subscription as it is stored.
fn stored_id(subscription: &str) -> Result<i64> {
    Ok(subscription.rsplit('_').next().unwrap_or_default().parse()?)
}

/// Posts messages that one worker sends under one lease, because the subscription is blocked until all are posted. It
/// has failed `failures` times before.
async fn post_together(ann: &Api, subscription: &str, failures: i32, messages: &[&str]) -> Result<PgPool> {
    let (pool, id) = (PgPool::connect(&shared().await.database_url).await?, stored_id(subscription)?);
    sqlx::query(
        "UPDATE subscriptions SET failures = $2, failing_since = CASE WHEN $2 > 0 THEN now() END,
                                  blocked_until = now() + interval '1 hour' WHERE subscription_id = $1",
    )
    .bind(id)
    .bind(failures)
    .execute(&pool)
    .await?;
    for words in messages {
        post(ann, words).await?;
    }
    let unblock = "UPDATE subscriptions SET blocked_until = NULL WHERE subscription_id = $1";
    sqlx::query(unblock).bind(id).execute(&pool).await?;
    Ok(pool)
}

fn texts(received: &[Received]) -> Vec<String> {
    received.iter().map(|call| text(&call.json()["data"]["text"]).to_owned()).collect()
}

/// Waits until the deliveries of a subscription are in these states, newest first.
async fn wait_for_states(key: &Api, subscription: &str, expected: &[&str]) -> Result<Vec<Value>> {
    wait::until_ok("the calls to be settled", SOON, || async {
        let rows = key.get(&format!("{subscription}/deliveries")).await?.success()?;
        let rows = rows.as_array().context("a list")?.clone();
        let states: Vec<&str> = rows.iter().map(|row| text(&row["status"])).collect();
        anyhow::ensure!(states == expected, "{rows:?}");
        Ok(rows)
    })
    .await
}

#[tokio::test]
async fn events_arrive_in_order_filtered_and_signed() -> Result<()> {
    let receiver = Receiver::accepting_all().await?;
    let (key, ann) = workspace("signed").await?;
    let workspace_id = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
    key.register_agent("bob").await?;
    key.create_channel("dev").await?;
    post(&ann, "before the subscriptions").await?;
    let secret = STANDARD.encode([7; 32]);
    let all = json!({
        "events": ["message.created", "thread.reply"], "url": receiver.url("/all"), "secret": "s3cret",
        "headers": { "Authorization": "Bearer mine" },
    });
    let mentions = json!({
        "events": ["*"], "filter": { "channel": "general", "mentions": "bob" }, "url": receiver.url("/bob"),
        "secret": format!("whsec_{secret}"), "signature_scheme": "standard-webhooks",
    });
    subscribe(&key, all).await?;
    subscribe(&key, mentions).await?;
    for number in 0..20 {
        post(&ann, &format!("{number}{}", if number % 5 == 0 { " @bob" } else { "" })).await?;
    }
    let received = receiver.wait_for(24, SOON).await;
    let of = |path: &str| received.iter().filter(|call| call.path == path).cloned().collect::<Vec<_>>();
    let (all, bob) = (of("/all"), of("/bob"));
    let numbers: Vec<String> =
        (0..20).map(|number| format!("{number}{}", if number % 5 == 0 { " @bob" } else { "" })).collect();
    assert_eq!(texts(&all), numbers, "in order, and nothing from before");
    assert_eq!(texts(&bob), ["0 @bob", "5 @bob", "10 @bob", "15 @bob"]);
    for call in &all {
        let body = call.json();
        assert_eq!((text(&body["type"]), text(&body["workspace_id"])), ("message.created", &*workspace_id));
        assert_eq!((text(&body["data"]["channel_name"]), text(&body["data"]["from_name"])), ("general", "ann"));
        assert_eq!(call.header("x-relay-event"), "message.created");
        assert_eq!(call.header("x-relay-timestamp"), text(&body["timestamp"]));
        assert_eq!((call.header("authorization"), call.header("content-type")), ("Bearer mine", "application/json"));
        let tag: String = hmac_sha256(b"s3cret", &call.body).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(call.header("x-relay-signature"), format!("sha256={tag}"));
    }
    for call in &bob {
        assert_eq!(call.header("webhook-signature"), standard_signature(&[7; 32], call));
    }
    Ok(())
}

#[tokio::test]
async fn a_failing_call_is_attempted_three_times_with_the_same_id() -> Result<()> {
    // The first event fails at every attempt, the second is rejected permanently.
    let receiver = Receiver::start(|_, call| match text(&call.json()["data"]["text"]) {
        "fails" => Reply::Status(500),
        "refused" => Reply::Status(404),
        _ => Reply::Status(200),
    })
    .await?;
    let (key, ann) = workspace("failing").await?;
    let subscription = subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    for words in ["fails", "refused", "fine"] {
        post(&ann, words).await?;
    }
    let received = receiver.wait_for(5, SOON).await;
    assert_eq!(texts(&received), ["fails", "fails", "fails", "refused", "fine"], "the next one waits for the first");
    let ids: HashSet<&str> = received[..3].iter().map(|call| call.header("webhook-id")).collect();
    assert_eq!(ids.len(), 1, "the same id at each attempt");
    assert_ne!(received[3].header("webhook-id"), received[2].header("webhook-id"));
    let pauses = [received[1].at - received[0].at, received[2].at - received[1].at];
    assert!(pauses[0] >= Duration::from_millis(900) && pauses[1] >= Duration::from_millis(1900), "{pauses:?}");
    let rows = wait_for_states(&key, &subscription, &["delivered", "dead_letter", "dead_letter"]).await?;
    assert_eq!((rows[2]["attempts"].as_i64(), rows[2]["last_status_code"].as_i64()), (Some(3), Some(500)));
    assert_eq!((rows[1]["attempts"].as_i64(), text(&rows[1]["last_error"])), (Some(1), "HTTP 404"));

    let path = format!("{subscription}/deliveries/{}/replay", text(&rows[1]["id"]));
    key.post_empty(&path).await?.success()?;
    let received = receiver.wait_for(6, SOON).await;
    assert_eq!(received[5].header("webhook-id"), text(&rows[1]["id"]), "sent once more, under its own id");
    Ok(())
}

#[tokio::test]
async fn a_hung_url_does_not_block_others() -> Result<()> {
    let (hanging, healthy) = (Receiver::start(|_, _| Reply::Hang(Vec::new())).await?, Receiver::accepting_all().await?);
    let (key, ann) = workspace("hanging").await?;
    let stuck = subscribe(&key, json!({ "events": ["message.created"], "url": hanging.url("/") })).await?;
    post(&ann, "first").await?;
    hanging.wait_for(1, SOON).await;
    subscribe(&key, json!({ "events": ["message.created"], "url": healthy.url("/") })).await?;
    let mut said_at = Vec::new();
    for number in 0..10 {
        said_at.push(Instant::now());
        post(&ann, &number.to_string()).await?;
    }
    let received = healthy.wait_for(10, SOON).await;
    // Behind the call that hangs for 10 s all of them would have been late.
    let took: Vec<Duration> = received.iter().zip(said_at).map(|(call, said)| call.at - said).collect();
    assert!(took.iter().filter(|took| **took < Duration::from_secs(5)).count() >= 5, "{took:?}");
    let rows = key.get(&format!("{stuck}/deliveries?status=delivered")).await?.success()?;
    assert_eq!(rows, json!([]));
    Ok(())
}

#[tokio::test]
async fn a_url_that_answers_410_is_disabled_and_missed_events_can_be_replayed() -> Result<()> {
    let gone = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let flag = std::sync::Arc::clone(&gone);
    let is_gone = move || flag.load(std::sync::atomic::Ordering::SeqCst);
    let receiver = Receiver::start(move |_, _| Reply::Status(if is_gone() { 410 } else { 200 })).await?;
    let (key, ann) = workspace("gone").await?;
    post(&ann, "before everything").await?;
    let subscription = subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    let since = key.get(&subscription).await?.success()?["created_at"].clone();
    post(&ann, "one").await?;
    wait::until_ok("the subscription to be switched off", SOON, || async {
        let shown = key.get(&subscription).await?.success()?;
        anyhow::ensure!(shown["is_active"] == false && shown["disabled_reason"] == "gone", "{shown}");
        Ok(())
    })
    .await?;
    let log = key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    let reported =
        log["events"].as_array().into_iter().flatten().find(|event| event["type"] == "subscription.disabled");
    let reported = reported.context("an event says so")?;
    assert_eq!((text(&reported["payload"]["reason"]), reported["payload"]["url"].is_null()), ("gone", true));

    post(&ann, "two").await?;
    gone.store(false, std::sync::atomic::Ordering::SeqCst);
    let path = format!("{subscription}/replay");
    key.post(&path, json!({ "since": "yesterday" })).await?.refused(400, "invalid_request")?;
    let shown = key.post(&path, json!({ "since": since })).await?.success()?;
    assert_eq!((&shown["is_active"], &shown["disabled_reason"]), (&json!(true), &Value::Null));
    post(&ann, "three").await?;
    let received = receiver.wait_for(4, SOON).await;
    assert_eq!(texts(&received), ["one", "one", "two", "three"], "what was missed comes, in order, and no more");
    wait_for_states(&key, &subscription, &["delivered"; 3]).await?;

    // A second replay sends nothing.
    key.post(&path, json!({ "since": since })).await?.success()?;
    post(&ann, "four").await?;
    wait_for_states(&key, &subscription, &["delivered"; 4]).await?;
    assert_eq!(texts(&receiver.received()[4..]), ["four"]);
    Ok(())
}

#[tokio::test]
async fn lasting_failure_disables_a_subscription() -> Result<()> {
    let receiver = Receiver::start(|_, _| Reply::Status(500)).await?;
    let (key, ann) = workspace("lasting").await?;
    let subscription = subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    // Simulates a day of failed attempts.
    let pool = PgPool::connect(&shared().await.database_url).await?;
    sqlx::query(
        "UPDATE subscriptions SET failures = 30, failing_since = now() - interval '25 hours' WHERE subscription_id = $1",
    )
    .bind(stored_id(&subscription)?)
    .execute(&pool)
    .await?;
    post(&ann, "one more").await?;
    wait::until_ok("the subscription to be switched off", SOON, || async {
        let shown = key.get(&subscription).await?.success()?;
        anyhow::ensure!(shown["disabled_reason"] == "failing", "{shown}");
        Ok(())
    })
    .await?;
    assert_eq!(receiver.count(), 1);
    Ok(())
}

#[tokio::test]
async fn a_success_ends_the_probing_for_the_next_event_as_well() -> Result<()> {
    // The second call fails: the first attempt of the second event.
    let receiver = Receiver::start(|number, _| Reply::Status(if number == 1 { 503 } else { 200 })).await?;
    let (key, ann) = workspace("recovered").await?;
    let subscription = subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    post_together(&ann, &subscription, 5, &["first", "second"]).await?;
    let received = receiver.wait_for(3, SOON).await;
    assert_eq!(texts(&received), ["first", "second", "second"]);
    // A probe comes after 30 s, the second attempt of an event after 1 s.
    let pause = received[2].at - received[1].at;
    assert!(pause < Duration::from_secs(15), "{pause:?}");
    Ok(())
}

#[tokio::test]
async fn a_url_that_refuses_every_event_is_probed_from_the_fifth_on() -> Result<()> {
    let receiver = Receiver::start(|_, _| Reply::Status(404)).await?;
    let (key, ann) = workspace("refusing").await?;
    let subscription = subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    let pool = post_together(&ann, &subscription, 0, &["0", "1", "2", "3", "4", "5", "6", "7"]).await?;
    let id = stored_id(&subscription)?;
    let blocked = "SELECT coalesce(blocked_until > now() + interval '10 seconds', false) FROM subscriptions
                    WHERE subscription_id = $1";
    wait::until_ok("the subscription to be blocked", SOON, || async {
        let is_blocked: bool = sqlx::query_scalar(blocked).bind(id).fetch_one(&pool).await?;
        anyhow::ensure!(is_blocked, "{} calls", receiver.count());
        Ok(())
    })
    .await?;
    assert_eq!(receiver.count(), 5);
    Ok(())
}

#[tokio::test]
async fn delivery_events_can_be_subscribed_to() -> Result<()> {
    let receiver = Receiver::accepting_all().await?;
    let (key, ann) = workspace("single-deliveries").await?;
    let bob = key.as_agent(&key.register_agent("bob").await?);
    subscribe(&key, json!({ "events": ["delivery.failed"], "url": receiver.url("/") })).await?;
    ann.dm("bob", "hello").await?.success()?;
    let waiting = bob.get("/v1/deliveries").await?.success()?;
    let id = text(&waiting[0]["id"]).to_owned();
    bob.post(&format!("/v1/deliveries/{id}/fail"), json!({ "error": "broken" })).await?.success()?;
    let received = receiver.wait_for(1, SOON).await;
    let body = received[0].json();
    assert_eq!((text(&body["type"]), text(&body["data"]["delivery_id"])), ("delivery.failed", &*id));
    Ok(())
}

#[tokio::test]
async fn killed_workers_lose_nothing_and_keep_the_order() -> Result<()> {
    const EVENTS: usize = 300;
    let receiver =
        Receiver::start(|_, _| Reply::After(Duration::from_millis(20), Box::new(Reply::Status(200)))).await?;
    let stack = Stack::builder().gateways(1).workers(2).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "killed").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    subscribe(&key, json!({ "events": ["message.created"], "url": receiver.url("/") })).await?;
    for number in 0..EVENTS {
        post(&ann, &number.to_string()).await?;
    }
    // Each kill hits work in progress; the other worker takes over when the lease has expired.
    for (nth, at) in [(0, EVENTS / 6), (1, EVENTS / 3), (0, EVENTS / 2)] {
        receiver.wait_for(at, Duration::from_secs(60)).await;
        stack.workers()[nth].restart().await?;
    }
    let distinct = |calls: &[Received]| {
        let mut known = HashSet::new();
        calls.iter().filter(|call| known.insert(call.header("webhook-id").to_owned())).cloned().collect::<Vec<_>>()
    };
    wait::until("all events to arrive", Duration::from_secs(90), || async {
        distinct(&receiver.received()).len() >= EVENTS
    })
    .await;
    let received = receiver.received();
    let firsts = distinct(&received);
    let expected: Vec<String> = (0..EVENTS).map(|number| number.to_string()).collect();
    assert_eq!(texts(&firsts), expected, "each event first arrives in its turn");
    assert!(received.iter().all(|call| call.concurrent == 0), "never two calls at once");
    assert!(received.len() <= EVENTS + 3, "a kill repeats one call at most: {}", received.len());
    Ok(())
}
