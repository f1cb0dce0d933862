//! Refusals of each class, on every route where they depend on nothing: tokens, bodies, sizes, methods.

use anyhow::Result;
use relay_acceptance::access::{Class, ROUTES};
use relay_acceptance::raw::Raw;

use crate::walk::{Walk, ask_with};

/// Routes that do something for one of the tokens, whatever the body, or that show the time.
const ACTING: [&str; 5] =
    ["/v1/workspace", "/v1/ws", "/v1/agents/heartbeat", "/v1/agents/disconnect", "/v1/workspace/usage"];

/// A path with names that do not exist.
fn filled(route: &str) -> String {
    let parts = route.split('/').map(|part| if part.starts_with('{') { "7" } else { part });
    parts.collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn refusals() -> Result<()> {
    let walk = Walk::new("refusals").await?;
    let (ada, _) = walk.agent("ada").await?;
    let base = walk.key.base();
    let node = walk.key.create_broker_node("node_box", "box").await?;
    let dead = format!("at_live_{}", "0".repeat(32));
    let tokens = ["", "nonsense", &dead, walk.key.token(), &ada.token, &node.token];
    for (method, route, class, body) in ROUTES {
        let acts = matches!(class, Class::None | Class::MaybeKey) || ACTING.contains(route);
        let path = filled(route);
        for token in tokens.iter().take(if acts { 3 } else { tokens.len() }).filter(|_| *class != Class::None) {
            let request = Raw::new(method, format!("{base}{path}")).bearer(token);
            // A body of another shape is refused after the caller is known, and changes nothing.
            let request = if body.is_empty() { request } else { request.json(r#"{"metadata":7,"name":7,"text":7}"#) };
            if !route.ends_with("/events/stream") {
                request.send().await?;
            }
        }
    }
    walk.end()
}

#[tokio::test]
async fn bodies_and_methods() -> Result<()> {
    let walk = Walk::new("bodies").await?;
    let (ada, api) = walk.agent("ada").await?;
    let base = walk.key.base();
    let url = format!("{base}/v1/channels/general/messages");
    let post = || Raw::new("POST", &url).bearer(&ada.token);
    post().json("{broken").send().await?;
    post().json("[]").send().await?;
    post().json("").send().await?;
    post().body(r#"{"text":"no content type"}"#).send().await?;
    post().header("content-type", "text/plain").body(r#"{"text":"as text"}"#).send().await?;
    post().json(b"{\"text\":\"\xff\"}".to_vec()).send().await?;
    post().json(r#"{"text":"a\u0000b"}"#).send().await?;
    post().json(r#"{"text":"é \u2028 <&> \"quoted\" \/ \ud83d\ude00"}"#).send().await?;
    post().json(format!(r#"{{"text":"{}"}}"#, "x".repeat(100 * 1024))).send().await?;
    post().json(format!(r#"{{"text":"x","data":{}1{}}}"#, "[".repeat(200), "]".repeat(200))).send().await?;
    for (method, path) in [("PUT", "/v1/agents"), ("DELETE", "/health"), ("TRACE", "/v1/agents"), ("POST", "/nowhere")]
    {
        Raw::new(method, format!("{base}{path}")).bearer(walk.key.token()).send().await?;
    }
    Raw::new("HEAD", format!("{base}/v1/workspace")).bearer(walk.key.token()).send().await?;
    Raw::new("GET", format!("{base}//v1/workspace")).bearer(walk.key.token()).send().await?;
    Raw::new("OPTIONS", &url)
        .header("origin", "https://example.org")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization, idempotency-key, x-sdk-version")
        .send()
        .await?;
    Raw::new("GET", format!("{base}/v1/workspace"))
        .bearer(walk.key.token())
        .header("origin", "https://example.org")
        .header("x-request-id", "mine")
        .send()
        .await?;
    for header in ["idempotency-key", "x-idempotency-key"] {
        for value in ["", &"x".repeat(256), "ok"] {
            let body = r#"POST /v1/channels/general/messages {"text":"keyed"}"#;
            ask_with(&api, body, &[(header, value)]).await?;
        }
    }
    for path in ["/v1/node/ws", "/v1/ws"] {
        Raw::new("GET", format!("{base}{path}")).bearer(walk.key.token()).send().await?;
        for token in ["", "nonsense", &ada.token] {
            Raw::new("GET", format!("{base}{path}?token={token}")).upgrade().send().await?;
        }
    }
    walk.end()
}

/// One byte more than is taken. Apart, since its answer may come before the body was sent.
#[tokio::test]
async fn a_body_that_is_too_large() -> Result<()> {
    let walk = Walk::new("too_large").await?;
    let (ada, _) = walk.agent("ada").await?;
    let url = format!("{}/v1/channels/general/messages", walk.key.base());
    let body = format!(r#"{{"text":"{}"}}"#, "x".repeat(1024 * 1024));
    Raw::new("POST", &url).bearer(&ada.token).json(body).send().await?;
    walk.end()
}
