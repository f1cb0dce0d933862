//! Workspaces, their system prompt, observer tokens; routes without a workspace.

use anyhow::Result;

use crate::walk::{Walk, ask, ask_all, ask_with, text};

#[tokio::test]
async fn workspaces() -> Result<()> {
    let walk = Walk::new("workspaces").await?;
    let info = ask(&walk.key, "GET /v1/workspace").await?;
    let (id, name) = (text(&info, "/id")?, text(&info, "/name")?);
    let anyone = walk.anonymous();
    ask_all(
        &anyone,
        &[
            "GET /health",
            "GET /ready",
            "GET /openapi.json",
            "GET /docs",
            "GET /console",
            "GET /console/app.js",
            "GET /console/nothing.js",
            "GET /v1/nothing",
            "HEAD /health",
            "POST /health {}",
            &format!("GET /v1/workspaces/by-name/{name}"),
            "GET /v1/workspaces/by-name/nobody-has-this-name",
            &format!(r#"POST /v1/workspaces {{"name":"{name}"}}"#),
            r#"POST /v1/workspaces {"name":""}"#,
            "POST /v1/workspaces {}",
        ],
    )
    .await?;
    ask_all(
        &walk.key,
        &[
            &format!(r#"POST /v1/workspaces {{"name":"{name}"}}"#),
            r#"PATCH /v1/workspace {"metadata":{"b":1,"a":[null,"x"]}}"#,
            r#"PATCH /v1/workspace {"delivery_ttl_seconds":120}"#,
            r#"PATCH /v1/workspace {"delivery_ttl_seconds":59}"#,
            r#"PATCH /v1/workspace {"plan":"free"}"#,
            "PATCH /v1/workspace {}",
            "GET /v1/workspace",
            "GET /v1/workspace/system-prompt",
            r#"PUT /v1/workspace/system-prompt {"prompt":"be brief"}"#,
            "GET /v1/workspace/system-prompt",
            r#"PUT /v1/workspace/system-prompt {"reset":true}"#,
            "PUT /v1/workspace/system-prompt {}",
            "GET /v1/workspace/metrics",
            "GET /v1/workspace/usage?since=2026-01-01T00:00:00Z&until=2026-01-02T00:00:00Z&granularity=hour",
            "GET /v1/workspace/usage?since=yesterday",
            "GET /v1/workspace/usage?granularity=fortnight",
            "GET /v1/console/stats",
            "GET /v1/console/agents",
            "GET /v1/console/costs",
            "GET /v1/activity",
        ],
    )
    .await?;
    let keyed = format!(r#"POST /v1/workspaces {{"name":"golden-{}"}}"#, uuid::Uuid::new_v4());
    let strong = uuid::Uuid::new_v4().to_string();
    for key in ["weak", &strong, &strong] {
        let made = ask_with(&anyone, &keyed, &[("idempotency-key", key)]).await?;
        if key == strong {
            ask(&walk.key.with_token(&text(&made, "/api_key")?), "GET /v1/workspace").await?;
        }
    }
    let made = ask(&anyone, &format!(r#"POST /v1/workspaces {{"name":"golden-{}"}}"#, uuid::Uuid::new_v4())).await?;
    let another = walk.key.with_token(&text(&made, "/api_key")?);
    ask_all(&another, &["DELETE /v1/workspace", "DELETE /v1/workspace"]).await?;
    let (_, ada) = walk.agent("ada").await?;
    ask_all(&ada, &["GET /v1/workspace", "GET /v1/workspace/system-prompt", "DELETE /v1/workspace"]).await?;
    ask_all(&walk.key, &["DELETE /v1/workspaces/7", &format!("DELETE /v1/workspaces/{id}"), "GET /v1/workspace"])
        .await?;
    ask_all(&ada, &["GET /v1/agent"]).await?;
    ask_all(&anyone, &[&format!("GET /v1/workspaces/by-name/{name}")]).await?;
    walk.end()
}

#[tokio::test]
async fn observer_tokens() -> Result<()> {
    let walk = Walk::new("observer_tokens").await?;
    let (_, ada) = walk.agent("ada").await?;
    let made = ask(
        &walk.key,
        r#"POST /v1/observer-tokens {"name":"wall","description":"on the wall","scopes":["messages:read","stream:read"],"filters":{"channel_names":["general"],"include_dms":true},"expires_at":"2099-01-01T00:00:00Z"}"#,
    )
    .await?;
    let (id, token) = (text(&made, "/id")?, text(&made, "/token")?);
    let observer = walk.key.with_token(&token);
    ask_all(
        &observer,
        &[
            "GET /v1/workspace",
            "GET /v1/channels/general/messages",
            "GET /v1/agents",
            "GET /v1/deliveries",
            r#"POST /v1/channels {"name":"no"}"#,
        ],
    )
    .await?;
    let one = format!("/v1/observer-tokens/{id}");
    ask_all(
        &walk.key,
        &[
            r#"POST /v1/observer-tokens {"name":"plain","scopes":["stream:read"]}"#,
            r#"POST /v1/observer-tokens {"name":"wall","scopes":[]}"#,
            r#"POST /v1/observer-tokens {"name":"wall","scopes":["everything:read"]}"#,
            r#"POST /v1/observer-tokens {"scopes":["stream:read"]}"#,
            "GET /v1/observer-tokens",
            &format!("GET {one}"),
            &format!(r#"PATCH {one} {{"name":"screen","description":null}}"#),
            &format!("PATCH {one} {{}}"),
            &format!("POST {one}/rotate"),
            "GET /v1/observer-tokens/ot_7",
            r#"PATCH /v1/observer-tokens/ot_7 {"name":"x"}"#,
            "POST /v1/observer-tokens/ot_7/rotate",
            "DELETE /v1/observer-tokens/ot_7",
        ],
    )
    .await?;
    ask(&observer, "GET /v1/workspace").await?;
    ask_all(&walk.key, &[&format!("DELETE {one}"), &format!("GET {one}"), "GET /v1/observer-tokens"]).await?;
    ask(&ada, "GET /v1/observer-tokens").await?;
    walk.end()
}
