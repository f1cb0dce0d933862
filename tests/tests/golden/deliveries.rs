//! Nodes over REST, deliveries of poll and http_push nodes, dead letters.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::receiver::{Received, Receiver, Reply};
use relay_testkit::wait;
use serde_json::Value;

use crate::walk::{Walk, ask, ask_all, ask_with, text};

const SOON: Duration = Duration::from_secs(40);

#[tokio::test]
async fn nodes() -> Result<()> {
    let walk = Walk::new("nodes").await?;
    let (_, ada) = walk.agent("ada").await?;
    walk.agent("bob").await?;
    let key = &walk.key;
    let made = ask(
        key,
        r#"POST /v1/nodes {"node_id":"node_box","name":"box","kind":"ws","role":"broker","machine_id":"m-1","capabilities":["spawn:sh",{"name":"build","kind":"action"}],"max_agents":4,"tags":["b","a"],"version":"golden/1"}"#,
    )
    .await?;
    let token = text(&made, "/token")?;
    ask_with(
        key,
        r#"POST /v1/nodes {"node_id":"node_box","name":"box","kind":"ws"}"#,
        &[("x-relaycast-node-token", &token)],
    )
    .await?;
    ask_all(
        key,
        &[
            r#"POST /v1/nodes {"node_id":"node_other","name":"box"}"#,
            r#"POST /v1/nodes {"name":"hook","kind":"http_push","delivery":{"url":"http://127.0.0.1:9/hook","ack_mode":"on_2xx","auth":{"type":"bearer","token":"secret"}}}"#,
            r#"POST /v1/nodes {"name":"headers","kind":"http_push","delivery":{"url":"http://127.0.0.1:9/hook","auth":{"type":"static_headers","headers":{"x-b":"1","x-a":"2"}}}}"#,
            r#"POST /v1/nodes {"name":"signed","kind":"http_push","delivery":{"url":"http://127.0.0.1:9/hook","auth":{"type":"hmac_sha256","secret":"secret"}}}"#,
            r#"POST /v1/nodes {"name":"queue","kind":"poll"}"#,
            r#"POST /v1/nodes {"name":"wrong","kind":"http_push"}"#,
            r#"POST /v1/nodes {"name":"wrong","kind":"http_push","delivery":{"url":"http://10.0.0.1/hook"}}"#,
            r#"POST /v1/nodes {"name":"wrong","kind":"carrier-pigeon"}"#,
            r#"POST /v1/nodes {"name":"wrong","role":"direct","max_agents":2}"#,
            "POST /v1/nodes {}",
            "GET /v1/nodes",
            "GET /v1/nodes?capability=spawn:sh",
            "GET /v1/nodes?name=box",
            "GET /v1/nodes/box",
            "GET /v1/nodes/nowhere",
            r#"PATCH /v1/nodes/hook {"delivery":{"ordering":"seq"}}"#,
            r#"PATCH /v1/nodes/hook {"delivery":{"ordering":"random"}}"#,
            r#"PATCH /v1/nodes/nowhere {"delivery":{"ordering":"seq"}}"#,
            r#"POST /v1/nodes/box/agents {"agent_name":"bob","session_ref":"s-1","priority":2}"#,
            r#"POST /v1/nodes/box/agents {"agent_name":"nobody"}"#,
            r#"POST /v1/nodes/nowhere/agents {"agent_name":"bob"}"#,
            "POST /v1/nodes/box/agents {}",
            "GET /v1/nodes/box/agents",
            "GET /v1/nodes/nowhere/agents",
            "DELETE /v1/nodes/box/agents/bob",
            "DELETE /v1/nodes/box/agents/bob",
            "DELETE /v1/nodes/box/agents/nobody",
            "DELETE /v1/nodes/box/providers/default",
            "DELETE /v1/nodes/box/providers/nothing",
        ],
    )
    .await?;
    ask_all(&ada, &["GET /v1/nodes", r#"POST /v1/nodes {"name":"x"}"#, "POST /v1/agent/node-token {}"]).await?;
    ask_all(key, &[r#"POST /v1/nodes/box/agents {"agent_name":"ada"}"#, "GET /v1/nodes/direct-ada"]).await?;
    ask_all(&ada, &["POST /v1/agent/node-token {}"]).await?;
    walk.end()
}

/// The deliveries that a claim gave, by id.
fn ids(answer: &Value) -> Vec<String> {
    let rows = answer["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    rows.iter().filter_map(|row| row["id"].as_str()).map(str::to_owned).collect()
}

#[tokio::test]
async fn claimed_deliveries_and_dead_letters() -> Result<()> {
    let walk = Walk::new("deliveries").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let key = &walk.key;
    ask_all(
        key,
        &[r#"POST /v1/nodes {"name":"queue","kind":"poll"}"#, r#"POST /v1/nodes/queue/agents {"agent_name":"bob"}"#],
    )
    .await?;
    for number in 1..=6 {
        ask(&ada, &format!(r#"POST /v1/dm {{"to":"bob","text":"number {number}"}}"#)).await?;
    }
    let claimed = ids(&ask(&bob, r#"POST /v1/deliveries/claim {"limit":5,"lease_ms":600000}"#).await?);
    let [acked, failed, retried, deferred, ..] = claimed.as_slice() else { anyhow::bail!("claimed {claimed:?}") };
    ask_all(
        &bob,
        &[
            r#"POST /v1/deliveries/claim {"limit":0}"#,
            "POST /v1/deliveries/claim {}",
            "POST /v1/deliveries/claim {}",
            &format!("POST /v1/deliveries/{acked}/ack"),
            &format!("POST /v1/deliveries/{acked}/ack {{}}"),
            &format!(r#"POST /v1/deliveries/{failed}/fail {{"error":"broken","retryable":false}}"#),
            &format!("POST /v1/deliveries/{failed}/fail"),
            &format!(r#"POST /v1/deliveries/{retried}/fail {{"error":"busy","retryable":true}}"#),
            &format!(r#"POST /v1/deliveries/{retried}/fail {{"error":7}}"#),
            &format!(
                r#"POST /v1/deliveries/{deferred}/defer {{"available_at":"2099-01-01T00:00:00Z","reason":"later"}}"#
            ),
            &format!("POST /v1/deliveries/{deferred}/defer {{}}"),
            &format!("GET /v1/deliveries/{acked}/attempts"),
            "POST /v1/deliveries/del_7_7/ack",
            "POST /v1/deliveries/del_7_7/fail",
            r#"POST /v1/deliveries/del_7_7/defer {"available_at":"2099-01-01T00:00:00Z"}"#,
            "GET /v1/deliveries/del_7_7/attempts",
            "GET /v1/deliveries",
            "GET /v1/deliveries?status=acked",
            "GET /v1/deliveries?status=failed",
            "GET /v1/deliveries?status=dead_lettered&limit=1",
            "GET /v1/deliveries?status=lost",
        ],
    )
    .await?;
    ask(&ada, &format!("POST /v1/deliveries/{acked}/ack")).await?;
    letters(&walk, &ada, failed).await?;
    ask_all(
        key,
        &["DELETE /v1/agents/bob", "GET /v1/dead-letters?reason=agent_deleted", "GET /v1/dead-letters/summary"],
    )
    .await?;
    ask_all(
        key,
        &[
            r#"POST /v1/dead-letters/purge {"filter":{"reason":"agent_deleted"},"dry_run":true}"#,
            r#"POST /v1/dead-letters/purge {"filter":{}}"#,
            "POST /v1/dead-letters/purge {}",
            "GET /v1/dead-letters",
        ],
    )
    .await?;
    walk.end()
}

/// Dead letters, redriven one by one and by a filter. `id` failed for good.
async fn letters(walk: &Walk, ada: &Api, id: &str) -> Result<()> {
    let key = &walk.key;
    let (_, eve) = walk.agent("eve").await?;
    ask(ada, r#"POST /v1/dm {"to":"eve","text":"short-lived","ttl_ms":1000}"#).await?;
    ask(&eve, "GET /v1/deliveries").await?;
    let aside = walk.aside(key);
    wait::until_ok("a letter to expire", SOON, || async {
        let letters = aside.get("/v1/dead-letters?reason=ttl_expired").await?.success()?;
        ensure!(letters[0].is_object(), "none yet");
        anyhow::Ok(())
    })
    .await?;
    ask_all(
        key,
        &[
            "GET /v1/dead-letters",
            "GET /v1/dead-letters?limit=1",
            "GET /v1/dead-letters?reason=ttl_expired&agent=eve",
            "GET /v1/dead-letters?reason=boredom",
            "GET /v1/dead-letters?agent=nobody",
            "GET /v1/dead-letters/summary",
            &format!("GET /v1/dead-letters/{id}"),
            "GET /v1/dead-letters/del_7_7",
            &format!(r#"POST /v1/dead-letters/redrive {{"delivery_id":"{id}","dry_run":true}}"#),
            &format!(r#"POST /v1/dead-letters/redrive {{"delivery_id":"{id}"}}"#),
            &format!(r#"POST /v1/dead-letters/redrive {{"delivery_id":"{id}"}}"#),
            &format!("GET /v1/dead-letters/{id}"),
            r#"POST /v1/dead-letters/redrive {"filter":{"reason":"ttl_expired"},"dry_run":true}"#,
            "POST /v1/dead-letters/redrive {}",
            r#"POST /v1/dead-letters/redrive {"delivery_id":"del_7_7"}"#,
            "GET /v1/dead-letters/redrives/7",
        ],
    )
    .await?;
    let begun = ask(key, r#"POST /v1/dead-letters/redrive {"filter":{"reason":"ttl_expired"},"rate":100}"#).await?;
    let path = format!("/v1/dead-letters/redrives/{}", text(&begun, "/redrive_id")?);
    wait::until_ok("a redrive to end", SOON, || async {
        let shown = aside.get(&path).await?.success()?;
        ensure!(shown["status"] == "finished", "{shown}");
        anyhow::Ok(())
    })
    .await?;
    ask_all(key, &[&format!("GET {path}"), &format!("DELETE /v1/dead-letters/{id}"), "GET /v1/dead-letters"]).await
}

/// An http_push node for one more agent.
async fn pushed(walk: &Walk, receiver: &Receiver, agent: &str, delivery: &str) -> Result<()> {
    walk.agent(agent).await?;
    let url = receiver.url(&format!("/{agent}"));
    let node = format!(r#"{{"name":"of-{agent}","kind":"http_push","delivery":{{"url":"{url}",{delivery}}}}}"#);
    ask(&walk.key, &format!("POST /v1/nodes {node}")).await?;
    ask(&walk.key, &format!(r#"POST /v1/nodes/of-{agent}/agents {{"agent_name":"{agent}"}}"#)).await?;
    Ok(())
}

#[tokio::test]
async fn pushes() -> Result<()> {
    let walk = Walk::new("pushes").await?;
    let (_, ada) = walk.agent("ada").await?;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    receiver.script("/answering", [Reply::json(200, r#"{"ok":true,"ack":true}"#)]);
    receiver.script("/refusing", [Reply::json(422, r#"{"error":"not for me"}"#)]);
    let agents = [
        ("plain", r#""ack_mode":"manual""#),
        ("bearing", r#""ack_mode":"on_2xx","auth":{"type":"bearer","token":"a-token"}"#),
        ("heading", r#""ack_mode":"on_2xx","auth":{"type":"static_headers","headers":{"X-B":"1","X-A":"2"}}"#),
        (
            "signing",
            r#""ack_mode":"on_2xx","auth":{"type":"hmac_sha256","secret":"a-secret","signed_payload":"timestamp.body"}"#,
        ),
        ("answering", r#""ack_mode":"response""#),
        ("refusing", r#""ack_mode":"on_2xx""#),
    ];
    for (agent, delivery) in agents {
        pushed(&walk, &receiver, agent, delivery).await?;
    }
    for (agent, _) in agents {
        ask(&ada, &format!(r#"POST /v1/dm {{"to":"{agent}","text":"to one"}}"#)).await?;
        let path = format!("/{agent}");
        wait::until("a push", SOON, || async { !receiver.calls(&path).is_empty() }).await;
    }
    let posted = ask(&ada, r#"POST /v1/channels/general/messages {"text":"to all @plain","mode":"steer"}"#).await?;
    let posted = text(&posted, "/id")?;
    ask(&ada, &format!(r#"POST /v1/messages/{posted}/replies {{"text":"in a thread"}}"#)).await?;
    ask(&ada, r#"POST /v1/dm/group {"participants":["plain","bearing"],"text":"to a group"}"#).await?;
    for (path, count) in [("/plain", 4), ("/bearing", 4), ("/heading", 3), ("/signing", 3), ("/answering", 3)] {
        wait::until("pushes", SOON, || async { receiver.calls(path).len() >= count }).await;
    }
    ask_all(
        &ada,
        &[
            &format!(r#"POST /v1/messages/{posted}/reactions {{"emoji":"tada"}}"#),
            r#"POST /v1/channels {"name":"plans"}"#,
            r#"POST /v1/channels/plans/invite {"agent_name":"plain"}"#,
        ],
    )
    .await?;
    let of = |call: &Received, kind: &str| call.header("x-relaycast-event") == kind;
    let joined = |call: &Received| of(call, "member.joined") && call.json()["data"]["channel"] == "plans";
    for (agent, _) in agents {
        let path = format!("/{agent}");
        let reacted = || async { receiver.events(&path).iter().any(|call| of(call, "message.reacted")) };
        wait::until("a reaction", SOON, reacted).await;
        wait::until("a member", SOON, || async { receiver.events(&path).iter().any(|call| joined(call)) }).await;
    }
    // An agent that was bound early may get the events of later ones, which all join `#general`.
    walk.recording.add_calls(&receiver, |call| call.is_delivery() || of(call, "message.reacted") || joined(call));
    walk.end()
}
