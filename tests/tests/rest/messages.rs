//! Messages, threads, conversations, deliveries and idempotency keys: the fields that strict clients require, the
//! frames of recipients, and one effect per key on any gateway.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use futures::future::try_join_all;
use relay_testkit::client::{Agent, Api, NodeSocket, Reply};
use relay_testkit::shared;
use reqwest::Method;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}

/// Asserts that all of these fields are present, null or not.
fn has(value: &Value, wanted: &str) {
    let missing: Vec<_> = wanted.split_whitespace().filter(|key| value.get(key).is_none()).collect();
    assert!(missing.is_empty(), "{missing:?} missing in {value}");
}

/// Asserts that exactly these fields are present.
fn is_exactly(value: &Value, wanted: &str) {
    assert_eq!(keys(value), wanted.split_whitespace().collect(), "{value}");
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

struct Room {
    key: Api,
    ann: Api,
    bob: Agent,
    carol: Agent,
    ids: [String; 3],
}

/// Workspace with ann, bob and carol in `#room`.
async fn room(name: &str) -> Result<Room> {
    let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
    let (ann, bob, carol) =
        (key.register_agent("ann").await?, key.register_agent("bob").await?, key.register_agent("carol").await?);
    let as_ann = key.as_agent(&ann);
    as_ann.create_channel("room").await?;
    for agent in [&bob, &carol] {
        key.as_agent(agent).join("room").await?;
    }
    let ids = [ann.id, bob.id.clone(), carol.id.clone()];
    Ok(Room { key, ann: as_ann, bob, carol, ids })
}

/// Any frame but a notice of presence, which may come at any time.
fn about_delivery(frame: &Value) -> bool {
    frame["type"] != "context.update" || frame["topic"] == "agent"
}

/// Returns the next two delivery frames of a direct node: the notice, then the announced frame. Other frames may arrive
/// in between.
async fn announced(socket: &mut NodeSocket) -> Result<Value> {
    let notice = socket.expect_where("a notice", SOON, about_delivery).await?;
    let frame = socket.expect_where("its frame", SOON, about_delivery).await?;
    assert_eq!(
        (text(&notice["type"]), text(&notice["topic"]), text(&notice["event"]), text(&frame["type"])),
        ("context.update", "agent", "delivery.accepted", "deliver"),
        "{notice} {frame}"
    );
    assert_eq!(notice["agent_ids"], json!([frame["agent_id"]]));
    assert_eq!(notice["data"]["delivery_id"], frame["delivery_id"]);
    assert_eq!(notice["data"]["message_id"], frame["payload"]["data"]["id"]);
    is_exactly(&frame, "v type delivery_id agent_id agent msg_id seq mode payload");
    is_exactly(&frame["payload"], "type data");
    Ok(frame)
}

const MESSAGE: &str = "id channel_id agent_id agent_name text blocks metadata has_attachments thread_id created_at \
                       mentions attachments injection_mode reply_count reactions read_by_count";

#[tokio::test]
async fn a_channel_message_has_all_its_fields_in_every_answer_and_frame() -> Result<()> {
    let room = room("messages").await?;
    let mut bob = room.key.as_agent(&room.bob).direct_socket().await?;
    let mut carol = room.key.as_agent(&room.carol).at(&shared().await.gateways[1]).direct_socket().await?;
    let body = json!({ "text": "hi @bob", "mode": "steer", "data": { "fooBar": 1, "priority": "high" }, "blocks": [{ "type": "divider" }] });
    let posted = room.ann.post("/v1/channels/%23room/messages", body).await?;
    assert_eq!(posted.status, 201);
    let posted = posted.success()?;
    has(&posted, MESSAGE);
    assert_eq!(
        (text(&posted["agent_id"]), text(&posted["agent_name"]), text(&posted["injection_mode"])),
        (&*room.ids[0], "ann", "steer")
    );
    assert_eq!(
        (&posted["mentions"], &posted["attachments"], &posted["reactions"]),
        (&json!(["bob"]), &json!([]), &json!([]))
    );
    assert_eq!(
        (&posted["metadata"], &posted["thread_id"]),
        (&json!({ "fooBar": 1, "priority": "high" }), &Value::Null)
    );
    let at = text(&posted["created_at"]);
    assert!(at.len() == 24 && at.ends_with('Z') && at.contains('.'), "{at}");
    assert!(text(&posted["id"]).parse::<i64>().is_ok_and(|id| id > 0), "ids are decimal strings");

    for (socket, id) in [(&mut bob, &room.ids[1]), (&mut carol, &room.ids[2])] {
        let frame = announced(socket).await?;
        assert_eq!((frame["seq"].as_u64(), text(&frame["mode"]), text(&frame["agent_id"])), (Some(1), "steer", &**id));
        assert_eq!(text(&frame["delivery_id"]), format!("del_{}_{id}", text(&posted["id"])));
        assert_eq!(frame["msg_id"], posted["id"]);
        let (kind, data) = (&frame["payload"]["type"], &frame["payload"]["data"]);
        assert_eq!(text(kind), "message.created");
        is_exactly(
            data,
            "id channel_id channel_name agent_id agent_name from_name text blocks metadata has_attachments thread_id \
             created_at mentions attachments injection_mode",
        );
        assert_eq!((text(&data["channel_name"]), text(&data["from_name"])), ("room", "ann"));
        for same in
            ["id", "channel_id", "agent_id", "text", "blocks", "metadata", "created_at", "mentions", "thread_id"]
        {
            assert_eq!(data[same], posted[same], "{same}");
        }
    }
    let id = text(&posted["id"]);
    let got = room.key.get(&format!("/v1/messages/{id}")).await?.success()?;
    has(&got, MESSAGE);
    let second = room.ann.post_message("room", "two").await?.success()?;
    assert!(text(&second["id"]).parse::<i64>()? > id.parse::<i64>()?, "ids sort by creation");
    let listed = room.key.at(&shared().await.gateways[1]).get("/v1/channels/room/messages").await?.success()?;
    assert_eq!((&listed[0]["id"], &listed[1]["id"]), (&second["id"], &posted["id"]), "newest first");
    has(&listed[1], MESSAGE);
    for (query, expected) in [
        ("limit=1", vec!["two"]),
        (&*format!("after={id}"), vec!["two"]),
        (&*format!("before={}", text(&second["id"])), vec!["hi @bob"]),
    ] {
        let page = room.key.get(&format!("/v1/channels/room/messages?{query}")).await?.success()?;
        let texts: Vec<_> = page.as_array().into_iter().flatten().map(|message| text(&message["text"])).collect();
        assert_eq!(texts, expected, "{query}");
    }
    Ok(())
}

#[tokio::test]
async fn a_notice_precedes_the_first_frame_of_a_row_and_is_not_repeated() -> Result<()> {
    let room = room("accepted").await?;
    for number in 1..=3 {
        room.ann.dm("bob", &format!("{number}")).await?.success()?;
    }
    // Accepted before the node connected, and still the first frame of each row.
    let mut socket = room.key.as_agent(&room.bob).direct_socket().await?;
    let first = [announced(&mut socket).await?, announced(&mut socket).await?, announced(&mut socket).await?];
    // The second gateway must know that they were sent before the next request.
    let bob = room.key.as_agent(&room.bob);
    relay_testkit::wait::until("the rows to be marked as sent", SOON, || async {
        let answer = bob.get("/v1/deliveries").await.unwrap();
        let rows = answer.data().as_array().cloned().unwrap_or_default();
        rows.len() == 3 && rows.iter().all(|row| row["status"] == "delivered")
    })
    .await;
    socket.abort();
    let mut socket = bob.at(&shared().await.gateways[1]).direct_socket().await?;
    for sent in first {
        let again = socket.expect_where("a repetition", SOON, about_delivery).await?;
        assert_eq!(again, sent, "a repetition is the same frame, without a notice");
    }
    room.ann.dm("bob", "4").await?.success()?;
    assert_eq!(announced(&mut socket).await?["seq"], 4);
    Ok(())
}

#[tokio::test]
async fn muted_members_receive_mentions_only_and_replies_follow_their_root() -> Result<()> {
    let room = room("threads").await?;
    let (as_bob, as_carol) = (room.key.as_agent(&room.bob), room.key.as_agent(&room.carol));
    let muted = as_carol.post_empty("/v1/channels/room/mute").await?.success()?;
    assert_eq!(
        (text(&muted["channel"]), &muted["muted"], text(&muted["agent_id"])),
        ("room", &json!(true), &*room.ids[2])
    );
    let mut bob = as_bob.direct_socket().await?;
    let mut carol = as_carol.direct_socket().await?;
    let root = room.ann.post_message("room", "plain").await?.success()?;
    room.ann.post_message("room", "hey @carol").await?.success()?;
    let root_id = text(&root["id"]);
    let reply = room
        .ann
        .post(&format!("/v1/messages/{root_id}/replies"), json!({ "text": "@carol see", "mode": "steer" }))
        .await?;
    assert_eq!(reply.status, 201);
    let reply = reply.success()?;
    has(&reply, MESSAGE);
    has(&reply, "channel_name");
    assert_eq!((&reply["thread_id"], text(&reply["channel_name"])), (&root["id"], "room"));
    let nested = as_bob
        .post(&format!("/v1/messages/{}/replies", text(&reply["id"])), json!({ "text": "nested" }))
        .await?
        .success()?;
    assert_eq!(nested["thread_id"], root["id"], "a reply to a reply attaches to the root");

    let texts = |frame: &Value| text(&frame["payload"]["data"]["text"]).to_owned();
    assert_eq!(texts(&announced(&mut bob).await?), "plain");
    assert_eq!(texts(&announced(&mut bob).await?), "hey @carol");
    let frame = announced(&mut bob).await?;
    assert_eq!(
        (text(&frame["payload"]["type"]), text(&frame["mode"]), frame["seq"].as_u64()),
        ("thread.reply", "wait", Some(3))
    );
    is_exactly(
        &frame["payload"]["data"],
        "id channel_id channel_name agent_id agent_name from_name thread_id text blocks metadata has_attachments created_at",
    );
    assert_eq!(frame["payload"]["data"]["thread_id"], root["id"]);
    let only = announced(&mut carol).await?;
    assert_eq!(
        (texts(&only), only["seq"].as_u64()),
        ("hey @carol".to_owned(), Some(1)),
        "a muted member's seq has no gap"
    );
    let named = announced(&mut carol).await?;
    assert_eq!((texts(&named), named["seq"].as_u64()), ("@carol see".to_owned(), Some(2)), "also in a thread");

    let thread = room.key.get(&format!("/v1/messages/{root_id}/replies")).await?.success()?;
    is_exactly(&thread, "parent replies");
    let replies: Vec<_> =
        thread["replies"].as_array().into_iter().flatten().map(|message| text(&message["text"])).collect();
    assert_eq!((replies, &thread["parent"]["reply_count"]), (vec!["@carol see", "nested"], &json!(2)), "oldest first");
    let of_reply = room.key.get(&format!("/v1/messages/{}/replies", text(&reply["id"]))).await?.success()?;
    assert_eq!((&of_reply["parent"]["id"], &of_reply["replies"]), (&reply["id"], &json!([])));
    let listed = room.key.get("/v1/channels/room/messages").await?.success()?;
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "replies are not listed in their channel");

    as_carol.post_empty("/v1/channels/room/unmute").await?.success()?;
    room.ann.post_message("room", "again").await?.success()?;
    assert_eq!(texts(&announced(&mut carol).await?), "again", "unmuted on one gateway counts on all");
    Ok(())
}

