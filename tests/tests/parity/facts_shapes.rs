//! Small shapes of answers: acknowledgements, reports, filters, keys, attribution and rate limits.

use anyhow::{Context as _, Result};
use relay_acceptance::{
    room::{Room, rows, text},
    spawning::post_with_key,
};
use relay_testkit::{client::Api, shared};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn a_repeated_failure_keeps_the_first_report() -> Result<()> {
    let room = Room::new("facts").await?;
    let other = room.bob.at(room.ann.base());
    room.key.post("/v1/nodes", json!({ "name": "queue", "kind": "poll", "max_agents": 4 })).await?.success()?;
    // On a node of kind poll the delivery comes back later, elsewhere it is settled.
    for (node, error) in [(None, "disk full"), (Some("queue"), "no route")] {
        if let Some(node) = node {
            room.key.bind(node, "bob").await?;
        }
        room.ann.dm("bob", "hello").await?.success()?;
        let listed = room.bob.get("/v1/deliveries").await?.success()?;
        let newest = rows(&listed).last().context("a delivery")?;
        let path = format!("/v1/deliveries/{}/fail", text(&newest["id"]));
        let first = room.bob.post(&path, json!({ "error": error, "retryable": true })).await?.success()?;
        let second = other.post(&path, json!({ "error": "another", "retryable": false })).await?.success()?;
        for field in ["status", "error", "retryable", "available_at", "dead_lettered_at"] {
            assert_eq!(second[field], first[field], "{field} on {node:?}: {second}");
        }
        assert_eq!((&second["error"], &second["retryable"]), (&json!(error), &json!(true)), "{second}");
    }
    Ok(())
}

#[tokio::test]
async fn unset_filters_of_observers_show_that_direct_messages_are_hidden() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "facts").await?;
    let other = key.at(&gateways[1]);
    let scopes = json!(["messages:read", "dms:read"]);
    for (name, filters, shown) in [
        ("none", json!(null), json!({ "include_dms": false })),
        ("empty", json!({}), json!({ "include_dms": false })),
        (
            "some",
            json!({ "channel_names": ["general"] }),
            json!({ "channel_names": ["general"], "include_dms": false }),
        ),
        ("set", json!({ "include_dms": true }), json!({ "include_dms": true })),
    ] {
        let mut body = json!({ "name": name, "scopes": scopes });
        if !filters.is_null() {
            body["filters"] = filters;
        }
        let made = key.post("/v1/observer-tokens", body).await?.success()?;
        let path = format!("/v1/observer-tokens/{}", text(&made["id"]));
        assert_eq!(made["filters"], shown, "{made}");
        assert_eq!(other.get(&path).await?.success()?["filters"], shown);
        // The answer can be sent back.
        let again = other.patch(&path, json!({ "filters": made["filters"] })).await?.success()?;
        assert_eq!(again["filters"], shown);
    }
    Ok(())
}

#[tokio::test]
async fn a_keyed_request_is_repeated_whether_its_data_is_null_or_absent() -> Result<()> {
    let room = Room::new("facts").await?;
    let other = room.ann.at(room.bob.base());
    for path in ["/v1/channels/room/messages", "/v1/dm"] {
        let body = |data: Option<Value>| {
            let mut body = json!({ "text": "once", "to": "bob" });
            if let Some(data) = data {
                body["data"] = data;
            }
            body
        };
        let made = post_with_key(&room.ann, path, body(None), path).await?;
        let repeated = post_with_key(&other, path, body(Some(json!(null))), path).await?;
        assert_eq!(repeated.headers.get("idempotency-replayed").map(|value| value.as_bytes()), Some(&b"true"[..]));
        assert_eq!(made.success()?["id"], repeated.success()?["id"]);
        let changed = post_with_key(&other, path, body(Some(json!({ "a": 1 }))), path).await?;
        changed.refused(409, "idempotency_key_reused")?;
    }
    Ok(())
}

#[tokio::test]
async fn the_attribution_of_a_workspace_is_kept_and_malformed_ones_are_refused() -> Result<()> {
    let gateways = &shared().await.gateways;
    let anonymous = Api::anonymous(&gateways[0]);
    let create = async |body: Value, headers: &[(&str, &str)]| {
        anonymous.call(Method::POST, "/v1/workspaces", Some(body), headers).await
    };
    let show = async |created: Value| {
        let key = anonymous.with_token(text(&created["api_key"])).at(&gateways[1]);
        key.get("/v1/workspace").await?.success().map(|shown| shown["provenance"].clone())
    };
    let headers = [
        ("x-relaycast-origin-client", "@relaycast/sdk"),
        ("x-relaycast-origin-version", "6.0.2"),
        ("x-relaycast-origin-actor", "Claude/Code (ci)"),
        ("x-agent-relay-distinct-id", "d-1.2:3"),
    ];
    let declared = json!({ "source": "ci", "origin_id": "run-7", "classification": "internal" });
    let made = create(json!({ "name": "declared", "provenance": declared }), &headers).await?.success()?;
    assert_eq!(
        show(made).await?,
        json!({
            "source": "ci", "origin_id": "run-7", "classification": "internal", "origin_client": "@relaycast/sdk",
            "origin_version": "6.0.2", "origin_actor": "claude/code (ci)", "origin_distinct_id": "d-1.2:3",
        })
    );
    let made = create(json!({ "name": "sdk" }), &headers[..1]).await?.success()?;
    assert_eq!(show(made).await?, json!({ "source": "sdk", "origin_client": "@relaycast/sdk" }));
    let made = create(json!({ "name": "plain" }), &[]).await?.success()?;
    assert_eq!(show(made).await?, json!(null));

    let long = "a".repeat(129);
    for (name, value) in [
        ("x-relaycast-origin-client", long.as_str()),
        ("x-relaycast-origin-client", "two words"),
        ("x-relaycast-origin-version", long.as_str()),
        ("x-relaycast-origin-actor", "<script>"),
        ("x-agent-relay-distinct-id", "a b"),
    ] {
        create(json!({ "name": "refused" }), &[(name, value)]).await?.refused(400, "invalid_request")?;
    }
    for provenance in [
        json!("ci"),
        json!({}),
        json!({ "source": "unheard-of" }),
        json!({ "source": "ci", "classification": "secret" }),
        json!({ "source": "ci", "origin_id": "" }),
        json!({ "source": "ci", "origin_id": "a\nb" }),
    ] {
        create(json!({ "name": "refused", "provenance": provenance }), &[]).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn the_plans_rate_limits_are_shown_while_they_are_off() -> Result<()> {
    // The shared engine runs with `RELAY_RATE_LIMITS=off`.
    let room = Room::new("facts").await?;
    let shown = room.key.get("/v1/workspace").await?.success()?;
    let per_minute = match text(&shown["plan"]) {
        "free" => 300,
        "pro" => 6_000,
        _ => 30_000,
    };
    for (api, path, limit) in
        [(&room.ann, "/v1/channels", per_minute), (&room.bob, "/v1/agents/presence", per_minute * 3 / 10)]
    {
        for _ in 0..2 {
            let reply = api.get(path).await?;
            let header =
                |name: &str| reply.headers.get(name).and_then(|value| value.to_str().ok()?.parse::<i64>().ok());
            assert_eq!(header("x-ratelimit-limit"), Some(limit), "{path}: {:?}", reply.headers);
            assert_eq!(header("x-ratelimit-remaining"), Some(limit), "nothing is counted");
            assert!(header("x-ratelimit-reset").is_some_and(|reset| reset > 1_700_000_000), "{:?}", reply.headers);
        }
    }
    Ok(())
}
