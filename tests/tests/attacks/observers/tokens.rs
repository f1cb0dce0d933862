//! Observer tokens that are created and revoked again: every gateway remembers them, so a workspace has a limit per day.

use anyhow::{Context as _, Result};
use relay_testkit::{client::Api, shared};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

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
