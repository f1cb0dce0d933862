//! Insight of a workspace into its own data: `GET /v1/workspace/metrics`, `/v1/workspace/usage` and
//! `/v1/messages/:id/trace`.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::relayctl::relayctl;
use relay_testkit::{client::Api, shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

async fn scrape(base: &str, token: &str) -> Result<(u16, String)> {
    let answer = reqwest::Client::new().get(format!("{base}/v1/workspace/metrics")).bearer_auth(token).send().await?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

fn number(text: &str, name: &str) -> Result<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("relay_workspace_{name} ")));
    Ok(line.with_context(|| format!("no {name} in {text}"))?.parse()?)
}

fn steps(trace: &Value, agent: &str) -> Vec<String> {
    let deliveries = trace["deliveries"].as_array().cloned().unwrap_or_default();
    let own = deliveries.into_iter().find(|delivery| delivery["agent_name"] == agent).unwrap_or_default();
    let steps = own["steps"].as_array().cloned().unwrap_or_default();
    steps.iter().map(|step| step["step"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test]
async fn a_workspace_sees_its_mailbox_positions_and_message_traces() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "insight").await?;
    let other = Api::create_workspace(base, "insight-other").await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    let cleo = key.register_agent("cleo").await?;
    let posted = key.as_agent(&ada).post_message("general", "hello @bob").await?.success()?;
    let id = posted["id"].as_str().context("an id")?.to_owned();
    let observer = json!({ "name": "prometheus", "scopes": ["activity:read"] });
    let observer = key.post("/v1/observer-tokens", observer).await?.success()?;
    let observer = observer["token"].as_str().context("a token")?.to_owned();

    let path = format!("/v1/messages/{id}/trace");
    let before = key.get(&path).await?.success()?;
    assert_eq!(
        (steps(&before, "bob"), steps(&before, "cleo")),
        (vec!["accepted".to_owned()], vec!["accepted".to_owned()])
    );
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    socket.expect("deliver").await?;
    socket.ack("bob", 1).await?;
    let mine = key.as_agent(&cleo).get("/v1/deliveries").await?.success()?;
    let delivery = mine[0]["id"].as_str().context("a delivery")?.to_owned();
    let why = json!({ "error": "out of memory" });
    key.as_agent(&cleo).post(&format!("/v1/deliveries/{delivery}/fail"), why).await?.success()?;

    let trace = wait::until_ok("the ack to be stored", SOON, || async {
        let trace = key.with_token(&observer).get(&path).await?.success()?;
        ensure!(steps(&trace, "bob") == ["accepted", "sent", "acked"], "{trace}");
        Ok::<_, anyhow::Error>(trace)
    })
    .await?;
    assert_eq!(steps(&trace, "cleo"), ["accepted", "failed"]);
    assert!(trace.to_string().contains("out of memory") && !trace.to_string().contains("hello"), "{trace}");
    assert_eq!(trace["deliveries"].as_array().map(Vec::len), Some(2), "its author got none");
    other.get(&path).await?.refused(404, "message_not_found")?;

    let text = wait::until_ok("the message to be counted", SOON, || async {
        let (status, text) = scrape(base, &observer).await?;
        ensure!(status == 200 && number(&text, "messages_accepted_total")? == 1, "{status} {text}");
        Ok::<_, anyhow::Error>(text)
    })
    .await?;
    for (name, value) in [
        ("deliveries_written_total", 2),
        ("deliveries_acked_total", 1),
        ("deliveries_settled_total", 2),
        ("deliveries_waiting", 0),
        ("mailbox_lag_max", 0),
        ("dead_letters", 0),
        ("agents", 3),
        ("nodes_connected", 1),
    ] {
        assert_eq!(number(&text, name)?, value, "{name}: {text}");
    }
    let (_, nothing) = scrape(base, other.token()).await?;
    assert_eq!(number(&nothing, "deliveries_written_total")?, 0);
    Ok(())
}

