//! Poll nodes: their agents claim deliveries over REST.

use std::time::{Duration, Instant};

use anyhow::Result;
use relay_testkit::client::Api;
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn seqs(rows: &Value) -> Vec<i64> {
    rows.as_array().into_iter().flatten().filter_map(|row| row["seq"].as_i64()).collect()
}

/// Creates ann, and bob on a node of kind poll.
async fn scene(name: &str) -> Result<(Api, Api, Api)> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let ann = key.register_agent("ann").await?;
    let bob = key.register_agent("bob").await?;
    key.post("/v1/nodes", json!({ "name": "queue", "kind": "poll" })).await?.success()?;
    key.bind("queue", "bob").await?;
    Ok((key.as_agent(&ann), key.as_agent(&bob), key))
}

async fn claim(bob: &Api, body: Value) -> Result<Value> {
    bob.post("/v1/deliveries/claim", body).await?.success()
}

#[tokio::test]
async fn claimed_deliveries_are_exclusive_until_reported_or_the_lease_ends() -> Result<()> {
    let (ann, bob, _) = scene("poll-claim").await?;
    for n in 0..3 {
        ann.dm("bob", &format!("message {n}")).await?.success()?;
    }
    let first = claim(&bob, json!({ "limit": 2, "lease_ms": 600_000 })).await?;
    assert_eq!(seqs(&first), [1, 2]);
    assert_eq!((text(&first[0]["status"]), &first[0]["claim_count"]), ("delivered", &json!(1)));
    assert_eq!(seqs(&claim(&bob, json!({ "limit": 10 })).await?), [3], "the first two are taken");
    assert_eq!(seqs(&claim(&bob, json!({})).await?), [0_i64; 0]);
    let acked = bob.post_empty(&format!("/v1/deliveries/{}/ack", text(&first[0]["id"]))).await?.success()?;
    assert_eq!(text(&acked["status"]), "acked");
    // A delivery whose lease ends is returned to a waiting claim.
    ann.dm("bob", "message 3").await?.success()?;
    let began = Instant::now();
    let short = claim(&bob, json!({ "lease_ms": 1500 })).await?;
    assert_eq!((seqs(&short), &short[0]["claim_count"]), (vec![4], &json!(1)));
    let again = claim(&bob, json!({ "wait_ms": 30000 })).await?;
    assert_eq!((seqs(&again), &again[0]["claim_count"]), (vec![4], &json!(2)));
    assert!(began.elapsed() >= Duration::from_millis(1400), "not before its end: {:?}", began.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_waiting_claim_returns_when_a_delivery_arrives() -> Result<()> {
    let (ann, bob, _) = scene("poll-wait").await?;
    let waiting = tokio::spawn({
        let bob = bob.clone();
        async move { claim(&bob, json!({ "wait_ms": 30000 })).await }
    });
    let began = Instant::now();
    ann.dm("bob", "at last").await?.success()?;
    let claimed = waiting.await??;
    assert_eq!(seqs(&claimed), [1]);
    assert!(began.elapsed() < Duration::from_secs(25), "before the wait was over: {:?}", began.elapsed());
    assert_eq!(text(&claimed[0]["message"]["text"]), "at last");
    // A claim without deliveries ends in time.
    let began = Instant::now();
    assert_eq!(seqs(&claim(&bob, json!({ "wait_ms": 1000 })).await?), [0_i64; 0]);
    assert!((Duration::from_millis(900)..Duration::from_secs(25)).contains(&began.elapsed()));
    Ok(())
}

#[tokio::test]
async fn a_claim_may_wait_for_thirty_seconds() -> Result<()> {
    let (_, bob, _) = scene("poll-long").await?;
    let began = Instant::now();
    assert_eq!(seqs(&claim(&bob, json!({ "wait_ms": 30000 })).await?), [0_i64; 0]);
    assert!((Duration::from_secs(29)..Duration::from_secs(58)).contains(&began.elapsed()), "{:?}", began.elapsed());
    Ok(())
}

#[tokio::test]
async fn retryable_failures_are_redelivered_and_permanent_ones_are_not() -> Result<()> {
    let (ann, bob, _) = scene("poll-fail").await?;
    ann.dm("bob", "one").await?.success()?;
    ann.dm("bob", "two").await?.success()?;
    let claimed = claim(&bob, json!({})).await?;
    let (one, two) = (text(&claimed[0]["id"]).to_owned(), text(&claimed[1]["id"]).to_owned());
    let failed = bob
        .post(&format!("/v1/deliveries/{one}/fail"), json!({ "error": "busy", "retryable": true }))
        .await?
        .success()?;
    assert_eq!((text(&failed["status"]), text(&failed["error"])), ("queued", "busy"), "{failed}");
    assert!(failed["available_at"].is_string() && failed["next_attempt_at"].is_null(), "{failed}");
    let failed = bob
        .post(&format!("/v1/deliveries/{two}/fail"), json!({ "error": "broken", "retryable": false }))
        .await?
        .success()?;
    assert_eq!(text(&failed["status"]), "failed");
    let again = claim(&bob, json!({ "wait_ms": 30000 })).await?;
    assert_eq!((seqs(&again), text(&again[0]["id"]), &again[0]["claim_count"]), (vec![1], &*one, &json!(2)));
    Ok(())
}

#[tokio::test]
async fn deferred_deliveries_return_when_due() -> Result<()> {
    let (ann, bob, _) = scene("poll-defer").await?;
    ann.dm("bob", "later").await?.success()?;
    let claimed = claim(&bob, json!({})).await?;
    let path = format!("/v1/deliveries/{}/defer", text(&claimed[0]["id"]));
    // A past time is due at once; a distant one is refused.
    bob.post(&path, json!({ "available_at": "2036-01-01T00:00:00Z" })).await?.success()?;
    assert_eq!(seqs(&claim(&bob, json!({})).await?), [0_i64; 0]);
    bob.post(&path, json!({ "available_at": "2020-01-01T00:00:00Z" })).await?.success()?;
    wait::until("it to come back", Duration::from_secs(30), || async {
        claim(&bob, json!({})).await.is_ok_and(|rows| seqs(&rows) == [1])
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn only_agents_on_poll_nodes_claim_and_bounds_are_checked() -> Result<()> {
    let (ann, bob, _) = scene("poll-refused").await?;
    ann.post("/v1/deliveries/claim", json!({})).await?.refused(409, "agent_location_conflict")?;
    for body in [
        json!({ "limit": 0 }),
        json!({ "limit": 201 }),
        json!({ "wait_ms": 30001 }),
        json!({ "lease_ms": 999 }),
        json!({ "lease_ms": 43_200_001 }),
    ] {
        bob.post("/v1/deliveries/claim", body.clone()).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}
