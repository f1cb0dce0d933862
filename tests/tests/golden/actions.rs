//! Actions of agents, their invocations, triggers.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_testkit::wait;

use crate::walk::{Walk, ask, ask_all, ask_with, text};

const SOON: Duration = Duration::from_secs(40);

#[tokio::test]
async fn actions() -> Result<()> {
    let walk = Walk::new("actions").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let key = &walk.key;
    let count = r#"POST /v1/actions {"name":"count","description":"counts","handler_agent":"bob","input_schema":{"type":"object","required":["n"],"properties":{"n":{"type":"integer"}}},"output_schema":{"type":"object"}}"#;
    ask_all(
        &bob,
        &[
            count,
            count,
            r#"POST /v1/actions {"name":"secret","description":"","handler_agent":"bob","available_to":["cyd"]}"#,
            r#"POST /v1/actions {"name":"any","description":"","handler_agent":"bob"}"#,
            r#"POST /v1/actions {"name":"x","handler_agent":"nobody"}"#,
            "POST /v1/actions {}",
            "GET /v1/actions",
            "GET /v1/actions/count",
        ],
    )
    .await?;
    ask_all(
        &ada,
        &[
            count,
            r#"POST /v1/actions {"name":"count","description":"","handler_agent":"ada"}"#,
            "GET /v1/actions",
            "GET /v1/actions/secret",
            "GET /v1/actions/nothing",
            "POST /v1/actions/secret/invoke {}",
            "POST /v1/actions/nothing/invoke {}",
            r#"POST /v1/actions/count/invoke {"input":{"n":"two"}}"#,
            "POST /v1/nodes/nowhere/actions/count/invoke {}",
            "DELETE /v1/actions/count",
        ],
    )
    .await?;
    ask(key, r#"POST /v1/actions/count/invoke {"input":{"n":2}}"#).await?;
    for (number, output) in
        ["{\"output\":{\"b\":1,\"a\":2},\"duration_ms\":12.4}", "{\"output\":4}", "{\"error\":\"broken\"}", "{}"]
            .iter()
            .enumerate()
    {
        let asked = ask(&ada, &format!(r#"POST /v1/actions/count/invoke {{"input":{{"n":{number}}}}}"#)).await?;
        let invocation = format!("/v1/actions/count/invocations/{}", text(&asked, "/invocation_id")?);
        ask(&ada, &format!("GET {invocation}")).await?;
        ask(&ada, &format!("POST {invocation}/complete {output}")).await?;
        ask(&bob, &format!("POST {invocation}/complete {output}")).await?;
        ask(&bob, &format!(r#"POST {invocation}/complete {{"error":"late"}}"#)).await?;
        ask(&ada, &format!("GET {invocation}")).await?;
        ask(key, &format!("GET {invocation}?explain=true")).await?;
    }
    for n in ["1", "1", "2"] {
        let asked = format!(r#"POST /v1/actions/any/invoke {{"input":{{"n":{n}}}}}"#);
        ask_with(&ada, &asked, &[("idempotency-key", "once")]).await?;
    }
    ask_all(
        &ada,
        &[
            "GET /v1/actions/count/invocations/inv_7",
            "POST /v1/actions/count/invocations/inv_7/complete {}",
            r#"POST /v1/actions/any/invoke {"input":7,"durable":true}"#,
            "GET /v1/agents/bob",
            "GET /v1/agent",
        ],
    )
    .await?;
    ask_all(&bob, &["DELETE /v1/actions/count", "DELETE /v1/actions/count", "GET /v1/actions/count"]).await?;
    ask_all(key, &["GET /v1/actions", "DELETE /v1/actions/any"]).await?;
    walk.end()
}

#[tokio::test]
async fn triggers() -> Result<()> {
    let walk = Walk::new("triggers").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let key = &walk.key;
    ask(&bob, r#"POST /v1/actions {"name":"deploy","description":"","handler_agent":"bob"}"#).await?;
    let made = ask(&ada, r##"POST /v1/triggers {"channel":"#general","pattern":"^deploy (\\d+)","mention":"@bob","action_name":"deploy"}"##).await?;
    let one = format!("/v1/triggers/{}", text(&made, "/id")?);
    ask_all(
        key,
        &[
            r#"POST /v1/triggers {"action_name":"nothing","enabled":false}"#,
            r#"POST /v1/triggers {"action_name":""}"#,
            r#"POST /v1/triggers {"action_name":"x","pattern":"("}"#,
            "POST /v1/triggers {}",
            "GET /v1/triggers",
            &format!("GET {one}"),
            "GET /v1/triggers/7",
            &format!(r#"PATCH {one} {{"mention":null}}"#),
            &format!("PATCH {one} {{}}"),
            r#"PATCH /v1/triggers/7 {"enabled":true}"#,
        ],
    )
    .await?;
    ask(&ada, r#"POST /v1/channels/general/messages {"text":"deploy 7 now"}"#).await?;
    let aside = walk.aside(key);
    wait::until_ok("the trigger to fire", SOON, || async {
        let shown = aside.get(&one).await?.success()?;
        ensure!(shown["last_triggered_at"].is_string(), "not yet: {shown}");
        anyhow::Ok(())
    })
    .await?;
    ask_all(key, &[&format!("GET {one}"), &format!("DELETE {one}"), &format!("DELETE {one}"), &format!("GET {one}")])
        .await?;
    walk.end()
}
