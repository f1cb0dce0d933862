//! Reactions and edited messages: effects on lists, and their events.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::shared;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

struct Room {
    key: Api,
    ann: Api,
    bob: Api,
}

async fn room(name: &str) -> Result<Room> {
    let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (ann, bob) = (key.as_agent(&ann), key.as_agent(&bob).at(&shared().await.gateways[1]));
    ann.create_channel("room").await?;
    bob.join("room").await?;
    Ok(Room { key, ann, bob })
}

/// Returns the events of one kind in a workspace's log.
async fn logged(key: &Api, kind: &str) -> Result<Vec<Value>> {
    let page = key.get("/v1/workspace/events?since=0&limit=500").await?;
    let events = page.success()?["events"].as_array().cloned().unwrap_or_default();
    Ok(events.into_iter().filter(|event| event["type"] == kind).collect())
}

/// Returns the next `deliver` frame of a kind.
async fn next_of(socket: &mut NodeSocket, kind: &str) -> Result<Value> {
    loop {
        let frame = socket.next_frame(SOON).await?;
        if frame["payload"]["type"] == kind || frame["event"] == kind {
            return Ok(frame);
        }
    }
}

#[tokio::test]
async fn a_reaction_counts_once_and_is_announced_to_members() -> Result<()> {
    let room = room("reactions").await?;
    let mut socket = room.ann.direct_socket().await?;
    let message = room.ann.post_message("room", "ship it?").await?.success()?;
    let path = format!("/v1/messages/{}/reactions", text(&message["id"]));
    let added = room.bob.post(&path, json!({ "emoji": "rocket" })).await?;
    assert_eq!(added.status, 201);
    let added = added.success()?;
    assert_eq!(
        (&added["message_id"], text(&added["agent_name"]), text(&added["emoji"])),
        (&message["id"], "bob", "rocket")
    );
    assert!(text(&added["id"]).parse::<i64>().is_ok() && text(&added["created_at"]).ends_with('Z'));
    let again = room.bob.post(&path, json!({ "emoji": "rocket" })).await?;
    assert_eq!((again.status, again.data()), (201, &added), "a repeat is the same reaction");

    let frame = next_of(&mut socket, "message.reacted").await?;
    assert_eq!((frame["seq"].as_i64(), text(&frame["mode"])), (Some(0), "wait"));
    assert_ne!(frame["msg_id"], message["id"], "a message's id would hide the message from brokers");
    let data = &frame["payload"]["data"];
    assert_eq!(
        (&data["message_id"], text(&data["emoji"]), text(&data["agent_name"]), text(&data["action"])),
        (&message["id"], "rocket", "bob", "added")
    );
    assert_eq!(text(&data["channel_name"]), "room");

    room.ann.post(&path, json!({ "emoji": "rocket" })).await?.success()?;
    room.ann.post(&path, json!({ "emoji": "🎉" })).await?.success()?;
    let expected = json!([
        { "emoji": "rocket", "count": 2, "agents": ["bob", "ann"] },
        { "emoji": "🎉", "count": 1, "agents": ["ann"] },
    ]);
    assert_eq!(room.key.get(&path).await?.success()?, expected);
    let listed = room.bob.get("/v1/channels/room/messages").await?.success()?;
    assert_eq!(listed[0]["reactions"], expected);
    let got = room.key.get(&format!("/v1/messages/{}", text(&message["id"]))).await?.success()?;
    assert_eq!(got["reactions"], expected);

    for emoji in ["%F0%9F%8E%89", "%F0%9F%8E%89", "never-there"] {
        assert_eq!(room.ann.delete(&format!("{path}/{emoji}")).await?.status, 204, "{emoji}");
    }
    assert_eq!(
        room.bob.get(&path).await?.success()?,
        json!([{ "emoji": "rocket", "count": 2, "agents": ["bob", "ann"] }])
    );
    let actions: Vec<_> = logged(&room.key, "message.reacted")
        .await?
        .iter()
        .map(|event| (text(&event["payload"]["action"]).to_owned(), text(&event["payload"]["emoji"]).to_owned()))
        .collect();
    let of = |action: &str, emoji: &str| (action.to_owned(), emoji.to_owned());
    let expected = [of("added", "rocket"), of("added", "rocket"), of("added", "🎉"), of("removed", "🎉")];
    assert_eq!(actions, expected, "real changes only");

    let long = "x".repeat(65);
    for bad in
        [json!({ "emoji": "" }), json!({ "emoji": long }), json!({}), json!({ "emoji": 1 }), json!({ "emoji": "a\nb" })]
    {
        room.bob.post(&path, bad).await?.refused(400, "invalid_request")?;
    }
    room.bob.post("/v1/messages/77/reactions", json!({ "emoji": "x" })).await?.refused(404, "message_not_found")?;
    for number in 0..49 {
        room.bob.post(&path, json!({ "emoji": format!("e{number}") })).await?.success()?;
    }
    room.bob.post(&path, json!({ "emoji": "one-too-many" })).await?.refused(400, "invalid_request")?;
    room.ann.post(&path, json!({ "emoji": "e7" })).await?.success()?;
    Ok(())
}

