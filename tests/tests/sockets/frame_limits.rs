//! Accepted content fits into frames and is readable by a strict parser; refused content leaves no trace.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::raw::{Raw, is_failure};
use relay_testkit::client::{Api, Reply};
use relay_testkit::shared;
use serde_json::{Value, json};

/// Creates a workspace and returns an agent's client.
async fn agent(name: &str) -> Result<(Api, Api)> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let ann = key.register_agent("ann").await?;
    let as_ann = key.as_agent(&ann);
    Ok((key, as_ann))
}

fn refusal(reply: &Reply, status: u16, code: &str, what: &str) {
    assert!(is_failure(reply), "{what}: {} {}", reply.status, reply.body);
    assert_eq!((reply.status, reply.code()), (status, code), "{what}: {}", reply.body);
}

#[tokio::test]
async fn oversized_content_is_refused_before_the_commit() -> Result<()> {
    let (key, ann) = agent("frames").await?;
    let bob = key.register_agent("bob").await?;
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    let blocks = |bytes: usize| json!({ "text": "t", "blocks": [{ "type": "text", "text": "x".repeat(bytes) }] });
    let taken = ann.post("/v1/channels/general/messages", blocks(890 * 1024)).await?;
    assert_eq!(taken.status, 201, "{}", taken.body);
    let frame = socket.expect("deliver").await?;
    assert!(frame.to_string().len() <= 900 * 1024, "an encoded frame is at most 900 KiB");
    assert_eq!((frame["seq"].as_u64(), &frame["payload"]["data"]["blocks"]), (Some(1), &taken.data()["blocks"]));
    let id = taken.data()["id"].as_str().unwrap_or_default();

    let refused = [
        ("/v1/channels/general/messages".to_owned(), blocks(905 * 1024)),
        (format!("/v1/messages/{id}/replies"), blocks(905 * 1024)),
        // Characters that JSON escapes sixfold, in both copies within a conversation's frame.
        ("/v1/dm".to_owned(), json!({ "to": "bob", "text": "\u{1}".repeat(150_000) })),
        ("/v1/dm/group".to_owned(), json!({ "participants": ["bob"], "text": "\u{1}".repeat(150_000) })),
    ];
    for (path, body) in refused {
        refusal(&ann.post(&path, body).await?, 413, "payload_too_large", &path);
    }
    assert_eq!(ann.get("/v1/channels/general/messages").await?.data().as_array().map(Vec::len), Some(1));
    assert_eq!(ann.get(&format!("/v1/messages/{id}/replies")).await?.data()["replies"], json!([]));
    for conversation in ann.get("/v1/dm/conversations").await?.success()?.as_array().into_iter().flatten() {
        assert_eq!(conversation["last_message"], Value::Null, "{conversation}");
        assert_eq!(conversation["type"], "1:1", "a group whose first message cannot be sent is not made");
    }
    // None of them was assigned a seq.
    ann.dm("bob", "small").await?.success()?;
    assert_eq!(socket.expect("deliver").await?["seq"], 2);
    Ok(())
}

#[tokio::test]
async fn accepted_content_is_readable_by_a_strict_parser() -> Result<()> {
    let (key, ann) = agent("depths").await?;
    let bob = key.register_agent("bob").await?;
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    socket.auto_ack(true);
    let mut taken = 0;
    for depth in [1, 16, 60, 100, 118, 120, 121, 122, 123, 124, 125, 126, 127, 128, 1000, 20_000] {
        for (open, close) in [("[", "]"), (r#"[{"a":"#, "}]")] {
            let levels = depth / open.matches(['[', '{']).count().max(1);
            let nested = format!("{}1{}", open.repeat(levels.max(1)), close.repeat(levels.max(1)));
            let body = format!(r#"{{"text":"d{depth}","blocks":{nested}}}"#);
            let reply = Raw::new("POST", format!("{}/v1/channels/general/messages", key.base()));
            let reply = reply.bearer(ann.token()).json(body).send().await?;
            if reply.status == 400 {
                assert!(is_failure(&reply), "{}", reply.body);
                continue;
            }
            assert_eq!(reply.status, 201, "depth {depth}: {}", reply.body);
            // The testkit's parser has the usual limit of 128 levels.
            let frame = socket.next_frame(Duration::from_secs(10)).await?;
            let frame = if frame["type"] == "context.update" {
                socket.next_frame(Duration::from_secs(10)).await?
            } else {
                frame
            };
            taken += 1;
            assert_eq!((&frame["type"], &frame["seq"]), (&json!("deliver"), &json!(taken)), "depth {depth}");
        }
    }
    assert!(taken >= 4, "a reasonable depth is taken");
    let list = ann.get("/v1/channels/general/messages").await?;
    assert_eq!(list.data().as_array().map(Vec::len), Some(taken));
    Ok(())
}
