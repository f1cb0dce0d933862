//! Event subscriptions: validation, hidden secrets, and the list of pending calls.

use anyhow::Result;
use relay_testkit::client::Api;
use relay_testkit::shared;
use serde_json::{Value, json};
use sqlx::PgPool;

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn good() -> Value {
    json!({ "events": ["message.created"], "url": "https://127.0.0.1:9/hook" })
}

#[tokio::test]
async fn a_subscription_is_created_shown_and_deleted_without_revealing_secrets() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "subscriptions").await?;
    let ann = key.register_agent("ann").await?;
    let body = json!({
        "events": ["message.created", "*", "message.created"],
        "filter": { "channel": "#general", "mentions": "@ann" },
        "url": "https://127.0.0.1:9/hook?a=b",
        "headers": { "Authorization": "Bearer top-secret-value", "X-Env": "prod-value" },
        "secret": "very-secret-value",
    });
    let created = key.as_agent(&ann).post("/v1/subscriptions", body).await?;
    assert_eq!(created.status, 201, "{}", created.body);
    let created = created.success()?;
    let id = text(&created["id"]);
    assert!(id.starts_with("sub_"), "{id}");
    assert_eq!(created["events"], json!(["message.created", "*"]));
    assert_eq!(created["filter"], json!({ "channel": "general", "mentions": "ann" }));
    assert_eq!(created["headers"], json!({ "Authorization": "[redacted]", "X-Env": "[redacted]" }));
    assert_eq!((&created["is_active"], text(&created["signature_scheme"])), (&json!(true), "relay"));
    let path = format!("/v1/subscriptions/{id}");
    let answers =
        [created.clone(), key.get(&path).await?.success()?, key.get("/v1/subscriptions").await?.success()?[0].clone()];
    for answer in &answers {
        assert_eq!(answer, &created);
        for secret in ["top-secret-value", "prod-value", "very-secret-value"] {
            assert!(!answer.to_string().contains(secret), "{answer}");
        }
    }
    let pool = PgPool::connect(&shared().await.database_url).await?;
    let (key_id, sealed): (String, Vec<u8>) =
        sqlx::query_as("SELECT secret_key_id, sealed FROM subscriptions WHERE subscription_id = $1")
            .bind(id[4..].parse::<i64>()?)
            .fetch_one(&pool)
            .await?;
    assert!(!key_id.is_empty());
    let clear = |needle: &str| sealed.windows(needle.len()).any(|bytes| bytes == needle.as_bytes());
    assert!(!clear("secret") && !clear("Bearer") && sealed.len() > 60, "sealed at rest");

    let plain = key.post("/v1/subscriptions", good()).await?.success()?;
    assert_eq!(
        (&plain["filter"], &plain["headers"], &plain["signature_scheme"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(key.get("/v1/subscriptions").await?.success()?.as_array().map(Vec::len), Some(2));
    assert_eq!(key.delete(&path).await?.status, 204);
    for id in [&*path, "/v1/subscriptions/sub_7", "/v1/subscriptions/nonsense"] {
        key.get(id).await?.refused(404, "subscription_not_found")?;
        key.delete(id).await?.refused(404, "subscription_not_found")?;
        key.get(&format!("{id}/deliveries")).await?.refused(404, "subscription_not_found")?;
        key.post_empty(&format!("{id}/deliveries/7/replay")).await?.refused(404, "subscription_not_found")?;
    }
    Ok(())
}

#[tokio::test]
async fn an_invalid_subscription_is_refused() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "bad-subscriptions").await?;
    let headers: serde_json::Map<String, Value> = (0..33).map(|n| (format!("x-{n}"), json!("v"))).collect();
    for (field, value) in [
        ("events", json!([])),
        ("events", json!(["nonsense"])),
        ("events", json!(["message.*"])),
        ("events", json!("message.created")),
        ("events", Value::Null),
        ("url", json!("example.org")),
        ("url", json!("ftp://example.org")),
        ("url", json!("https://user:password@example.org")),
        ("url", json!(format!("https://example.org/{}", "x".repeat(2048)))),
        ("url", Value::Null),
        ("filter", json!({ "channel": "" })),
        ("filter", json!({ "mentions": 7 })),
        ("filter", json!("general")),
        ("headers", json!({ "Content-Type": "text/plain" })),
        ("headers", json!({ "X-Relay-Event": "mine" })),
        ("headers", json!({ "bad name": "v" })),
        ("headers", json!({ "x-a": "a\r\nb: c" })),
        ("headers", json!({ "x-a": "1", "X-A": "2" })),
        ("headers", json!({ "x-a": 1 })),
        ("headers", Value::Object(headers)),
        ("secret", json!("")),
        ("secret", json!("x".repeat(513))),
        ("signature_scheme", json!("md5")),
        ("signature_scheme", json!("standard-webhooks")),
    ] {
        let mut body = good();
        body[field] = value;
        let reply = key.post("/v1/subscriptions", body.clone()).await?;
        assert_eq!((reply.status, reply.code()), (400, "invalid_request"), "{body}: {}", reply.body);
    }
    for (secret, taken) in [
        ("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3", true),
        ("whsec_MDEyMw==", false),
        ("plain-text-that-is-long-enough-to-be-one", false),
    ] {
        let mut body = good();
        body["signature_scheme"] = json!("standard-webhooks");
        body["secret"] = json!(secret);
        let reply = key.post("/v1/subscriptions", body).await?;
        assert_eq!(reply.status, if taken { 201 } else { 400 }, "{secret}: {}", reply.body);
    }
    assert_eq!(key.get("/v1/subscriptions").await?.success()?.as_array().map(Vec::len), Some(1));
    Ok(())
}

