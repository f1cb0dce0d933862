//! Tokens in a WebSocket subprotocol, for clients that can set no header and whose URLs are logged.

use anyhow::Result;
use relay_acceptance::raw::Raw;
use relay_testkit::{client::Api, shared};
use reqwest::header::SEC_WEBSOCKET_PROTOCOL;
use serde_json::json;

/// Status and selected subprotocol of an upgrade.
async fn upgrade(url: &str, protocols: &str) -> Result<(u16, Option<String>)> {
    let http = relay_testkit::http::client().build()?;
    let answer = http
        .get(url)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        .header(SEC_WEBSOCKET_PROTOCOL, protocols)
        .send()
        .await?;
    let selected = answer.headers().get(SEC_WEBSOCKET_PROTOCOL).map(|value| value.to_str().map(ToOwned::to_owned));
    Ok((answer.status().as_u16(), selected.transpose()?))
}

#[tokio::test]
async fn a_token_in_a_subprotocol_opens_a_socket_and_is_not_echoed() -> Result<()> {
    let base = shared().await.any_gateway();
    let key = Api::create_workspace(base, "subprotocols").await?;
    let node = key.create_broker_node("node_box", "box").await?;
    let observer = json!({ "name": "all", "scopes": ["stream:read"] });
    let observer = key.post("/v1/observer-tokens", observer).await?.success()?;
    let observer = observer["token"].as_str().unwrap_or_default();
    let selected = || Some("relay.v1".to_owned());
    for (path, token) in [("/v1/node/ws", node.token.as_str()), ("/v1/ws", observer), ("/v1/ws", key.token())] {
        let url = format!("{base}{path}");
        let carrier = format!("relay.token.{token}");
        for offered in
            [format!("relay.v1, {carrier}"), format!("{carrier},relay.v1"), format!("other, {carrier}, relay.v1")]
        {
            assert_eq!(upgrade(&url, &offered).await?, (101, selected()), "{path}");
        }
        // Nothing but the token is offered: none is selected.
        assert_eq!(upgrade(&url, &carrier).await?, (101, None), "{path}");
        for refused in ["relay.v1", "relay.v1, relay.token.", "relay.v1, relay.token.nonsense"] {
            assert_eq!(upgrade(&url, refused).await?.0, 401, "{path}: {refused}");
        }
        // Query and header come first.
        let wrong = format!("relay.v1, relay.token.{}", token.replace("_live_", "_live_0"));
        assert_eq!(upgrade(&url, &wrong).await?.0, 401, "{path}");
        assert_eq!(upgrade(&format!("{url}?token={token}"), &wrong).await?, (101, selected()), "{path}");
        let header = Raw::new("GET", &url).upgrade().bearer(token).header("sec-websocket-protocol", &wrong);
        assert_eq!(header.send().await?.status, 101, "{path}");
    }
    // Other routes take no token from there.
    let plain = Raw::new("GET", format!("{base}/v1/workspace/events/stream"))
        .header("sec-websocket-protocol", format!("relay.token.{}", key.token()));
    plain.send().await?.refused(401, "unauthorized")?;
    Ok(())
}
