//! Observer tokens: management, access, and propagation of changes to every gateway.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Agent, Api, Reply};
use relay_testkit::{Shared, shared, wait};
use serde_json::{Value, json};
use sqlx::{
    postgres::PgPoolOptions,
    types::chrono::{DateTime, Utc},
};

/// Hints are immediate, and a lost one is repaired within a second; the rest is for a loaded machine.
const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Returns a field of each element.
fn all(list: &Value, field: &str) -> Vec<String> {
    list.as_array().into_iter().flatten().map(|element| text(&element[field]).to_owned()).collect()
}

async fn workspace(name: &str) -> Result<Api> {
    Api::create_workspace(&shared().await.gateways[0], name).await
}

async fn issue(key: &Api, body: Value) -> Result<(String, Api)> {
    let made = key.post("/v1/observer-tokens", body).await?.success()?;
    Ok((text(&made["id"]).to_owned(), key.with_token(text(&made["token"]))))
}

/// Creates a token with these scopes and filters.
async fn observer(key: &Api, scopes: &[&str], filters: Value) -> Result<Api> {
    let name = format!("{scopes:?}{filters}");
    let name = &name[..name.len().min(120)];
    Ok(issue(key, json!({ "name": name, "scopes": scopes, "filters": filters })).await?.1)
}

fn gateways(shared: &'static Shared) -> (&'static str, &'static str) {
    (&shared.gateways[0], &shared.gateways[1])
}

#[tokio::test]
async fn a_token_is_created_listed_updated_rotated_and_revoked() -> Result<()> {
    let key = workspace("observer-crud").await?;
    let body = json!({
        "name": "dashboard", "description": "the wall", "scopes": ["channels:read", "stream:read", "stream:read"],
        "filters": { "channel_names": ["#general"] }, "expires_at": "2999-01-01T00:00:00Z", "unknown": 1,
    });
    let made = key.post("/v1/observer-tokens", body.clone()).await?;
    assert_eq!(made.status, 201, "{}", made.body);
    let made = made.success()?;
    let (id, token) = (text(&made["id"]).to_owned(), text(&made["token"]).to_owned());
    assert!(id.starts_with("ot_") && token.starts_with("ot_live_") && token.matches('.').count() == 2, "{made}");
    assert!(token.len() < 1000, "it travels in URLs: {}", token.len());
    assert_eq!(made["scopes"], json!(["stream:read", "channels:read"]));
    assert_eq!(made["filters"], json!({ "channel_names": ["general"], "include_dms": false }));
    assert_eq!((text(&made["status"]), text(&made["expires_at"])), ("active", "2999-01-01T00:00:00.000Z"));
    for unset in ["updated_at", "revoked_at", "last_used_at"] {
        assert!(made[unset].is_null(), "{unset} in {made}");
    }
    key.post("/v1/observer-tokens", body).await?.refused(409, "observer_token_name_conflict")?;

    let path = format!("/v1/observer-tokens/{id}");
    let read = key.get(&path).await?.success()?;
    assert!(read.get("token").is_none(), "the text is shown once");
    assert_eq!((text(&read["description"]), &read["created_at"]), ("the wall", &made["created_at"]));
    assert_eq!(key.get("/v1/observer-tokens").await?.success()?, json!([read]));

    let changed =
        key.patch(&path, json!({ "description": null, "filters": {}, "expires_at": null })).await?.success()?;
    assert_eq!((&changed["description"], &changed["expires_at"]), (&Value::Null, &Value::Null));
    assert_eq!((&changed["filters"], text(&changed["name"])), (&json!({ "include_dms": false }), "dashboard"));
    assert!(!changed["updated_at"].is_null());

    let rotated = key.post_empty(&format!("{path}/rotate")).await?.success()?;
    assert_ne!(rotated["token"], made["token"]);
    let (old, new) = (key.with_token(&token), key.with_token(text(&rotated["token"])));
    old.get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    assert_eq!(all(&new.get("/v1/channels").await?.success()?, "name"), ["general"]);

    let other = issue(&key, json!({ "name": "other", "scopes": ["files:read"] })).await?.0;
    let path_of_other = format!("/v1/observer-tokens/{other}");
    key.patch(&path_of_other, json!({ "name": "dashboard" })).await?.refused(409, "observer_token_name_conflict")?;

    assert_eq!(key.delete(&path).await?.status, 204);
    new.get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    let revoked = key.get(&path).await?.success()?;
    assert_eq!(text(&revoked["status"]), "revoked");
    assert!(!revoked["revoked_at"].is_null());
    for refused in
        [key.delete(&path).await?, key.patch(&path, json!({})).await?, key.post_empty(&format!("{path}/rotate")).await?]
    {
        refused.refused(404, "observer_token_not_found")?;
    }
    // Active ones come first; the name is free again.
    assert_eq!(all(&key.get("/v1/observer-tokens").await?.success()?, "name"), ["other", "dashboard"]);
    key.patch(&path_of_other, json!({ "name": "dashboard" })).await?.success()?;
    Ok(())
}

