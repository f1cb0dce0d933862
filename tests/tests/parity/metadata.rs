//! Metadata of workspaces: concurrent merges, bounds, and credentials.

use anyhow::{Result, ensure};
use relay_testkit::{client::Api, shared};
use serde_json::{Map, Value, json};

const WORKSPACE: &str = "/v1/workspace";

async fn metadata(key: &Api) -> Result<Value> {
    Ok(key.get(WORKSPACE).await?.success()?["metadata"].clone())
}

#[tokio::test]
async fn concurrent_changes_of_different_keys_lose_none() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "metadata-merge").await?;
    for round in 0..5 {
        let changes = (0..12).map(|n| {
            let through = key.at(&gateways[n % 2]);
            async move {
                let change = json!({ "metadata": { format!("{round}-{n}"): n, format!("gone-{n}"): Value::Null } });
                through.patch(WORKSPACE, change).await?.success()
            }
        });
        for changed in futures::future::join_all(changes).await {
            changed?;
        }
        let stored = metadata(&key).await?;
        let stored = stored.as_object().map_or(0, Map::len);
        ensure!(stored == (round + 1) * 12, "{stored} keys after round {round}");
    }
    // Set and deleted at once by two requests: one of the two results, and the other keys stay.
    let (set, delete) = (json!({ "metadata": { "0-0": "new" } }), json!({ "metadata": { "0-0": null } }));
    let there = key.at(&gateways[1]);
    let (set, delete) = tokio::join!(key.patch(WORKSPACE, set), there.patch(WORKSPACE, delete));
    set?.success()?;
    delete?.success()?;
    let stored = metadata(&key).await?;
    ensure!(stored["0-0"].is_null() || stored["0-0"] == "new", "{stored}");
    assert_eq!(stored["4-11"], 11);
    Ok(())
}

#[tokio::test]
async fn metadata_has_at_most_a_hundred_keys_and_16_kib_after_merging() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "metadata-bounds").await?;
    let there = key.at(&gateways[1]);
    let keys = |range: std::ops::Range<usize>, value: &Value| {
        let keys: Map<String, Value> = range.map(|n| (format!("k{n}"), value.clone())).collect();
        json!({ "metadata": keys })
    };
    key.patch(WORKSPACE, keys(0..90, &json!(1))).await?.success()?;
    let before = metadata(&key).await?;
    there.patch(WORKSPACE, keys(90..101, &json!(1))).await?.refused(400, "invalid_request")?;
    there
        .patch(WORKSPACE, json!({ "metadata": { "big": "x".repeat(16 * 1024) } }))
        .await?
        .refused(400, "invalid_request")?;
    assert_eq!(metadata(&key).await?, before, "nothing was written");
    there.patch(WORKSPACE, keys(90..100, &json!(1))).await?.success()?;
    // Counted after merging: keys that the same change deletes make room.
    let mut exchange = keys(100..110, &json!(1));
    for n in 0..10 {
        exchange["metadata"][format!("k{n}")] = Value::Null;
    }
    let stored = there.patch(WORKSPACE, exchange).await?.success()?["metadata"].clone();
    assert_eq!(stored.as_object().map(Map::len), Some(100));
    assert_eq!((&stored["k0"], &stored["k109"]), (&Value::Null, &json!(1)));
    for metadata in [keys(0..101, &json!(1)), json!({ "metadata": { "big": "x".repeat(16 * 1024) } })] {
        let body = json!({ "name": "too-much", "metadata": metadata["metadata"] });
        Api::anonymous(&gateways[0]).post("/v1/workspaces", body).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn null_and_credentials_are_refused_on_create_and_change() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "metadata-credentials").await?;
    key.patch(WORKSPACE, json!({ "metadata": { "token": null, "kept": 1 } })).await?.success()?;
    let token = format!("ghp_{}", "a".repeat(36));
    for metadata in [
        Value::Null,
        json!({ "password": "x" }),
        json!({ "a": { "api-key": "x" } }),
        json!({ "note": token }),
        json!({ "notes": [format!("Bearer {token}")] }),
        json!({ "own": key.token() }),
        json!({ "own": "rk_live_short" }),
        json!({ "credentials": { "user": "a", "pass": "b" } }),
        json!({ "tokens": ["x"] }),
        json!({ "pwd": 1234 }),
    ] {
        let change = key.at(&gateways[1]).patch(WORKSPACE, json!({ "metadata": metadata })).await?;
        let refused = change.refused(400, "invalid_request")?;
        ensure!(!refused.body.to_string().contains(&token), "the value is not repeated: {}", refused.body);
        let body = json!({ "name": "with-credentials", "metadata": metadata });
        Api::anonymous(&gateways[1]).post("/v1/workspaces", body).await?.refused(400, "invalid_request")?;
    }
    assert_eq!(metadata(&key).await?, json!({ "kept": 1 }));
    key.patch(WORKSPACE, json!({ "metadata": { "kept": null, "password": null } })).await?.success()?;
    assert_eq!(metadata(&key).await?, json!({}));
    Ok(())
}

#[tokio::test]
async fn the_size_is_measured_alike_on_create_and_change() -> Result<()> {
    let gateways = &shared().await.gateways;
    // Many keys, since each could add white space to the measure.
    let of_size = |bytes: usize| {
        let mut metadata: Map<String, Value> = (0..90).map(|n| (format!("k{n}"), json!([n, n]))).collect();
        metadata.insert("fill".to_owned(), json!(""));
        let rest = bytes - Value::Object(metadata.clone()).to_string().len();
        metadata.insert("fill".to_owned(), json!("x".repeat(rest)));
        Value::Object(metadata)
    };
    let create = async |metadata: &Value| {
        let body = json!({ "name": "measured", "metadata": metadata });
        Api::anonymous(&gateways[0]).post("/v1/workspaces", body).await
    };
    create(&of_size(16 * 1024 + 1)).await?.refused(400, "invalid_request")?;
    let mut most = of_size(16 * 1024);
    let made = create(&most).await?.success()?;
    let key = Api::anonymous(&gateways[1]).with_token(made["api_key"].as_str().unwrap_or_default());
    key.patch(WORKSPACE, json!({ "metadata": {} })).await?.success()?;
    key.patch(WORKSPACE, json!({ "metadata": { "k0": "00000" } })).await?.refused(400, "invalid_request")?;
    assert_eq!(metadata(&key).await?, most);
    key.patch(WORKSPACE, json!({ "metadata": { "k0": null } })).await?.success()?;
    key.patch(WORKSPACE, json!({ "metadata": { "k0": [0, 0] } })).await?.success()?;
    // A null at creation leaves its key out.
    most["gone"] = Value::Null;
    let made = create(&most).await?.success()?;
    let key = key.with_token(made["api_key"].as_str().unwrap_or_default());
    assert!(metadata(&key).await?.get("gone").is_none());
    Ok(())
}
