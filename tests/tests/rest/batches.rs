//! `POST /v1/messages/batch`: order, outcomes of good and bad posts, keys, bounds, rights and tenancy.

use anyhow::{Context as _, Result};
use relay_acceptance::raw::Raw;
use relay_testkit::client::{Agent, Api, Reply};
use relay_testkit::shared;
use serde_json::{Value, json};
use sqlx::PgPool;

const PATH: &str = "/v1/messages/batch";
/// Most posts of a batch.
const POSTS: usize = 100;

struct Room {
    key: Api,
    ann: Api,
    bob: Api,
    bobs: Agent,
}

/// Workspace in which `ann` and `bob` are members of `room`.
async fn room(name: &str) -> Result<Room> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let bobs = key.register_agent("bob").await?;
    let bob = key.as_agent(&bobs);
    ann.create_channel("room").await?;
    bob.join("room").await?;
    Ok(Room { key, ann, bob, bobs })
}

/// Posts a batch and returns its outcomes.
async fn send(sender: &Api, messages: &[Value]) -> Result<Vec<Value>> {
    let reply = sender.post(PATH, json!({ "messages": messages })).await?;
    assert_eq!(reply.status, 200, "{}", reply.body);
    outcomes(&reply, messages.len())
}

fn outcomes(reply: &Reply, count: usize) -> Result<Vec<Value>> {
    let outcomes = reply.data()["outcomes"].as_array().context("outcomes")?.clone();
    assert_eq!(outcomes.len(), count, "one for each post: {}", reply.body);
    Ok(outcomes)
}

fn code(outcome: &Value) -> (u64, &str) {
    (outcome["status"].as_u64().unwrap_or_default(), outcome["error"]["code"].as_str().unwrap_or_default())
}

fn id(outcome: &Value) -> u64 {
    outcome["message"]["id"].as_str().and_then(|id| id.parse().ok()).unwrap_or_default()
}

/// Returns the texts that wait in a mailbox, in the order of their seqs.
async fn waiting(agent: &Api) -> Result<Vec<String>> {
    let rows = agent.get("/v1/deliveries?limit=200").await?.success()?;
    let text = |row: &Value| row["message"]["text"].as_str().unwrap_or_default().to_owned();
    Ok(rows.as_array().context("a list")?.iter().map(text).collect())
}

