//! Inbox and read state: unread items are counted from last-read pointers, which move by reading and by acknowledging.

use std::time::Duration;

use anyhow::Result;
use relay_acceptance::room::{Room, rows, text};
use relay_testkit::client::Api;
use relay_testkit::wait;
use reqwest::Method;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

async fn inbox(api: &Api) -> Result<Value> {
    api.get("/v1/inbox").await?.success()
}

#[tokio::test]
async fn an_inbox_contains_unread_items_only() -> Result<()> {
    let room = Room::new("inbox").await?;
    assert_eq!(
        inbox(&room.bob).await?,
        json!({ "unread_channels": [], "mentions": [], "unread_dms": [], "recent_reactions": [] })
    );
    let first = room.ann.post_message("room", "one").await?.success()?;
    let named = room.ann.post_message("room", "two @bob").await?.success()?;
    room.bob.post_message("room", "my own").await?.success()?;
    room.ann.create_channel("old").await?;
    room.bob.join("old").await?;
    room.ann.post_message("old", "forgotten @bob").await?.success()?;
    room.key.delete("/v1/channels/old").await?.success()?;
    let reply = room
        .ann
        .post(&format!("/v1/messages/{}/replies", text(&first["id"])), json!({ "text": "@bob in a thread" }))
        .await?
        .success()?;
    let dm = room.ann.dm("bob", "psst @bob").await?.success()?;
    let last = room.ann.dm("bob", "pssst").await?.success()?;

    let all = inbox(&room.bob).await?;
    assert_eq!(all["unread_channels"], json!([{ "channel_name": "room", "unread_count": 2 }]));
    let mentions: Vec<_> = rows(&all["mentions"]).iter().map(|mention| text(&mention["id"])).collect();
    let expected = [&dm, &reply, &named].map(|message| text(&message["id"]));
    assert_eq!(mentions, expected, "newest first, with replies and direct messages");
    for field in ["channel_name", "agent_name", "text", "created_at"] {
        assert!(all["mentions"][1][field].is_string(), "{field}");
    }
    assert_eq!(
        all["unread_dms"],
        json!([{
            "conversation_id": dm["conversation_id"], "from": "ann", "unread_count": 2,
            "last_message": { "id": last["id"], "text": "pssst", "created_at": last["created_at"] },
        }])
    );
    let rust = [("x-relaycast-origin-client", "@relaycast/sdk-rust")];
    let theirs = room.bob.call(Method::GET, "/v1/inbox", None, &rust).await?.success()?;
    assert_eq!(theirs["unread_dms"][0]["last_message"], "pssst", "the one client that knows no object");

    // The pointer moves forward only, and everything up to it counts as read.
    let read = room.bob.post_empty(&format!("/v1/messages/{}/read", text(&named["id"]))).await?.success()?;
    assert_eq!(read["agent_id"], room.bob_agent.id.as_str());
    room.bob.post_empty(&format!("/v1/messages/{}/read", text(&first["id"]))).await?.success()?;
    let all = inbox(&room.bob).await?;
    assert_eq!(all["unread_channels"], json!([]), "{all}");
    assert_eq!(rows(&all["mentions"]).len(), 2, "the reply and the direct message are newer than what was read");
    room.bob.post_empty(&format!("/v1/messages/{}/read", text(&last["id"]))).await?.success()?;
    assert_eq!(inbox(&room.bob).await?["unread_dms"], json!([]));

    let reacted = json!({ "emoji": "+1" });
    let path = |id: &Value| format!("/v1/messages/{}/reactions", text(id));
    room.bob.post(&path(&first["id"]), reacted.clone()).await?.success()?;
    room.ann.post(&path(&first["id"]), reacted).await?.success()?;
    let anns = inbox(&room.ann).await?["recent_reactions"].clone();
    assert_eq!(rows(&anns).len(), 1, "her own is none: {anns}");
    assert_eq!(
        (&anns[0]["message_id"], text(&anns[0]["channel_name"]), text(&anns[0]["emoji"]), text(&anns[0]["agent_name"])),
        (&first["id"], "room", "+1", "bob")
    );
    for (limit, expected) in [("1", 1), ("500", 2)] {
        room.ann.create_channel(&format!("more-{limit}")).await?;
        room.bob.join(&format!("more-{limit}")).await?;
        room.ann.post_message(&format!("more-{limit}"), "x").await?.success()?;
        let some = room.bob.get(&format!("/v1/inbox?limit={limit}")).await?.success()?;
        assert_eq!(rows(&some["unread_channels"]).len(), expected, "{some}");
    }
    room.bob.get("/v1/inbox?limit=0").await?.refused(400, "invalid_request")?;
    room.key.get("/v1/inbox").await?.refused(401, "unauthorized")?;
    Ok(())
}

