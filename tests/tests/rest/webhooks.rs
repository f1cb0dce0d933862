//! Inbound webhooks: callers, posted messages, and the hidden author.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::shared;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns the next delivery on this socket, skipping other frames.
async fn next_deliver(socket: &mut NodeSocket) -> Result<Value> {
    loop {
        let frame = socket.next_frame(SOON).await?;
        if frame["type"] == "deliver" {
            return Ok(frame);
        }
    }
}

/// Creates a webhook `ci` into `#general`; returns a client with its token.
async fn hook(key: &Api) -> Result<(Value, Api)> {
    let created = key.post("/v1/webhooks", json!({ "name": "ci", "channel": "#general" })).await?;
    assert_eq!(created.status, 201, "{}", created.body);
    let created = created.success()?;
    let caller = key.with_token(text(&created["token"]));
    Ok((created, caller))
}

#[tokio::test]
async fn a_webhook_is_created_listed_and_deleted() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "hooks").await?;
    let workspace = key.get("/v1/workspace").await?.success()?;
    let (created, caller) = hook(&key).await?;
    let id = text(&created["webhook_id"]);
    assert!(id.starts_with("wh_") && id[3..].parse::<u64>().is_ok(), "{id}");
    let token = text(&created["token"]);
    assert!(token.starts_with("wh_live_") && token.len() == 8 + 48, "{token}");
    assert_eq!((text(&created["url"]), &created["is_active"]), (&*format!("/v1/hooks/{id}"), &json!(true)));
    assert_eq!((text(&created["name"]), text(&created["channel"])), ("ci", "general"));
    let listed = key.get("/v1/webhooks").await?.success()?;
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
    for field in ["id", "name", "channel", "url", "is_active", "created_at", "channel_id", "channel_name"] {
        assert!(listed[0].get(field).is_some(), "{field} missing in {listed}");
    }
    assert_eq!((&listed[0]["id"], &listed[0]["workspace_id"]), (&created["webhook_id"], &workspace["id"]));
    assert!(listed[0].get("token").is_none(), "shown once");

    let unnamed = key.post("/v1/webhooks", json!({ "channel": "general" })).await?.success()?;
    assert!(!text(&unnamed["name"]).is_empty());
    key.post("/v1/webhooks", json!({ "channel": "nowhere" })).await?.refused(404, "channel_not_found")?;
    key.post("/v1/webhooks", json!({ "name": "x" })).await?.refused(400, "invalid_request")?;
    key.post("/v1/webhooks", json!({ "name": "a\nb", "channel": "general" })).await?.refused(400, "invalid_request")?;

    let path = format!("/v1/webhooks/{id}");
    assert_eq!(key.delete(&path).await?.status, 204);
    key.delete(&path).await?.refused(404, "webhook_not_found")?;
    key.delete("/v1/webhooks/nonsense").await?.refused(404, "webhook_not_found")?;
    for base in &shared().await.gateways {
        let call = caller.at(base).post(&format!("/v1/hooks/{id}"), json!({ "text": "late" })).await?;
        call.refused(401, "webhook_token_invalid")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_call_needs_the_token_of_this_webhook() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "hook-tokens").await?;
    let (created, caller) = hook(&key).await?;
    let (other, _) = hook(&key).await?;
    let (path, others) = (format!("/v1/hooks/{}", text(&created["id"])), format!("/v1/hooks/{}", text(&other["id"])));
    let body = json!({ "text": "hi" });
    Api::anonymous(key.base()).post(&path, body.clone()).await?.refused(401, "webhook_token_required")?;
    for token in ["undefined", key.token(), "wh_live_"] {
        key.with_token(token).post(&path, body.clone()).await?.refused(401, "webhook_token_required")?;
    }
    key.with_token(&format!("wh_live_{}", "0".repeat(48)))
        .post(&path, body.clone())
        .await?
        .refused(401, "webhook_token_invalid")?;
    for path in [&*others, "/v1/hooks/wh_7", "/v1/hooks/nonsense"] {
        caller.post(path, body.clone()).await?.refused(401, "webhook_token_invalid")?;
    }
    // Its token grants nothing else.
    caller.get("/v1/channels").await?.refused(401, "unauthorized")?;
    assert_eq!(key.get("/v1/channels/general/messages").await?.success()?, json!([]), "nothing was posted");
    Ok(())
}

