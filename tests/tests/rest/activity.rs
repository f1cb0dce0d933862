//! Views of the workspace key: activity, statistics, all conversations, the system prompt; and messages to an address.

use anyhow::Result;
use relay_acceptance::room::{Room, rows, text};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn activity_and_numbers_count_what_was_posted() -> Result<()> {
    let room = Room::new("activity").await?;
    let reported =
        json!({ "latency_ms": 40, "cost_usd": 0.5, "usage": { "prompt_tokens": 7, "completion_tokens": 3 } });
    let first = room
        .ann
        .post("/v1/channels/room/messages", json!({ "text": "one @bob", "data": reported }))
        .await?
        .success()?;
    let reported = json!({ "latency_ms": 20, "total_tokens": 5, "cost_usd": "none" });
    room.ann.post("/v1/channels/room/messages", json!({ "text": "two", "data": reported })).await?.success()?;
    let dm = room.bob.dm("ann", "three").await?.success()?;

    let activity = room.key.get("/v1/activity").await?.success()?;
    let shown: Vec<_> = rows(&activity).iter().map(|row| (text(&row["type"]), text(&row["text"]))).collect();
    assert_eq!(shown, [("dm", "three"), ("message", "two"), ("message", "one @bob")], "newest first");
    assert_eq!((&activity[0]["conversation_id"], text(&activity[0]["agent_name"])), (&dm["conversation_id"], "bob"));
    assert_eq!(
        (text(&activity[2]["channel_name"]), &activity[2]["channel_id"], &activity[2]["id"]),
        ("room", &first["channel_id"], &first["id"])
    );
    assert_eq!(rows(&room.key.get("/v1/activity?limit=1").await?.success()?).len(), 1);
    room.key.get("/v1/activity?limit=-1").await?.refused(400, "invalid_request")?;
    room.ann.get("/v1/activity").await?.refused(401, "unauthorized")?;

    let stats = room.key.get("/v1/console/stats").await?.success()?;
    for (field, expected) in [
        ("window_days", 7),
        ("total_messages", 3),
        ("channel_messages", 2),
        ("dm_messages", 1),
        ("unique_agents", 2),
        ("avg_latency_ms", 30),
        ("max_latency_ms", 40),
        ("attachment_count", 0),
        ("mention_count", 1),
    ] {
        assert_eq!(stats[field].as_f64(), Some(f64::from(expected)), "{field} in {stats}");
    }
    assert_eq!(stats["agents"], json!({ "total": 2, "online": 2 }));
    assert_eq!(stats["messages"], json!({ "total": 3, "today": 3 }));
    assert_eq!(stats["channels"], json!({ "total": 2 }));
    let again = room.key.get("/v1/console/stats?days=30").await?.success()?;
    assert_eq!((again["total_messages"].as_i64(), again["window_days"].as_i64()), (Some(3), Some(30)), "counted once");
    room.key.get("/v1/console/stats?days=x").await?.refused(400, "invalid_request")?;

    let agents = room.key.get("/v1/console/agents").await?.success()?;
    assert_eq!(rows(&agents).len(), 2);
    for (field, expected) in [("message_count", 2), ("channel_count", 2), ("dm_count", 0), ("avg_latency_ms", 30)] {
        assert_eq!(agents[0][field].as_f64(), Some(f64::from(expected)), "{field} in {agents}");
    }
    assert_eq!((&agents[0]["agent_id"], text(&agents[1]["agent_name"])), (&json!(room.ann_agent.id), "bob"));
    assert_eq!(agents[1]["last_message_at"], dm["created_at"]);
    let costs = room.key.get("/v1/console/costs").await?.success()?;
    assert_eq!(
        costs["totals"],
        json!({ "total_cost_usd": 0.5, "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 15 })
    );
    assert_eq!(
        (costs["agents"][0]["total_tokens"].as_i64(), costs["agents"][1]["total_tokens"].as_i64()),
        (Some(15), Some(0))
    );

    let messages = |query: String| {
        let key = room.key.clone();
        async move { key.get(&format!("/v1/console/messages{query}")).await?.success() }
    };
    let all = messages(String::new()).await?;
    assert_eq!(rows(&all).len(), 3);
    for field in [
        "id",
        "message_id",
        "channel_id",
        "channel_name",
        "agent_id",
        "agent_name",
        "conversation_id",
        "delivery_kind",
        "text",
        "content_type",
        "metadata",
        "attachment_count",
        "mention_count",
        "latency_ms",
        "created_at",
    ] {
        assert!(all[2].get(field).is_some(), "{field} in {all}");
    }
    assert_eq!((text(&all[0]["delivery_kind"]), text(&all[2]["delivery_kind"])), ("dm", "channel"));
    assert_eq!((all[2]["latency_ms"].as_f64(), all[2]["mention_count"].as_i64()), (Some(40.0), Some(1)));
    for (query, expected) in [
        (format!("?agent_id={}", room.bob_agent.id), vec!["three"]),
        (format!("?channel_id={}", text(&first["channel_id"])), vec!["two", "one @bob"]),
        (format!("?conversation_id={}", text(&dm["conversation_id"])), vec!["three"]),
        ("?delivery_kind=channel".into(), vec!["two", "one @bob"]),
        ("?delivery_kind=dm&limit=5".into(), vec!["three"]),
        (format!("?before={}", text(&dm["id"])), vec!["two", "one @bob"]),
        ("?agent_id=nobody".into(), vec![]),
        ("?conversation_id=nothing".into(), vec![]),
    ] {
        let some = messages(query.clone()).await?;
        assert_eq!(rows(&some).iter().map(|row| text(&row["text"])).collect::<Vec<_>>(), expected, "{query}");
    }
    room.key.get("/v1/console/messages?conversation_id=%00").await?.refused(400, "invalid_request")?;
    room.key.get("/v1/console/messages?delivery_kind=smoke").await?.refused(400, "invalid_request")?;
    Ok(())
}

#[tokio::test]
async fn all_conversations_are_listed_in_pages() -> Result<()> {
    let room = Room::new("all-dms").await?;
    let (first, second) = (room.ann.dm("bob", "one").await?.success()?, room.bob.dm("ann", "two").await?.success()?);
    for number in 0..4 {
        let body = json!({ "participants": ["bob"], "name": format!("g{number}") });
        room.ann.post("/v1/dm/group", body).await?.success()?;
    }
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    for page in 1.. {
        let reply = room.key.get(&format!("/v1/dm/conversations/all?limit=2{cursor}")).await?;
        seen.extend(rows(reply.data()).to_vec());
        let next = &reply.body["cursor"];
        assert_eq!(next["has_more"], next["next"].is_string(), "{next}");
        if next["has_more"] == false {
            assert_eq!(page, 3);
            break;
        }
        cursor = format!("&cursor={}", text(&next["next"]));
    }
    assert_eq!(seen.len(), 5);
    let direct = seen.iter().find(|one| one["type"] == "1:1").cloned().unwrap_or_default();
    assert_eq!(
        (&direct["id"], &direct["participants"], direct["message_count"].as_i64()),
        (&first["conversation_id"], &json!(["ann", "bob"]), Some(2))
    );
    assert_eq!(
        direct["last_message"],
        json!({ "text": "two", "agent_id": room.bob_agent.id, "agent_name": "bob", "created_at": second["created_at"] })
    );
    let group = seen.iter().find(|one| one["name"] == "g0").cloned().unwrap_or_default();
    assert_eq!(
        (&group["type"], &group["last_message"], &group["message_count"]),
        (&json!("group"), &Value::Null, &json!(0))
    );
    let whole = room.key.get("/v1/dm/conversations/all").await?;
    assert_eq!((rows(whole.data()).len(), &whole.body["cursor"]), (5, &json!({ "next": null, "has_more": false })));
    for bad in ["cursor=junk", "cursor=", "limit=0"] {
        room.key.get(&format!("/v1/dm/conversations/all?{bad}")).await?.refused(400, "invalid_request")?;
    }

    let path = format!("/v1/dm/conversations/{}/messages", text(&first["conversation_id"]));
    let messages = room.key.get(&path).await?.success()?;
    let texts: Vec<_> = rows(&messages).iter().map(|row| text(&row["text"])).collect();
    assert_eq!(texts, ["two", "one"], "newest first");
    for field in ["id", "agent_id", "agent_name", "text", "metadata", "created_at"] {
        assert!(!messages[0][field].is_null(), "{field} in {messages}");
    }
    let page = room.key.get(&format!("{path}?page=1&limit=1")).await?.success()?;
    assert_eq!(
        (rows(&page["messages"]).len(), &page["next_before"], &page["exhausted"]),
        (1, &second["id"], &json!(false))
    );
    let rest =
        room.key.get(&format!("{path}?page=1&limit=1&before={}", text(&page["next_before"]))).await?.success()?;
    assert_eq!(
        (text(&rest["messages"][0]["text"]), &rest["next_before"], &rest["exhausted"]),
        ("one", &Value::Null, &json!(true))
    );
    for nobodys in ["dm_000000000000000000000000", "1", "%20"] {
        let path = format!("/v1/dm/conversations/{nobodys}/messages");
        room.key.get(&path).await?.refused(404, "dm_conversation_not_found")?;
    }
    room.ann.get(&path).await?.refused(401, "unauthorized")?;
    room.ann.get("/v1/dm/conversations/all").await?.refused(401, "unauthorized")?;
    Ok(())
}

#[tokio::test]
async fn a_system_prompt_is_custom_or_the_default() -> Result<()> {
    let room = Room::new("prompt").await?;
    let path = "/v1/workspace/system-prompt";
    let default = room.ann.get(path).await?.success()?;
    assert_eq!(default["is_default"], true);
    assert!(text(&default["prompt"]).len() > 20);
    let own = room.key.put(path, json!({ "prompt": "be brief" })).await?.success()?;
    assert_eq!(own, json!({ "prompt": "be brief", "is_default": false }));
    assert_eq!(room.bob.get(path).await?.success()?, own);
    assert_eq!(room.key.get("/v1/workspace").await?.data()["system_prompt"], "be brief");
    for reset in [json!({ "reset": true, "prompt": "ignored" }), json!({ "prompt": null })] {
        room.key.put(path, json!({ "prompt": "be brief" })).await?.success()?;
        assert_eq!(room.key.put(path, reset).await?.success()?, default);
    }
    for bad in
        [json!({}), json!({ "prompt": 1 }), json!({ "prompt": "x".repeat(65 * 1024) }), json!({ "reset": "yes" })]
    {
        room.key.put(path, bad).await?.refused(400, "invalid_request")?;
    }
    room.ann.put(path, json!({ "prompt": "mine" })).await?.refused(401, "unauthorized")?;
    Ok(())
}

#[tokio::test]
async fn an_address_is_a_name_with_a_machine() -> Result<()> {
    let room = Room::new("addresses").await?;
    let dm = |body: Value| {
        let ann = room.ann.clone();
        async move { ann.post("/v1/dm", body).await }
    };
    let at = |address: &str| json!({ "address": address, "text": "hi" });
    let sent = dm(at("bob@direct")).await?.success()?;
    assert_eq!((text(&sent["to"]), text(&sent["text"])), ("bob", "hi"));
    assert_eq!(dm(json!({ "to": "bob", "text": "x" })).await?.success()?["conversation_id"], sent["conversation_id"]);
    let body = |name: &str, machine: &str| json!({ "node_id": format!("node_{name}"), "name": name, "machine_id": machine, "kind": "ws", "role": "broker" });
    room.key.post("/v1/nodes", body("box-a", "m-1")).await?.success()?;
    room.key.post("/v1/nodes", body("box-b", "m-1")).await?.success()?;
    dm(at("bob@box-a")).await?.refused(404, "address_not_found")?;
    room.key.bind("box-a", "bob").await?;
    for address in ["bob@box-a", "@bob@box-a", "bob@m-1"] {
        assert_eq!(dm(at(address)).await?.success()?["conversation_id"], sent["conversation_id"], "{address}");
    }
    for address in ["bob@direct", "bob@box-b", "bob@nowhere", "nobody@box-a", "nobody@direct"] {
        dm(at(address)).await?.refused(404, "address_not_found")?;
    }
    // A machine with the name of a node makes the address ambiguous.
    room.key.post("/v1/nodes", body("box-c", "box-a")).await?.success()?;
    dm(at("bob@box-a")).await?.refused(400, "ambiguous_address")?;
    for address in ["bob", "", "@bob", "bob@", "@box-a", "a\nb@box-a"] {
        dm(at(address)).await?.refused(400, "invalid_address")?;
    }
    for neither in [json!({ "text": "x" }), json!({ "to": "bob", "address": "bob@m-1", "text": "x" })] {
        dm(neither).await?.refused(400, "invalid_request")?;
    }
    // An idempotency key works for an address as for a name.
    let key = [("idempotency-key", "one-address")];
    let post = || room.ann.call(Method::POST, "/v1/dm", Some(at("bob@m-1")), &key);
    let posted = post().await?.success()?;
    assert_eq!(posted["id"], post().await?.success()?["id"]);
    room.key.call(Method::DELETE, "/v1/nodes/box-a/agents/bob", None, &[]).await?.success()?;
    dm(at("bob@m-1")).await?.refused(404, "address_not_found")?;
    assert_eq!(posted["id"], post().await?.success()?["id"], "wherever bob is now");
    // `self` is the caller only with an @.
    let namesake = room.key.as_agent(&room.key.register_agent("self").await?);
    assert_eq!(text(&room.ann.dm("self", "you").await?.success()?["to"]), "self");
    assert_eq!(text(&room.ann.dm("@self", "me").await?.success()?["to"]), "ann");
    assert_eq!(rows(&namesake.get("/v1/deliveries").await?.success()?).len(), 1);
    Ok(())
}

#[tokio::test]
async fn an_observer_reads_only_data_within_its_scopes_and_filters() -> Result<()> {
    let room = Room::new("observed").await?;
    room.ann.create_channel("hidden").await?;
    let seen = room.ann.post_message("room", "a plan").await?.success()?;
    let other = room.ann.post_message("hidden", "another plan").await?.success()?;
    let dm = room.ann.dm("bob", "a secret plan").await?.success()?;
    for message in [&seen, &other, &dm] {
        let path = format!("/v1/messages/{}/reactions", text(&message["id"]));
        room.ann.post(&path, json!({ "emoji": "+1" })).await?.success()?;
    }
    let observer = |name: &'static str, scopes: Value, filters: Value| {
        let key = room.key.clone();
        async move {
            let body = json!({ "name": name, "scopes": scopes, "filters": filters });
            let made = key.post("/v1/observer-tokens", body).await?.success()?;
            anyhow::Ok(key.with_token(text(&made["token"])))
        }
    };
    let texts = |value: &Value| rows(value).iter().map(|row| text(&row["text"]).to_owned()).collect::<Vec<_>>();
    let scopes = json!(["search:read", "activity:read", "reactions:read", "messages:read"]);
    let some = observer("some", scopes, json!({ "channel_names": ["room"] })).await?;
    for path in ["/v1/search?q=plan", "/v1/activity", "/v1/console/messages"] {
        assert_eq!(texts(&some.get(path).await?.success()?), ["a plan"], "{path}");
    }
    let reactions = |message: &Value| format!("/v1/messages/{}/reactions", text(&message["id"]));
    assert_eq!(rows(&some.get(&reactions(&seen)).await?.success()?).len(), 1);
    for hidden in [&other, &dm] {
        some.get(&reactions(hidden)).await?.refused(404, "message_not_found")?;
    }
    assert_eq!(rows(&some.get("/v1/channels/room/read-status").await?.success()?).len(), 2);
    some.get("/v1/channels/hidden/read-status").await?.refused(404, "channel_not_found")?;
    some.get("/v1/dm/conversations/all").await?.refused(403, "insufficient_scope")?;

    let all = json!(["search:read", "activity:read", "reactions:read", "dms:read"]);
    let dms = observer("dms", all.clone(), json!({ "include_dms": true })).await?;
    assert_eq!(texts(&dms.get("/v1/search?q=secret").await?.success()?), ["a secret plan"]);
    assert_eq!(rows(&dms.get("/v1/activity").await?.success()?).len(), 3);
    assert_eq!(rows(&dms.get("/v1/dm/conversations/all").await?.success()?).len(), 1);
    let messages = format!("/v1/dm/conversations/{}/messages", text(&dm["conversation_id"]));
    assert_eq!(texts(&dms.get(&messages).await?.success()?), ["a secret plan"]);
    assert_eq!(rows(&dms.get(&reactions(&dm)).await?.success()?).len(), 1);
    dms.get("/v1/channels/room/read-status").await?.refused(403, "insufficient_scope")?;
    // The scope without the filter shows no conversation.
    let none = observer("none", all, json!({})).await?;
    assert_eq!(none.get("/v1/dm/conversations/all").await?.success()?, json!([]));
    none.get(&messages).await?.refused(404, "dm_conversation_not_found")?;
    assert_eq!(texts(&none.get("/v1/search?q=secret").await?.success()?), [""; 0]);
    // Messages of others are neither shown nor counted, and their authors are hidden.
    let only_bob = json!({ "include_dms": true, "agent_ids": [room.bob_agent.id] });
    let bobs = observer("bobs", json!(["dms:read", "messages:read"]), only_bob).await?;
    let listed = bobs.get("/v1/dm/conversations/all").await?.success()?;
    assert_eq!(
        (&listed[0]["last_message"], &listed[0]["message_count"], &listed[0]["participants"]),
        (&Value::Null, &json!(0), &json!(["bob"]))
    );
    let read = bobs.get("/v1/channels/room/read-status").await?.success()?;
    assert_eq!(rows(&read).iter().map(|row| text(&row["agent_name"])).collect::<Vec<_>>(), ["bob"]);
    for path in ["/v1/inbox", "/v1/console/stats"] {
        none.get(path).await?.refused(401, "observer_token_forbidden")?;
    }
    Ok(())
}