#[tokio::test]
async fn pending_calls_are_listed_and_can_be_replayed() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "on-its-way").await?;
    let workspace: i64 = text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?;
    // This kind does not occur in the test, so the rows below are the only ones.
    let body = json!({ "events": ["action.denied"], "url": "https://127.0.0.1:9/hook" });
    let subscription = key.post("/v1/subscriptions", body).await?.success()?;
    let path = format!("/v1/subscriptions/{}/deliveries", text(&subscription["id"]));
    assert_eq!(key.get(&path).await?.success()?, json!([]));
    let pool = PgPool::connect(&shared().await.database_url).await?;
    // Due far in the future, so that no worker processes it meanwhile.
    for (id, status) in [(1_i64, "delivered"), (2, "dead_letter"), (3, "pending")] {
        sqlx::query(
            "INSERT INTO subscription_deliveries (workspace_id, subscription_id, delivery_id, event_kind, body, status,
                                                  attempts, last_status, last_error, next_attempt_at, created_at)
             VALUES ($1, $2, $3, 'action.denied', '{}', $4, 3, 500, 'refused',
                     CASE WHEN $4 = 'pending' THEN now() + interval '1 day' END, now())",
        )
        .bind(workspace)
        .bind(text(&subscription["id"])[4..].parse::<i64>()?)
        .bind(id)
        .bind(status)
        .execute(&pool)
        .await?;
    }
    let ids = |list: Value| -> Vec<String> {
        list.as_array().into_iter().flatten().map(|row| text(&row["id"]).to_owned()).collect()
    };
    assert_eq!(ids(key.get(&path).await?.success()?), ["3", "2", "1"], "newest first");
    assert_eq!(ids(key.get(&format!("{path}?limit=2")).await?.success()?), ["3", "2"]);
    let dead = key.get(&format!("{path}?status=dead_letter")).await?.success()?;
    assert_eq!((ids(dead.clone()), dead[0]["attempts"].as_i64()), (vec!["2".to_owned()], Some(3)));
    assert_eq!((dead[0]["last_status_code"].as_i64(), text(&dead[0]["last_error"])), (Some(500), "refused"));
    key.get(&format!("{path}?status=nonsense")).await?.refused(400, "invalid_request")?;
    key.get(&format!("{path}?limit=0")).await?.refused(400, "invalid_request")?;

    for unknown in ["7", "x", "-1"] {
        key.post_empty(&format!("{path}/{unknown}/replay")).await?.refused(404, "delivery_not_found")?;
    }
    let waiting = key.post_empty(&format!("{path}/3/replay")).await?.success()?;
    assert_eq!((text(&waiting["status"]), waiting["attempts"].as_i64()), ("pending", Some(3)), "left alone");
    let replayed = key.post_empty(&format!("{path}/2/replay")).await?.success()?;
    assert_eq!(
        (text(&replayed["id"]), text(&replayed["status"]), replayed["attempts"].as_i64()),
        ("2", "pending", Some(0))
    );
    assert!(replayed["next_attempt_at"].is_string());
    Ok(())
}