#[tokio::test]
async fn conversations_have_the_shape_that_each_client_validates() -> Result<()> {
    let room = room("conversations").await?;
    let as_bob = room.key.as_agent(&room.bob);
    let mut bob = as_bob.direct_socket().await?;
    let sent = room.ann.post("/v1/dm", json!({ "to": "@bob", "text": "psst", "mode": "steer" })).await?;
    assert_eq!(sent.status, 201);
    let sent = sent.success()?;
    has(&sent, "conversation_id message created_at id from_agent_id to text injection_mode attachments");
    has(&sent["message"], "id agent_id agent_name text injection_mode attachments");
    let conversation = text(&sent["conversation_id"]).to_owned();
    let hex = conversation.strip_prefix("dm_").unwrap_or_default();
    assert!(hex.len() == 24 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()), "{conversation}");
    assert_eq!(
        (text(&sent["to"]), text(&sent["from_agent_id"]), &sent["message"]["id"]),
        ("bob", &*room.ids[0], &sent["id"])
    );

    let frame = announced(&mut bob).await?;
    let data = &frame["payload"]["data"];
    assert_eq!((text(&frame["payload"]["type"]), text(&frame["mode"])), ("dm.received", "steer"));
    has(
        data,
        "conversation_id message id from_agent_id to text injection_mode attachments metadata from_name created_at",
    );
    has(&data["message"], "id agent_id agent_name text injection_mode attachments metadata");
    assert_eq!(
        (text(&data["to"]), text(&data["from_name"]), text(&data["conversation_id"])),
        ("bob", "ann", &*conversation)
    );

    let back = as_bob.post(&format!("/v1/dm/{conversation}/messages"), json!({ "text": "yes?" })).await?.success()?;
    has(&back, "conversation_id message created_at id agent_id text");
    assert_eq!(as_bob.dm("ann", "same place").await?.success()?["conversation_id"], conversation);
    let own = room.ann.post("/v1/dm", json!({ "to": "@self", "text": "note" })).await?.success()?;
    assert_ne!(own["conversation_id"], conversation);
    let anns = room.ann.get("/v1/deliveries").await?.success()?;
    let reasons: Vec<_> = anns.as_array().into_iter().flatten().map(|row| text(&row["reason"])).collect();
    assert_eq!(reasons, ["dm", "dm"], "a note to oneself is stored without a delivery");

    let group =
        room.ann.post("/v1/dm/group", json!({ "participants": ["bob"], "name": "three", "text": "welcome" })).await?;
    assert_eq!(group.status, 201);
    let group = group.success()?;
    has(&group, "id channel_id dm_type name participants created_at");
    assert_eq!((text(&group["dm_type"]), group["participants"].as_array().map(Vec::len)), ("group", Some(2)));
    let frame = announced(&mut bob).await?;
    assert_eq!(text(&frame["payload"]["type"]), "group_dm.received");
    has(
        &frame["payload"]["data"],
        "conversation_id message id agent_id text injection_mode attachments metadata from_name created_at",
    );
    assert!(frame["payload"]["data"].get("from_agent_id").is_none() && frame["payload"]["data"].get("to").is_none());
    let group_id = text(&group["id"]);
    for (field, already) in [("agent_name", false), ("agent", true)] {
        let added =
            room.ann.post(&format!("/v1/dm/{group_id}/participants"), json!({ field: "carol" })).await?.success()?;
        assert_eq!(added, json!({ "conversation_id": group_id, "agent": "carol", "already_member": already }));
    }
    let mut carol = room.key.as_agent(&room.carol).direct_socket().await?;
    room.ann.post(&format!("/v1/dm/{group_id}/messages"), json!({ "text": "all three" })).await?.success()?;
    assert_eq!(text(&announced(&mut carol).await?["payload"]["data"]["text"]), "all three");
    assert_eq!(room.ann.delete(&format!("/v1/dm/{group_id}/participants/carol")).await?.status, 204);
    room.key.as_agent(&room.carol).get(&format!("/v1/dm/{group_id}/messages")).await?.refused(403, "forbidden")?;

    let history = as_bob.get(&format!("/v1/dm/{conversation}/messages")).await?.success()?;
    let texts: Vec<_> = history.as_array().into_iter().flatten().map(|message| text(&message["text"])).collect();
    assert_eq!(texts, ["same place", "yes?", "psst"]);
    has(&history[0], "id agent_id agent_name text injection_mode attachments metadata created_at");

    let listed = as_bob.get("/v1/dm/conversations").await?.success()?;
    assert_eq!(listed.as_array().map(Vec::len), Some(2));
    for one in listed.as_array().into_iter().flatten() {
        has(one, "id channel_id type name participants last_message unread_count created_at");
        has(&one["participants"][0], "agent_id agent_name");
        has(&one["last_message"], "id text agent_id created_at");
    }
    let python = [("x-relaycast-origin-client", "@relaycast/python-sdk")];
    let listed = as_bob.call(Method::GET, "/v1/dm/conversations", None, &python).await?.success()?;
    for one in listed.as_array().into_iter().flatten() {
        assert!(one["participants"][0].is_string() && one["last_message"].is_string(), "{one}");
    }
    Ok(())
}