#[tokio::test]
async fn a_token_limited_to_some_agents_sees_only_those() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "insight-some").await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    key.register_agent("cleo").await?;
    let posted = key.as_agent(&ada).post_message("general", "hello").await?.success()?;
    let token = |filters: Value, scope: &'static str| {
        let key = &key;
        async move {
            let body = json!({ "name": format!("some {filters} {scope}"), "scopes": [scope], "filters": filters });
            let token = key.post("/v1/observer-tokens", body).await?.success()?;
            Ok::<_, anyhow::Error>(key.with_token(token["token"].as_str().context("a token")?))
        }
    };
    let path = format!("/v1/messages/{}/trace", posted["id"].as_str().context("an id")?);
    let of_two = token(json!({ "agent_ids": [ada.id, bob.id] }), "activity:read").await?;
    let seen = of_two.get(&path).await?.success()?;
    assert_eq!(seen["deliveries"].as_array().map(Vec::len), Some(1), "{seen}");
    let (_, text) = scrape(base, of_two.token()).await?;
    assert_eq!((number(&text, "deliveries_written_total")?, number(&text, "agents")?), (1, 2));
    // The token does not cover the author, so the message is hidden.
    let of_bob = token(json!({ "agent_ids": [bob.id] }), "activity:read").await?;
    of_bob.get(&path).await?.refused(404, "message_not_found")?;
    let wrong = token(json!({}), "messages:read").await?;
    wrong.get(&path).await?.refused(403, "insufficient_scope")?;
    assert_eq!(scrape(base, wrong.token()).await?.0, 403);
    Ok(())
}

#[tokio::test]
async fn a_workspace_sees_its_usage_after_the_minute_ends() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "usage").await?;
    let other = Api::create_workspace(base, "usage-other").await?;
    let (ada, bob) = (key.register_agent("ada").await?, key.register_agent("bob").await?);
    key.register_agent("cleo").await?;
    let mut socket = key.as_agent(&bob).direct_socket().await?;
    for nth in 0..3 {
        key.as_agent(&ada).post_message("general", &format!("message {nth}")).await?.success()?;
        socket.expect("deliver").await?;
    }
    socket.ack("bob", 3).await?;
    let token = |filters: Value| {
        let key = &key;
        async move {
            let body = json!({ "name": format!("usage {filters}"), "scopes": ["activity:read"], "filters": filters });
            let token = key.post("/v1/observer-tokens", body).await?.success()?;
            Ok::<_, anyhow::Error>(key.with_token(token["token"].as_str().context("a token")?))
        }
    };
    let observer = token(json!({})).await?;

    let sum = |answer: &Value, of: &str| {
        let whiles = answer["usage"].as_array().cloned().unwrap_or_default();
        whiles.iter().filter_map(|one| one[of].as_i64()).sum::<i64>()
    };
    // A minute, and the interval of the worker's loop.
    let seen = wait::until_ok("the minute to be counted", Duration::from_secs(150), || async {
        let seen = observer.get("/v1/workspace/usage?granularity=minute").await?.success()?;
        ensure!(sum(&seen, "messages") == 3 && sum(&seen, "acked") == 3, "{seen}");
        Ok::<_, anyhow::Error>(seen)
    })
    .await?;
    assert_eq!((sum(&seen, "deliveries"), sum(&seen, "settled"), sum(&seen, "dead_letters")), (6, 3, 0), "{seen}");
    let by_day = key.get("/v1/workspace/usage?granularity=day").await?.success()?;
    assert_eq!((sum(&by_day, "messages"), &by_day["granularity"]), (3, &json!("day")));
    let id = key.get("/v1/workspace").await?.success()?["id"].as_str().context("an id")?.to_owned();
    let by_hand = relayctl(&["--json", "workspace", "usage", &id, "--granularity", "day"]).await?.json()?;
    assert_eq!(sum(&by_hand, "deliveries"), 6, "{by_hand}");
    let table = relayctl(&["workspace", "usage", &id]).await?.expect_success()?;
    assert!(table.stdout.contains("DELIVERIES"), "{}", table.stdout);

    assert_eq!(other.get("/v1/workspace/usage").await?.success()?["usage"], json!([]));
    token(json!({ "agent_ids": [bob.id] }))
        .await?
        .get("/v1/workspace/usage")
        .await?
        .refused(403, "insufficient_scope")?;
    for wrong in ["granularity=week", "since=2024-01-01T00:00:00Z", "since=yesterday"] {
        key.get(&format!("/v1/workspace/usage?{wrong}")).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}
