//! Observer tokens that are created and revoked again: every gateway remembers them, so a workspace has a limit per
//! day.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::memory::{peak, reset_peak};
use relay_testkit::{client::Api, shared, stack::Stack, wait};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Tokens that a workspace revokes within a month, and active ones that it has changed.
const REVOKED: i64 = 30_000;
const ACTIVE: i64 = 500;
const SOON: Duration = Duration::from_secs(30);
/// Tokens that a workspace creates within a day.
const PER_DAY: i64 = 1000;

#[tokio::test]
async fn revoked_tokens_count_against_the_limit_of_a_day() -> Result<()> {
    let shared = shared().await;
    let attacker = Api::create_workspace(shared.any_gateway(), "revokes-tokens").await?;
    let create =
        |name: &'static str| attacker.post("/v1/observer-tokens", json!({ "name": name, "scopes": ["stream:read"] }));
    let first = create("first").await?.success()?;
    let id = first["id"].as_str().and_then(|id| id.strip_prefix("ot_")).context("an id")?;
    // The rows that the requests for all tokens but two would leave.
    let mut database = PgConnection::connect(&shared.database_url).await?;
    sqlx::query(
        "INSERT INTO observer_tokens (workspace_id, token_id, name, scopes, signed_until, created_at, revoked_at)
         SELECT workspace_id, token_id + n, 'revoked', scopes, signed_until, created_at, now()
           FROM observer_tokens, generate_series(1, $2) AS n WHERE token_id = $1",
    )
    .bind(id.parse::<i64>()?)
    .bind(PER_DAY - 2)
    .execute(&mut database)
    .await?;
    create("last").await?.success()?;
    create("too many").await?.refused(429, "too_many_observer_tokens")?;
    let ended: bool = sqlx::query_scalar(
        "SELECT signed_until BETWEEN now() + interval '89 days' AND now() + interval '91 days'
           FROM observer_tokens WHERE token_id = $1",
    )
    .bind(id.parse::<i64>()?)
    .fetch_one(&mut database)
    .await?;
    assert!(ended, "the text of a token without an expiry ends");
    let other = Api::create_workspace(shared.any_gateway(), "creates-tokens").await?;
    other.post("/v1/observer-tokens", json!({ "name": "a", "scopes": ["stream:read"] })).await?.success()?;
    Ok(())
}

/// Every gateway remembers the tokens of all workspaces that were changed or revoked, until their texts have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_remember_little_of_changed_tokens() -> Result<()> {
    let stack = Stack::builder().gateways(2).worker(false).start().await?;
    let (changing, reading) = (stack.gateway(0), stack.gateway(1));
    let key = Api::create_workspace(changing.url(), "changes-tokens").await?;
    let names: Vec<String> = (0..100).map(|nth| format!("channel-{nth:05}")).collect();
    let create = async |name: &str| {
        let token = json!({ "name": name, "scopes": ["agents:read"], "filters": { "channel_names": names } });
        let created = key.post("/v1/observer-tokens", token).await?.success()?;
        let path = format!("/v1/observer-tokens/{}", created["id"].as_str().context("an id")?);
        anyhow::Ok((path, key.with_token(created["token"].as_str().context("a token")?).at(reading.url())))
    };
    let (changed, _) = create("changed").await?;
    key.patch(&changed, json!({ "scopes": ["agents:read", "nodes:read"] })).await?.success()?;
    let (revoked, _) = create("revoked").await?;
    key.delete(&revoked).await?.success()?;
    let (last, observer) = create("last").await?;
    observer.get("/v1/agents").await?.success()?;

    let before = reset_peak(reading.pid())?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    // The rows that the requests for as many tokens would leave.
    for (state, rows) in [("revoked", REVOKED), ("live", ACTIVE)] {
        sqlx::query(
            "INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters)
             SELECT token_id + n, workspace_id, state, version, scopes, filters
               FROM observer_overrides, generate_series(1, $2) AS n WHERE state = $1",
        )
        .bind(state)
        .bind(rows)
        .execute(&mut database)
        .await?;
    }
    // It is read with them, or after them.
    key.delete(&last).await?.success()?;
    wait::until("the last revocation at the other gateway", SOON, || async {
        observer.get("/v1/agents").await.is_ok_and(|reply| reply.code() == "observer_token_invalid")
    })
    .await;
    let grown = peak(reading.pid())?.saturating_sub(before);
    println!("grown by {} MiB", grown / MIB);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}
