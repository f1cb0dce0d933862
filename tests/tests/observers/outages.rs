//! Observer tokens during outages: revocations survive restarts and lost hints, and tokens are verified without
//! Postgres.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::{client::Api, stack::Stack, wait};
use serde_json::{Value, json};

/// Without a hint a change is read within a second or two; the rest is for a loaded machine.
const SOON: Duration = Duration::from_secs(30);
/// After half a minute without Postgres a gateway accepts no token.
const BELIEVED_FOR: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

async fn issue(key: &Api, name: &str) -> Result<(String, Api)> {
    let body = json!({ "name": name, "scopes": ["channels:read"] });
    let made = key.post("/v1/observer-tokens", body).await?.success()?;
    Ok((format!("/v1/observer-tokens/{}", text(&made["id"])), key.with_token(text(&made["token"]))))
}

async fn answers(api: &Api, status: u16) {
    let what = format!("{} to answer {status}", api.base());
    wait::until(&what, SOON, || async { api.get("/v1/channels").await.is_ok_and(|reply| reply.status == status) })
        .await;
}

#[tokio::test]
async fn token_changes_survive_restarts_and_lost_hints() -> Result<()> {
    let stack = Stack::builder().through_proxies(true).start().await?;
    let (a, b) = (stack.gateway(0).url(), stack.gateway(1).url());
    let key = Api::create_workspace(a, "restarts").await?;
    let (revoked_path, revoked) = issue(&key, "revoked").await?;
    let (changed_path, changed) = issue(&key, "changed").await?;
    let (rotated_path, rotated) = issue(&key, "rotated").await?;
    let (_, untouched) = issue(&key, "untouched").await?;

    // No hint gets through.
    stack.nats_proxy().cut();
    assert_eq!(key.delete(&revoked_path).await?.status, 204);
    key.patch(&changed_path, json!({ "scopes": ["agents:read"] })).await?.success()?;
    let newer = key.post_empty(&format!("{rotated_path}/rotate")).await?.success()?;
    let newer = key.with_token(text(&newer["token"]));
    for gateway in [a, b] {
        answers(&revoked.at(gateway), 401).await;
        answers(&rotated.at(gateway), 401).await;
        answers(&changed.at(gateway), 403).await;
        answers(&newer.at(gateway), 200).await;
        answers(&untouched.at(gateway), 200).await;
    }

    // A new process knows the state from its first request.
    for index in [0, 1] {
        stack.gateway(index).restart().await?;
        for (token, status) in [(&revoked, 401), (&rotated, 401), (&changed, 403), (&newer, 200), (&untouched, 200)] {
            let reply = token.at(stack.gateway(index).url()).get("/v1/channels").await?;
            assert_eq!(reply.status, status, "{}", reply.body);
        }
    }
    Ok(())
}

#[tokio::test]
async fn tokens_are_verified_without_postgres_for_a_limited_time() -> Result<()> {
    let stack = Stack::builder().gateways(1).through_proxies(true).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "outage").await?;
    let (path, revoked) = issue(&key, "revoked").await?;
    let (_, known) = issue(&key, "known").await?;
    // The answers during the outage are the subject, so requests are not retried.
    let known = known.without_retries();
    let (_, unused) = issue(&key, "unused").await?;
    known.get("/v1/channels").await?.success()?;
    assert_eq!(key.delete(&path).await?.status, 204);

    stack.postgres_proxy().cut();
    // The token is verified in memory; only reading the data fails.
    revoked.get("/v1/channels").await?.refused(401, "observer_token_invalid")?;
    let (head, _) = known.token().rsplit_once('.').unwrap_or_default();
    key.with_token(&format!("{head}.{}", "A".repeat(86)))
        .get("/v1/channels")
        .await?
        .refused(401, "observer_token_invalid")?;
    known.get("/v1/agents").await?.refused(403, "insufficient_scope")?;
    unused.get("/v1/agents").await?.refused(403, "insufficient_scope")?;
    known.get("/v1/channels").await?.refused(503, "database_overloaded")?;

    // After half a minute the token may have been revoked without notice.
    let doubted = || async { known.get("/v1/agents").await.is_ok_and(|reply| reply.status == 503) };
    wait::until("the token to be doubted", BELIEVED_FOR + SOON, doubted).await;
    stack.postgres_proxy().restore();
    let believed = || async { known.get("/v1/channels").await.is_ok_and(|reply| reply.status == 200) };
    wait::until("the token to be believed again", SOON, believed).await;
    Ok(())
}
