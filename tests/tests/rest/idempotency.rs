//! Idempotency under concurrency: equal posts with one key at two gateways create one message, one fan-out and one
//! event.

use anyhow::Result;
use futures::future::try_join_all;
use relay_testkit::client::{Api, Reply};
use relay_testkit::shared;
use reqwest::Method;
use serde_json::{Value, json};

/// Number of concurrent equal posts.
const POSTS: usize = 50;

struct Room {
    key: Api,
    /// Client of the sender at each gateway.
    ann: [Api; 2],
    /// Client of the recipient.
    bob: Api,
    carol: Api,
}

async fn room(name: &str) -> Result<Room> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], name).await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let (bob, carol) =
        (key.as_agent(&key.register_agent("bob").await?), key.as_agent(&key.register_agent("carol").await?));
    ann.create_channel("room").await?;
    bob.join("room").await?;
    carol.at(&gateways[1]).join("room").await?;
    Ok(Room { ann: [ann.clone(), ann.at(&gateways[1])], key, bob, carol })
}

/// Posts with an idempotency key; repeats while another post with it is in progress.
async fn keyed(sender: &Api, path: &str, key: &str, body: &Value) -> Result<Reply> {
    loop {
        let reply = sender.call(Method::POST, path, Some(body.clone()), &[("idempotency-key", key)]).await?;
        if reply.code() != "idempotency_in_progress" {
            return Ok(reply);
        }
        assert_eq!(reply.status, 409);
    }
}

/// Posts the same thing under the same key at both gateways at once. All get one answer, which is returned.
async fn post_concurrently(senders: &[Api; 2], path: &str, key: &str, body: &Value) -> Result<Value> {
    let replies = try_join_all((0..POSTS).map(|nth| keyed(&senders[nth % 2], path, key, body))).await?;
    let fresh = replies.iter().filter(|reply| !reply.headers.contains_key("idempotency-replayed")).count();
    assert_eq!(fresh, 1, "{path}: one of them did it, the others replay it");
    for reply in &replies {
        assert_eq!((reply.status, reply.data()), (201, replies[0].data()), "{path}");
    }
    Ok(replies[0].data().clone())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The kinds of the events of a workspace, in order.
async fn events(key: &Api) -> Result<Vec<String>> {
    let page = key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    let kind = |event: &Value| event["type"].as_str().unwrap_or_default().to_owned();
    Ok(list(&page["events"]).iter().map(kind).collect())
}

/// The texts that wait in a mailbox, in order of their seqs, which have no gap.
async fn waiting(agent: &Api) -> Result<Vec<String>> {
    let rows = agent.get("/v1/deliveries?limit=200").await?.success()?;
    let seqs: Vec<_> = list(&rows).iter().filter_map(|row| row["seq"].as_u64()).collect();
    assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>(), "no seq was used up");
    Ok(list(&rows).iter().map(|row| row["message"]["text"].as_str().unwrap_or_default().to_owned()).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_equal_posts_create_one_message_one_fan_out_and_one_event() -> Result<()> {
    let Room { key, ann, bob, carol } = room("under-fire").await?;
    let root = ann[0].post_message("room", "root").await?.success()?;
    let group = ann[0].post("/v1/dm/group", json!({ "participants": ["bob", "carol"] })).await?.success()?;
    let thread = format!("/v1/messages/{}/replies", root["id"].as_str().unwrap_or_default());
    let conversation = format!("/v1/dm/{}/messages", group["id"].as_str().unwrap_or_default());
    let operations = [
        ("/v1/channels/room/messages", json!({ "text": "channel" }), "message.created"),
        (thread.as_str(), json!({ "text": "thread" }), "thread.reply"),
        ("/v1/dm", json!({ "to": "bob", "text": "dm" }), "dm.received"),
        ("/v1/dm/group", json!({ "participants": ["bob", "carol"], "text": "new group" }), "group_dm.received"),
        (conversation.as_str(), json!({ "text": "conversation" }), "group_dm.received"),
    ];
    for (path, body, kind) in &operations {
        let count = |kinds: &[String]| kinds.iter().filter(|made| made.as_str() == *kind).count();
        let before = count(&events(&key).await?);
        post_concurrently(&ann, path, "one-key-for-all", body).await?;
        assert_eq!(count(&events(&key).await?), before + 1, "{path}: one event {kind}");
    }
    assert_eq!(waiting(&bob).await?, ["root", "channel", "thread", "dm", "new group", "conversation"]);
    assert_eq!(waiting(&carol).await?, ["root", "channel", "thread", "new group", "conversation"]);
    assert!(waiting(&ann[0]).await?.is_empty(), "nothing comes back to the sender");
    assert_eq!(list(key.get("/v1/channels/room/messages").await?.data()).len(), 2);
    assert_eq!(list(key.get(&thread).await?.data().get("replies").unwrap_or(&Value::Null)).len(), 1);
    assert_eq!(list(ann[1].get(&conversation).await?.data()).len(), 1);
    assert_eq!(list(ann[1].get("/v1/dm/conversations").await?.data()).len(), 3, "one letter and two groups");
    Ok(())
}

#[tokio::test]
async fn a_repeated_post_is_answered_even_if_it_would_fail_now() -> Result<()> {
    let Room { key, ann, .. } = room("gone-since").await?;
    let (dm, post) = (json!({ "to": "bob", "text": "hi" }), json!({ "text": "hi all" }));
    let first = keyed(&ann[0], "/v1/dm", "k1", &dm).await?.success()?;
    let second = keyed(&ann[0], "/v1/channels/room/messages", "k2", &post).await?.success()?;
    key.call(Method::DELETE, "/v1/agents/bob", None, &[]).await?.success()?;
    key.call(Method::DELETE, "/v1/channels/room", None, &[]).await?.success()?;
    for (path, id, body, before) in
        [("/v1/dm", "k1", &dm, &first), ("/v1/channels/room/messages", "k2", &post, &second)]
    {
        let again = keyed(&ann[1], path, id, body).await?;
        assert!(again.headers.contains_key("idempotency-replayed"), "{path}: {}", again.body);
        assert_eq!(again.data()["id"], before["id"], "{path}");
        keyed(&ann[1], path, id, &json!({ "to": "bob", "text": "other" }))
            .await?
            .refused(409, "idempotency_key_reused")?;
        assert!(keyed(&ann[1], path, "fresh", body).await?.status >= 400, "{path}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_equal_session_events_are_recorded_once() -> Result<()> {
    let Room { key, ann, .. } = room("session-fire").await?;
    let path = "/v1/agents/ann/events";
    let made =
        post_concurrently(&ann, path, "one-key", &json!({ "type": "tool.called", "payload": { "tool": "grep" } }))
            .await?;
    assert_eq!(made["sequence"], 1);
    assert_eq!(list(key.get(path).await?.data()), [made]);
    let reported = events(&key).await?.into_iter().filter(|kind| kind == "harness.tool.called").count();
    assert_eq!(reported, 1);
    Ok(())
}
