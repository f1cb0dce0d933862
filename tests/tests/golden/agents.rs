//! Agents, presence, session events.

use anyhow::Result;
use relay_testkit::client::Agent;

use crate::walk::{Walk, ask, ask_all, ask_with, text};

#[tokio::test]
async fn agents() -> Result<()> {
    let walk = Walk::new("agents").await?;
    let key = &walk.key;
    let registered = ask(
        key,
        r#"POST /v1/agents {"name":"ada","type":"human","persona":"a mathematician","metadata":{"team":"blue","b":[1]},"skills":[{"name":"sums"}],"capabilities":{"can":"count"}}"#,
    )
    .await?;
    let ada = key.with_token(&text(&registered, "/token")?);
    let (bob_is, bob) = walk.agent("bob").await?;
    ask_all(
        key,
        &[
            r#"POST /v1/agents {"name":"ada"}"#,
            r#"POST /v1/agents {"name":""}"#,
            "POST /v1/agents {}",
            r#"POST /v1/agents {"name":"x","type":"robot"}"#,
            "GET /v1/agents",
            "GET /v1/agents?status=online",
            "GET /v1/agents?status=offline",
            "GET /v1/agents?status=sleepy",
            "GET /v1/agents/ada",
            "GET /v1/agents/nobody",
            "GET /v1/agent",
            r#"PATCH /v1/agents/ada {"status":"idle","metadata":{"team":"red"},"persona":null}"#,
            r#"PATCH /v1/agents/ada {"capabilities":null}"#,
            r#"PATCH /v1/agents/ada {"status":"away"}"#,
            r#"PATCH /v1/agents/ada {"status":"gone"}"#,
            r#"PATCH /v1/agents/nobody {"persona":"x"}"#,
            "GET /v1/agents/presence",
        ],
    )
    .await?;
    ask_all(
        &ada,
        &[
            "GET /v1/agent",
            "POST /v1/agents/heartbeat {}",
            "GET /v1/agents/presence",
            "GET /v1/agents/ada",
            "POST /v1/agents/disconnect {}",
            "GET /v1/agents/presence",
            "POST /v1/agents/heartbeat {}",
            "POST /v1/agent/node-token {}",
            "POST /v1/agents/bob/rotate-token {}",
        ],
    )
    .await?;
    let rotated = ask(&ada, "POST /v1/agents/ada/rotate-token {}").await?;
    ask(&ada, "GET /v1/agent").await?;
    ask(&key.with_token(&text(&rotated, "/token")?), "GET /v1/agent").await?;
    let rotated = ask(key, "POST /v1/agents/ada/rotate-token").await?;
    let ada = key.with_token(&text(&rotated, "/token")?);
    ask(key, "POST /v1/agents/nobody/rotate-token {}").await?;
    no_node_to_run_on(&walk, &bob_is).await?;
    ask_all(key, &["DELETE /v1/agents/bob", "GET /v1/agents/bob", "DELETE /v1/agents/bob", "GET /v1/agents"]).await?;
    ask_all(&bob, &["GET /v1/agent"]).await?;
    ask_all(&ada, &["DELETE /v1/agents/ada", "GET /v1/agents/ada", "POST /v1/agents/ada/elsewhere {}"]).await?;
    walk.end()
}

/// Spawn and release where no node could do it, and the routes that some clients probe.
async fn no_node_to_run_on(walk: &Walk, bob: &Agent) -> Result<()> {
    ask_all(
        &walk.key,
        &[
            r#"POST /v1/agents/spawn {"name":"eve","cli":"sh"}"#,
            r#"POST /v1/agents/spawn {"name":"eve"}"#,
            r#"POST /v1/agents/release {"name":"bob"}"#,
            r#"POST /v1/agents/release {"name":"nobody"}"#,
            r#"POST /v1/agents/release-exact {"name":"bob"}"#,
            &format!(r#"POST /v1/agents/release-exact {{"name":"bob","expected_agent_id":"{}"}}"#, bob.id),
            "POST /v1/agents/bob/recover {}",
            "POST /v1/agents/bob/takeover {}",
            "POST /v1/agents/bob {}",
        ],
    )
    .await?;
    let exact = format!(r#"POST /v1/agents/release-exact {{"name":"bob","expected_agent_id":"{}"}}"#, bob.id);
    ask_with(&walk.key, &exact, &[("idempotency-key", "release-1")]).await?;
    let other = r#"POST /v1/agents/release-exact {"name":"bob","expected_agent_id":"7"}"#;
    ask_with(&walk.key, other, &[("idempotency-key", "release-2")]).await?;
    let spawned = r#"POST /v1/agents {"name":"bob","metadata":{"cli":"sh"}}"#;
    ask_with(&walk.key, spawned, &[("idempotency-key", "another-key")]).await?;
    for _ in 0..2 {
        ask_with(&walk.key, spawned, &[("idempotency-key", "relay-spawn:1")]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn session_events() -> Result<()> {
    let walk = Walk::new("session_events").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    for kind in [
        "status.idle",
        "status.active",
        "status.blocked",
        "status.waiting",
        "status.offline",
        "tool.called",
        "delivery.accepted",
        "terminal.output",
        "session.forked",
        "log",
        "nonsense",
    ] {
        ask(&ada, &format!(r#"POST /v1/agents/ada/events {{"type":"{kind}","payload":{{"b":1,"a":null}}}}"#)).await?;
    }
    ask_all(
        &ada,
        &[
            r#"POST /v1/agents/ada/events {"type":"status.changed","payload":{"status":"idle"}}"#,
            r#"POST /v1/agents/ada/events {"type":"status.changed"}"#,
            r#"POST /v1/agents/ada/events {"type":"error"}"#,
            "POST /v1/agents/ada/events {}",
            r#"POST /v1/agents/bob/events {"type":"log"}"#,
            "GET /v1/agents/ada/events",
            "GET /v1/agents/ada/events?type=log&limit=1",
            "GET /v1/agents/ada/events?limit=0",
            "GET /v1/agents/nobody/events",
        ],
    )
    .await?;
    ask(&walk.key, r#"POST /v1/agents/bob/events {"type":"log"}"#).await?;
    ask(&walk.key, r#"POST /v1/agents/nobody/events {"type":"log"}"#).await?;
    for payload in ["1", "1", "2"] {
        let event = format!(r#"POST /v1/agents/bob/events {{"type":"log","payload":{{"n":{payload}}}}}"#);
        ask_with(&walk.there(&bob), &event, &[("idempotency-key", "event-1")]).await?;
    }
    walk.end()
}