/// Bob reads his inbox before and after each change, which mostly comes through another gateway.
#[tokio::test]
async fn an_inbox_follows_each_change() -> Result<()> {
    let room = Room::new("followed").await?;
    room.ann.create_channel("other").await?;
    room.bob.join("other").await?;
    let unread = |channels: &[(&str, i64)]| {
        let rows = channels.iter().map(|(name, count)| json!({ "channel_name": name, "unread_count": count }));
        Value::Array(rows.collect())
    };
    let patch = |id: &Value, new: &str| {
        let (ann, path, body) = (room.ann.clone(), format!("/v1/messages/{}", text(id)), json!({ "text": new }));
        async move { ann.call(Method::PATCH, &path, Some(body), &[]).await?.success() }
    };
    let path = |id: &Value, suffix: &str| format!("/v1/messages/{}/{suffix}", text(id));
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[]));

    let first = room.ann.post_message("room", "one").await?.success()?["id"].clone();
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[("room", 1)]));
    let second = room.ann.post_message("other", "two").await?.success()?["id"].clone();
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[("other", 1), ("room", 1)]));
    let own = room.bob.post_message("room", "three").await?.success()?["id"].clone();
    room.ann.post(&path(&own, "replies"), json!({ "text": "in a thread" })).await?.success()?;
    let all = inbox(&room.bob).await?;
    assert_eq!((&all["unread_channels"], &all["mentions"]), (&unread(&[("other", 1), ("room", 1)]), &json!([])));

    // An edit adds a mention, changes it, and removes it.
    for (new, count) in [("one @bob", 1), ("1 @bob", 1), ("1", 0)] {
        patch(&first, new).await?;
        let mentions = inbox(&room.bob).await?["mentions"].clone();
        assert_eq!(rows(&mentions).len(), count, "{new}: {mentions}");
        assert!(rows(&mentions).iter().all(|mention| mention["text"] == new), "{mentions}");
    }
    room.ann.post(&path(&own, "reactions"), json!({ "emoji": "+1" })).await?.success()?;
    assert_eq!(rows(&inbox(&room.bob).await?["recent_reactions"]).len(), 1);
    room.ann.delete(&path(&own, "reactions/+1")).await?.success()?;
    assert_eq!(inbox(&room.bob).await?["recent_reactions"], json!([]));

    let dm = room.ann.dm("bob", "psst").await?.success()?["id"].clone();
    assert_eq!(inbox(&room.bob).await?["unread_dms"][0]["last_message"]["text"], "psst");
    patch(&dm, "pssst").await?;
    let conversations = inbox(&room.bob).await?["unread_dms"].clone();
    assert_eq!(conversations[0]["last_message"]["text"], "pssst");
    assert_eq!((rows(&conversations).len(), &conversations[0]["unread_count"]), (1, &json!(1)));

    // Only the pointer of one channel moves, and only a membership ends and begins again.
    room.bob.post_empty(&path(&first, "read")).await?.success()?;
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[("other", 1)]));
    room.bob.post_empty("/v1/channels/other/leave").await?.success()?;
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[]));
    room.bob.join("other").await?;
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[("other", 1)]));
    // More events than an inbox reads to find out what has changed.
    for number in 0..201 {
        room.ann.post_message("room", &format!("{number}")).await?.success()?;
    }
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[("room", 201), ("other", 1)]));
    room.bob.post_empty(&path(&second, "read")).await?.success()?;
    room.key.delete("/v1/channels/room").await?.success()?;
    assert_eq!(inbox(&room.bob).await?["unread_channels"], unread(&[]));
    Ok(())
}