#[tokio::test]
async fn posts_of_every_kind_are_accepted_in_their_order() -> Result<()> {
    let Room { ann, bob, .. } = room("every-kind").await?;
    let root = ann.post_message("room", "root").await?.success()?;
    let dm = ann.dm("bob", "first").await?.success()?;
    let messages = [
        json!({ "channel": "#room", "text": "channel @bob", "data": { "a": 1 }, "mode": "steer" }),
        json!({ "to": "@bob", "text": "dm" }),
        json!({ "reply_to": root["id"], "text": "reply" }),
        json!({ "conversation_id": dm["conversation_id"], "text": "conversation" }),
        json!({ "address": "bob@direct", "text": "address" }),
        json!({ "to": "@self", "text": "note" }),
        json!({ "channel": "room", "text": "last" }),
    ];
    let sent = send(&ann, &messages).await?;
    for (outcome, post) in sent.iter().zip(&messages) {
        assert_eq!((code(outcome), outcome["message"]["replayed"].as_bool()), ((201, ""), Some(false)), "{outcome}");
        let message = ann.get(&format!("/v1/messages/{}", id(outcome))).await?.success()?;
        assert_eq!((&message["text"], &message["created_at"]), (&post["text"], &outcome["message"]["created_at"]));
        let conversation = message.get("conversation_id");
        assert_eq!(conversation, outcome["message"].get("conversation_id"), "{outcome}");
    }
    assert!(sent.windows(2).all(|two| id(&two[0]) < id(&two[1])), "{sent:?}");
    let first = ann.get(&format!("/v1/messages/{}", id(&sent[0]))).await?.success()?;
    assert_eq!((&first["metadata"], &first["injection_mode"]), (&json!({ "a": 1 }), &json!("steer")));
    let expected = ["root", "first", "channel @bob", "dm", "reply", "conversation", "address", "last"];
    assert_eq!(waiting(&bob).await?, expected);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_of_a_batch_survives_joins_between_its_posts() -> Result<()> {
    let Room { key, ann, bob, .. } = room("joins").await?;
    let mut members = Vec::new();
    for number in 0..20 {
        members.push(key.as_agent(&key.register_agent(&format!("member-{number}")).await?));
    }
    let gateways = &shared().await.gateways;
    // Each join makes the gateway's snapshot of the channel stale for posts that are being committed.
    let joins = async {
        for (number, member) in members.iter().enumerate() {
            member.at(&gateways[number % gateways.len()]).join("room").await?;
        }
        anyhow::Ok(())
    };
    let batches = async {
        let mut expected = Vec::new();
        for batch in 0..8 {
            let texts: Vec<String> = (0..20).map(|post| format!("{batch}-{post}")).collect();
            let post = |(nth, text): (usize, &String)| match nth % 2 {
                0 => json!({ "channel": "room", "text": text }),
                _ => json!({ "to": "bob", "text": text }),
            };
            let mut messages: Vec<Value> = texts.iter().enumerate().map(post).collect();
            while !messages.is_empty() {
                let outcomes = send(&ann, &messages).await?;
                let accepted = outcomes.iter().take_while(|outcome| code(outcome) == (201, "")).count();
                // Joins may overtake it again and again; then it is refused with all posts behind it, and posted later.
                for refused in &outcomes[accepted..] {
                    assert_eq!(code(refused), (503, "workspace_busy"), "{outcomes:?}");
                }
                messages.drain(..accepted);
            }
            expected.extend(texts);
        }
        anyhow::Ok(expected)
    };
    let (expected, ()) = tokio::try_join!(batches, joins)?;
    assert_eq!(waiting(&bob).await?, expected);
    Ok(())
}

#[tokio::test]
async fn a_bad_post_refuses_only_itself_with_the_code_of_its_own_route() -> Result<()> {
    let Room { key, ann, bob, .. } = room("bad-posts").await?;
    key.register_agent("carol").await?;
    let group = bob.post("/v1/dm/group", json!({ "participants": ["carol"] })).await?.success()?;
    ann.create_channel("old").await?;
    key.delete("/v1/channels/old").await?.success()?;
    let deep = format!(r#"{{"to":"bob","text":"t","data":{{"a":{}{}}}}}"#, "[".repeat(2000), "]".repeat(2000));
    let good = |nth: usize| format!(r#"{{"to":"bob","text":"good {nth}"}}"#);
    let escaped = json!({ "to": "bob", "text": "\u{1}".repeat(150_000) }).to_string();
    let bad = [
        (r#"{"channel":"nowhere","text":"t"}"#.to_owned(), (404, "channel_not_found")),
        (r#"{"channel":"old","text":"t"}"#.to_owned(), (400, "channel_archived")),
        (r#"{"channel":"room","text":"t","from":"bob"}"#.to_owned(), (400, "from_not_allowed")),
        (r#"{"to":"nobody","text":"t"}"#.to_owned(), (404, "agent_not_found")),
        (r#"{"to":"bob","text":""}"#.to_owned(), (400, "invalid_request")),
        (r#"{"to":"bob"}"#.to_owned(), (400, "invalid_request")),
        (r#"{"to":"bob","address":"bob@direct","text":"t"}"#.to_owned(), (400, "invalid_request")),
        (r#"{"text":"t"}"#.to_owned(), (400, "invalid_request")),
        (r#"{"address":"bob","text":"t"}"#.to_owned(), (400, "invalid_address")),
        (r#"{"address":"bob@mars","text":"t"}"#.to_owned(), (404, "address_not_found")),
        (r#"{"reply_to":"1","text":"t"}"#.to_owned(), (404, "message_not_found")),
        (r#"{"reply_to":"one","text":"t"}"#.to_owned(), (404, "message_not_found")),
        (r#"{"conversation_id":"dm_1","text":"t"}"#.to_owned(), (404, "dm_conversation_not_found")),
        (format!(r#"{{"conversation_id":{},"text":"t"}}"#, group["id"]), (403, "forbidden")),
        (r#"{"to":"bob","text":"t","attachments":["file_1"]}"#.to_owned(), (400, "invalid_attachments")),
        (r#"{"to":"bob","text":"t","ttl_ms":1}"#.to_owned(), (400, "invalid_request")),
        (r#"{"to":"bob","text":"t","idempotency_key":""}"#.to_owned(), (400, "invalid_idempotency_key")),
        (r#"{"to":"bob","text":"\u0000"}"#.to_owned(), (400, "invalid_request")),
        (r#"{"to":"bob","text":"t","data":{"n":1e999}}"#.to_owned(), (400, "invalid_request")),
        (deep, (400, "invalid_request")),
        (escaped, (413, "payload_too_large")),
        ("7".to_owned(), (400, "invalid_request")),
        ("[]".to_owned(), (400, "invalid_request")),
    ];
    let posts: Vec<String> = bad.iter().enumerate().flat_map(|(nth, (post, _))| [good(nth), post.clone()]).collect();
    let body = format!(r#"{{"messages":[{}]}}"#, posts.join(","));
    let reply = Raw::new("POST", format!("{}{PATH}", ann.base())).bearer(ann.token()).json(body).send().await?;
    assert_eq!(reply.status, 200, "{}", reply.body);
    for (pair, (post, expected)) in outcomes(&reply, posts.len())?.chunks(2).zip(&bad) {
        assert_eq!(code(&pair[0]), (201, ""), "beside {post}: {}", pair[0]);
        let shown = &post[..post.len().min(200)];
        assert_eq!(code(&pair[1]), *expected, "{shown}: {}", pair[1]);
        assert!(pair[1]["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{shown}: {}", pair[1]);
        assert!(pair[1].get("message").is_none() && pair[0].get("error").is_none());
    }
    assert_eq!(waiting(&bob).await?, (0..bad.len()).map(|nth| format!("good {nth}")).collect::<Vec<_>>());
    Ok(())
}

#[tokio::test]
async fn keys_hold_within_a_batch_between_batches_and_on_the_own_route() -> Result<()> {
    let Room { ann, bob, .. } = room("batch-keys").await?;
    let dm = |text: &str| json!({ "to": "bob", "text": text, "idempotency_key": "k1" });
    let channel = json!({ "channel": "room", "text": "channel", "idempotency_key": "k1" });
    let first = send(&ann, &[dm("dm"), channel.clone(), dm("dm"), dm("other")]).await?;
    assert_eq!(first.iter().map(code).collect::<Vec<_>>()[..3], [(201, ""); 3], "{first:?}");
    assert_eq!(code(&first[3]), (409, "idempotency_key_reused"));
    assert_eq!(id(&first[0]), id(&first[2]), "one message for one key");
    let replayed = |outcomes: &[Value]| {
        outcomes.iter().map(|outcome| outcome["message"]["replayed"].as_bool()).collect::<Vec<_>>()
    };
    assert_eq!(replayed(&first), [Some(false), Some(false), Some(true), None]);

    let again = send(&ann, &[channel, dm("dm")]).await?;
    assert_eq!((id(&again[0]), id(&again[1])), (id(&first[1]), id(&first[0])));
    assert_eq!(replayed(&again), [Some(true), Some(true)]);
    let own = json!({ "to": "bob", "text": "dm" });
    let own = ann.call(reqwest::Method::POST, "/v1/dm", Some(own), &[("idempotency-key", "k1")]).await?;
    assert!(own.headers.contains_key("idempotency-replayed"), "{}", own.body);
    assert_eq!(own.data()["id"], first[0]["message"]["id"]);
    let own = json!({ "text": "by itself" });
    let path = "/v1/channels/room/messages";
    let own = ann.call(reqwest::Method::POST, path, Some(own), &[("idempotency-key", "k2")]).await?;
    let same = json!({ "channel": "room", "text": "by itself", "idempotency_key": "k2" });
    let same = send(&ann, &[same]).await?;
    assert_eq!((&same[0]["message"]["id"], replayed(&same)), (&own.data()["id"], vec![Some(true)]));
    assert_eq!(waiting(&bob).await?, ["dm", "channel", "by itself"]);

    let header = [("idempotency-key", "k3")];
    let whole = json!({ "messages": [{ "to": "bob", "text": "t" }] });
    ann.call(reqwest::Method::POST, PATH, Some(whole), &header).await?.refused(400, "invalid_request")?;
    Ok(())
}

#[tokio::test]
async fn a_batch_is_bounded_and_a_malformed_one_changes_nothing() -> Result<()> {
    let Room { ann, bob, .. } = room("bounds-of-batches").await?;
    let post = |text: &str| json!({ "to": "bob", "text": text });
    for (body, what) in [
        (json!({ "messages": [] }), "no posts"),
        (json!({ "messages": vec![post("t"); POSTS + 1] }), "too many"),
        (json!({ "messages": post("t") }), "no list"),
        (json!({}), "nothing"),
    ] {
        let reply = ann.post(PATH, body).await?;
        reply.refused(400, "invalid_request").with_context(|| what.to_owned())?;
    }
    let large = vec![post(&"x".repeat(11_000)); POSTS];
    ann.post(PATH, json!({ "messages": large })).await?.refused(413, "payload_too_large")?;
    let raw = |body: &str| Raw::new("POST", format!("{}{PATH}", ann.base())).bearer(ann.token()).json(body).send();
    raw(r#"{"messages":[{"to":"bob","text":"t"}"#).await?.refused(400, "invalid_json")?;
    raw(r#"[{"to":"bob","text":"t"}]"#).await?.refused(400, "invalid_request")?;
    assert_eq!(waiting(&bob).await?, Vec::<String>::new());

    let most: Vec<Value> = (0..POSTS).map(|nth| post(&format!("{nth:0>9000}"))).collect();
    let sent = send(&ann, &most).await?;
    assert!(sent.iter().all(|outcome| code(outcome) == (201, "")), "{sent:?}");
    let texts: Vec<String> = most.iter().filter_map(|post| post["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(waiting(&bob).await?, texts);
    Ok(())
}

/// The posts of a batch share the transactions that commit them.
#[tokio::test]
async fn a_batch_commits_in_few_transactions() -> Result<()> {
    let Room { key, ann, .. } = room("few-commits").await?;
    let messages: Vec<Value> = (0..POSTS).map(|nth| json!({ "to": "bob", "text": nth.to_string() })).collect();
    let workspace = key.get("/v1/workspace").await?.data()["id"].as_str().context("an id")?.parse::<i64>()?;
    let pool = PgPool::connect(&shared().await.database_url).await?;
    let sent = send(&ann, &messages).await?;
    assert!(sent.iter().all(|outcome| code(outcome) == (201, "")), "{sent:?}");
    let counted = "SELECT count(DISTINCT xmin::text) FROM messages WHERE workspace_id = $1";
    let transactions: i64 = sqlx::query_scalar(counted).bind(workspace).fetch_one(&pool).await?;
    assert!(transactions <= 4, "{transactions} transactions for {POSTS} posts");
    Ok(())
}

#[tokio::test]
async fn rights_and_tokens_count_for_each_post() -> Result<()> {
    let Room { key, ann, bob, bobs } = room("rights-of-batches").await?;
    let post = json!({ "channel": "room", "text": "t" });
    key.post(PATH, json!({ "messages": [post] })).await?.refused(403, "agent_token_required")?;
    key.patch("/v1/agents/ann", json!({ "rights": { "send": false } })).await?.success()?;
    let refused = send(&ann, &[post.clone(), json!({ "to": "bob", "text": "t" })]).await?;
    assert_eq!(refused.iter().map(code).collect::<Vec<_>>(), [(403, "send_denied"); 2]);
    key.patch("/v1/agents/ann", json!({ "rights": { "send": null } })).await?.success()?;

    let node = key.create_broker_node("node_batch", "box-batch").await?;
    let node = key.with_token(&node.token);
    key.patch("/v1/agents/ann", json!({ "rights": { "post_through_node": false } })).await?.success()?;
    let by_node = [
        json!({ "channel": "room", "text": "for bob", "from": "bob" }),
        json!({ "channel": "room", "text": "for nobody", "from": "nobody" }),
        json!({ "channel": "room", "text": "without" }),
        json!({ "channel": "room", "text": "for ann", "from": "ann" }),
        json!({ "to": "ann", "text": "direct", "from": "bob" }),
    ];
    let expected = [
        (201, ""),
        (404, "agent_not_found"),
        (400, "from_required"),
        (403, "node_post_denied"),
        (401, "node_token_forbidden"),
    ];
    let outcomes = send(&node, &by_node).await?;
    assert_eq!(outcomes.iter().map(code).collect::<Vec<_>>(), expected, "{outcomes:?}");
    let posted = ann.get(&format!("/v1/messages/{}", id(&outcomes[0]))).await?.success()?;
    assert_eq!(posted["agent_id"], bobs.id.as_str());
    assert_eq!(waiting(&ann).await?, ["for bob"]);
    assert_eq!(waiting(&bob).await?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn targets_of_another_workspace_look_like_missing_ones() -> Result<()> {
    let victim = room("victim-of-batches").await?;
    let intruder = room("intruder-with-batches").await?;
    victim.ann.create_channel("secrets").await?;
    let root = victim.ann.post_message("room", "secret").await?.success()?;
    let dm = victim.ann.dm("bob", "secret").await?.success()?;
    victim.key.register_agent("victor").await?;
    let before = waiting(&victim.bob).await?;
    let posts = |channel: &str, to: &str, address: &str, parent: &Value, conversation: &Value| {
        [
            json!({ "channel": channel, "text": "t" }),
            json!({ "to": to, "text": "t" }),
            json!({ "address": address, "text": "t" }),
            json!({ "reply_to": parent, "text": "t" }),
            json!({ "conversation_id": conversation, "text": "t" }),
        ]
    };
    let theirs = posts("secrets", "victor", "victor@direct", &root["id"], &dm["conversation_id"]);
    let nobodys = posts("nothing", "nobody", "nobody@direct", &json!("1"), &json!("dm_000000000000000000000000"));
    let (theirs, nobodys) = (send(&intruder.ann, &theirs).await?, send(&intruder.ann, &nobodys).await?);
    for (theirs, nobodys) in theirs.iter().zip(&nobodys) {
        assert_eq!(code(theirs), code(nobodys));
        assert_eq!(code(theirs).0, 404, "{theirs}");
    }
    assert_eq!(waiting(&victim.bob).await?, before);
    Ok(())
}
