//! Lifecycle of tokens: refused upgrades of node sockets, and rotation on all gateways.

use std::time::{Duration, Instant};

use anyhow::Result;
use relay_acceptance::raw::{Raw, is_failure};
use relay_testkit::client::Api;
use relay_testkit::shared;
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);

#[tokio::test]
async fn an_upgrade_is_refused_with_a_plain_status_before_it_happens() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "upgrades").await?;
    let ann = key.register_agent("ann").await?;
    let as_ann = key.as_agent(&ann);
    let old = as_ann.direct_node_token().await?;
    let new = as_ann.direct_node_token().await?;
    let url = format!("{base}/v1/node/ws");
    let push = json!({ "name": "hook", "kind": "http_push", "delivery": { "url": "https://example.org/" } });
    let mut without_socket = Vec::new();
    for node in [push, json!({ "name": "shelf", "kind": "poll" })] {
        without_socket
            .push(key.post("/v1/nodes", node).await?.success()?["token"].as_str().unwrap_or_default().to_owned());
    }
    let dead = format!("nt_live_{}", "0".repeat(48));
    let refused = [
        (String::new(), "unauthorized"),
        ("?token=".to_owned(), "unauthorized"),
        ("?token=nonsense".to_owned(), "unauthorized"),
        (format!("?token={}", key.token()), "unauthorized"),
        (format!("?token={}", ann.token), "unauthorized"),
        ("?token=nt_live_".to_owned(), "unauthorized"),
        (format!("?token={dead}"), "node_token_invalid"),
        (format!("?token={}", old.token), "node_token_invalid"),
        (format!("?token={}", without_socket[0]), "node_token_forbidden"),
        (format!("?token={}", without_socket[1]), "node_token_forbidden"),
    ];
    for (query, code) in refused {
        let reply = Raw::new("GET", format!("{url}{query}")).upgrade().send().await?;
        assert!(is_failure(&reply), "{query}: {} {}", reply.status, reply.body);
        assert_eq!((reply.status, reply.code()), (401, code), "{query}");
        let plain = Raw::new("GET", format!("{url}{query}")).send().await?;
        assert_eq!(plain.status, 426, "without an upgrade the token is not looked at");
    }
    let as_header = |token: &str| Raw::new("GET", &url).upgrade().bearer(token);
    as_header(&ann.token).send().await?.refused(401, "unauthorized")?;
    as_header(&old.token).send().await?.refused(401, "node_token_invalid")?;
    assert_eq!(as_header(&new.token).send().await?.status, 101);
    let lower = Raw::new("GET", &url).upgrade().header("authorization", format!("bearer {}", new.token));
    assert_eq!(lower.send().await?.status, 101);
    // The query takes precedence over the header, and an empty value is ignored.
    let both =
        |query: &str, header: &str| Raw::new("GET", format!("{url}?token={query}")).upgrade().bearer(header).send();
    both(&dead, &new.token).await?.refused(401, "node_token_invalid")?;
    assert_eq!(both(&new.token, &dead).await?.status, 101);
    assert_eq!(both("", &new.token).await?.status, 101);
    // Two different tokens are refused.
    let twice = Raw::new("GET", format!("{url}?token={0}&token={0}", new.token)).upgrade().send().await?;
    assert!(is_failure(&twice) && twice.status == 400, "{} {}", twice.status, twice.body);

    assert_eq!(Raw::new("HEAD", &url).send().await?.status, 426);
    Raw::new("POST", &url).upgrade().send().await?.refused(405, "method_not_allowed")?;
    for path in ["/v1/node/terminal/ws", "/v1/node", "/v1/node/ws/x"] {
        let reply = Raw::new("GET", format!("{base}{path}")).upgrade().bearer(&new.token).send().await?;
        reply.refused(404, "not_found")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_rotated_token_is_invalid_on_every_gateway_at_once() -> Result<()> {
    let gateways = &shared().await.gateways;
    let (here, there) = (&gateways[0], &gateways[1]);
    let key = Api::create_workspace(here, "rotated").await?;
    let ann = key.register_agent("ann").await?;
    let mut fastest = Duration::MAX;
    for round in 0..5 {
        // Both gateways have cached the token.
        let token = if round == 0 {
            ann.token.clone()
        } else {
            let rotated = key.post("/v1/agents/ann/rotate-token", json!({})).await?.success()?;
            rotated["token"].as_str().unwrap_or_default().to_owned()
        };
        for base in [here, there] {
            assert_eq!(Api::new(base, &token).get("/v1/agent").await?.status, 200);
        }
        key.post("/v1/agents/ann/rotate-token", json!({})).await?.success()?;
        let here = Api::new(here, &token).get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
        assert_eq!(here.body["error"]["message"], "Invalid agent token");
        let (there, since) = (Api::new(there, &token), Instant::now());
        relay_testkit::wait::until("the other gateway to forget the token", SOON, || async {
            there.get("/v1/agent").await.is_ok_and(|reply| reply.code() == "agent_token_invalid")
        })
        .await;
        fastest = fastest.min(since.elapsed());
    }
    // The other gateway is notified over the network: within milliseconds rather than the seconds of the cache. On a
    // loaded machine at least one of five is that fast.
    assert!(fastest < Duration::from_millis(1000), "{fastest:?}");
    // Deleting a workspace revokes its tokens.
    key.delete("/v1/workspace").await?.success()?;
    for base in [here, there] {
        relay_testkit::wait::until("the workspace to be gone", SOON, || async {
            key.at(base).get("/v1/workspace").await.is_ok_and(|reply| reply.status == 401)
        })
        .await;
    }
    Ok(())
}