#[tokio::test]
async fn an_ack_over_a_socket_marks_messages_as_read() -> Result<()> {
    let room = Room::new("acked").await?;
    let mut socket = room.bob.direct_socket().await?;
    let mut ids = Vec::new();
    for number in 1..=3 {
        ids.push(room.ann.post_message("room", &format!("{number} @bob")).await?.success()?["id"].clone());
    }
    let dm = room.ann.dm("bob", "psst").await?.success()?;
    for _ in 0..4 {
        socket.expect("deliver").await?;
    }
    socket.ack("bob", 2).await?;
    let readers = |id: &Value| {
        let (ann, path) = (room.ann.clone(), format!("/v1/messages/{}/readers", text(id)));
        async move { ann.get(&path).await.ok().map(|reply| reply.data().clone()).unwrap_or_default() }
    };
    wait::until("the ack to be written", SOON, || async { rows(&readers(&ids[1]).await).len() == 1 }).await;
    let reader = readers(&ids[1]).await[0].clone();
    assert_eq!((text(&reader["agent_name"]), reader["agent_id"].as_str()), ("bob", Some(&*room.bob_agent.id)));
    assert!(text(&reader["read_at"]).ends_with('Z'));
    assert_eq!(readers(&ids[2]).await, json!([]));

    let all = inbox(&room.bob).await?;
    assert_eq!(all["unread_channels"], json!([{ "channel_name": "room", "unread_count": 1 }]));
    assert_eq!(rows(&all["mentions"]).len(), 1);
    assert_eq!(all["unread_dms"][0]["unread_count"], 1);
    let status = room.key.get("/v1/channels/room/read-status").await?.success()?;
    let of = |name: &str| rows(&status).iter().find(|row| row["agent_name"] == name).cloned().unwrap_or_default();
    assert_eq!((&of("bob")["last_read_id"], of("bob")["last_read_at"].is_string()), (&ids[1], true), "{status}");
    assert_eq!((&of("ann")["last_read_id"], &of("ann")["last_read_at"]), (&Value::Null, &Value::Null));
    assert_eq!(rows(&status).len(), 2);
    let listed = room.ann.get("/v1/channels/room/messages").await?.success()?;
    let counts: Vec<_> = rows(&listed).iter().map(|message| message["read_by_count"].as_i64()).collect();
    assert_eq!(counts, [Some(0), Some(1), Some(1)], "newest first");

    // A second read by the same agent: still one reader. A REST ack counts as a read too.
    room.bob.post_empty(&format!("/v1/messages/{}/read", text(&ids[1]))).await?.success()?;
    assert_eq!(rows(&readers(&ids[1]).await).len(), 1);
    let delivery = format!("/v1/deliveries/del_{}_{}/ack", text(&ids[2]), room.bob_agent.id);
    room.bob.post_empty(&delivery).await?.success()?;
    assert_eq!(rows(&readers(&ids[2]).await).len(), 1);
    let all = inbox(&room.bob).await?;
    assert_eq!((&all["unread_channels"], &all["mentions"]), (&json!([]), &json!([])));
    let conversations = room.bob.get("/v1/dm/conversations").await?.success()?;
    assert_eq!(conversations[0]["unread_count"], 1);
    socket.ack("bob", 4).await?;
    let bob = room.bob.clone();
    wait::until("the conversation to be read", SOON, || async {
        inbox(&bob).await.is_ok_and(|all| all["unread_dms"] == json!([]))
    })
    .await;
    let conversations = room.bob.get("/v1/dm/conversations").await?.success()?;
    assert_eq!((&conversations[0]["id"], &conversations[0]["unread_count"]), (&dm["conversation_id"], &json!(0)));
    // The worker moves the pointers meanwhile, without a visible change.
    let positions = room.key.get("/v1/channels/room/read-status").await?.success()?;
    let bobs = rows(&positions).iter().find(|row| row["agent_name"] == "bob").cloned().unwrap_or_default();
    assert_eq!(bobs["last_read_id"], ids[2]);
    Ok(())
}

#[tokio::test]
async fn readers_are_visible_to_participants_only() -> Result<()> {
    let room = Room::new("private").await?;
    let eve = room.key.as_agent(&room.key.register_agent("eve").await?);
    let dm = room.ann.dm("bob", "psst").await?.success()?;
    let path = format!("/v1/messages/{}", text(&dm["id"]));
    room.bob.post_empty(&format!("{path}/read")).await?.success()?;
    assert_eq!(rows(&room.ann.get(&format!("{path}/readers")).await?.success()?).len(), 1);
    for suffix in ["readers", "reactions"] {
        eve.get(&format!("{path}/{suffix}")).await?.refused(404, "message_not_found")?;
    }
    eve.post(&format!("{path}/reactions"), json!({ "emoji": "x" })).await?.refused(404, "message_not_found")?;
    eve.delete(&format!("{path}/reactions/x")).await?.refused(404, "message_not_found")?;
    eve.get("/v1/messages/12/readers").await?.refused(404, "message_not_found")?;
    room.key.get("/v1/channels/nowhere/read-status").await?.refused(404, "channel_not_found")?;
    Ok(())
}