const DELIVERY: &str = "id message_id channel_id agent_id status seq location_type location_node_id route_node_id \
                        route_node_kind route_node_role delivery_adapter dispatch_attempts next_attempt_at \
                        last_dispatch_error mode reason priority retryable error available_at deadline expires_at \
                        delivered_at acked_at dead_lettered_at created_at updated_at message";

#[tokio::test]
async fn deliveries_are_listed_and_settled_one_by_one() -> Result<()> {
    let room = room("deliveries").await?;
    let as_bob = room.key.as_agent(&room.bob);
    room.ann.post("/v1/channels/room/messages", json!({ "text": "one @bob", "mode": "steer" })).await?.success()?;
    for number in 2..=4 {
        room.ann.dm("bob", &format!("{number}")).await?.success()?;
    }
    let rows = as_bob.get("/v1/deliveries").await?.success()?;
    let rows = rows.as_array().cloned().unwrap_or_default();
    for (row, seq) in rows.iter().zip(1..) {
        is_exactly(row, DELIVERY);
        has(&row["message"], "id channel_id agent_id agent_name text thread_id created_at");
        assert_eq!(
            (row["seq"].as_i64(), text(&row["status"]), text(&row["priority"])),
            (Some(seq), "queued", "normal")
        );
    }
    let words = |row: &Value| (text(&row["reason"]).to_owned(), text(&row["mode"]).to_owned());
    assert_eq!(words(&rows[0]), ("mention".into(), "next-tool-call".into()));
    assert_eq!(words(&rows[1]), ("dm".into(), "immediate".into()));
    assert_eq!(rows.len(), 4);
    assert_eq!(as_bob.get("/v1/deliveries?limit=2").await?.data().as_array().map(Vec::len), Some(2));

    let settle = |row: usize, verb: &'static str, body: Value| {
        let path = format!("/v1/deliveries/{}/{verb}", text(&rows[row]["id"]));
        let bob = as_bob.clone();
        async move { bob.post(&path, body).await?.success() }
    };
    for _ in 0..2 {
        let acked = settle(1, "ack", json!({})).await?;
        assert_eq!((text(&acked["status"]), acked["acked_at"].is_string()), ("acked", true), "{acked}");
        let failed = settle(2, "fail", json!({ "error": "no", "retryable": true })).await?;
        assert_eq!(
            (text(&failed["status"]), text(&failed["error"]), &failed["retryable"]),
            ("failed", "no", &json!(true))
        );
        let deferred = settle(3, "defer", json!({ "available_at": "2031-01-01T00:00:00Z", "reason": "later" })).await?;
        assert_eq!((text(&deferred["status"]), text(&deferred["reason"])), ("queued", "later"));
        assert_eq!(text(&deferred["available_at"]), "2031-01-01T00:00:00.000Z");
    }
    // Acknowledged rows keep their state; the first error is kept.
    assert_eq!(text(&settle(1, "fail", json!({ "error": "late" })).await?["status"]), "acked");
    assert_eq!(text(&settle(2, "fail", json!({ "error": "other" })).await?["error"]), "no");
    let of = |status: &'static str| {
        let bob = as_bob.clone();
        async move {
            let rows = bob.get(&format!("/v1/deliveries{status}")).await?.success()?;
            anyhow::Ok(
                rows.as_array().into_iter().flatten().map(|row| row["seq"].as_i64().unwrap_or(0)).collect::<Vec<_>>(),
            )
        }
    };
    assert_eq!(of("").await?, [1, 4, 5], "what failed for now was sent again, once");
    assert_eq!((of("?status=acked").await?, of("?status=failed").await?), (vec![2], vec![3]));
    let mine = as_bob.get("/v1/agent").await?.success()?;
    has(&mine["pending_deliveries"][0], "id message_id mode reason status created_at");
    let open = as_bob.get("/v1/deliveries").await?.success()?;
    let ids = |rows: &Value| rows.as_array().into_iter().flatten().map(|row| row["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&mine["pending_deliveries"]), ids(&open), "those that are not settled, in order");

    // A connection gets the remaining deliveries without a gap, and no settled ones.
    let mut socket = as_bob.direct_socket().await?;
    let mut seen = Vec::new();
    while seen.len() < 4 {
        let frame = socket.expect("deliver").await?;
        seen.push((frame["seq"].as_i64(), text(&frame["payload"]["type"]).to_owned()));
    }
    let kinds = ["message.created", "delivery.expired", "delivery.expired", "dm.received"];
    assert_eq!(seen, (1..).map(Some).zip(kinds.map(str::to_owned)).collect::<Vec<_>>());
    for bad in ["del_1_1", "x", "del_", &"d".repeat(3000)] {
        for verb in ["ack", "fail"] {
            as_bob
                .post(&format!("/v1/deliveries/{bad}/{verb}"), json!({}))
                .await?
                .refused(404, "delivery_not_found")?;
        }
    }
    Ok(())
}

async fn keyed(api: &Api, path: &str, key: &str, body: &Value) -> Result<Reply> {
    api.call(Method::POST, path, Some(body.clone()), &[("idempotency-key", key)]).await
}

#[tokio::test]
async fn an_idempotency_key_has_one_effect_on_any_gateway() -> Result<()> {
    let room = room("keys").await?;
    let there = room.ann.at(&shared().await.gateways[1]);
    let mut bob = room.key.as_agent(&room.bob).direct_socket().await?;
    let root = room.ann.post_message("room", "root").await?.success()?;
    announced(&mut bob).await?;
    let group = room.ann.post("/v1/dm/group", json!({ "participants": ["bob"] })).await?.success()?;
    let routes = [
        ("/v1/channels/room/messages".to_owned(), json!({ "text": "t" })),
        (format!("/v1/messages/{}/replies", text(&root["id"])), json!({ "text": "t" })),
        ("/v1/dm".to_owned(), json!({ "to": "bob", "text": "t" })),
        (format!("/v1/dm/{}/messages", text(&group["id"])), json!({ "text": "t" })),
        ("/v1/dm/group".to_owned(), json!({ "participants": ["bob"], "text": "t" })),
    ];
    for (index, (path, body)) in routes.iter().enumerate() {
        // One key for all: its scope is one operation and target.
        let first = keyed(&room.ann, path, "same-key", body).await?;
        assert_eq!((first.status, first.headers.contains_key("idempotency-replayed")), (201, false), "{path}");
        let frame = announced(&mut bob).await?;
        assert_eq!(frame["seq"].as_u64(), Some(index as u64 + 2), "{path}: no second fan-out so far");
        for api in [&there, &room.ann] {
            let again = keyed(api, path, "same-key", body).await?;
            assert_eq!((again.status, &again.body), (201, &first.body), "{path}");
            assert_eq!(again.headers["idempotency-replayed"], "true", "{path}");
        }
        // White space and the order of keys do not distinguish bodies; a different value does.
        let mut other = body.clone();
        other["text"] = json!("another");
        for api in [&there, &room.ann] {
            keyed(api, path, "same-key", &other).await?.refused(409, "idempotency_key_reused")?;
        }
        // The alternative header of one client works alone, too.
        let header = [("x-idempotency-key", "same-key")];
        let again = there.call(Method::POST, path, Some(body.clone()), &header).await?;
        assert_eq!(again.body["data"]["id"], first.body["data"]["id"], "{path}");
    }
    // The same key of another agent is independent.
    let carols = keyed(&room.key.as_agent(&room.carol), "/v1/channels/room/messages", "same-key", &routes[0].1).await?;
    assert!(!carols.headers.contains_key("idempotency-replayed"));
    assert_eq!(announced(&mut bob).await?["seq"], 7);
    Ok(())
}

#[tokio::test]
async fn fifty_concurrent_equal_posts_create_one_message_and_one_delivery() -> Result<()> {
    let room = room("at-once").await?;
    let there = room.ann.at(&shared().await.gateways[1]);
    let mut bob = room.key.as_agent(&room.bob).direct_socket().await?;
    for (round, path) in ["/v1/channels/room/messages", "/v1/dm", "/v1/dm/group"].into_iter().enumerate() {
        let body = json!({ "to": "bob", "participants": ["bob"], "text": format!("round {round}") });
        let posts = (0..50).map(|n| keyed(if n % 2 == 0 { &room.ann } else { &there }, path, "at-once", &body));
        let replies = try_join_all(posts).await?;
        let fresh: Vec<_> = replies
            .iter()
            .filter(|reply| reply.status == 201 && !reply.headers.contains_key("idempotency-replayed"))
            .collect();
        assert_eq!(fresh.len(), 1, "{path}: one of them made it");
        for reply in &replies {
            assert!(
                (reply.status == 201 && reply.body == fresh[0].body) || reply.code() == "idempotency_in_progress",
                "{path}: {} {}",
                reply.status,
                reply.body
            );
        }
        let frame = announced(&mut bob).await?;
        assert_eq!(frame["seq"].as_u64(), Some(round as u64 + 1), "{path}: one delivery");
    }
    room.ann.dm("bob", "last").await?.success()?;
    assert_eq!(announced(&mut bob).await?["seq"], 4);
    let rows = room.key.as_agent(&room.bob).get("/v1/deliveries").await?.success()?;
    assert_eq!(rows.as_array().map(Vec::len), Some(4));
    assert_eq!(room.key.get("/v1/channels/room/messages").await?.data().as_array().map(Vec::len), Some(1));
    let conversations = room.ann.get("/v1/dm/conversations").await?.success()?;
    assert_eq!(conversations.as_array().map(Vec::len), Some(2));
    Ok(())
}
