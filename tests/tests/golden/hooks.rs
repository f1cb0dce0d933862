//! Inbound webhooks, and what subscriptions call.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_testkit::receiver::{Receiver, Reply};
use relay_testkit::wait;

use crate::walk::{Walk, ask, ask_all, text};

const SOON: Duration = Duration::from_secs(40);

#[tokio::test]
async fn webhooks() -> Result<()> {
    let walk = Walk::new("webhooks").await?;
    let (_, ada) = walk.agent("ada").await?;
    let key = &walk.key;
    let made = ask(key, r##"POST /v1/webhooks {"name":"ci","channel":"#general"}"##).await?;
    let (id, url) = (text(&made, "/webhook_id")?, text(&made, "/url")?);
    let caller = key.with_token(&text(&made, "/token")?);
    ask_all(
        key,
        &[
            r#"POST /v1/webhooks {"channel":"general"}"#,
            r#"POST /v1/webhooks {"channel":"nowhere"}"#,
            "POST /v1/webhooks {}",
            "GET /v1/webhooks",
            &format!(r#"POST {url} {{"text":"x"}}"#),
        ],
    )
    .await?;
    ask_all(
        &caller,
        &[
            &format!(r#"POST {url} {{"text":"built, @ada"}}"#),
            &format!(r#"POST {url} {{"message":"again","source":"github"}}"#),
            &format!(
                r#"POST {url} {{"text":"x","source":"github","author":"octo cat","blocks":[{{"type":"divider"}}]}}"#
            ),
            &format!(r#"POST {url} {{"payload":{{"b":1,"a":[2]}}}}"#),
            &format!(r#"POST {url} {{"action":"opened"}}"#),
            &format!(r#"POST {url} {{"text":7}}"#),
            r#"POST /v1/hooks/wh_7 {"text":"x"}"#,
        ],
    )
    .await?;
    ask_all(&walk.anonymous(), &[&format!(r#"POST {url} {{"text":"x"}}"#)]).await?;
    ask_all(&ada, &["GET /v1/channels/general/messages", "GET /v1/deliveries", "GET /v1/inbox"]).await?;
    ask_all(key, &[&format!("DELETE /v1/webhooks/{id}"), &format!("DELETE /v1/webhooks/{id}"), "GET /v1/webhooks"])
        .await?;
    ask(&caller, &format!(r#"POST {url} {{"text":"late"}}"#)).await?;
    walk.end()
}

#[tokio::test]
async fn subscriptions() -> Result<()> {
    let walk = Walk::new("subscriptions").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let key = &walk.key;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    let (all, signed, mentions) = (receiver.url("/all"), receiver.url("/signed"), receiver.url("/mentions"));
    let secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
    let made = ask(key, &format!(r#"POST /v1/subscriptions {{"events":["*"],"url":"{all}","headers":{{"X-Env":"golden"}},"secret":"a-secret"}}"#)).await?;
    let one = format!("/v1/subscriptions/{}", text(&made, "/id")?);
    ask_all(
        &ada,
        &[
            &format!(r#"POST /v1/subscriptions {{"events":["message.created"],"url":"{signed}","signature_scheme":"standard-webhooks","secret":"{secret}"}}"#),
            &format!(r#"POST /v1/subscriptions {{"events":["message.created","thread.reply"],"filter":{{"channel":"general","mentions":"bob"}},"url":"{mentions}"}}"#),
            r#"POST /v1/subscriptions {"events":[],"url":"https://example.org/"}"#,
            r#"POST /v1/subscriptions {"events":["nonsense"],"url":"https://example.org/"}"#,
            r#"POST /v1/subscriptions {"events":["*"],"url":"ftp://example.org/"}"#,
            "GET /v1/subscriptions",
        ],
    )
    .await?;
    let posted = ask(&ada, r#"POST /v1/channels/general/messages {"text":"for @bob","data":{"b":1,"a":2}}"#).await?;
    let posted = text(&posted, "/id")?;
    let made = ask(&ada, r#"POST /v1/actions {"name":"count","handler_agent":"ada","description":""}"#).await?;
    ensure!(made["ok"] == true, "{made}");
    let upload = r#"POST /v1/files/upload {"filename":"a","content_type":"text/plain","size_bytes":1}"#;
    let declared = ask(&ada, upload).await?;
    relay_acceptance::raw::Raw::new("PUT", text(&declared, "/upload_url")?).body("a").send().await?;
    let hook = ask(key, r#"POST /v1/webhooks {"name":"ci","channel":"general"}"#).await?;
    ask(&key.with_token(&text(&hook, "/token")?), &format!(r#"POST {} {{"text":"hooked"}}"#, text(&hook, "/url")?))
        .await?;
    ask_all(
        &ada,
        &[
            &format!("POST /v1/files/{}/complete", text(&declared, "/id")?),
            &format!(r#"POST /v1/messages/{posted}/replies {{"text":"in a thread, @bob"}}"#),
            &format!(r#"POST /v1/messages/{posted}/reactions {{"emoji":"tada"}}"#),
            &format!("DELETE /v1/messages/{posted}/reactions/tada"),
            &format!(r#"PATCH /v1/messages/{posted} {{"text":"corrected"}}"#),
            r#"POST /v1/dm {"to":"bob","text":"between us"}"#,
            r#"POST /v1/dm/group {"participants":["bob"],"name":"us","text":"in a group"}"#,
            r#"POST /v1/channels {"name":"plans","topic":"first"}"#,
            r#"PATCH /v1/channels/plans {"topic":"second"}"#,
            r#"POST /v1/channels/plans/invite {"agent_name":"bob"}"#,
            r#"POST /v1/agents/ada/events {"type":"status.blocked"}"#,
            r#"POST /v1/agents/ada/events {"type":"status.changed","payload":{"status":"idle"}}"#,
        ],
    )
    .await?;
    ask_all(
        &bob,
        &[
            &format!("POST /v1/messages/{posted}/read"),
            "POST /v1/channels/plans/leave",
            "DELETE /v1/channels/plans",
            "POST /v1/actions/count/invoke {}",
        ],
    )
    .await?;
    // The last event: the others were called for before it, or at the same time.
    let expected = [
        "message.created",
        "thread.reply",
        "message.reacted",
        "message.updated",
        "message.read",
        "dm.received",
        "group_dm.received",
        "channel.created",
        "channel.updated",
        "channel.archived",
        "member.joined",
        "member.left",
        "agent.status.blocked",
        "agent.status.changed",
        "webhook.received",
        "file.uploaded",
        "action.invoked",
    ];
    let came = |kind: &str| receiver.received().iter().any(|call| call.path == "/all" && call.json()["type"] == kind);
    for kind in expected {
        wait::until(&format!("a call for {kind}"), SOON, || async { came(kind) }).await;
    }
    for path in ["/signed", "/mentions"] {
        wait::until("a call", SOON, || async { receiver.received().iter().any(|call| call.path == path) }).await;
    }
    walk.recording.add_calls(&receiver, |_| true);
    ask_all(
        key,
        &[
            &format!("GET {one}"),
            "GET /v1/subscriptions/sub_7",
            &format!("GET {one}/deliveries?limit=0"),
            &format!("GET {one}/deliveries?status=dead_letter"),
            "GET /v1/subscriptions/sub_7/deliveries",
            &format!(r#"POST {one}/replay {{"since":"2099-01-01T00:00:00Z"}}"#),
            &format!("POST {one}/replay {{}}"),
            r#"POST /v1/subscriptions/sub_7/replay {"since":"2099-01-01T00:00:00Z"}"#,
            &format!("POST {one}/deliveries/7/replay"),
            &format!("DELETE {one}"),
            &format!("DELETE {one}"),
        ],
    )
    .await?;
    walk.end()
}

/// Waits beside the recording until the log has an event of this type.
async fn logged(walk: &Walk, kind: &str) -> Result<()> {
    let aside = walk.aside(&walk.key);
    wait::until_ok(kind, SOON, || async {
        let log = aside.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
        ensure!(log.to_string().contains(kind), "{log}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn a_subscriber_that_answers_410() -> Result<()> {
    let walk = Walk::new("gone_subscriber").await?;
    let (_, ada) = walk.agent("ada").await?;
    let receiver = Receiver::start(|_, _| Reply::Status(410)).await?;
    let url = receiver.url("/gone");
    let made =
        ask(&walk.key, &format!(r#"POST /v1/subscriptions {{"events":["message.created"],"url":"{url}"}}"#)).await?;
    ask(&ada, r#"POST /v1/channels/general/messages {"text":"unheard"}"#).await?;
    logged(&walk, "subscription.disabled").await?;
    let one = format!("GET /v1/subscriptions/{}", text(&made, "/id")?);
    ask_all(&walk.key, &[&one, "GET /v1/workspace/events"]).await?;
    walk.end()
}

#[tokio::test]
async fn a_recipient_that_answers_410() -> Result<()> {
    let walk = Walk::new("gone_recipient").await?;
    let (_, ada) = walk.agent("ada").await?;
    walk.agent("bob").await?;
    let receiver = Receiver::start(|_, call| Reply::Status(if call.path == "/owner" { 200 } else { 410 })).await?;
    let (owner, hook) = (receiver.url("/owner"), receiver.url("/hook"));
    ask_all(
        &walk.key,
        &[
            &format!(r#"POST /v1/subscriptions {{"events":["node.binding.disabled"],"url":"{owner}"}}"#),
            &format!(r#"POST /v1/nodes {{"name":"hook","kind":"http_push","delivery":{{"url":"{hook}","ack_mode":"on_2xx"}}}}"#),
            r#"POST /v1/nodes/hook/agents {"agent_name":"bob"}"#,
        ],
    )
    .await?;
    ask(&ada, r#"POST /v1/dm {"to":"bob","text":"unheard"}"#).await?;
    logged(&walk, "node.binding.disabled").await?;
    let reported = || async { receiver.received().iter().any(|call| call.path == "/owner") };
    wait::until("the owner to be called", SOON, reported).await;
    ask_all(&walk.key, &["GET /v1/nodes/hook/agents", "GET /v1/workspace/events"]).await?;
    walk.recording.add_calls(&receiver, |call| call.path == "/owner");
    walk.end()
}

#[tokio::test]
async fn calls_that_are_refused() -> Result<()> {
    let walk = Walk::new("subscription_calls").await?;
    let (_, ada) = walk.agent("ada").await?;
    let key = &walk.key;
    let receiver = Receiver::start(|_, _| Reply::json(400, r#"{"no":1}"#)).await?;
    let url = receiver.url("/refused");
    let made = ask(key, &format!(r#"POST /v1/subscriptions {{"events":["message.created"],"url":"{url}"}}"#)).await?;
    let one = format!("/v1/subscriptions/{}", text(&made, "/id")?);
    ask(&ada, r#"POST /v1/channels/general/messages {"text":"unwanted"}"#).await?;
    let aside = walk.aside(key);
    let letter = wait::until_ok("a dead letter", SOON, || async {
        let rows = aside.get(&format!("{one}/deliveries?status=dead_letter")).await?.success()?;
        ensure!(rows[0]["id"].is_string() || rows[0]["id"].is_number(), "none yet: {rows}");
        anyhow::Ok(rows[0]["id"].to_string().trim_matches('"').to_owned())
    })
    .await?;
    ask_all(key, &[&format!("GET {one}/deliveries"), &format!("GET {one}/deliveries?status=dead_letter")]).await?;
    ask(key, &format!("POST {one}/deliveries/{letter}/replay")).await?;
    wait::until("another call", SOON, || async { receiver.count() >= 2 }).await;
    walk.recording.add_calls(&receiver, |_| true);
    walk.end()
}