#[tokio::test]
async fn a_call_becomes_a_message_under_its_authors_name() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "hook-calls").await?;
    let ann = key.register_agent("ann").await?;
    let mut socket = key.as_agent(&ann).direct_socket().await?;
    let (created, caller) = hook(&key).await?;
    let path = format!("/v1/hooks/{}", text(&created["id"]));
    let caller = caller.at(&shared().await.gateways[1]);
    for (body, expected_text, expected_author, source) in [
        (json!({ "text": "built, @ann" }), "built, @ann", "ci", Value::Null),
        (json!({ "message": "again", "source": "github" }), "again", "github", json!("github")),
        (json!({ "text": "x", "source": "github", "author": "octo cat" }), "x", "octo cat", json!("github")),
        (json!({ "payload": { "a": [1, 2] } }), "Webhook ci: {\"a\":[1,2]}", "ci", Value::Null),
        (json!({ "action": "opened" }), "Webhook ci: {\"action\":\"opened\"}", "ci", Value::Null),
        (json!({}), "Webhook ci: {}", "ci", Value::Null),
    ] {
        let reply = caller.post(&path, body.clone()).await?;
        assert_eq!(reply.status, 201, "{}", reply.body);
        let answer = reply.success()?;
        assert_eq!(
            (text(&answer["text"]), text(&answer["author"]), &answer["source"], text(&answer["channel"])),
            (expected_text, expected_author, &source, "general"),
            "{body}"
        );
        assert_eq!(answer["webhook_id"], created["id"]);
        let frame = next_deliver(&mut socket).await?;
        let data = &frame["payload"]["data"];
        assert_eq!((text(&frame["payload"]["type"]), &data["id"]), ("message.created", &answer["message_id"]));
        assert_eq!((text(&data["from_name"]), text(&data["text"])), (expected_author, expected_text));
        let message = key.get(&format!("/v1/messages/{}", text(&answer["message_id"]))).await?.success()?;
        assert_eq!((text(&message["agent_name"]), text(&message["agent_type"])), (expected_author, "system"));
        assert_eq!(message["created_at"], answer["created_at"]);
    }
    for body in [
        json!({ "text": "x", "author": "a\nb" }),
        json!({ "text": "x", "author": "x".repeat(129) }),
        json!({ "text": 7 }),
        json!({ "text": "x", "blocks": {} }),
        json!({ "payload": "x".repeat(300 * 1024) }),
    ] {
        caller.post(&path, body).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn members_and_observers_are_notified_of_a_webhook_call() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "hook-events").await?;
    let ann = key.register_agent("ann").await?;
    let mut socket = key.as_agent(&ann).at(&shared().await.gateways[1]).direct_socket().await?;
    let (created, caller) = hook(&key).await?;
    let body = json!({ "text": "hi", "source": "s", "author": "a" });
    let answer = caller.post(&format!("/v1/hooks/{}", text(&created["id"])), body).await?.success()?;
    let notice = loop {
        let frame = socket.next_frame(SOON).await?;
        if frame["event"] == "webhook.received" {
            break frame;
        }
    };
    assert_eq!(
        notice["data"],
        json!({
            "webhook_id": created["id"],
            "channel": "general",
            "message": { "id": answer["message_id"], "text": "hi", "source": "s", "author": "a" },
        })
    );
    Ok(())
}

#[tokio::test]
async fn the_webhook_agent_is_hidden_everywhere() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "hidden").await?;
    let ann = key.register_agent("ann").await?;
    let (created, caller) = hook(&key).await?;
    let path = format!("/v1/hooks/{}", text(&created["id"]));
    caller.post(&path, json!({ "text": "hi" })).await?.success()?;
    let hidden = "__relay_webhook__";
    let names = |list: &Value, field: &str| -> Vec<String> {
        list.as_array().into_iter().flatten().map(|row| text(&row[field]).to_owned()).collect()
    };
    assert_eq!(names(&key.get("/v1/agents?status=all").await?.success()?, "name"), ["ann"]);
    assert_eq!(names(&key.get("/v1/agents/presence").await?.success()?, "agent_name"), ["ann"]);
    assert_eq!(names(&key.get("/v1/channels/general/members").await?.success()?, "agent_name"), ["ann"]);
    key.get(&format!("/v1/agents/{hidden}")).await?.refused(404, "agent_not_found")?;
    key.patch(&format!("/v1/agents/{hidden}"), json!({ "status": "active" })).await?.refused(404, "agent_not_found")?;
    key.post(&format!("/v1/agents/{hidden}/rotate-token"), json!({})).await?.refused(404, "agent_not_found")?;
    assert_eq!(key.delete(&format!("/v1/agents/{hidden}")).await?.status, 404);
    key.as_agent(&ann).dm(hidden, "psst").await?.refused(404, "agent_not_found")?;
    for name in [hidden, "__relay_anything"] {
        key.post("/v1/agents", json!({ "name": name })).await?.refused(400, "invalid_request")?;
    }
    // The webhook still works.
    caller.post(&path, json!({ "text": "still here" })).await?.success()?;
    // It cannot post to an archived channel.
    key.post("/v1/channels", json!({ "name": "old" })).await?.success()?;
    let old = key.post("/v1/webhooks", json!({ "channel": "old" })).await?.success()?;
    assert_eq!(key.delete("/v1/channels/old").await?.status, 204);
    let call = key.with_token(text(&old["token"])).post(text(&old["url"]), json!({ "text": "x" })).await?;
    call.refused(400, "channel_archived")?;
    key.post("/v1/webhooks", json!({ "channel": "old" })).await?.refused(400, "channel_archived")?;
    Ok(())
}
