//! Agents whose program is started again by their policy.

use anyhow::{Result, ensure};
use relay_testkit::proxy::TcpProxy;
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

use crate::harness::Harnesses;
use crate::scene::{SOON, Scene};

/// Arguments of a program that fails at its second message.
const FAILING: [&str; 4] = ["--exit-after", "2", "--exit-code", "3"];

async fn wait_for_event(scene: &Scene, name: &str, kind: &str) -> Result<()> {
    wait::until_ok(kind, SOON, || async {
        let events = scene.broker.events(name, kind).await?;
        ensure!(events.len() == 1, "{events:?}\n{}", scene.broker.log_tail(20));
        anyhow::Ok(())
    })
    .await
}

fn policy(more: Value) -> Value {
    let mut fields = json!({ "restartPolicy": { "maxRestarts": 1, "cooldownMs": 50 } });
    if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
        fields.extend(more);
    }
    fields
}

#[tokio::test]
async fn an_outcome_that_the_engine_does_not_know_outlives_the_program() -> Result<()> {
    let gateway = shared().await.any_gateway();
    let proxy = TcpProxy::start(gateway.trim_start_matches("http://"))?;
    let harnesses = Harnesses::at("outcomes", &proxy.through(gateway)?).await?;
    let scene = &harnesses.scene;
    let agent = harnesses.spawn("strict", "deaf", "mute", &FAILING, policy(json!({}))).await?;
    scene.sender.dm("deaf", "message-1").await?.success()?;
    wait_for_event(scene, "deaf", "delivery_injected").await?;
    proxy.cut();
    wait_for_event(scene, "deaf", "delivery_failed").await?;
    scene.broker.call("POST", "/api/input/deaf", Some(json!({ "data": "x\r" }))).await?;
    wait_for_event(scene, "deaf", "agent_restarted").await?;
    proxy.restore();
    scene.wait_unverified("deaf", 1).await?;
    assert_eq!(agent.bodies(), ["message-1"], "it was typed again");
    Ok(())
}

#[tokio::test]
async fn a_task_is_typed_once_into_a_session_that_is_resumed_twice() -> Result<()> {
    let mut harnesses = Harnesses::new("task").await?;
    let fields = policy(json!({ "task": "build the thing" }));
    let agent = harnesses.spawn("claude", "worker", "screen", &FAILING, fields).await?;
    let scene = &mut harnesses.scene;
    let tasks = || agent.messages().iter().filter(|(_, text)| text.ends_with("build the thing")).count();
    wait::until_ok("the task", SOON, || async {
        ensure!(tasks() == 1, "{:?}", agent.messages());
        anyhow::Ok(())
    })
    .await?;
    // It is the second one and ends the program.
    scene.sender.dm("worker", "message-1").await?.success()?;
    wait_for_event(scene, "worker", "agent_restarted").await?;
    let settled = async |scene: &Scene, last: i64| {
        wait::until_ok("the ack", SOON, || async {
            let floor = scene.floor("worker").await?;
            ensure!(floor == last, "the floor is {floor}: {:?}", agent.messages());
            anyhow::Ok(())
        })
        .await
    };
    settled(scene, 1).await?;
    scene.broker.kill_and_restart().await?;
    scene.sender.dm("worker", "message-2").await?.success()?;
    settled(scene, 2).await?;
    assert_eq!(tasks(), 1, "{:?}", agent.messages());
    let processes: Vec<u32> = agent.messages().iter().map(|(pid, _)| *pid).collect();
    assert_ne!(processes.first(), processes.last(), "{processes:?}");
    Ok(())
}
