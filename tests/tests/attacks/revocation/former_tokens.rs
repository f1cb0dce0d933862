//! Rights that end with time: the grace of former agent tokens, and workspaces with an expiry. The tests move the clock
//! of a database of their own.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::{Api, ConnectError, EventSource, NodeSocket, ObserverSocket},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);

/// Moves the clock that all processes of the engine share so many seconds ahead.
async fn advance_clock(stack: &Stack, seconds: u32) -> Result<()> {
    let mut database = PgConnection::connect(stack.database_url()).await?;
    sqlx::raw_sql(AssertSqlSafe(format!(
        "CREATE OR REPLACE FUNCTION relay_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
            AS 'SELECT now() + make_interval(secs => {seconds})'"
    )))
    .execute(&mut database)
    .await?;
    Ok(())
}

fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().with_context(|| format!("{value} is no text"))?.to_owned())
}

async fn rotate(key: &Api) -> Result<Api> {
    let rotated = key.post("/v1/agents/bob/rotate-token", json!({})).await?.success()?;
    Ok(key.with_token(&text(&rotated["token"])?))
}

async fn is_refused(api: &Api) -> bool {
    api.get("/v1/agent").await.is_ok_and(|reply| reply.code() == "agent_token_invalid")
}

#[tokio::test]
async fn exactly_one_former_token_is_accepted_for_the_grace() -> Result<()> {
    let stack = Stack::builder().start().await?;
    let (here, there) = (stack.gateway(0).url(), stack.gateway(1).url());
    let key = Api::create_workspace(here, "grace").await?;
    let first = key.as_agent(&key.register_agent("bob").await?);
    for seconds in [-1, 86_401] {
        let body = json!({ "agent_token_grace_seconds": seconds });
        key.patch("/v1/workspace", body).await?.refused(400, "invalid_request")?;
    }
    let shown = key.get("/v1/workspace").await?.success()?;
    assert_eq!(shown.get("agent_token_grace_seconds"), None, "off by default");
    let second = rotate(&key).await?;
    first.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;

    let changed = key.patch("/v1/workspace", json!({ "agent_token_grace_seconds": 600 })).await?.success()?;
    assert_eq!(changed["agent_token_grace_seconds"], 600);
    let third = rotate(&key).await?;
    let fourth = rotate(&key).await?;
    for at in [here, there] {
        wait::until("the last but one to be refused", SOON, || async { is_refused(&second.at(at)).await }).await;
        for accepted in [&third, &fourth] {
            let posted = accepted.at(at).post_message("general", "still here").await?.success()?;
            assert_eq!(posted["agent_name"], "bob");
        }
        first.at(at).get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    }
    // What a former token creates would outlive it.
    for path in ["/v1/agent/node-token", "/v1/agents/bob/rotate-token"] {
        third.post(path, json!({})).await?.refused(401, "agent_token_invalid")?;
    }

    advance_clock(&stack, 601).await?;
    for at in [here, there] {
        wait::until("the grace to be over", SOON, || async { is_refused(&third.at(at)).await }).await;
        fourth.at(at).get("/v1/agent").await?.success()?;
    }
    // A shorter grace ends it at once; a longer one does not bring it back.
    let fifth = rotate(&key).await?;
    fourth.get("/v1/agent").await?.success()?;
    key.patch("/v1/workspace", json!({ "agent_token_grace_seconds": 0 })).await?.success()?;
    wait::until("the former token to be refused", SOON, || async { is_refused(&fourth).await }).await;
    key.patch("/v1/workspace", json!({ "agent_token_grace_seconds": 3600 })).await?.success()?;
    fifth.get("/v1/agent").await?.success()?;
    third.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    // Deleting the agent ends both.
    let sixth = rotate(&key).await?;
    key.delete("/v1/agents/bob").await?.success()?;
    for ended in [&fifth, &sixth] {
        ended.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_workspace_that_expires_refuses_all_of_its_tokens() -> Result<()> {
    let stack = Stack::builder().start().await?;
    let (here, there) = (stack.gateway(0).url(), stack.gateway(1).url());
    let body = json!({ "name": "short-lived", "expires_in_seconds": 3600 });
    let made = Api::anonymous(here).post("/v1/workspaces", body).await?.success()?;
    let key = Api::new(here, &text(&made["api_key"])?);
    let bob = key.as_agent(&key.register_agent("bob").await?);
    let node = key.create_broker_node("node_box", "box").await?;
    let at_there = key.at(there);
    let mut socket = NodeSocket::connect(&at_there.ws_base(), &node.token).await?;
    socket.register_broker("node_box", "box", "run-1").await?;
    let observer = json!({ "name": "all", "scopes": ["stream:read", "channels:read"] });
    let observer = key.with_token(&text(&key.post("/v1/observer-tokens", observer).await?.success()?["token"])?);
    let mut watching = ObserverSocket::open(there, observer.token()).await?;
    let mut stream = EventSource::open(&observer.at(there), None).await?;
    observer.get("/v1/channels").await?.success()?;

    advance_clock(&stack, 3601).await?;
    for api in [&key, &bob, &observer] {
        for at in [here, there] {
            wait::until_ok("the expiry", SOON, || async {
                api.at(at).get("/v1/channels").await?.refused(401, "workspace_expired").map(drop)
            })
            .await?;
        }
    }
    match NodeSocket::connect(&at_there.ws_base(), &node.token).await {
        Err(ConnectError::Refused { status: 401, body }) if body.contains("workspace_expired") => {}
        other => anyhow::bail!("a socket of an expired workspace: {other:?}"),
    }
    assert_eq!(socket.closed(SOON).await?, Some(1008));
    assert_eq!(watching.closed(SOON).await?.0, 1008);
    while stream.next(SOON).await?.event != "close" {}
    Ok(())
}
