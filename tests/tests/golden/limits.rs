//! An engine of its own: operators, quotas, rate limits.

use anyhow::Result;
use relay_acceptance::golden::{Recording, compare};
use relay_testkit::client::Api;
use relay_testkit::stack::Stack;
use serde_json::json;

use crate::walk::{ask, ask_all, ask_with, text};

const SECRET: &str = "a-bootstrap-secret-of-the-tests-0123456789";
/// Look-ups by name that one address has in a minute, and some more.
const LOOKUPS: usize = 40;

#[tokio::test]
async fn operators_quotas_and_rate_limits() -> Result<()> {
    let plans = json!({ "enterprise": { "agents": 2, "channels": 2, "nodes": 2, "mailbox_depth": 2 } });
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_RATE_LIMITS", "on")
        .env("RELAY_PLANS", plans.to_string())
        .env("RELAY_HOSTED", "on")
        .env("RELAY_DEFAULT_PLAN", "enterprise")
        .env("RELAY_BOOTSTRAP_SECRET", SECRET)
        .env("RELAY_SIGNING_SECRET", "a-signing-secret-of-the-tests-0123456789")
        .start()
        .await?;
    let recording = Recording::new();
    let tap = recording.tap(stack.gateway(0).url()).await?;
    let anyone = Api::anonymous(tap.url());
    let operator = anyone.with_token(SECRET);
    ask(&anyone, r#"POST /v1/workspaces {"name":"refused"}"#).await?;
    for secret in ["wrong", SECRET] {
        let secret = [("x-workspace-bootstrap-secret", secret)];
        ask_with(&anyone, r#"POST /v1/workspaces {"name":"first"}"#, &secret).await?;
    }
    let made = ask(&operator, r#"POST /v1/operator/workspaces {"name":"second"}"#).await?;
    let key = anyone.with_token(&text(&made, "/api_key")?);
    let quotas = format!("/v1/operator/workspaces/{}/quotas", text(&made, "/workspace_id")?);
    as_operator(&operator, &quotas).await?;
    ask_all(&key, &["GET /v1/workspace", &format!("GET {quotas}"), r#"POST /v1/operator/workspaces {"name":"x"}"#])
        .await?;
    over_quota(&key).await?;
    ask(&operator, &format!(r#"PUT {quotas} {{"own":{{"observer_tokens":1}}}}"#)).await?;
    for name in ["a", "b"] {
        ask(&key, &format!(r#"POST /v1/observer-tokens {{"name":"{name}","scopes":["stream:read"]}}"#)).await?;
    }
    for _ in 0..LOOKUPS {
        ask(&anyone, "GET /v1/workspaces/by-name/nobody-has-this-name").await?;
    }
    compare("limits", &recording.transcript())
}

async fn as_operator(operator: &Api, quotas: &str) -> Result<()> {
    let keys = ask(operator, "GET /v1/operator/signing-keys").await?;
    let kid = keys.pointer("/data/0/kid").and_then(|kid| kid.as_str()).unwrap_or("none").to_owned();
    ask_all(
        operator,
        &[
            "POST /v1/operator/workspaces {}",
            &format!("GET {quotas}"),
            &format!(r#"PUT {quotas} {{"plan":"gold"}}"#),
            &format!(r#"PUT {quotas} {{"plan":"enterprise","own":{{}}}}"#),
            "GET /v1/operator/workspaces/1/quotas",
            "PUT /v1/operator/workspaces/1/quotas {}",
            "POST /v1/operator/signing-keys {}",
            "GET /v1/operator/signing-keys",
            &format!("DELETE /v1/operator/signing-keys/{kid}"),
            "DELETE /v1/operator/signing-keys/nothing",
            "GET /v1/operator/signing-keys",
            "GET /v1/workspace",
        ],
    )
    .await
}

/// More than the plan allows: refused, or told to the sender.
async fn over_quota(key: &Api) -> Result<()> {
    let ada = key.as_agent(&key.register_agent("ada").await?);
    for name in ["bob", "cyd"] {
        ask(key, &format!(r#"POST /v1/agents {{"name":"{name}"}}"#)).await?;
        ask(key, &format!(r#"POST /v1/nodes {{"name":"of-{name}"}}"#)).await?;
        ask(key, &format!(r#"POST /v1/channels {{"name":"of-{name}"}}"#)).await?;
    }
    let mut socket = ada.direct_socket().await?;
    for number in 1..=3 {
        ask(&ada, &format!(r#"POST /v1/dm {{"to":"bob","text":"number {number}"}}"#)).await?;
    }
    let wait = std::time::Duration::from_secs(40);
    socket.expect_where("a refusal", wait, |frame| frame["event"] == "delivery.failed").await?;
    socket.close().await
}