#[tokio::test]
async fn invalid_tokens_are_refused_at_creation() -> Result<()> {
    let key = workspace("observer-bad").await?;
    let good = json!({ "name": "n", "scopes": ["stream:read"] });
    let with = |field: &str, value: Value| {
        let mut body = good.clone();
        body[field] = value;
        body
    };
    let many: Vec<String> = (0..101).map(|n| format!("c{n}")).collect();
    let long: Vec<String> = (0..60).map(|n| format!("{n:060}")).collect();
    for body in [
        json!({}),
        json!({ "name": "n" }),
        json!({ "scopes": ["stream:read"] }),
        with("name", json!("")),
        with("name", json!("x".repeat(200))),
        with("scopes", json!([])),
        with("scopes", json!(["stream"])),
        with("scopes", json!(["stream:read", "admin:read"])),
        with("scopes", json!("stream:read")),
        with("filters", json!([])),
        with("filters", json!({ "channels": ["general"] })),
        with("filters", json!({ "channel_ids": ["general"] })),
        with("filters", json!({ "channel_ids": [] })),
        with("filters", json!({ "channel_names": many })),
        with("filters", json!({ "event_types": long })),
        with("filters", json!({ "include_dms": "yes" })),
        with("filters", json!({ "created_after": "yesterday" })),
        with("expires_at", json!("2020-01-01T00:00:00Z")),
        with("expires_at", json!("soon")),
        with("description", json!("x".repeat(3000))),
    ] {
        key.post("/v1/observer-tokens", body.clone()).await?.refused(400, "invalid_request")?;
    }
    let (id, _) = issue(&key, good).await?;
    let path = format!("/v1/observer-tokens/{id}");
    for body in [
        json!({ "scopes": [] }),
        json!({ "filters": { "x": 1 } }),
        json!({ "expires_at": "2020-01-01T00:00:00Z" }),
        json!({ "name": "" }),
    ] {
        key.patch(&path, body).await?.refused(400, "invalid_request")?;
    }
    for id in ["ot_1", "ot_", "1", "%20"] {
        key.get(&format!("/v1/observer-tokens/{id}")).await?.refused(404, "observer_token_not_found")?;
    }
    Ok(())
}

/// Paths that require one of the scopes (the class columns of the tables in docs/protocol/rest.md).
const READS: &[(&str, &[&str])] = &[
    ("/v1/workspace", &[]),
    ("/v1/agents", &["agents:read"]),
    ("/v1/agents/ann", &["agents:read"]),
    ("/v1/channels", &["channels:read"]),
    ("/v1/channels/general", &["channels:read"]),
    ("/v1/channels/general/members", &["channels:read"]),
    ("/v1/channels/general/messages", &["messages:read"]),
    ("/v1/messages/{message}", &["messages:read"]),
    ("/v1/messages/{message}/replies", &["messages:read", "threads:read"]),
    ("/v1/messages/{dm}", &["dms:read"]),
    ("/v1/nodes", &["nodes:read"]),
];

