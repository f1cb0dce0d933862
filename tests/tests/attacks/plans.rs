//! Limits of plans that a tenant would multiply with further workspaces.

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use relay_testkit::{
    client::{Api, Reply},
    stack::{Stack, StackBuilder},
};
use reqwest::Method;
use serde_json::{Value, json};

const SECRET: &str = "a-bootstrap-secret-of-the-tests-0123456789";
/// Workspaces that an anonymous client creates in a minute.
const CREATIONS: usize = 10;

fn hosted() -> StackBuilder {
    Stack::builder().worker(false).env("RELAY_HOSTED", "on").env("RELAY_BOOTSTRAP_SECRET", SECRET)
}

async fn create(api: &Api, name: &str) -> Result<Reply> {
    api.post("/v1/workspaces", json!({ "name": name })).await
}

/// Creates a workspace and returns its id and a client with its key.
async fn created(api: &Api, name: &str) -> Result<(String, Api)> {
    let made = create(api, name).await?.success()?;
    let text = |field: &str| made[field].as_str().map(ToOwned::to_owned).with_context(|| format!("no {field}"));
    Ok((text("workspace_id")?, api.with_token(&text("api_key")?)))
}

async fn plan(key: &Api) -> Result<Value> {
    Ok(key.get("/v1/workspace").await?.success()?["plan"].clone())
}

#[tokio::test]
async fn child_workspaces_count_against_their_creator_and_share_its_plan() -> Result<()> {
    let stack = hosted().start().await?;
    let operator = Api::anonymous(stack.gateway(0).url()).with_token(SECRET);
    let (id, root) = created(&operator, "root").await?;
    assert_eq!(plan(&root).await?, "free", "the default of a hosted installation");

    // Eight at once on both gateways: the plan allows three.
    let asked = (0..8).map(|number| {
        let root = root.at(stack.gateway(number % 2).url());
        async move { create(&root, &format!("child-{number}")).await }
    });
    let replies = try_join_all(asked).await?;
    let (made, refused): (Vec<_>, Vec<_>) = replies.into_iter().partition(Reply::is_success);
    assert_eq!(made.len(), 3);
    for reply in refused {
        reply.refused(429, "plan_limit_exceeded")?;
    }
    let child = root.with_token(made[0].data()["api_key"].as_str().context("a key")?);
    create(&child, "grandchild").await?.refused(429, "plan_limit_exceeded")?;
    assert_eq!(plan(&child).await?, "free");

    // A change of the creator's plan is one of its children.
    let quotas = format!("/v1/operator/workspaces/{id}/quotas");
    operator.put(&quotas, json!({ "plan": "pro", "own": { "child_workspaces": 4 } })).await?.success()?;
    assert_eq!(plan(&child).await?, "pro");
    let (_, fourth) = created(&root, "fourth").await?;
    assert_eq!(plan(&fourth).await?, "pro");
    create(&root, "fifth").await?.refused(429, "plan_limit_exceeded")?;
    // The limit is that of the workspace that they count against: the plan alone allows a hundred.
    create(&fourth, "grandchild").await?.refused(429, "plan_limit_exceeded")?;
    // A deleted child counts no more.
    fourth.delete("/v1/workspace").await?.success()?;
    created(&root, "fifth").await?;
    Ok(())
}

#[tokio::test]
async fn an_installation_chooses_the_plan_of_new_workspaces() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).env("RELAY_DEFAULT_PLAN", "pro").start().await?;
    let (_, key) = created(&Api::anonymous(stack.gateway(0).url()), "chosen").await?;
    assert_eq!(plan(&key).await?, "pro");
    Ok(())
}

#[tokio::test]
async fn an_address_creates_few_workspaces_without_a_credential() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_RATE_LIMITS", "on")
        .env("RELAY_TRUSTED_PROXIES", "127.0.0.1")
        .start()
        .await?;
    let anonymous = Api::anonymous(stack.gateway(0).url()).without_retries();
    let create_from = |address: &'static str| {
        let body = Some(json!({ "name": "many" }));
        let anonymous = anonymous.clone();
        async move { anonymous.call(Method::POST, "/v1/workspaces", body, &[("x-forwarded-for", address)]).await }
    };
    let replies = try_join_all((0..2 * CREATIONS).map(|_| create_from("198.51.100.7"))).await?;
    let made = replies.iter().filter(|reply| reply.is_success()).count();
    // One comes back every six seconds.
    ensure!((CREATIONS..CREATIONS + 5).contains(&made), "{made}");
    for refused in replies.into_iter().filter(|reply| !reply.is_success()) {
        let refused = refused.refused(429, "rate_limit_exceeded")?;
        ensure!(refused.headers.contains_key("retry-after"), "{:?}", refused.headers);
    }
    create_from("198.51.100.8").await?.success()?;
    for _ in 0..2 * CREATIONS {
        create(&anonymous, "local").await?.success()?;
    }
    Ok(())
}