#[tokio::test]
async fn a_read_receipt_is_announced_once() -> Result<()> {
    let room = room("read-events").await?;
    let mut socket = room.ann.direct_socket().await?;
    let message = room.ann.post_message("room", "look").await?.success()?;
    for _ in 0..2 {
        room.bob.post_empty(&format!("/v1/messages/{}/read", text(&message["id"]))).await?.success()?;
    }
    let frame = next_of(&mut socket, "message.read").await?;
    assert_eq!(frame["seq"], 0);
    let data = &frame["payload"]["data"];
    assert_eq!((&data["message_id"], text(&data["agent_name"])), (&message["id"], "bob"));
    assert!(text(&data["read_at"]).ends_with('Z'));
    // The next frame is not a repetition.
    room.bob
        .post(&format!("/v1/messages/{}/reactions", text(&message["id"])), json!({ "emoji": "x" }))
        .await?
        .success()?;
    let next = socket.next_frame(SOON).await?;
    assert_eq!(text(&next["payload"]["type"]), "message.reacted", "{next}");
    Ok(())
}

#[tokio::test]
async fn an_edit_by_the_author_is_visible_everywhere() -> Result<()> {
    let room = room("updates").await?;
    let posted = room
        .ann
        .post(
            "/v1/channels/room/messages",
            json!({ "text": "teh plan", "data": { "a": 1 }, "blocks": [{ "type": "divider" }] }),
        )
        .await?
        .success()?;
    let path = format!("/v1/messages/{}", text(&posted["id"]));
    let changed = room.ann.patch(&path, json!({ "text": "the plan, @bob" })).await?.success()?;
    assert_eq!((text(&changed["text"]), &changed["mentions"]), ("the plan, @bob", &json!(["bob"])));
    for same in ["id", "created_at", "metadata", "blocks", "channel_id", "agent_id"] {
        assert_eq!(changed[same], posted[same], "{same}");
    }
    let changed = room.ann.patch(&path, json!({ "data": { "b": 2 }, "blocks": null })).await?.success()?;
    assert_eq!(
        (&changed["metadata"], &changed["blocks"], text(&changed["text"])),
        (&json!({ "b": 2 }), &Value::Null, "the plan, @bob")
    );
    assert_eq!(room.bob.get(&path).await?.success()?, changed);
    assert_eq!(room.bob.get("/v1/channels/room/messages").await?.data()[0]["text"], "the plan, @bob");
    let found = room.bob.get("/v1/search?q=plan").await?.success()?;
    assert_eq!((&found[0]["id"], text(&found[0]["text"])), (&posted["id"], "the plan, @bob"));
    assert_eq!(room.bob.get("/v1/search?q=teh").await?.success()?, json!([]), "the index follows");

    // A later connection gets the new version.
    let mut socket = room.bob.direct_socket().await?;
    let frame = socket.expect("deliver").await?;
    assert_eq!(text(&frame["payload"]["data"]["text"]), "the plan, @bob");
    room.ann.patch(&path, json!({ "text": "final" })).await?.success()?;
    let reported = next_of(&mut socket, "message.updated").await?;
    assert_eq!(
        (
            text(&reported["type"]),
            &reported["data"]["id"],
            text(&reported["data"]["text"]),
            text(&reported["data"]["from_name"])
        ),
        ("context.update", &posted["id"], "final", "ann")
    );
    let updates = logged(&room.key, "message.updated").await?;
    assert_eq!(updates.len(), 3);
    for event in updates {
        assert_eq!(event["payload"]["message"]["id"], posted["id"], "{event}");
        assert_eq!(text(&event["payload"]["channel"]), "room");
    }

    room.bob.patch(&path, json!({ "text": "mine" })).await?.refused(403, "forbidden")?;
    room.key.patch(&path, json!({ "text": "mine" })).await?.refused(403, "agent_token_required")?;
    room.ann.patch("/v1/messages/12", json!({ "text": "x" })).await?.refused(404, "message_not_found")?;
    for bad in [json!({}), json!({ "text": "" }), json!({ "text": 1 }), json!({ "blocks": {} }), json!({ "data": [] })]
    {
        room.ann
            .patch(&path, bad.clone())
            .await?
            .refused(400, "invalid_request")
            .map_err(|e| e.context(bad.to_string()))?;
    }
    let eve = room.key.as_agent(&room.key.register_agent("eve").await?);
    let dm = room.ann.dm("bob", "psst").await?.success()?;
    eve.patch(&format!("/v1/messages/{}", text(&dm["id"])), json!({ "text": "x" }))
        .await?
        .refused(404, "message_not_found")?;
    Ok(())
}