#[tokio::test]
async fn each_read_needs_its_scope_and_no_other() -> Result<()> {
    let key = workspace("observer-scopes").await?;
    let (ann, _bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let message = key.as_agent(&ann).post_message("general", "hello").await?.success()?;
    let dm = key.as_agent(&ann).dm("bob", "psst").await?.success()?;
    let scopes = [
        "stream",
        "messages",
        "threads",
        "dms",
        "channels",
        "search",
        "agents",
        "nodes",
        "deliveries",
        "activity",
        "files",
        "reactions",
    ];
    for scope in scopes.map(|scope| format!("{scope}:read")) {
        let observer = observer(&key, &[&scope], json!({ "include_dms": true })).await?;
        for (path, needed) in READS {
            let path = path.replace("{message}", text(&message["id"])).replace("{dm}", text(&dm["id"]));
            let reply = observer.get(&path).await?;
            if needed.is_empty() || needed.contains(&&*scope) {
                assert_eq!(reply.status, 200, "{path} with {scope}: {}", reply.body);
                continue;
            }
            // A single message passes the scope check with either scope and is then hidden by the filter.
            let either = path.starts_with("/v1/messages/") && !path.ends_with("/replies");
            if either && ["messages:read", "dms:read"].contains(&&*scope) {
                reply.refused(404, "message_not_found")?;
            } else {
                reply.refused(403, "insufficient_scope")?;
            }
        }
        // Nothing can be written, and data of the workspace itself is hidden.
        observer.post("/v1/channels", json!({ "name": "x" })).await?.refused(401, "observer_token_forbidden")?;
        observer.get("/v1/observer-tokens").await?.refused(401, "observer_token_forbidden")?;
        observer.get("/v1/deliveries").await?.refused(401, "observer_token_forbidden")?;
    }
    let (id, any) = issue(&key, json!({ "name": "info", "scopes": ["files:read"] })).await?;
    assert_eq!(text(&any.get("/v1/workspace").await?.success()?["observer_token_id"]), id);
    assert!(key.get("/v1/workspace").await?.success()?.get("observer_token_id").is_none());
    Ok(())
}

struct Scene {
    key: Api,
    ann: Agent,
    bob: Agent,
    ops: Value,
}

/// Ann and bob in `#ops` with eight alternating messages; bob replies to the first.
async fn scene(name: &str) -> Result<Scene> {
    let key = workspace(name).await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let ops = key.as_agent(&ann).create_channel("ops").await?;
    key.as_agent(&bob).join("ops").await?;
    for turn in 0..8 {
        let author = if turn % 2 == 0 { &ann } else { &bob };
        key.as_agent(author).post_message("ops", &format!("m{turn}")).await?.success()?;
    }
    Ok(Scene { key, ann, bob, ops })
}

const READ_ALL: [&str; 5] = ["messages:read", "threads:read", "channels:read", "agents:read", "dms:read"];

#[tokio::test]
async fn filters_hide_channels_authors_and_older_data() -> Result<()> {
    let Scene { key, ann, bob, ops } = scene("observer-filters").await?;
    key.as_agent(&ann).post_message("general", "elsewhere").await?.success()?;
    for filters in [json!({ "channel_names": ["ops"] }), json!({ "channel_ids": [ops["id"]] })] {
        let only_ops = observer(&key, &READ_ALL, filters).await?;
        assert_eq!(all(&only_ops.get("/v1/channels").await?.success()?, "name"), ["ops"]);
        for path in ["/v1/channels/general", "/v1/channels/general/members", "/v1/channels/general/messages"] {
            let hidden = only_ops.get(path).await?;
            let absent = only_ops.get(&path.replace("general", "nowhere")).await?;
            let plain = |reply: &Reply, name: &str| reply.body.to_string().replace(name, "<it>");
            assert_eq!(plain(&hidden, "general"), plain(&absent, "nowhere"), "hidden is as absent as absent");
            hidden.refused(404, "channel_not_found")?;
        }
        assert_eq!(only_ops.get("/v1/channels/ops/messages").await?.success()?.as_array().map(Vec::len), Some(8));
        let ann_seen = only_ops.get("/v1/agents/ann").await?.success()?;
        assert_eq!(all(&ann_seen["channels"], "name"), ["ops"]);
        assert_eq!(ann_seen["pending_deliveries"], json!([]), "they need deliveries:read");
    }

    // Pages are full although every other message is hidden.
    let only_bob = observer(&key, &READ_ALL, json!({ "agent_ids": [bob.id] })).await?;
    let page = only_bob.get("/v1/channels/ops/messages?limit=3").await?.success()?;
    assert_eq!(all(&page, "text"), ["m7", "m5", "m3"]);
    let next = format!("/v1/channels/ops/messages?limit=3&before={}", text(&page[2]["id"]));
    assert_eq!(all(&only_bob.get(&next).await?.success()?, "text"), ["m1"]);
    assert_eq!(all(&only_bob.get("/v1/agents").await?.success()?, "name"), ["bob"]);
    only_bob.get("/v1/agents/ann").await?.refused(404, "agent_not_found")?;
    assert_eq!(all(&only_bob.get("/v1/channels/ops/members").await?.success()?, "agent_name"), ["bob"]);

    let messages = key.get("/v1/channels/ops/messages").await?.success()?;
    let (m7, m6) = (&messages[0], &messages[1]);
    only_bob.get(&format!("/v1/messages/{}", text(&m7["id"]))).await?.success()?;
    only_bob.get(&format!("/v1/messages/{}", text(&m6["id"]))).await?.refused(404, "message_not_found")?;
    let replies = format!("/v1/messages/{}/replies", text(&m7["id"]));
    for (author, reply) in [(&ann, "r-ann"), (&bob, "r-bob")] {
        key.as_agent(author).post(&replies, json!({ "text": reply })).await?.success()?;
    }
    assert_eq!(all(&only_bob.get(&replies).await?.success()?["replies"], "text"), ["r-bob"]);
    let hidden_root = format!("/v1/messages/{}/replies", text(&m6["id"]));
    only_bob.get(&hidden_root).await?.refused(404, "message_not_found")?;

    let since = observer(&key, &READ_ALL, json!({ "created_after": m6["created_at"] })).await?;
    assert_eq!(all(&since.get("/v1/channels/ops/messages").await?.success()?, "text")[..2], ["m7", "m6"]);
    let later = observer(&key, &READ_ALL, json!({ "created_after": "2999-01-01T00:00:00Z" })).await?;
    assert_eq!(later.get("/v1/channels/ops/messages").await?.success()?, json!([]));
    later.get(&format!("/v1/messages/{}", text(&m7["id"]))).await?.refused(404, "message_not_found")?;
    Ok(())
}

#[tokio::test]
async fn a_direct_message_requires_the_scope_the_filter_and_its_conversation() -> Result<()> {
    let key = workspace("observer-dms").await?;
    let (ann, _bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let dm = key.as_agent(&ann).dm("bob", "psst").await?.success()?;
    let path = format!("/v1/messages/{}", text(&dm["id"]));
    let both = ["dms:read", "messages:read"];
    for (scopes, filters, seen) in [
        (&both[..], json!({ "include_dms": true }), true),
        (&both[..], json!({ "include_dms": true, "channel_names": ["ops"] }), true),
        (&both[..], json!({ "include_dms": true, "dm_conversation_ids": [dm["conversation_id"]] }), true),
        (&both[..], json!({ "include_dms": true, "dm_conversation_ids": ["dm_other"] }), false),
        (&both[..], json!({ "include_dms": false }), false),
        (&both[..], json!({}), false),
        (&["messages:read"][..], json!({ "include_dms": true }), false),
    ] {
        let observer = observer(&key, scopes, filters.clone()).await?;
        let reply = observer.get(&path).await?;
        if seen {
            assert_eq!(text(&reply.success()?["text"]), "psst", "{filters}");
        } else {
            reply.refused(404, "message_not_found")?;
        }
    }
    Ok(())
}

/// A token is valid at the other gateway at once; later changes arrive within seconds.
#[tokio::test]
async fn every_token_change_reaches_the_other_gateway() -> Result<()> {
    let (a, b) = gateways(shared().await);
    let key = Api::create_workspace(a, "observer-gateways").await?;
    key.register_agent("ann").await?;
    let (id, observer) = issue(&key, json!({ "name": "n", "scopes": ["channels:read"] })).await?;
    let path = format!("/v1/observer-tokens/{id}");
    let there = observer.at(b);
    assert_eq!(there.get("/v1/channels").await?.status, 200, "no gateway needs to be told of a new token");

    key.patch(&path, json!({ "scopes": ["agents:read"] })).await?.success()?;
    observer.get("/v1/channels").await?.refused(403, "insufficient_scope")?;
    let became = |api: Api, path: &'static str, status: u16| async move {
        let what = format!("{path} at {} to answer {status}", api.base());
        wait::until(&what, SOON, || async { api.get(path).await.is_ok_and(|reply| reply.status == status) }).await
    };
    became(there.clone(), "/v1/channels", 403).await;
    assert_eq!(there.get("/v1/agents").await?.status, 200);

    key.patch(&path, json!({ "filters": { "agent_ids": ["1"] } })).await?.success()?;
    assert_eq!(observer.get("/v1/agents").await?.success()?, json!([]));

    let rotated = key.at(b).post_empty(&format!("{path}/rotate")).await?.success()?;
    there.get("/v1/agents").await?.refused(401, "observer_token_invalid")?;
    became(observer.clone(), "/v1/agents", 401).await;
    let newer = key.with_token(text(&rotated["token"]));
    assert_eq!(newer.get("/v1/agents").await?.success()?, json!([]), "the filters of the last change hold");

    let soon = in_seconds(5);
    key.patch(&path, json!({ "expires_at": soon })).await?.success()?;
    became(newer.at(b), "/v1/agents", 401).await;
    became(newer.clone(), "/v1/agents", 401).await;
    // The expiry may be removed: the token stays valid.
    key.patch(&path, json!({ "expires_at": null })).await?.success()?;
    assert_eq!(newer.get("/v1/agents").await?.status, 200);
    became(newer.at(b), "/v1/agents", 200).await;

    assert_eq!(key.delete(&path).await?.status, 204);
    newer.get("/v1/agents").await?.refused(401, "observer_token_invalid")?;
    became(newer.at(b), "/v1/agents", 401).await;

    let (_, last) = issue(&key, json!({ "name": "last", "scopes": ["agents:read"] })).await?;
    assert_eq!(last.at(b).get("/v1/agents").await?.status, 200);
    assert_eq!(key.delete("/v1/workspace").await?.status, 204);
    last.get("/v1/agents").await?.refused(401, "observer_token_invalid")?;
    became(last.at(b), "/v1/agents", 401).await;
    Ok(())
}

/// Returns the instant in this many seconds, as clients format it.
fn in_seconds(seconds: u64) -> String {
    DateTime::<Utc>::from(std::time::SystemTime::now() + Duration::from_secs(seconds)).to_rfc3339()
}

#[tokio::test]
async fn an_opaque_token_is_valid_while_its_hash_is_stored() -> Result<()> {
    let (a, b) = gateways(shared().await);
    let key = Api::create_workspace(a, "observer-opaque").await?;
    let workspace = text(&key.get("/v1/workspace").await?.success()?["id"]).to_owned();
    let (id, _) = issue(&key, json!({ "name": "imported", "scopes": ["channels:read"] })).await?;
    let opaque = format!("ot_live_{:0>48}", workspace);
    let observer = key.with_token(&opaque);
    observer.get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    let pool = PgPoolOptions::new().max_connections(1).connect(&shared().await.database_url).await?;
    sqlx::query(
        "INSERT INTO tokens (token_hash, kind, workspace_id, observer_token_id, created_at)
         VALUES (sha256($1::bytea), 'observer', $2, $3, now())",
    )
    .bind(opaque.as_bytes())
    .bind(workspace.parse::<i64>()?)
    .bind(id.trim_start_matches("ot_").parse::<i64>()?)
    .execute(&pool)
    .await?;
    for gateway in [a, b] {
        // A gateway remembers for a second that it did not know the token.
        let is_known =
            || async { observer.at(gateway).get("/v1/channels").await.is_ok_and(|reply| reply.status == 200) };
        wait::until("the opaque token to be known", SOON, is_known).await;
        observer.at(gateway).get("/v1/agents").await?.refused(403, "insufficient_scope")?;
    }
    let path = format!("/v1/observer-tokens/{id}");
    key.patch(&path, json!({ "scopes": ["agents:read"] })).await?.success()?;
    assert_eq!(observer.get("/v1/agents").await?.status, 200, "it follows its row");
    key.post_empty(&format!("{path}/rotate")).await?.success()?;
    observer.get("/v1/agents").await?.refused(401, "observer_token_invalid")?;
    let gone = || async { observer.at(b).get("/v1/agents").await.is_ok_and(|reply| reply.status == 401) };
    wait::until("the opaque token to be dead at the other gateway", SOON, gone).await;
    Ok(())
}

#[tokio::test]
async fn the_last_use_is_recorded_and_a_forged_token_is_refused() -> Result<()> {
    let key = workspace("observer-used").await?;
    let (id, observer) = issue(&key, json!({ "name": "n", "scopes": ["channels:read"] })).await?;
    observer.get("/v1/channels").await?.success()?;
    let path = format!("/v1/observer-tokens/{id}");
    let used = || async { key.get(&path).await.is_ok_and(|reply| !reply.data()["last_used_at"].is_null()) };
    wait::until("the use to be noted", SOON, used).await;

    let token = observer.token();
    let (head, signature) = token.rsplit_once('.').unwrap_or_default();
    let (header, claims) = head.rsplit_once('.').unwrap_or_default();
    // {"alg":"none"}, {"alg":"HS256"} and {"alg":"EdDSA","kid":"nobody"}
    for forged in [
        format!("{head}.{}", "A".repeat(signature.len())),
        format!("{head}."),
        format!("ot_live_eyJhbGciOiJub25lIn0.{}.", claims),
        format!("ot_live_eyJhbGciOiJIUzI1NiJ9.{claims}.{signature}"),
        format!("ot_live_eyJhbGciOiJFZERTQSIsImtpZCI6Im5vYm9keSJ9.{claims}.{signature}"),
        format!("{header}.e30.{signature}"),
        format!("{token}x"),
        format!("ot_live_{}", "a.".repeat(1500)),
    ] {
        key.with_token(&forged).get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    }
    key.with_token(&format!("ot_live_{}", "a".repeat(4100))).get("/v1/channels").await?.refused(401, "unauthorized")?;
    Ok(())
}

#[tokio::test]
async fn the_name_of_an_expired_token_is_reusable() -> Result<()> {
    let key = workspace("observer-names").await?;
    let body = |end: Option<String>| json!({ "name": "n", "scopes": ["channels:read"], "expires_at": end });
    let (first, observer) = issue(&key, body(Some(in_seconds(5)))).await?;
    let ended = || async { observer.get("/v1/channels").await.is_ok_and(|reply| reply.status == 401) };
    wait::until("the token to end", SOON, ended).await;
    let (second, _) = issue(&key, body(None)).await?;
    assert_ne!(first, second);
    assert_eq!(text(&key.get(&format!("/v1/observer-tokens/{first}")).await?.success()?["status"]), "revoked");
    Ok(())
}
